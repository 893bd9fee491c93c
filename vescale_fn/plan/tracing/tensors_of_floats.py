"""Tensors that torch makes in C of floats among the arguments: they are computed from these in each run of the plan.

`torch.tensor(rate)` and `x[0] = rate` copy the value before any operator is called. A mode sees them first, and fills tensors
by operators instead, which a recording follows. Two modes would come in each other's way, as one is off while it has a function
called: so it is this one that hands on what it sees to whoever looks for equal iterations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..._core import torch_internals
from ..._core.arrays.array import Array

_MOST = 64  # numbers of one tensor


class FillsByOperators(TorchFunctionMode):
    """While a function with floats among its arguments is recorded.

    Args:
        recorder: knows what stands for a float.
    """

    of_recording = True

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self._recorder = recorder
        # each is the same function whenever it is called
        self._ways = {func: functools.partial(made, recorder, func) for func, made in _WAYS.items()}

    @property
    def records_plan(self) -> bool:
        """Whether a function of ours is to be seen as one call."""
        return self._recorder.watching is not None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        made = self._ways.get(func)
        if made is not None and any(map(recorder.stands_for_a_float, _flat((*args, *kwargs.values())))):
            func = made
        if recorder.watching is not None:
            return recorder.watching.seen(func, args, kwargs)
        return func(*args, **kwargs)


def _flat(a: Any) -> Iterator[Any]:
    if type(a) in (list, tuple):
        for x in a:
            yield from _flat(x)
    else:
        yield a


def _tensor(recorder: Any, func: Any, data: Any = None, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    data = kwargs.pop("obj", data)  # as `torch.asarray` has it
    kwargs = {name: x for name, x in kwargs.items() if name != "copy"}
    if isinstance(dtype, (torch.device, str, int)) or any(name in kwargs for name in _OTHERWISE):
        return recorder.asked(f"torch.{func.__name__}")
    return _filled(recorder, func, data, {"dtype": dtype or torch.get_default_dtype(), **kwargs})


def _new_tensor(recorder: Any, func: Any, x: torch.Tensor, data: Any = None, **kwargs: Any) -> torch.Tensor:
    given = {"dtype": kwargs.pop("dtype", None) or x.dtype, "device": kwargs.pop("device", None) or x.device}
    return _filled(recorder, func, data, {**given, **kwargs})


def _filled(recorder: Any, func: Any, data: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    numbers = list(_flat(data))
    if len(numbers) > _MOST or not all(isinstance(x, (bool, int, float)) for x in numbers):
        return recorder.asked(f"torch.{func.__name__}")
    if type(data) not in (list, tuple):
        return torch.full((), data, **kwargs)
    needs_gradient = kwargs.pop("requires_grad", False)
    with torch_internals.unrecorded():  # torch 2.15 would show the recording this tensor, too
        shape = torch.tensor(_zeros(data), device="meta").shape  # which raises what torch says of lists that do not fit
    return torch.stack([torch.full((), x, **kwargs) for x in numbers]).view(shape).requires_grad_(needs_gradient)


def _zeros(data: Any) -> Any:
    return list(map(_zeros, data)) if type(data) in (list, tuple) else 0


def _assigned(recorder: Any, func: Any, x: torch.Tensor, index: Any, value: Any) -> None:
    if isinstance(x, Array) or not isinstance(value, float):
        return func(x, index, value)
    return func(x, index, torch.full((), value, dtype=x.dtype, device=x.device))


def _refused(recorder: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    return recorder.asked(f"torch.Tensor.{func.__name__}")


_OTHERWISE = ("pin_memory", "names")
_WAYS: dict[Any, Callable[..., Any]] = {
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    torch.asarray: _tensor,
    torch.Tensor.new_tensor: _new_tensor,
    torch.Tensor.new: _refused,
    torch.Tensor.__setitem__: _assigned,
}
