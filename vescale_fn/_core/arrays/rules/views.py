"""How views shard: the same elements in another shape or order."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ...sharding.merged_dim import common
from .rule import Call, Parts, Rule, broadcast, but, dims, same

aten = torch.ops.aten


def view(call: Call) -> Rule:
    """A new shape for the same elements in the same order: dims that are merged, or were, keep a label each."""
    x, out = call.tensors[0].shape, call.outs[0] or ()
    if "dtype" in call.args:  # the same bytes as another type: of another width, the last dim changes
        row = but(len(x), () if x == out else (len(x) - 1,))
        return Rule((row,), (row,))
    labels: list[Any] = [None] * len(x)
    new_labels: list[Any] = [None] * len(out)
    even: set[Any] = set()
    if math.prod(x):
        for n, (ins, outs) in enumerate(_groups(x, out)):
            if ins and outs:
                old, new = [x[d] for d in ins], [out[d] for d in outs]
                finest = common(old, new)
                if finest is None:  # 6 x 4 seen as 8 x 3: what begins both may be split
                    labels[ins[0]] = new_labels[outs[0]] = n
                    even.add(n)
                    continue
                parts = [(size, (n, at)) for at, size in enumerate(finest)]
                for row, dims_, sizes in ((labels, ins, old), (new_labels, outs, new)):
                    for d, label in zip(dims_, _dealt(parts, sizes), strict=True):
                        row[d] = label
        _label_ones(x, out, labels, new_labels)
    return Rule(
        (tuple(labels),),
        (tuple(new_labels),),
        even=frozenset(even),
        linear=(0,),
        sizes="size" if "size" in call.args else "shape",
    )


def _dealt(parts: Sequence[tuple[int, Any]], sizes: Sequence[int]) -> list[Any]:
    """The label of each of these dims, which the parts make up in order."""
    left, labels = list(parts), []
    for size in sizes:
        mine = [left.pop(0)]
        while math.prod(n for n, _ in mine) < size:
            mine.append(left.pop(0))
        labels.append(mine[0][1] if len(mine) == 1 else Parts(mine))
    return labels


def _label_ones(x: Sequence[int], out: Sequence[int], labels: list[Any], new_labels: list[Any]) -> None:
    """Give dims of size 1, which may be split, too, a label each: it is that of a dim of size 1 in the same place of the other
    shape, or the first part of the dim that the other shape has there."""
    sides = [(x, labels, _ones(x)), (out, new_labels, _ones(out))]
    for (_, mine, ones), (shape, theirs, others) in (sides, sides[::-1]):
        for (start, nth), d in ones.items():
            twin = others.get((start, nth))
            if twin is not None:
                mine[d] = theirs[twin] = ("one", start, nth)
            elif (host := _dim_at(shape, start)) is not None:
                mine[d] = ("one", start, nth)
                there = theirs[host]
                theirs[host] = Parts([(1, mine[d]), *(there if type(there) is Parts else [(shape[host], there)])])


def _ones(shape: Sequence[int]) -> dict[tuple[int, int], int]:
    """The dims of size 1: how many rows of elements begin with each, and how many such dims stand before it."""
    found: dict[tuple[int, int], int] = {}
    for d, (size, start) in enumerate(zip(shape, itertools.accumulate(shape, operator.mul, initial=1))):
        if size == 1:
            found[start, sum(at == start for at, _ in found)] = d
    return found


def _dim_at(shape: Sequence[int], start: int) -> int | None:
    """The dim, of those larger than 1, that begins there or goes on; or the last one."""
    large = [d for d, size in enumerate(shape) if size > 1]
    return next((d for d in large if math.prod(shape[: d + 1]) > start), large[-1] if large else None)


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
    return (
        Rule((row,), ((*row, None),), linear=(0,))
        if call.name == "view_as_real"
        else Rule(((*row[: n - 1], None),), (row[: n - 1],), linear=(0,))
    )
