"""Small collectives of one kind, over the same axes and of one dtype, put together into one.

Starting a collective costs as much as carrying some hundred kilobytes, and packing costs a copy: so what is larger than
`alone` bytes stays alone, and a bucket is full at `limit` bytes; one of gathers also where what a rank gets of it is `GATHERED`
bytes, or on many ranks it would be the whole model. Reductions wait for the last member of their bucket: what they give is
needed late (a gradient, in the update). Gathers, and broadcasts, all come with the first one: what they take is there early (a
parameter, from the start), or they are left where they are; a gather that takes the same again (a parameter, for the backward
pass) begins the next bucket, so that the first can be forgotten in between. All-to-alls are put together where no other
collective comes between them (queries, keys and values): what they take and what they give is needed there.

Every rank makes the same buckets and keeps the same order, because both are decided by what is the same on every rank: the
order in which the collectives were recorded, which of them waits for which, and their sizes, where what counts is the rank
that gives most. How many calls lie between two collectives, which may differ by rank, is not looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..._core.distributed.collectives import Collective, group_size
from ..ir import dependencies
from ..ir.collective_nodes import carried_out, collective_of, given, is_listed, is_written, made_at, noted, put, size
from ..ir.graph import Step, changed, collectives, copied, given_up, value

LIMIT = 4 << 20
GATHERED = 128 << 20
ALONE = 256 << 10


def buckets(graph: fx.Graph, limit: int = LIMIT, alone: int = ALONE) -> fx.Graph:
    """The graph in which one collective does what several small ones did.

    Args:
        limit: the bytes that a rank gives to one bucket, at most.
        alone: the bytes from which on a collective stays by itself.
    """
    graph = _bucketed(graph, ("all_reduce", "reduce_scatter", "reduce"), limit, alone, early=False)
    graph = _bucketed(given_up(graph), ("all_to_all",), limit, alone, early=False)
    return _bucketed(given_up(graph), ("all_gather", "broadcast"), limit, alone, early=True)


def _bucketed(graph: fx.Graph, kinds: Sequence[str], limit: int, alone: int, early: bool) -> fx.Graph:
    if sum(collective_of(node).kind in kinds for node in collectives(graph)) < 2:
        return copied(graph)
    needed = dependencies.needs(graph)
    chosen = _chosen(graph, needed, kinds, limit, alone, early)
    if not chosen:
        return copied(graph)
    graph, values = _brought_together(graph, needed, chosen, early)
    for members in chosen:
        _as_one(graph, [values[member] for member in members])
    return graph


def _brought_together(
    graph: fx.Graph, needed: dependencies.Needs, chosen: Sequence[Sequence[fx.Node]], early: bool
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The graph in an order in which all that the members of a bucket need comes before them, and all that needs one of
    them after the last."""
    place: dict[fx.Node, float] = {node: i for i, node in enumerate(graph.nodes)}
    together = {member: members for members in chosen for member in members}
    for member, members in together.items():
        place[member] = place[members[0 if early else -1]]
    if early:  # what a bucket needs comes as early as the bucket
        for node in reversed(needed):
            for x in needed[node]:
                place[x] = min(place[x], place[node])
    joint = {
        node: [*before, *(other for x in before if x in together for other in together[x])]
        for node, before in needed.items()
    }
    for member, members in together.items():
        joint[member] = list(dict.fromkeys(x for other in members for x in joint[other]))
    order = dependencies.in_turn(collectives(graph), joint, place)
    return dependencies.arranged(graph, joint, place, order)


# --- which ------------------------------------------------------------------------------------------------------------


class _Bucket:
    def __init__(self) -> None:
        self.members: list[fx.Node] = []
        self.bytes = 0
        self.bits = 0  # which collectives these are
        self.before = 0  # which must come before one of them
        self.sources: set[fx.Node] = set()  # the arguments that they take

    def add(self, node: fx.Node, bit: int, before: int, nbytes: int, sources: set[fx.Node]) -> None:
        self.members.append(node)
        self.sources |= sources
        self.bytes += nbytes
        self.bits |= bit
        self.before |= before


def _chosen(
    graph: fx.Graph, needed: dependencies.Needs, kinds: Sequence[str], limit: int, alone: int, early: bool
) -> list[list[fx.Node]]:
    """The members of each bucket, in order. None of them waits for another, not by way of other buckets either."""
    nodes, hot = collectives(graph), changed(graph)
    before = dependencies.marked_before(needed, nodes)
    opened: dict[Any, _Bucket] = {}
    made: list[_Bucket] = []
    recorded = {node: i for i, node in enumerate(graph.nodes)}
    number = {node: i for i, node in enumerate(nodes)}
    # reductions in the order in which they could be carried out, which is another one where a function sums at its end
    for node in nodes if early else sorted(nodes, key=lambda node: made_at(node, recorded)):
        nbytes = size(node)
        collective = collective_of(node)
        if collective.kind not in kinds or nbytes > alone or is_written(node, hot):
            continue
        together = collective.kind == "all_to_all"
        if together and collective.padded:  # which one rank's neighbours outside of its group may pad otherwise
            continue
        sources = _sources(node) if collective.kind == "all_gather" and not before[node] else set()
        bucket = opened.get(key := _key(node))
        if bucket is not None:
            waits = _with_buckets(before[node], made) & bucket.bits
            late = early and (before[node] & ~before[bucket.members[0]] or bucket.sources & sources)
            late = late or (together and number[node] != number[bucket.members[-1]] + 1)
            if waits or late or bucket.bytes + nbytes > _room(collective, limit):
                bucket = None
        if bucket is None:
            bucket = opened[key] = _Bucket()
            made.append(bucket)
        bucket.add(node, 1 << number[node], before[node], nbytes, sources)
    return [sorted(bucket.members, key=recorded.__getitem__) for bucket in made if len(bucket.members) > 1]


def written_into(node: fx.Node, part: int, place: fx.Node) -> Any:
    """How a call gives one of its results in the memory of `place`: what it calls, with what; None where it cannot."""
    target: Any = node.target
    if not isinstance(target, Step) or getattr(target.run, "func", None) is not _from_each_rank:
        return None
    places: list[Any] = list(node.args[1]) if target.into else [None] * len(value(node))  # type: ignore[arg-type]
    places[part] = place
    return dataclasses.replace(target, writes=(1,), into=1), (node.args[0], places)


def _room(collective: Collective, limit: int) -> int:
    """The bytes that a rank may give to a bucket."""
    gathers = collective.kind == "all_gather"
    return min(limit, GATHERED // group_size(collective.mesh, collective.axes)) if gathers else limit


def _sources(node: fx.Node) -> set[fx.Node]:
    """The arguments of the plan of which a collective takes one alone, in whatever way: a rank may have to pad its block."""
    return {x for block in given(node) if len(found := _inputs(block)) == 1 for x in found}


def _inputs(node: fx.Node) -> set[fx.Node]:
    found, seen, waiting = set(), set(), [node]
    while waiting:
        x = waiting.pop()
        if x.op == "placeholder" and not str(x.target).startswith("constant"):
            found.add(x)
        waiting += [y for y in x.all_input_nodes if y not in seen]
        seen.update(x.all_input_nodes)
    return found


def _key(node: fx.Node) -> Any:
    """What the members of a bucket have in common."""
    collective, x = collective_of(node), value(given(node)[0])
    params = collective.params if collective.kind in _WHOLE else ()
    again, turn = node.meta.get("again"), node.args[1:]
    return collective.kind, collective.mesh, collective.axes, params, turn, x.dtype, x.device, again, is_listed(node)


def _with_buckets(before: int, made: Sequence[_Bucket]) -> int:
    """What must come before, when a bucket waits for what any of its members waits for."""
    while True:
        found = before
        for bucket in made:
            if found & bucket.bits:
                found |= bucket.bits | bucket.before
        if found == before:
            return found
        before = found


# --- into one ---------------------------------------------------------------------------------------------------------


def _as_one(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """Put one collective in the place of the members."""
    at = members[-1]
    first, ranks = collective_of(members[0]), range(len(given(members[0])))
    elements = sum(size(m) // value(given(m)[0]).element_size() for m in members)
    collective = dataclasses.replace(
        first,
        params=first.params if first.kind in _WHOLE else (0,) * len(first.params),
        elements=elements,
        why=f"{len(members)} together: {first.why}",
    )
    n = group_size(first.mesh, first.axes)
    dims = [(0,) if first.kind in _WHOLE else collective_of(m).params for m in members]
    pack, unpack, is_view = _HOW[first.kind]
    with graph.inserting_before(at):
        packed: dict[tuple[fx.Node, ...], fx.Node] = {}
        flats = []
        for rank in ranks:
            blocks = tuple(given(m)[rank] for m in members)
            if blocks not in packed:
                step = Step("pack", functools.partial(pack, n=n, dims=dims))
                val = value(blocks[0]).new_empty(sum(value(x).numel() for x in blocks))
                packed[blocks] = noted(graph.call_function(step, (list(blocks),)), val, at)
            flats.append(packed[blocks])
        parts: list[list[fx.Node]] = []
        for rank, whole in enumerate(carried_out(graph, collective, flats, at)):
            shapes = [tuple(value(given(m)[rank]).shape) for m in members]
            step = Step("unpack", functools.partial(unpack, n=n, dims=dims, shapes=shapes), views=(0,) * is_view)
            vals = [collective_of(m).like(value(given(m)[rank])) for m in members]
            node = noted(graph.call_function(step, (whole,)), vals, at)
            parts.append(
                [noted(graph.call_function(operator.getitem, (node, i)), val, at) for i, val in enumerate(value(node))]
            )
    for i, member in enumerate(members):
        put(graph, member, [parts[rank][i] for rank in ranks])


_WHOLE = ("all_reduce", "broadcast", "reduce")  # by which values keep their shapes
Dims = Sequence[tuple[int, ...]]  # of each block: along which it is taken apart, and put together


def _flat(blocks: Sequence[torch.Tensor], n: int, dims: Dims) -> torch.Tensor:
    if all(x.is_contiguous() for x in blocks):
        return torch.cat([x.view(-1) for x in blocks])
    flat = blocks[0].new_empty(sum(x.numel() for x in blocks))
    for x, place in zip(blocks, flat.split([x.numel() for x in blocks]), strict=True):
        place.view(x.shape).copy_(x)
    return flat


def _for_each_rank(blocks: Sequence[torch.Tensor], n: int, dims: Dims) -> torch.Tensor:
    """The blocks' pieces for the first rank, then those for the second, ..., each copied once, to its place."""
    rows = [x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0) for x, (dim, *_) in zip(blocks, dims, strict=True)]
    if all(row.is_contiguous() for row in rows):
        return torch.cat([row.view(n, -1) for row in rows], 1).view(-1)
    sizes = [x.numel() // n for x in blocks]
    flat = blocks[0].new_empty(n * sum(sizes))
    for row, place in zip(rows, flat.view(n, -1).split(sizes, 1), strict=True):
        place.view(row.shape).copy_(row)
    return flat


def _as_they_were(flat: torch.Tensor, n: int, dims: Dims, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _my_pieces(flat: torch.Tensor, n: int, dims: Dims, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    return _as_they_were(flat, n, dims, _pieces(n, dims, shapes))


def _pieces(n: int, dims: Dims, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The shapes of the pieces of blocks."""
    return [(*shape[:dim], shape[dim] // n, *shape[dim + 1 :]) for (dim, *_), shape in zip(dims, shapes, strict=True)]


def _from_each_rank(
    flat: torch.Tensor,
    into: Sequence[torch.Tensor | None] = (),
    *,
    n: int,
    dims: Dims,
    shapes: Sequence[tuple[int, ...]],
) -> list[torch.Tensor]:
    columns = flat.view(n, -1).split([math.prod(shape) for shape in shapes], 1)
    each = itertools.zip_longest(columns, shapes, dims, into)
    return [_joined(column.view(n, *shape), dim, place) for column, shape, (*_, dim), place in each]


def _joined(parts: torch.Tensor, dim: int, place: torch.Tensor | None) -> torch.Tensor:
    """Parts [n, ...] side by side along a dim, in one copy however many there are; in memory of their own, or in `place`."""
    if place is None:
        return parts.movedim(0, dim).clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)
    place.unflatten(dim, (len(parts), parts.shape[1 + dim])).copy_(parts.movedim(0, dim))
    return place


def _pieces_from_each(flat: torch.Tensor, n: int, dims: Dims, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    return _from_each_rank(flat, n=n, dims=dims, shapes=_pieces(n, dims, shapes))


FUNCTIONS = (_flat, _for_each_rank, _as_they_were, _my_pieces, _from_each_rank, _pieces_from_each)
_HOW: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {  # packed, unpacked; whether in the same memory
    "all_reduce": (_flat, _as_they_were, True),
    "broadcast": (_flat, _as_they_were, True),
    "reduce": (_flat, _as_they_were, True),
    "reduce_scatter": (_for_each_rank, _my_pieces, True),
    "all_gather": (_flat, _from_each_rank, False),
    "all_to_all": (_for_each_rank, _pieces_from_each, False),
}
