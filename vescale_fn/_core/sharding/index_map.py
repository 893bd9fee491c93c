"""Which indices of a value each rank holds under a spec, and how large its part is."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from ..base import context
from ..base.errors import SpecError
from ..base.messages import described, report
from .merged_dim import Merged
from .spec import Axes, P, is_spec, split_axes, validate


def _chunk(indices: Any, n: int, i: int) -> Any:
    size = -(-len(indices) // n)
    return indices[i * size : (i + 1) * size]


def axis_split_factor(names: tuple[str, ...], axis: str, axes: Axes) -> int:
    """How many segments the axes that are major to `axis` in the spec, but come later in the mesh, will make."""
    order = list(axes)
    major = names[: names.index(axis)]
    return math.prod(axes[name] for name in major if order.index(name) > order.index(axis))


def dim_indices(size: int, names: tuple[str, ...], axes: Axes, coord: Mapping[str, int]) -> range | list[int]:
    """The indices of a dim of `size`, split by `names`, that the rank at `coord` holds (a range when contiguous)."""
    if isinstance(names, Merged):
        return _as_range(_merged_indices(size, names, axes, coord))
    indices: Any = range(size)
    for axis in axes:
        if axis not in names:
            continue
        segments = axis_split_factor(names, axis, axes)
        if segments == 1:
            indices = _chunk(indices, axes[axis], coord[axis])
        else:
            pieces = [_chunk(_chunk(indices, segments, s), axes[axis], coord[axis]) for s in range(segments)]
            indices = [i for piece in pieces for i in piece]
    return _as_range(indices)


def all_hold_some(size: int, names: tuple[str, ...], axes: Axes) -> bool:
    """Whether each rank holds an index of a dim of `size`, split by `names`."""
    if isinstance(names, Merged):
        return all(all_hold_some(part, row, axes) for part, row in names.parts)
    if size % math.prod(axes[name] for name in names) == 0:
        return size > 0
    if names == tuple(axis for axis in axes if axis in names):  # chunks of chunks, of two sizes each
        sizes = {size}
        for axis in names:
            chunks = {(part, -(-part // axes[axis])) for part in sizes}
            if any(-(-part // chunk) < axes[axis] for part, chunk in chunks):
                return False
            sizes = {size for part, chunk in chunks for size in (chunk, part - (axes[axis] - 1) * chunk)}
        return True
    places = itertools.product(*(range(axes[name]) for name in names))
    return all(len(dim_indices(size, names, axes, dict(zip(names, place)))) for place in places)


def _merged_indices(size: int, row: Merged, axes: Axes, coord: Mapping[str, int]) -> range | list[int]:
    if row.size != size:
        raise SpecError(report("P", f"{row!r} is the layout of a dim of {row.size}, but the dim has {size}"))
    indices: range | list[int] = range(1)
    for part, names in row.parts:
        inner = dim_indices(part, names, axes, coord)
        indices = [i * part + j for i in indices for j in inner]
    return indices


def _as_range(indices: range | list[int]) -> range | list[int]:
    """The same indices, as a range when they are contiguous."""
    if isinstance(indices, range):
        return indices
    if not indices:
        return range(0)
    contiguous = indices[-1] - indices[0] == len(indices) - 1  # they ascend and differ
    return range(indices[0], indices[-1] + 1) if contiguous else indices


def index_runs(indices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The runs of neighbours among ascending indices: the first index, its place among them, how many."""
    if isinstance(indices, range):
        if len(indices):
            yield indices.start, 0, len(indices)
        return
    begin = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1:
            yield indices[begin], begin, i - begin
            begin = i


def local_indices(shape: Sequence[int], axes: Axes, spec: P, coord: Mapping[str, int]) -> tuple[range | list[int], ...]:
    """For each dim, the global indices that the rank at `coord` holds."""
    return tuple(
        dim_indices(size, names, axes, coord) for size, names in zip(shape, split_axes(spec, len(shape)), strict=True)
    )


def local_shape(shape: Sequence[int], axes: Axes, spec: P, coord: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the block that the rank at `coord` holds."""
    return tuple(
        math.prod(len(dim_indices(part, row, axes, coord)) for part, row in names.parts)
        if isinstance(names, Merged)
        else len(dim_indices(size, names, axes, coord))
        for size, names in zip(shape, split_axes(spec, len(shape)), strict=True)
    )


def shard_shape(shape: Sequence[int], mesh: Any, spec: P) -> tuple[int, ...]:
    """The shape of one rank's block of an array of `shape`: of the first rank's, the largest, where sizes do not divide.

    Args:
        shape: the shape of the whole array.
        mesh: a DeviceMesh, or a mapping from axis names to sizes: no ranks are needed.
        spec: how the array lies.

    Raises:
        SpecError: the spec does not fit the mesh or the shape.

    Source: `jax.sharding.NamedSharding.shard_shape`.

    >>> import vescale_fn as vfn
    >>> vfn.shard_shape((8, 6), {"dp": 2, "tp": 3}, vfn.P("dp", "tp"))
    (4, 2)
    >>> vfn.shard_shape((5, 6), {"dp": 4}, vfn.P("dp"))
    (2, 6)
    """
    checked_shape(shape, "shard_shape", 'vfn.shard_shape((8, 6), mesh, P("dp"))')
    if not isinstance(mesh, Mapping):
        context.checked_mesh(mesh, "shard_shape")
    axes: dict[str, int] = dict(mesh) if isinstance(mesh, Mapping) else axes_of(mesh)  # type: ignore[arg-type]
    validate(is_spec(spec, "shard_shape"), axes, len(shape), "shard_shape", at=True)
    return local_shape(shape, axes, spec, dict.fromkeys(axes, 0))


def checked_shape(shape: Any, where: str, example: str) -> Sequence[int]:
    """`shape`, if it is one, or an error that shows an example of the call."""
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) for size in cast("Sequence[Any]", shape)):
        what = f"shape must be a tuple of ints, but it is {described(shape)}"
        raise SpecError(report(where, what, fix=f"for instance {example}, or of a tensor x.shape"))
    if any(size < 0 for size in cast("Sequence[int]", shape)):
        raise SpecError(report(where, f"a size must not be negative, but shape is {described(shape)}"))
    return cast("Sequence[int]", shape)


def is_even(shape: Sequence[int], axes: Axes, spec: P) -> bool:
    """Whether every rank's block of `shape` has the same size."""
    rows = split_axes(spec, len(shape))
    return all(
        names.is_even(axes) if isinstance(names, Merged) else size % math.prod(axes[a] for a in names) == 0
        for size, names in zip(shape, rows)
    )


def axes_of(mesh: Any) -> dict[str, int]:
    """The axes of a DeviceMesh, in mesh order, with their sizes."""
    return _axes_of(mesh)


@functools.lru_cache(maxsize=256)
def _axes_of(mesh: Any) -> dict[str, int]:
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return dict(zip(names, mesh.shape, strict=True))
