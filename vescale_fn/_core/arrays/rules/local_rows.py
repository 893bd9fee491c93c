"""Reading and writing by index on a rank's own rows of a dim that is split: what an op of `indexing.py` then runs.

A rank reads zeros for rows that others have, and the sum over the ranks is what was read. It writes rows that others have
into one more row, which is cut off again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .rule import T

aten = torch.ops.aten


def gather(x: T, dim: int) -> Callable[..., Any]:
    """Of torch.gather."""

    def own(block: torch.Tensor, _: int, index: torch.Tensor, mine: range, **kwargs: Any) -> torch.Tensor:
        at, here = _places(index, x.shape[dim], mine, 0)
        return aten.gather.default(_some(block, dim), dim, at, **kwargs).masked_fill(~here, 0)

    return own


def index_select(x: T, dim: int) -> Callable[..., Any]:
    """Of torch.index_select."""

    def own(block: torch.Tensor, _: int, index: torch.Tensor, mine: range) -> torch.Tensor:
        at, here = _places(index.view(-1), x.shape[dim], mine, 0)
        out = aten.index_select.default(_some(block, dim), dim, at)
        return out.masked_fill(~here.view([-1, *[1] * (x.ndim - dim - 1)]), 0)

    return own


def index(x: T, where: Sequence[int]) -> Callable[..., Any]:
    """Of x[i, j], for the dims that are indexed."""

    def own(block: torch.Tensor, indices: Any, mine: Any) -> torch.Tensor:
        places, here = list(indices), torch.ones((), dtype=torch.bool, device=block.device)
        for dim, rows in zip(where, mine if len(where) > 1 else (mine,), strict=True):
            places[dim], there = _places(indices[dim], x.shape[dim], rows, 0, wraps=True)
            here = here & there
            block = _some(block, dim)
        out = aten.index.Tensor(block, places)
        return out.masked_fill(~here.view([*here.shape, *[1] * (x.ndim - where[-1] - 1)]), 0)

    return own


def scatter(name: str, x: T, dim: int, args: dict[str, Any]) -> Callable[..., Any]:
    """Of scatter, scatter_add and scatter_reduce."""
    overload = {"scatter_add": "default", "scatter_reduce": "two"}.get(name)
    if overload is None:
        overload = ("src", "reduce") if "src" in args else ("value", "value_reduce")
        overload = overload["reduce" in args]
    run = getattr(getattr(aten, name), overload)

    def own(block: torch.Tensor, _: int, index: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        *values, mine = rest
        at, _here = _places(index, x.shape[dim], mine, len(mine))
        return run(_one_more(block, dim), dim, at, *values, **kwargs).narrow(dim, 0, len(mine))

    return own


def index_write(name: str, x: T, dim: int) -> Callable[..., Any]:
    """Of index_add, index_copy, index_fill and index_reduce."""

    def own(block: torch.Tensor, _: int, index: torch.Tensor, value: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
        *more, mine = rest
        at, _here = _places(index, x.shape[dim], mine, len(mine), wraps=name == "index_fill")
        out = getattr(torch, name)(_one_more(block, dim), dim, at, value, *more, **kwargs)
        return out.narrow(dim, 0, len(mine))

    return own


def index_put(x: T, where: Sequence[int]) -> Callable[..., Any]:
    """Of x[i, j] = values, for the dims that are indexed."""

    def own(block: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool, *rest: Any) -> torch.Tensor:
        places, whole = list(indices), block.shape
        for dim, rows in zip(where, rest[-1] if len(where) > 1 else rest[-1:], strict=True):
            places[dim], _here = _places(indices[dim], x.shape[dim], rows, len(rows), wraps=True)
            block = _one_more(block, dim) if len(rows) < x.shape[dim] else block
        out = aten.index_put.default(block, places, values, accumulate)
        return out[tuple(map(slice, whole))]

    return own


def _places(
    index: torch.Tensor, count: int, mine: range, elsewhere: int, wraps: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in a rank's rows each row is that an index names, and whether it is there. What is no row raises later, as on
    one device."""
    row = torch.where(index < 0, index + count, index) if wraps else index
    here = (row >= mine.start) & (row < mine.stop)
    return torch.where((row >= 0) & (row < count), torch.where(here, row - mine.start, elsewhere), count + 1), here


def _some(block: torch.Tensor, dim: int) -> torch.Tensor:
    """A block with a row to read."""
    return block if block.shape[dim] else _one_more(block, dim)


def _one_more(block: torch.Tensor, dim: int) -> torch.Tensor:
    row = block.new_zeros([1 if d == dim else size for d, size in enumerate(block.shape)])
    return torch.cat([block, row], dim)
