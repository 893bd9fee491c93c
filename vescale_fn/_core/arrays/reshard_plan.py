"""The plan of a move from one layout to another: which collectives, over which axes, in which order.

A plan is pure data, made from the shape, the mesh axes and the two specs alone, so that every rank makes the same one. It
is a list of steps; each brings the value from one layout to the next. Two things decide their order. What costs nothing (a
slice) or makes the value smaller (a reduce-scatter) comes first; a gather comes last. And only the minor-most axes of a dim
can be taken away or added, one dim at a time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..sharding.index_map import local_shape
from ..sharding.merged_dim import Merged, common, parts_of, taken_apart
from ..sharding.spec import P, from_split_axes, split_axes

Names = tuple[str, ...]
Rows = tuple[Names, ...]
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


@functools.lru_cache(maxsize=8192)
def plan(shape: tuple[int, ...], axes: tuple[tuple[str, int], ...], source: P, target: P) -> tuple[MoveStep, ...]:
    """The steps that bring an array of `shape` from `source` to `target` on a mesh with these (name, size) axes."""
    if not any(isinstance(row, Merged) for row in (*source, *target)):
        ones = {axis for axis, size in axes if size == 1}  # along which nothing can travel
        source, target = (_without(ones, spec, len(shape)) for spec in (source, target))
        cut = _sliced_first(shape, dict(axes), source, target)
        found = _taken_apart(shape, axes, source, target, cut) if any(len(sizes) > 1 for sizes in cut) else None
        return tuple(_Steps(shape, dict(axes), source, target)) if found is None else found
    rows = zip(shape, split_axes(source, len(shape)), split_axes(target, len(shape)))
    steps = _taken_apart(
        shape,
        axes,
        source,
        target,
        [common(*([n for n, _ in parts_of(row, size)] for row in both)) for size, *both in rows],
    )
    return (*plan(shape, axes, source, P()), *plan(shape, axes, P(), target)) if steps is None else steps


def _without(axes: set[str], spec: P, ndim: int) -> P:
    rows = [tuple(axis for axis in row if axis not in axes) for row in split_axes(spec, ndim)]
    return from_split_axes(rows, spec.unreduced - axes)


def _sliced_first(shape: tuple[int, ...], axes: dict[str, int], source: P, target: P) -> list[tuple[int, ...]]:
    """The sizes into which each dim is taken apart so that what is split over axes behind those of a reduce-scatter is sliced
    before it: of sums over "dp" that are to lie as ``P(("dp", "cp"))``, a rank adds up its part along "cp" alone."""
    sums, found = source.unreduced - target.unreduced, list[tuple[int, ...]]()
    rows, goals = split_axes(source, len(shape)), split_axes(target, len(shape))
    used = sums.union(*rows)
    for size, row, goal in zip(shape, rows, goals, strict=True):
        added = len(row) + _count(goal[len(row) :], sums.__contains__)
        fits = row == goal[: len(row)] and len(row) < added < len(goal) and used.isdisjoint(goal[added:])
        if size and fits and size % math.prod(axes[axis] for axis in goal) == 0:
            outer = math.prod(axes[axis] for axis in goal[:added])
            found.append((outer, size // outer))
        else:
            found.append((size,))
    return found


def _taken_apart(
    shape: tuple[int, ...], axes: tuple[tuple[str, int], ...], source: P, target: P, cut: Sequence[Any]
) -> Any:
    """The steps between layouts, some with merged dims: those of the array whose dims have been taken apart into these sizes.
    None if there is no way to take them apart for both layouts."""
    before, after = split_axes(source, len(shape)), split_axes(target, len(shape))
    if None in cut:
        return None
    # a part of size 1, split itself
    alone = [1 in (parts_of(row, 0)[0][0] for row in rows) for rows in zip(before, after)]
    apart = tuple((1, *(sizes or ())) if one else sizes or (1,) for one, sizes in zip(alone, cut, strict=True))
    specs = []
    for rows, spec in ((before, source), (after, target)):
        found = [taken_apart(row, size, sizes, dict(axes)) for row, size, sizes in zip(rows, shape, apart, strict=True)]
        if not all(said for _, said in found):
            return None
        specs.append(from_split_axes([row for rows, _ in found for row in rows], spec.unreduced, spec.reduced))
    steps = plan(tuple(size for sizes in apart for size in sizes), axes, *specs)
    return tuple(replace(step, apart=_joined(apart, step.apart) if step.apart else apart) for step in steps)


def _joined(apart: tuple[tuple[int, ...], ...], again: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The sizes that each dim is taken apart into, where each of its parts is taken apart again."""
    parts = iter(again)
    return tuple(tuple(size for _ in sizes for size in next(parts)) for sizes in apart)


class _Steps:
    """The steps from one layout to another, one by one: `rows` is how the dims lie after those that were made."""

    def __init__(self, shape: tuple[int, ...], axes: dict[str, int], source: P, target: P) -> None:
        self.shape, self.axes, self.target = shape, axes, target
        self.rows, self.goal = list(split_axes(source, len(shape))), split_axes(target, len(shape))
        self.stays = source.unreduced & target.unreduced
        self.unreduced = set(source.unreduced - self.stays)
        self.embedded: set[str] = set()

    def __iter__(self) -> Iterator[MoveStep]:
        dims = range(len(self.rows))
        while (
            found := next(filter(None, itertools.chain(map(self._slice, dims), map(self._grow, dims))), None)
            or self._reduce()
            or self._shrink()
        ):
            yield found
        if alone := self._in_order(self.target.unreduced - self.stays - self.embedded):
            yield self._step("keep_first", alone)

    def _in_order(self, names: Any) -> Names:
        return tuple(axis for axis in self.axes if axis in names)

    def _step(self, kind: str, names: Names, **changes: tuple[int, Names]) -> MoveStep:
        """The step after which the dim that loses, or gains, axes has this row."""
        before = tuple(self.rows)
        for dim, row in changes.values():
            self.rows[dim] = row
        dims: dict[str, Any] = {word: dim for word, (dim, _) in changes.items()}
        return MoveStep(kind, names, before, tuple(self.rows), **dims)

    def _exact(self, dim: int, row: Names) -> bool:
        """Whether the layouts by each beginning of `row` nest: always but for uneven sizes in an order not the mesh's."""
        return row == self._in_order(row) or self.shape[dim] % math.prod(self.axes[a] for a in row) == 0

    def _kept(self, dim: int) -> int:
        """How many leading axes of a dim stay."""
        row, goal = self.rows[dim], self.goal[dim]
        if not (self._exact(dim, row) and self._exact(dim, goal)):
            return len(goal) if row == goal else 0
        return _count(zip(row, goal), lambda pair: pair[0] == pair[1])

    def _todo(self, dim: int) -> Names:
        """The axes that a dim is to have besides, if those that it has stay."""
        row, goal = self.rows[dim], self.goal[dim]
        return () if row == goal or len(row) > self._kept(dim) else goal[len(row) :]

    def _slice(self, dim: int) -> MoveStep | None:
        """Add those of the next axes that a dim is to have which are neither in use nor to be added up."""
        todo = self._todo(dim)
        taken = {axis for row in self.rows for axis in row} | self.unreduced
        free = todo[: _count(todo, lambda axis: axis not in taken)]
        if not free or (free != todo and not self._exact(dim, self.goal[dim])):
            return None
        return self._step("slice", free, gains=(dim, self.rows[dim] + free))

    def _grow(self, dim: int) -> MoveStep | None:
        """Add the next axes that a dim is to have, where it takes a collective."""
        todo = self._todo(dim)
        if not todo or not self._exact(dim, self.goal[dim]):
            return None
        scatter = todo[: _count(todo, self.unreduced.__contains__)]
        if scatter:
            self.unreduced.difference_update(scatter)
            return self._step("reduce_scatter", scatter, gains=(dim, self.rows[dim] + scatter))
        return self._exchange(dim, todo)

    def _exchange(self, dim: int, todo: Names) -> MoveStep | None:
        """Take the next axes that a dim is to have from the end of another dim that has them."""
        for other, row in enumerate(self.rows):
            moving = max((todo[:k] for k in range(1, len(todo) + 1) if row[-k:] == todo[:k]), key=len, default=())
            left = row[: len(row) - len(moving)]
            if moving and other != dim and self._exact(other, row) and len(left) >= self._kept(other):
                return self._step("all_to_all", moving, loses=(other, left), gains=(dim, self.rows[dim] + moving))
        return None

    def _reduce(self) -> MoveStep | None:
        """Add up what is partial and will not be scattered."""
        scattered = {axis for dim, row in enumerate(self.goal) if self._exact(dim, row) for axis in row}
        names = self._in_order(self.unreduced - scattered)
        self.unreduced.difference_update(names)
        return self._step("all_reduce", names) if names else None

    def _shrink(self) -> MoveStep | None:
        """Take away minor-most axes that a dim is not to have; of the dims that have some, the last."""
        for dim in reversed(range(len(self.rows))):
            keep = self._kept(dim)
            left, extra = self.rows[dim][:keep], self.rows[dim][keep:]
            if extra and self.target.unreduced.issuperset(extra):
                self.embedded.update(extra)  # partial sums of blocks placed in zeros: nothing travels
                return self._step("embed", extra, loses=(dim, left))
            if extra:
                return self._step("all_gather", extra, loses=(dim, left))
        return None


def _count(entries: Iterable[Any], test: Callable[[Any], bool]) -> int:
    """How many of the first entries pass."""
    return sum(1 for _ in itertools.takewhile(test, entries))


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
