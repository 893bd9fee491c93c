"""How the ranks' values relate to one whole value: blocks of it, partial sums, means of blocks, or none of these.

`conclude` reads the facts of all ranks. A sum over ranks is recognised by its products with fixed random vectors, as those
add up just as the values do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..._core.distributed.communicator import groups
from ..._core.sharding.layout import type_text
from ..._core.sharding.spec import P, from_split_axes, split_axes
from .statistics import NEAR, Statistics, head, moments, numbers, sizes

_LAYOUTS = 64  # at most so many ways to cut a value are tried


class Relation(NamedTuple):
    """How all ranks' values make up the whole one: blocks by `spec`; over `axes`, "sum" or "mean" of the ranks'."""

    spec: P
    how: str = "equal"
    axes: tuple[str, ...] = ()

    def text(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """In words, for a whole value of `shape`."""
        names = " and ".join(map(repr, self.axes))
        type_ = type_text(shape, dtype, self.spec)
        if self.how == "equal":
            split = any(split_axes(self.spec, len(shape)))
            return f"{type_}, {'each rank its block' if split else 'the same on all ranks'}"
        return (
            f"{type_}, on each rank of {names} {'a part of the sum' if self.how == 'sum' else 'the mean of its block'}"
        )


def layouts(whole: Sequence[int], local: Sequence[int], axes: Mapping[str, int]) -> list[P]:
    """The specs under which a value of shape `whole` has blocks of shape `local`."""
    if len(whole) != len(local) or any(w != n and (n == 0 or w % n) for w, n in zip(whole, local, strict=True)):
        return []
    factors = [w // n if w != n else 1 for w, n in zip(whole, local, strict=True)]
    real = [name for name, size in axes.items() if size > 1]

    def rows(dim: int, free: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
        if dim == len(factors):
            yield ()
            return
        for count in range(len(free) + 1):
            for row in itertools.permutations(free, count):
                if math.prod(axes[name] for name in row) == factors[dim]:
                    for rest in rows(dim + 1, tuple(name for name in free if name not in row)):
                        yield (row, *rest)

    return [from_split_axes(list(found)) for found in itertools.islice(rows(0, tuple(real)), _LAYOUTS)]


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The non-empty subsets, small ones first."""
    return [chosen for count in range(1, len(names) + 1) for chosen in itertools.combinations(names, count)]


def conclude(
    rows: Sequence[Statistics],
    specs: Sequence[P],
    mesh: Any,
    axes: Mapping[str, int],
    tolerance: float,
    unreduced: frozenset[str] | None = None,
) -> Relation | None:
    """How the values of all ranks make up the whole one; None where they do not.

    `unreduced` are the axes over which the values are known to be partial sums, where that is known.
    """
    for i, spec in enumerate(specs or [P()] * len(rows[0].fits)):
        if all(row.fits[i].equal for row in rows):
            return Relation(spec)
    for i, spec in enumerate(specs):
        split = {name for names in split_axes(spec, len(spec)) for name in names}
        for chosen in subsets([name for name, size in axes.items() if size > 1 and name not in split]):
            if unreduced is not None and not unreduced.issuperset(chosen):
                continue
            how = _combined(rows, i, groups(mesh, chosen), tolerance)
            if how is not None:
                return Relation(spec, how, chosen)
    return None


def _combined(rows: Sequence[Statistics], i: int, grouped: Any, tolerance: float) -> str | None:
    """Whether in each group of ranks the values add up to the block that all of them should hold, or have it as mean."""
    found = {"sum", "mean"}
    if all(rows[m].sums == rows[members[0]].sums for members in grouped for m in members):
        found = {"sum"}  # a mean of equal values would be the value
    for members in grouped:
        want = rows[members[0]].fits[i].sums
        if any(len(rows[m].sums) != len(want) for m in members):
            return None
        total = [sum(rows[m].sums[k] for m in members) for k in range(len(want))]
        room = 4 * tolerance * math.sqrt(sum(rows[m].spread ** 2 for m in members))
        for how, factor in (("sum", 1), ("mean", len(members))):
            if not all(abs(t - factor * w) <= room for t, w in zip(total, want, strict=True)):
                found.discard(how)
    return "sum" if "sum" in found else "mean" if found else None


def factor(rows: Sequence[Statistics], i: int = 0) -> float | None:
    """What the one-device value must be multiplied by to give the mesh's, where one number does that on all ranks."""
    ratios = [row.fits[i].ratio for row in rows]
    known = [r for r in ratios if r is not None and not math.isnan(r)]
    if None in ratios or not known or max(known) - min(known) > NEAR * max(map(abs, known)):
        return None
    return sum(known) / len(known)


_FORMS = (("{}", 1.0), ("1/{}", -1.0), ("sqrt({})", 0.5), ("1/sqrt({})", -0.5))


def named(value: float, axes: Mapping[str, int], near: float = NEAR) -> str | None:
    """A factor in terms of the sizes of axes: ``4 times the one-device value (4 = size of axis 'tp')``; None where it is
    none of these."""
    for forms in (_FORMS[:2], _FORMS[2:]):
        shown, found = "", []
        for form, power in forms:
            for chosen in subsets([name for name, size in axes.items() if size > 1]):
                n = math.prod(axes[name] for name in chosen)
                if abs(value - n**power) <= near * abs(value):
                    text = form.format(n)
                    shown = f"{text} = {value:.4g}" if "sqrt" in text and value > 1 else text
                    names = " x ".join(map(repr, chosen))
                    found.append(f"size of axis {names}" if len(chosen) == 1 else f"size of {names}")
                    size = n
        if found:
            return f"{shown} times the one-device value ({size} = {' or '.join(found[:3])})"
    return None


def power(value: float, axes: Mapping[str, int]) -> float | None:
    """Which power of the size of an axis, or of a product of axes, a factor is: 1, -1, 1/2 or -1/2."""
    sizes = [math.prod(axes[name] for name in chosen) for chosen in subsets([a for a, n in axes.items() if n > 1])]
    return next((p for _, p in _FORMS if any(abs(value - n**p) <= NEAR * abs(value) for n in sizes)), None)


def same_numbers(whole: torch.Tensor, rows: Sequence[Statistics], copies: int, tolerance: float) -> bool:
    """Whether the mesh holds the numbers of the whole value in another order (`copies` of each)."""
    if all(row.fits and row.fits[0].relative < 0.05 for row in rows):
        return False  # they are nearly the same as they stand
    v = numbers(whole)
    for i, (want, most) in enumerate(zip(moments(v, sizes(whole)), moments(v.abs(), sizes(whole)))):
        got = sum(row.moments[i] for row in rows)
        if abs(copies * want - got) > 10 * tolerance * copies * most:
            return False
    return True


def shown(whole: torch.Tensor, rows: Sequence[Statistics], i: int = 0) -> list[str]:
    """The values of both runs in short: of the first rank that is wrong, and of those that should hold the same."""
    pairs = [
        (row.fits[i].want, row.fits[i].got) if i < len(row.fits) and row.fits[i].want else ("", row.head)
        for row in rows
    ]
    wrong = [rank for rank, row in enumerate(rows) if not (i < len(row.fits) and row.fits[i].equal)] or [0]
    want = pairs[wrong[0]][0]
    ranks = [rank for rank in wrong if pairs[rank][0] == want]
    together: dict[str, list[int]] = {}
    for rank in ranks:
        together.setdefault(pairs[rank][1], []).append(rank)
    block = f", the block of {listed(ranks)}" if want and len(ranks) < len(rows) else ""
    lines = [f"mesh{'' if len(together) == 1 else f', {listed(members)}'}: {got}" for got, members in together.items()]
    return [f"one device{block}: {want or head(whole)}", *lines[:3], *["..."] * (len(lines) > 3)]


def listed(ranks: Sequence[int]) -> str:
    """Ranks in a sentence."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:4]))}{', ...' * (len(ranks) > 4)}"
