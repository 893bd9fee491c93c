"""Programs of several ranks as that of one process: the calls of each up to its next collective, then that of all."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from ..._core.distributed.collectives import TABLE, Collective, group_size
from .collective_nodes import collective_of
from .graph import DONATED, HANDED_ON, calls, value, written
from .memory_aliases import memories
from .nested import ends


def side_by_side(
    programs: Sequence[fx.Graph], places: Sequence[Sequence[int]]
) -> tuple[fx.Graph, list[dict[fx.Node, fx.Node]]]:
    """The program of all ranks, which has no end yet, and for each rank what has become of its values.

    What a rank writes over is its own in its program. Here other ranks hold the same inputs, and some of what collectives give:
    where a rank writes there, it gets a copy first.

    Args:
        programs: of each rank.
        places: for each rank, for each of its inputs, which of all it is.
    """
    graph, values = fx.Graph(), [dict[fx.Node, fx.Node]() for _ in programs]
    given = [list(zip(ends(program)[0], own, strict=True)) for program, own in zip(programs, places, strict=True)]
    first = {i: x for row in reversed(given) for x, i in row}
    inputs = {i: graph.node_copy(first[i]) for i in sorted(first)}
    own = list(map(_to_copy, programs))
    for row, made, copies in zip(given, values, own):
        others = {i for other in given if other is not row for _, i in other}
        made.update((x, _copied(inputs[i]) if x in copies and i in others else inputs[i]) for x, i in row)
    todo = [calls(program) for program in programs]
    while any(met := [_up_to_next(graph, nodes, made) for nodes, made in zip(todo, values)]):
        if any(x is None or x.target != met[0].target for x in met):  # type: ignore[union-attr]
            raise ValueError("the collectives of ranks do not meet")
        parts = _collective(graph, met, values)  # type: ignore[arg-type]
        for x, part, made, copies in zip(met, parts, values, own):
            made[x] = _copied(part) if x in copies else part  # type: ignore[index]
    return graph, values


def _up_to_next(graph: fx.Graph, nodes: Iterator[fx.Node], made: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """Take a rank's calls over up to its next collective; gives that."""
    for node in nodes:
        if isinstance(node.target, Collective):
            return node
        made[node] = graph.node_copy(node, made.__getitem__)
    return None


def _collective(graph: fx.Graph, met: Sequence[fx.Node], values: Sequence[dict[fx.Node, fx.Node]]) -> list[fx.Node]:
    """The collective of all, and the part of each in what it gives."""
    call = graph.call_function(met[0].target, ([made[x.args[0]] for x, made in zip(met, values)],))  # type: ignore
    call.meta = {**met[0].meta, "val": list(map(value, met))}
    parts = [graph.call_function(operator.getitem, (call, rank)) for rank in range(len(met))]
    for x, part in zip(met, parts):
        part.meta = dict(x.meta)
    return parts


def _to_copy(program: fx.Graph) -> set[fx.Node]:
    """What a rank gets a copy of where others hold it: inputs and results of collectives that it writes over, and what it is
    handed as it is, which the sender may write over."""
    lie = memories(program)
    hot = {memory for node in calls(program) for x in written(node) for memory in lie[x]}
    found = {x for x in program.nodes if x.op == "placeholder" or isinstance(x.target, Collective)}
    sent = lambda x: isinstance(x.target, Collective) and collective_of(x).kind in HANDED_ON
    return {x for x in found if sent(x) or not hot.isdisjoint(lie[x])}


def _copied(x: fx.Node) -> fx.Node:
    copy = x.graph.call_function(torch.ops.aten.clone.default, (x,))
    copy.meta = {key: said for key, said in x.meta.items() if key != DONATED}
    return copy


def all_have_same(row: Sequence[fx.Node], places: Sequence[Sequence[int]]) -> bool:
    """Whether what each rank has can be seen to be the same: made alike of inputs that all have, or by a collective of all.

    Args:
        row: a value in the program of each rank.
        places: as of `side_by_side`.
    """
    at = [dict(zip(ends(x.graph)[0], own, strict=True)) for x, own in zip(row, places, strict=True)]
    todo, seen = [tuple(row)], set[tuple[fx.Node, ...]]()
    while todo:
        row = todo.pop()
        if row in seen or _comes_to_all(row):
            continue
        if len({_told(x, inputs) for x, inputs in zip(row, at)}) > 1 or isinstance(row[0].target, Collective):
            return False
        seen.add(row)
        todo += zip(*(x.all_input_nodes for x in row))
    lie, reached = memories(row[0].graph), {x for x, *_ in seen}
    here = {memory for x in reached for memory in lie[x]}
    return all(x in reached or all(here.isdisjoint(lie[y]) for y in written(x)) for x in calls(row[0].graph))


def _comes_to_all(row: Sequence[fx.Node]) -> bool:
    target = row[0].target
    whole = isinstance(target, Collective) and group_size(target.mesh, target.axes) == len(row)
    return whole and TABLE[target.kind].shared and all(x.target == target for x in row)


def _told(x: fx.Node, inputs: dict[fx.Node, int]) -> str:
    """What makes a value, but for the values of which it is made."""
    place = {y: i for i, y in enumerate(x.all_input_nodes)}
    target = inputs.get(x, x.target)
    return repr((id(target) if callable(target) else target, fx.map_arg((x.args, x.kwargs), lambda y: place[y])))
