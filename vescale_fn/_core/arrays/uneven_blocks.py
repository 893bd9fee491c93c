"""Blocks of uneven sizes, padded to one size so that a collective can carry them: where each element goes, and is found again.

Computed once for a size, two layouts and a place in the mesh, and remembered; what a rank does is a copy or two, however many
ranks there are.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .. import torch_internals
from ..base.tables import table
from ..sharding.index_map import dim_indices

Row = tuple[str, ...]
Items = tuple[tuple[str, int], ...]  # sizes of axes, or a place on each


class Places(NamedTuple):
    """Where entries are to be found along a dim: a range, or an index for each of them, behind the last for a zero."""

    at: range | torch.Tensor
    gaps: bool = False  # whether there are zeros


class Pieces(NamedTuple):
    """How what a rank holds of a dim is split among the members of a group.

    Attributes:
        width: the size of the widest piece, to which all are padded.
        joined: where each index is among the padded pieces, joined in the order of the members.
        apart: where each entry of the padded pieces is among the indices; None where these come first, in their order.
    """

    width: int
    joined: Places
    apart: Places | None


def taken(x: torch.Tensor, dim: int, places: Places) -> torch.Tensor:
    """The entries of `x` at these places along `dim`."""
    if isinstance(places.at, range):
        return x.narrow(dim, places.at.start, len(places.at))
    x = padded(x, dim, x.shape[dim] + 1) if places.gaps else x
    return x[(*[slice(None)] * dim, places.at)]  # index_select knows no unsigned types


def padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """`x` with zeros behind it along `dim`, up to `size`. Where none are missing it is a view: in a plan, all ranks are to see
    that what travels is not `x` itself."""
    missing = size - x.shape[dim]
    if not missing:
        return x.narrow(dim, 0, size)
    return torch.cat([x, x.new_zeros([*x.shape[:dim], missing, *x.shape[dim + 1 :]])], dim)


@functools.lru_cache(maxsize=4096)
@torch_internals.never_recorded
def among(size: int, wanted: Row, held: Row, axes: Items, place: Items, device: torch.device) -> Places:
    """Where the rank at a place finds the indices of a dim that `wanted` gives it among those that `held` gives it."""
    there, here = (dim_indices(size, row, dict(axes), dict(place)) for row in (wanted, held))
    where = {index: i for i, index in enumerate(here)}
    return _places([where.get(index, -1) for index in there], len(here), device)


@functools.lru_cache(maxsize=4096)
@torch_internals.never_recorded
def pieces(
    size: int, whole: Row, split: Row, extra: Row, axes: Items, place: Items, n: int, device: torch.device
) -> Pieces:
    """How what the rank at a place holds of a dim of `size` under `whole` is split under `split`, which has the `extra` axes
    too, into `n` pieces."""
    sizes, here = dict(axes), dict(place)
    mine = dim_indices(size, whole, sizes, here)
    if split == tuple(a for a in sizes if a in split):  # chunks of chunks
        width = len(mine)
        for axis in extra:
            width = -(-width // sizes[axis])
        if len(extra) == 1:
            return Pieces(width, Places(range(len(mine))), None)
        runs = _runs(len(mine), [sizes[a] for a in extra], width)
        joined = [i for first, count in runs for i in range(first, first + count)]
    else:
        members = itertools.product(*(range(sizes[a]) for a in extra))
        held = [dim_indices(size, split, sizes, {**here, **dict(zip(extra, m))}) for m in members]
        width = max(map(len, held))
        where = {index: i * width + j for i, piece in enumerate(held) for j, index in enumerate(piece)}
        joined = [where[index] for index in mine]
    apart = [-1] * (n * width)
    for i, there in enumerate(joined):
        apart[there] = i
    return Pieces(width, _places(joined, n * width, device), _places(apart, len(mine), device))


def _runs(count: int, sizes: Sequence[int], width: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Where `count` indices, split into chunks and each of those into chunks, are among the last chunks, padded to `width`:
    the place of the first of each run, and its length."""
    if not sizes:
        yield first, count
    elif count:
        chunk, span = -(-count // sizes[0]), width * math.prod(sizes[1:])
        for i in range(-(-count // chunk)):
            yield from _runs(min(chunk, count - i * chunk), sizes[1:], width, first + i * span)


def _places(at: Sequence[int], end: int, device: torch.device) -> Places:
    """Places, of which -1 stands for a zero; `end`: the index behind the last."""
    first = at[0] if at else 0
    if first >= 0 and list(at) == list(range(first, first + len(at))):
        return Places(range(first, first + len(at)))
    return Places(table(torch.tensor([end if i < 0 else i for i in at], dtype=torch.int64), device), min(at) < 0)
