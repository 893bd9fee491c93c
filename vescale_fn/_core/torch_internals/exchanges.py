"""A tensor gets another memory, by `x.data = value`, `Tensor.set_` or `torch.utils.swap_tensors`: no mode learns of that."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .modes import function_mode_on, recorder

_data: Any = torch._C.TensorBase.data
set_data: Callable[[torch.Tensor, torch.Tensor], None] = _data.__set__  # `x.data = value`, of which nobody is told
_set: Any = torch._C.TensorBase.set_
_use_count: Any = torch._C.TensorBase._use_count
_asked: list[Callable[[str, torch.Tensor, Any], None]] = []


def ask_before_exchange(ask: Callable[[str, torch.Tensor, Any], None]) -> None:
    """From now on ``x.data = value`` asks ``ask("data", x, value)`` first, and ``x.set_(value)`` ``ask("set_", x, value)``."""
    _asked.append(ask)


def became(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Let `x` be what `other` is, for all who hold it; `other` is then another name of its memory, without a history. False
    where more than Python holds `x`, as autograd does what an op was given."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        if _use_count(x) != 1:
            return False
        for name in copyreg._slotnames(type(x)):  # type: ignore[attr-defined]
            if hasattr(other, name):
                setattr(x, name, getattr(other, name))
        x.__dict__.update(other.__dict__)
        try:
            torch._C._swap_tensor_impl(x, other)  # type: ignore[attr-defined]
        except RuntimeError:  # a weak reference in C++
            return False
        if type(x) is FakeTensor:
            set_data(other, x)
        return True


class _Data(property):
    """`torch.Tensor.data`. Torch passes its methods to modes, which ask for the name."""

    __name__ = "data"


def _set_data(x: torch.Tensor, value: Any) -> None:
    for ask in _asked:
        ask("data", x, value)
    at_work = None if function_mode_on() else recorder()  # a mode comes first, and then here again
    return set_data(x, value) if at_work is None else at_work.assigned(x, value, set_data)


@functools.wraps(torch.Tensor.set_)
def _asked_set(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    for ask in _asked:
        ask("set_", self, args[0] if args else kwargs.get("source"))
    return _set(self, *args, **kwargs)


def _counted(x: torch.Tensor) -> int:
    """The uses of `x`, by which `torch.utils.swap_tensors` begins with both."""
    if (at_work := recorder()) is not None:
        at_work.swapped(x)
    return _use_count(x)


torch.Tensor.data = _Data(_data.__get__, _set_data)  # type: ignore[assignment]
torch.Tensor.set_ = _asked_set  # type: ignore[method-assign]
torch.Tensor._use_count = _counted  # type: ignore[method-assign]
