"""Liveness: which buffers are alive at each call, for a given order of the calls."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from ..._core import torch_internals
from ..._core.distributed.collectives import Collective
from . import dependencies, inplace, memory_aliases
from . import graph as plan
from .graph import DONATED
from .mapped import mapped
from .nested import Nested
from .sums_in_place import may_be_in_place

Line = Sequence[fx.Node]


class Facts:
    """What does not depend on the order: where values lie, and what must come before what."""

    def __init__(self, graph: fx.Graph) -> None:
        self.lie = lie = memory_aliases.memories(graph)
        self.made = {node: [m for m in lie[node] if m.maker is node] for node in graph.nodes}
        self.bytes = {memory: memory.bytes for made in self.made.values() for memory in made}
        for node, target in mapped(graph):
            self.bytes.update(dict.fromkeys(target.will_lie_in_donated(node), 0))
        turns = torch_internals.calls_of(graph, _takes_turns)
        fixed = plan.changed(graph).union(turns, plan.writers(graph))
        self.movable = {x for x in plan.calls(graph) if x not in fixed and not _is_part(x)}
        self.needed = dependencies.needs(graph)
        for one, other in itertools.pairwise(turns):
            self.needed[other].append(one)
        self.read = {node: _read(node, lie) for node in graph.nodes}
        self.results = frozenset(m for x in plan.output(graph).all_input_nodes for m in lie[x])
        self._number = {memory: i for i, memory in enumerate(self.bytes)}
        self._sizes = list(self.bytes.values())
        self._kinds = [m.maker.op if m.maker.op == "call_function" else DONATED in m.maker.meta for m in self.bytes]
        self._calls = {node: self._call(node) for node in graph.nodes}

    def _call(self, node: fx.Node) -> _Call:
        number, made = self._number, self.made[node]
        if node.target is operator.getitem:  # which makes nothing
            return _Call(True, [], [number[m] for m in self.read[node]], 0, False, [])
        read, results = [number[m] for m in self.read[node]], [number[m] for m in made if m in self.results]
        over = inplace.is_pointwise(node) or may_be_in_place(node)
        return _Call(node.op == "call_function", [number[m] for m in made], read, self.size(made), over, results)

    def ends(self, line: Line) -> dict[memory_aliases.Memory, float]:
        """For each memory, the place of the last call that needs it."""
        return dict(zip(self.bytes, map(float, self.last_reads(line))))

    def arranged(self, place: dict[fx.Node, float], line: Line) -> Line:
        """A line's calls, each as early as its place and what it needs allow; the line itself where it is in that order."""
        found = dependencies.in_order(self.needed, place)
        return line if found == line else found

    def size(self, memories: Iterable[memory_aliases.Memory]) -> int:
        """The bytes of some memories."""
        return sum(map(self.bytes.__getitem__, memories))

    def live(self, line: Line) -> list[int]:
        """How many bytes are alive at each node in an order, if results are written over what dies and what is donated.

        Arguments do not count.
        """
        return self._counted(line, self.last_reads(line))[0]

    def left(self, line: Line, last: Sequence[int]) -> tuple[int, Counter[int]]:
        """How many bytes are alive behind the first calls of an order, and how many donated arguments of a size are free.

        Args:
            line: the calls that have run.
            last: of the whole order (`last_reads`).
        """
        return self._counted(line, last)[1:]

    def last_reads(self, line: Line) -> list[int]:
        """For each memory, by its number, the place in an order of the last call that needs it."""
        last = [-1] * len(self._sizes)
        for i, node in enumerate(line):
            call = self._calls[node]
            for memory in call.made:
                last[memory] = i
            for memory in call.read:
                last[memory] = i
        return last

    def is_needed(self, memory: memory_aliases.Memory, last: Sequence[int], place: int) -> bool:
        """Whether something needs a memory at a place of an order or behind it."""
        return last[self._number[memory]] >= place

    def _counted(self, line: Line, ends: Sequence[int]) -> tuple[list[int], int, Counter[int]]:
        sizes, kinds, calls = self._sizes, self._kinds, [self._calls[node] for node in line]
        live, found = 0, []
        donated: Counter[int] = Counter()  # dead donated arguments, which results may take: how many of a size
        for i, call in enumerate(calls):
            if not call.computes:
                found.append(live)
                continue
            made, freed, over = call.size, 0, False
            for memory in call.read:
                if ends[memory] == i:
                    if kinds[memory] == "call_function":
                        freed += sizes[memory]
                        over |= sizes[memory] == made
                    elif kinds[memory]:
                        donated[sizes[memory]] += 1
            for memory in call.results:
                if donated[sizes[memory]]:
                    donated[sizes[memory]] -= 1
                    live -= sizes[memory]  # it is no new memory
            live += made
            found.append(live - made if over and call.writes_over else live)
            live -= freed
            for memory in call.made:
                if ends[memory] == i:
                    live -= sizes[memory]
        return found, live, donated


class _Call(NamedTuple):
    """What one node makes and reads: memories, by their numbers.

    Attributes:
        size: the bytes of what it makes.
        writes_over: whether it may lie where an argument lay.
        results: those that are results of the plan.
    """

    computes: bool
    made: list[int]
    read: list[int]
    size: int
    writes_over: bool
    results: list[int]


def _takes_turns(target: Any) -> bool:
    """Whether other ranks, or the world outside, take part in a call.

    A call with collectives in its bodies is among them: it has an effect (`Nested`). Else ranks with blocks of other sizes
    would move it past a collective, and meet in different ones.
    """
    return isinstance(target, Collective) or (isinstance(target, plan.Step) and target.effect)


def _is_part(x: fx.Node) -> bool:
    """Whether it takes one result out of the many of a call with bodies, which lies where it lies wherever that stands."""
    return x.target is operator.getitem and isinstance(x.args[0].target, Nested)  # type: ignore[union-attr]


def _read(node: fx.Node, lie: Mapping[fx.Node, frozenset[memory_aliases.Memory]]) -> list[memory_aliases.Memory]:
    touched = memory_aliases.touched(node)
    return list(lie[touched[0]]) if len(touched) == 1 else list(dict.fromkeys(m for x in touched for m in lie[x]))
