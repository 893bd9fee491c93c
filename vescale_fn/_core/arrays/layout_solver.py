"""From a rule and how the arguments lie to how they must lie and the results do: which axes split which label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..sharding.index_map import all_hold_some
from ..sharding.spec import P, axes_named, from_split_axes, split_axes
from .merged_operands import apart, has_merged
from .rules.rule import Rule, without_blocks


def _stays_partial(
    axis: str, rule: Rule, args: Sequence[tuple[P, tuple[int, ...]]], outs: Sequence[Any], pinned: Sequence[int]
) -> bool:
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


def solved(
    rule: Rule, args: list[tuple[P, tuple[int, ...]]], outs: Sequence[Any], axes: dict[str, int], pinned: Sequence[int]
) -> tuple[list[P], list[P], list[tuple[str, ...]]]:
    """How arguments must lie and results do, and the axes over which each result is folded."""
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
    return targets, out_specs, folds


def _solve(
    rule: Rule,
    args: Sequence[tuple[P, tuple[int, ...]]],
    outs: Sequence[Any],
    axes: dict[str, int],
    pinned: Sequence[int],
) -> tuple[list[P], list[P], list[tuple[str, ...]]]:
    """Which axes split which label: the larger tensor stays where it is, the smaller one moves."""
    kept = {axis for axis in axes if _stays_partial(axis, rule, args, outs, pinned)}
    votes: dict[Any, dict[tuple[str, ...], float]] = {}
    sizes: dict[Any, set[int]] = {}
    for i, (spec, shape) in enumerate(args):
        for names, label, size in zip(split_axes(spec, len(shape)), rule.ins[i], shape, strict=True):
            sizes.setdefault(label, set()).add(size)
            if label is not None and (names or i in pinned) and i not in rule.shape_only:
                votes.setdefault(label, {}).setdefault(names, 0)
                votes[label][names] += math.inf if i in pinned else 1 + math.prod(shape)
    for row, shape in zip(rule.outs, outs, strict=True):
        for label, size in zip(row, shape or (), strict=True):
            sizes.setdefault(label, set()).add(size)
    for label, names in rule.wish:
        votes.setdefault(label, {}).setdefault(names, 0)
    for label in rule.sums if pinned else ():  # what is written is no partial sum
        votes.pop(label, None)
    filled = rule.filled | (rule.sums if rule.fold in ("max", "min") else frozenset())  # of nothing there is no extreme
    chosen: dict[Any, tuple[str, ...]] = {}
    used: dict[Any, set[str]] = {}  # an axis splits one label of a call
    for label in sorted(votes, key=lambda label: (label in rule.yields, -max(votes[label].values()))):
        names = max(votes[label], key=votes[label].__getitem__)
        taken = used.setdefault(label[0] if rule.apart else None, set(kept))
        n = 0
        while (
            n < len(names)
            and names[n] not in taken
            and (
                (label not in rule.even and len(sizes[label]) == 1)
                or all(s % math.prod(axes[a] for a in names[: n + 1]) == 0 for s in sizes[label])
            )
            and (label not in filled or all(all_hold_some(s, names[: n + 1], axes) for s in sizes[label]))
        ):
            n += 1
        chosen[label] = names[:n]
        taken.update(chosen[label])

    def rows(labels: Sequence[Any]) -> list[tuple[str, ...]]:
        return [chosen.get(label, ()) if label is not None else () for label in labels]

    def missing(labels: Sequence[Any], result: int = 0) -> set[str]:
        sums = {label for label in rule.sums if not rule.apart or label[0] == result}
        return {axis for label in sums if label not in labels for axis in chosen.get(label, ())}

    targets = []
    for i, (spec, _) in enumerate(args):
        unreduced = (kept if i in rule.linear else set()) | (missing(rule.outs[0]) if i in rule.joins else set())
        targets.append(spec if i in rule.shape_only else from_split_axes(rows(rule.ins[i]), unreduced))
    if rule.shape_only and not rule.linear:  # a new tensor that lies as one whose shape it has
        for i in rule.shape_only:
            for names, label in zip(split_axes(args[i][0], len(args[i][1])), rule.ins[i], strict=True):
                if label is not None:
                    chosen[label] = names
    add = rule.fold == "sum"
    gone = [missing(row, result) for result, row in enumerate(rule.outs)]
    out_specs = [from_split_axes(rows(row), kept | m if add else kept) for row, m in zip(rule.outs, gone, strict=True)]
    folds = [() if add else tuple(a for a in axes if a in m) for m in gone]
    return targets, out_specs, folds
