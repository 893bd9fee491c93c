"""How reductions shard: the dims that are folded are whole, or the ranks' parts are put together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .elementwise import elementwise, elementwise_lists, exact
from .rule import Call, Row, Rule, but, dims, same

aten = torch.ops.aten


def reduction(call: Call, fold: str = "") -> Rule:
    """Some dims are folded into one number: whole, unless `fold` says how their parts are put together."""
    x = call.tensors[0]
    gone = set(dims(call.args.get("dim"), x.ndim))
    keep = call.args.get("keepdim", False)
    row = but(x.ndim, () if fold else tuple(gone))
    out: Row = tuple(None if d in gone else d for d in range(x.ndim) if keep or d not in gone)
    return Rule((row,), (out,) * len(call.outs), frozenset(gone) if fold else frozenset(), fold=fold or "sum")


def total(call: Call) -> Rule:
    """sum: the parts add up."""
    return replace(reduction(call, "sum"), linear=(0,) if exact(call) else ())


def mean(call: Call) -> Rule:
    """mean: the parts of the sum add up, each divided by the global count."""
    x = call.tensors[0]
    over = dims(call.args.get("dim"), x.ndim)
    count = math.prod(x.shape[d] for d in set(over)) if x.ndim else 1

    def scaled_sum(block: torch.Tensor, *_: Any, dtype: Any = None, **__: Any) -> torch.Tensor:
        dtype = dtype or block.dtype
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        return (block.sum(over, keepdim=call.args.get("keepdim", False), dtype=wide) / count).to(dtype)

    return replace(total(call), op=scaled_sum)


def extreme(fold: str) -> Callable[[Call], Rule]:
    """amax, amin, any, all: the parts are put together by a maximum or a minimum."""
    return functools.partial(reduction, fold=fold)


def max_or_min(call: Call) -> Rule:
    """max and min: of two tensors, along a dim with indices, or of everything."""
    if "other" in call.args:
        return elementwise(call)
    return reduction(call, "" if "dim" in call.args else call.name)


def spread(call: Call) -> Rule:
    """var and std: as a reduction; of no elements they warn."""
    rule = reduction(call)
    return replace(rule, filled=frozenset(rule.ins[0]) - {None})


def norm(call: Call) -> Rule | None:
    """Norms of vectors: the Euclidean one by its parts' squares, added at once; the others of whole dims."""
    order, lists = call.args.get("ord", call.args.get("p")), call.name == "_foreach_norm"
    if order not in (2, None) or any(dtype is None or dtype.itemsize < 4 for dtype in call.dtypes):
        return elementwise_lists(call) if lists else reduction(call)
    if lists:
        rows = tuple(tuple((t.index, d) for d in same(t.shape)) for t in call.tensors)
        squares = lambda blocks, *_: [b.square() for b in aten._foreach_norm(blocks, 2)]
        return Rule(
            rows,
            ((),) * len(rows),
            frozenset(label for row in rows for label in row),
            fold="total",
            per_result=True,
            op=squares,
            finish=lambda *parts: [part.sqrt() for part in parts],
        )
    over, keep = dims(call.args.get("dim"), call.tensors[0].ndim), call.args.get("keepdim", False)

    def square(block: torch.Tensor, *_: Any, dtype: Any = None) -> torch.Tensor:
        return torch.linalg.vector_norm(block, 2, over, keep, dtype=dtype).square()

    return replace(reduction(call, "total"), op=square, finish=torch.sqrt)


def renorm(call: Call) -> Rule:
    """renorm: every slice of a dim for itself."""
    x = call.tensors[0]
    row = tuple(d if d == call["dim"] % x.ndim else None for d in range(x.ndim))
    return Rule((row,), (row,))
