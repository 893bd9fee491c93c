"""A loop is recorded once: its body as a graph of its own, in the first backward pass as much of its derivative, and two calls.

The body is run on tensors without values that stand for the carry and one slice, in a frame of its own. When a gradient comes
back, autograd runs through that one iteration in the same frame; `partition` splits what was recorded there into what runs
forward and what runs backward, and the call of the loop is given what the latter needs to keep.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._core import torch_internals
from ..._core.control_flow.scan import Repeated, Slices
from ..._core.local_types import tensor_types
from .frame import Unrollable
from .loop_calls import Iteration, Leaves, LoopCall
from .loop_derivative import Derivative


def recorded(
    recorder: Any, repeated: Repeated, slices: Slices, count: int, reverse: bool
) -> tuple[Leaves, Leaves] | None:
    """Record a loop as one call.

    Returns:
        The last carry and what is collected, as leaves; None where the body uses something that autograd follows and that
        nothing has seen: then each iteration has to be recorded.
    """
    xs = slices.whole()
    follows = torch.is_grad_enabled()
    moving = follows and any(x.requires_grad for x in (*repeated.init, *xs))
    while True:
        one = Iteration(recorder, repeated, xs, moving)
        if one.begins_again:
            continue
        if not moving and follows and any(x.requires_grad for x in one.results):
            moving = True
            continue
        break
    captured: Leaves = []
    if moving:
        found = one.captured()
        if found is None:
            return None
        captured = found
    call = LoopCall(recorder, one, xs, captured, count, reverse)
    outs: Any = torch_internals.apply(_Looped, call, *call.inputs) if moving else call.forward()
    with torch_internals.no_torch_function():
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
        ctx.recorder = inputs[0].recorder
        ctx.save_for_backward(inputs[0].mark)  # under `remat` that is the mark of the call that is recorded again
        ctx.count = len(inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        if all(ct is None for ct in cotangents):  # also where a loop that uses its results ends a backward pass
            return (None,) * ctx.count
        if torch.is_grad_enabled():
            raise Unrollable  # the gradient of a gradient
        with torch_internals.no_torch_function():
            call = ctx.recorder.loops[torch_internals.memory_number(*ctx.saved_tensors)]
            return None, *Derivative(call, cotangents).cotangents()
