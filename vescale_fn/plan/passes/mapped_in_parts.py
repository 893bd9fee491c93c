"""A formula that is mapped over many leaves, in a few calls: where what all leaves need at once would be the most of a plan, or
would not stay in the processor's cache from one step of the formula to the next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ..ir.graph import copied, value
from ..ir.leaf_lists import LEAVES
from ..ir.mapped import Mapped, mapped, split
from ..ir.memory_use import alive_at

MOST = 4  # calls for one: each costs as much as that for all leaves costs besides the leaves
ALONE = 2  # where the rest of the plan needs nothing
LEAST = 1 << 16  # bytes that are worth a call
CACHED = 1 << 19  # bytes of each list that are taken at once on a CPU: a few such lists are in its cache


def in_parts(graph: fx.Graph, cached: int = CACHED) -> fx.Graph:
    """The graph in which such a call is several, so that it needs no more than the rest of the plan.

    Args:
        cached: how many bytes of each list are taken at once.
    """
    if not any(True for _ in mapped(graph)):
        return graph
    graph = copied(graph)
    needs = alive_at(graph)
    rest = max((n for node, n in needs.items() if not isinstance(node.target, Mapped)), default=0)
    for node, target in mapped(graph):
        before = needs.get(node.prev, rest)
        own, room, many = needs[node] - before, rest - before, 1
        if own > LEAST and room < own:
            many = min(MOST, math.ceil(own / room)) if room > 0 else ALONE
        if target.on_leaves:
            leaves = target.lists(node)[0][0].meta[LEAVES]
            if leaves[0].device.type == "cpu":
                many = max(many, math.ceil(sum(x.nbytes for x in leaves) / cached))
            if many > 1:
                runs = _parts([x.nbytes for x in leaves], many)
                node.target = replace(target, runs=tuple((run[0], run[-1] + 1) for run in runs))
        elif many > 1:
            split(node, _parts([value(x).nbytes for x in target.lists(node)[0]], many))
    return graph


def _parts(sizes: Sequence[int], n: int) -> list[list[int]]:
    """The rows in `n` runs of about as many bytes."""
    found: dict[int, list[int]] = {}
    for row, before in enumerate(itertools.accumulate(sizes[:-1], initial=0)):
        found.setdefault(n * before // sum(sizes), []).append(row)
    return list(found.values())
