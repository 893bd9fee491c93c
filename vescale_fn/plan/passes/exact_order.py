"""The order of a stretch of calls that needs the least memory at once, by a search of every order that matters.

Which bytes are alive after some calls depends on which have run, hardly on their order: the search goes from set to set of
calls, always from the one whose peak so far is lowest, so that the first one that is complete is the best.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from ..ir import inplace
from ..ir.graph import DONATED
from ..ir.liveness import Facts, Line
from ..ir.memory_aliases import Memory

_STATES = 4096  # of a stretch: as many as twelve calls that do not wait for each other have
_TRIES = 24  # stretches


def refined(facts: Facts, line: Line, length: int = 14) -> Line:
    """The line with the stretches around its peak in their best orders, as long as that lowers the peak.

    Args:
        facts: of the graph.
        line: all of its nodes in an order in which they can run.
        length: of a stretch. A graph with no more calls gets the best order of all.
    """
    line = list(line)
    first = next((i for i, node in enumerate(line) if node.op == "call_function"), len(line))
    for _ in range(_TRIES):
        live = facts.live(line)
        peak, last = max(live, default=0), facts.last_reads(line)
        at = live.index(peak) if live else 0
        if peak <= _least(facts, line[at]):
            break
        for before in (length // 2, 1, length - 1):
            low = max(first, min(at - before, len(line) - 1 - length))
            high = min(low + length, len(line) - 1)
            found = _best(facts, line, last, low, high, peak)
            if found is not None:
                line[low:high] = found
                break
        else:
            break
    return line


def _least(facts: Facts, node: fx.Node) -> int:
    """What is alive while a call runs in any order: what it reads and makes, but for results, which may take donated memory."""
    read = facts.size(m for m in facts.read[node] if m.maker.op == "call_function" and m not in facts.results)
    return (
        read if inplace.is_pointwise(node) else read + facts.size(m for m in facts.made[node] if m not in facts.results)
    )


class _State(NamedTuple):
    done: int  # bit i: call i of the stretch has run
    live: int
    donated: frozenset[tuple[int, int]]  # dead donated arguments that results may take: how many of a size


def _best(facts: Facts, line: Line, last: Sequence[int], low: int, high: int, below: int) -> Line | None:
    """Calls `low` to `high` of a line in the order whose peak is least; None where none stays below `below` bytes, or where
    that would take too long to find out. `last`: by memories, the calls that need them last."""
    stretch = line[low:high]
    bit = {node: 1 << i for i, node in enumerate(stretch)}
    before = [sum(bit.get(x, 0) for x in set(facts.needed[node])) for node in stretch]
    users: dict[Memory, int] = {}
    for node in stretch:
        for memory in dict.fromkeys((*facts.made[node], *facts.read[node])):
            users[memory] = users.get(memory, 0) | bit[node]
    later = {memory for memory in users if facts.is_needed(memory, last, high)}
    calls = [_Call(facts, node, later) for node in stretch]
    alive, donated = facts.left(line[:low], last)
    start = _State(0, alive, _key(donated))
    count = itertools.count()
    waiting: list[tuple[int, int, int, _State, tuple[int, ...]]] = [(0, 0, next(count), start, ())]
    seen = {start}
    whole = (1 << len(stretch)) - 1
    for _ in range(_STATES):
        if not waiting:
            return None
        peak, _, _, state, order = heapq.heappop(waiting)
        if state.done == whole:
            return [stretch[i] for i in order]
        for i, call in enumerate(calls):
            if state.done >> i & 1 or before[i] & ~state.done:
                continue
            at, new = call.after(state, state.done | 1 << i, users)
            if at < below and new not in seen:
                seen.add(new)
                heapq.heappush(waiting, (max(peak, at), -len(order) - 1, next(count), new, (*order, i)))
    return None


class _Call:
    """What one call makes and may end, as `Facts.live` counts it."""

    def __init__(self, facts: Facts, node: fx.Node, later: set[Memory]) -> None:
        self.made = facts.size(facts.made[node])
        self.passing = [(m, facts.bytes[m]) for m in facts.made[node] if m not in later]
        mortal = [(m, facts.bytes[m]) for m in facts.read[node] if m not in later]
        self.read = [(m, size) for m, size in mortal if m.maker.op == "call_function"]
        self.donated = [(m, size) for m, size in mortal if m.maker.op == "placeholder" and DONATED in m.maker.meta]
        self.pointwise = inplace.is_pointwise(node)
        self.results = [facts.bytes[m] for m in facts.made[node] if m in facts.results]

    def after(self, state: _State, done: int, users: dict[Memory, int]) -> tuple[int, _State]:
        """The bytes that are alive while it runs, and the state behind it."""
        live, donated = state.live, state.donated
        freed = [size for m, size in self.donated if not users[m] & ~done]
        if freed or donated:
            tally = Counter(dict(donated))
            tally.update(freed)
            for size in self.results:
                if tally[size]:
                    tally[size] -= 1
                    live -= size
            donated = _key(tally)
        dying = [size for m, size in self.read if not users[m] & ~done]
        live += self.made
        at = live - self.made if self.pointwise and self.made in dying else live
        live -= sum(dying) + sum(size for m, size in self.passing if not users[m] & ~done)
        return at, _State(done, live, donated)


def _key(donated: Counter[int]) -> frozenset[tuple[int, int]]:
    return frozenset((size, count) for size, count in donated.items() if count)
