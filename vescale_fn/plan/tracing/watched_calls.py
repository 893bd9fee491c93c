"""What a call of one of torch's functions is, and whether it can be put off: asked of each one while a recording is watched."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..._core import torch_internals
from ..._core.base import context, source_lines, state
from ..._core.base.op_arguments import tensors_in
from . import leaves as leaves_
from .ambient import only_recorded
from .iterations import CallPlace, parts


def call_place() -> CallPlace:
    """Where the user calls what the mode sees that asks."""
    frame = source_lines.user_frame(sys._getframe(2))
    return CallPlace(None, -1, 0) if frame is None else CallPlace(frame.f_code, frame.f_lasti, frame.f_lineno)


def can_wait(func: Any) -> bool:
    """Whether a call does nothing besides giving its result, and nobody looks at it."""
    name = getattr(func, "__name__", "")
    return (
        not (name.endswith("_") and not name.endswith("__"))
        and only_recorded()
        and context.body() is None
        and torch_internals.saved_tensor_hooks() is None
        and context.grad_depth() < 2  # a call has no second derivative
    )


def begins_a_graph(out: Any) -> bool:
    """Whether a call gives a tensor by which somebody may differentiate."""
    return any(x.requires_grad and x.is_leaf for x in parts(out))


def as_they_are(given: Any) -> Any:
    """Arguments, whose lists somebody may change later."""
    kind = type(given)
    if kind is dict:
        return {name: as_they_are(x) for name, x in given.items()}
    return kind(map(as_they_are, given)) if kind is list or kind is tuple else given


def memories(*given: Any) -> set[int]:
    """The memory of what a call is given."""
    return {torch_internals.memory_number(part) for x in tensors_in(*given) for part in leaves_.plain_of(x)}


def settings() -> Any:
    """What is ambient and may change at any time; what else there is of it is looked at when an iteration begins and ends."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch_internals.autocasting(),
        torch.get_default_dtype(),
        state.used_mesh.get(),
        state.now(),
    )


ASKING = {  # how a tensor lies, which an answer has as well
    *(
        getattr(torch.Tensor, name)
        for name in "size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex __len__ "
        "element_size".split()
    ),
    *(
        getattr(torch.Tensor, name).__get__
        for name in "shape dtype device ndim layout requires_grad itemsize nbytes is_cuda".split()
    ),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch.is_tensor,
}
