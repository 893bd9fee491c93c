"""From a rule and how the arguments lie to how they must lie and the results do: which axes split which label."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..sharding.index_map import all_hold_some
from ..sharding.spec import P, axes_named, from_split_axes, split_axes
from .merged_operands import apart, has_merged
from .rules.rule import Label, Row, Rule, without_blocks

Args = list[tuple[P, tuple[int, ...]]]
Names = tuple[str, ...]


class Solution(NamedTuple):
    """How the arguments of a call must lie, how its results do, and the axes over which each result is folded."""

    targets: list[P]
    outs: list[P]
    folds: list[Names]


def _stays_partial(axis: str, rule: Rule, args: Args, outs: Sequence[Any], pinned: Sequence[int]) -> bool:
    """Whether results are left as partial sums over an axis: where all that they are linear in is partial; or where some
    is, no smaller than a result, and the rest lies whole along the axis, so that one rank alone can add it: a bias."""
    if any(axis in axes_named(args[i][0]) for i in rule.unmoved):
        return False
    lying = [args[i] for i in rule.linear]
    partial = [axis in spec.unreduced for spec, _ in lying]
    if all(partial) or not any(partial):
        return bool(lying) and all(partial)
    largest = max(math.prod(out or ()) for out in outs)
    return all(
        math.prod(shape) >= largest if is_partial else i not in pinned and axis not in axes_named(spec)
        for i, (spec, shape), is_partial in zip(rule.linear, lying, partial, strict=True)
    )


def solved(rule: Rule, args: Args, outs: Sequence[Any], axes: dict[str, int], pinned: Sequence[int]) -> Solution:
    """How the arguments of a call must lie, and how its results do."""
    if not has_merged(rule, args):
        return _solve(rule, args, outs, axes, pinned)
    fine, lying, sizes, together = apart(rule, args, outs, axes)
    if any(all(label not in row for row in (*fine.ins, *fine.outs)) for label in rule.blocks):
        return solved(without_blocks(rule), args, outs, axes, pinned)  # no range covers such a block
    targets, out_specs, folds = _solve(fine, lying, sizes, axes, pinned)
    targets = [
        args[i][0] if i in rule.shape_only else together(spec, labels, args[i][1])
        for i, (spec, labels) in enumerate(zip(targets, rule.ins, strict=True))
    ]
    out_specs = [together(spec, labels, shape or ()) for spec, labels, shape in zip(out_specs, rule.outs, outs)]
    return Solution(targets, out_specs, folds)


def _solve(rule: Rule, args: Args, outs: Sequence[Any], axes: dict[str, int], pinned: Sequence[int]) -> Solution:
    """Which axes split which label: the larger tensor stays where it is, the smaller one moves."""
    kept = {axis for axis in axes if _stays_partial(axis, rule, args, outs, pinned)}
    chosen = _chosen(rule, _votes(rule, args, pinned), _sizes(rule, args, outs), axes, kept)

    def rows(labels: Row) -> list[Names]:
        return [chosen.get(label, ()) if label is not None else () for label in labels]

    missing = functools.partial(_missing, rule, chosen)
    targets = []
    for i, (spec, _) in enumerate(args):
        unreduced = (kept if i in rule.linear else set()) | (missing(rule.outs[0]) if i in rule.joins else set())
        targets.append(spec if i in rule.shape_only else from_split_axes(rows(rule.ins[i]), unreduced))
    if rule.shape_only and not rule.linear:  # a new tensor that lies as one whose shape it has
        for i in rule.shape_only:
            chosen |= {label: names for label, names, _ in _dims(rule.ins[i], *args[i]) if label is not None}
    add = rule.fold == "sum"
    gone = [missing(row, result) for result, row in enumerate(rule.outs)]
    out_specs = [from_split_axes(rows(row), kept | m if add else kept) for row, m in zip(rule.outs, gone, strict=True)]
    return Solution(targets, out_specs, [() if add else tuple(a for a in axes if a in m) for m in gone])


def _missing(rule: Rule, chosen: dict[Label, Names], labels: Row, result: int = 0) -> set[str]:
    """The axes of labels that are summed over and that a row has not."""
    sums = {label for label in rule.sums if not rule.per_result or label[0] == result}
    return {axis for label in sums if label not in labels for axis in chosen.get(label, ())}


def _dims(row: Row, spec: P, shape: tuple[int, ...]) -> Iterable[tuple[Label, Names, int]]:
    """Of each dim of a tensor: its label, the axes that split it, its size."""
    return zip(row, split_axes(spec, len(shape)), shape, strict=True)


def _votes(rule: Rule, args: Args, pinned: Sequence[int]) -> dict[Label, dict[Names, float]]:
    """For each label the ways in which it is split already, or wished to be, and how much speaks for each: elements."""
    votes: dict[Label, dict[Names, float]] = {}
    for i, (spec, shape) in enumerate(args):
        for label, names, _ in _dims(rule.ins[i], spec, shape) if i not in rule.shape_only else ():
            if label is not None and (names or i in pinned):
                ways = votes.setdefault(label, {})
                ways[names] = ways.get(names, 0) + (math.inf if i in pinned else 1 + math.prod(shape))
    for label, names in rule.wish:
        votes.setdefault(label, {}).setdefault(names, 0)
    for label in rule.sums if pinned else ():  # what is written is no partial sum
        votes.pop(label, None)
    return votes


def _sizes(rule: Rule, args: Args, outs: Sequence[Any]) -> dict[Label, set[int]]:
    """The sizes of the dims of each label."""
    sizes: dict[Label, set[int]] = {}
    shapes = [shape for _, shape in args] + [shape or () for shape in outs]
    for row, shape in zip((*rule.ins, *rule.outs), shapes, strict=True):
        for label, size in zip(row, shape, strict=True):
            sizes.setdefault(label, set()).add(size)
    return sizes


def _chosen(
    rule: Rule,
    votes: dict[Label, dict[Names, float]],
    sizes: dict[Label, set[int]],
    axes: dict[str, int],
    kept: set[str],
) -> dict[Label, Names]:
    """The axes that split each label: the largest vote's, up to the first that is taken or may not split it."""
    filled = rule.filled | (rule.sums if rule.fold in ("max", "min") else frozenset())  # of nothing there is no extreme

    def may_split(label: Label, names: Names) -> bool:
        even = label in rule.even or len(sizes[label]) > 1
        return (not even or all(size % math.prod(axes[a] for a in names) == 0 for size in sizes[label])) and (
            label not in filled or all(all_hold_some(size, names, axes) for size in sizes[label])
        )

    chosen: dict[Label, Names] = {}
    used: dict[Any, set[str]] = {}  # an axis splits one label of a call
    for label in sorted(votes, key=lambda label: (label in rule.yields, -max(votes[label].values()))):
        names = max(votes[label], key=votes[label].__getitem__)
        taken = used.setdefault(label[0] if rule.per_result else None, set(kept))
        n = 0
        while n < len(names) and names[n] not in taken and may_split(label, names[: n + 1]):
            n += 1
        chosen[label] = names[:n]
        taken.update(chosen[label])
    return chosen
