"""Moves of several arrays at once: what is the same collective of one dtype over the same axes travels as one bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import torch_internals
from ..distributed import collectives
from ..distributed.communicator import Communicator
from ..distributed.mesh import communicator_of
from .reshard import divides, largest, run
from .reshard_plan import MoveStep


def run_together(
    xs: Sequence[Any], shapes: Sequence[tuple[int, ...]], mesh: Any, plans: Sequence[Sequence[MoveStep]], why: str
) -> list[Any]:
    """Carry several plans out; what is the same collective of one dtype over the same axes travels as one."""
    if torch_internals.is_recorded():  # of what is recorded a pass makes buckets, by size
        return [run(x, shape, mesh, steps, why) for x, shape, steps in zip(xs, shapes, plans, strict=True)]
    xs, left = list(xs), [list(steps) for steps in plans]
    while any(left):
        buckets: dict[Any, list[int]] = {}
        for i, steps in enumerate(left):
            while steps and not _joins(steps[0], shapes[i], mesh):
                xs[i] = run(xs[i], shapes[i], mesh, (steps.pop(0),), why)
            if steps:
                buckets.setdefault((steps[0].kind, steps[0].axes, xs[i].dtype), []).append(i)
        for (kind, axes, _), members in buckets.items():
            steps = [left[i].pop(0) for i in members]
            if len(members) == 1:
                xs[members[0]] = run(xs[members[0]], shapes[members[0]], mesh, steps, why)
                continue
            inputs = [xs[i] for i in members]
            if kind == "all_reduce":
                elements = sum(largest(shapes[i], mesh, step.before) for i, step in zip(members, steps, strict=True))
                outs = all_reduce_bucket(inputs, mesh, axes, why, elements)
            elif kind == "all_gather":
                outs = _all_gather_bucket(inputs, mesh, axes, [step.loses for step in steps], why)
            else:
                outs = _reduce_scatter_bucket(inputs, mesh, axes, [step.gains for step in steps], why)
            for i, value in zip(members, outs, strict=True):
                xs[i] = value
    return xs


def _joins(step: MoveStep, shape: tuple[int, ...], mesh: Any) -> bool:
    """Whether a step can be part of a bucket: blocks that are gathered or scattered have one size."""
    if step.kind == "all_reduce":
        return True
    dim = step.loses if step.kind == "all_gather" else step.gains
    return step.kind in ("all_gather", "reduce_scatter") and not step.apart and divides(shape, mesh, step, dim)


def _all_gather_bucket(xs: Sequence[Any], mesh: Any, axes: tuple[str, ...], dims: Sequence[int], why: str) -> list[Any]:
    """All-gather several local values of one dtype, each along its dim, as one."""
    communicator, n = communicator_of(mesh), collectives.group_size(mesh, axes)
    flat = communicator.each(
        lambda rank, *blocks: torch.cat([b.reshape(-1) for b in blocks]), *xs, key=lambda rank: None
    )
    gathered, starts = collectives.all_gather(flat, mesh, axes, 0, why), _starts(xs, communicator)

    def cut(i: int) -> Callable[..., torch.Tensor]:
        def one(rank: int, whole: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
            pieces = whole.view(n, -1).narrow(1, starts[rank][i], block.numel()).unflatten(1, block.shape)
            return pieces.movedim(0, dims[i]).contiguous().flatten(dims[i], dims[i] + 1)

        return one

    return [communicator.each(cut(i), gathered, x, key=lambda rank: None) for i, x in enumerate(xs)]


def _reduce_scatter_bucket(
    xs: Sequence[Any], mesh: Any, axes: tuple[str, ...], dims: Sequence[int], why: str
) -> list[Any]:
    """Reduce-scatter several local values of one dtype, each along its dim, as one."""
    communicator, n = communicator_of(mesh), collectives.group_size(mesh, axes)

    def rows(rank: int, *blocks: torch.Tensor) -> torch.Tensor:
        split = (b.unflatten(d, (n, -1)).movedim(d, 0) for b, d in zip(blocks, dims, strict=True))
        return torch.cat([pieces.reshape(n, -1) for pieces in split], 1).view(-1)

    mine = collectives.reduce_scatter(communicator.each(rows, *xs, key=lambda rank: None), mesh, axes, 0, why)
    starts = _starts(xs, communicator)

    def cut(i: int) -> Callable[..., torch.Tensor]:
        def one(rank: int, part: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
            shape = [size // n if d == dims[i] else size for d, size in enumerate(block.shape)]
            return part.narrow(0, starts[rank][i] // n, block.numel() // n).view(shape)

        return one

    return [communicator.each(cut(i), mine, x, key=lambda rank: None) for i, x in enumerate(xs)]


def _starts(xs: Sequence[Any], communicator: Communicator) -> dict[int, list[int]]:
    """Where in a bucket each value begins, by rank: blocks of ranks of other groups may have other sizes."""
    rows = zip(communicator.ranks, *map(communicator.parts, xs), strict=True)
    return {rank: [0, *itertools.accumulate(b.numel() for b in blocks)] for rank, *blocks in rows}


def all_reduce_bucket(xs: Sequence[Any], mesh: Any, axes: tuple[str, ...], why: str, elements: int = 0) -> list[Any]:
    """All-reduce several local values of one dtype as one; `elements`: of the largest rank's, all together."""
    if len(xs) == 1:
        return [collectives.all_reduce(xs[0], mesh, axes, why, elements=elements)]
    communicator = communicator_of(mesh)
    flat = communicator.each(
        lambda rank, *blocks: torch.cat([b.reshape(-1) for b in blocks]), *xs, key=lambda rank: None
    )
    total = collectives.all_reduce(flat, mesh, axes, why, elements=elements)

    def cut(rank: int, whole: torch.Tensor, *blocks: torch.Tensor) -> torch.Tensor:
        return whole.narrow(0, sum(b.numel() for b in blocks[:-1]), blocks[-1].numel()).view(blocks[-1].shape)

    return [communicator.each(cut, total, *xs[: i + 1], key=lambda rank: None) for i in range(len(xs))]
