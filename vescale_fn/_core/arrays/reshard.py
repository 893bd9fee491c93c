"""From one placement to another: the plan of collectives, and its execution on local values.

A plan is pure data, made from the shape, the mesh axes and the two specs alone, so that every rank makes the same one. It
is a list of steps; each brings the value from one layout to the next. Where sizes divide, a step is one collective or one
slice. Where they do not, the blocks are padded to one size before the collective and cut back after it: both are a `_take`
by positions along a dim, computed from the index maps of the two layouts.

Two things decide the order of the steps. What costs nothing (a slice) or makes the value smaller (a reduce-scatter) comes
first; a gather comes last. And only the minor-most axes of a dim can be taken away or added, one dim at a time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .. import torch_internals
from ..base import context, op_lines
from ..distributed import collectives
from ..distributed.communicator import Communicator, coordinates, groups
from ..distributed.mesh import communicator_of
from ..sharding.index_map import axes_of, dim_indices, local_shape
from ..sharding.merged_dim import Merged, common, parts_of, taken_apart
from ..sharding.placements import normal
from ..sharding.spec import P, from_split_axes, split_axes

Rows = tuple[tuple[str, ...], ...]
LOCAL_KINDS = ("slice", "embed", "keep_first")  # steps without communication


@dataclass(frozen=True)
class MoveStep:
    """One step: what it does over which axes, and the axes that split each dim before and after it."""

    kind: str  # slice, reduce_scatter, all_to_all, all_reduce, all_gather, embed, keep_first
    axes: tuple[str, ...]
    before: Rows
    after: Rows
    loses: int = 0  # the dim that loses the axes: all_gather, all_to_all, embed
    gains: int = 0  # the dim that gains them: slice, reduce_scatter, all_to_all
    apart: tuple[tuple[int, ...], ...] = ()  # where dims are merged ones: the sizes that each dim is taken apart into


class OwnPart(NamedTuple):
    """What a recorder knows of a slice: it is each rank's own part along these axes; and whether all are of one size."""

    mesh: Any
    axes: tuple[str, ...]
    even: bool


@functools.lru_cache(maxsize=8192)
def plan(shape: tuple[int, ...], axes: tuple[tuple[str, int], ...], source: P, target: P) -> tuple[MoveStep, ...]:
    """The steps that bring an array of `shape` from `source` to `target` on a mesh with these (name, size) axes."""
    if not any(isinstance(row, Merged) for row in (*source, *target)):
        return tuple(_steps(shape, dict(axes), *(normal(spec, dict(axes), shape) for spec in (source, target))))
    steps = _taken_apart(shape, axes, source, target)
    return (*plan(shape, axes, source, P()), *plan(shape, axes, P(), target)) if steps is None else steps


def _taken_apart(shape: tuple[int, ...], axes: tuple[tuple[str, int], ...], source: P, target: P) -> Any:
    """The steps between layouts with merged dims: those of the array whose dims have been taken apart. None if there is
    no way to take them apart for both layouts."""
    before, after = split_axes(source, len(shape)), split_axes(target, len(shape))
    cut = [common(*([n for n, _ in parts_of(row, size)] for row in rows)) for size, *rows in zip(shape, before, after)]
    if None in cut:
        return None
    alone = [
        1 in (parts_of(row, 0)[0][0] for row in rows) for rows in zip(before, after)
    ]  # a part of size 1, split itself
    apart = tuple((1, *(sizes or ())) if one else sizes or (1,) for one, sizes in zip(alone, cut, strict=True))
    specs = []
    for rows, spec in ((before, source), (after, target)):
        found = [taken_apart(row, size, sizes, dict(axes)) for row, size, sizes in zip(rows, shape, apart, strict=True)]
        if not all(said for _, said in found):
            return None
        specs.append(from_split_axes([row for rows, _ in found for row in rows], spec.unreduced, spec.reduced))
    steps = plan(tuple(size for sizes in apart for size in sizes), axes, *specs)
    return tuple(replace(step, apart=apart) for step in steps)


def _steps(shape: tuple[int, ...], axes: dict[str, int], source: P, target: P) -> Iterator[MoveStep]:
    rows, goal = list(split_axes(source, len(shape))), split_axes(target, len(shape))
    stays = source.unreduced & target.unreduced
    unreduced = set(source.unreduced - stays)
    wanted = {axis for row in goal for axis in row}

    def in_order(names: Any) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in names)

    def step(kind: str, names: tuple[str, ...], **changes: tuple[int, tuple[str, ...]]) -> MoveStep:
        """The step after which the dim that loses, or gains, axes has this row; `rows` follows."""
        before = tuple(rows)
        dims = {}
        for word, (dim, row) in changes.items():
            rows[dim] = row
            dims[word] = dim
        return MoveStep(kind, names, before, tuple(rows), **dims)

    def exact(dim: int, row: tuple[str, ...]) -> bool:
        """Whether the layouts by each beginning of `row` nest: always but for uneven sizes in an order not the mesh's."""
        return row == in_order(row) or shape[dim] % math.prod(axes[a] for a in row) == 0

    def kept(dim: int) -> int:
        """How many leading axes of a dim stay."""
        if not (exact(dim, rows[dim]) and exact(dim, goal[dim])):
            return len(goal[dim]) if rows[dim] == goal[dim] else 0
        same = [a == b for a, b in zip(rows[dim], goal[dim])]
        return (same + [False]).index(False)

    def leading(names: tuple[str, ...], test: Callable[[str], bool]) -> tuple[str, ...]:
        return names[: [*map(test, names), False].index(False)]

    def grow(dim: int) -> MoveStep | None:
        """Add the next axes that a dim is to have, if nothing is in the way."""
        if rows[dim] == goal[dim] or len(rows[dim]) > kept(dim):
            return None
        todo = goal[dim][len(rows[dim]) :]
        taken = {axis for row in rows for axis in row} | unreduced
        free = leading(todo, lambda axis: axis not in taken)
        if not exact(dim, goal[dim]) and free != todo:
            return None
        if free:
            return step("slice", free, gains=(dim, rows[dim] + free))
        scatter = leading(todo, lambda axis: axis in unreduced)
        if scatter:
            unreduced.difference_update(scatter)
            return step("reduce_scatter", scatter, gains=(dim, rows[dim] + scatter))
        for other, row in enumerate(rows):
            moving = max((todo[:k] for k in range(1, len(todo) + 1) if row[-k:] == todo[:k]), key=len, default=())
            if moving and other != dim and exact(other, row) and len(row) - len(moving) >= kept(other):
                return step("all_to_all", moving, loses=(other, row[: -len(moving)]), gains=(dim, rows[dim] + moving))
        return None

    def reduce() -> MoveStep | None:
        """Add up what is partial and will not be scattered."""
        stuck = {a for dim, row in enumerate(goal) if not exact(dim, row) for a in row}
        names = in_order({axis for axis in unreduced if axis not in wanted or axis in stuck})
        unreduced.difference_update(names)
        return step("all_reduce", names) if names else None

    def shrink() -> MoveStep | None:
        """Take away minor-most axes that a dim is not to have; of the dims that have some, the last."""
        for dim in reversed(range(len(rows))):
            keep = kept(dim)
            extra = rows[dim][keep:]
            if extra:
                partial = tuple(a for a in extra if a in target.unreduced)
                if partial == extra:
                    embedded.update(extra)  # partial sums of blocks placed in zeros: nothing travels
                    return step("embed", extra, loses=(dim, rows[dim][:keep]))
                return step("all_gather", extra, loses=(dim, rows[dim][:keep]))
        return None

    embedded: set[str] = set()
    while True:
        found = next(filter(None, map(grow, range(len(rows)))), None) or reduce() or shrink()
        if found is None:
            break
        yield found
    alone = in_order(target.unreduced - stays - embedded)
    if alone:
        yield step("keep_first", alone)


def traffic(
    shape: tuple[int, ...], axes: Mapping[str, int], steps: Sequence[MoveStep], itemsize: int
) -> list[tuple[str, tuple[str, ...], int]]:
    """What steps send: kind, axes, and the bytes that it holds on the first rank (the larger of before and after)."""
    found = []
    for step in steps:
        if step.kind not in LOCAL_KINDS:
            sizes = [n for group in step.apart for n in group] if step.apart else shape
            held = [
                math.prod(local_shape(sizes, axes, from_split_axes(rows), dict.fromkeys(axes, 0)))
                for rows in (step.before, step.after)
            ]
            found.append((step.kind, step.axes, max(held) * itemsize))
    return found


# --- execution --------------------------------------------------------------------------------------------------------


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


def _divides(shape: tuple[int, ...], mesh: Any, step: MoveStep, dim: int) -> bool:
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
                recorder.know(part, own=OwnPart(mesh, step.axes, _divides(shape, mesh, step, dim)))
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
    return collectives.all_reduce(x, mesh, step.axes, why, elements=_largest(shape, mesh, step.before))


@functools.lru_cache(maxsize=4096)
def _largest(shape: tuple[int, ...], mesh: Any, rows: Rows) -> int:
    """How many elements the first rank has, which has the most."""
    return math.prod(len(_indices(shape, mesh, rows, 0, dim)) for dim in range(len(shape)))


def _all_gather(x: Any, shape: tuple[int, ...], mesh: Any, step: MoveStep, why: str) -> Any:
    dim = step.loses
    elements = _largest(shape, mesh, step.before)
    if _divides(shape, mesh, step, dim):
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
    elements = _largest(shape, mesh, step.after) * collectives.group_size(mesh, step.axes)
    if _divides(shape, mesh, step, dim):
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
    if _divides(shape, mesh, step, loses) and _divides(shape, mesh, step, gains):
        return collectives.all_to_all(x, mesh, step.axes, gains, loses, why, _largest(shape, mesh, step.before))
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
                elements = sum(_largest(shapes[i], mesh, step.before) for i, step in zip(members, steps, strict=True))
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
    return step.kind in ("all_gather", "reduce_scatter") and not step.apart and _divides(shape, mesh, step, dim)


def _all_gather_bucket(xs: Sequence[Any], mesh: Any, axes: tuple[str, ...], dims: Sequence[int], why: str) -> list[Any]:
    """All-gather several local values of one dtype, each along its dim, as one."""
    communicator, n = communicator_of(mesh), collectives.group_size(mesh, axes)
    flat = communicator.each(
        lambda rank, *blocks: torch.cat([b.reshape(-1) for b in blocks]), *xs, key=lambda rank: None
    )
    gathered, starts = collectives.all_gather(flat, mesh, axes, 0, why), _starts(xs, communicator)

    def cut(i: int) -> Callable[..., torch.Tensor]:
        def one(rank: int, whole: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
            pieces = whole.view(n, -1).narrow(1, starts[rank][i], block.numel()).reshape(n, *block.shape)
            return pieces.flatten(0, 1) if dims[i] == 0 else torch.cat(pieces.unbind(), dims[i])

        return one

    return [communicator.each(cut(i), gathered, x, key=lambda rank: None) for i, x in enumerate(xs)]


def _reduce_scatter_bucket(
    xs: Sequence[Any], mesh: Any, axes: tuple[str, ...], dims: Sequence[int], why: str
) -> list[Any]:
    """Reduce-scatter several local values of one dtype, each along its dim, as one."""
    communicator, n = communicator_of(mesh), collectives.group_size(mesh, axes)

    def rows(rank: int, *blocks: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [torch.stack(b.chunk(n, d)).reshape(n, -1) for b, d in zip(blocks, dims, strict=True)], 1
        ).view(-1)

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
