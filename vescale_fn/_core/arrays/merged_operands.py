"""Rewrite a rule so that a dim formed by merging sharded dims is seen as its parts, and the results merged again.

A dim with one label may lie in any way, as long as all that have the label lie alike. So where one of them is merged of
several, all are seen as several, with a label each; and what was decided for these is put together again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..sharding.merged_dim import Merged, common, merge, parts_of, taken_apart
from ..sharding.spec import P, from_split_axes, split_axes
from .rules.rule import Parts, Rule

Lying = list[tuple[P, tuple[int, ...]]]


def has_merged(rule: Rule, args: Lying) -> bool:
    """Whether a call has merged dims, or makes some."""
    return any(type(label) is Parts for row in (*rule.ins, *rule.outs) for label in row) or any(
        isinstance(entry, Merged) for spec, _ in args for entry in spec
    )


def apart(
    rule: Rule, args: Lying, outs: Sequence[Any], axes: Mapping[str, int]
) -> tuple[Rule, Lying, list[Any], Callable[[P, tuple[Any, ...], tuple[int, ...]], P]]:
    """The call with its merged dims taken apart, and what puts a layout of a tensor with such labels together again."""
    cuts = _cuts(rule, args, outs)

    def inside(label: Any, size: int) -> list[tuple[int, Any]]:
        """The parts of a dim with this label."""
        if type(label) is Parts:
            return [part for n, inner in label for part in inside(inner, n)]
        sizes = cuts.get(label, (size,)) if label is not None else (size,)
        return [(size, label)] if len(sizes) < 2 else [(n, _part(label, k)) for k, n in enumerate(sizes)]

    def dims(labels: Sequence[Any], shape: Sequence[int]) -> list[list[tuple[int, Any]]]:
        return [inside(label, size) for label, size in zip(labels, shape, strict=True)]

    def together(spec: P, labels: tuple[Any, ...], shape: tuple[int, ...]) -> P:
        counts = [len(found) for found in dims(labels, shape)]
        rows = iter(split_axes(spec, sum(counts)))
        taken = [list(zip((n for n, _ in found), itertools.islice(rows, len(found)))) for found in dims(labels, shape)]
        merged = [merge(found, axes) if len(found) > 1 else found[0][1] for found in taken]
        return from_split_axes(merged, spec.unreduced, spec.reduced)

    ins = [dims(labels, shape) for labels, (_, shape) in zip(rule.ins, args, strict=True)]
    results = [dims(labels, shape or ()) for labels, shape in zip(rule.outs, outs, strict=True)]
    lying: Lying = []
    for (spec, shape), found in zip(args, ins, strict=True):
        rows = [
            names
            for row, size, parts in zip(split_axes(spec, len(shape)), shape, found, strict=True)
            for names in taken_apart(row, size, [n for n, _ in parts], axes)[0]
        ]
        lying.append(
            (from_split_axes(rows, spec.unreduced, spec.reduced), tuple(n for parts in found for n, _ in parts))
        )
    label_rows = [
        tuple(tuple(label for parts in found for _, label in parts) for found in side) for side in (ins, results)
    ]
    within = {label: [_part(label, k) for k in range(len(sizes))] for label, sizes in cuts.items() if len(sizes) > 1}
    spread = lambda labels: frozenset(part for label in labels for part in within.get(label, (label,)))
    marked = {"sums": spread(rule.sums), "even": spread(rule.even), "filled": spread(rule.filled)}
    fine = replace(rule, ins=label_rows[0], outs=label_rows[1], **marked)
    sizes = [
        tuple(n for parts in found for n, _ in parts) if shape is not None else None
        for found, shape in zip(results, outs, strict=True)
    ]
    return fine, lying, sizes, together


def _part(label: Any, k: int) -> Any:
    return (label[0] if isinstance(label, tuple) and label else "part", label, k)


def _cuts(rule: Rule, args: Lying, outs: Sequence[Any]) -> dict[Any, tuple[int, ...]]:
    """The sizes that the dims of each label are to be taken apart into, where some tensor is merged there."""
    found: dict[Any, list[tuple[int, ...]]] = {}
    ones: set[Any] = set()  # the labels to begin with a part of size 1, which is split itself
    sizes: dict[Any, set[int]] = {}
    for labels, (spec, shape) in zip(rule.ins, args, strict=True):
        for label, row, size in zip(labels, split_axes(spec, len(shape)), shape, strict=True):
            ends = list(itertools.accumulate((n for n, _ in parts_of(row, size)), lambda a, b: a * b))
            start, alone = 1, ends[0] == 1 < size
            for n, inner in label if type(label) is Parts else ((size, label),):
                mine = [end // start for end in ends if start < end < start * n and end % start == 0]
                if inner is not None and (mine or (alone and n > 1)):
                    found.setdefault(inner, []).append(
                        tuple(b // a for a, b in itertools.pairwise([1, *mine, n]) if b % a == 0)
                    )
                    ones |= {inner} if alone and n > 1 else set()
                start, alone = start * n, False
    for labels, shape in [*((row, s) for row, (_, s) in zip(rule.ins, args)), *zip(rule.outs, outs)]:
        for label, size in zip(labels, shape or (), strict=True):
            for n, inner in label if type(label) is Parts else ((size, label),):
                sizes.setdefault(inner, set()).add(n)
    cuts = {}
    for label, rows in found.items():
        nested = common(*rows)
        if nested is not None and all(math.prod(nested) == size for size in sizes[label]):
            cuts[label] = (1, *nested) if label in ones else nested
    return cuts
