"""Dependencies between the calls of a plan, and putting a plan into another order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

from torch import fx

from ..._core import torch_internals
from .graph import Step, calls, changed, memories, reordered

Needs = dict[fx.Node, list[fx.Node]]


def needs(graph: fx.Graph) -> Needs:
    """What must come before each node: its arguments; and, of calls that touch memory which is written, or that do something
    besides giving a result, the ones before it."""
    found: Needs = {node: node.all_input_nodes for node in graph.nodes}
    hot, effects = changed(graph), set(torch_internals.calls_of(graph, _acts))
    if not hot and not effects:
        return found
    lie = memories(graph) if hot else {}
    roots = frozenset().union(*(lie[node] for node in hot))
    last: dict[Any, fx.Node] = {}
    for node in calls(graph) if hot else sorted(effects):
        before = found[node]
        touched: set[Any] = {root for x in (node, *before) for root in lie[x] & roots} if roots else set()
        if node in effects:
            touched.add("effect")
        if touched:
            found[node] = list(dict.fromkeys([*before, *(last[what] for what in touched if what in last)]))
            last.update(dict.fromkeys(touched, node))
    return found


def _acts(target: Any) -> bool:
    return isinstance(target, Step) and target.effect


def marked_before(needed: Needs, marks: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each node, which of `marks` must come before it: bit i for the i-th."""
    bits = {node: 1 << i for i, node in enumerate(marks)}
    found: dict[fx.Node, int] = {}  # with its own bit
    for node in in_order(needed, dict.fromkeys(needed, 0)):
        mask = bits.get(node, 0)
        for x in needed[node]:
            mask |= found[x]
        found[node] = mask
    return {node: mask & ~bits[node] if node in bits else mask for node, mask in found.items()}


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
    inputs = [node for node in needed if node.op == "placeholder"]
    outputs = [node for node in needed if node.op == "output"]
    computed = sorted((node for node in needed if node.op == "call_function"), key=place.__getitem__)
    line = [*inputs, *computed, *outputs]
    rank = {node: i for i, node in enumerate(line)}
    if all(rank[x] < i for i, node in enumerate(line) for x in needed[node]):
        return line
    missing = [len(needed[node]) for node in line]
    users: list[list[int]] = [[] for _ in line]
    for i, node in enumerate(line):
        for x in needed[node]:
            users[rank[x]].append(i)
    ready = [i for i, count in enumerate(missing) if not count]
    order = []
    while ready:
        first = heapq.heappop(ready)
        order.append(line[first])
        for user in users[first]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, user)
    assert len(order) == len(needed), "there is no order in which the calls can run"
    return order
