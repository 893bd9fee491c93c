"""An all-reduce of which a rank uses its part becomes a reduce-scatter; a gather of which it uses its part, nothing.

One rank sees only its own slice, and the first rank's part is what a program may also take on purpose on every rank
(``x[:4]``). So what counts is not where a slice begins but that the recorder marked it as each rank's own part
(``meta["own"]``, of a size that divides): that it did on all ranks or on none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..._core.distributed.collectives import Collective, group_size
from ..._core.distributed.communicator import coordinates
from ..._core.distributed.mesh import communicator_of, same
from ..._core.sharding.index_map import axes_of
from ..ir.collective_nodes import (
    carried_out,
    collective_of,
    erase_unused,
    gets_same,
    given,
    got,
    is_light,
    is_listed,
    is_written,
    noted,
    over,
    source,
)
from ..ir.graph import changed, collectives, copied, name_of, value
from ..ir.slice_motion import part_of


def scatter(graph: fx.Graph) -> fx.Graph:
    """The graph in which no rank gets what it does not use."""
    graph = copied(graph)
    hot = changed(graph)
    for node in reversed(list(collectives(graph))):  # a gather of a gather is left out first
        own = _own_parts(node)
        if own is None or is_written(node, hot, taken=False):
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
        if not rest:
            return [scattered]
        each = collective.elements // group_size(collective.mesh, axes)
        return [scattered, dataclasses.replace(over(collective, rest), elements=each)]
    gathers = collective.kind == "all_gather" and not collective.padded
    if gathers and collective.params == (dim,) and collective.axes[: len(axes)] == axes:
        rest = collective.axes[len(axes) :]
        return [over(collective, rest)] if rest else []
    return None


def _use(graph: fx.Graph, node: fx.Node, axes: tuple[str, ...], parts: Sequence[fx.Node]) -> None:
    """Let the ranks' parts stand in the place of the slices that they were."""
    mesh = collective_of(node).mesh
    ranks = list(communicator_of(mesh).ranks) if is_listed(node) else []
    for place, whole in got(node).items():
        for user in list(whole.users):
            part = part_of(user)
            assert part is not None
            mine = (
                i
                for i, rank in enumerate(ranks)
                if gets_same(node, place, i) and _place(mesh, axes, rank) * part.length == part.start
            )
            new = parts[next(mine) if ranks else 0]
            if source(new) is not None:
                _drop_copies(graph, user)
            elif _leaves(user):  # a result of the plan shares no memory with what it is given
                with graph.inserting_before(user):
                    new = noted(graph.call_function(torch.ops.aten.clone.default, (new,)), value(new).clone(), user)
            user.replace_all_uses_with(new)
            graph.erase_node(user)
        if whole is not node:
            graph.erase_node(whole)
    graph.erase_node(node)
    erase_unused(graph, parts)


def _drop_copies(graph: fx.Graph, x: fx.Node) -> None:
    """What was copied because it was a part of something needs no copy."""
    for user in list(x.users):
        if name_of(user) == "clone" and len(x.users) == 1 and value(user).is_contiguous():
            user.replace_all_uses_with(x)
            graph.erase_node(user)


def _leaves(x: fx.Node) -> bool:
    """Whether a result of the plan is in the memory of `x`."""
    return any(user.op == "output" or (is_light(user) and _leaves(user)) for user in x.users)


def _place(mesh: Any, axes: tuple[str, ...], rank: int) -> int:
    """A rank's place along `axes`, major first."""
    place, at, sizes = 0, coordinates(mesh, rank), axes_of(mesh)
    for name in axes:
        place = place * sizes[name] + at[name]
    return place
