"""Python floats as inputs of a plan: another learning rate records nothing new, and needs no tensor.

While a function is recorded, a float among its arguments is a `Number`: a float by its class, so that torch takes it wherever
it takes a number, with a value that occurs nowhere else. Where that value turns up in a recorded call, the call is given the
input instead. Arithmetic on a `Number` is recorded too; what asks for its value in Python (`if`, `print`) cannot be.

Code in C, such as `math.sqrt`, reads the value without asking. So a function with floats is recorded twice, with different
values: where the two graphs differ, something was computed from a value. The first time the values are all but those of the
call: what the function computes in C then, and keeps for later calls, is as good as right. The second time they lie far from
zero, where whole numbers that are made of them are others, too; unless the function raises there, as one that wants a
probability does: then they lie between zero and the value. A `Number` that a function keeps is a float like any other once
the recording is over, with the value of the call.

What this does not show: a step that C takes where neither value is, as `math.isclose` does, or at zero.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..ir.nested import Nested
from ..ir.per_rank import of_rank


class Number(float):
    """A float that is an input of the plan that is being recorded, or was computed from one.

    Args:
        value: the value that stands for it.
        meant: the value of this call.
        node: what gives it.
        recorder: what is told where the value itself is asked for.
    """

    meant: float
    node: fx.Node
    recorder: Any

    def __new__(cls, value: float, meant: float, node: fx.Node, recorder: Any) -> Number:
        self = super().__new__(cls, value)
        self.meant, self.node, self.recorder = meant, node, recorder
        return self

    def settle(self) -> None:
        """Take the value that is meant, for whoever has kept this. Nothing else holds this very float."""
        place = id(self) + float.__basicsize__ - ctypes.sizeof(ctypes.c_double)
        ctypes.c_double.from_address(place).value = self.meant

    @property
    def real(self) -> float:
        """The number, which is its own real part."""
        return _now(self)

    def conjugate(self) -> float:
        """The number, which is its own conjugate."""
        return _now(self)

    def __deepcopy__(self, memo: Any) -> float:
        return _now(self)

    __copy__ = functools.partialmethod(__deepcopy__, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (float(self),)  # which a recording at work is asked


def _arithmetic(op: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def method(self: Number, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        operands = [_now(x) for x in ((*others, self) if swapped else (self, *others))]
        live = next((x for x in operands if isinstance(x, Number)), None)
        if live is None:
            return op(*operands)
        graph, recorder = live.node.graph, live.recorder
        node = graph.call_function(op, tuple(x.node if isinstance(x, Number) else x for x in operands))
        value = op(*map(_bare, operands))
        node.meta["val"], node.meta["line"] = value, ""
        if not isinstance(value, float):
            return recorder.asked("arithmetic")
        try:
            meant = op(*map(_meant, operands))
        except ArithmeticError:  # a replay raises it, if the function does not catch it
            meant = math.nan
        return recorder.computed(value, meant, node)

    return method


def _bare(x: Any) -> Any:
    return float.__add__(x, 0.0) if isinstance(x, Number) else x


def _now(x: Any) -> Any:
    """A number, where it is of a recording that is over as the float that it is by now."""
    return _bare(x) if isinstance(x, Number) and x.recorder.is_over else x


def _meant(x: Any) -> Any:
    return x.meant if isinstance(x, Number) else x


def _asking(what: str, name: str) -> Callable[..., Any]:
    of_float = getattr(float, name)

    def method(self: Number, *others: Any) -> Any:
        return of_float(*map(_bare, (self, *others))) if self.recorder.is_over else self.recorder.asked(what)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name), False))
    setattr(Number, f"__r{_name}__", _arithmetic(getattr(operator, _name), True))
for _name in ("neg", "pos", "abs"):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name), False))
for _what, _names in {
    "a comparison": ("lt", "le", "gt", "ge", "eq", "ne", "bool"),
    "a conversion to an int": ("int", "trunc", "floor", "ceil", "round", "divmod", "rdivmod"),
    "a conversion to a float": ("float",),
    "printing": ("repr", "str", "format"),
    "its use as a key": ("hash",),
}.items():
    for _name in _names:
        setattr(Number, f"__{_name}__", _asking(_what, f"__{_name}__"))
for _name in ("is_integer", "as_integer_ratio", "hex"):
    setattr(Number, _name, _asking(f"float.{_name}", _name))


def near(value: float, number: int) -> float:
    """What stands for an input first, the `number`-th of a recording: all but its value, and no other float's."""
    return _towards_zero(value, (number + 1) * 2.0**-40)


def beyond(value: float, number: int) -> float:
    """What stands for an input the second time: with another whole part, binade and rounding."""
    found = math.copysign((3 + _noise(number)) * abs(value) + 2 + _noise(number), value)
    return found if math.isfinite(found) else within(value, number)


def within(value: float, number: int) -> float:
    """What stands for an input the second time where `beyond` is too much for the function."""
    return _towards_zero(value, 0.5 + _noise(number))


def apart(value: float, number: int) -> float:
    """What stands the second time for a float that was computed."""
    return _towards_zero(value, 0.1 + _noise(number))


def _noise(number: int) -> float:
    return 0.3 * ((0.6180339887498949 * (number + 8)) % 1.0)


def _towards_zero(value: float, part: float) -> float:
    if not math.isfinite(value):
        return math.copysign(1e30, value) * part
    # smaller ones have too few digits
    return value * (1 - part) if abs(value) > 1e-300 else math.copysign(part * 1e-3, value)


def difference(first: fx.Graph, second: fx.Graph, at: int | None = None) -> fx.Node | None:
    """The first call at which two recordings differ, in more than what they name nodes; None where they are alike.

    Args:
        at: where numbers of the first are each rank's own, the place of that whose count.
    """
    shown, other_shown = _Shown(first, at), _Shown(second, at)
    for one, other in zip(first.nodes, second.nodes):
        if isinstance(one.target, Nested) and type(one.target) is type(other.target):
            bodies = list(zip(one.target.bodies, other.target.bodies))  # type: ignore[attr-defined]
            often = [(one.target.often(i), other.target.often(i)) for i in range(len(bodies))]  # type: ignore[attr-defined]
            if any(a != b for a, b in often) or any(difference(a, b, at) is not None for a, b in bodies):
                return one
        elif one.target != other.target and one.op != "placeholder":
            return one
        if shown.of((one.args, one.kwargs)) != other_shown.of((other.args, other.kwargs)):
            return one
        if _shape(one.meta.get("val")) != _shape(other.meta.get("val")):
            return one
    return None if len(first.nodes) == len(second.nodes) else next(iter(reversed(first.nodes)))


class _Shown:
    """What is compared of the arguments in a graph."""

    def __init__(self, graph: fx.Graph, at: int | None) -> None:
        self._places, self._at = {node: i for i, node in enumerate(graph.nodes)}, at

    def of(self, a: Any) -> Any:
        if isinstance(a, fx.Node):
            return "node", self._places[a]
        if isinstance(a, (list, tuple)):
            return tuple(map(self.of, a))
        if isinstance(a, dict):
            return {k: self.of(v) for k, v in a.items()}
        a = a if self._at is None else of_rank(a, self._at)
        if isinstance(a, float):  # nan is not equal to itself
            return float, repr(a)
        return a if isinstance(a, (int, str, bool, type(None))) else type(a)


def _shape(val: Any) -> Any:
    return [_shape(x) for x in val] if isinstance(val, (list, tuple)) else getattr(val, "shape", None)


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two constants of two recordings are the same."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
