"""One recording for many ranks of an abstract mesh: numbers of which each rank has its own, found where they are made.

A rank's place decides what is recorded in one way alone: by a function of the rank that a `Communicator` calls (`each`). While
a plan is recorded for many ranks, such a function is recorded for the rank that leads, and then on trial for the others. Where
they call the same with other numbers, what is recorded holds those of all ranks (`OfEveryRank`, and tables); where they do not,
they part from the rank that leads, and the plan is not for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.base import state
from ..._core.base.errors import TransformError
from ..._core.base.messages import report
from ..._core.base.tables import numbers, table
from ..ir.nested import bodies_of
from ..ir.per_rank import OfEveryRank, PerRank


class EveryRank:
    """Ranks of a mesh for which one plan is recorded.

    Args:
        mesh: an abstract mesh.
        ranks: which of its ranks; the first one leads.

    Attributes:
        parted: the ranks that do something else.
    """

    def __init__(self, mesh: Any, ranks: Sequence[int]) -> None:
        self.mesh, self.ranks, self._now = mesh, tuple(ranks), ranks[0]
        self.parted: set[int] = set()
        self._inside = False  # of a function of the rank
        self._tables: dict[tuple[int, ...], Sequence[torch.Tensor]] = {}  # of all ranks, by their ids
        self._of: dict[int, Sequence[torch.Tensor]] = {}  # by the id of that which stands for all

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While plans are recorded, and their arguments made."""
        state.process.every_rank = self
        try:
            yield
        finally:
            state.process.every_rank = None

    def played(self, what: str) -> int:
        """The rank that is played: that which leads, or on trial another. Raises where something besides functions of the rank
        asks for it while it records: that would be the same for all."""
        if not self._inside and torch_internals.is_recorded():
            fix = "vfn.axis_index(name), a tensor, in a shard_map body"
            raise TransformError(
                report("save_plan", f"{what} is asked for in Python, and a plan is for every rank", fix=fix)
            )
        return self._now

    @property
    def together(self) -> list[int]:
        """The ranks that the plan is for."""
        return [rank for rank in self.ranks if rank not in self.parted]

    def alike(self, of: Callable[[int], Any]) -> Any:
        """What a function gives the rank that is played; those to which it gives something else part from it."""
        mine = of(self._now)
        if not self._inside:
            self.parted.update(rank for rank in self.together if of(rank) != mine)
        return mine

    def called(
        self, recorder: Any, fn: Callable[..., Any], values: Sequence[Any], key: Callable[[int], Any] | None
    ) -> Any:
        """What `fn` of the rank that leads gives; what it records has the numbers of the others, too."""
        if self._inside:
            return fn(self._now, *values)
        leader, self._inside = self._now, True
        try:
            start = _Start(recorder)
            out = fn(leader, *values)
            calls = start.calls()
            mine = _Told(recorder, calls, out)
            found: dict[Any, list[Any] | None] = {leader if key is None else key(leader): mine.numbers}
            of_each = [mine.numbers]
            for rank in self.ranks[1:]:
                way = rank if key is None else key(rank)
                if rank not in self.parted and way not in found:
                    found[way] = self._on_trial(recorder, lambda rank=rank: fn(rank, *values), rank, mine.shape)
                theirs = found.get(way)
                if theirs is None:
                    self.parted.add(rank)
                of_each.append(mine.numbers if theirs is None else theirs)
            together = [self._together(column) for column in zip(*of_each, strict=True)]
        finally:
            self._now, self._inside = leader, False
        return _with_numbers(recorder, calls, out, mine.numbers, together)

    def _on_trial(self, recorder: Any, call: Callable[[], Any], rank: int, shape: Any) -> list[Any] | None:
        """The numbers of another rank; None where it does something else."""
        self._now, start = rank, _Start(recorder)
        try:
            told = _Told(recorder, start.calls, call())
            return told.numbers if told.shape == shape else None
        except Exception:  # which it will show when it leads
            return None
        finally:
            start.undo()

    def _together(self, column: Sequence[Any]) -> Any:
        """What stands for the number, or the table, of each rank."""
        if not isinstance(column[0], torch.Tensor):
            return OfEveryRank(column) if len(set(column)) > 1 else column[0]
        ids = tuple(map(id, column))
        if ids not in self._tables:
            one = column[0]
            if id(one) in self._of:  # other ranks have had others in its place
                one = table(numbers(one), one.device)  # type: ignore[arg-type]
            self._tables[ids] = self._of[id(one)] = (one, *column[1:], *column[:1])  # which live as long as their ids
        return self._tables[ids][0]

    def tables(self, constants: Iterable[torch.Tensor]) -> list[list[torch.Tensor] | None]:
        """Of each constant of a recording the numbers of `together`; None where it is no table."""
        return [self._numbers(x) for x in constants]

    def _numbers(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        if numbers(x) is None:
            return None
        of_each = self._of.get(id(x), [x] * len(self.ranks))
        return [numbers(one) for rank, one in zip(self.ranks, of_each) if rank not in self.parted]  # type: ignore

    def narrow(self, graph: fx.Graph) -> None:
        """Leave in a recording the numbers of `together` alone."""
        stay = [i for i, rank in enumerate(self.ranks) if rank not in self.parted]
        if len(stay) == len(self.ranks):
            return

        def of(x: Any) -> Any:
            if not isinstance(x, PerRank):
                return x
            values = [x.values[i] for i in stay]
            return OfEveryRank(values) if len(set(values)) > 1 else values[0]

        todo, done = [graph], set[fx.Graph]()
        while todo:
            one = todo.pop()
            if one not in done:  # bodies that several calls share
                done.add(one)
                for node in one.nodes:
                    node.args, node.kwargs = _mapped(of, node.args), _mapped(of, node.kwargs)
                    todo += bodies_of(node)


class _Start:
    """Where a function of the rank begins in a recording: what it calls, and as if it had not been called."""

    def __init__(self, recorder: Any) -> None:
        frame = recorder.frame
        self._recorder, self._last, self._placeholder = recorder, _end(frame.graph), frame.last
        self._lists = [(x, len(x)) for x in (frame.constants, recorder.writes, recorder.kept)]
        self._known = [(x, len(x)) for x in (frame.known, recorder.literals)]
        self._places = len(frame.places)

    def calls(self) -> list[fx.Node]:
        """The calls since then, in order."""
        found: list[fx.Node] = []
        for node in reversed(self._recorder.frame.graph.nodes):
            if node is self._last:
                break
            if node.op != "placeholder":
                found.append(node)
        return found[::-1]

    def undo(self) -> None:
        """Take back what has been recorded since then."""
        frame = self._recorder.frame
        for node in reversed(self.calls()):
            frame.graph.erase_node(node)
        for place in reversed(frame.places[self._places :]):
            frame.given.discard(torch_internals.memory_number(place.meta["val"]))
            frame.graph.erase_node(place)
        del frame.places[self._places :]
        frame.last = self._placeholder
        for x, count in self._lists:
            del x[count:]
        for x, count in self._known:
            while len(x) > count:
                x.popitem()


def _end(graph: fx.Graph) -> fx.Node | None:
    return next(iter(reversed(graph.nodes)), None)


class _Told:
    """What was called, without numbers, and the numbers in it, in order.

    Attributes:
        shape: equal for what differs in numbers alone.
        numbers: ints, and tables.
    """

    def __init__(self, recorder: Any, calls: Any, out: Any) -> None:
        self.shape: list[Any] = []
        self.numbers: list[Any] = []
        calls = calls() if callable(calls) else calls
        self._recorder, self._places = recorder, {node: i for i, node in enumerate(calls)}
        self._constants = dict(zip(recorder.frame.places, recorder.frame.constants, strict=True))
        for node in calls:
            self.shape.append(node.target)
            self._take((node.args, node.kwargs))
            self._lies(node.meta.get("val"))
        self._take(out)

    def _take(self, x: Any) -> None:
        if isinstance(x, fx.Node):
            self._node(x)
        elif isinstance(x, torch.Tensor):
            if self._recorder.is_stand_in(x):
                self._node(self._recorder.node(x))
            elif numbers(x) is not None:
                self._table(x)
            else:
                self.shape.append(id(x))
        elif type(x) is int:
            self.numbers.append(x)
            self.shape.append(int)
        elif isinstance(x, (list, tuple)):
            self.shape.append((type(x), len(x)))
            for one in x:
                self._take(one)
        elif isinstance(x, dict):
            self.shape.append(tuple(x))
            self._take(list(x.values()))
        else:
            self.shape.append((type(x), repr(x)))

    def _node(self, x: fx.Node) -> None:
        constant = self._constants.get(x)
        if x in self._places:
            self.shape.append(self._places[x])
        elif constant is not None and not isinstance(constant, fx.Node) and numbers(constant) is not None:
            self._table(constant)
        else:
            self.shape.append(x)

    def _table(self, x: torch.Tensor) -> None:
        self.numbers.append(x)
        self.shape.append((x.shape, x.dtype))

    def _lies(self, val: Any) -> None:
        if isinstance(val, torch.Tensor):
            self.shape.append((val.shape, val.stride(), val.dtype, val.device))
        elif isinstance(val, (list, tuple)):
            for one in val:
                self._lies(one)


def _with_numbers(recorder: Any, calls: Sequence[fx.Node], out: Any, before: Sequence[Any], now: Sequence[Any]) -> Any:
    """The result, of calls that have been given the numbers of all ranks."""
    if all(one is other for one, other in zip(before, now, strict=True)):
        return out
    rest = iter(now)
    constants = dict(zip(recorder.frame.places, recorder.frame.constants, strict=True))
    made = set(calls)

    def of(x: Any) -> Any:
        if type(x) is int:
            return next(rest)
        if isinstance(x, fx.Node) and x not in made:
            constant = constants.get(x)
            if constant is not None and not isinstance(constant, fx.Node) and numbers(constant) is not None:
                return recorder.node(next(rest))
        if isinstance(x, torch.Tensor) and not recorder.is_stand_in(x) and numbers(x) is not None:
            return next(rest)
        return x

    for node in calls:
        node.args, node.kwargs = _mapped(of, node.args), _mapped(of, node.kwargs)
    return _mapped(of, out)


def _mapped(of: Callable[[Any], Any], x: Any) -> Any:
    """The same structure with another thing in the place of each, in the order in which `_Told` takes them."""
    if isinstance(x, (list, tuple)):
        found = [_mapped(of, one) for one in x]
        return found if isinstance(x, list) else type(x)(*found) if hasattr(x, "_fields") else tuple(found)
    return {key: _mapped(of, one) for key, one in x.items()} if isinstance(x, dict) else of(x)
