"""Wrappers and levels of `torch.func`'s transforms."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch._C._functorch as _functorch
from torch.autograd import forward_ad as _forward_ad


def peel(x: torch.Tensor) -> torch.Tensor:
    """The tensor below all functorch wrappers (which hide a subclass and its attributes)."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


no_transforms = torch._C._DisableFuncTorch  # inside, transforms do not see what is done to plain tensors


def batch_dims(x: torch.Tensor) -> list[int]:
    """The dims that `vmap`s have taken out of view, to be removed from the innermost tensor's dims in this order."""
    found = []
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            found.append(_functorch.maybe_get_bdim(x))
        x = _functorch.get_unwrapped(x)
    return found[::-1]


def is_batched(x: torch.Tensor) -> bool:
    """Whether some wrapper around `x` is of a `vmap`."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def is_mapped(x: torch.Tensor) -> bool:
    """Whether the innermost active transform is a `vmap`, and `x` differs between its entries."""
    return _functorch.is_batchedtensor(x) and _functorch.maybe_get_level(x) == _functorch.maybe_current_level()


transforming = torch._C._are_functorch_transforms_active  # whether `torch.func.grad`, `vmap`, ... is active
_functorch_depth = _functorch.get_dynamic_layer_stack_depth


_functorch_active = torch._C._are_functorch_transforms_active


def level() -> int:
    """How deep functorch's transforms are nested at this point."""
    return _functorch.maybe_current_level() or 0


def follower(xs: Iterable[torch.Tensor], below: int | None = None, forward: bool = True) -> int | None:
    """The level of the innermost transform that differentiates by one of these tensors, of those under `below`: 0 for
    autograd itself; None where nothing does.

    Without `forward` those in forward mode are left out; with it, all that a `jvp` has wrapped counts as followed by it."""
    reverse, found = torch.is_grad_enabled(), -1
    jvps = [one.level() for one in _functorch.get_interpreter_stack() or () if "Jvp" in str(one.key())]
    for x in xs:
        while _functorch.is_functorch_wrapped_tensor(x):
            if _functorch.is_gradtrackingtensor(x):
                at = _functorch.maybe_get_level(x)
                reached = at > found and (below is None or at < below)
                if reached and ((reverse and x.requires_grad) or (forward and at in jvps)):
                    found = at
            x = _functorch.get_unwrapped(x)
        if found < 0 and below != 0 and ((reverse and x.requires_grad) or (forward and is_dual(x))):
            found = 0
    return None if found < 0 else found


def is_dual(x: torch.Tensor) -> bool:
    """Whether `x`, which no transform wraps, has a tangent of `torch.autograd.forward_ad`."""
    if _forward_ad._current_level < 0:
        return False
    with no_transforms():
        return _forward_ad.unpack_dual(x).tangent is not None
