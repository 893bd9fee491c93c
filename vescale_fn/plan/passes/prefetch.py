"""Collectives of a loop that are under way across the edge of an iteration.

`overlap` sees one iteration: nothing is computed while what it gathers first (a layer's parameters) travels, nor while what it
sums last (their gradients) does. So what depends on a slice alone is begun during the iteration before, and what no call of the
iteration itself needs is waited for after the one behind it (`rotated_loop`): the first gathers and the last sums, as many as
fit into a number of bytes, which the loop needs besides. The others have calls of the iteration to overlap with.

Every rank does this with the same collectives: what depends on what, their order, and their sizes, where the rank counts that
gives most, are the same on all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from ..._core.distributed.collectives import Collective, Start, group_size
from ..ir import graph as plan
from ..ir.collective_nodes import collective_of, is_written, only_moves, size
from ..ir.loop import Loop, loop_of, loops
from ..ir.nested import bodies_of, ends, everywhere, extracted, nested, reached
from ..ir.rotated_loop import OWN, Rotated
from .overlap import AHEAD, is_wait, join_again, split


def prefetch(graph: fx.Graph, ahead: int = AHEAD, on_cpu: bool = False) -> fx.Graph:
    """The graph in whose loops values travel across the edges of iterations.

    Args:
        ahead: the bytes that may, each way, besides those of one collective.
        on_cpu: also where the ranks are processes on CPUs, which then have the sending to do besides.
    """
    graph = plan.copied(graph)
    for node in loops(graph):
        node.target = _rotated(loop_of(node), ahead, on_cpu)
    return graph


def without_prefetch(graph: fx.Graph) -> fx.Graph:
    """The graph in which each iteration of a loop, of those in bodies too, waits for what it has begun."""
    return everywhere(_joined, plan.copied(graph)) if _has_parts(graph) else graph


def _has_parts(graph: fx.Graph) -> bool:
    """Whether there is a loop in parts."""
    return any(isinstance(node.target, Rotated) or any(map(_has_parts, bodies_of(node))) for node in nested(graph))


def _joined(graph: fx.Graph) -> fx.Graph:
    graph = plan.copied(graph)
    for node in loops(graph):
        node.target = loop_of(node).joined()
    return graph


def _rotated(loop: Loop, ahead: int, on_cpu: bool) -> Loop:
    """The loop in parts, if something then travels while something else is computed."""
    if loop.length < 2 or isinstance(loop, Rotated):
        return loop
    body = _Body(loop, on_cpu)
    early = _within(ahead, filter(body.is_early, body.waits))
    late = body.late([start for start in body.waits if start not in early])
    return body.in_parts(early, body.late(_within(ahead, reversed(late))))


def _within(ahead: int, starts: Iterable[fx.Node]) -> list[fx.Node]:
    """The first, and those behind it as far as they fit into a number of bytes."""
    found, bytes_ = list[fx.Node](), 0
    for start in starts:
        one = collective_of(start)
        if found:
            bytes_ += size(start) * (group_size(one.mesh, one.axes) if one.kind == "all_gather" else 1)
        if bytes_ > ahead:
            break
        found.append(start)
    return found


class _Body:
    """The body of a loop.

    Attributes:
        waits: of the collectives that may be under way when an iteration ends, by their starts, in order.
    """

    def __init__(self, loop: Loop, on_cpu: bool) -> None:
        self.loop, self.graph = loop, plan.copied(loop.body)
        hot = plan.changed(self.graph)
        self.whole, self.waits = list[fx.Node](), dict[fx.Node, fx.Node]()
        for node in plan.collectives(self.graph):
            if is_written(node, hot) or not (on_cpu or collective_of(node).mesh.device_type != "cpu"):
                continue
            if isinstance(node.target, Start):
                (self.waits[node],) = node.users
            else:
                start, self.waits[start] = split(self.graph, node)
                self.whole.append(start)
        self.places, self.outs = ends(self.graph)
        self.same = self.places[loop.given :]
        self.fixed = {x for x in plan.calls(self.graph) if x in hot or plan.has_effect(x)}
        self.fixed.update(plan.collectives(self.graph))

    def is_early(self, start: fx.Node) -> bool:
        """Whether a collective waits for nothing of the iteration before, nor for another collective."""
        return reached(start.all_input_nodes).isdisjoint(self.fixed.union(self.places[: self.loop.carry]))

    def late(self, starts: Sequence[fx.Node]) -> list[fx.Node]:
        """Those of some collectives that only results of the loop need, by calls that need nothing else of an iteration."""
        while True:
            behind = _behind(map(self.waits.__getitem__, starts))
            left = [start for start in starts if self._may_wait(_behind([self.waits[start]]), behind)]
            if len(left) == len(starts):
                return left
            starts = left

    def _may_wait(self, some: set[fx.Node], behind: set[fx.Node]) -> bool:
        """Whether some calls may run after the next iteration, where all of `behind` do."""
        calls = some.difference(self.waits.values())
        needed = {x for node in calls for x in node.all_input_nodes}.difference(self._alike(calls))
        mine, carry = self._totals(some), self.places[: self.loop.carry]
        return (
            some.isdisjoint(self.fixed)
            and not some.isdisjoint(self.outs)
            and needed <= behind.union(self._totals(behind))
            and all(behind.issuperset(x.users) for x in carry if x in mine or x in needed)
        )

    def _totals(self, behind: set[fx.Node]) -> list[fx.Node]:
        """The carried values in whose place some calls give others."""
        return [x for x, out in zip(self.places, self.outs[: self.loop.carry]) if out in behind]

    def _join_others(self, chosen: set[fx.Node]) -> None:
        for start in self.whole:
            if start not in chosen:
                join_again(self.graph, start, self.waits[start])

    def in_parts(self, early: Sequence[fx.Node], late: Sequence[fx.Node]) -> Loop:
        """The loop with some collectives begun an iteration ahead, and some waited for an iteration late."""
        self._join_others({*early, *late})
        _, self.outs = ends(self.graph)
        before, waits = reached(early), [self.waits[start] for start in late]
        behind = _behind(waits)
        alike = self._alike(behind.difference(waits)).difference(x for wait in waits for x in wait.all_input_nodes)
        second = self._without(before, behind, alike)
        if not (early or late) or not any(map(_computes, second)):
            return self.loop
        first, last = ([x for x in plan.calls(self.graph) if x in part] for part in (before, behind | alike))
        begun = [x for x in first if not before.issuperset(x.users)]
        places = [i for i, out in enumerate(self.outs) if out in behind]
        here = behind.union(alike, totals := self._totals(behind), self.same)
        left = list(dict.fromkeys(x for node in last for x in node.all_input_nodes if x not in here))
        gives = [None if out in behind else out for out in self.outs]
        parts = [self._part(second, self.places, begun, [], [*gives, *left])]
        if early:
            parts.insert(0, self._part(first, self.places[self.loop.carry :], [], [], begun))
        if late:
            parts.append(self._part(last, totals, left, self.same, [self.outs[i] for i in places]))
        return Rotated(**{**vars(self.loop), "bodies": tuple(parts)}, begins=bool(early), late=tuple(places))

    def _alike(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """What some calls need that is the same in all iterations and comes from no other rank; and what that needs."""
        fixed = self.fixed.union(plan.collectives(self.graph), self.places[: self.loop.given])
        needed = {x for node in nodes for x in node.all_input_nodes}
        return reached(x for x in needed if reached([x]).isdisjoint(fixed))

    def _without(self, before: set[fx.Node], behind: set[fx.Node], alike: set[fx.Node]) -> list[fx.Node]:
        """The calls of the iteration itself, without those that run before it or behind it, nor what only the latter need."""
        found: dict[fx.Node, None] = {}
        for x in reversed(self.graph.nodes):
            needed = x not in alike or any(user in found or user.op == "output" for user in x.users)
            if x.op == "call_function" and needed and x not in before and x not in behind:
                found[x] = None
        return [*reversed(found)]

    def _part(
        self,
        nodes: Sequence[fx.Node],
        given: Sequence[fx.Node],
        made: Sequence[fx.Node],
        same: Sequence[fx.Node],
        gives: Any,
    ) -> fx.Graph:
        """A part of some calls. Of what it is given, `made` are those that another part makes."""
        part, lie = extracted(nodes, [*given, *made, *same], gives), plan.memories(self.graph)
        for x, place in zip(made, ends(part)[0][len(given) :]):
            if all(root.op == "call_function" for root in lie[x]):
                place.meta[OWN] = True
        return part


def _behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Some calls and those that need them."""
    todo, found = list(nodes), set[fx.Node]()
    while todo:
        x = todo.pop()
        if x not in found and x.op != "output":
            found.add(x)
            todo += x.users
    return found


def _computes(x: fx.Node) -> bool:
    return not (only_moves(x) or isinstance(x.target, Collective) or is_wait(x))
