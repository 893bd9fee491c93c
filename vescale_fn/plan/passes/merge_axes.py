"""Two collectives one after the other, over different axes, as one over both, or in the order in which less travels.

A sum over ``dp`` of a sum over ``tp`` is one sum over both; a gather along a dim of a gather along the same dim is one
gather, in which the axes of the second are major; a reduce-scatter of a reduce-scatter is one, in which those of the first
are. Fewer collectives, and fewer bytes: what the first one gave would have travelled again. And a sum that is then scattered
over other axes is scattered first, so that each rank adds up its part alone.

Whether two are merged depends on nothing but what they are and that nothing else uses the first: the same on every rank.
Where blocks are padded and cut, on some ranks, they are not; nor sums that follow a tree, where the one over both is another.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from ..._core.distributed.collectives import Collective, group_size
from ..._core.distributed.mesh import communicator_of, same
from ..._core.sharding.index_map import axes_of
from ..ir.collective_nodes import carried_out, collective_of, given, over, put, sole_source
from ..ir.graph import collectives, copied


def axes(graph: fx.Graph) -> fx.Graph:
    """The graph in which one collective does what two did."""
    graph = copied(graph)
    for second in collectives(graph):
        first = sole_source(given(second))
        if first is None or ("again" in first.meta) != ("again" in second.meta):
            continue
        instead = _instead(collective_of(first), collective_of(second))
        if instead:
            results = given(first)
            with graph.inserting_before(second):
                for collective in instead:
                    results = carried_out(graph, collective, results, second)
            put(graph, second, results)
            put(graph, first, given(first))
    return graph


def _instead(first: Collective, second: Collective) -> list[Collective]:
    """What does the same as two collectives; nothing where these stay."""
    if set(first.axes) & set(second.axes) or first.padded or second.padded or not same(first.mesh, second.mesh):
        return []
    trees = first.kind != "all_gather" and communicator_of(first.mesh).by_tree
    if (first.kind, first.params, second.kind) == ("all_reduce", ("sum",), "reduce_scatter") and not trees:
        mine = first.elements // group_size(second.mesh, second.axes)
        return [dataclasses.replace(second, elements=first.elements), dataclasses.replace(first, elements=mine)]
    if first.kind != second.kind or first.params != second.params or (trees and not _is_one_tree(first, second)):
        return []
    both = {
        "all_reduce": tuple(name for name in axes_of(second.mesh) if name in first.axes + second.axes),
        "all_gather": second.axes + first.axes,
        "reduce_scatter": first.axes + second.axes,
    }.get(first.kind)
    return [] if both is None else [dataclasses.replace(over(second, both), elements=first.elements)]


def _is_one_tree(first: Collective, second: Collective) -> bool:
    """Whether the trees of the second sum over those of the first are one: the first is over minor axes, and its are full."""
    order, n = list(axes_of(first.mesh)), group_size(first.mesh, first.axes)
    return n & (n - 1) == 0 and max(map(order.index, second.axes)) < min(map(order.index, first.axes))
