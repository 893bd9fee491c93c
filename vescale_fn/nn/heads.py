"""Heads of queries that share heads of keys, for ranks that each have some of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from .._core import torch_internals
from .._core.arrays.array import Lead, led, moved, moved_as_one, wrap
from .._core.base import linear_map
from .._core.distributed.communicator import coordinates
from .._core.distributed.mesh import communicator_of
from .._core.sharding.index_map import axes_of
from .._core.sharding.layout import layout
from .._core.sharding.spec import P, from_split_axes

Tensor = Any  # a tensor, an array, or a Blocks
Rows = tuple[tuple[str, ...], ...]


def repeats(q: Tensor, k: Tensor, starts: Iterable[int]) -> int:
    """How often to repeat each head of keys, so that none is shared by heads of two ranks, which begin at these."""
    shared = q.shape[1] // k.shape[1]
    return shared // math.gcd(shared, *starts)


def divided(q: Tensor, k: Tensor, v: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads that n ranks divide: those of keys and values repeated, and zeros for heads after the last."""
    part = -(-q.shape[1] // n)
    times = repeats(q, k, (part,))
    if times > 1:
        k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    shared = q.shape[1] // k.shape[1]
    return with_heads(q, part * n), with_heads(k, part * n // shared), with_heads(v, part * n // shared)


def with_heads(x: Tensor, count: int) -> Tensor:
    """Zeros for heads that are not there."""
    return x if x.shape[1] == count else F.pad(x, [0, 0, 0, 0, 0, count - x.shape[1]])


def own_heads(xs: Sequence[Any], mesh: Any, over: Rows, times: int) -> tuple[Any, ...]:
    """Heads of keys that each rank has all of, [B, G, S, D], repeated and split, evenly, as those of the queries are.

    Args:
        over: the axes of batch, heads and sequence.
    """
    return linear_map.apply(_OwnHeads(mesh, over, times), *xs)


@dataclass(frozen=True)
class _OwnHeads:
    """From all heads to those of a rank; back, each rank adds up what it has of a head, and then the ranks do."""

    mesh: Any
    over: Rows
    times: int
    lead: Lead = ()

    @property
    def whole(self) -> P:
        batch, _, names = self.over
        return from_split_axes((batch, (), names))

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self._each(x, self.whole, from_split_axes(self.over)) for x in xs)

    def _each(self, x: Any, given: P, gives: P) -> Any:
        """What ranks make of their blocks of an array in the first layout, as one in the other."""
        given = led(self.lead, layout(torch_internals.spec(x)), given, x.ndim)
        if layout(torch_internals.spec(x)) != given:
            x = moved(x, self.mesh, given, "nn.attention")
        dim, sizes = len(self.lead) + 1, axes_of(self.mesh)
        ways = math.prod(sizes[name] for name in self.over[1])
        change = lambda rank, block: self._of_block(block, dim, self._place(rank), ways)
        local = communicator_of(self.mesh).each(change, torch_internals.local(x), key=self._place)
        shape = torch.Size([*x.shape[:dim], self._count(x.shape[dim]), *x.shape[dim + 1 :]])
        return wrap(local, self.mesh, led(self.lead, given, gives, x.ndim), shape)

    def _place(self, rank: int) -> int:
        """A rank's place along the axes of the heads, major first."""
        place, at, sizes = 0, coordinates(self.mesh, rank), axes_of(self.mesh)
        for name in self.over[1]:
            place = place * sizes[name] + at[name]
        return place

    def _count(self, heads: int) -> int:
        return heads * self.times

    def _of_block(self, block: torch.Tensor, dim: int, place: int, ways: int) -> torch.Tensor:
        n = block.shape[dim] * self.times // ways
        return block.repeat_interleave(self.times, dim).narrow(dim, place * n, n).contiguous()

    def transpose(self) -> _AddedHeads:
        return _AddedHeads(self.mesh, self.over, self.times, self.lead)

    def batched(self, over: tuple[str, ...]) -> _OwnHeads:
        return replace(self, lead=(over, *self.lead))


@dataclass(frozen=True)
class _AddedHeads(_OwnHeads):
    """The cotangents of all heads."""

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        sums = P(*self.whole, unreduced=self.over[1])
        parts = [self._each(x, from_split_axes(self.over), sums) for x in xs]
        to = [led(self.lead, layout(torch_internals.spec(x)), self.whole, x.ndim) for x in parts]
        return tuple(moved_as_one(parts, self.mesh, to, "nn.attention (backward)"))

    def _count(self, heads: int) -> int:
        return heads // self.times

    def _of_block(self, block: torch.Tensor, dim: int, place: int, ways: int) -> torch.Tensor:
        n, behind = block.shape[dim], [0, 0] * (block.ndim - 1 - dim)
        every = torch.constant_pad_nd(block, [*behind, place * n, (ways - 1 - place) * n])
        return every.unflatten(dim, (-1, self.times)).sum(dim + 1)

    def transpose(self) -> _OwnHeads:  # type: ignore[override]
        return _OwnHeads(self.mesh, self.over, self.times, self.lead)
