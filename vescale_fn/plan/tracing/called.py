"""A call with bodies as autograd sees it: one function, whose derivative is recorded when a gradient comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core import torch_internals
from .frame import Unrollable
from .loop_again import check_recorded_again

Back = Callable[[Any, Sequence[Any]], list[Any]]


def followed(call: Any, derivative: Back, again: Back | None = None) -> list[torch.Tensor]:
    """Record a call, and give its results, which autograd follows from its inputs.

    Args:
        call: has `inputs`, and `forward`, which records it and notes its `mark`.
        derivative: gives the cotangents of a call's inputs for those of its results.
        again: the same, in a way that autograd follows; None where there is none.
    """
    with torch_internals.no_torch_function():  # nor is a body to see what a checkpoint does with what the call keeps
        return list(torch_internals.apply(_Called, call, derivative, again, *call.inputs))


class _Called(torch.autograd.Function):
    @staticmethod
    def forward(call: Any, derivative: Any, again: Any, *inputs: torch.Tensor) -> Any:
        return tuple(call.forward())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call, ctx.derivative, ctx.again, *_ = inputs
        ctx.save_for_backward(inputs[0].mark)  # under `remat` that is the mark of the call that is recorded again
        ctx.count = len(inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        if all(ct is None for ct in cotangents):  # also where a loop that uses its results ends a backward pass
            return (None,) * ctx.count
        mapped = torch_internals.transforming()
        further = mapped or torch.is_grad_enabled()  # for entries, and the gradient of a gradient
        if (mapped and not torch_internals.only_mapping()) or (further and ctx.again is None):
            raise Unrollable
        call = ctx.call.recorder.loops[torch_internals.memory_number(*ctx.saved_tensors)]
        check_recorded_again(ctx.call, call, further)
        if further:
            return None, None, None, *ctx.again(call, cotangents)
        with torch_internals.no_torch_function():
            return None, None, None, *ctx.derivative(call, cotangents)
