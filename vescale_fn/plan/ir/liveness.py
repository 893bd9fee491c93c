"""Liveness: which buffers are alive at each call, for a given order of the calls."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torch import fx

from ..._core.distributed.collectives import Collective
from . import dependencies, inplace, memory_aliases
from . import graph as plan
from .graph import DONATED
from .mapped import mapped

Line = Sequence[fx.Node]


class Facts:
    """What does not depend on the order: where values lie, and what must come before what."""

    def __init__(self, graph: fx.Graph) -> None:
        self.lie = memory_aliases.memories(graph)
        self.bytes = {memory: memory.bytes for memory in frozenset().union(*self.lie.values())}
        for node, target in mapped(graph):
            self.bytes.update(dict.fromkeys(target.will_lie_in_donated(node), 0))
        fixed = plan.changed(graph)
        turns = [node for node in plan.calls(graph) if _takes_turns(node)]
        self.movable = {
            node for node in plan.calls(graph) if not (node in fixed or _takes_turns(node) or plan.has_effect(node))
        }
        self.needed = dependencies.needs(graph)
        for one, other in itertools.pairwise(turns):
            self.needed[other].append(one)
        self.made = {node: [m for m in self.lie[node] if m.maker is node] for node in graph.nodes}
        self.read = {
            node: list(dict.fromkeys(m for x in memory_aliases.touched(node) for m in self.lie[x]))
            for node in graph.nodes
        }
        self.results = frozenset(m for x in plan.output(graph).all_input_nodes for m in self.lie[x])
        self._number = {memory: i for i, memory in enumerate(self.bytes)}
        self._sizes = list(self.bytes.values())
        self._kinds = [m.maker.op if m.maker.op == "call_function" else DONATED in m.maker.meta for m in self.bytes]
        self._calls = {node: self._call(node) for node in graph.nodes}

    def _call(self, node: fx.Node) -> _Call:
        made, read = ([self._number[m] for m in memories[node]] for memories in (self.made, self.read))
        results = [self._number[m] for m in self.made[node] if m in self.results]
        size = sum(map(self._sizes.__getitem__, made))
        return _Call(node.op == "call_function", made, read, size, inplace.is_pointwise(node), results)

    def ends(self, line: Line) -> dict[memory_aliases.Memory, fx.Node]:
        """For each memory, the last call that needs it."""
        return {memory: node for node in line for memory in (*self.made[node], *self.read[node])}

    def arranged(self, place: dict[fx.Node, float]) -> Line:
        """The calls, each as early as its place and what it needs allow."""
        return dependencies.in_order(self.needed, place)

    def size(self, memories: Iterable[memory_aliases.Memory]) -> int:
        """The bytes of some memories."""
        return sum(map(self.bytes.__getitem__, memories))

    def live(self, line: Line) -> list[int]:
        """How many bytes are alive at each node in an order, if results are written over what dies and what is donated.

        Arguments do not count.
        """
        return self._counted(line, ())[0]

    def left(self, line: Line, later: Collection[memory_aliases.Memory]) -> tuple[int, Counter[int]]:
        """How many bytes are alive behind the first calls of an order, and how many donated arguments of a size are free.

        Args:
            line: the calls that have run.
            later: what other calls need.
        """
        return self._counted(line, later)[1:]

    def _counted(self, line: Line, later: Collection[memory_aliases.Memory]) -> tuple[list[int], int, Counter[int]]:
        sizes, kinds, calls = self._sizes, self._kinds, [self._calls[node] for node in line]
        ends = [-1] * len(sizes)
        for i, call in enumerate(calls):
            for memory in call.made:
                ends[memory] = i
            for memory in call.read:
                ends[memory] = i
        for memory in later:
            ends[self._number[memory]] = -1
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
            found.append(live - made if over and call.pointwise else live)
            live -= freed
            for memory in call.made:
                if ends[memory] == i:
                    live -= sizes[memory]
        return found, live, donated


class _Call(NamedTuple):
    """What one node makes and reads: memories, by their numbers.

    Attributes:
        size: the bytes of what it makes.
        results: those that are results of the plan.
    """

    computes: bool
    made: list[int]
    read: list[int]
    size: int
    pointwise: bool
    results: list[int]


def _takes_turns(node: fx.Node) -> bool:
    """Whether other ranks, or the world outside, take part in a call."""
    return isinstance(node.target, Collective) or (isinstance(node.target, plan.Step) and node.target.effect)
