"""A stated layout of one call: whether its rule allows it, and over which axes results are then folded.

Where the arguments lie decides what a rule's vote makes of a call (`layout_solver`). Whoever has compared all ways to carry a
program out states one instead: how the tensor arguments lie, and how the results do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..sharding.index_map import all_hold_some
from ..sharding.merged_dim import Merged
from ..sharding.placements import normal
from ..sharding.spec import P, from_split_axes, split_axes
from .layout_solver import Args, Names, Solution, solved
from .rules.rule import Label, Parts, Row, Rule


class NotAllowed(Exception):
    """Why a rule does not allow a layout."""


def stated(
    rule: Rule, args: Args, outs: Sequence[Any], axes: Mapping[str, int], wanted: Sequence[P | None]
) -> Solution:
    """The solution of a call that lies as stated.

    Args:
        rule: of the call.
        args: how each tensor argument is to lie, and its shape.
        outs: the shapes of the results; None for what is no tensor.
        axes: the mesh.
        wanted: how each result is to lie; None for what is no tensor.

    Raises:
        NotAllowed: the rule does not allow it.
    """
    voted = solved(rule, args, outs, dict(axes), ())
    if _gives(voted, args, outs, axes, wanted):
        return voted
    seen = rule.shape_only or any(isinstance(row, Merged) for spec, _ in args for row in spec)
    if seen or any(type(label) is Parts for row in (*rule.ins, *rule.outs) for label in row):
        raise NotAllowed(f"of what it is given it makes {_texts(voted.outs, outs)}")
    found = _Stated(rule, args, outs, axes, wanted).solution()
    if not _gives(found, args, outs, axes, wanted):
        raise NotAllowed(f"split so, it makes {_texts(found.outs, outs)} of {_texts(found.targets, args)}")
    return found


def _gives(
    solution: Solution, args: Args, outs: Sequence[Any], axes: Mapping[str, int], wanted: Sequence[P | None]
) -> bool:
    pairs = [(target, spec, shape) for target, (spec, shape) in zip(solution.targets, args, strict=True)]
    pairs += [
        (out, spec, shape) for out, spec, shape in zip(solution.outs, wanted, outs, strict=True) if spec is not None
    ]
    return all(normal(one, axes, shape) == normal(spec, axes, shape) for one, spec, shape in pairs)


def _texts(specs: Sequence[P], of: Sequence[Any]) -> str:
    return ", ".join(repr(spec) for spec, one in zip(specs, of, strict=True) if one is not None) or "nothing"


class _Stated:
    """Which axes split which label, as stated."""

    def __init__(
        self, rule: Rule, args: Args, outs: Sequence[Any], axes: Mapping[str, int], wanted: Sequence[P | None]
    ) -> None:
        self.rule, self.args, self.axes = rule, args, axes
        self.chosen: dict[Label, Names] = {}
        self.sizes: dict[Label, set[int]] = {}
        rows = [(row, spec, shape) for row, (spec, shape) in zip(rule.ins, args, strict=True)]
        rows += [
            (row, spec, shape) for row, spec, shape in zip(rule.outs, wanted, outs, strict=True) if spec is not None
        ]
        for row, spec, shape in rows:
            self._take(row, spec, shape)
        self.kept = self._kept()
        self._check()

    def _take(self, row: Row, spec: P, shape: Sequence[int]) -> None:
        for dim, (label, names, size) in enumerate(zip(row, split_axes(spec, len(shape)), shape, strict=True)):
            if label is None and names:
                raise NotAllowed(f"it needs dim {dim} whole of what is to lie as {spec!r}")
            if self.chosen.setdefault(label, names) != names:
                raise NotAllowed(f"dims that it goes through together are split as {self.chosen[label]} and as {names}")
            self.sizes.setdefault(label, set()).add(size)

    def _kept(self) -> set[str]:
        """The axes over which it leaves sums of parts."""
        rule, specs = self.rule, [spec for spec, _ in self.args]
        partial = set(specs[rule.linear[0]].unreduced) if rule.linear else set[str]()
        for i, spec in enumerate(specs):
            if i in rule.linear and spec.unreduced != partial:
                raise NotAllowed("some of what it is linear in is unreduced, and some is not")
            if i not in rule.linear and i not in rule.joins and spec.unreduced:
                raise NotAllowed(f"it is not linear in what is to lie as {spec!r}")
        return partial

    def _check(self) -> None:
        """Raise where an axis splits two labels, or one splits what it may not."""
        used: dict[Any, set[str]] = {}
        for label, names in self.chosen.items():
            taken = used.setdefault(label[0] if self.rule.per_result and label is not None else None, set(self.kept))
            if not taken.isdisjoint(names):
                raise NotAllowed(f"it cannot be split over {names} twice")
            taken.update(names)
            self._check_sizes(label, names)

    def _check_sizes(self, label: Label, names: Names) -> None:
        rule, sizes, ways = self.rule, self.sizes[label], math.prod(self.axes[name] for name in names)
        if not names:
            return
        if (label in rule.even or len(sizes) > 1) and any(size % ways for size in sizes):
            raise NotAllowed(f"sizes {sorted(sizes)} do not divide by {ways}")
        filled = rule.filled | (rule.sums if rule.fold in ("max", "min") else frozenset())
        if label in filled and not all(all_hold_some(size, names, self.axes) for size in sizes):
            raise NotAllowed(f"split over {names}, some rank has nothing of {sorted(sizes)}")

    def solution(self) -> Solution:
        """How the arguments lie, how the results do, and the axes that these are folded over."""
        rule, add = self.rule, self.rule.fold == "sum"
        gone = [self._missing(row, i) for i, row in enumerate(rule.outs)]
        targets = [
            from_split_axes(
                self._rows(row),
                (self.kept if i in rule.linear else set()) | (gone[0] if i in rule.joins else set()),
            )
            for i, row in enumerate(rule.ins)
        ]
        outs = [
            from_split_axes(self._rows(row), self.kept | m if add else self.kept)
            for row, m in zip(rule.outs, gone, strict=True)
        ]
        return Solution(targets, outs, [() if add else tuple(a for a in self.axes if a in m) for m in gone])

    def _rows(self, row: Row) -> list[Names]:
        return [self.chosen.get(label, ()) if label is not None else () for label in row]

    def _missing(self, row: Row, result: int) -> set[str]:
        """The axes of what is summed over, and is missing in a result."""
        sums = {label for label in self.rule.sums if not self.rule.per_result or label[0] == result}
        return {axis for label in sums if label not in row for axis in self.chosen.get(label, ())}
