"""Meshes without ranks: this process plays one rank of them, with tensors that have shapes and no values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import torch_internals
from ..base import no_values
from ..base.errors import MeshError
from ..base.messages import mesh_text, report, short
from ..base.saved_names import saved_as
from ..sharding.index_map import axes_of
from ..sharding.layout import contiguous_stride
from .communicator import Communicator, Kind, rank_axes
from .mesh import SimulatedMesh, checked_axes, root


class Abstract(Communicator):
    """One rank of a mesh whose others are not there: what a collective would give has a shape, and nothing travels."""

    holds_blocks, all_here = False, True

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh)
        self.ranks = range(root(mesh).rank, root(mesh).rank + 1)

    def each(self, fn: Callable[..., Any], *values: Any, key: Callable[[int], Any] | None = None) -> Any:
        if torch_internals.is_recorded():
            return fn(self.ranks[0], *values)
        return no_values.alone(fn, self.ranks[0], *values)

    def held(self, x: Any) -> Any:
        plain = isinstance(x, torch.Tensor) and torch_internals.is_bare(x) and not torch_internals.is_recorded()
        return no_values.like(x) if plain else x

    def joined(self, row: Sequence[torch.Tensor]) -> Any:
        return self.held(row[0])

    def processes(self, axes: tuple[str, ...] | None = None) -> Sequence[int]:
        return ()

    def carry_out(
        self, kind: Kind, x: Any, axes: tuple[str, ...], params: Sequence[Any], later: bool = False, **how: Any
    ) -> Any:
        shape = kind.result_shape(x.shape, self.size(axes), params)
        return no_values.empty(shape, contiguous_stride(shape), x.dtype, x.device)

    def everyone(self, mine: Sequence[Sequence[Any]], why: str) -> list[list[Any]]:
        return [[leaf[0] for leaf in mine]] * math.prod(rank_axes(self.mesh).values())


class AbstractMesh(SimulatedMesh):
    """A mesh without ranks; made by `abstract_mesh`.

    Attributes:
        rank: the row-major place in it that this process plays.
    """

    communicator = Abstract
    rank: int

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.device_type, tuple(self.mesh.shape), self.mesh_dim_names, self.rank

    def __repr__(self) -> str:
        return mesh_text(axes_of(self)).replace("mesh ", "AbstractMesh")

    def __reduce__(self) -> Any:
        return rebuild_abstract_mesh, self._key

    def _part(self, names: tuple[str, ...], places: dict[str, int]) -> AbstractMesh:
        """Along the axes that stay, the rank that is played there is at the place of this one's."""
        here = dict(zip(self.axis_names, self.get_coordinate() or (), strict=True))
        shape, rank = tuple(axes_of(self)[name] for name in names), 0
        for name, size in zip(names, shape, strict=True):
            rank = rank * size + here[name]
        return rebuild_abstract_mesh(self.device_type, shape, names, rank)


@saved_as("vescale_fn.mesh")
@functools.lru_cache(maxsize=64)
@torch_internals.never_recorded
def rebuild_abstract_mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...], rank: int) -> AbstractMesh:
    made = torch_internals.unattached_mesh(
        device, torch.arange(math.prod(shape), device="cpu").view(shape), names, AbstractMesh, rank
    )
    made.rank = rank
    return made


def abstract_mesh(
    shape: int | Sequence[int], names: str | Sequence[str], *, device: str = "cpu", rank: int = 0
) -> AbstractMesh:
    """A mesh of any size, of which no rank has to exist: arrays on it have shapes and layouts, and no values.

    Ops, transforms, `shard_map` bodies and ``jit(...).lower(...)`` work on them as on arrays of real ranks, and cost no memory:
    what a step on 512 GPUs will send and need is known on a laptop, before anything is started. It needs no `simulate` and no
    process group, and does not touch either where they are there.

    Args:
        shape: the size of each axis.
        names: the axes' names, all different.
        device: where the ranks would compute: "cpu" or "cuda", which need not be there.
        rank: the rank whose blocks, and whose plans, are seen, counted row-major. Of an uneven layout rank 0 has the largest
            blocks.

    Returns:
        A DeviceMesh. What needs a value of an array on it (``item``, ``bool``, numpy, `save`) raises a NoValueError.

    Raises:
        MeshError: sizes and names that do not fit, or no rank of the mesh.

    Source: `jax.sharding.AbstractMesh`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> mesh = vfn.abstract_mesh((64, 8), ("dp", "tp"))
    >>> w = vfn.ShapeDtype((8192, 28672), torch.bfloat16, P(None, "tp"), mesh)
    >>> x = vfn.ShapeDtype((4096, 8192), torch.bfloat16, P("dp"), mesh)
    >>> x @ w
    Array bf16[4096@dp,28672@tp] on mesh (dp=64, tp=8), without values
    >>> plan = vfn.jit(vfn.grad(lambda w, x: (x @ w).square().sum())).lower(w, x)
    >>> plan.comms().bytes("all_reduce", axis="dp"), plan.memory().peak
    (58720256, 177209344)
    """
    sizes, names = checked_axes(shape, names, "abstract_mesh")
    if -1 in sizes:
        what = f"shape {sizes} leaves an axis open with -1, and there are no ranks to fill it"
        raise MeshError(report("abstract_mesh", what, fix="the size of each axis"))
    if device not in ("cpu", "cuda"):
        raise MeshError(report("abstract_mesh", f'device={short(device)} is neither "cpu" nor "cuda"'))
    count = math.prod(sizes)
    if type(rank) is not int or not 0 <= rank < count:
        what = f"rank={short(rank)} is none of the ranks, which are 0 to {count - 1}"
        raise MeshError(report("abstract_mesh", what, [mesh_text(dict(zip(names, sizes, strict=True)))]))
    return rebuild_abstract_mesh(device, sizes, names, rank)
