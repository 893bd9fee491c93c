"""Sums over ranks in a loop's body, of which each rank keeps its own iterations alone: each is reduced to that rank.

That sends half the bytes of an all-reduce. Nothing comes of it on the other ranks, where nothing looks at it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from torch import fx

from ..._core import torch_internals
from ..._core.arrays.entries import owners
from ..._core.sharding.index_map import axes_of
from ..._core.sharding.spec import split_axes
from ..ir.collective_nodes import carried_out, collective_of, given, source
from ..ir.graph import calls, has_effect, output
from ..ir.nested import ends, reached
from .loop_slices import Collected


def reduce_to_owners(body: fx.Graph, collected: Sequence[Collected], first: int, turn: int) -> None:
    """Let what a loop collects come to the rank that keeps it, if it is a sum over ranks that goes nowhere else.

    Args:
        body: of the loop.
        collected: what it collects.
        first: the place of that among what the body gives.
        turn: the place of the iteration's number among what the body is given.
    """
    for rows in collected:
        if rows.spec is not None:
            _reduce(body, rows, first, ends(body)[0][turn])
        first += len(rows.kept)


def _reduce(body: fx.Graph, rows: Collected, first: int, turn: fx.Node) -> None:
    end, behind = output(body), first + len(rows.kept)
    outs: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    found = [_up_to_sum(x) for x in outs[first:behind]]
    node = found[0][0]
    if node is None or any(one is not node for one, _ in found):
        return
    sum_, others = collective_of(node), [*outs[:first], *outs[behind:], *filter(has_effect, calls(body))]
    targets = _targets(rows, sum_.axes)
    if (sum_.kind, sum_.params) != ("all_reduce", ("sum",)) or node in reached(others) or targets is None:
        return
    with body.inserting_before(node), torch_internals.unrecorded():
        to = dataclasses.replace(sum_, kind="reduce", params=(targets,))
        results = carried_out(body, to, given(node), node, turn)
    for place, at, (_, chain) in zip(range(first, behind), rows.ranks, found, strict=True):
        outs[place] = results[at]
        for x in reversed(chain):
            with body.inserting_before(x):
                outs[place] = body.node_copy(x, lambda _, y=outs[place]: y)
    end.args = (tuple(outs),)
    gone = {node, *results}
    for x in calls(body):
        if not gone.isdisjoint(x.all_input_nodes):
            gone.add(x)
    for x in reversed(list(calls(body))):
        if x in gone and not x.users:
            body.erase_node(x)


def _up_to_sum(x: Any) -> tuple[fx.Node | None, list[fx.Node]]:
    """The collective that a value comes from, and the calls behind it that take nothing else, the last one first."""
    chain: list[fx.Node] = []
    while (
        (found := source(x)) is None and x.op == "call_function" and len(x.all_input_nodes) == 1 and not has_effect(x)
    ):
        chain.append(x)
        (x,) = x.all_input_nodes
    return (None if found is None else found[0]), chain


def _targets(rows: Collected, along: tuple[str, ...]) -> tuple[int, ...] | None:
    """Among the ranks along these axes, for each iteration the one that keeps it; None where several do."""
    axes, count = axes_of(rows.spec.mesh), rows.spec.tensor_meta.shape[0]
    over, of = owners(count, split_axes(rows.lies, rows.leaf.ndim + 1)[0], axes)
    if not {*over}.issuperset(along):
        return None
    places = [dict(zip(over, place)) for place in itertools.product(*(range(axes[axis]) for axis in over))]
    among = {place: i for i, place in enumerate(itertools.product(*(range(axes[axis]) for axis in along)))}
    return tuple(among[tuple(places[owner][axis] for axis in along)] for owner in of)
