"""What is being recorded: the function, or in it the body of a loop, with what that uses from outside of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.arrays.array import Array
from ..._core.base.array_notes import ArrayNotes


class Unrollable(BaseException):
    """A value of a body was kept from it and is used outside: it has to be recorded for each iteration, and each call.

    Attributes:
        shared: whether calls have shared a body.
    """

    shared = False


class RanksApart(BaseException):
    """Simulated ranks that were recorded as one do not do the same: each has to be recorded by itself."""


class RecordAgain(BaseException):
    """Calls that were put off cannot be made any more: the function has to be recorded again, and none put off."""


class _Waits:
    """Stands for the node of the answer to a call that has been put off: there is none yet."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name == "__wrapped__" else RecordAgain  # which doctest asks everything for


WAITS: Any = _Waits()


class OfOneRank:
    """Stands for the node of a value that one of these ranks has: there is none."""

    def __getattr__(self, name: str) -> Any:
        raise RanksApart


class MergedCall(OfOneRank):
    """Stands for the node of what a call of one rank gave, which has become a part of what all give.

    Args:
        one: the node of that.
        numbers: for each rank, which of the calls was its own.
        number: which this is of.
        graph: gives `one`'s graph while ranks' calls are recorded that will become one, and raises elsewhere.
    """

    def __init__(self, one: fx.Node, numbers: Any, number: int, graph: Callable[[fx.Node], fx.Graph]) -> None:
        self.of, self._graph = (one, numbers, number), graph

    @property
    def graph(self) -> fx.Graph:
        return self._graph(self.of[0])


class Unrecordable(BaseException):
    """The function does something that depends on values, or that runs on values alone. No `Exception`, lest a user's
    ``except`` takes it for an error."""

    def __init__(self, reason: str, line: str) -> None:
        super().__init__(reason)
        self.reason, self.line = reason, line
        self.graph: fx.Graph | None = None  # what had been recorded before
        self.guards: list[Any] = []  # that led there


class Frame:
    """A graph that is being recorded.

    Args:
        outer: the frame around; None for the function itself.

    Attributes:
        constants: what was used without being given: tensors, and in the body of a loop nodes that give floats. Each has a
            placeholder, in `places`.
        known: by the id of a constant what stands for it.
        last: the last placeholder.
        given: the memory of the inputs, which must not be written.
        followed: tensors from outside that autograd follows, by their id.
        shared: by what calls must have alike, the bodies that they share (`shared_calls`).
    """

    def __init__(self, outer: Frame | None) -> None:
        self.outer, self.graph = outer, torch_internals.Graph()
        self.constants: list[Any] = []
        self.places: list[fx.Node] = []
        self.known: dict[int, Any] = {}
        self.last: fx.Node | None = None
        self.given: set[int] = set()
        self.followed: dict[int, torch.Tensor] = {}
        self.shared: dict[Any, list[Any]] = {}
        self._notes: dict[int, tuple[Array, ArrayNotes, list[Any]]] = {}

    def is_around(self, graph: fx.Graph) -> bool:
        """Whether a graph is that of a frame around."""
        return self.outer is not None and (self.outer.graph is graph or self.outer.is_around(graph))

    def hold(self, x: Any, place: fx.Node) -> None:
        """Note a constant and its placeholder."""
        self.constants.append(x)
        self.places.append(place)

    def float_of(self, node: fx.Node, placeholder: Callable[[str, Any], fx.Node]) -> fx.Node:
        """The placeholder of a float that a node of a frame around gives."""
        if id(node) not in self.known:
            self.known[id(node)] = placeholder(node.name, node.meta["val"])
            self.hold(node, self.known[id(node)])
        return self.known[id(node)]

    def see(self, xs: Iterable[torch.Tensor]) -> None:
        """Note what an op is given: what autograd follows, and what is known of arrays now, for `forget`."""
        for x in xs:
            if x.requires_grad:
                self.followed[id(x)] = x
            if type(x) is Array and id(x) not in self._notes:
                notes = getattr(x, "vfn_notes", None)
                if notes is not None:
                    self._notes[id(x)] = x, copy.copy(notes), list(notes.sums or ())

    def forget(self) -> None:
        """Forget what arrays have noted of themselves in this frame: sums that are values of its graph."""
        for x, notes, sums in self._notes.values():
            now = getattr(x, "vfn_notes", None)
            if now is not None:
                now.total, now.narrowed = notes.total, notes.narrowed
                if now.sums is not None:
                    now.sums[:] = sums
        self._notes.clear()
