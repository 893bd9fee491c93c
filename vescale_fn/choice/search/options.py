"""The options of a call: which mesh axis shards which label, and along which axes there are partial sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..._core.arrays.rules.rule import Rule
from ..._core.sharding.merged_dim import Merged, merge
from .atoms import Atoms
from .composed import APART
from .described import Described, parts, rows

# A layout of a value has an entry for each axis of the mesh: the number of the atom that the axis shards, NONE where the value
# is replicated along the axis, or PARTIAL for partial sums along it.
Layout = tuple[int, ...]
NONE, PARTIAL = -1, -2


@dataclass(frozen=True)
class Option:
    """One way to carry out a call.

    Attributes:
        ins: the layout of each operand; None where any will do.
        outs: the layout of each result.
        seconds: the time of the call.
        split: the axes over which the work is split.
        folds: the results that are reduced over ranks at once, by number, each with the axes.
        again: whether its result is recomputed instead of kept.
        apart: the axes that shard a dim that the call sums over, so that it is carried out as its steps.
    """

    ins: tuple[Layout | None, ...]
    outs: tuple[Layout, ...]
    seconds: float = 0.0
    split: tuple[str, ...] = ()
    folds: tuple[tuple[int, tuple[str, ...]], ...] = ()
    again: bool = False
    apart: tuple[str, ...] = ()


class Dims:
    """The dims of an operand or a result as atoms, without those of size 1.

    Attributes:
        sizes: the sizes of all atoms, in order.
        dims: for each dim, the numbers of its atoms.
        labels: the label of each atom; None where it must not be sharded.
    """

    def __init__(self, atoms: list[tuple[int, ...]], labels: list[list[Any]]) -> None:
        self.sizes: tuple[int, ...] = ()
        self.dims: list[tuple[int, ...]] = []
        self.labels: list[Any] = []
        for sizes, names in zip(atoms, labels, strict=True):
            kept = [(n, name) for n, name in zip(sizes, names, strict=True) if n > 1]
            start = len(self.sizes)
            self.sizes += tuple(n for n, _ in kept)
            self.labels += [name for _, name in kept]
            self.dims.append(tuple(range(start, len(self.sizes))))


def dims_of(n: int, site: Described, atoms: Atoms) -> tuple[list[Dims], list[Dims | None]]:
    """The dims of the operands and results of a class."""
    sizes: dict[Any, set[int]] = {}
    for _, _, row, shape in rows(site):
        for label, size in zip(row, shape, strict=True):
            for _, m, inner in parts(label, size):
                sizes.setdefault(inner, set()).add(m)
    where = {(side, i): row for side, i, row, _ in rows(site)}
    blocks = site.rule.blocks if site.rule is not None else ()

    def named(slot: Any, shape: tuple[int, ...]) -> Dims:
        found = atoms.of((n, *slot), len(shape))
        row = where.get(slot, (None,) * len(shape))
        names = [_labels(label, size, mine, sizes, blocks) for label, size, mine in zip(row, shape, found)]
        return Dims(found, names)

    ins = [named(("in", i), shape) for i, shape in enumerate(site.shapes)]
    outs = [None if o is None else named(("out", i), tuple(o.shape)) for i, o in enumerate(site.outs)]
    return ins, outs


def _labels(label: Any, size: int, atoms: tuple[int, ...], sizes: Mapping[Any, set[int]], blocks: Any) -> list[Any]:
    """The labels of the atoms of a dim."""
    found, at = list[Any](), 1
    pieces = iter(parts(label, size))
    start, n, inner = next(pieces)
    k = 0
    for atom in atoms:
        while at >= start * n and (following := next(pieces, None)) is not None:
            (start, n, inner), k = following, 0
        inside = at >= start and at * atom <= start * n
        # where a label has dims of several sizes, or the call takes a range of it, only the outermost part may be sharded
        alone = len(sizes.get(inner, ())) > 1 or inner in blocks
        found.append((inner, k) if inner is not None and inside and not (alone and k) else None)
        at, k = at * atom, k + 1
    return found


def options(
    n: int, site: Described, atoms: Atoms, axes: Mapping[str, int], partial: bool = True
) -> tuple[list[Option], list[Dims], list[Dims | None]]:
    """The options of a class of calls, without their times; and the dims of its operands and results.

    Args:
        partial: whether linear calls may take partial sums.
    """
    ins, outs = dims_of(n, site, atoms)
    if site.is_input or site.is_made:
        (out,) = outs
        every, given = layouts(out.sizes if out is not None else (), axes), (None,) * len(ins)
        return [Option(given, (x,)) for x in every if out is None or is_plain(out, x, axes)], ins, outs
    whole = (NONE,) * len(axes)
    if site.rule is None:
        return [Option((whole,) * len(ins), (whole,) * len(outs))], ins, outs
    rule, found, sizes = site.rule, dict[Any, Option](), _choosable(site, ins, outs)
    linear = bool(rule.linear and partial or any(map(_is_labelled, (ins[i] for i in rule.shape_only))))
    choices = [None, *sizes, *(["partial"] if linear else [])]
    for chosen in itertools.product(*(choices if n > 1 else [None] for n in axes.values())):
        if all(_divides(label, sizes.get(label, ()), chosen, axes) for label in chosen) and not _is_mixed(chosen):
            option = _option(site, ins, outs, chosen, tuple(axes))
            found.setdefault((option.ins, option.outs, option.folds), option)
    return list(found.values()), ins, outs


def _choosable(site: Described, ins: list[Dims], outs: list[Dims | None]) -> dict[Any, list[int]]:
    """The labels that an axis may shard, each with the sizes of its atoms. Such a label has an atom in every tensor for which
    the rule has the label (cuts that do not nest may have left it out), and no more than one atom in each."""
    every, found = [("in", i, one) for i, one in enumerate(ins)], dict[Any, list[int]]()
    every += [("out", i, one) for i, one in enumerate(outs) if one is not None]
    for _, _, one in every:
        for label, size in zip(one.labels, one.sizes):
            if label is not None:
                found.setdefault(label, []).append(size)
    of: dict[Any, set[Any]] = {}
    for side, i, row, shape in rows(site):
        for label, size in zip(row, shape, strict=True):
            for _, _, inner in parts(label, size):
                of.setdefault((side, i), set()).add(inner)
    for side, i, one in every:
        named = of.get((side, i), set[Any]())
        for label in [x for x in found if one.labels.count(x) > 1 or (x[0] in named and x not in one.labels)]:
            del found[label]
    return found


def layouts(sizes: Sequence[int], axes: Mapping[str, int]) -> list[Layout]:
    """All layouts of a value with these atoms, without partial sums; an axis of one rank shards nothing."""
    fits = lambda found, k: sizes[k] % math.prod(n for n, x in zip(axes.values(), found) if x == k) == 0
    every = itertools.product(*([NONE, *range(len(sizes))] if n > 1 else [NONE] for n in axes.values()))
    return [found for found in every if all(fits(found, k) for k in found if k >= 0)]


def is_plain(dims: Dims, layout: Layout, axes: Mapping[str, int]) -> bool:
    """Whether no dim is sharded by its parts (`Merged`), as in the layouts that people write."""
    of = lambda k: tuple(a for a, x in zip(axes, layout) if x == k)
    return not any(isinstance(merge([(dims.sizes[k], of(k)) for k in dim], axes), Merged) for dim in dims.dims if dim)


def _is_mixed(chosen: tuple[Any, ...]) -> bool:
    """Whether a call carried out as its steps would take partial sums."""
    return "partial" in chosen and any(_is_apart(x) for x in chosen)


def _is_apart(label: Any) -> bool:
    return label is not None and label[0] == APART


def _divides(label: Any, sizes: Sequence[int], chosen: tuple[Any, ...], axes: Mapping[str, int]) -> bool:
    ways = math.prod(n for n, x in zip(axes.values(), chosen) if x == label)
    return label is None or label == "partial" or all(size % ways == 0 for size in sizes)


def _option(
    site: Described, ins: list[Dims], outs: list[Dims | None], chosen: tuple[Any, ...], axes: tuple[str, ...]
) -> Option:
    """The option in which each axis has what was chosen for it: a label to shard, nothing, or partial sums."""
    rule, first = site.rule, outs[0]
    assert rule is not None
    summed = {x for x in chosen if x is not None and x != "partial" and x[0] in rule.sums}
    whole = (NONE,) * len(axes)
    gone = [summed.difference(one.labels) if one is not None else set[Any]() for one in outs]
    adds, kept = rule.fold == "sum" and not any(map(_is_apart, summed)), {"partial"} if rule.linear else set[str]()
    made = [
        whole if one is None else _lying(one, chosen, {*kept, *(missing if adds else ())})
        for one, missing in zip(outs, gone)
    ]
    joined = gone[0] if first is not None else set[Any]()
    given = tuple(_given(rule, i, one, chosen, joined) for i, one in enumerate(ins))
    folds = [(i, tuple(a for a, x in zip(axes, chosen) if x in missing)) for i, missing in enumerate(gone) if missing]
    split = tuple(a for a, x in zip(axes, chosen) if x is not None and x != "partial")
    apart = tuple(a for a, x in zip(axes, chosen) if _is_apart(x))
    return Option(given, tuple(made), split=split, folds=() if adds else tuple(folds), apart=apart)


def _given(rule: Rule, i: int, one: Dims, chosen: tuple[Any, ...], joined: set[Any]) -> Layout | None:
    """The layout of an operand; None where any will do. Of some operands only the shape is read: the result has their layout,
    except for partial sums."""
    if i in rule.shape_only and not _is_labelled(one):
        return None
    partial = {"partial"} if i in rule.linear or i in rule.shape_only else set[Any]()
    return _lying(one, chosen, partial | joined if i in rule.joins else partial)


def _is_labelled(one: Dims) -> bool:
    return any(label is not None for label in one.labels)


def _lying(one: Dims, chosen: tuple[Any, ...], partial: Any) -> Layout:
    """The layout of a tensor in which each axis shards the atom with the label that was chosen for it."""
    found = {label: k for k, label in enumerate(one.labels) if label is not None}
    return tuple(found.get(x, PARTIAL if x is not None and x in partial else NONE) for x in chosen)
