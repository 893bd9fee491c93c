"""What was begun stays under way while others compute, in the order of calls that needs least memory.

`order` counts bytes alone, so that it puts each start next to its wait: what a gather gives takes memory from its start on,
what a sum takes is kept until its wait. Here waits, and what needs them, come later, and starts, and what makes their input,
earlier, until as much is computed in between as the values travel; and only as far as the most that is alive at once rises by
no more than a number of bytes.

Starts keep their order, which is the same on all ranks (`overlap`). What a rank computes beside them is its own affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from ..._core.distributed.collectives import Collective, Start
from ..ir import costs
from ..ir import graph as plan
from ..ir.collective_nodes import collective_of, in_order_of_ranks, is_written
from ..ir.dependencies import Needs
from ..ir.liveness import Facts, Line
from ..ir.nested import Nested, collectives_in
from ..ir.work import work
from .overlap import AHEAD, is_wait, join_again, split


def under_way(graph: fx.Graph, ahead: int = AHEAD, on_cpu: bool = False) -> fx.Graph:
    """The graph in which what travels is started as early and waited for as late as it takes, and memory allows.

    Args:
        ahead: the bytes by which the most that is alive at once may rise, as `order` counts it: before it is known which
            calls write over what they read.
        on_cpu: also where the ranks are processes on CPUs, which then have the sending to do besides.
    """
    if not any(on_cpu or collective_of(node).mesh.device_type != "cpu" for node in plan.collectives(graph)):
        return graph
    graph = plan.copied(graph)
    waits = _apart(graph, on_cpu)
    facts, line = Facts(graph), list(graph.nodes)
    most = max(_alive(facts, line, waits)) + ahead
    for moving in (_Earlier, _Later):
        found = moving(facts, line, waits, most).moved()
        if max(_alive(facts, found, waits)) <= most:
            line = found
    graph, values = plan.reordered(plan.given_up(graph), line)
    for start, wait in waits.items():
        join_again(graph, values[start], values[wait])
    return graph


def _apart(graph: fx.Graph, on_cpu: bool) -> dict[fx.Node, fx.Node]:
    """The starts of a graph, whose other collectives are cut into start and wait, too; and their waits. One that begins or
    ends in another body of a loop in parts stays where it is."""
    hot, waits = plan.changed(graph), dict[fx.Node, fx.Node]()
    for node in plan.collectives(graph):
        if isinstance(node.target, Start):
            waits.update((node, user) for user in node.users if is_wait(user))
        elif (on_cpu or collective_of(node).mesh.device_type != "cpu") and not is_written(node, hot):
            start, waits[start] = split(graph, node)
    return waits


def _alive(facts: Facts, line: Line, waits: Mapping[fx.Node, fx.Node]) -> list[int]:
    """The bytes that are alive at each node, with what collectives need for themselves while they are under way."""
    own = {start: in_order_of_ranks(start) for start in waits}
    given_back = {wait: own[start] for start, wait in waits.items()}
    found, now = [], 0
    for node, bytes_ in zip(line, facts.live(line), strict=True):
        now += own.get(node, 0)
        found.append(bytes_ + now)
        now -= given_back.get(node, 0)
    return found


class _Moving:
    """The calls of a line, one after the other, of which some are held back until what travels beside the others is there.

    Held back is what waits for that, and what is behind it; but no product, collective, loop or shared call, which are what
    computes meanwhile, and nothing across bodies that communicate. Time counts as on GPUs, the devices of which this is for.

    Args:
        facts: of the graph.
        line: all of its nodes, in order.
        waits: the starts, and their waits.
        most: the bytes that may be alive at once.

    Attributes:
        before: what must be through before each call.
        due: when what is to be held back may go on.
        held: what is held back, and the bytes that this takes.
        now: how long the calls take that are through.
        free: when what was begun over some axes is there.
    """

    def __init__(self, facts: Facts, line: Line, waits: Mapping[fx.Node, fx.Node], most: int) -> None:
        self.facts, self.line, self.waits, self.most = facts, line, waits, most
        self.starts = {wait: start for start, wait in waits.items()}
        self.alive = _alive(facts, line, waits)
        self.before: Needs = facts.needed
        self.due, self.held = dict[fx.Node, float](), dict[fx.Node, int]()
        self.now, self.free = 0.0, dict[frozenset[str], float]()
        self.through: list[fx.Node] = []

    def moved(self) -> Line:
        """The line, in its new order."""
        return self._moved(range(len(self.line)))

    def _moved(self, places: Iterable[int]) -> list[fx.Node]:
        for i in places:
            node = self.line[i]
            if self._is_behind(node) or self.due.get(node, 0.0) > self.now:
                if self.may_be_held(node):
                    self.held[node] = self._bytes(node)
                    continue
                self._let_go(self._held_before(node))
            full = self.alive[i] + sum(self.held.values()) > self.most
            if self.held and (full or node.op != "call_function" or _sends(node)):
                self._let_go([*self.held])
            self._pass(node)
            for one in [*self.held]:
                if self.due.get(one, 0.0) <= self.now and not self._is_behind(one):
                    self._let_go([one])
        self._let_go([*self.held])
        return self.through

    def _is_behind(self, node: fx.Node) -> bool:
        return any(x in self.held for x in self.before[node])

    def _held_before(self, node: fx.Node) -> list[fx.Node]:
        todo, found = [node], set[fx.Node]()
        while todo:
            more = [x for x in self.before[todo.pop()] if x in self.held and x not in found]
            found.update(more)
            todo += more
        return [x for x in self.held if x in found]

    def _let_go(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            del self.held[node]
            self.now = max(self.now, self.due.get(node, 0.0))
            self._pass(node)

    def _pass(self, node: fx.Node) -> None:
        self.through.append(node)
        if node.op == "call_function" and not isinstance(node.target, Collective) and not is_wait(node):
            self.now += costs.seconds(node, costs.RATES["cuda"])
        self._begin(node)

    def _travel(self, start: fx.Node) -> float:
        """When a collective that begins now is over: those over the same axes go one after the other."""
        axes = frozenset(collective_of(start).axes)
        end = self.free[axes] = max(self.now, self.free.get(axes, 0.0)) + costs.travel(start)
        return end

    def may_be_held(self, node: fx.Node) -> bool:
        """Whether a call may be held back."""
        return node in self.facts.movable and not isinstance(node.target, Nested) and not work(node).flops

    def _bytes(self, node: fx.Node) -> int:
        """What it takes to hold a call back."""
        raise NotImplementedError

    def _begin(self, node: fx.Node) -> None:
        """What travels from a call that is through is under way."""
        raise NotImplementedError


def _sends(node: fx.Node) -> bool:
    """Whether it has bodies with collectives in them, which all ranks are to meet in one order with those outside."""
    return isinstance(node.target, Nested) and next(collectives_in(node), None) is not None


class _Later(_Moving):
    """Waits, and what needs them, come later."""

    def _bytes(self, node: fx.Node) -> int:  # what it reads is kept
        ends = [m for m in self.facts.read[node] if m.maker.op == "call_function" or plan.DONATED in m.maker.meta]
        return self.facts.size(ends) + (in_order_of_ranks(self.starts[node]) if node in self.starts else 0)

    def _begin(self, node: fx.Node) -> None:
        if node in self.waits:
            self.due[self.waits[node]] = self._travel(node)


class _Earlier(_Moving):
    """Starts, and what makes their input, come earlier: the same from the end of the line."""

    def __init__(self, facts: Facts, line: Line, waits: Mapping[fx.Node, fx.Node], most: int) -> None:
        super().__init__(facts, line, waits, most)
        self.before = {node: [] for node in line}
        for node in line:
            for x in facts.needed[node]:
                self.before[x].append(node)

    def moved(self) -> Line:
        return self._moved(reversed(range(len(self.line))))[::-1]

    def may_be_held(self, node: fx.Node) -> bool:
        """Starts, too."""
        return node in self.waits or super().may_be_held(node)

    def _bytes(self, node: fx.Node) -> int:  # what it makes is there before
        return self.facts.size(self.facts.made[node]) + (in_order_of_ranks(node) if node in self.waits else 0)

    def _begin(self, node: fx.Node) -> None:
        if node in self.starts:
            self.due[self.starts[node]] = self._travel(self.starts[node])
