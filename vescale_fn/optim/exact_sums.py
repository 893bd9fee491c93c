"""Sums of squares whose bits do not depend on which rank has which part: the squares as multiples of one number, in integers.

Under `deterministic` a sum over ranks follows one tree, but a rank's own part of it is added up by a kernel, in an order that
the layout decides: a gradient that is whole has another sum than the same one in eight parts. Integers have no such order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._core import torch_internals
from .._core.arrays.array import mesh_of, wrap
from .._core.base import context
from .._core.distributed import collectives
from .._core.distributed.mesh import communicator_of
from .._core.distributed.places import whole_mesh
from .._core.sharding.index_map import axes_of
from .._core.sharding.spec import P
from .global_sums import added_up, is_seen, split_by


def wanted(leaves: Sequence[Any]) -> bool:
    """Whether sums over these leaves are to be exact: under `deterministic`, where nothing differentiates them."""
    followed = any(x.requires_grad or torch_internals.peel(x) is not x for x in leaves)
    return context.virtual() is not None and not followed and not torch_internals.forward_ad_active()


def norm(leaves: Sequence[Any], dtype: torch.dtype) -> Any:
    """The norm of these leaves as one long vector, a 0-d tensor.

    A leaf's squares are divided by that of its largest number, and rounded to multiples of 2**(k - 62), where it has up to 2**k
    numbers: their sum is an integer of 64 bits.
    """
    meshes: dict[Any, list[Any]] = {}
    for x in leaves:
        if x.numel():
            meshes.setdefault(whole_mesh(mesh_of(x)), []).append(x)
    total: Any = torch.zeros((), dtype=torch.float64, device=leaves[0].device)
    for mesh, own in meshes.items():
        places: dict[Any, list[int]] = {}
        for i, x in enumerate(own):
            places.setdefault(mesh_of(x), []).append(i)
        by_place = [_largest([own[i] for i in at], place) for place, at in places.items()]
        sizes = [2.0 ** (62 - (x.numel() - 1).bit_length()) for x in own]
        sums: list[Any] = [None] * len(own)
        for of_place, at in zip(by_place, places.values()):
            for i, divisor in zip(at, torch.where(of_place > 0, of_place, 1.0).unbind(), strict=True):
                sums[i] = torch.square(own[i].to(torch.float64) / divisor).mul(sizes[i]).round().to(torch.int64).sum()
        whole = added_up(sums, mesh, torch.stack).to(torch.float64)
        largest = by_place[0]
        if len(places) > 1 or mesh not in places:  # in the order of the leaves, wherever they are
            order = sorted(range(len(own)), key=list(itertools.chain(*places.values())).__getitem__)
            largest = added_up(by_place, mesh, torch.cat)[torch.tensor(order, device=whole.device)]
        found = whole / torch.tensor(sizes, dtype=torch.float64, device=whole.device) * torch.square(largest)
        total = total + torch.where(torch.isfinite(largest), found, largest).sum()
    return torch.sqrt(total).to(dtype)


class ExactParts(NamedTuple):
    """The ranks' parts of sums of numbers that are not negative, as multiples of what follows from the largest of them."""

    sums: Any  # int64: on a mesh partial sums, to be added up
    largest: Any  # of the numbers of each sum
    size: float  # how many multiples the largest is
    over: int  # by what the sums are divided
    dtype: torch.dtype  # of the sums


def parts(x: Any, dims: tuple[int, ...], over: int = 1) -> ExactParts:
    """Of the sums of `x` over some dims, which stay with one element; over all of them where there are none, 0-d."""
    dtype, x = x.dtype, x.to(torch.float64)
    largest = torch.amax(x, dims, keepdim=bool(dims)) if x.numel() else torch.zeros((), dtype=x.dtype, device=x.device)
    count = math.prod(x.shape[dim] for dim in dims) if dims else x.numel()
    size = 2.0 ** (62 - max(0, count - 1).bit_length())
    multiples = (x / torch.where(largest > 0, largest, 1.0) * size).round().to(torch.int64)
    return ExactParts(
        torch.sum(multiples, dims, keepdim=True) if dims else torch.sum(multiples), largest, size, over, dtype
    )


def whole(added_up: Any, part: ExactParts) -> Any:
    """The sums, of the ranks' parts added up."""
    sums = added_up.to(torch.float64) / part.size * part.largest
    return (torch.where(torch.isfinite(part.largest), sums, part.largest) / part.over).to(part.dtype)


def _largest(xs: Sequence[Any], mesh: Any) -> Any:
    """The size of each leaf's largest number, which a NaN is: a vector."""
    if mesh is None or is_seen(xs):
        return torch.stack([x.abs().amax().to(torch.float64) for x in xs])

    def of_blocks(_: int, *blocks: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=blocks[0].device)
        return torch.stack([x.abs().amax().to(torch.float64) if x.numel() else zero for x in blocks])

    local = communicator_of(mesh).each(of_blocks, *map(torch_internals.local, xs), key=lambda rank: None)
    used = frozenset[str]().union(*map(split_by, xs))
    over = tuple(axis for axis in axes_of(mesh) if axis in used)
    found = collectives.all_reduce(local, mesh, over, "global_norm", "max")
    return wrap(found, mesh, P(), torch.Size((len(xs),)))
