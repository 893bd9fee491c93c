"""axis_index, axis_size, dynamic_slice: where a rank is, and a block that lies there.

Source: `jax.lax`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .._core.base import context
from .._core.base.errors import CollectiveError
from .._core.base.messages import count_text, described, report
from .._core.local_types import tensor_types, types
from .._core.shard_map import mixed_axes, vmap_collectives
from .._core.shard_map.collective_calls import Axis, taking_part
from .._core.shard_map.collective_maps import index


def axis_index(axis_name: Axis) -> torch.Tensor:
    """This rank's position along an axis, as a 0-d int32 tensor.

    Args:
        axis_name: a mesh axis or the `axis_name` of a `vmap` around, or a tuple of them, major first.

    Raises:
        CollectiveError: outside a `shard_map` body.
        MeshError: an unknown axis.

    Source: `jax.lax.axis_index`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     f = vfn.shard_map(lambda x: x + vfn.axis_index("i"), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    ...     print(vfn.unshard(f(torch.zeros(4))))
    tensor([0., 1., 2., 3.])
    """
    if parts := vmap_collectives.runs("axis_index", axis_name):
        position: Any = None
        for run in parts:
            here = vmap_collectives.index(run) if isinstance(run, context.Entries) else axis_index(run)
            position = here if position is None else position * mixed_axes.size(run) + here
        return position
    body, names, _ = taking_part("axis_index", axis_name)
    position = index(body.mesh, names)
    tensor_types.mark(position, types.of(varying=names))
    context.record("axis_index", (), position, names)
    return position


def axis_size(axis_name: Axis) -> int:
    """The number of ranks along an axis.

    Args:
        axis_name: a mesh axis or the `axis_name` of a `vmap` around, or a tuple of them.

    Raises:
        CollectiveError: outside a `shard_map` body.
        MeshError: an unknown axis.

    Source: `jax.lax.axis_size`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     f = vfn.shard_map(lambda x: x / vfn.axis_size("i"), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    ...     print(vfn.unshard(f(torch.ones(4))))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    if parts := vmap_collectives.runs("axis_size", axis_name):
        return math.prod(map(mixed_axes.size, parts))
    return taking_part("axis_size", axis_name)[2]


def dynamic_slice(x: torch.Tensor, start_indices: Sequence[Any], sizes: Sequence[int]) -> torch.Tensor:
    """A block of `x` whose place may differ by rank, since only its sizes are Python integers.

    Args:
        x: a tensor.
        start_indices: for each dim, where the block begins: an int or a 0-d integer tensor, such as arithmetic with
            `axis_index`. Negative counts from the end. Moved where needed so that the block lies within `x`.
        sizes: the shape of the block.

    Raises:
        CollectiveError: not one start and one size for each dim, or a size larger than its dim.

    Source: `jax.lax.dynamic_slice`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.dynamic_slice(torch.arange(6), [torch.tensor(4)], [3])
    tensor([3, 4, 5])
    """
    starts = _checked_slice(x, start_indices, sizes)
    for dim, (start, whole, size) in enumerate(zip(starts, tuple(x.shape), sizes)):
        if not isinstance(start, torch.Tensor):
            start = start + whole if start < 0 else start
            x = x.narrow(dim, min(max(int(start), 0), whole - size), size)
        else:  # also where the block is as large as the dim: its type must not depend on sizes
            start = start.to(torch.int64)
            start = torch.where(start < 0, start + whole, start).clamp(0, whole - size)
            x = x.index_select(dim, start + torch.arange(size, device=x.device))
    return x


def _checked_slice(x: Any, start_indices: Any, sizes: Any) -> list[Any]:
    """The starts of a block; or an error that says all that is wrong with it."""
    failures = [] if isinstance(x, torch.Tensor) else [f"x must be a tensor, but it is {described(x)}"]
    rows = isinstance(start_indices, torch.Tensor) and start_indices.ndim == 1
    if not rows and not isinstance(start_indices, (tuple, list)):
        failures.append(
            f"start_indices must be a sequence, one start for each dim, but it is {described(start_indices)}"
        )
    if not isinstance(sizes, (tuple, list)):
        failures.append(f"sizes must be a sequence of ints, one for each dim, but it is {described(sizes)}")
    if failures:
        raise _misfit(x, failures)
    starts = list(start_indices.unbind() if rows else start_indices)
    failures = [
        f"start_indices[{i}] must be an int or a 0-d integer tensor, but it is {described(start)}"
        for i, start in enumerate(starts)
        if not _is_index(start)
    ]
    if not len(starts) == len(sizes) == x.ndim:
        failures.append(
            f"x has {count_text(x.ndim, 'dim')}, but there are {count_text(len(starts), 'start')} and "
            f"{count_text(len(sizes), 'size')}"
        )
    for dim, size in enumerate(sizes):
        if isinstance(size, torch.Tensor) or not hasattr(size, "__index__"):
            failures.append(f"sizes[{dim}] must be an int, the same on all ranks, but it is {described(size)}")
        elif dim < x.ndim and not 0 <= size <= x.shape[dim]:
            failures.append(f"dim {dim} has size {x.shape[dim]}, but sizes[{dim}] is {size}")
    if failures:
        raise _misfit(x, failures)
    return starts


def _misfit(x: Any, failures: Sequence[str]) -> CollectiveError:
    of = f" of shape {tensor_types.text(x)}" if isinstance(x, torch.Tensor) else ""
    return CollectiveError(
        report(
            "dynamic_slice",
            f"the block does not fit x{of}",
            failures,
            "dynamic_slice(x, [start, ...], [size, ...]), an entry for each dim of x",
        )
    )


def _is_index(start: Any) -> bool:
    if isinstance(start, torch.Tensor):
        return start.ndim == 0 and not (start.is_floating_point() or start.is_complex() or start.dtype is torch.bool)
    return hasattr(start, "__index__")
