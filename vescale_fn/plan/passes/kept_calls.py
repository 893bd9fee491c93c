"""Equal calls of which there are many stay calls, so that each pass behind has their body once; few are inlined.

What the passes behind find between calls stands outside of them: collectives of what a call is given (the gathers of a
layer's parameters, of their casts, too, which are put together and started ahead), collectives of what it gives (the sums of
gradients), and what is the same in all calls (a mask). Simulated ranks' calls, which stand in rows, are inlined all; and on
GPUs those in which collectives would be left, as in tensor parallel layers: calls hide nothing of what travels in them.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import fx

from ..._core.distributed.collectives import Collective
from ..ir.collective_nodes import collective_of, is_light, is_listed, only_moves
from ..ir.graph import calls, changed, collectives, copied, given_up, has_effect, is_aten, name_of, nbytes, value
from ..ir.nested import ends, extracted, nested, reached
from ..ir.ranks_as_one import ROW
from ..ir.shared_bodies import Shared, inlined, placed
from .parts_of_results import parts

MANY = 16


def kept(graph: fx.Graph, many: int = MANY, on_cpu: bool = False) -> fx.Graph:
    """The graph without calls that share a body with fewer than `many`, and with less in the others, among them those that
    the recorder has found.

    Args:
        many: how many calls stay.
        on_cpu: also where the ranks are processes on CPUs, calls in which collectives would stay are inlined.
    """
    graph = copied(graph)
    count = Counter(node.target for node in nested(graph) if isinstance(node.target, Shared))
    bodies: dict[Any, fx.Graph] = {
        target: inlined(target.bodies[0]) for target, n in count.items() if n >= many or target.found
    }  # type: ignore
    bodies = {target: body for target, body in bodies.items() if may_stay(body) and not _sends(body, on_cpu)}
    graph = inlined(given_up(graph), bodies)
    hot = changed(graph)
    for target, body in bodies.items():
        same = [node for node in nested(graph) if node.target is target]
        _less(same, body, hot)
    staying: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in nested(graph) if bodies else ():
        staying[node.target].append(node)
    hot = changed(graph) if staying else hot
    for target, same in staying.items():
        if isinstance(target, Shared):
            parts(graph, same, hot)
    return graph


def may_stay(body: fx.Graph) -> bool:
    """Whether nothing is lost: no loop, whose results are lists, no rows of simulated ranks, and no sum of what is given in
    parts, of which `residual` must see all."""
    if nested(body) or any(ROW in x.meta for x in body.nodes) or any(map(is_listed, collectives(body))):
        return False
    return all(map(_gathers, (x for x in _early(body) if isinstance(x.target, Collective))))


def _sends(body: fx.Graph, on_cpu: bool) -> bool:
    """Whether collectives would stay in calls, on devices that compute meanwhile: what travels outside of the calls would have
    to wait for them, as ranks do both in one order, and what travels in them for their end."""
    parts = _parts(body)
    inside = set(collectives(body)).difference(parts.before, parts.after)
    return any(on_cpu or collective_of(x).mesh.device_type != "cpu" for x in inside)


class _Parts(NamedTuple):
    """What of a body stands outside of its calls: before, of this once for all calls, and after."""

    before: list[fx.Node]
    once: set[fx.Node]
    after: list[fx.Node]


def _less(same: list[fx.Node], body: fx.Graph, hot: frozenset[fx.Node]) -> None:
    """Let equal calls be of what remains of their body."""
    places, outs = ends(body)
    at = [i for i, x in enumerate(same[0].args) if x not in hot and all(call.args[i] is x for call in same)]
    parts = _parts(body, {places[i] for i in at})
    if not parts.before and not parts.after:
        target = Shared(bodies=(body,))
        for call in same:
            call.target = target
        return
    outside = {*parts.before, *parts.after}
    inside = [x for x in calls(body) if x not in outside]
    own = set(inside)
    gives = list(dict.fromkeys(x for x in (*outs, *_inputs(parts.after)) if x in own))
    taken = {x for node in inside for x in node.all_input_nodes}
    takes = [x for x in (*places, *parts.before) if x in taken]
    target = Shared(bodies=(extracted(inside, takes, gives),))
    once: dict[fx.Node, Any] = {}
    for call in same:
        values: dict[fx.Node, Any] = {**dict(zip(places, call.args, strict=True)), **once}
        old = list(call.users)
        _apart(call, target, takes, gives, parts, values)
        once = {x: values[x] for x in parts.once}
        for part in old:
            part.replace_all_uses_with(values[outs[part.args[1]]])  # type: ignore[index]
            call.graph.erase_node(part)


def _apart(
    call: fx.Node, target: Shared, takes: list[fx.Node], gives: list[fx.Node], parts: _Parts, values: Any
) -> None:
    """Let a call be another one, with the rest of its body before it and after it, which `values` are then known of."""
    with call.graph.inserting_before(call):
        for x in parts.before:
            if x not in values:
                values[x] = placed(call, x, values)
    call.target, call.args = target, tuple(values[x] for x in takes)
    call.meta["val"] = [value(x) for x in gives]
    with call.graph.inserting_before(call.next):
        for i, x in enumerate(gives):
            values[x] = part = call.graph.call_function(operator.getitem, (call, i))
            part.meta = {**call.meta, "val": value(x)}
        for x in parts.after:
            values[x] = placed(call, x, values)


def _parts(body: fx.Graph, same: Collection[fx.Node] = ()) -> _Parts:
    """What stands outside of calls, which are all given the `same` in some places."""
    hot = changed(body)
    fixed = set(same)
    for x in calls(body):
        if fixed.issuperset(x.all_input_nodes) and x not in hot and _is_pure(x):
            fixed.add(x)
    early = _early(body, cast=True)
    seeds = [x for x in early if _gathers(x)]
    seeds += [x for x in fixed.difference(same) if not is_light(x)]
    before = reached(seeds)
    return _Parts([x for x in calls(body) if x in before], before & fixed, _late(body, hot, before))


def _is_pure(x: fx.Node) -> bool:
    """Whether a call gives the same for the same arguments, and does nothing else."""
    if isinstance(x.target, Collective):
        return True
    return is_aten(x) and not has_effect(x) and torch.Tag.nondeterministic_seeded not in x.target.tags  # type: ignore


def _early(body: fx.Graph, cast: bool = False) -> list[fx.Node]:
    """What only moves what a body is given, or is to make another dtype of it, and collectives of that."""
    hot, found = changed(body), {x: None for x in body.nodes if x.op == "placeholder"}
    for x in calls(body):
        if x.all_input_nodes and all(y in found for y in x.all_input_nodes) and x not in hot:
            if isinstance(x.target, Collective) or only_moves(x) or (cast and name_of(x) == "_to_copy"):
                found[x] = None
    return list(found)


def _gathers(x: fx.Node) -> bool:
    return isinstance(x.target, Collective) and x.target.kind == "all_gather"


def _late(body: fx.Graph, hot: frozenset[fx.Node], before: set[fx.Node]) -> list[fx.Node]:
    """The calls of which a body only gives the result and which are better after it, and what comes after them."""
    found: set[fx.Node] = set()
    for x in reversed(list(calls(body))):
        free = x not in hot and x not in before and x.users and all(y.op == "output" or y in found for y in x.users)
        if free and (_starts(x) or is_light(x) or (len(x.all_input_nodes) == 1 and _is_pure(x))):
            found.add(x)
    after: set[fx.Node] = set()
    for x in calls(body):
        if x in found and (_starts(x) or not after.isdisjoint(x.all_input_nodes)):
            after.add(x)
    return [x for x in calls(body) if x in after]


def _starts(x: fx.Node) -> bool:
    """Whether something is to stand after a call: a collective; what makes more than it is given, such as the gradient of a
    weight, which is best made when it is needed."""
    if isinstance(x.target, Collective):
        return True
    return _is_pure(x) and nbytes(value(x)) > sum(nbytes(value(y)) for y in x.all_input_nodes)


def _inputs(nodes: list[fx.Node]) -> list[fx.Node]:
    return [x for node in nodes for x in node.all_input_nodes]
