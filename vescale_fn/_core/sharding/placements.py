"""Specs to DTensor's placements and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from .. import torch_internals
from ..base.errors import SpecError
from ..base.messages import mesh_text
from .index_map import axis_split_factor
from .merged_dim import Merged, UnevenParts, merge
from .spec import Axes, P, from_split_axes, split_axes


def to_placements(spec: P, axes: Axes, ndim: int) -> tuple[Placement, ...]:
    """The DTensor placements of `spec`: one for each mesh axis."""
    where = {axis: (dim, names) for dim, names in enumerate(split_axes(spec, ndim)) for axis in names}
    placements: list[Placement] = []
    for axis in axes:
        if axis in where:
            dim, names = where[axis]
            if isinstance(names, Merged) and not names.is_even(axes):
                placements.append(UnevenParts(dim, names.parts))
                continue
            factor = (
                _merged_factor(names, axis, axes) if isinstance(names, Merged) else axis_split_factor(names, axis, axes)
            )
            placements.append(Shard(dim) if factor == 1 else torch_internals.strided_shard(dim, factor))
        else:
            placements.append(Partial("sum") if axis in spec.unreduced else Replicate())
    return tuple(placements)


def _merged_factor(row: Merged, axis: str, axes: Axes) -> int:
    """The same for an axis of a merged dim: the entries of the parts before its own are segments, too."""
    order, outer = list(axes), 1
    for size, names in row.parts:
        if axis in names:
            return outer * axis_split_factor(names, axis, axes)
        outer *= size // math.prod(axes[name] for name in names if order.index(name) < order.index(axis))
    raise AssertionError(axis)


def from_placements(placements: Sequence[Any], axes: Axes, ndim: int, shape: Sequence[int] | None = None) -> P:
    """The spec of DTensor placements: the inverse of `to_placements`. Merged dims need the shape.

    Raises:
        SpecError: placements that no spec can say (a partial maximum, a strided shard of no order of axes).
    """
    rows: list[Any] = [[] for _ in range(ndim)]
    unreduced: set[str] = set()
    merged: set[int] = set()
    # later axes first: they are the segments
    pairs: list[tuple[str, Any]] = list(zip(axes, placements, strict=True))
    for axis, placement in reversed(pairs):
        if placement.is_partial():
            if placement.reduce_op not in ("sum", "avg"):
                raise SpecError(f"a partial {placement.reduce_op!r} over {axis!r} has no spec; only partial sums have")
            unreduced.add(axis)
        elif type(placement) is UnevenParts:
            uneven: Any = placement
            rows[uneven.dim % ndim] = Merged(uneven.parts)
        elif not placement.is_replicate():
            dim: int = placement.dim % ndim
            row: list[str] = rows[dim]
            at = 0
            factor: int = getattr(placement, "split_factor", 1)
            while factor > 1 and at < len(row) and factor % axes[row[at]] == 0:
                factor //= axes[row[at]]
                at += 1
            if factor != 1 and shape is not None:
                merged.add(dim)
            elif factor != 1:
                raise SpecError(f"{placement} over {axis!r} is not the layout of any order of the {mesh_text(axes)}")
            row.insert(at, axis)
    for dim in merged:
        rows[dim] = _merged_row(dim, (shape or ())[dim], placements, axes)
    return from_split_axes(rows, unreduced)


def normal(spec: P, axes: Axes, shape: Sequence[int]) -> P:
    """The spec that placements give back: axes of size 1, whose order they do not hold, in one order."""
    rows = split_axes(spec, len(shape))
    if 1 not in axes.values() or any(isinstance(row, Merged) for row in rows):
        return from_split_axes(rows, spec.unreduced)
    return from_placements(to_placements(spec, axes, len(shape)), axes, len(shape), shape)


def _merged_row(dim: int, size: int, placements: Sequence[Any], axes: Axes) -> tuple[str, ...]:
    """How a dim lies that strided shards split: each axis cuts segments, and lies within those of the axes before it."""
    cuts: list[tuple[int, str]] = []  # (how many segments of the whole dim an axis cuts, axis), outermost first
    for axis, placement in zip(axes, placements, strict=True):
        if placement.is_partial() or placement.is_replicate() or placement.dim != dim:
            continue
        factor: int = getattr(placement, "split_factor", 1)
        for at in range(len(cuts) + 1):
            segments = factor * math.prod(axes[name] for _, name in cuts[:at])
            if all(n * axes[a] <= segments for n, a in cuts[:at]) and all(
                n >= segments * axes[axis] for n, _ in cuts[at:]
            ):
                cuts.insert(at, (segments, axis))
                break
    ends = [n for n, _ in cuts] + [size]
    if any(after % (before * axes[axis]) for (before, axis), after in zip(cuts, ends[1:], strict=True)) or not cuts:
        raise SpecError(f"{placements[0]} and those after it split a dim of {size} as no reshape of split dims does")
    parts = [(cuts[0][0], ())] + [(after // n, (axis,)) for (n, axis), after in zip(cuts, ends[1:], strict=True)]
    return merge(parts, axes)
