"""The bytes that are alive where calls of a plan run in other orders, and some of them twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import fx

from ..ir import inplace
from ..ir.graph import DONATED
from ..ir.liveness import Facts


class Events(NamedTuple):
    """What runs, in its order.

    Attributes:
        calls: the places of calls in the graph; of what comes back from the host, ~m for the memory m.
        again: whether it is the second time.
    """

    calls: np.ndarray
    again: np.ndarray

    @staticmethod
    def of(once: np.ndarray, before: Sequence[int], again: Sequence[int]) -> Events:
        """Calls that run once, with what is done again put between them.

        Args:
            once: the calls.
            before: for each that is done again, the place in `once` before which it stands.
            again: what is done again.
        """
        return Events(np.insert(once, before, again), np.insert(np.zeros(len(once), bool), before, True))


class Alive(NamedTuple):
    """What is alive while events run.

    Attributes:
        bytes: how many at each event, as `Facts.live` counts them.
        made, last: for each memory the event that makes it, and the last one that needs it; -1 for none. Behind those of all
            memories stand those of their copies, which are made again.
    """

    bytes: list[int]
    made: np.ndarray
    last: np.ndarray


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
        self._as_arrays()

    def _as_arrays(self) -> None:
        """The same for `live`, as arrays. Those of calls have one entry more, at the end, for what is no call."""
        calls = [node.op == "call_function" for node in self.nodes]
        sizes = [sum(self.bytes[m] for m in made) if call else 0 for made, call in zip(self.made, calls)]
        place = {node: i for i, node in enumerate(self.nodes)}
        self._is_call, self._size = np.array([*calls, False]), np.array([*sizes, 0], np.int64)
        self._bytes = np.array(self.bytes, np.int64)
        # what is free behind the last event that needs a memory, or the copy of one: arguments do not count
        self._freed = np.array([0 if m in self.given else size for m, size in enumerate(self.bytes)] * 2, np.int64)
        self._maker = np.array([place[memory.maker] for memory in self.memories], np.int64)
        # each call with each memory that it needs
        self._reader = np.array([i for i, read in enumerate(self.read) for _ in read], np.int64)
        self._needed = np.array([m for read in self.read for m in read], np.int64)
        self._find_taking(sizes)

    def _find_taking(self, sizes: list[int]) -> None:
        """Find out which calls may write where something lies that is as large as what they make."""
        donated = [m for m in sorted(self.given) if DONATED in self.memories[m].maker.meta]
        free = {self.bytes[m] for m in donated}
        results = [not self.facts.results.isdisjoint(self.facts.made[node]) for node in self.nodes]
        taking = [result and size > 0 and size in free for result, size in zip(results, sizes)]
        pointwise = [size > 0 and inplace.is_pointwise(node) for node, size in zip(self.nodes, sizes)]
        self._donated = np.array(donated, np.int64)
        self._may_take, self._is_pointwise = np.array([*taking, False]), np.array([*pointwise, False])

    def live(self, events: Events, at: int, dropped: frozenset[int]) -> Alive:
        """What is alive while events run.

        Args:
            events: what runs.
            at: the call after which what is made again takes the place of what it repeats.
            dropped: the memories that are not kept.
        """
        made, last = self._spans(events, at, dropped)
        calls = np.append(events.calls, -1)  # one event more, to which -1 leads: what is not there ends in it
        calls[calls < 0] = len(self.nodes)
        back = np.flatnonzero(events.calls < 0)
        size, is_call = self._size[calls], self._is_call[calls]
        size[back] = self._bytes[~events.calls[back]]
        freed = np.zeros_like(size)
        np.add.at(freed, last, self._freed)
        freed[~is_call] = 0
        # whether a pointwise call writes over an operand as large that it is the last to read
        over = np.zeros_like(is_call)
        over[last[(last > made) & (self._freed == size[last])]] = True
        over &= self._is_pointwise[calls]
        new = size.copy()
        new[self._reusing(calls, last)] = 0
        alive = np.cumsum(new - freed) + freed - size * over
        return Alive(alive[:-1].tolist(), made, last)

    def _reusing(self, calls: np.ndarray, last: np.ndarray) -> list[int]:
        """The events whose results take the memory of a donated argument as large that has died: they are no new memory."""
        takers, dies = np.flatnonzero(self._may_take[calls]), last[self._donated]
        dead = self._is_call[calls[dies]]
        turns = [(n, False, size) for n, size in zip(dies[dead].tolist(), self._bytes[self._donated[dead]].tolist())]
        turns += [(n, True, size) for n, size in zip(takers.tolist(), self._size[calls[takers]].tolist())]
        free, found = Counter[int](), []
        for n, takes, size in sorted(turns):
            if not takes:
                free[size] += 1
            elif free[size]:
                free[size] -= 1
                found.append(n)
        return found

    def _spans(self, events: Events, at: int, dropped: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
        """The event that makes each memory, and the last one that needs it, as in `Alive`."""
        count, never = len(self.bytes), len(events.calls)
        first, second, back = (np.full(n, -1) for n in (len(self.nodes), len(self.nodes), count))
        for found, which in ((first, ~events.again), (second, events.again & (events.calls >= 0))):
            found[events.calls[which]] = np.flatnonzero(which)
        host = np.flatnonzero(events.calls < 0)
        back[~events.calls[host]] = host
        # A call of several results is repeated for one of them though another one comes back from the host: then that is made
        # twice, and is there from the earlier event on.
        repeated = second[self._maker]
        since = np.minimum(np.where(repeated < 0, never, repeated), np.where(back < 0, never, back))
        kept = np.ones(count, bool)
        kept[[*dropped]] = False
        since[kept] = never
        made = np.concatenate([first[self._maker], np.maximum(repeated, back)])
        last = made.copy()
        for place, may in ((first, self._reader > at), (second, True)):
            n = place[self._reader]
            is_copy = may & (since[self._needed] <= n)
            np.maximum.at(last, self._needed + count * is_copy, n)
        return made, last
