"""The steps of ops on the positions of elements: where an extreme is, reading and writing by positions among all elements.

Every function takes the dtypes of the results, then the arguments of the op that it stands for.
"""

from __future__ import annotations

import math
from typing import Any

import torch

aten = torch.ops.aten


def extreme(least: bool, _: Any, x: Any, dim: int, keepdim: bool) -> Any:
    """The largest or the least along a dim, and the first place where it is; NaN is either."""
    best = (aten.amin if least else aten.amax)(x, [dim], True)
    shape, count = [-1 if d == dim % x.ndim else 1 for d in range(x.ndim)], x.shape[dim]
    places = aten.arange(count, device=x.device).view(shape)
    first = aten.amin(aten.where(x != x, places - count, aten.where(x == best, places, count)), [dim], True)
    best, first = aten.where(first < 0, math.nan, best) if x.is_floating_point() else best, aten.remainder(first, count)
    return (best, first) if keepdim else (best.squeeze(dim), first.squeeze(dim))


def place(least: bool, dtypes: Any, x: Any, dim: int, keepdim: bool) -> Any:
    """The first place of the largest or the least along a dim."""
    return extreme(least, dtypes, x, dim, keepdim)[1]


def take(_: Any, x: Any, index: Any) -> Any:
    """Of all elements in one row."""
    return aten.index.Tensor(aten.reshape.default(x, [-1]), [index])


def put(_: Any, x: Any, index: Any, source: Any, accumulate: bool) -> Any:
    """Into all elements in one row."""
    row = aten.index_put.default(aten.reshape.default(x, [-1]), [index], source, accumulate)
    return aten.view.default(row, x.shape)
