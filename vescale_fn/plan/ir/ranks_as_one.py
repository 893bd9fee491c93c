"""Simulated ranks that do the same, as one rank: passes look at its program alone, which is then written out for all of them.

What a recording holds of an op on simulated ranks' blocks is a call for each block (a row), and of a collective one call that
takes the blocks of all ranks. As one, a row is a single call, and a collective takes and gives one value, as it does where
each rank is a process of its own. Numbers that differ by rank are `PerRank`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._core.distributed.collectives import Collective
from ..._core.distributed.mesh import communicator_of
from .collective_nodes import collective_of, is_listed
from .graph import Step, calls, name_of, value, written
from .nested import Nested
from .per_rank import PerRank, RanksDiffer
from .written_out import WrittenOut

ROW = "row"  # in the meta of a node: (for each rank the number of its call, which of these it is, its place in that)
_KINDS = (bool, int, float, complex)


@dataclass(frozen=True)
class RanksAsOne:
    """The program of one rank, for all.

    Args:
        graph: the program.
        count: how many ranks there are.
        inputs: for each input of the program of all ranks, one of `graph` that lies as it.
        places: for each input of `graph`, for each rank the place of its own among `inputs`.
        results: for each result of the program of all ranks, which of `graph`'s it is, of which rank, and what is equal for
            results that may be one tensor.
    """

    graph: fx.Graph
    count: int
    inputs: Sequence[fx.Node]
    places: Sequence[Sequence[int]]
    results: Sequence[tuple[int, int, Any]]

    def written_out(self, graph: fx.Graph) -> fx.Graph:
        """The program of all ranks, of what passes have made of `graph`."""
        return WrittenOut(self, graph).graph


def folded(recorded: fx.Graph) -> RanksAsOne:
    """The program of one of the ranks of a recording.

    Raises:
        RanksDiffer: they do not do the same.
    """
    return _Folded(recorded).ranks


class _Folded:
    """A recording in which each rank's calls are nodes of their own, as one rank's program: `ranks`."""

    def __init__(self, recorded: fx.Graph) -> None:
        self.graph = fx.Graph()
        rows = _rows(recorded)
        self.count = next((len(of_all) for of_all in rows.values()), 0)
        if not self.count or any(len(of_all) != self.count for of_all in rows.values()):
            raise RanksDiffer
        self.one: dict[fx.Node, fx.Node] = {}  # of the recording -> of `graph`
        self.all: dict[fx.Node, list[fx.Node]] = {}  # of `graph` -> of the recording, for each rank
        self.places: list[list[fx.Node]] = []  # for each input of `graph`, that of each rank
        self.closed: dict[tuple[fx.Node, ...], fx.Node] = {}  # of tensors that it closes over, one for each rank
        self.written = any(written(node) for node in calls(recorded))
        for node in recorded.nodes:
            if node not in self.one:
                self._take(node, rows.get(_row_of(node)))
        inputs = {node: i for i, node in enumerate(x for x in recorded.nodes if x.op == "placeholder")}
        places = [[inputs[node] for node in of_all] for of_all in self.places]
        self.ranks = RanksAsOne(self.graph, self.count, list(inputs), places, self.results)

    def _take(self, node: fx.Node, row: list[fx.Node] | None) -> None:
        if node.op == "output":
            return self._end(node)
        if isinstance(node.target, (Nested, Step)) and (isinstance(node.target, Nested) or node.target.effect):
            raise RanksDiffer
        if isinstance(node.target, Collective):
            return self._collective(node)
        of_all = [node] * self.count if row is None else row
        first = of_all[0]
        if first is not node or not all(alike(value(x), value(first)) for x in dict.fromkeys(of_all)):
            raise RanksDiffer
        if node.op == "placeholder":
            return self._note(self._input(of_all), of_all)
        for x in dict.fromkeys(of_all):
            if (x.target, len(x.args), x.kwargs.keys()) != (node.target, len(node.args), node.kwargs.keys()):
                raise RanksDiffer
        if row is None and not self.written and not self._is_single(_copied(node)):
            return  # what a rank got, as its own: see `_value`
        args = tuple(self._argument([x.args[i] for x in of_all]) for i in range(len(node.args)))
        kwargs = {key: self._argument([x.kwargs[key] for x in of_all]) for key in node.kwargs}
        self._note(self.graph.create_node(node.op, node.target, args, kwargs, node.name), of_all)

    def _note(self, new: fx.Node, of_all: list[fx.Node]) -> None:
        new.meta = {key: x for key, x in of_all[0].meta.items() if key != ROW}
        self.all[new] = of_all
        self.one.update(dict.fromkeys(of_all, new))

    def _input(self, of_all: list[fx.Node]) -> fx.Node:
        last = next((x for x in reversed(self.graph.nodes) if x.op == "placeholder"), None)
        with self.graph.inserting_before() if last is None else self.graph.inserting_after(last):
            new = self.graph.create_node("placeholder", of_all[0].target, (), {}, of_all[0].name)
        self.places.append(of_all)
        return new

    def _collective(self, node: fx.Node) -> None:
        given, vals = node.args[0], value(node)
        if not is_listed(node) or len(given) != self.count or not all(alike(x, vals[0]) for x in vals):  # type: ignore
            raise RanksDiffer
        mesh = collective_of(node).mesh
        if mesh.device_type != "cpu":  # where it is begun, and waited for
            raise RanksDiffer
        if len(communicator_of(mesh).ranks) != self.count or mesh.size() != self.count:  # others are elsewhere
            raise RanksDiffer
        parts = {part.args[1]: part for part in node.users}
        new = self.graph.create_node(node.op, node.target, (self._argument(list(given)),), {}, node.name)  # type: ignore
        first = {id(x): i for i, x in reversed(list(enumerate(vals)))}
        if not parts.keys() >= set(first.values()):
            raise RanksDiffer
        self._note(new, [parts[first[id(x)]] for x in vals])
        new.meta = {**{key: x for key, x in node.meta.items() if key != ROW}, "val": vals[0]}
        self.one[node] = new

    def _is_single(self, x: fx.Node) -> bool:
        one = self.one.get(x)
        return one is None or all(other is x for other in self.all[one])

    def _argument(self, of_all: list[Any]) -> Any:
        """What the call of one rank is given, of what each is given."""
        first = of_all[0]
        if isinstance(first, fx.Node):
            return self._value(of_all)
        if isinstance(first, (list, tuple)):
            if any(type(x) is not type(first) or len(x) != len(first) for x in of_all):
                raise RanksDiffer
            return type(first)([self._argument([x[i] for x in of_all]) for i in range(len(first))])
        if all(x is first for x in of_all) or all(type(x) is type(first) and repr(x) == repr(first) for x in of_all):
            return first
        if all(type(x) is int for x in of_all):
            return PerRank(of_all)
        raise RanksDiffer

    def _value(self, of_all: list[Any]) -> fx.Node:
        one = self.one.get(of_all[0])
        if one is not None and _same(self.all[one], of_all):
            return one
        if not self.written:  # what a factory makes, or what all get, is each rank's own: a copy of the first one's
            sources = [_copied(x) for x in of_all]
            one = self.one.get(sources[0])
            if one is not None and _same(self.all[one], sources):
                return one
        if tuple(of_all) in self.closed:
            return self.closed[tuple(of_all)]
        if not all(isinstance(x, fx.Node) and x.op == "placeholder" and ROW not in x.meta for x in of_all):
            raise RanksDiffer
        if not all(alike(value(x), value(of_all[0])) for x in of_all):
            raise RanksDiffer
        new = self.closed[tuple(of_all)] = self._input(of_all)
        new.meta, self.all[new] = dict(of_all[0].meta), of_all
        return new

    def _end(self, node: fx.Node) -> None:
        ones: dict[fx.Node, int] = {}
        self.results: list[tuple[int, int, Any]] = []
        for before in node.args[0]:  # type: ignore[union-attr]
            x = before if before in self.one else _copied(before)
            one = self.one.get(x)  # type: ignore[arg-type]
            at = next((rank for rank, other in enumerate(self.all.get(one, ())) if other is x), None)  # type: ignore
            if one is None or at is None:
                raise RanksDiffer
            self.results.append((ones.setdefault(one, len(ones)), at, before))
        new = self.graph.output(tuple(ones))
        new.meta = dict(node.meta)


def of_first_rank(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of some values of a recording that the first one of simulated ranks has; all, where each rank is a process."""
    return [node for node in nodes if _has_first_rank(node)]


def _has_first_rank(node: fx.Node) -> bool:
    while ROW not in node.meta:
        inputs = node.all_input_nodes
        if len(inputs) != 1:
            return True
        if node.target is operator.getitem and isinstance(inputs[0].target, Collective):
            return not node.args[1]
        node = inputs[0]
    of_all, number, *_ = node.meta[ROW]
    return bool(of_all[0] == number)


def _row_of(node: fx.Node) -> Any:
    row = node.meta.get(ROW)
    return None if row is None else (id(row[0]), *row[2:])


def _rows(graph: fx.Graph) -> dict[Any, list[fx.Node]]:
    """For each row, the call of each rank."""
    members: dict[Any, dict[int, fx.Node]] = {}
    holders: dict[Any, Sequence[int]] = {}
    for node in graph.nodes:
        if (key := _row_of(node)) is not None:
            of_all, number, *_ = node.meta[ROW]
            members.setdefault(key, {})[number] = node
            holders[key] = of_all
    try:
        return {key: [members[key][number] for number in of_all] for key, of_all in holders.items()}
    except KeyError:
        raise RanksDiffer from None


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(map(operator.is_, one, other))


def _copied(x: Any) -> Any:
    """What a value outside of rows is a copy of, or another name of."""
    while (
        isinstance(x, fx.Node)
        and ROW not in x.meta
        and name_of(x) in ("clone", "detach")
        and len(x.all_input_nodes) == 1
    ):
        if not alike(value(x), value(x.all_input_nodes[0])):
            break
        x = x.all_input_nodes[0]
    return x


def alike(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return len(x) == len(y) and all(map(alike, x, y))
    return type(x) is type(y) and (x is y or type(x) in _KINDS)
