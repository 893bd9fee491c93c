"""How ops that only move elements shard: views, parts, joins, and reading and writing by index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .rule import Call, Row, Rule, broadcast, but, dims, none, same

aten = torch.ops.aten

# --- views ------------------------------------------------------------------------------------------------------------


def view(call: Call) -> Rule:
    """A new shape for the same elements in the same order: leading dims of each group of dims correspond."""
    x, out = call.tensors[0].shape, call.outs[0] or ()
    if "dtype" in call.args:  # the same bytes as another type: of another width, the last dim changes
        row = but(len(x), () if x == out else (len(x) - 1,))
        return Rule((row,), (row,))
    labels: list[Any] = [None] * len(x)
    new_labels: list[Any] = [None] * len(out)
    even = set()
    if math.prod(x):
        for label, (ins, outs) in enumerate(_groups(x, out)):
            if ins and outs:
                labels[ins[0]] = new_labels[outs[0]] = label
                if [x[d] for d in ins] != [out[d] for d in outs]:
                    even.add(label)
    return Rule((tuple(labels),), (tuple(new_labels),), even=frozenset(even), linear=(0,),
                sizes="size" if "size" in call.args else "shape")  # fmt: skip


def _groups(x: Sequence[int], out: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dims with equal products, dims of size 1 left out."""
    a = [d for d, size in enumerate(x) if size != 1]
    b = [d for d, size in enumerate(out) if size != 1]
    found = []
    while a and b:
        ins, outs = [a.pop(0)], [b.pop(0)]
        p, q = x[ins[0]], out[outs[0]]
        while p != q:
            if p < q:
                ins.append(a.pop(0))
                p *= x[ins[-1]]
            else:
                outs.append(b.pop(0))
                q *= out[outs[-1]]
        found.append((ins, outs))
    return found


def expand(call: Call) -> Rule:
    """New dims, and dims of size 1 repeated."""
    out = call.outs[0] or ()
    row = broadcast(call.tensors[0].shape, out)
    return Rule((row,), (tuple(d if d in row else None for d in range(len(out))),), linear=(0,), sizes="size")


def repeat(call: Call) -> Rule:
    """New dims, and dims repeated."""
    x, times = call.tensors[0], call["repeats"]
    shift = len(times) - x.ndim
    row = tuple(d if times[d + shift] == 1 else None for d in range(x.ndim))
    return Rule((row,), ((*(None,) * shift, *row),), linear=(0,))


def permute(call: Call) -> Rule:
    """The dims in another order."""
    n = call.tensors[0].ndim
    order = list(range(n))
    if call.name == "t":
        order = order[::-1]
    elif call.name == "permute":
        order = [d % n for d in call["dims"]]
    elif n:
        a, b = call["dim0"] % n, call["dim1"] % n
        order[a], order[b] = order[b], order[a]
    return Rule((tuple(range(n)),), (tuple(order),), linear=(0,))


def squeeze(call: Call) -> Rule:
    """Dims of size 1 taken away, or one put in; which ones, the global shape says."""
    x = call.tensors[0]
    if call.name == "unsqueeze":
        at = call["dim"] % (x.ndim + 1)
        return Rule((same(x.shape),), ((*range(at), None, *range(at, x.ndim)),), linear=(0,))
    gone = [d for d in dims(call.args.get("dim"), x.ndim) if x.ndim and x.shape[d] == 1]
    if call.args.get("dim") == []:
        gone = []
    row = but(x.ndim, gone)

    def these(block: torch.Tensor, *_: Any) -> torch.Tensor:
        return aten.squeeze.dims(block, gone)

    return Rule((row,), (tuple(d for d in range(x.ndim) if d not in gone),), linear=(0,), op=these)


def pairs(call: Call) -> Rule:
    """A complex number as a last dim of two real ones, and back."""
    n = call.tensors[0].ndim
    row = same(call.tensors[0].shape)
    return Rule((row,), ((*row, None),), linear=(0,)) if call.name == "view_as_real" else \
        Rule(((*row[: n - 1], None),), (row[: n - 1],), linear=(0,))  # fmt: skip


# --- parts and joins --------------------------------------------------------------------------------------------------


def slicing(call: Call) -> Rule:
    """Part of one dim: whole there, unless all of it is taken."""
    x = call.tensors[0]
    if call.name == "slice" and call.outs[0] == x.shape and call["step"] == 1:
        return Rule((same(x.shape),), (same(x.shape),), linear=(0,))
    row = but(x.ndim, (_dim(call, x.ndim),))
    out = tuple(d for d in row if d is not None) if call.name in ("select", "unbind") else row
    return Rule((row,), (out,) * len(call.outs), linear=(0,))


def _dim(call: Call, ndim: int) -> int:
    return (call["dim"] if "dim" in call.args else call["dimension"]) % max(ndim, 1)


def windows(call: Call) -> Rule:
    """unfold: whole along its dim, and one more dim at the end."""
    row = but(call.tensors[0].ndim, (_dim(call, call.tensors[0].ndim),))
    return Rule((row,), ((*row, None),), linear=(0,))


def diagonal(call: Call) -> Rule:
    """A diagonal of two dims, which are whole, becomes the last dim."""
    x = call.tensors[0]
    pair = (call["dim1"] % x.ndim, call["dim2"] % x.ndim)
    return Rule((but(x.ndim, pair),), ((*(d for d in range(x.ndim) if d not in pair), None),), linear=(0,))


def part_backward(call: Call) -> Rule:
    """The transposes of select, slice, unfold, diagonal: the part placed in zeros."""
    n = max(len(call["input_sizes"]), 1)
    if call.name == "diagonal_backward":
        gone = [call["dim1"] % n, call["dim2"] % n]
    else:
        gone = [call["dim"] % n]
    grad = call.tensors[0]
    if call.name == "slice_backward":
        row = but(n, gone)
    elif call.name == "unfold_backward":
        row = (*but(n, gone), None)
    else:
        row = tuple(d for d in range(n) if d not in gone) + (None,) * (call.name == "diagonal_backward")
    out = but(len(call["input_sizes"]), gone)
    return Rule((row if len(row) == grad.ndim else none(grad.shape),), (out,), linear=(0,), sizes="input_sizes")


def part_scatter(call: Call) -> Rule:
    """select_scatter, slice_scatter: a part put in place of another."""
    x = call.tensors[0]
    row = but(x.ndim, (_dim(call, x.ndim),))
    part = row if call.name == "slice_scatter" else tuple(d for d in row if d is not None)
    return Rule((row, part), (row,), linear=(0, 1) if call.tensors[1].dtype is x.dtype else ())


def pad(call: Call) -> Rule:
    """constant_pad_nd: whole where it pads."""
    x, widths = call.tensors[0], call["pad"]
    row = but(x.ndim, [x.ndim - 1 - i // 2 for i, width in enumerate(widths) if width])
    return Rule((row,), (row,))


def cat(call: Call) -> Rule:
    """Tensors joined along one dim, or along a new one."""
    out = call.outs[0] or ()
    row = but(len(out), (call["dim"] % len(out),))
    linear = tuple(range(len(call.tensors))) if len({t.dtype for t in call.tensors}) == 1 else ()
    if call.name == "stack":
        dim = call["dim"] % len(out)
        return Rule((row[:dim] + row[dim + 1 :],) * len(call.tensors), (row,), linear=linear)
    return Rule(tuple(row if t.ndim == len(out) else none(t.shape) for t in call.tensors), (row,), linear=linear)


# --- along a dim ------------------------------------------------------------------------------------------------------


def along(call: Call) -> Rule:
    """Ops that work along some dims (softmax, cumsum, sort, flip, ...): whole there, split anywhere else."""
    out = call.outs[0] or ()
    dim = next((call.args[name] for name in ("dim", "dims") if name in call.args), None)
    whole = set(dims(dim, len(out)))

    def row(shape: Sequence[int] | None) -> Row:
        shape = shape or ()
        if len(shape) != len(out):
            return none(shape)
        return tuple(None if d in whole or size != out[d] else d for d, size in enumerate(shape))

    return Rule(tuple(row(t.shape) for t in call.tensors), tuple(map(row, call.outs)))


def last_two(call: Call) -> Rule:
    """Ops on matrices (triu, tril): batches may be split."""
    n = call.tensors[0].ndim
    row = but(n, (n - 2, n - 1))
    return Rule((row,), (row,), linear=(0,))


def matrices(call: Call) -> Rule:
    """Decompositions of matrices (qr, cholesky, svd, ...): batches may be split."""
    batch = call.tensors[0].ndim - 2
    row = lambda shape: tuple(range(batch)) + (None,) * (len(shape or ()) - batch)
    return Rule((row(call.tensors[0].shape),), tuple(map(row, call.outs)))


def searched(call: Call) -> Rule | None:
    """Places in one sorted row: the values may be split."""
    if call["sorted_sequence"].ndim > 1 or len(call.tensors) > 2:
        return None
    return Rule(tuple(same(t.shape) if t.index else (None,) for t in call.tensors), (same(call.outs[0]),))


# --- by index ---------------------------------------------------------------------------------------------------------


def embedding(call: Call) -> Rule:
    """Rows of a table: the indices and the width may be split."""
    row = tuple(("i", d) for d in range(call["indices"].ndim))
    return Rule(((None, "width"), row), ((*row, "width"),))


def embedding_backward(call: Call) -> Rule | None:
    """The transpose of `embedding`: sums over the indices."""
    if call["scale_grad_by_freq"]:
        return None  # how often an index occurs is known to all ranks together only
    row = tuple(("i", d) for d in range(call["indices"].ndim))
    return Rule(((*row, "width"), row), ((None, "width"),), sums=frozenset(row))


def gather(call: Call) -> Rule:
    """gather and scatter: whole along the dim; other dims may be split where all tensors have one size."""
    x = call["self"]
    dim = _dim(call, x.ndim)
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
    dim = _dim(call, x.ndim)
    if not x.ndim:
        return Rule(((), none(call["index"].shape)), ((),))
    out = tuple("i" if d == dim else d for d in range(len(call.outs[0] or ())))
    return Rule((but(x.ndim, (dim,)), ("i",) * call["index"].ndim), (out,))


def index_add(call: Call) -> Rule:
    """index_add, index_copy, index_fill: whole along the dim, split anywhere else."""
    x = call["self"]
    row = but(x.ndim, (_dim(call, x.ndim),))
    return Rule(tuple(row if t.ndim == x.ndim and t.index != 1 else none(t.shape) for t in call.tensors), (row,))


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
