"""A call whose body other calls share: recorded once, improved once, and one function of the plan's code."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..._core.distributed.collectives import Collective
from . import memory_aliases
from .graph import KEPT, calls, copied, has_effect, output
from .nested import Nested, ends, extracted, nested, reached
from .ranks_as_one import ROW


@dataclass(frozen=True, eq=False)
class Shared(Nested):
    """A call of a body. The body writes into nothing that it is given, and a write into a result is seen in no other.

    Args:
        found: nobody has marked it: it is an iteration of a loop.
    """

    name: str = "shared"
    apart: bool = True
    found: bool = False


def inlined(graph: fx.Graph, but: Collection[Any] = ()) -> fx.Graph:
    """The graph in which the nodes of its body stand in the place of each call, `but` for calls of these."""
    return _inlined(copied(graph), {}, but)


def _inlined(graph: fx.Graph, done: dict[Nested, fx.Graph], but: Collection[Any] = ()) -> fx.Graph:
    for node in nested(graph):
        if isinstance(node.target, Shared) and node.target not in but:
            if node.target not in done:
                done[node.target] = _inlined(copied(node.target.bodies[0]), done)
            _inline(node, done[node.target])
    return graph


def _inline(node: fx.Node, body: fx.Graph) -> None:
    graph, (places, outs) = node.graph, ends(body)
    values: dict[fx.Node, Any] = dict(zip(places, node.args, strict=True))
    rows: dict[int, Any] = {}  # of ranks, which are others in each call
    with graph.inserting_before(node):
        for x in calls(body):
            values[x] = copy = placed(node, x, values)
            if ROW in x.meta:
                holders, *rest = x.meta[ROW]
                copy.meta[ROW] = rows.setdefault(id(holders), list(holders)), *rest
    for part in list(node.users):
        part.replace_all_uses_with(values[outs[part.args[1]]])  # type: ignore[index]
        graph.erase_node(part)
    graph.erase_node(node)


def placed(call: fx.Node, x: fx.Node, values: Mapping[fx.Node, Any]) -> fx.Node:
    """A node of a call's body, in the graph of the call at its insertion point.

    Args:
        values: what stands there for the nodes that it takes.
    """
    copy = call.graph.node_copy(x, values.__getitem__)
    if "again" in call.meta:  # it is computed again as a whole
        copy.meta["again"] = call.meta["again"], x.meta.get("again")
    elif "again" in x.meta:  # in this call
        copy.meta["again"] = call.name, x.meta["again"]
    return copy


def inlined_collectives(graph: fx.Graph) -> Iterator[fx.Node]:
    """The collectives of a graph in the order in which `inlined` has them; those of a body again for each call."""
    for node in calls(graph):
        if isinstance(node.target, Shared):
            yield from inlined_collectives(node.target.bodies[0])
        elif isinstance(node.target, Collective):
            yield node


def apart(body: fx.Graph) -> fx.Graph:
    """The body, in which what it gives is memory of its own: neither that of what it is given nor of another result."""
    body = copied(body)
    lie, end, (places, gives) = memory_aliases.memories(body), output(body), ends(body)
    seen, outs = {memory for x in places for memory in lie[x]}, []
    for out in gives:
        if isinstance(out.meta["val"], torch.Tensor) and not seen.isdisjoint(lie[out]):
            with body.inserting_before(end):
                copy = body.call_function(torch.ops.aten.clone.default, (out,))
            copy.meta = dict(out.meta)
            out = copy
        else:
            seen |= lie[out]
        outs.append(out)
    end.args = (tuple(outs),)
    return body


def prune(nodes: Iterable[fx.Node]) -> None:
    """Leave out of calls what nobody needs of their results, and what only that needs. Those that need the same of a body still
    share it."""
    done: dict[Any, tuple[Nested, list[int], list[int]]] = {}
    for node in nodes:
        target: Any = node.target
        if not isinstance(target, Shared):
            continue
        read: list[Any] = sorted({part.args[1] for part in node.users if part.users})  # type: ignore[misc]
        if (target, *read) not in done:
            done[target, *read] = _pruned(target, read)
        node.target, gives, used = done[target, *read]
        if node.target is target:
            continue
        node.args = tuple(node.args[i] for i in used)
        node.meta["val"] = [node.meta["val"][i] for i in gives]
        for part in list(node.users):
            if part.args[1] in gives:
                part.args = node, gives.index(part.args[1])  # type: ignore[arg-type]
            else:
                node.graph.erase_node(part)


def _pruned(call: Nested, gives: list[int]) -> tuple[Nested, list[int], list[int]]:
    """The call that gives less, and the places of its results and arguments in the one that gives all."""
    body = call.bodies[0]
    places, outs = ends(body)
    acts = [x for x in calls(body) if has_effect(x) or KEPT in x.meta]
    live = reached([*acts, *(outs[i] for i in gives)])
    used = [i for i, x in enumerate(places) if x in live]
    if len(gives) == len(outs) and len(used) == len(places):
        return call, gives, used
    nodes = [x for x in calls(body) if x in live]
    less = extracted(nodes, [places[i] for i in used], [outs[i] for i in gives])
    return replace(call, bodies=(less,)), gives, used
