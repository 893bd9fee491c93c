"""The cheapest edges to take out of a directed graph so that no way leads from its source to its sink, after Dinic (1970)."""

from __future__ import annotations

import math
from collections.abc import Hashable


class MinCut:
    """A directed graph with capacities, between ``SOURCE`` and ``SINK``.

    >>> graph = MinCut()
    >>> for edge in ((MinCut.SOURCE, "a", 3.0), ("a", "b", 1.0), ("b", MinCut.SINK, 2.0)):
    ...     graph.edge(*edge)
    >>> sorted(graph.reached() - {MinCut.SOURCE})
    ['a']
    """

    SOURCE, SINK = "source", "sink"

    def __init__(self) -> None:
        self._number: dict[Hashable, int] = {self.SOURCE: 0, self.SINK: 1}
        self._edges: list[list[int]] = [[], []]  # of each node; edge e ^ 1 is edge e turned round
        self._to: list[int] = []
        self._left: list[float] = []

    def edge(self, one: Hashable, other: Hashable, capacity: float) -> None:
        """An edge from `one` to `other`."""
        for start, end, left in ((one, other, capacity), (other, one, 0.0)):
            self._edges[self._of(start)].append(len(self._to))
            self._to.append(self._of(end))
            self._left.append(left)

    def reached(self) -> set[Hashable]:
        """The nodes on the source's side of the cheapest cut, of several the smallest such side."""
        while (depth := self._depths())[1] >= 0:
            self._block(depth)
        return {name for name, i in self._number.items() if depth[i] >= 0}

    def _of(self, name: Hashable) -> int:
        if name not in self._number:
            self._number[name] = len(self._edges)
            self._edges.append([])
        return self._number[name]

    def _depths(self) -> list[int]:
        depth = [-1] * len(self._edges)
        depth[0], line = 0, [0]
        for at in line:
            for e in self._edges[at]:
                if self._left[e] > _LEAST and depth[self._to[e]] < 0:
                    depth[self._to[e]] = depth[at] + 1
                    line.append(self._to[e])
        return depth

    def _block(self, depth: list[int]) -> None:
        """Send what can be sent along shortest ways."""
        turn, way, at = [0] * len(self._edges), list[int](), 0
        while True:
            if at == 1:
                flow = min(self._left[e] for e in way)
                for e in way:
                    self._left[e] -= flow
                    self._left[e ^ 1] += flow
                full = next(i for i, e in enumerate(way) if self._left[e] <= _LEAST)
                at = self._to[way[full] ^ 1]
                del way[full:]
                continue
            edges = self._edges[at]
            while turn[at] < len(edges):
                e = edges[turn[at]]
                if self._left[e] > _LEAST and depth[self._to[e]] == depth[at] + 1:
                    break
                turn[at] += 1
            if turn[at] < len(edges):
                way.append(edges[turn[at]])
                at = self._to[edges[turn[at]]]
            elif not way:
                return
            else:
                at = self._to[way.pop() ^ 1]
                turn[at] += 1


_LEAST = 1e-15
INFINITE = math.inf
