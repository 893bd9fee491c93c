"""A rule of the user's in the place of a function's derivative, at one level of transforms, as in JAX.

The innermost transform that follows the arguments uses the rule; the transforms around it differentiate what the rule does.
Where only autograd follows, and at most one `vfn.grad` is around, the function runs on detached arguments, so that it keeps
nothing but residuals; should that gradient be differentiated after all, it is run once more.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context, state
from ..base.errors import TransformError
from ..base.messages import report
from ..distributed.blocks import Blocks
from ..local_types import tensor_types, types
from .primals import as_primals

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class CustomRule:
    """How the call of a function with a rule of its own is differentiated.

    Args:
        where: for messages.
        level: of the transform that uses the rule, 0 for autograd.
        depth: how many `vfn.grad`s are around, by which autograd's own levels are told.
        alone: whether the function ran on detached arguments: then every derivative uses the rule.
        given, made: how many tensors among the arguments and the results have derivatives.
        pull: ``(args, rest, cotangents)`` to a cotangent for each argument, or None for zero.
        push: ``(args, tangents)`` to a tangent for each result.
        again: the residuals of attached arguments.
        linear: whether what follows the results are their tangents, linear in those of the arguments.
        types: of arguments, results and residuals, in a body.
        around: what `pull` runs in.
        layers: the transforms around the call, some further in than `level`.
    """

    where: str
    level: int
    depth: int
    alone: bool
    given: int
    made: int
    pull: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Sequence[Any]]
    push: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
    again: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None
    linear: bool
    types: Sequence[types.Type | None]
    around: Callable[[], Any]
    layers: Sequence[Any] = ()

    def used_at(self, level: int) -> bool:
        """Whether the derivative that is being taken at this level is by the rule."""
        return self.alone or (level == self.level and (level > 0 or context.grad_depth() >= self.depth))


class Joined(torch.autograd.Function):
    """The results of a function, with its rule as their derivative: of arguments, results and what else the rule needs."""

    @staticmethod
    def forward(rule: CustomRule, *xs: Any) -> Any:
        n = rule.given + rule.made
        args, rest = {_memory(x): x for x in xs[: rule.given]}, {_memory(x) for x in xs[n:]}
        return tuple(_handed_on(x, args, rest) for x in xs[rule.given : n])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        rule, *xs = inputs
        ctx.rule, ctx.level = rule, torch_internals.level()
        ctx.like = [(x.shape, x.dtype, x.device) for x in output]
        ctx.set_materialize_grads(False)
        kept = xs[: rule.given] if rule.linear else [*xs[: rule.given], *xs[rule.given + rule.made :]]
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        rule: CustomRule = ctx.rule
        n, rest = rule.given, len(ctx.needs_input_grad) - 1 - rule.given - rule.made
        if not rule.used_at(ctx.level):
            return None, *[None] * n, *cotangents, *[None] * rest
        further = torch.is_grad_enabled()
        # what the function closes over, and an outer derivative goes through
        through = cotangents if rule.alone else [None] * rule.made
        if rule.alone and rule.linear and not further:
            return None, *[None] * n, *through, *cotangents
        saved = list(ctx.saved_tensors)
        with rule.around(), hiding(rule.where):
            cts = [_zeros(like) if ct is None else ct for ct, like in zip(cotangents, ctx.like, strict=True)]
            mark(saved, [*rule.types[:n], *rule.types[n + rule.made :]][: len(saved)])
            mark(cts, [t and types.dual(t) for t in rule.types[n : n + rule.made]])
            args, others = saved[:n], saved[n:]
            if rule.alone and further and rule.again is not None:
                others = rule.again(args)
            grads = rule.pull(args, others, cts)
            if context.body() is None:
                grads = [g if g is None else as_primals([g], [x])[0] for g, x in zip(grads, args, strict=True)]
        return None, *grads, *through, *[None] * rest

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        rule: CustomRule = ctx.rule
        outs = tangents[rule.given : rule.given + rule.made]
        if rule.used_at(ctx.level):
            if any(t is not None for t in outs):
                raise closed_over(rule.where)
            args = ctx.saved_tensors[: rule.given]
            given = [torch.zeros_like(x) if t is None else t for x, t in zip(args, tangents, strict=False)]
            with rule.around(), torch_internals.following_tangents(), hiding(rule.where, ctx.level):
                args = applied(Unfollowed, ctx.level, *args)
                for xs in args, given:
                    mark(xs, rule.types[: rule.given])
                with torch_internals.layers_above(rule.layers):  # it may close over what they wrap
                    found = [torch_internals.below(x, ctx.level) for x in rule.push(args, given)]
            if None in found:
                raise closed_over(rule.where)
            return tuple(found)
        return tuple(_zeros(like) if t is None else t for t, like in zip(outs, ctx.like, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: CustomRule, *xs: Any) -> Any:
        dims, n, m = in_dims[1:], rule.given, rule.made
        front = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(xs, dims, strict=True)]
        front[n : n + m] = [
            x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x
            for x, dim in zip(front[n : n + m], dims[n : n + m], strict=True)
        ]
        return applied(Joined, _batched(rule, info, dims), *front), (0,) * m


class Unfollowed(torch.autograd.Function):
    """Tensors that the transform at a level does not follow, while those around it do."""

    @staticmethod
    def forward(level: int, *xs: Any) -> Any:
        return tuple(x.detach() for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.here = torch_internals.level() == inputs[0]
        if ctx.here:
            ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return None, *([None] * len(cotangents) if ctx.here else cotangents)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        return (None,) * len(tangents) if ctx.here else tangents

    @staticmethod
    def vmap(info: Any, in_dims: Any, level: int, *xs: Any) -> Any:
        return applied(Unfollowed, level, *xs), tuple(in_dims[1:])


class Tangents(torch.autograd.Function):
    """Zeros that stand for the tangents of tensors: whatever is linear in them gets its transpose from autograd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*xs: Any) -> Any:
        return tuple(torch.zeros_like(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents


def applied(function: Any, *args: Any) -> tuple[Tensor, ...]:
    """Apply one of these, whose results' types are no matter of a body's mode. Tensors keep theirs."""
    with torch_internals.no_torch_function():
        return torch_internals.apply(function, *args)


@contextlib.contextmanager
def hiding(where: str, *levels: int) -> Iterator[None]:
    """A block in which no rule is for the transforms at these levels; of others that were hidden, levels that have ended begin
    anew."""
    here = torch_internals.level()
    try:
        with context.setting(ruled=(*(level for level in state.now().ruled if level <= here), *levels)):
            yield
    except RuntimeError as error:
        if not torch_internals.is_about_levels(error):
            raise
        what = (
            "an outer transform runs the function, or its rule, which closes over a value of a transform inside of it"
        )
        raise TransformError(report(where, what, fix="the value as one more argument")) from None


def _memory(x: Tensor) -> Any:
    x = torch_internals.local(x) if isinstance(x, DTensor) else x
    return torch_internals.memory_number(x.blocks[0] if type(x) is Blocks else x)


def _handed_on(x: Tensor, args: dict[Any, Tensor], rest: set[Any]) -> Tensor:
    """A result under a name of its own. Autograd refuses writes into what shares memory with an argument, and notices those
    into what shares memory with a residual."""
    memory = _memory(x)
    if memory in args:
        arg = args[memory]
        return arg.view_as(x) if arg.shape == x.shape and arg.stride() == x.stride() else x.clone()
    return x.detach() if memory in rest else torch_internals.no_view(x.detach())


def _zeros(like: tuple[Any, ...]) -> Tensor:
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device)


def mark(xs: Sequence[Tensor], known: Sequence[types.Type | None]) -> None:
    for x, type_ in zip(xs, known, strict=True):
        if type_ is not None:
            tensor_types.mark(x, type_)


class _Entries:
    """The entries of the `vmap` one level up, over which a rule is mapped."""

    def __init__(self, info: Any) -> None:
        self.size, self.randomness, self.around = info.batch_size, info.randomness, state.now().entries
        level = torch_internals.level() + 1
        self.mine = next((one for one in self.around if one.level == level), None)

    def map(self, f: Callable[..., Any], *groups: tuple[Sequence[Tensor], Sequence[Any]], out_dims: Any = 0) -> Any:
        """``f`` of lists of tensors, each with the dims that they are mapped over, to a list."""
        flat = [x for xs, _ in groups for x in xs]
        named = self.mine is not None and self.mine.name is not None
        index = None
        if named:
            with torch_internals.no_torch_function():
                index = torch.arange(self.size, dtype=torch.int32, device=flat[0].device)

        def one(index: Tensor | None, *xs: Tensor) -> Any:
            rest = iter(xs)
            parts = [[next(rest) for _ in xs] for xs, _ in groups]
            if self.mine is None:
                return tuple(f(*parts))
            here = dataclasses.replace(self.mine, level=torch_internals.level(), index=index)
            before = tuple(other for other in self.around if other.level < self.mine.level)
            with context.setting(entries=(*before, here)):
                return tuple(f(*parts))

        in_dims = (0 if named else None, *(dim for _, its in groups for dim in its))
        return torch.func.vmap(one, in_dims, out_dims, self.randomness)(index, *flat)


def _batched(rule: CustomRule, info: Any, dims: Sequence[int | None]) -> CustomRule:
    """The rule on tensors with one more dim in front, of the entries of a `vmap`."""
    n, m, entries = rule.given, rule.made, _Entries(info)
    of_args = [None if dim is None else 0 for dim in dims[:n]]
    of_rest = [None if dim is None else 0 for dim in dims[n + m :]]

    def pull(args: Sequence[Tensor], rest: Sequence[Tensor], cts: Sequence[Tensor]) -> Sequence[Any]:
        present: list[int] = []

        def one(args: Any, rest: Any, cts: Any) -> Any:
            grads = rule.pull(args, rest, cts)
            present[:] = [i for i, g in enumerate(grads) if g is not None]
            return [grads[i] for i in present]

        found = entries.map(one, (args, of_args), (rest, of_rest[: len(rest)]), (cts, [0] * m))
        grads: list[Any] = [None] * n
        for i, g in zip(present, found, strict=True):
            grads[i] = g.sum(0) if of_args[i] is None else g
        return grads

    def push(args: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        return entries.map(rule.push, (args, of_args), (tangents, of_args))

    def again(args: Sequence[Tensor]) -> Sequence[Tensor]:
        assert rule.again is not None
        return entries.map(rule.again, (args, of_args), out_dims=tuple(of_rest))

    layers = rule.layers[: torch_internals.level()]
    return dataclasses.replace(rule, pull=pull, push=push, again=rule.again and again, layers=layers)


def closed_over(where: str) -> TransformError:
    return TransformError(
        report(
            where,
            "the function closes over a tensor that is differentiated, for which its rule gives no derivative",
            fix="the tensor as one more argument, with its derivative in the rule; or vfn.stop_gradient(x) of it",
        )
    )
