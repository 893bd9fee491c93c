"""One entry of an array whose leading dim is split: the rank that has it broadcasts it, and its cotangent goes back there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from .. import torch_internals
from ..base import linear_map
from ..distributed import collectives
from ..distributed.communicator import coordinates
from ..distributed.mesh import communicator_of
from ..local_types import tensor_types
from ..sharding.index_map import axes_of, dim_indices
from ..sharding.merged_dim import Names, parts_of
from ..sharding.spec import P, from_split_axes, split_axes
from .array import Lead, led, mesh_of, moved, spec_of, wrap
from .strides import packed


def owners(size: int, names: Names, axes: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The axes over which a dim of `size` that lies as `names` is split, and of each entry the rank that has it, by its place
    among those along these axes."""
    over = tuple(axis for _, part in parts_of(names, size) for axis in part)
    found: dict[int, int] = {}
    for owner, place in enumerate(itertools.product(*(range(axes[axis]) for axis in over))):
        found.update(dict.fromkeys(dim_indices(size, names, axes, dict(zip(over, place))), owner))
    return over, tuple(found[i] for i in range(size))


def entry(x: torch.Tensor, i: int, why: str) -> torch.Tensor:
    """``x[i]`` of an array whose leading dim is split, on all ranks; differentiable."""
    op = _Entry(mesh_of(x), spec_of(x), x.shape[0], i, why)
    return tensor_types.kept(linear_map.apply(op, x)[0], x)


@dataclass(frozen=True)
class _Entry:
    """Entry `i` of an array that lies as `lies`, with `count` entries."""

    row: ClassVar[str] = "with_sharding"

    mesh: Any
    lies: P
    count: int
    i: int
    why: str
    lead: Lead = ()

    def place(self, rank: int) -> tuple[int, int | None]:
        """How many entries a rank has, and which of them this one is, if any."""
        axes, names = axes_of(self.mesh), split_axes(self.lies, 1)[0]
        held = dim_indices(self.count, names, axes, coordinates(self.mesh, rank))
        return len(held), held.index(self.i) if self.i in held else None

    def laid_out(self, x: Any, lies: P) -> Any:
        """What is given, laid out so in the dims behind those of `lead`."""
        spec = spec_of(x) if mesh_of(x) is not None else P()
        return moved(x, self.mesh, led(self.lead, spec, lies, x.ndim), self.why)

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,), dim = xs, len(self.lead)
        x = self.laid_out(x, self.lies)
        rows = split_axes(spec_of(x), x.ndim)

        def own(rank: int, block: torch.Tensor) -> torch.Tensor:
            _, place = self.place(rank)
            shape = (*block.shape[:dim], *block.shape[dim + 1 :])
            return (
                block.new_empty(shape) if place is None else block.select(dim, place).clone()
            )  # to be written, perhaps

        over, of = owners(self.count, rows[dim], axes_of(self.mesh))
        local = communicator_of(self.mesh).each(own, torch_internals.local(x))
        local = collectives.broadcast(local, self.mesh, over, of[self.i], self.why)
        lies = spec_of(x)
        out = from_split_axes((*rows[:dim], *rows[dim + 1 :]), lies.unreduced, lies.reduced)
        return (wrap(packed(local), self.mesh, out, torch.Size((*x.shape[:dim], *x.shape[dim + 1 :]))),)

    def transpose(self) -> _Placed:
        lies = P(*self.lies, unreduced=self.lies.reduced, reduced=self.lies.unreduced)
        return _Placed(self.mesh, lies, self.count, self.i, f"{self.why} (backward)", self.lead)

    def batched(self, over: tuple[str, ...]) -> _Entry:
        return replace(self, lead=(over, *self.lead))


@dataclass(frozen=True)
class _Placed(_Entry):
    """Zeros that lie as `lies`, with what is given as entry `i`."""

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,), dim = xs, len(self.lead)
        x = self.laid_out(x, P(*self.lies[1:], unreduced=self.lies.unreduced, reduced=self.lies.reduced))
        lies = spec_of(x)
        rows = split_axes(lies, x.ndim)

        def whole(rank: int, block: torch.Tensor) -> torch.Tensor:
            count, place = self.place(rank)
            out = block.new_zeros((*block.shape[:dim], count, *block.shape[dim:]))
            if place is not None:
                out.select(dim, place).copy_(block)
            return out

        local = communicator_of(self.mesh).each(whole, torch_internals.local(x))
        out = from_split_axes((*rows[:dim], split_axes(self.lies, 1)[0], *rows[dim:]), lies.unreduced, lies.reduced)
        return (wrap(local, self.mesh, out, torch.Size((*x.shape[:dim], self.count, *x.shape[dim:]))),)

    def transpose(self) -> _Entry:
        lies = P(*self.lies, unreduced=self.lies.reduced, reduced=self.lies.unreduced)
        return _Entry(self.mesh, lies, self.count, self.i, f"{self.why} (backward)", self.lead)

    def batched(self, over: tuple[str, ...]) -> _Placed:
        return replace(self, lead=(over, *self.lead))
