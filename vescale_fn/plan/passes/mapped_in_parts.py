"""A formula that is mapped over many leaves, in a few calls, where what all leaves need at once would be the most of a plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ..ir.graph import calls, copied, value
from ..ir.leaf_lists import LEAVES
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
        if (target.rows > 1 or target.on_leaves) and own > LEAST and 0 < room < own:
            column = target.lists(node)[0]
            vals = column[0].meta[LEAVES] if target.on_leaves else list(map(value, column))
            parts = _parts([x.nbytes for x in vals], min(MOST, math.ceil(own / room)))
            if target.on_leaves:
                node.target = replace(target, runs=tuple((rows[0], rows[-1] + 1) for rows in parts))
            else:
                split(node, parts)
    return graph


def _parts(sizes: Sequence[int], n: int) -> list[list[int]]:
    """The rows in `n` runs of about as many bytes."""
    found: dict[int, list[int]] = {}
    for row, before in enumerate(itertools.accumulate(sizes[:-1], initial=0)):
        found.setdefault(n * before // sum(sizes), []).append(row)
    return list(found.values())
