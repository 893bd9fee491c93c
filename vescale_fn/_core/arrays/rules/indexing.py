"""How reading and writing by index shards: the indices may be split, or the indexed dim, of which each rank then reads or
writes its own rows (`local_rows.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from . import local_rows
from .rule import Call, Row, Rule, T, broadcast, dim_of, none, same

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

    return Rule(
        (("rows", "width"), row),
        ((*row, "width"),),
        sums=frozenset(("rows",)),
        op=own_rows,
        only="blocks",
        blocks=("rows",),
        yields=frozenset(("rows",)),
    )


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

    return Rule(
        ((*row, "width"), row),
        (("rows", "width"),),
        sums=frozenset(row),
        op=own_rows,
        only="blocks",
        blocks=("rows",),
        yields=frozenset(("rows",)),
        wish=(("rows", call.lies),),
    )


def gather(call: Call) -> Rule:
    """gather and scatter: along the dim the index may be split, where something is read or added up, or the rows of the
    tensor that is read or written; other dims where all tensors have one size."""
    x = call["self"]
    dim = dim_of(call, x.ndim)
    sizes = [t.shape for t in call.tensors if t.ndim == x.ndim]
    shared = [d for d in range(x.ndim) if d != dim and all(s[d] == x.shape[d] for s in sizes)]
    read = call.name == "gather"
    adds = call.name == "scatter_add" or call.args.get("reduce") in ("sum", "add")
    rows, part = _along(call, read, adds and len({s[dim] for s in sizes[1:]}) == 1)

    def row(shape: Sequence[int], label: Any) -> Row:
        return tuple(label if d == dim else d if d in shared else None for d in range(len(shape)))

    ins = tuple(row(t.shape, part if t.index else rows) if t.ndim == x.ndim else none(t.shape) for t in call.tensors)
    if read:
        return _reading(call, Rule(ins, (row(call.outs[0] or (), part),)), local_rows.gather(x, dim))
    rule = _writing(Rule(ins, (row(x.shape, rows),)), local_rows.scatter(call.name, x, dim, call.args))
    return (
        replace(rule, linear=(0, 2), unmoved=(1,)) if call.name == "scatter_add" and x.dtype is not torch.bool else rule
    )


def index_select(call: Call) -> Rule:
    """Rows by number: the index may be split, or the rows, and every other dim."""
    x = call["self"]
    dim = dim_of(call, x.ndim)
    if not x.ndim:
        return Rule(((), none(call["index"].shape)), ((),))
    rows, _ = _along(call, True, True)
    out = tuple("i" if d == dim else d for d in range(len(call.outs[0] or ())))
    ins = (tuple(rows if d == dim else d for d in range(x.ndim)), ("i",) * call["index"].ndim)
    return _reading(call, Rule(ins, (out,)), local_rows.index_select(x, dim))


def index_add(call: Call) -> Rule:
    """index_add, index_copy, index_fill, index_reduce: each rank writes its own rows; what is added may be split."""
    x = call["self"]
    dim = dim_of(call, x.ndim)
    rows, part = _along(call, False, call.name == "index_add")

    def row(t: T) -> Row:
        if t.ndim != x.ndim or (t.index == 1 and call["index"].ndim == 1):
            return (part,) * t.ndim if t.index == 1 else none(t.shape)
        return tuple((part if t.index else rows) if d == dim else d for d in range(t.ndim))

    ins = tuple(map(row, call.tensors))
    rule = _writing(Rule(ins, (ins[0],)), local_rows.index_write(call.name, x, dim))
    filled = frozenset(ins[0]) - {None} if call.name == "index_reduce" else frozenset()  # which fails on no elements
    return replace(rule, filled=filled)


def _along(call: Call, read: bool, sums: bool) -> tuple[str | None, str | None]:
    """The labels of the dim that is indexed: of the tensor that is read or written; of the index, and of what is written.

    Adding up what the ranks read or write of a split dim is for values that are numbers, and less than what is gathered
    otherwise.
    """
    x, rest, out = call.tensors[0], call.tensors[1:], math.prod(call.outs[0] or ())
    known = x.dtype is not torch.bool and x.ndim
    size = lambda ts: sum(math.prod(t.shape) * t.dtype.itemsize for t in ts)
    both = 2 * out * x.dtype.itemsize
    if read:
        return ("rows" if known and both <= size([x]) else None), "i"
    part = sums and known and both <= size(rest) and call.args.get("include_self", True)
    return ("rows" if x.ndim else None), ("i" if part else None)


def _reading(call: Call, rule: Rule, op: Any, rows: tuple[Any, ...] = ("rows",)) -> Rule:
    rule = _read_of_sum(call, rule)
    return replace(rule, sums=frozenset(rows), op=op, only="blocks", blocks=rows, yields=frozenset(rows))


def _read_of_sum(call: Call, rule: Rule) -> Rule:
    """What is read of a partial sum is one, too, where it is no more than that."""
    first, *rest = call.tensors
    less = math.prod(call.outs[0] or ()) <= math.prod(first.shape)
    return replace(rule, linear=(0,), unmoved=tuple(t.index for t in rest)) if less else rule


def _writing(rule: Rule, op: Any) -> Rule:
    return replace(rule, sums=frozenset("i"), joins=(0,), op=op, only="blocks", blocks=("rows",))


def index(call: Call) -> Rule | None:
    """x[i, j]: the indices may be split, or the dims that are indexed, and every other dim."""
    places = _places(call)
    if places is None:
        return None
    row, where, labels, rows = places
    out = (*row[: where[0]], *labels, *row[where[-1] + 1 :])
    if _along(call, True, True)[0] is None:
        return _read_of_sum(call, Rule((_whole_along(row, where), *rows), (out,)))
    return _reading(
        call, Rule((row, *rows), (out,)), local_rows.index(call["self"], where), tuple(row[d] for d in where)
    )


def _places(call: Call) -> tuple[Row, list[int], Row, list[Row]] | None:
    """The row of the indexed tensor, which dims of it are indexed, the labels of what is read or written there, and the rows
    of the indices."""
    x, indices = call["self"], call["indices"]
    where = [d for d, i in enumerate(indices) if i is not None]
    tensors = [indices[d] for d in where]
    if not where or where != list(range(where[0], where[-1] + 1)) or any(t.dtype in _MASKS for t in tensors):
        return None
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    labels = tuple(("i", d) for d in range(len(shape)))
    row = tuple(("rows", d) if d in where else d for d in range(x.ndim))
    return row, where, labels, [broadcast(t.shape, shape, labels) for t in tensors]


def _whole_along(row: Row, where: Sequence[int]) -> Row:
    return tuple(None if d in where else label for d, label in enumerate(row))


_MASKS = (torch.bool, torch.uint8)


def index_put(call: Call) -> Rule | None:
    """x[i, j] = values: each rank writes its own rows; where values are added up, those for a split index are a partial sum, if
    that is less than they are."""
    x, indices, values = call["self"], call["indices"], call["values"]
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype in _MASKS:
        if indices[0].shape != x.shape or math.prod(values.shape) != 1:
            return None
        return Rule((same(x.shape), same(x.shape), none(values.shape)), (same(x.shape),))
    places = _places(call)
    if places is None:
        return None
    row, where, labels, rows = places
    shape = torch.broadcast_shapes(*(indices[d].shape for d in where))
    shape = (*x.shape[: where[0]], *shape, *x.shape[where[-1] + 1 :])
    value_row = broadcast(values.shape, shape, (*row[: where[0]], *labels, *row[where[-1] + 1 :]))
    adds = call["accumulate"] and None not in value_row and _along(call, False, True)[1] is not None
    if not adds:  # each rank writes all of its own
        split = {label for label in value_row if label is not None and label not in labels}
        keep = lambda r: tuple(label if label in split else None for label in r)
        rows, value_row = list(map(keep, rows)), keep(value_row)
    rule = Rule((row, *rows, value_row), (row,), sums=frozenset(labels), joins=(0,))
    own = tuple(row[d] for d in where)
    return replace(rule, op=local_rows.index_put(x, where), only="blocks", blocks=own)
