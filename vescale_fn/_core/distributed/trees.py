"""The order in which ranks add up: one binary tree over the members of a group, neighbours first.

A tree of n members is that of the first m and that of the others, where m is the largest power of two below n. So what is
computed, and in which order, depends on n alone; who computes which part of it is free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

Run = tuple[int, int]  # the members from one place up to another


def halves(run: Run) -> tuple[Run, Run]:
    """The two parts of a run of several members, each a tree of its own."""
    low, high = run
    middle = low + (1 << (high - low - 1).bit_length() - 1)
    return (low, middle), (middle, high)


@functools.lru_cache(maxsize=4096)
def subtrees(n: int, members: frozenset[int]) -> tuple[Run, ...]:
    """The largest parts of the tree of `n` members that consist of some of them."""
    return tuple(_subtrees((0, n), members))


def _subtrees(run: Run, members: Collection[int]) -> list[Run]:
    if all(i in members for i in range(*run)):
        return [run]
    return [] if run[1] - run[0] == 1 else [one for half in halves(run) for one in _subtrees(half, members)]


def total(run: Run, known: Mapping[Run, Any], op: Callable[[Any, Any], Any]) -> Any:
    """What a part of the tree comes to, of parts that are known: at the least each member."""
    found = known.get(run)
    if found is not None:
        return found
    left, right = halves(run)
    return op(total(left, known, op), total(right, known, op))
