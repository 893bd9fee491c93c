"""Cheap values that one call gives to another, computed again by the other: the layers of a model forward and backward.

What is chosen is so once for all pairs of calls with the same two bodies, where the most is alive between them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..ir import graph as plan
from ..ir import inplace
from ..ir.liveness import Facts
from ..ir.nested import ends, extracted, nested
from ..ir.shared_bodies import Shared, prune

SMALLEST = 256 << 10  # bytes; for less it is not worth a call
STEPS = 8  # calls, at most, to compute a value again
_CHEAP = {
    "native_layer_norm",
    "_fused_rms_norm",
    "rms_norm",
    "_to_copy",
    "cat",
    "arange",
    "full",
    "zeros",
    "ones",
    "zeros_like",
    "ones_like",
    "full_like",
    "roll",
    "layer_norm",
}


def is_cheap(node: fx.Node) -> bool:
    """Whether a call takes no longer than to read what it is given."""
    return inplace.is_pointwise(node) or plan.name_of(node) in _CHEAP


@dataclass(frozen=True)
class _Pair:
    """Two bodies of which calls belong together.

    Args:
        first, second: the bodies.
        calls: of the second, each with the call of the first.
        kept: the places of the second's arguments, each with the value of the first body that it is given there.
        same: values that the first body is given, each with the place in which the second is given the same.
    """

    first: fx.Graph
    second: Any
    calls: list[tuple[fx.Node, fx.Node]]
    kept: dict[int, fx.Node]
    same: dict[fx.Node, int]


def recompute_in_calls(graph: fx.Graph, smallest: int = SMALLEST) -> fx.Graph:
    """The graph in which calls compute cheap values for themselves that others gave them over the peak.

    Args:
        smallest: values of fewer bytes are kept.
    """
    given = [x for node in nested(graph) if isinstance(node.target, Shared) for x in plan.value(node)]
    if all(plan.nbytes(x) < smallest for x in given):
        return graph
    pairs = [(pair, of) for pair in _pairs(graph) if (of := _chosen(pair, smallest))]
    if not pairs:
        return graph
    nodes = list(graph.nodes)
    live = Facts(graph).live(nodes)
    top, place = live.index(max(live)), {node: i for i, node in enumerate(nodes)}
    for pair, chosen in pairs:
        if any(place[one] < top < place[other] for one, other in pair.calls):
            _compute_again(pair, chosen)
    prune(reversed(nested(graph)))
    for node in reversed(list(graph.nodes)):
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)
    return graph


def _pairs(graph: fx.Graph) -> Iterator[_Pair]:
    calls: dict[Any, list[fx.Node]] = {}
    for node in nested(graph):
        if isinstance(node.target, Shared):
            calls.setdefault(node.target, []).append(node)
    for target, seconds in calls.items():
        columns = list(zip(*(map(_source, call.args) for call in seconds), strict=True))
        for first, at in _firsts(columns).items():
            rows = {tuple(columns[i][k][0] for i in at) for k in range(len(seconds))}
            if first is not target and len(rows) == len(seconds) and all(len(set(row)) == 1 for row in rows):
                firsts = [columns[min(at)][k][0] for k in range(len(seconds))]
                yield _pair(target, list(zip(firsts, seconds, strict=True)), at)


def _firsts(columns: list[tuple[Any, ...]]) -> dict[Any, dict[int, int]]:
    """The bodies that equal calls are given values of: the places of the arguments, and of which result each is."""
    found: dict[Any, dict[int, int]] = {}
    for i, column in enumerate(columns):
        kinds = {None if x is None else (x[0].target, x[1]) for x in column}
        kind = kinds.pop()
        if kind is not None and not kinds:
            found.setdefault(kind[0], {})[i] = kind[1]
    return found


def _pair(target: Any, calls: list[tuple[fx.Node, fx.Node]], at: dict[int, int]) -> _Pair:
    first: Any = calls[0][0].target
    places, outs = ends(first.bodies[0])
    same: dict[fx.Node, int] = {}
    for p, x in enumerate(places):
        where = (q for q in range(len(calls[0][1].args)) if all(a.args[p] is b.args[q] for a, b in calls))
        if (q := next(where, None)) is not None:
            same[x] = q
    return _Pair(first.bodies[0], target, calls, {i: outs[j] for i, j in at.items()}, same)


def _source(x: Any) -> Any:
    """The call whose result a value is, and which; None where it is that of none, or somebody else needs it."""
    if x.target is operator.getitem and isinstance(x.args[0].target, Shared) and len(x.users) == 1:
        return x.args
    return None


def _chosen(pair: _Pair, smallest: int) -> dict[int, list[fx.Node]]:
    """The places of what the second body computes for itself, each with the calls that make it: first what is large and made in
    few calls, and none that another is made of."""
    fixed, there = plan.changed(pair.first), set(pair.same)
    kept = {x: i for i, x in pair.kept.items()}
    made = {i: _made(x, there | (kept.keys() - {x}), fixed) for i, x in pair.kept.items()}
    size = {i: plan.nbytes(plan.value(pair.kept[i])) for i, of in made.items() if of}
    found: dict[int, list[fx.Node]] = {}
    sources: set[fx.Node] = set()
    for i in sorted(size, key=lambda i: -size[i] / len(made[i])):
        x = pair.kept[i]
        if size[i] >= smallest and x not in sources:
            of = _made(x, there | (kept.keys() - {x}), fixed)
            if of:
                found[i] = of
                sources.update(y for node in of for y in node.all_input_nodes if y in kept)
                del kept[x]
    return found


def _made(x: fx.Node, there: set[fx.Node], fixed: frozenset[fx.Node]) -> list[fx.Node]:
    """The calls that make a value of what is there, in order; none where that would take too many, or one that is not cheap."""
    found: set[fx.Node] = set()
    todo = [x]
    while todo:
        node = todo.pop()
        if node in fixed:  # which may be written after it was read here
            return []
        if node in there or node in found:
            continue
        own = node.target is operator.getitem or bool(plan.viewed(node))
        if node.op != "call_function" or not (own or is_cheap(node)):
            return []
        found.add(node)
        todo += node.all_input_nodes
    if sum(not plan.viewed(node) for node in found) not in range(1, STEPS + 1):
        return []
    return [node for node in x.graph.nodes if node in found]


def _compute_again(pair: _Pair, chosen: dict[int, list[fx.Node]]) -> None:
    """Let the second body make values, each right before its first use."""
    body = plan.copied(pair.second.bodies[0])
    places = ends(body)[0]
    at = {x: places[i] for i, x in pair.kept.items() if i not in chosen}
    at |= {x: places[i] for x, i in pair.same.items()}
    turn = {node: i for i, node in enumerate(body.nodes)}
    for i, nodes in chosen.items():
        values = dict(at)
        first = min(places[i].users, key=turn.__getitem__)
        with body.inserting_before(first):
            for node in nodes:
                values[node] = body.node_copy(node, values.__getitem__)
                values[node].meta["again"] = True
        places[i].replace_all_uses_with(values[nodes[-1]])
    stay = [i for i in range(len(places)) if i not in chosen]
    target = Shared(bodies=(extracted(list(plan.calls(body)), [places[i] for i in stay], ends(body)[1]),))
    for _, call in pair.calls:
        call.target, call.args = target, tuple(call.args[i] for i in stay)
