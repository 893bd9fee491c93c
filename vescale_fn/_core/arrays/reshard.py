"""Carry out the steps from one layout to another (`reshard_plan`) on local values.

Where sizes divide, a step is one collective or one slice. Where they do not, the blocks are padded to one size before the
collective and cut back after it: see `uneven_blocks`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import torch_internals
from ..base import context, op_lines
from ..base.tables import table
from ..distributed import collectives
from ..distributed.communicator import coordinates
from ..distributed.mesh import communicator_of
from ..sharding.index_map import axes_of, dim_indices
from . import uneven_blocks
from .reshard_plan import MoveStep, Rows


class OwnPart(NamedTuple):
    """What a recorder knows of a slice: it is each rank's own part along these axes; and whether all are of one size."""

    mesh: Any
    axes: tuple[str, ...]
    even: bool


def run(x: Any, shape: tuple[int, ...], mesh: Any, steps: Sequence[MoveStep], why: str) -> Any:
    """Carry the steps out on a local value."""
    flows = [log.flow for log in context.logs()] if op_lines.listeners and steps else ()
    for flow in flows:
        flow.begin(x, shape, steps)
    out = None
    try:
        for step in steps:
            x = (_run_apart if step.apart else _RUN[step.kind])(x, shape, mesh, step, why)
        out = x
    finally:
        for flow in flows:
            flow.end(out)
    return x


def _run_apart(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    """Carry out a step on the value with its merged dims taken apart, and put them together again."""
    sizes = tuple(size for sizes in step.apart for size in sizes)
    first = list(itertools.accumulate((len(sizes) for sizes in step.apart), initial=0))

    def local(rank: int) -> tuple[int, ...]:
        return tuple(len(_indices(sizes, mesh, step.before, rank, d)) for d in range(len(sizes)))

    def together(rank: int, block: torch.Tensor) -> torch.Tensor:
        return block.reshape([math.prod(block.shape[a:b]) for a, b in itertools.pairwise(first)])

    x = _local(x, mesh, lambda rank, block: block.reshape(local(rank)), local)
    return _local(_RUN[step.kind](x, sizes, mesh, step, why), mesh, together, lambda rank: None)


def _indices(shape: tuple[int, ...], mesh: Any, rows: Rows, rank: int, dim: int) -> range | list[int]:
    return dim_indices(shape[dim], rows[dim], axes_of(mesh), coordinates(mesh, rank))


def divides(shape: tuple[int, ...], mesh: Any, step: MoveStep, dim: int) -> bool:
    axes = axes_of(mesh)
    names = step.before[dim] if len(step.before[dim]) > len(step.after[dim]) else step.after[dim]
    return shape[dim] % math.prod(axes[a] for a in names) == 0


def _local(x: Any, mesh: Any, fn: Callable[[int, torch.Tensor], torch.Tensor], key: Callable[[int], Any]) -> Any:
    return communicator_of(mesh).each(fn, x, key=key)


def _place(mesh: Any, names: Sequence[str]) -> Callable[[int], Any]:
    """What of a rank matters when only its place along `names` does."""
    return lambda rank: tuple(coordinates(mesh, rank)[name] for name in names)


def _slice(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    dim = step.gains

    def one(rank: int, block: torch.Tensor) -> torch.Tensor:
        held, wanted = (_indices(shape, mesh, rows, rank, dim) for rows in (step.before, step.after))
        if isinstance(held, range) and isinstance(wanted, range):
            part = block.narrow(dim, wanted.start - held.start if wanted else 0, len(wanted))
            if torch_internals.dispatch_modes() and (recorder := torch_internals.recorder()) is not None:
                recorder.know(part, own=OwnPart(mesh, step.axes, divides(shape, mesh, step, dim)))
        else:
            part = _among(block, shape, mesh, step, dim, rank)
        return part.contiguous()

    return _local(x, mesh, one, _place(mesh, step.after[dim]))


def _embed(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    dim = step.loses

    def one(rank: int, block: torch.Tensor) -> torch.Tensor:
        return _among(block, shape, mesh, step, dim, rank).contiguous()

    return _local(x, mesh, one, _place(mesh, step.before[dim]))


def _among(block: torch.Tensor, shape: tuple[int, ...], mesh: Any, step: MoveStep, dim: int, rank: int) -> torch.Tensor:
    """What a rank is to hold after the step, out of what it holds before; zeros for the rest."""
    rows, place = (step.after[dim], step.before[dim]), tuple(coordinates(mesh, rank).items())
    places = uneven_blocks.among(shape[dim], *rows, tuple(axes_of(mesh).items()), place, block.device)
    return uneven_blocks.taken(block, dim, places)


def _keep_first(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    """Keep a value on the first rank alone, by the same call on all, so that they have one plan."""
    place = _place(mesh, step.axes)
    return _local(x, mesh, lambda rank, block: block.masked_fill(is_other(any(place(rank)), block.device), 0), place)


@functools.lru_cache(maxsize=64)
@torch_internals.never_recorded
def is_other(other: bool, device: torch.device) -> torch.Tensor:
    """Whether a rank is another one than that which keeps a value, as a table that a plan may hold."""
    return table(torch_internals.peel(torch.tensor(other)), device)


def _all_reduce(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    return collectives.all_reduce(x, mesh, step.axes, why, elements=largest(shape, mesh, step.before))


@functools.lru_cache(maxsize=4096)
def largest(shape: tuple[int, ...], mesh: Any, rows: Rows) -> int:
    """How many elements the first rank has, which has the most."""
    return math.prod(len(_indices(shape, mesh, rows, 0, dim)) for dim in range(len(shape)))


def _all_gather(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    dim = step.loses
    elements = largest(shape, mesh, step.before)
    if divides(shape, mesh, step, dim):
        return collectives.all_gather(x, mesh, step.axes, dim, why, elements)
    pieces = functools.partial(_pieces, shape, mesh, step, dim, step.after, step.before)
    evened = _local(x, mesh, lambda r, block: uneven_blocks.padded(block, dim, pieces(r, block).width), lambda r: r)
    gathered = collectives.all_gather(evened, mesh, step.axes, dim, why, elements, padded=True)
    whole = [name for name in axes_of(mesh) if name not in step.axes]
    return _local(
        gathered,
        mesh,
        lambda r, block: uneven_blocks.taken(block, dim, pieces(r, block).joined).contiguous(),
        _place(mesh, whole),
    )


def _pieces(
    shape: tuple[int, ...], mesh: Any, step: MoveStep, dim: int, whole: Rows, split: Rows, rank: int, block: Any
) -> uneven_blocks.Pieces:
    """How what a rank holds of a dim under `whole` is split along the axes of a step, as under `split`."""
    place, n = tuple(coordinates(mesh, rank).items()), collectives.group_size(mesh, step.axes)
    axes = tuple(axes_of(mesh).items())
    return uneven_blocks.pieces(shape[dim], whole[dim], split[dim], step.axes, axes, place, n, block.device)


def _spread(block: torch.Tensor, dim: int, pieces: uneven_blocks.Pieces, n: int) -> torch.Tensor:
    """The `n` pieces of what a rank holds along `dim`, each padded to the widest, joined in the members' order."""
    return (
        uneven_blocks.padded(block, dim, n * pieces.width)
        if pieces.apart is None
        else uneven_blocks.taken(block, dim, pieces.apart)
    )


def _reduce_scatter(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    dim, n = step.gains, collectives.group_size(mesh, step.axes)
    elements = largest(shape, mesh, step.after) * n
    if divides(shape, mesh, step, dim):
        return collectives.reduce_scatter(x, mesh, step.axes, dim, why, elements)
    pieces = functools.partial(_pieces, shape, mesh, step, dim, step.before, step.after)
    spread = _local(x, mesh, lambda r, block: _spread(block, dim, pieces(r, block), n), lambda r: r)
    mine = collectives.reduce_scatter(spread, mesh, step.axes, dim, why, elements, padded=True)
    return _local(
        mine,
        mesh,
        lambda r, block: block.narrow(dim, 0, len(_indices(shape, mesh, step.after, r, dim))).contiguous(),
        lambda r: r,
    )


def _all_to_all(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    loses, gains, n = step.loses, step.gains, collectives.group_size(mesh, step.axes)
    if divides(shape, mesh, step, loses) and divides(shape, mesh, step, gains):
        return collectives.all_to_all(x, mesh, step.axes, gains, loses, why, largest(shape, mesh, step.before))
    tall = functools.partial(_pieces, shape, mesh, step, loses, step.after, step.before)
    wide = functools.partial(_pieces, shape, mesh, step, gains, step.before, step.after)

    def before(rank: int, block: torch.Tensor) -> torch.Tensor:
        return uneven_blocks.padded(_spread(block, gains, wide(rank, block), n), loses, tall(rank, block).width)

    def after(rank: int, block: torch.Tensor) -> torch.Tensor:
        mine = block.narrow(gains, 0, len(_indices(shape, mesh, step.after, rank, gains)))
        return uneven_blocks.taken(mine, loses, tall(rank, block).joined).contiguous()

    spread = _local(x, mesh, before, lambda r: r)
    moved = collectives.all_to_all(spread, mesh, step.axes, gains, loses, why, padded=True)
    return _local(moved, mesh, after, lambda r: r)


_RUN: dict[str, Callable[[Any, tuple[int, ...], Any, MoveStep, str], Any]] = {
    "slice": _slice,
    "embed": _embed,
    "keep_first": _keep_first,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
