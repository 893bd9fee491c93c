"""How the ranks' values relate to one whole value: blocks of it, partial sums, means of blocks, or none of these.

Each rank compares what it holds with the whole value, which it also has, and keeps a few numbers (`Facts`): so ranks
exchange numbers and no tensors. `conclude` reads the facts of all ranks. A sum over ranks is recognised by its products
with fixed random vectors, as those add up just as the values do.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .layout import type_text
from .mesh import groups
from .spec import P, from_split_axes, local_indices, split_axes

# By how much two float values may differ: relative to the largest element, as other orders of sums make errors.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2,
             torch.complex128: 1e-9, torch.complex64: 2e-5}  # fmt: skip
_LAYOUTS = 64  # at most so many ways to cut a value are tried
_NEAR = 1e-3  # what a factor may be off and still be called by its name


class Fit(NamedTuple):
    """One rank's value against its block of the whole one, under one spec."""

    equal: bool
    difference: float  # the largest, absolute
    scale: float  # the largest absolute element of the whole value
    ratio: float | None  # of the two, where it is the same for all elements
    square: float  # the sum of the squares of the block of the whole value
    sums: tuple[float, ...]  # the block of the whole value, times fixed vectors
    nans: bool  # whether NaN or infinity stands in other places
    want: str  # the block of the whole value, in short, from the first element that differs
    got: str  # what the rank holds instead


class Facts(NamedTuple):
    """What one rank knows of its value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fits: tuple[Fit, ...]
    sums: tuple[float, ...]
    size: float  # of which an error as large as the tolerance changes a sum by about that part
    square: float
    moments: tuple[float, ...]
    head: str


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


# --- one rank ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _directions(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randn((4, n), generator=generator, device="cpu", dtype=torch.float64)


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """The elements as one vector of float64 on the CPU."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.detach().to("cpu", torch.float64).reshape(-1)


def _sums(v: torch.Tensor) -> tuple[float, ...]:
    return tuple((_directions(v.numel()) @ v).tolist())


def cut(whole: torch.Tensor, axes: Mapping[str, int], spec: P, coord: Mapping[str, int]) -> torch.Tensor:
    """The block of a whole value that the rank at `coord` holds."""
    for dim, index in enumerate(local_indices(tuple(whole.shape), axes, spec, coord)):
        if len(index) != whole.shape[dim]:
            whole = whole.index_select(dim, torch.tensor(list(index), dtype=torch.int64, device=whole.device))
    return whole


def facts(whole: torch.Tensor, mine: torch.Tensor, specs: Sequence[P], axes: Mapping[str, int],
          coord: Mapping[str, int], tolerance: float, atol: float = 0.0) -> Facts:  # fmt: skip
    """What the rank at `coord` finds out about its value, under each of these specs."""
    v = _numbers(mine)
    everything = _numbers(whole)
    scale = float(everything[everything.isfinite()].abs().max()) if everything.isfinite().any() else 0.0
    exact = not (whole.is_floating_point() or whole.is_complex())
    bound = 0.0 if exact else tolerance * scale + atol
    fits = []
    for spec in specs:
        block = cut(whole, axes, spec, coord)
        fits.append(_fit(block, mine, bound, scale) if block.shape == mine.shape else _NO_FIT)
    if not specs and v.numel() == everything.numel():  # the same elements under another shape, where dims are of ranks
        fits.append(_fit(whole, mine, bound, scale))
    finite = v.nan_to_num(0.0, 0.0, 0.0)
    moments = tuple(float((finite**k).sum()) for k in (1, 2, 3))
    size = float(finite.abs().max()) * math.sqrt(v.numel()) if v.numel() else 0.0
    return Facts(tuple(mine.shape), mine.dtype, tuple(fits), _sums(v), size, float((finite * finite).sum()), moments,
                 head(mine))  # fmt: skip


_NO_FIT = Fit(False, math.inf, 0.0, None, 0.0, (), False, "", "")


def _fit(block: torch.Tensor, mine: torch.Tensor, bound: float, scale: float) -> Fit:
    wanted, v = _numbers(block), _numbers(mine)
    odd = ~(wanted.isfinite() & v.isfinite())
    other = odd & (wanted != v) & ~(wanted.isnan() & v.isnan())
    a, b = torch.where(odd, 0.0, wanted), torch.where(odd, 0.0, v)
    apart = (a - b).abs()
    difference = float(apart.max()) if a.numel() else 0.0
    differing = (other | (apart > bound)).nonzero()
    first = int(differing[0]) // (1 + block.is_complex()) if differing.numel() else 0
    square, ratio = float(a @ a), None
    if square > 0:
        r = float(a @ b) / square
        largest = max(float(b.abs().max()), abs(r) * float(a.abs().max()))
        if largest == 0 or float((b - r * a).abs().max()) <= max(_NEAR * largest, bound):
            ratio = r
    elif not bool(b.any()):
        ratio = math.nan  # both are zero: any factor will do
    return Fit(not differing.numel(), difference, scale, ratio, square, _sums(wanted), bool(other.any()),
               head(block, first), head(mine, first))  # fmt: skip


def wobble(x: torch.Tensor, others: Sequence[Any]) -> float:
    """By how much these values, made from arguments that differ by their rounding, differ from `x`; ten times that may
    be expected of sums in another order."""
    if not (x.is_floating_point() or x.is_complex()):
        return 0.0
    v = _numbers(x)
    apart = [(_numbers(y) - v).abs().nan_to_num(0.0, 0.0, 0.0) for y in others
             if isinstance(y, torch.Tensor) and y.shape == x.shape]  # fmt: skip
    return 10 * max((float(a.max()) for a in apart if a.numel()), default=0.0)


def head(x: torch.Tensor, first: int = 0, count: int = 4) -> str:
    """A value in short: its type and some elements, from the one of this number on."""
    flat = x.detach().reshape(-1)[first : first + count].cpu()
    items = [f"{item:.5g}" if isinstance(item, float) else str(item) for item in flat.tolist()]
    listed = ", ".join(["..."] * (first > 0) + items + ["..."] * (first + count < x.numel()))
    return f"{type_text(tuple(x.shape), x.dtype, P())} {items[0] if x.ndim == 0 else f'[{listed}]'}"


# --- all ranks --------------------------------------------------------------------------------------------------------


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The non-empty subsets, small ones first."""
    return [chosen for count in range(1, len(names) + 1) for chosen in itertools.combinations(names, count)]


def conclude(rows: Sequence[Facts], specs: Sequence[P], mesh: Any, axes: Mapping[str, int],
             tolerance: float, unreduced: frozenset[str] | None = None) -> Relation | None:  # fmt: skip
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


def _combined(rows: Sequence[Facts], i: int, grouped: Any, tolerance: float) -> str | None:
    """Whether in each group of ranks the values add up to the block that all of them should hold, or have it as mean."""
    found = {"sum", "mean"}
    for members in grouped:
        want = rows[members[0]].fits[i].sums
        if any(len(rows[m].sums) != len(want) for m in members):
            return None
        total = [sum(rows[m].sums[k] for m in members) for k in range(len(want))]
        room = 4 * tolerance * math.sqrt(sum(rows[m].size ** 2 for m in members))
        for how, factor in (("sum", 1), ("mean", len(members))):
            if not all(abs(t - factor * w) <= room for t, w in zip(total, want, strict=True)):
                found.discard(how)
    return "sum" if "sum" in found else "mean" if found else None


def factor(rows: Sequence[Facts], i: int = 0) -> float | None:
    """What the one-device value must be multiplied by to give the mesh's, where one number does that on all ranks."""
    ratios = [row.fits[i].ratio for row in rows]
    known = [r for r in ratios if r is not None and not math.isnan(r)]
    if None in ratios or not known or max(known) - min(known) > _NEAR * max(map(abs, known)):
        return None
    return sum(known) / len(known)


_FORMS = (("{}", 1.0), ("1/{}", -1.0), ("sqrt({})", 0.5), ("1/sqrt({})", -0.5))


def named(value: float, axes: Mapping[str, int], near: float = _NEAR) -> str | None:
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
    return next((p for _, p in _FORMS if any(abs(value - n**p) <= _NEAR * abs(value) for n in sizes)), None)


def same_numbers(whole: torch.Tensor, rows: Sequence[Facts], copies: int, tolerance: float) -> bool:
    """Whether the mesh holds the numbers of the whole value in another order (`copies` of each)."""
    v = _numbers(whole)
    v = v.nan_to_num(0.0, 0.0, 0.0)
    for k in (1, 2, 3):
        want, got = float((v**k).sum()) * copies, sum(row.moments[k - 1] for row in rows)
        if abs(want - got) > 10 * tolerance * copies * float((v.abs() ** k).sum()):
            return False
    return True


def shown(whole: torch.Tensor, rows: Sequence[Facts], i: int = 0) -> list[str]:
    """The values of both runs in short: of the first rank that is wrong, and of those that should hold the same."""
    pairs = [(row.fits[i].want, row.fits[i].got) if i < len(row.fits) and row.fits[i].want else ("", row.head)
             for row in rows]  # fmt: skip
    wrong = [rank for rank, row in enumerate(rows) if not (i < len(row.fits) and row.fits[i].equal)] or [0]
    want = pairs[wrong[0]][0]
    ranks = [rank for rank in wrong if pairs[rank][0] == want]
    together: dict[str, list[int]] = {}
    for rank in ranks:
        together.setdefault(pairs[rank][1], []).append(rank)
    block = f", the block of {listed(ranks)}" if want and len(ranks) < len(rows) else ""
    lines = [f"mesh{'' if len(together) == 1 else f', {listed(members)}'}: {got}"
             for got, members in together.items()]  # fmt: skip
    return [f"one device{block}: {want or head(whole)}", *lines[:3], *["..."] * (len(lines) > 3)]


def listed(ranks: Sequence[int]) -> str:
    """Ranks in a sentence."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:4]))}{', ...' * (len(ranks) > 4)}"
