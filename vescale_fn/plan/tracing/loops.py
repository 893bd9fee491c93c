"""A loop is recorded once: its body as a graph of its own, in the first backward pass as much of its derivative, and two calls.

The body is run on tensors without values that stand for the carry and one slice, in a frame of its own. When a gradient comes
back, autograd runs through that one iteration in the same frame; `partition` splits what was recorded there into what runs
forward and what runs backward, and the call of the loop is given what the latter needs to keep.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._core import torch_internals
from ..._core.control_flow.scan import Repeated
from ..._core.local_types import tensor_types
from ..._core.shard_map import body
from .frame import Unrollable
from .loop_again import Leaves, check_recorded_again
from .loop_calls import Iteration, LoopCall
from .loop_derivative import Derivative
from .loop_levels import BelowGradient, BelowTransform, Unsettled


def recorded(recorder: Any, repeated: Any, xs: Leaves, count: int, reverse: bool) -> tuple[Leaves, Leaves] | None:
    """Record a loop as one call.

    Args:
        recorder: at work.
        repeated: the body, a `scan.Repeated`.
        xs: what it goes over.
        count, reverse: of the loop.

    Returns:
        The last carry and what is collected, as leaves; None where the body uses something that autograd follows and that
        nothing has seen, or runs under a transform that is not known here: then each iteration has to be recorded.
    """
    layer = torch_internals.innermost_layer()
    if layer is None:
        return _recorded(recorder, repeated, xs, count, reverse)
    if layer is False:
        return None
    below = (BelowGradient if hasattr(layer, "followed") else BelowTransform)(repeated, xs, layer)
    with layer.off():
        try:
            found = recorded(recorder, below, below.xs, count, reverse)
        except Unsettled:
            return None
    return None if found is None else below.results_of(*found, count, reverse)


def _recorded(recorder: Any, repeated: Any, xs: Leaves, count: int, reverse: bool) -> tuple[Leaves, Leaves] | None:
    follows = torch.is_grad_enabled()
    moving = follows and any(x.requires_grad for x in (*repeated.init, *xs))
    while True:
        one = Iteration(recorder, repeated, xs, moving, count)
        if one.begins_again:
            continue
        if not moving and follows and any(x.requires_grad for x in one.results):
            moving = True
            continue
        captured = one.captured() if moving else []
        if captured is None:
            return None
        if not body.taken_in(captured):
            break
    call = LoopCall(recorder, one, xs, captured, count, reverse)
    with torch_internals.no_torch_function():  # nor is a body to see what a checkpoint does with what the call keeps
        outs: Any = torch_internals.apply(_Looped, call, *call.inputs) if moving else call.forward()
        for out, like in zip(outs, (*one.carried, *one.collected), strict=True):
            tensor_types.kept(out, like)
    outs = list(outs)
    return outs[: len(one.carried)], outs[len(one.carried) : len(one.carried) + one.count_collected]


class _Looped(torch.autograd.Function):
    """A loop as autograd sees it."""

    @staticmethod
    def forward(call: LoopCall, *inputs: torch.Tensor) -> Any:
        return tuple(call.forward())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        call = ctx.call = inputs[0]
        # under `remat` these are of the call that is recorded again
        ctx.save_for_backward(call.mark, *call.moved_xs, *output[len(call.one.results) :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        if all(ct is None for ct in cotangents):  # also where a loop that uses its results ends a backward pass
            return None, *(None for _ in ctx.call.inputs)
        mapped = torch_internals.transforming()
        if mapped and not torch_internals.only_mapping():
            raise Unrollable
        mark, *saved = ctx.saved_tensors
        call = ctx.call.recorder.loops[torch_internals.memory_number(mark)]
        further = mapped or torch.is_grad_enabled()  # for entries, and the gradient of a gradient
        check_recorded_again(ctx.call, call, further)
        if further:
            # a body under transforms would take those that are active now for its own
            if not call.repeated.runs_anywhere or (mapped and type(call.repeated) is not Repeated):
                raise Unrollable
            count = len(call.moved_xs)
            return None, *call.differentiable(cotangents, saved[:count], saved[count:])
        with torch_internals.no_torch_function():
            return None, *Derivative(call, cotangents).cotangents()
