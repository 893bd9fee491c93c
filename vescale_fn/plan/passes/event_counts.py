"""The bytes that are alive where calls of a plan run in other orders, and some of them twice."""

from __future__ import annotations

from collections import Counter

from torch import fx

from ..ir import inplace
from ..ir.graph import DONATED
from ..ir.liveness import Facts

# the places of calls in the order in which they run, and whether it is the second time; of what comes back from the host, ~m
# for the memory m
Events = list[tuple[int, bool]]


class Counts:
    """A graph as numbers, to count the bytes that are alive in many orders: memories and calls are known by their places.

    Args:
        graph: in whose order calls run.

    Attributes:
        bytes: of each memory.
        given: the memories of arguments.
        made, read: for each call the memories that it makes and needs.
        lie: for each call the memories in which its result may lie.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.facts = facts = Facts(graph)
        self.nodes, self.memories = list(graph.nodes), list(facts.bytes)
        number = {memory: i for i, memory in enumerate(self.memories)}
        self.bytes = [facts.bytes[memory] for memory in self.memories]
        self.given = {i for i, m in enumerate(self.memories) if m.maker.op != "call_function"}
        self.made, self.read, self.lie = (
            [[number[m] for m in of[node]] for node in self.nodes] for of in (facts.made, facts.read, facts.lie)
        )
        self._donated = {i for i in self.given if DONATED in self.memories[i].maker.meta}
        self._calls = [node.op == "call_function" for node in self.nodes]
        self._pointwise = [call and inplace.is_pointwise(node) for node, call in zip(self.nodes, self._calls)]
        self._result = [not facts.results.isdisjoint(facts.made[node]) for node in self.nodes]

    def live(self, events: Events, at: int, dropped: frozenset[int]) -> tuple[list[int], dict[int, int]]:
        """How many bytes are alive at each event, as `Facts.live` counts them; and the last event that needs each memory.

        Args:
            events: what runs.
            at: the call after which what is made again takes the place of what it repeats.
            dropped: the memories that are not kept.
        """
        rows, ends = self._rows(events, at, dropped)
        count, live, found, free = len(self.bytes), 0, list[int](), Counter[int]()
        for n, ((i, _), (made, read)) in enumerate(zip(events, rows, strict=True)):
            if i < 0:
                live += self.bytes[~i]
                found.append(live)
                continue
            if not self._calls[i]:
                found.append(live)
                continue
            dying = [m for m in read if ends[m] == n]
            free.update(self.bytes[m] for m in dying if m in self._donated)
            gone = [self.bytes[m % count] for m in dying if m not in self.given]
            size = sum(self.bytes[m % count] for m in made)
            if size and self._result[i] and free[size]:
                free[size] -= 1
                live -= size  # it is no new memory
            live += size
            found.append(live - size if self._pointwise[i] and size in gone else live)
            live -= sum(gone) + sum(self.bytes[m % count] for m in made if ends[m] == n)
        return found, ends

    def _rows(
        self, events: Events, at: int, dropped: frozenset[int]
    ) -> tuple[list[tuple[list[int], list[int]]], dict[int, int]]:
        """For each event what is made and read, copies by numbers of their own; and for each memory the last event."""
        count, rows, ends, copied = len(self.bytes), [], dict[int, int](), set[int]()
        for n, (i, again) in enumerate(events):
            made, read = (self.made[i], self.read[i]) if i >= 0 else ([~i], [])
            if again:
                copied.update(made)
                made = [m + count for m in made]
            if again or i > at:
                read = [m + count if m in dropped and m in copied else m for m in read]
            rows.append((made, read))
            for m in made:
                ends[m] = n
            for m in read:
                ends[m] = n
        return rows, ends
