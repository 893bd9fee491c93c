"""Wrappers and levels of `torch.func`'s transforms."""

from __future__ import annotations

import torch
import torch._C._functorch as _functorch


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
