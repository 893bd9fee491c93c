"""What is computed in a plan before some call and needed after it: each value is kept, computed again from what is kept, or
waits in the memory of the host.

What is computed again is so once, right before its first use behind the call; the same call on the same values gives the same
bits. What waits on the host is back there at its first use.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import fx

from ..._core.distributed.collectives import Collective, Start
from ..ir import costs, host_copies, inplace
from ..ir import graph as plan
from ..ir.graph import KEPT
from ..ir.liveness import Facts
from ..ir.nested import Nested
from .event_counts import Counts, Events
from .host_trips import Trip, arrange, total


class Keeping(NamedTuple):
    """The memories that are kept, and those that wait on the host. The others are computed again."""

    kept: frozenset[int]
    sent: frozenset[int] = frozenset()


class Count(NamedTuple):
    """What a choice makes of a plan.

    Attributes:
        seconds: that all calls take.
        live: how many bytes are alive at each event, where all that goes to the host is there as long as can be.
        events: the calls.
        trips: what goes to the host, and when.
    """

    seconds: float
    live: list[int]
    events: Events
    trips: list[Trip]


class KeptAcross(Counts):
    """The choices that there are at a call.

    Args:
        graph: in whose order calls run.
        at: the place of the call.
        collectives: whether collectives may be repeated.
        sending: whether values may wait on the host.

    Attributes:
        free: the memories that can be kept or not, and are of use behind the call.
        repeats: the memories that can be computed again. Others that are not kept are on the host.
        copies: for those that can wait on the host, the seconds that a copy takes.
        needed: those of them that are needed there, whatever is kept.
        maker: the calls that make them.
        last: for each memory the last call that needs it up to the place of the call.
        until: for each that is free the call before which it would be made again, if nothing were kept.
        seconds: what each call takes.
    """

    def __init__(self, graph: fx.Graph, at: int, collectives: bool = True, sending: bool = True) -> None:
        super().__init__(graph)
        self.graph, nodes = graph, self.nodes
        while at + 1 < len(nodes) and nodes[at + 1].target is operator.getitem:
            at += 1
        self.at, place, of = at, {node: i for i, node in enumerate(nodes)}, costs.rates(graph)
        self.seconds = [costs.seconds(node, of) if node.op == "call_function" else 0.0 for node in nodes]
        self._call, self._seconds = of.call, np.array([*self.seconds, 0.0])
        made = self._made(place)
        self.repeats = {m for m in made if self._repeatable(self.memories[m].maker, collectives)}
        self._whole = self._sendable(made, place, of) if sending else {}
        self._takes = self._taken(place, self.repeats.union(self._whole.values()))
        self._find_uses(place)
        self.copies = {m: costs.copy(self.bytes[m], of) for m in self.free.intersection(self._whole.values())}

    def _find_uses(self, place: dict[fx.Node, int]) -> None:
        """Find out what is of use behind the call, and when."""
        at = self.at
        self._once, self._before = self._counted()
        takes = [(i, self._takes[i]) for i in range(at + 1, len(self.nodes))]
        self._late = [(i, frozenset().union(*(needed for _, needed in found))) for i, found in takes if found]
        self._first = {x: i for i, again in self._repeats(Keeping(frozenset())) for x in again}
        self.needed = {m for _, needed in self._late for m in needed}
        self.free = frozenset(self.needed.union(*(needed for x in self._first for _, needed in self._takes[x])))
        self.maker = {m: place[self.memories[m].maker] for m in self.free}
        self.last = {m: i for i in range(at + 1) for m in (*self.made[i], *self.read[i])}
        self.until = {m: self._first[self.maker[m]] for m in self.free & self.repeats}
        self.until |= {m: self._first[x] for x, m in self._whole.items() if m in self.free - self.repeats}

    def _counted(self) -> tuple[np.ndarray, list[int]]:
        """The calls that count, without views: a value is used at least as late as what is a view of it. And for each call how
        many come before it."""
        counts = [bool(self.made[i]) or not node.users or i == self.at for i, node in enumerate(self.nodes)]
        return np.flatnonzero(counts), [0, *itertools.accumulate(map(int, counts))]

    def _taken(self, place: dict[fx.Node, int], can: set[int]) -> list[list[tuple[int, list[int]]]]:
        """For each call the early ones whose results it takes, and the memories of these that it needs and that can be made
        again."""
        found = []
        for i, node in enumerate(self.nodes):
            comes = self._whole.get(i, -1) in can - self.repeats  # from the host, of nothing
            early = [place[x] for x in node.all_input_nodes if place[x] <= self.at and not comes]
            own = node.target is operator.getitem
            needs = [(x, [m for m in self.lie[i if own else x] if m in can]) for x in early]
            found.append([(x, needed) for x, needed in needs if needed])
        return found

    def _made(self, place: dict[fx.Node, int]) -> list[int]:
        """The memories that are made up to the call, and of which it is known what lies there, and that nothing writes."""
        changed = plan.changed(self.graph)
        shared = {m for i, node in enumerate(self.nodes) for m in self.lie[i] if _is_mixed(node, self.facts)}
        return [
            i
            for i, (maker, part) in enumerate(self.memories)
            if maker.op == "call_function"
            and place[maker] <= self.at
            and part >= 0
            and i not in shared
            and self.memories[i] not in self.facts.results
            and maker not in changed
            and host_copies.runs(maker) is None
        ]

    def _repeatable(self, maker: fx.Node, collectives: bool) -> bool:
        return (
            not plan.has_effect(maker)
            and plan.changed(self.graph).isdisjoint(maker.all_input_nodes)
            and KEPT not in maker.meta
            and not isinstance(maker.target, Nested)
            and (collectives or not isinstance(maker.target, Collective))
        )

    def _sendable(self, made: list[int], place: dict[fx.Node, int], of: costs.Rates) -> dict[int, int]:
        """The calls that give all that lies in a memory, with the memory, where that can wait on the host, and is worth it.
        What a collective that was begun will bring is not there yet."""
        found = {}
        for m in made:
            maker, part = self.memories[m]
            if isinstance(maker.target, Start):
                continue
            x, node = plan.value(maker), maker
            if isinstance(x, (list, tuple)):
                if isinstance(maker.target, Nested) or any(user.target is not operator.getitem for user in maker.users):
                    continue
                x, node = x[part], next((user for user in maker.users if user.args[1] == part), maker)
            there = isinstance(x, torch.Tensor) and costs.device_of(x) != "cpu" and inplace.is_dense(x)
            if there and maker.users and costs.copy(self.bytes[m], of) >= of.call:
                found[place[node]] = m
        return found

    def _repeats(self, choice: Keeping) -> Iterator[tuple[int, list[int]]]:
        """What is repeated, or comes back from the host, and before which call."""
        done: set[int] = set()
        for i, needed in self._late:
            if choice.kept.issuperset(needed):
                continue
            todo = [x for x, needed in self._takes[i] if x not in done and not choice.kept.issuperset(needed)]
            if not todo:
                continue
            found = set(todo)
            while todo:
                x = todo.pop()
                if self._comes(x, choice) is not None:
                    continue
                for y, needed in self._takes[x]:
                    if y not in done and y not in found and not choice.kept.issuperset(needed):
                        found.add(y)
                        todo.append(y)
            done |= found
            yield i, sorted(found)

    def _comes(self, x: int, choice: Keeping) -> int | None:
        """The memory that is back from the host where a call would be repeated; None where that is repeated."""
        m = self._whole.get(x)
        return m if m in choice.sent or (m is not None and m not in self.repeats) else None

    def repeatable(self) -> Iterator[tuple[int, list[int], set[int]]]:
        """The calls that may be repeated, each with the free memories that it makes, and those that it takes."""
        takes: dict[int, set[int]] = {}
        for x in self._first:
            makers = {self.maker[m] for m in self.lie[x] if m in self.free}
            for maker in makers:
                takes.setdefault(maker, set()).update(m for _, needed in self._takes[x] for m in needed)
        for maker, taken in takes.items():
            own = [m for m in self.made[maker] if m in self.free]
            yield maker, own, taken.difference(own)

    def time(self, choice: Keeping) -> float:
        """The seconds that what is repeated takes."""
        again = (x for _, again in self._repeats(choice) for x in again if self._comes(x, choice) is None)
        return sum(map(self.seconds.__getitem__, again))

    def count(self, choice: Keeping, limit: int) -> Count:
        """What a choice makes of the plan.

        Args:
            choice: what is kept, and what goes to the host.
            limit: of the bytes besides the arguments, for what is on its way.
        """
        before, calls = list[int](), list[int]()
        for i, again in self._repeats(choice):
            found = [(x, self._comes(x, choice)) for x in again]
            calls += [x if m is None else ~m for x, m in found if m is not None or self.made[x]]
            before += [self._before[i]] * (len(calls) - len(before))
        events = Events.of(self._once, before, calls)
        alive = self.live(events, self.at, self.free - choice.kept)
        seconds = self._seconds[events.calls.clip(-1)].tolist()
        trips: list[Trip] = []
        if self.copies:
            back = np.flatnonzero(events.calls < 0)
            for m, use in zip((~events.calls[back]).tolist(), back.tolist()):
                trips.append(Trip(m, self.bytes[m], self.copies[m], int(alive.made[m]), int(alive.last[m]), use))
            arrange(trips, [*alive.bytes], seconds, limit)
        return Count(total(trips, seconds, self._call), alive.bytes, events, trips)

    def rewritten(self, choice: Keeping, limit: int) -> fx.Graph:
        """The graph of a choice."""
        graph = plan.copied(self.graph)
        nodes = list(graph.nodes)
        copies: dict[fx.Node, fx.Node] = {}
        turns = {node: turn for turn, node in enumerate(plan.collectives(graph))}
        for i, again in self._repeats(choice):
            for x in again:
                if self._comes(x, choice) is not None:
                    copies[nodes[x]] = host_copies.inserted(nodes[i], host_copies.fetched, (), nodes[x])
                    continue
                takes = {nodes[y] for y, needed in self._takes[x] if not choice.kept.issuperset(needed)}
                with graph.inserting_before(nodes[i]):
                    copy = graph.node_copy(nodes[x], lambda y, takes=takes: copies[y] if y in takes else y)
                copy.meta["again"] = True
                if nodes[x] in turns:
                    copy.meta[plan.REPEATS] = turns[nodes[x]]
                copies[nodes[x]] = copy
        for i, _ in self._late:
            for x, needed in self._takes[i]:
                if not choice.kept.issuperset(needed):
                    nodes[i].replace_input_with(nodes[x], copies[nodes[x]])
        if self.copies:
            self._send(nodes, copies, self.count(choice, limit))
        return graph

    def _send(self, nodes: list[fx.Node], copies: dict[fx.Node, fx.Node], count: Count) -> None:
        """Put what moves values to the host and back where it is to run."""
        whole = {m: nodes[x] for x, m in self._whole.items()}
        events = zip(count.events.calls.tolist(), count.events.again.tolist(), strict=True)
        calls = [nodes[i] if not again else copies[whole[~i] if i < 0 else nodes[i]] for i, again in events]
        there: dict[int, fx.Node] = {}
        for trip in sorted(count.trips, key=lambda trip: trip.made):
            x = whole[trip.memory]
            sent = host_copies.inserted(x.next, host_copies.offload, (x,), x)
            there[trip.memory] = host_copies.inserted(calls[trip.leaves], host_copies.offloaded, (sent, x), x)
        for trip in sorted(count.trips, key=lambda trip: trip.use):
            x = whole[trip.memory]
            coming = host_copies.inserted(calls[trip.comes], host_copies.fetch, (there[trip.memory],), x)
            copies[x].args = (coming,)


def _is_mixed(node: fx.Node, facts: Facts) -> bool:
    """Whether it is not known in which one of several memories a result lies."""
    made = facts.made[node]
    return len(facts.lie[node]) > 1 and node.op != "output" and len(made) < len(facts.lie[node])


def gathered(graph: fx.Graph) -> fx.Graph:
    """The graph, in which what takes a part out of several results follows right behind what gives them: the rest may be
    free from there on."""
    graph = plan.copied(graph)
    for node in list(plan.calls(graph)):
        if node.target is operator.getitem:
            node.args[0].append(node)  # type: ignore[union-attr]
    return graph
