"""Rows of zeros at the end of a split dim, so that all ranks have parts of one size: nothing moves."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._core import torch_internals
from .._core.arrays.array import Lead, led, moved, wrap
from .._core.base import linear_map
from .._core.distributed.communicator import coordinates
from .._core.distributed.mesh import communicator_of
from .._core.sharding.index_map import axes_of, dim_indices, local_shape
from .._core.sharding.layout import layout
from .._core.sharding.spec import P, split_axes


def padded(x: Any, mesh: Any, spec: P, dim: int, why: str, multiple: int = 1) -> Any:
    """An array of layout `spec`, made so long along a split dim that each part has one size, of which `multiple` is a
    divisor; differentiable."""
    sizes = axes_of(mesh)
    n = math.prod(sizes[a] for a in split_axes(spec, x.ndim)[dim])
    x = moved(x, mesh, spec, why)
    if x.shape[dim] % (n * multiple) == 0:
        return x
    return linear_map.apply(_Padded(mesh, spec, dim, x.shape[dim], n, multiple, why), x)[0]


def cut(x: Any, mesh: Any, spec: P, dim: int, size: int, why: str, multiple: int = 1) -> Any:
    """What `padded` made longer, back at `size`; differentiable."""
    n = math.prod(axes_of(mesh)[a] for a in split_axes(spec, x.ndim)[dim])
    return x if x.shape[dim] == size else linear_map.apply(_Cut(mesh, spec, dim, size, n, multiple, why), x)[0]


def spans(size: int, names: tuple[str, ...], mesh: Any) -> torch.Tensor:
    """Where each part of a dim of `size` begins and ends that lies along these axes: i64[n, 2]."""
    found = parts(size, names, mesh)
    return torch.tensor([(one[0], one[-1] + 1) if len(one) else (size, size) for one in found], device=mesh.device_type)


def part_sizes(size: int, names: tuple[str, ...], mesh: Any) -> tuple[int, ...]:
    """How large each part of a dim of `size` is that is split along these axes."""
    return tuple(map(len, parts(size, names, mesh)))


@functools.lru_cache(maxsize=256)
def parts(size: int, names: tuple[str, ...], mesh: Any) -> list[Any]:
    """The indices of each part."""
    axes = axes_of(mesh)
    places = itertools.product(*(range(axes[a]) for a in names))
    return [dim_indices(size, names, axes, dict(zip(names, place))) for place in places]


@dataclass(frozen=True)
class _Padded:
    """From `size` to the next multiple of `n * multiple`: each part that is smaller than the others has zeros at its end."""

    mesh: Any
    spec: P
    dim: int
    size: int
    n: int
    multiple: int
    why: str
    lead: Lead = ()

    @property
    def part(self) -> int:
        return -(-self.size // (self.n * self.multiple)) * self.multiple

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._each(xs[0], lambda block, own: _with_zeros(block, self.dim, self.part), self.part * self.n),)

    def _each(self, x: Any, change: Any, size: int) -> Any:
        """Each rank's block changed, given how much of the dim is its own in `size`."""
        spec = led(self.lead, layout(torch_internals.spec(x)), self.spec, x.ndim)
        bare = P(*spec, unreduced=spec.unreduced)
        if layout(torch_internals.spec(x)) != bare:
            x = moved(x, self.mesh, bare, self.why)
        shape, axes = [*x.shape], axes_of(self.mesh)
        shape[self.dim] = self.size
        own = lambda rank: local_shape(shape, axes, spec, coordinates(self.mesh, rank))[self.dim]
        local = communicator_of(self.mesh).each(
            lambda rank, block: change(block, own(rank)), torch_internals.local(x), key=own
        )
        shape[self.dim] = size
        return wrap(local, self.mesh, spec, torch.Size(shape))

    def _back(self) -> tuple[Any, ...]:
        """The fields of the transpose."""
        why = f"{self.why} (backward)"
        return self.mesh, _swapped(self.spec), self.dim, self.size, self.n, self.multiple, why, self.lead

    def transpose(self) -> _Cut:
        return _Cut(*self._back())

    def batched(self, over: tuple[str, ...]) -> _Padded:
        return replace(self, lead=(over, *self.lead), dim=self.dim + 1)


@dataclass(frozen=True)
class _Cut(_Padded):
    """Back to `size`."""

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._each(xs[0], lambda block, own: block.narrow(self.dim, 0, own).contiguous(), self.size),)

    def transpose(self) -> _Padded:  # type: ignore[override]
        return _Padded(*self._back())


def _with_zeros(block: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    more = size - block.shape[dim]
    return torch.constant_pad_nd(block, [0, 0] * (block.ndim - 1 - dim) + [0, more]) if more else block


def _swapped(spec: P) -> P:
    return P(*spec, unreduced=spec.reduced, reduced=spec.unreduced)
