"""Many tensors as one: a formula written for one tensor runs on a list of them, by torch's ``_foreach_`` kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._core import torch_internals
from .._core.arrays.array import is_array
from .._core.arrays.array_values import brought, the_one
from .._core.sharding.layout import WHOLE


class Many:
    """A list of plain tensors that torch functions take for one tensor; what they give is again a `Many`.

    A function for which torch has no such kernel runs tensor by tensor: the results are the same, bit for bit. What all
    tensors share are numbers, and 0-d tensors.

    >>> import torch
    >>> x = Many([torch.tensor([1.0, 4.0]), torch.tensor([9.0])])
    >>> torch.lerp(x, torch.sqrt(x) * 2, 0.5).tensors
    [tensor([1.5000, 4.0000]), tensor([7.5000])]
    """

    __slots__ = ("tensors",)
    by_kernels = True

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Many:
        args, kwargs = [_shared(a) for a in args], {name: _shared(a) for name, a in (kwargs or {}).items()}
        name = func.__name__.strip("_")
        kernel = _kernel(name, args, kwargs) if cls.by_kernels else None
        if kernel is not None:
            return cls(_run(kernel, name, args, kwargs))
        n = len(next(a for a in args if isinstance(a, Many)).tensors)
        at = lambda a, i: a.tensors[i] if isinstance(a, Many) else a
        return cls([func(*(at(a, i) for a in args), **{k: at(a, i) for k, a in kwargs.items()}) for i in range(n)])

    @property
    def dtype(self) -> torch.dtype:
        """That of all of them."""
        return self.tensors[0].dtype

    def to(self, dtype: torch.dtype) -> Many:
        """All of another dtype."""
        return Many([x.to(dtype) for x in self.tensors])

    def __add__(self, other: Any) -> Many:
        return torch.add(self, other)  # type: ignore[return-value, arg-type]

    def __sub__(self, other: Any) -> Many:
        return torch.sub(self, other)  # type: ignore[return-value, arg-type]

    def __mul__(self, other: Any) -> Many:
        return torch.mul(self, other)  # type: ignore[return-value, arg-type]

    def __truediv__(self, other: Any) -> Many:
        return torch.div(self, other)  # type: ignore[return-value, arg-type]

    def __neg__(self) -> Many:
        return torch.neg(self)  # type: ignore[return-value, arg-type]

    __radd__, __rmul__ = __add__, __mul__


class One(Many):
    """One tensor that stands for all of a list: what is done to it is recorded."""

    __slots__ = ()
    by_kernels = False


def over(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """``function(x, *args)``, for which the memory of `x` may be used: a value that the formula has made, and needs no more.

    >>> import torch
    >>> x = Many([torch.tensor([1.0, 4.0])])
    >>> over(torch.mul, x, Many([torch.tensor([2.0, 3.0])])).tensors, x.tensors
    ([tensor([ 2., 12.])], [tensor([ 2., 12.])])
    """
    if isinstance(x, Many) and x.by_kernels:
        own, kwargs = [_shared(a) for a in args], {name: _shared(a) for name, a in kwargs.items()}
        kernel = _kernel(function.__name__, [x, *own], kwargs, "_")
        alike = all(a.dtype == x.dtype for a in own if isinstance(a, Many))
        # torch rounds the number itself to a half where it multiplies halves in place
        exact = x.dtype.itemsize > 2 or not any(isinstance(a, (int, float)) for a in own)
        if kernel is not None and alike and exact:
            _run(kernel, function.__name__, [x, *own], kwargs)
            return x
    return function(x, *args, **kwargs)


def plus(x: Any, y: Any, factor: Any) -> Any:
    """``x + factor * y``; a step of a halves' formula is rounded by itself.

    ``torch.add(x, y, alpha=factor)`` rounds the factor to a half where it works number by number, as it does at the end of a
    tensor, and not where it takes eight at once: its result would depend on where a shard ends.
    """
    return torch.add(x, y, alpha=factor) if x.dtype.itemsize > 2 else x + y * factor


_UNARY = frozenset(("sqrt", "rsqrt", "neg", "sign", "abs", "reciprocal"))
_BINARY = frozenset(("add", "sub", "mul", "div", "maximum", "minimum"))
_WITH_ONE = frozenset(("add", "mul", "div"))  # a list and one 0-d tensor


def _kernel(name: str, args: Sequence[Any], kwargs: dict[str, Any], ending: str = "") -> Any:
    """The function on lists that does what `name` does on one tensor; None where there is none for these arguments.
    With the ending ``_`` that which writes over the first list."""
    lists = [isinstance(a, Many) for a in args]
    if name in _UNARY:
        fits = lists == [True] and not kwargs
    elif name in _BINARY and lists == [True, True]:
        fits = set(kwargs) <= {"alpha"}
    elif name in _BINARY and lists == [True, False]:
        number = not isinstance(args[1], torch.Tensor)
        fits = not kwargs and (number or (name in _WITH_ONE and args[1].ndim == 0))
    elif name == "lerp":
        fits = lists == [True, True, False] and not isinstance(args[2], torch.Tensor) and not kwargs
    elif name in ("addcmul", "addcdiv"):
        fits = lists == [True, True, True] and not isinstance(kwargs.get("value", 1), torch.Tensor)
    else:
        fits = False
    return torch_internals.on_lists(name + ending) if fits else None


def _run(kernel: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if name == "mul" and not isinstance(args[1], Many):
        args = [args[0], _number(args[1], args[0].tensors[0])]
    return kernel(*(a.tensors if isinstance(a, Many) else a for a in args), **kwargs)


def _number(a: Any, x: torch.Tensor) -> Any:
    """A factor that all tensors of a list, of which `x` is one, share, as a tensor of their dtype: to that torch brings
    any other for each of them anew, at twice the cost. (Of halves it does not: their factors are wider.)"""
    if x.dtype.itemsize < 4 or x.device.type != "cpu":
        return a
    return a.to(x.dtype) if isinstance(a, torch.Tensor) else torch.tensor(a, dtype=x.dtype)


def _shared(a: Any) -> Any:
    """What all tensors of a formula share: of an array, which every rank holds alike, the plain tensor."""
    if isinstance(a, torch.Tensor) and is_array(a):
        x = torch_internals.peel(a)
        return the_one(brought(x, WHOLE, "a number of an update"), torch_internals.mesh(x))  # type: ignore[attr-defined]
    return a
