"""The body of a formula that is mapped over many leaves, on lists: each call of it for all leaves at once."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import fx

from ..ir.graph import Step, output, value, viewed, written
from ..ir.mapped import COLUMN, is_on_lists
from ..ir.row_by_row import through
from .donate import HAND_OVER
from .list_calls import call_of, mark_own, shared


def on_lists(body: fx.Graph) -> fx.Graph:
    """The body whose columns are lists, and whose calls are torch's ``_foreach_`` functions where there are such, or else
    go through the lists."""
    if is_on_lists(body):
        return body
    mark_own(body)
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    lists = set[fx.Node]()  # of `body`, that are lists
    for node in body.nodes:
        if node.op == "output":
            continue
        if node.op == "call_function" and not lists.isdisjoint(node.all_input_nodes):
            values[node] = _for_all(graph, node, lists, values)
            lists.add(node)
            continue
        values[node] = graph.node_copy(node, values.__getitem__)
        if COLUMN in node.meta:
            values[node].meta["val"] = [value(node)]
            lists.add(node)
    end = graph.output(fx.map_arg(output(body).args[0], values.__getitem__))
    end.meta = dict(output(body).meta)
    return graph


def _for_all(graph: fx.Graph, node: fx.Node, lists: set[fx.Node], values: dict[fx.Node, fx.Node]) -> fx.Node:
    """Record what a call gives for all leaves."""
    one = call_of(node)
    if one is not None and all(x in one.lists for x in node.args if x in lists) and lists.issuperset(one.lists):
        one = dataclasses.replace(one, shared=fx.map_arg(one.shared, values.__getitem__))
        args = *map(values.__getitem__, one.lists), *shared(graph, one, node)
        call = graph.call_function(one.target, args, dict(one.kwargs))
        call.meta = {**node.meta, "val": None if one.in_place else [value(node)]}
        return values[one.lists[0]] if one.in_place else call
    names = [name for name, x in node.kwargs.items() if isinstance(x, fx.Node)]
    given = [*node.args, *map(node.kwargs.__getitem__, names)]
    kwargs = [[name, x] for name, x in node.kwargs.items() if name not in names]
    at = [i for i, x in enumerate(given) if x in lists]
    places = lambda xs: tuple(i for i, x in enumerate(given) if x in xs)
    op: Any = node.target
    run = functools.partial(through, op=op, at=at, names=names, kwargs=kwargs)
    step = Step(f"each_{op.__name__}", run, writes=places(written(node)), views=places(viewed(node)))
    if node.target is HAND_OVER:
        step = HAND_OVER_ALL
    call = graph.call_function(step, fx.map_arg(tuple(given), values.__getitem__))
    call.meta = {**node.meta, "val": [value(node)]}
    return call


HAND_OVER_ALL = Step("handed_over", lambda xs: [x.data for x in xs], views=(0,))
