"""A slice of a draw is a draw of the slice: each rank makes its own part of what is drawn, or filled with a number.

So a function that makes whole weights, under ``vfn.jit(init, out_specs=...)``, makes on each rank only its shards. The bits
stay what they were, because an element of a draw is a function of the key and of its place in the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..._core.distributed.rows import numbered
from ...random.generators import counters
from ..ir.graph import Step, is_aten, value
from ..ir.per_rank import PerRank, RanksDiffer, Tables
from ..ir.rank_choices import rows_of, table_of, table_step
from ..ir.rank_runs import firsts
from ..ir.slice_motion import Cut, NewCall, Range, Rule, moved_up

_aten = torch.ops.aten


def draws(graph: fx.Graph) -> fx.Graph:
    """The graph that draws, and fills, only what is used."""
    return moved_up(graph, _SOURCES)


def _drawn(graph: fx.Graph, node: fx.Node, part: Range) -> NewCall | None:
    key, where, shape, local, *rest = node.args
    batch = value(key).ndim - 1  # type: ignore[arg-type]
    if part.dim < batch:
        return NewCall(node.target, (Cut(key, part), *node.args[1:]), {}, _smaller(node, part))  # type: ignore[arg-type]
    starts = part.start.values if isinstance(part.start, PerRank) else (part.start,)
    known = _rectangles(where, shape)
    if known is None:
        return None
    dim, sizes, tables = part.dim - batch, list(local), list[torch.Tensor]()  # type: ignore[arg-type]
    sizes[dim] = part.length
    count = max(len(known), len(starts))
    for indices, start in zip(*(x if len(x) == count else x * count for x in (known, starts)), strict=True):
        mine = [*indices[:dim], indices[dim][start : start + part.length], *indices[dim + 1 :]]
        tables.append(counters.Rectangle(tuple(shape), tuple(mine)).encoded())  # type: ignore[arg-type]
    if any(rows.shape != tables[0].shape for rows in tables):
        raise RanksDiffer
    if isinstance(where, fx.Node) and where.args or isinstance(part.start, PerRank) and not part.start.tables:
        which = numbered(x.numpy().tobytes() for x in tables)  # ranks of this process
        each = tuple(tables[i] for i in firsts(which))
        smaller = graph.call_function(table_of("rectangle", each), (PerRank(which),))
    else:
        smaller = graph.call_function(table_step("rectangle", tables[0] if count == 1 else Tables(tables)))
    smaller.meta = {**node.meta, "val": value(node).new_empty(tables[0].shape, dtype=tables[0].dtype, device="cpu")}
    return NewCall(node.target, (key, smaller, shape, sizes, *rest), {}, _smaller(node, part))


def _rectangles(where: Any, shape: Any) -> list[list[counters.Indices]] | None:
    """The indices that a draw makes, on each rank where these differ; None where the plan does not know them."""
    if where is None:
        return [list(counters.decoded(shape, None).indices)]
    if isinstance(where, fx.Node) and isinstance(where.target, Step) and where.target.name == "rectangle":
        rows: Any = rows_of(where.target)
        for which in where.args:
            rows = Tables([rows[i] for i in which.values])  # type: ignore[union-attr]
        return [list(counters.decoded(shape, one).indices) for one in (rows if isinstance(rows, Tables) else [rows])]
    return None


def _smaller(node: fx.Node, part: Range) -> torch.Tensor:
    shape = list(value(node).shape)
    shape[part.dim] = part.length
    return value(node).new_empty(shape)


def _filled(place: int) -> Rule:
    """Of an op whose argument at `place` is the shape."""

    def rule(graph: fx.Graph, node: fx.Node, part: Range) -> NewCall | None:
        if not is_aten(node) or "names" in node.kwargs or not isinstance(node.args[place], (list, tuple)):
            return None
        val = _smaller(node, part)
        return NewCall(
            node.target, (*node.args[:place], list(val.shape), *node.args[place + 1 :]), dict(node.kwargs), val
        )

    return rule


_SOURCES: dict[str, Rule] = {
    "draw": _drawn,
    **dict.fromkeys(("zeros", "ones", "full", "empty"), _filled(0)),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), _filled(1)),
}
