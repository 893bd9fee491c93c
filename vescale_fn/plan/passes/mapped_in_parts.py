"""A formula that is mapped over many leaves, in a few calls, where what all leaves need at once would be the most of a plan."""

from __future__ import annotations

import itertools
import math

from torch import fx

from ..ir.graph import calls, copied, value
from ..ir.mapped import Mapped, mapped, split
from ..ir.memory_use import memory

MOST = 4  # calls for one: each costs as much as that for all leaves costs besides the leaves
LEAST = 1 << 16  # bytes that are worth a call


def in_parts(graph: fx.Graph) -> fx.Graph:
    """The graph in which such a call is several, so that it needs no more than the rest of the plan, if that needs anything."""
    if not any(True for _ in mapped(graph)):
        return graph
    graph = copied(graph)
    needs = dict(zip(calls(graph), (moment.bytes for moment in memory(graph).timeline), strict=True))
    rest = max((n for node, n in needs.items() if not isinstance(node.target, Mapped)), default=0)
    for node, target in mapped(graph):
        before = needs.get(node.prev, rest)
        own, room = needs[node] - before, rest - before
        if target.rows > 1 and own > LEAST and 0 < room < own:
            split(node, _parts(node, target, min(MOST, math.ceil(own / room))))
    return graph


def _parts(node: fx.Node, target: Mapped, n: int) -> list[list[int]]:
    """The rows in `n` runs of about as many bytes."""
    sizes = [value(x).nbytes for x in target.lists(node)[0]]
    found: dict[int, list[int]] = {}
    for row, before in enumerate(itertools.accumulate(sizes[:-1], initial=0)):
        found.setdefault(n * before // sum(sizes), []).append(row)
    return list(found.values())
