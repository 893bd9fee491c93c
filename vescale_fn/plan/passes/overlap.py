"""Collectives are started as soon as their input is there and waited for when their result is needed, so that ranks compute
while values travel. Gathers of what is there from the start (parameters) are started ahead of their use: not all at once,
which would take the memory of all, but the next one and as many as fit into a number of bytes.

All ranks must start their collectives in one order, or they wait for each other for ever. A rank's plan has other local calls
than its neighbour's where blocks differ in size, so nothing here may depend on how many calls there are. What every rank shares
is the order in which the program's operations were recorded: each leaves its calls between those of the one before it and those
of the one after it, so that which of two calls comes first is the same on every rank wherever they belong to different
operations. Starts are ordered by that alone, each by the call that makes its input, or by the gather, or the sum before that,
ahead of which it is started; and the bytes that are counted are those of the rank that has most.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ..._core.distributed import collectives as collectives_
from ..._core.distributed.collectives import Collective, Start, group_size
from ..ir import dependencies
from ..ir.collective_nodes import collective_of, given, is_light, is_written, made_at, size
from ..ir.graph import Step, changed, collectives, copied, given_up

AHEAD = 64 << 20
_SUMS = ("reduce_scatter", "all_reduce")


def overlap(graph: fx.Graph, ahead: int = AHEAD, on_cpu: bool = False) -> fx.Graph:
    """The graph in which values travel while others are computed.

    Args:
        ahead: of what is gathered from the start, the bytes that may be on their way besides what is needed next.
        on_cpu: also where the ranks are processes on CPUs, which then have the sending to do besides.
    """
    graph = copied(graph)
    hot = changed(graph)
    nodes = [
        node
        for node in collectives(graph)
        if (on_cpu or collective_of(node).mesh.device_type != "cpu") and not is_written(node, hot)
    ]
    if not nodes:
        return graph
    starts = _starts(graph, nodes, ahead)
    place: dict[fx.Node, float] = {node: i for i, node in enumerate(graph.nodes)}
    pairs = [split(graph, node) for node in nodes]
    for node, (start, wait) in zip(nodes, pairs, strict=True):
        place[start], place[wait] = starts[node], place[node]
    needed = dependencies.needs(graph)
    _let_down(graph, place, {wait for _, wait in pairs})
    for node in reversed(needed):  # what is started early needs what it takes early
        for x in needed[node]:
            place[x] = min(place[x], place[node])
    order = dependencies.in_turn(collectives(graph), needed, place)
    graph, values = dependencies.arranged(given_up(graph), needed, place, order)
    for start, wait in pairs:
        join_again(graph, values[start], values[wait])
    return graph


def _starts(graph: fx.Graph, nodes: list[fx.Node], ahead: int) -> dict[fx.Node, float]:
    """Where each collective is started: after the call that makes its input, or with the gather ahead of which it goes. That
    is before the sums between this one and the gather before it, unless the first collective that needs what is gathered needs
    them, too: a gradient has time."""
    needed = dependencies.needs(graph)
    before = dependencies.marked_before(needed, every := collectives(graph))
    bits = {node: 1 << i for i, node in enumerate(every)}
    place = {node: i for i, node in enumerate(graph.nodes)}
    found = {node: made_at(node, place) + 0.5 for node in nodes}
    gathers = [node for node in nodes if collective_of(node).kind == "all_gather" and not before[node]]
    first, bytes_, last = 0, 0, 0.0
    for i, node in enumerate(gathers):
        bytes_ += _gathered(node) if i else 0  # of the gathers after the first one, up to this
        while first < i - 1 and bytes_ > ahead:
            first += 1
            bytes_ -= _gathered(gathers[first])
        turn, met = i / (len(gathers) + 1), next((before[x] for x in every if before[x] & bits[node]), 0)
        start = place[gathers[first]] + turn
        for other in reversed(every[: every.index(gathers[first])]):
            if other not in found or collective_of(other).kind not in _SUMS or met & bits[other]:
                break
            start = found[other] - 0.5 + turn / 2
        last = found[node] = max(last, start)
    return found


def _gathered(node: fx.Node) -> int:
    return size(node) * group_size(collective_of(node).mesh, collective_of(node).axes)


def split(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The start and the wait that stand in the place of a collective. What it takes must stay until the wait is over."""
    with graph.inserting_before(node):
        start = graph.call_function(Start(**vars(collective_of(node))), node.args)
        wait = graph.call_function(Step("wait", waited, views=(0,)), (start, *given(node)))
    start.meta, wait.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(wait)
    graph.erase_node(node)
    return start, wait


def waited(begun: Any, *taken: Any) -> Any:
    """What a collective that was begun gives. What it takes (`taken`) stays until then."""
    return collectives_.wait(begun)


def is_wait(node: fx.Node) -> bool:
    """Whether a call waits for what has been begun."""
    return isinstance(node.target, Step) and node.target.run is waited


def _let_down(graph: fx.Graph, place: dict[fx.Node, float], waits: set[fx.Node]) -> None:
    """Put the waits, and the views of what they bring, where it is first used."""
    down = set(waits)
    for node in graph.nodes:
        if is_light(node) and any(x in down for x in node.all_input_nodes):
            down.add(node)
    for node in reversed(graph.nodes):
        if node in down and node.users:
            place[node] = min(place[user] for user in node.users)


def join_again(graph: fx.Graph, start: fx.Node, wait: fx.Node) -> None:
    """Where nothing is computed between a start and its wait, one call is cheaper."""
    node = start.next
    while node is not wait and (is_light(node) or node.target is operator.getitem):
        node = node.next
    if node is wait:
        with graph.inserting_before(start):
            whole = graph.call_function(Collective(**vars(start.target)), start.args)
        whole.meta = start.meta
        wait.replace_all_uses_with(whole)
        graph.erase_node(wait)
        graph.erase_node(start)
