"""Linear maps as autograd and `torch.func` see them: one generic Function over anything that knows its transpose.

A collective, a move from one placement to another, entering and leaving a `shard_map` body: each is a linear map that
treats every tensor of a tuple alike. Its derivative is itself on tangents, its transpose on cotangents, and, under
`vmap`, itself one dim further in. `apply` is all that the rest of the library knows of autograd's Functions.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .. import torch_internals
from . import context, op_lines, state, traced_steps


class LinearMap(Protocol):
    """A linear map of tuples of tensors, one result for each argument."""

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results, on tensors that no transform wraps."""
        ...

    def transpose(self) -> LinearMap:
        """The map of cotangents."""
        ...

    def batched(self, over: tuple[str, ...]) -> LinearMap:
        """The same map on tensors with one more dim in front, which is to be split over these axes (none: as it is)."""
        ...


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(op: LinearMap, *xs: Any) -> Any:
        # a result that is a view, of what the map has made, may be written by the caller like any other
        return tuple(map(torch_internals.no_view, _run(op, xs)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op = inputs[0]
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs[1:]] if len(inputs) > 2 else None
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        wanted = [i for i, ct in enumerate(cotangents) if ct is not None and ctx.needs_input_grad[i + 1]]
        grads: list[Any] = [None] * len(cotangents)
        if wanted:
            back = ctx.op.transpose()
            if len(wanted) < len(cotangents) and hasattr(back, "only"):  # a map that treats each in its own way
                back = back.only(wanted)
            for i, grad in zip(wanted, apply(back, *(cotangents[i] for i in wanted)), strict=True):
                grads[i] = grad
        return None, *grads

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        op = ctx.op.tangent() if hasattr(ctx.op, "tangent") else ctx.op  # a map that is not linear says so there
        if ctx.like is not None:  # torch takes no None for the tangent of one result where another has one
            tangents = tuple(
                torch.zeros(shape, dtype=dtype, device=device) if tangent is None else tangent
                for tangent, (shape, dtype, device) in zip(tangents, ctx.like, strict=True)
            )
        return apply(op, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: LinearMap, *xs: Any) -> Any:
        front = [
            x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(xs, in_dims[1:], strict=True)
        ]
        over = context.entries_over(torch_internals.level() + 1)  # this runs one level below that of the vmap
        return apply(op.batched(over), *front), (0,) * len(xs)


def apply(op: LinearMap, *xs: Any) -> tuple[Any, ...]:
    """``op(xs)``, differentiable in every mode and under every transform."""
    if not torch_internals.transforming() and not (
        (torch.is_grad_enabled() and any(x.requires_grad for x in xs)) or torch_internals.forward_ad_active()
    ):
        return _run(op, xs)
    if op_lines.listeners:
        op_lines.note(made=False)
    return torch_internals.apply(_Linear, op, *xs)


def _run(op: LinearMap, xs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The map itself; a tracer sees it as one step, since it would not see what a collective does."""
    keeper = state.here.slot.now.keeper
    if keeper is not None:
        return keeper.linear(op, xs, lambda: _unwatched(op, xs))
    if torch_internals.dispatch_modes() and torch_internals.is_traced():
        return traced_steps.as_one_step(lambda *xs: apply(op, *xs), xs, {}, lambda: _unwatched(op, xs))
    return _unwatched(op, xs)


def _unwatched(op: LinearMap, xs: tuple[Any, ...]) -> tuple[Any, ...]:
    with torch_internals.no_torch_function():  # a body's mode watches what the body does, not what is done here
        return op(xs)
