"""What it takes to bring a value from one layout to another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..._core.arrays import reshard_plan
from ..._core.sharding.merged_dim import merge
from ..._core.sharding.spec import P, from_split_axes
from ...plan.passes.buckets import ALONE, GATHERED, LIMIT
from .options import NONE, PARTIAL, Layout

_SUMS = ("all_reduce", "reduce_scatter")
_EMBEDDED = 3  # calls that put a rank's part among zeros


class Sent(NamedTuple):
    """The collectives of a move.

    Attributes:
        seconds: of all, and of what a rank does by itself to make its part of a sum of what it has.
        steps: of each its kind, its axes and the bytes that a rank gives to it.
        together: how many equal values travel as one.
    """

    seconds: float
    steps: tuple[tuple[str, tuple[str, ...], float], ...]
    together: int = 1


class Moves:
    """The moves of values on a mesh, remembered.

    Args:
        axes: of the mesh, with their sizes.
        hardware: what its links do.
    """

    def __init__(self, axes: Mapping[str, int], hardware: Any) -> None:
        self.axes, self.hardware = dict(axes), hardware
        self._items = tuple(self.axes.items())
        self._found: dict[Any, Sent] = {}
        self._plans: dict[Any, list[tuple[str, tuple[str, ...], int]]] = {}

    def __call__(
        self, sizes: tuple[int, ...], itemsize: int, summed: int, before: Layout, after: Layout, together: int = 1
    ) -> Sent:
        """The move of a value whose atoms have these sizes, and whose elements so many bytes, in sums as many as `summed`.
        `together`: how many equal values may travel as one, if they are small, as the buckets of plans have them."""
        if before == after:
            return Sent(0.0, ())
        key = sizes, itemsize, summed, before, after, together
        if key not in self._found:
            self._found[key] = self._made(*key)
        return self._found[key]

    def _made(
        self, sizes: tuple[int, ...], itemsize: int, summed: int, before: Layout, after: Layout, together: int
    ) -> Sent:
        if all(a == b or (a == NONE and b >= 0) for a, b in zip(before, after)):
            return Sent(0.0, ())  # each rank keeps its part
        used = sorted({k for k in (*before, *after) if k >= 0})
        first, last = (tuple(used.index(k) if k >= 0 else k for k in x) for x in (before, after))
        total = math.prod(sizes)
        size = lambda kind: summed if kind in _SUMS else itemsize
        steps = [(kind, axes, total / split * size(kind)) for kind, axes, split in self._steps(len(used), first, last)]
        alone = sum(self._alone(kind, nbytes) for kind, _, nbytes in steps)
        found = tuple(step for step in steps if step[0] not in reshard_plan.LOCAL_KINDS)
        many = [self._together(*step, together) for step in found]
        sent = (self.hardware.collective(k, n * m, self.axes, axes) / m for (k, axes, n), m in zip(found, many))
        return Sent(sum(sent) + alone, found, max(many, default=1))

    def _together(self, kind: str, axes: tuple[str, ...], nbytes: float, together: int) -> int:
        """How many of `together` collectives plans make as one."""
        gathered = nbytes * math.prod(self.axes[a] for a in axes) if kind == "all_gather" else 0.0
        fit = min(LIMIT / nbytes, GATHERED / gathered if gathered else math.inf) if 0 < nbytes < ALONE else 1.0
        return max(min(together, int(fit)), 1)

    def _alone(self, kind: str, nbytes: float) -> float:
        """The seconds of a step without a collective: what is to be a sum is zeros on other ranks, or around a rank's part."""
        calls = {"keep_first": 1, "embed": _EMBEDDED}.get(kind, 0)
        return calls * self.hardware.compute(0, None, 2 * nbytes)

    def _steps(self, count: int, before: Layout, after: Layout) -> Sequence[tuple[str, tuple[str, ...], int]]:
        """The steps of a move, each with the number of parts of its value, of those without a collective afterwards: the same
        for all sizes that divide."""
        key = count, before, after
        if key not in self._plans:
            names, sizes = tuple(self.axes), (math.prod(self.axes.values()),) * count
            steps = reshard_plan.plan(sizes, self._items, spec(sizes, before, names), spec(sizes, after, names))
            self._plans[key] = [
                (step.kind, step.axes, math.prod(self.axes[a] for row in _lying(step) for a in row)) for step in steps
            ]
        return self._plans[key]


def _lying(step: reshard_plan.MoveStep) -> reshard_plan.Rows:
    return step.after if step.kind in reshard_plan.LOCAL_KINDS else step.before


def spec(sizes: Sequence[int], layout: Layout, names: Sequence[str]) -> P:
    """The layout of a value each of whose atoms is a dim."""
    rows = [tuple(a for a, x in zip(names, layout) if x == k) for k in range(len(sizes))]
    return from_split_axes(rows, frozenset(a for a, x in zip(names, layout) if x == PARTIAL))


def spec_of_dims(sizes: Sequence[int], dims: Sequence[Sequence[int]], layout: Layout, axes: Mapping[str, int]) -> P:
    """The layout of a value whose dims are of these atoms."""
    of = lambda k: tuple(a for a, x in zip(axes, layout) if x == k)
    rows = [merge([(sizes[k], of(k)) for k in dim], axes) if dim else () for dim in dims]
    return from_split_axes(rows, frozenset(a for a, x in zip(axes, layout) if x == PARTIAL))


def ways(layout: Layout, axes: Mapping[str, int]) -> int:
    """In how many parts a value lies."""
    return math.prod(n for n, x in zip(axes.values(), layout) if x >= 0)
