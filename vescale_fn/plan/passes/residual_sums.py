"""The reduction of ``a + b``, of which `a` has been reduced already, as that of `b` alone, added to what there is.

A residual stream under tensor parallelism is a chain of partial sums, ``x``, ``x + attention``, ``x + attention + mlp``, and
the next norm reduces each of them. Each would be kept twice: the partial sum, to which the next layer adds, and its reduction.
With ``all_reduce(x) + all_reduce(attention)`` only the reduction is kept. There are as many collectives as before, or one fewer
where both terms have been reduced.

A partial sum is left as it is where something else needs it, too. Nothing is looked at but which sums are reduced over which
axes and what uses them, which is the same on every rank.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from ..._core.distributed.mesh import same
from ..ir.collective_nodes import carried_out, collective_of, gets_same, given, got, noted
from ..ir.graph import KEPT, changed, collectives, copied, given_up, is_aten, name_of, value
from .dce import dead

Partial = tuple[fx.Node, ...]  # what each rank that this process plays holds of a value that is not added up yet
_add = torch.ops.aten.add.Tensor


class _Terms(NamedTuple):
    """What a partial sum is the sum of: `a`, which `first` has reduced before, and `b`, which perhaps `second` has."""

    a: Partial
    b: Partial
    first: fx.Node
    second: fx.Node | None


def residual(graph: fx.Graph) -> fx.Graph:
    """The graph in which no partial sum is kept that has been reduced."""
    graph = copied(graph)
    hot = changed(graph)
    reduced: dict[Partial, fx.Node] = {}
    for node in collectives(graph):
        one = collective_of(node)
        if (one.kind, one.params) == ("all_reduce", ("sum",)) and hot.isdisjoint((*given(node), *got(node).values())):
            reduced.setdefault(tuple(map(_itself, given(node))), node)
    for sum_, terms in reversed(_chosen(reduced, hot).items()):
        _reduce_apart(graph, reduced[sum_], terms)
    return dead(given_up(graph))


def _itself(x: fx.Node) -> fx.Node:
    return _itself(x.args[0]) if name_of(x) in ("detach", "alias") else x  # type: ignore[arg-type]


def _chosen(reduced: dict[Partial, fx.Node], hot: frozenset[fx.Node]) -> dict[Partial, _Terms]:
    """The sums whose reduction can be had from that of their first term, where nothing needs either of them besides."""
    found: dict[Partial, _Terms] = {}
    before: dict[Partial, fx.Node] = {}
    for sum_, node in reduced.items():
        pair = _terms(sum_)
        if hot.isdisjoint(x for term in pair for x in term):
            at_hand: list[Any] = [before[x] if x in before and _alike(before[x], node) else None for x in pair]
            one = next((i for i, first in enumerate(at_hand) if first is not None), None)
            if one is not None:
                found[sum_] = _Terms(pair[one], pair[1 - one], at_hand[one], at_hand[1 - one])
        before[sum_] = node
    while True:
        adds = {x for sum_ in found for x in sum_}
        kept = {
            sum_: terms
            for sum_, terms in found.items()
            if all(_only_for(x, reduced[partial], adds) for partial in (sum_, terms.a) for x in partial)
        }
        if len(kept) == len(found):
            return kept
        found = kept


def _terms(sum_: Partial) -> tuple[Partial, ...]:
    """The two values of one dtype that add up to a partial sum; nothing where there are none."""
    if not all(x.target is _add and not x.kwargs and all(isinstance(y, fx.Node) for y in x.args) for x in sum_):
        return ()
    pairs = [(_itself(x.args[0]), _itself(x.args[1])) for x in sum_]  # type: ignore[arg-type]
    if any(value(y).dtype != value(x).dtype for x, pair in zip(sum_, pairs, strict=True) for y in pair):
        return ()
    return tuple(zip(*pairs, strict=True))


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether what the first reduction gives may be used for the other one: not in the place of what `remat` repeats."""
    a, b = collective_of(one), collective_of(other)
    again = one.meta.get("again")
    return a.axes == b.axes and same(a.mesh, b.mesh) and again in (None, other.meta.get("again"))


def _only_for(x: fx.Node, reduction: fx.Node, adds: set[fx.Node]) -> bool:
    """Whether nothing uses a value but its reduction and some sums."""
    return all(
        user is reduction
        or user in adds
        or (is_aten(user) and _itself(user) is not user and _only_for(user, reduction, adds))
        for user in x.users
    )


def _reduce_apart(graph: fx.Graph, node: fx.Node, terms: _Terms) -> None:
    """Put the sum of two reductions in the place of `node`, the reduction of a sum."""
    with graph.inserting_before(node):
        others = (
            {} if terms.second is not None else dict(enumerate(carried_out(graph, collective_of(node), terms.b, node)))
        )
        for place, part in got(node).items():
            other = others[place] if terms.second is None else _part(graph, terms.second, place)
            sum_ = graph.call_function(_add, (_part(graph, terms.first, place), other))
            part.replace_all_uses_with(noted(sum_, value(part), part))
    node.meta.pop(KEPT, None)  # what other ranks need of it is the reduction of `b`


def _part(graph: fx.Graph, node: fx.Node, place: int) -> fx.Node:
    """What a reduction gives the rank of a place."""
    for other, part in got(node).items():
        if gets_same(node, place, other):
            return part
    with graph.inserting_after(node):
        return noted(graph.call_function(operator.getitem, (node, place)), value(node)[place], node)
