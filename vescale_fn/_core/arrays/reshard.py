"""Carry out the steps from one layout to another (`reshard_plan`) on local values.

Where sizes divide, a step is one collective or one slice. Where they do not, the blocks are padded to one size before the
collective and cut back after it: both are a `_take` by positions along a dim, computed from the index maps of the two layouts.
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
from ..distributed import collectives
from ..distributed.communicator import coordinates, groups
from ..distributed.mesh import communicator_of
from ..sharding.index_map import axes_of, dim_indices
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


def _take(x: torch.Tensor, dim: int, positions: Sequence[int]) -> torch.Tensor:
    """The entries of `x` at `positions` along `dim`, with zeros where a position is -1."""
    if not len(positions):
        return x.narrow(dim, 0, 0)
    first, n = positions[0], len(positions)
    if first >= 0 and list(positions) == list(range(first, first + n)):
        return x.narrow(dim, first, n)
    padded = torch.cat([x, x.new_zeros([*x.shape[:dim], 1, *x.shape[dim + 1 :]])], dim)  # -1 becomes its last entry
    at = torch.tensor([x.shape[dim] if position < 0 else position for position in positions], device=x.device)
    return padded[(*[slice(None)] * dim, at)]  # index_select knows no unsigned types


def _positions(wanted: Sequence[int], held: Sequence[int], length: int | None = None) -> list[int]:
    """Where each wanted index is among the held ones (-1: nowhere), padded to `length` with -1."""
    if isinstance(held, range):
        found = [i - held.start if i in held else -1 for i in wanted]
    else:
        where = {index: position for position, index in enumerate(held)}
        found = [where.get(i, -1) for i in wanted]
    return found + [-1] * ((length or 0) - len(found))


def _members(mesh: Any, step: MoveStep, rank: int) -> tuple[int, ...]:
    return next(group for group in groups(mesh, step.axes) if rank in group)


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
            part = _take(block, dim, _positions(wanted, held))
        return part.contiguous()

    return _local(x, mesh, one, _place(mesh, step.after[dim]))


def _embed(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    dim = step.loses

    def one(rank: int, block: torch.Tensor) -> torch.Tensor:
        held, wanted = (_indices(shape, mesh, rows, rank, dim) for rows in (step.before, step.after))
        return _take(block, dim, _positions(wanted, held)).contiguous()

    return _local(x, mesh, one, _place(mesh, step.before[dim]))


def _keep_first(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    place = _place(mesh, step.axes)
    return _local(x, mesh, lambda rank, block: torch.zeros_like(block) if any(place(rank)) else block, place)


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
    widest = functools.partial(_widest, shape, mesh, step, dim, step.before)
    padded = _local(x, mesh, lambda rank, block: _pad(block, dim, widest(rank)), lambda rank: rank)
    gathered = collectives.all_gather(padded, mesh, step.axes, dim, why, elements, padded=True)
    return _local(
        gathered,
        mesh,
        lambda rank, block: _cut(block, shape, mesh, step, dim, rank, widest(rank)),
        lambda rank: _members(mesh, step, rank),
    )


def _widest(shape: tuple[int, ...], mesh: Any, step: MoveStep, dim: int, rows: Rows, rank: int) -> int:
    return max(len(_indices(shape, mesh, rows, member, dim)) for member in _members(mesh, step, rank))


def _pad(block: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return _take(block, dim, [*range(block.shape[dim]), *[-1] * (size - block.shape[dim])])


def _cut(
    block: torch.Tensor, shape: tuple[int, ...], mesh: Any, step: MoveStep, dim: int, rank: int, width: int
) -> Any:
    """Out of the members' padded pieces, joined along `dim`, what the rank holds after the step, in order."""
    where = {}
    for i, member in enumerate(_members(mesh, step, rank)):
        for j, index in enumerate(_indices(shape, mesh, step.before, member, dim)):
            where[index] = i * width + j
    return _take(block, dim, [where[index] for index in _indices(shape, mesh, step.after, rank, dim)]).contiguous()


def _spread(
    block: torch.Tensor, shape: tuple[int, ...], mesh: Any, step: MoveStep, dim: int, rank: int, width: int
) -> Any:
    """The members' pieces along `dim` after the step, each padded to `width`, joined in the members' order."""
    held = _indices(shape, mesh, step.before, rank, dim)
    pieces = [_positions(_indices(shape, mesh, step.after, m, dim), held, width) for m in _members(mesh, step, rank)]
    return _take(block, dim, [position for piece in pieces for position in piece])


def _reduce_scatter(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    dim = step.gains
    elements = largest(shape, mesh, step.after) * collectives.group_size(mesh, step.axes)
    if divides(shape, mesh, step, dim):
        return collectives.reduce_scatter(x, mesh, step.axes, dim, why, elements)
    widest = functools.partial(_widest, shape, mesh, step, dim, step.after)
    spread = _local(x, mesh, lambda r, block: _spread(block, shape, mesh, step, dim, r, widest(r)), lambda rank: rank)
    mine = collectives.reduce_scatter(spread, mesh, step.axes, dim, why, elements, padded=True)
    return _local(
        mine,
        mesh,
        lambda r, block: block.narrow(dim, 0, len(_indices(shape, mesh, step.after, r, dim))).contiguous(),
        lambda rank: rank,
    )


def _all_to_all(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    loses, gains = step.loses, step.gains
    if divides(shape, mesh, step, loses) and divides(shape, mesh, step, gains):
        return collectives.all_to_all(x, mesh, step.axes, gains, loses, why, largest(shape, mesh, step.before))
    tall = functools.partial(_widest, shape, mesh, step, loses, step.before)
    wide = functools.partial(_widest, shape, mesh, step, gains, step.after)

    def before(rank: int, block: torch.Tensor) -> torch.Tensor:
        return _pad(_spread(block, shape, mesh, step, gains, rank, wide(rank)), loses, tall(rank))

    def after(rank: int, block: torch.Tensor) -> torch.Tensor:
        mine = block.narrow(gains, 0, len(_indices(shape, mesh, step.after, rank, gains)))
        return _cut(mine, shape, mesh, step, loses, rank, tall(rank))

    spread = _local(x, mesh, before, lambda rank: rank)
    moved = collectives.all_to_all(spread, mesh, step.axes, gains, loses, why, padded=True)
    return _local(moved, mesh, after, lambda rank: rank)


_RUN: dict[str, Callable[[Any, tuple[int, ...], Any, MoveStep, str], Any]] = {
    "slice": _slice,
    "embed": _embed,
    "keep_first": _keep_first,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
