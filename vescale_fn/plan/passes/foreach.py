"""The same small call for many leaves, at the end of a step, as one call of torch's ``_foreach_`` functions: the update.

Elementwise calls whose results only leave, or go into others of the kind, are put at the end, level by level; equal ones of a
level become one. On a CPU that halves what they cost; on a GPU a list of leaves is one kernel. Large leaves, which
gain nothing and would only be kept alive for longer, stay where they are.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from ..ir.graph import AT_ONCE, HOLDERS, calls, copied, held_alike, memories, output, value, written
from ..ir.mapped import COLUMN
from .donate import HAND_OVER
from .list_calls import call_of, mark_own, shared
from .on_lists import on_lists


def foreach(graph: fx.Graph) -> fx.Graph:
    """The graph with one call for many leaves."""
    if any(COLUMN in node.meta for node in graph.nodes):
        return on_lists(graph)
    graph = copied(graph)
    mark_own(graph)
    if len(_last(graph)) < 2:
        return graph
    memory = _Memory(graph)
    groups: dict[Any, list[fx.Node]] = {}
    for node, level in _levels(memory, _waiting(graph, memory)).items():
        one = call_of(node)
        kind = node if one is None else one.kind
        groups.setdefault((level, kind, node.meta.get(HOLDERS)), []).append(node)
    end, moved, gone = output(graph), _Touched(), set[fx.Node]()  # gone: what gives its result at the end only
    instead: dict[fx.Node, fx.Node] = {}
    for _, nodes in sorted(groups.items(), key=lambda group: group[0][0]):
        if len(nodes) == 1 and moved.can_follow(memory, nodes[0]) and gone.isdisjoint(nodes[0].all_input_nodes):
            continue  # it stays where it is
        for node in nodes:
            moved.add(memory, node)
        if len(nodes) > 1:
            made = _together(graph, end, nodes)
            gone.update(made.values())
            instead |= made
        else:
            end.prepend(nodes[0])
            gone.add(nodes[0])
    end.args = fx.map_arg(end.args, lambda x: instead.get(x, x))  # of all results at once: there may be thousands
    for node in instead:
        graph.erase_node(node)
    return graph


class _Memory:
    """The memory, known by the nodes that made it, that each call of a graph reads or writes, and that it writes."""

    def __init__(self, graph: fx.Graph) -> None:
        lie = memories(graph)
        self.touches = {n: {root for x in (n, *n.all_input_nodes) for root in lie[x]} for n in calls(graph)}
        self.writes = {n: {root for x in written(n) for root in lie[x]} for n in calls(graph)}


class _Touched:
    """The memory that some calls touch."""

    def __init__(self) -> None:
        self.touched: set[fx.Node] = set()
        self.changed: set[fx.Node] = set()

    def add(self, memory: _Memory, node: fx.Node) -> None:
        self.touched |= memory.touches[node]
        self.changed |= memory.writes[node]

    def can_follow(self, memory: _Memory, node: fx.Node) -> bool:
        """Whether a call may as well come on the other side of these."""
        return not memory.writes[node] & self.touched and not memory.touches[node] & self.changed


def _waiting(graph: fx.Graph, memory: _Memory) -> list[fx.Node]:
    """The calls that can wait until all others are done, in order."""
    found: dict[fx.Node, None] = {}
    later = _Touched()
    for node in reversed(list(calls(graph))):
        free = all(user in found or user.op == "output" for user in node.users)
        if free and later.can_follow(memory, node) and _may_wait(node):
            found[node] = None
        else:
            later.add(memory, node)
    return list(reversed(found))


def _last(graph: fx.Graph) -> set[fx.Node]:
    """The calls that could wait until all others are done, were it not for what is written in place."""
    found = set[fx.Node]()
    for node in reversed(list(calls(graph))):
        if node.target is not operator.getitem and all(user in found or user.op == "output" for user in node.users):
            if _may_wait(node):
                found.add(node)
    return found


def _may_wait(node: fx.Node) -> bool:
    return node.target is HAND_OVER or call_of(node) is not None


def _levels(memory: _Memory, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each call its level: it needs only lower ones before it."""
    levels: dict[fx.Node, int] = {}
    read: dict[fx.Node, int] = {}  # memory -> the last level that touches it
    changed: dict[fx.Node, int] = {}
    for node in nodes:
        before = [changed.get(root, 0) for root in memory.touches[node]]
        before += [read.get(root, 0) for root in memory.writes[node]]
        before += [levels.get(x, 0) for x in node.all_input_nodes]
        levels[node] = level = 1 + max(before)
        read.update((root, max(level, read.get(root, 0))) for root in memory.touches[node])
        changed.update((root, level) for root in memory.writes[node])
    return levels


def _together(graph: fx.Graph, end: fx.Node, nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """One call, in front of the end, for several; for each of them what stands for its result, in all calls."""
    made: list[Any] = [call_of(node) for node in nodes]
    lists = [list(column) for column in zip(*(one.lists for one in made))]
    first, given = made[0], dict[fx.Node, fx.Node]()
    at_once = HOLDERS in nodes[0].meta and not any(any(x.meta[HOLDERS]) for x in first.shared if isinstance(x, fx.Node))
    with graph.inserting_before(end):
        call = graph.call_function(first.target, (*lists, *shared(graph, first, nodes[-1])), dict(first.kwargs))
        call.meta.update(nodes[-1].meta, val=None if first.in_place else [value(node) for node in nodes])
        call.meta |= {AT_ONCE: True} if at_once and all(held_alike(x, call) for row in lists for x in row) else {}
        for i, (node, one) in enumerate(zip(nodes, made)):
            new = one.lists[0]
            if not first.in_place:
                new = graph.call_function(operator.getitem, (call, i))
                new.meta.update(node.meta)
            node.replace_all_uses_with(new, lambda user: user is not end)
            given[node] = new
    return given
