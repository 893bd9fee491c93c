"""A sum of which each rank uses only its own part: a reduce-scatter. A gather of which it uses its own part: nothing.

One rank sees only its own slice, and the first rank's part is what a program may also take on purpose on every rank
(``x[:4]``). So what counts is not where a slice begins but that the recorder marked it as each rank's own part
(``meta["own"]``, of a size that divides): that it did on all ranks or on none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from ...mesh import coordinates, played_ranks, same
from ...wire import Collective
from ..exchanged import carried_out, collective_of, given, got, gets_same, over
from ..graph import changed, collectives, copied, name_of, value
from .slices import part_of


def scatter(graph: fx.Graph) -> fx.Graph:
    """The graph in which no rank gets what it does not use."""
    graph = copied(graph)
    hot = changed(graph)
    for node in collectives(graph):
        own = _own_parts(node)
        if own is None or not hot.isdisjoint(got(node).values()):
            continue
        axes, dim = own
        smaller = _smaller(collective_of(node), axes, dim)
        if smaller is None:
            continue
        with graph.inserting_before(node):
            parts = given(node)
            for collective in smaller:
                parts = carried_out(graph, collective, parts, node)
        _use(graph, node, axes, parts)
    return graph


def _own_parts(node: fx.Node) -> tuple[tuple[str, ...], int] | None:
    """The axes and the dim along which each rank takes its own part, where that is all that is used."""
    found = None
    users = [user for x in got(node).values() for user in x.users]
    for user in users:
        part, own = part_of(user), user.meta.get("own")
        if part is None or own is None or not same(own.mesh, collective_of(node).mesh) or not own.even:
            return None
        if found not in (None, (own.axes, part.dim)):
            return None
        found = (own.axes, part.dim)
    return found


def _smaller(collective: Collective, axes: tuple[str, ...], dim: int) -> Sequence[Collective] | None:
    """What gives each rank its own part along `axes` alone."""
    if collective.kind == "all_reduce" and collective.params == ("sum",) and set(axes) <= set(collective.axes):
        rest = tuple(name for name in collective.axes if name not in axes)
        scattered = over(collective, axes, dim, kind="reduce_scatter")
        return [scattered, over(collective, rest)] if rest else [scattered]
    if collective.kind == "all_gather" and collective.params == (dim,) and collective.axes[: len(axes)] == axes:
        rest = collective.axes[len(axes) :]
        return [over(collective, rest)] if rest else []
    return None


def _use(graph: fx.Graph, node: fx.Node, axes: tuple[str, ...], parts: Sequence[fx.Node]) -> None:
    """Let the ranks' parts stand in the place of the slices that they were."""
    mesh = collective_of(node).mesh
    ranks = list(played_ranks(mesh))
    sizes = dict(zip(axes, (collective_of(node).mesh.size(i) for i in ())))
    del sizes
    for place, whole in list(got(node).items()):
        for user in list(whole.users):
            part = part_of(user)
            assert part is not None
            at = part.start // part.length if part.length else 0
            mine = next(i for i, rank in enumerate(ranks)
                        if gets_same(node, place, i) and _place(mesh, axes, rank) == at)  # fmt: skip
            user.replace_all_uses_with(_settled(parts[mine], user))
            graph.erase_node(user)
        if whole is not node:
            graph.erase_node(whole)
    graph.erase_node(node)
