"""Meshes without ranks: this process plays one rank of them, with tensors that have shapes and no values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import torch_internals
from ..base import no_values, state
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

    @property
    def ranks(self) -> range:  # type: ignore[override]
        rank = root(self.mesh).rank if self.every is None else self.every.played("a rank's place")
        return range(rank, rank + 1)

    @property
    def every(self) -> Any:
        """What records a plan for many ranks of this mesh at once, where that is done: see `plan.tracing.every_rank`."""
        every = state.process.every_rank
        return every if every is not None and every.mesh == root(self.mesh) else None

    @property
    def asked_about(self) -> Sequence[int]:
        return self.ranks if self.every is None else self.every.ranks

    def by_rank(self, fn: Callable[[int], Any]) -> Sequence[Any]:
        return _ByRank(self, fn)

    def varied(self, op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], vary: tuple[int, Any]) -> Any:
        if self.every is None:
            return super().varied(op, args, kwargs, vary)
        at, values = vary

        def one(rank: int) -> Any:
            return op(*args[:at], values.of(rank), *args[at + 1 :], **kwargs)

        return self.each(one, key=values.of)

    def each(self, fn: Callable[..., Any], *values: Any, key: Callable[[int], Any] | None = None) -> Any:
        if not torch_internals.is_recorded():
            return no_values.alone(fn, self.ranks[0], *values)
        if self.every is None:
            return fn(self.ranks[0], *values)
        return self.every.called(torch_internals.recorder(), fn, values, key)

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


class _ByRank(Sequence[Any]):
    """What a function gives for the rank that is played, whichever that is."""

    def __init__(self, communicator: Abstract, fn: Callable[[int], Any]) -> None:
        self._communicator, self.of = communicator, functools.cache(fn)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, at: Any) -> Any:
        every = self._communicator.every
        return self.of(self._communicator.ranks[at]) if every is None else every.alike(self.of)


class AbstractMesh(SimulatedMesh):
    """A mesh without ranks; made by `abstract_mesh`.

    Attributes:
        rank: the row-major place in it that this process plays.
    """

    communicator = Abstract
    seen_from: int

    @property
    def rank(self) -> int:
        return self.seen_from if state.process.every_rank is None else state.process.every_rank.played("mesh.rank")

    def get_coordinate(self) -> Any:
        if state.process.every_rank is not None:
            state.process.every_rank.played("mesh.get_coordinate()")
        return super().get_coordinate()

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.device_type, tuple(self.mesh.shape), self.mesh_dim_names, self.seen_from

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
    made.seen_from = rank
    return made


def seen_from(mesh: AbstractMesh, rank: int) -> AbstractMesh:
    """The same mesh, of which the blocks, and the plans, of another rank are seen."""
    return rebuild_abstract_mesh(mesh.device_type, tuple(mesh.mesh.shape), mesh.axis_names, rank)


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
        device: where the ranks would compute: "cpu"; or "cuda", of which this process needs one, for torch's autograd runs on
            no device that is not there. Layouts, collectives and their bytes are the same on both. What gloo takes for
            itself is in the plans of its processes only: nobody asks for 512 of them.
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
    (58720256, 118947840)
    """
    sizes, names = checked_axes(shape, names, "abstract_mesh")
    if -1 in sizes:
        what = f"shape {sizes} leaves an axis open with -1, and there are no ranks to fill it"
        raise MeshError(report("abstract_mesh", what, fix="the size of each axis"))
    if device not in ("cpu", "cuda"):
        raise MeshError(report("abstract_mesh", f'device={short(device)} is neither "cpu" nor "cuda"'))
    if device == "cuda" and torch.cuda.device_count() == 0:
        why = ["torch's autograd runs on no device that is not there"]
        fix = 'device="cpu", which has the same layouts, collectives and bytes'
        raise MeshError(report("abstract_mesh", 'device="cuda", but there are no GPUs here', why, fix))
    count = math.prod(sizes)
    if type(rank) is not int or not 0 <= rank < count:
        what = f"rank={short(rank)} is none of the ranks, which are 0 to {count - 1}"
        raise MeshError(report("abstract_mesh", what, [mesh_text(dict(zip(names, sizes, strict=True)))]))
    return rebuild_abstract_mesh(device, sizes, names, rank)
