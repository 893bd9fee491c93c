"""Rewrite a rule so that a dim formed by merging sharded dims is seen as its parts, and the results merged again.

A dim with one label may lie in any way, as long as all that have the label lie alike. So where one of them is merged of
several, all are seen as several, with a label each; and what was decided for these is put together again.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..sharding.merged_dim import Merged, common, merge, parts_of, taken_apart
from ..sharding.spec import P, from_split_axes, split_axes
from .rules.rule import Parts, Rule

Lying = list[tuple[P, tuple[int, ...]]]
Cuts = dict[Any, tuple[int, ...]]  # label -> the sizes of its parts
Dims = list[list[tuple[int, Any]]]  # of each dim its parts, sizes and labels


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
    ins = [_dims(labels, shape, cuts) for labels, (_, shape) in zip(rule.ins, args, strict=True)]
    results = [_dims(labels, shape or (), cuts) for labels, shape in zip(rule.outs, outs, strict=True)]

    def together(spec: P, labels: tuple[Any, ...], shape: tuple[int, ...]) -> P:
        found = _dims(labels, shape, cuts)
        rows = iter(split_axes(spec, sum(map(len, found))))
        taken = [[(size, next(rows)) for size, _ in parts] for parts in found]
        merged = [merge(parts, axes) if len(parts) > 1 else parts[0][1] for parts in taken]
        return from_split_axes(merged, spec.unreduced, spec.reduced)

    lying = [(_spec_apart(spec, shape, dims, axes), _sizes(dims)) for (spec, shape), dims in zip(args, ins)]
    within = {label: [_part(label, k) for k in range(len(sizes))] for label, sizes in cuts.items() if len(sizes) > 1}
    spread = lambda labels: frozenset(part for label in labels for part in within.get(label, (label,)))
    marked = {"sums": spread(rule.sums), "even": spread(rule.even), "filled": spread(rule.filled)}
    fine = replace(rule, ins=tuple(map(_labels, ins)), outs=tuple(map(_labels, results)), **marked)
    return fine, lying, [None if shape is None else _sizes(dims) for dims, shape in zip(results, outs)], together


def _dims(labels: Sequence[Any], shape: Sequence[int], cuts: Cuts) -> Dims:
    """The parts, size and label, of each dim."""
    return [_inside(label, size, cuts) for label, size in zip(labels, shape, strict=True)]


def _inside(label: Any, size: int, cuts: Cuts) -> list[tuple[int, Any]]:
    if type(label) is Parts:
        return [part for n, inner in label for part in _inside(inner, n, cuts)]
    sizes = cuts.get(label, (size,)) if label is not None else (size,)
    return [(size, label)] if len(sizes) < 2 else [(n, _part(label, k)) for k, n in enumerate(sizes)]


def _sizes(dims: Dims) -> tuple[int, ...]:
    return tuple(size for parts in dims for size, _ in parts)


def _labels(dims: Dims) -> tuple[Any, ...]:
    return tuple(label for parts in dims for _, label in parts)


def _spec_apart(spec: P, shape: Sequence[int], dims: Dims, axes: Mapping[str, int]) -> P:
    """The layout of a tensor whose dims are seen as these parts."""
    found = zip(split_axes(spec, len(shape)), shape, dims, strict=True)
    rows = [names for row, size, parts in found for names in taken_apart(row, size, [n for n, _ in parts], axes)[0]]
    return from_split_axes(rows, spec.unreduced, spec.reduced)


def _part(label: Any, k: int) -> Any:
    return (label[0] if isinstance(label, tuple) and label else "part", label, k)


def _cuts(rule: Rule, args: Lying, outs: Sequence[Any]) -> Cuts:
    """The sizes that the dims of each label are to be taken apart into, where some tensor is merged there."""
    found: dict[Any, list[tuple[int, ...]]] = {}
    ones: set[Any] = set()  # the labels to begin with a part of size 1, which is split itself
    sizes: dict[Any, set[int]] = {}
    for labels, (spec, shape) in zip(rule.ins, args, strict=True):
        for label, row, size in zip(labels, split_axes(spec, len(shape)), shape, strict=True):
            ends = list(itertools.accumulate((n for n, _ in parts_of(row, size)), operator.mul))
            start, alone = 1, ends[0] == 1 < size
            for n, inner in _labelled(label, size):
                sizes.setdefault(inner, set()).add(n)
                mine = [end // start for end in ends if start < end < start * n and end % start == 0]
                alone = alone and n > 1 and start == 1
                if inner is not None and (mine or alone):
                    cut = tuple(b // a for a, b in itertools.pairwise([1, *mine, n]) if b % a == 0)
                    found.setdefault(inner, []).append(cut)
                    ones.update([inner] * alone)
                start *= n
    for labels, shape in zip(rule.outs, outs, strict=True):
        for n, inner in itertools.chain(*map(_labelled, labels, shape or ())):
            sizes.setdefault(inner, set()).add(n)
    return {
        label: (1, *cut) if label in ones else cut
        for label, rows in found.items()
        if (cut := common(*rows)) is not None and sizes[label] == {math.prod(cut)}
    }


def _labelled(label: Any, size: int) -> Sequence[tuple[int, Any]]:
    """The sizes and labels of a dim: several, where it is seen as several."""
    return label if type(label) is Parts else ((size, label),)
