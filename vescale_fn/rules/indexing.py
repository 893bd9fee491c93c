"""How reading and writing by index shards: whole along the indexed dim, while the indices may be split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .rule import Call, Row, Rule, broadcast, but, dim_of, none, same

aten = torch.ops.aten


def embedding(call: Call) -> Rule:
    """Rows of a table: the indices and the width may be split; over other axes the rows, each rank then giving its own."""
    row = tuple(("i", d) for d in range(call["indices"].ndim))
    count = call["weight"].shape[0]

    def own_rows(table: torch.Tensor, indices: torch.Tensor, *rest: Any) -> torch.Tensor:
        mine = rest[-1]
        if not mine:
            return table.new_zeros((*indices.shape, table.shape[1]))
        here = (indices >= mine.start) & (indices < mine.stop)
        at = (indices - mine.start).clamp(0, len(mine) - 1)
        at = torch.where((indices >= 0) & (indices < count), at, indices)  # what is no row raises, as on one device
        return aten.embedding(table, at).masked_fill(here.logical_not().unsqueeze(-1), 0.0)

    return Rule((("rows", "width"), row), ((*row, "width"),), sums=frozenset(("rows",)), op=own_rows, block="rows",
                yields=frozenset(("rows",)))  # fmt: skip


def embedding_backward(call: Call) -> Rule | None:
    """The transpose of `embedding`: sums over the indices, into a rank's own rows where the table lay so."""
    if call["scale_grad_by_freq"]:
        return None  # how often an index occurs is known to all ranks together only
    row = tuple(("i", d) for d in range(call["indices"].ndim))

    def own_rows(grad: torch.Tensor, indices: torch.Tensor, count: int, padding: int, *rest: Any) -> torch.Tensor:
        mine = rest[-1]
        if not mine:
            return grad.new_zeros((0, grad.shape[-1]))
        here = (indices >= mine.start) & (indices < mine.stop) & (indices != padding)
        at = torch.where(here, indices - mine.start, -1)
        return aten.embedding_dense_backward(grad, at, len(mine), -1, False)  # which skips what is "padding": -1

    return Rule(((*row, "width"), row), (("rows", "width"),), sums=frozenset(row), op=own_rows, block="rows",
                yields=frozenset(("rows",)), wish=(("rows", call.lies),))  # fmt: skip


def gather(call: Call) -> Rule:
    """gather and scatter: whole along the dim; other dims may be split where all tensors have one size."""
    x = call["self"]
    dim = dim_of(call, x.ndim)
    sizes = [t.shape for t in call.tensors if t.ndim == x.ndim]
    shared = [d for d in range(x.ndim) if d != dim and all(s[d] == x.shape[d] for s in sizes)]
    read = call.name == "gather"

    def row(shape: Sequence[int] | None, is_index: bool) -> Row:
        shape = shape or ()
        return tuple(d if d in shared else ("i" if d == dim and is_index else None) for d in range(len(shape)))

    rows = tuple(row(t.shape, read and t.index == 1) if t.ndim == x.ndim else none(t.shape) for t in call.tensors)
    return Rule(rows, (row(call.outs[0], read),))


def index_select(call: Call) -> Rule:
    """Rows by number: the index may be split, and every other dim."""
    x = call["self"]
    dim = dim_of(call, x.ndim)
    if not x.ndim:
        return Rule(((), none(call["index"].shape)), ((),))
    out = tuple("i" if d == dim else d for d in range(len(call.outs[0] or ())))
    return Rule((but(x.ndim, (dim,)), ("i",) * call["index"].ndim), (out,))


def index_add(call: Call) -> Rule:
    """index_add, index_copy, index_fill, index_reduce: whole along the dim, split anywhere else."""
    x = call["self"]
    row = but(x.ndim, (dim_of(call, x.ndim),))
    ins = tuple(row if t.ndim == x.ndim and t.index != 1 else none(t.shape) for t in call.tensors)
    even = frozenset(row) - {None} if call.name == "index_reduce" else frozenset()  # which fails on no elements
    return Rule(ins, (row,), even=even)


def index(call: Call) -> Rule | None:
    """x[i, j]: whole where it is indexed; the indices may be split, and every dim that is not indexed."""
    places = _places(call)
    if places is None:
        return None
    row, labels, rows = places
    where = [d for d, label in enumerate(row) if label is None]
    return Rule((row, *rows), ((*row[: where[0]], *labels, *row[where[-1] + 1 :]),))


def _places(call: Call) -> tuple[Row, Row, list[Row]] | None:
    """The rows of the indexed tensor, of what is read of it or written into it there, and of the indices."""
    x, indices = call["self"], call["indices"]
    where = [d for d, i in enumerate(indices) if i is not None]
    tensors = [indices[d] for d in where]
    if not where or where != list(range(where[0], where[-1] + 1)) or any(t.dtype in _MASKS for t in tensors):
        return None
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    labels = tuple(("i", d) for d in range(len(shape)))
    return but(x.ndim, where), labels, [broadcast(t.shape, shape, labels) for t in tensors]


_MASKS = (torch.bool, torch.uint8)


def index_put(call: Call) -> Rule | None:
    """x[i, j] = values: as reading; where values are added up, those for a split index are a partial sum."""
    x, indices, values = call["self"], call["indices"], call["values"]
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype in _MASKS:
        if indices[0].shape != x.shape or math.prod(values.shape) != 1:
            return None
        return Rule((same(x.shape), same(x.shape), none(values.shape)), (same(x.shape),))
    places = _places(call)
    if places is None:
        return None
    row, labels, rows = places
    where = [d for d, label in enumerate(row) if label is None]
    shape = torch.broadcast_shapes(*(indices[d].shape for d in where))
    shape = (*x.shape[: where[0]], *shape, *x.shape[where[-1] + 1 :])
    value_row = broadcast(values.shape, shape, (*row[: where[0]], *labels, *row[where[-1] + 1 :]))
    if not call["accumulate"] or any(label is None for label in value_row):  # each rank writes all of its own
        split = {label for label in row if label is not None}
        keep = lambda r: tuple(label if label in split else None for label in r)
        return Rule((row, *map(keep, rows), keep(value_row)), (row,))
    return Rule((row, *rows, value_row), (row,), sums=frozenset(labels), joins=(0,))
