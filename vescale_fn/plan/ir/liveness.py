"""Liveness: which buffers are alive at each call, for a given order of the calls."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from torch import fx

from ..._core.distributed.collectives import Collective
from . import dependencies, inplace, memory_aliases
from . import graph as plan

DONATED = "donated"  # a placeholder with this in its meta may be written into

Line = Sequence[fx.Node]


class Facts:
    """What does not depend on the order: where values lie, and what must come before what."""

    def __init__(self, graph: fx.Graph) -> None:
        self.lie = memory_aliases.memories(graph)
        self.bytes = {memory: memory.bytes for memory in frozenset().union(*self.lie.values())}
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
            node: list(dict.fromkeys(m for x in node.all_input_nodes for m in self.lie[x])) for node in graph.nodes
        }
        self.results = frozenset(m for x in plan.output(graph).all_input_nodes for m in self.lie[x])

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
        return self._counted(line, self.ends(line))[0]

    def left(self, line: Line, later: Collection[memory_aliases.Memory]) -> tuple[int, Counter[int]]:
        """How many bytes are alive behind the first calls of an order, and how many donated arguments of a size are free.

        Args:
            line: the calls that have run.
            later: what other calls need.
        """
        ends = {memory: node for memory, node in self.ends(line).items() if memory not in later}
        return self._counted(line, ends)[1:]

    def _counted(self, line: Line, ends: dict[memory_aliases.Memory, fx.Node]) -> tuple[list[int], int, Counter[int]]:
        live, found = 0, []
        donated: Counter[int] = Counter()  # dead donated arguments, which results may take: how many of a size
        for node in line:
            if node.op != "call_function":
                found.append(live)
                continue
            dying = [memory for memory in self.read[node] if ends.get(memory) is node]
            donated.update(self.bytes[m] for m in dying if m.maker.op == "placeholder" and DONATED in m.maker.meta)
            dying = [memory for memory in dying if memory.maker.op == "call_function"]
            made = self.size(self.made[node])
            over = inplace.is_pointwise(node) and any(self.bytes[memory] == made for memory in dying)
            if donated[made] and made and not self.results.isdisjoint(self.made[node]):
                donated[made] -= 1
                live -= made  # it is no new memory
            live += made
            found.append(live - made if over else live)
            live -= self.size(dying)
            live -= self.size(memory for memory in self.made[node] if ends.get(memory) is node)
        return found, live, donated


def _takes_turns(node: fx.Node) -> bool:
    """Whether other ranks, or the world outside, take part in a call."""
    return isinstance(node.target, Collective) or (isinstance(node.target, plan.Step) and node.target.effect)
