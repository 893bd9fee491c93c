"""Collectives that give the same in all iterations of a loop are carried out once, before it.

A weight that a loop uses in each iteration (of a recurrent network, or for one microbatch after the other) is gathered there
each time. What it is gathered to is alive during the whole loop then, so that this is done up to a number of bytes.

Every rank moves the same collectives: what depends on what, their order, and their sizes, where the rank counts that gives
most, are the same on all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..._core.distributed.collectives import Collective, group_size
from ..ir import graph as plan
from ..ir.collective_nodes import collective_of, is_written, only_moves, size
from ..ir.loop import Loop, loop_of
from ..ir.nested import ends, extracted, nested, reached

MOST = 64 << 20


def hoist(graph: fx.Graph, most: int = MOST) -> fx.Graph:
    """The graph whose loops are given what their iterations would each communicate alike.

    Args:
        most: the bytes of what a loop is given so.
    """
    graph = plan.copied(graph)
    for node in nested(graph):
        if type(node.target) is Loop and node.target.length > 1:
            _hoist(graph, node, most)
    return graph


def _hoist(graph: fx.Graph, node: fx.Node, most: int) -> None:
    loop = loop_of(node)
    places, outs = ends(loop.body)
    moved = _moved(loop, places, most)
    if not moved:
        return
    values: dict[fx.Node, Any] = dict(zip(places, node.args, strict=True))
    crossing = [x for x in moved if not moved.keys() >= x.users.keys()]
    with graph.inserting_before(node):
        for x in moved:
            values[x] = graph.node_copy(x, values.__getitem__)
    left = [x for x in plan.calls(loop.body) if x not in moved]
    node.target = replace(loop, bodies=(extracted(left, [*places, *crossing], outs),))
    node.args = (*node.args, *(values[x] for x in crossing))


def _moved(loop: Loop, places: list[fx.Node], most: int) -> dict[fx.Node, None]:
    """The calls that can run before the loop: collectives, what they need, and what only looks at what they give."""
    own, hot = set(places[: loop.given]), plan.changed(loop.body)
    fixed = {
        x for x in plan.calls(loop.body) if x in hot or (plan.has_effect(x) and not isinstance(x.target, Collective))
    }
    chosen = _alike(loop.body, fixed | own, hot, most)
    for x in plan.calls(loop.body):
        given = [y for y in x.all_input_nodes if y.op == "call_function"]
        if (
            only_moves(x)
            and x not in fixed
            and own.isdisjoint(x.all_input_nodes)
            and given
            and chosen.issuperset(given)
        ):
            chosen.add(x)
    found = {x: None for x in plan.calls(loop.body) if x in chosen}
    lists = (x for x in found if not isinstance(plan.value(x), torch.Tensor))
    return found if all(found.keys() >= x.users.keys() for x in lists) else {}


def _alike(body: fx.Graph, fixed: set[fx.Node], hot: frozenset[fx.Node], most: int) -> set[fx.Node]:
    """Collectives that need nothing of what is `fixed`, and what they need."""
    chosen = set[fx.Node]()
    for x in plan.collectives(body):
        one, needed = collective_of(x), reached(x.all_input_nodes)
        bytes_ = size(x) * (group_size(one.mesh, one.axes) if one.kind == "all_gather" else 1)
        if is_written(x, hot) or bytes_ > most or not fixed.isdisjoint(needed):
            fixed.add(x)
        else:
            most -= bytes_
            chosen |= {x, *needed}
    return chosen
