"""Dependencies between the calls of a plan, and putting a plan into another order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

from torch import fx

from .graph import Step, changed, memories, reordered

Needs = dict[fx.Node, list[fx.Node]]


def needs(graph: fx.Graph) -> Needs:
    """What must come before each node: its arguments; and, of calls that touch memory which is written, or that do something
    besides giving a result, the ones before it."""
    hot = changed(graph)
    lie = memories(graph) if hot else {}
    roots = frozenset().union(*(lie[node] for node in hot))
    found: Needs = {}
    last: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        before = list(node.all_input_nodes)
        if node.op == "call_function":
            touched: set[Any] = {root for x in (node, *before) for root in lie[x] & roots} if roots else set()
            if isinstance(node.target, Step) and node.target.effect:
                touched.add("effect")
            before += [last[what] for what in touched if what in last]
            last.update(dict.fromkeys(touched, node))
        found[node] = list(dict.fromkeys(before))
    return found


def marked_before(needed: Needs, marks: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each node, which of `marks` must come before it: bit i for the i-th."""
    bits = {node: 1 << i for i, node in enumerate(marks)}
    found: dict[fx.Node, int] = {}
    for node in in_order(needed, dict.fromkeys(needed, 0)):
        mask = 0
        for x in needed[node]:
            mask |= found[x] | bits.get(x, 0)
        found[node] = mask
    return found


def in_turn(nodes: Sequence[fx.Node], needed: Needs, place: dict[fx.Node, float]) -> list[fx.Node]:
    """`nodes`, each as early as `place` says and what must come before it allows."""
    before = marked_before(needed, nodes)
    bits = {node: 1 << i for i, node in enumerate(nodes)}
    waiting, done, order = sorted(nodes, key=place.__getitem__), 0, []
    while waiting:
        node = next(node for node in waiting if not before[node] & ~done)
        waiting.remove(node)
        order.append(node)
        done |= bits[node]
    return order


def arranged(
    graph: fx.Graph, needed: Needs, place: dict[fx.Node, float], order: Sequence[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The graph in another order: the nodes of `order` in that order, and each call as early as `place` says and what it
    needs allows. Also, for each node, that of the new graph."""
    needed = {node: list(before) for node, before in needed.items()}
    for one, other in itertools.pairwise(order):
        needed[other].append(one)
    return reordered(graph, in_order(needed, place))


def in_order(needed: Needs, place: dict[fx.Node, float]) -> list[fx.Node]:
    """Always the node that comes first of those that can."""
    users: dict[fx.Node, list[fx.Node]] = {}
    missing = {node: len(set(before)) for node, before in needed.items()}
    for node, before in needed.items():
        for x in set(before):
            users.setdefault(x, []).append(node)
    stage = {"placeholder": 0, "call_function": 1, "output": 2}
    rank = {
        node: (stage[node.op], place[node] if node.op == "call_function" else 0, i) for i, node in enumerate(needed)
    }
    ready = [(rank[node], node) for node in needed if not missing[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)[1]
        order.append(node)
        for user in users.get(node, ()):
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (rank[user], user))
    assert len(order) == len(needed), "there is no order in which the calls can run"
    return order
