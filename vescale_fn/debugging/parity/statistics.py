"""What one rank finds out about its value, against the whole one, which it also has: numbers, by which ranks compare.

Floats are compared to the size of their value, as sums in another order are off by a part of that. Where a few elements
are much larger than the others, these are compared to their own size, and the others to that of each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..._core.sharding.index_map import local_indices
from ..._core.sharding.layout import type_text
from ..._core.sharding.spec import P

NEAR = 1e-3  # what a factor may be off and still be called by its name
_OFTEN = 10.0  # times what a few runs show of rounding, as it may do more in another
_HUGE = 10.0  # times the median: elements that are compared to themselves


class Fit(NamedTuple):
    """One rank's value against its block of the whole one, under one spec."""

    equal: bool
    difference: float  # the largest, absolute
    relative: float  # the largest, of what its element is compared to
    ratio: float | None  # of the two, where it is the same for all elements
    square: float  # the sum of the squares of the block of the whole value
    sums: tuple[float, ...]  # the block of the whole value, times fixed vectors
    nans: bool  # whether NaN or infinity stands in other places
    want: str  # the block of the whole value, in short, from the first element that differs
    got: str  # what the rank holds instead


class Statistics(NamedTuple):
    """What one rank knows of its value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fits: tuple[Fit, ...]
    sums: tuple[float, ...]
    spread: float  # of which an error as large as the tolerance changes a sum by about that part
    square: float
    moments: tuple[float, ...]
    head: str


@functools.lru_cache(maxsize=64)
def _directions(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randn((4, n), generator=generator, device="cpu", dtype=torch.float64)


def _reals(x: torch.Tensor) -> torch.Tensor:
    """The elements in float64 on the CPU; complex ones as pairs, along one more dim."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.detach().to("cpu", torch.float64)


def numbers(x: torch.Tensor) -> torch.Tensor:
    """The same as one vector."""
    return _reals(x).reshape(-1)


def cut(whole: torch.Tensor, axes: Mapping[str, int], spec: P, coord: Mapping[str, int]) -> torch.Tensor:
    """The block of a whole value that the rank at `coord` holds."""
    for dim, index in enumerate(local_indices(tuple(whole.shape), axes, spec, coord)):
        if len(index) != whole.shape[dim]:
            whole = whole.index_select(dim, torch.tensor(list(index), dtype=torch.int64, device=whole.device))
    return whole


def sizes(whole: torch.Tensor) -> torch.Tensor:
    """For each number, what an error of it is compared to."""
    v = _reals(whole).nan_to_num(0.0, 0.0, 0.0).abs()
    nonzero = v[v > 0]
    usual = _HUGE * float(nonzero.median()) if nonzero.numel() else 0.0
    return v.clamp(min=min(usual, float(v.max()))) if v.numel() else v


def wobble(x: torch.Tensor, others: Sequence[Any]) -> torch.Tensor | float:
    """By how much these values, of runs that are off by their rounding, show each number of `x` to be uncertain."""
    if not is_inexact(x):
        return 0.0
    v, size = _reals(x), sizes(x)
    apart = [
        (_reals(y) - v).abs().nan_to_num(0.0, 0.0, 0.0)
        for y in others
        if isinstance(y, torch.Tensor) and y.shape == x.shape
    ]
    if not apart or not v.numel():
        return 0.0
    most = torch.stack(apart).amax(0)
    usual = size == size.min()
    part = torch.where(usual, 0.0, most / size).nan_to_num(0.0).max()  # of the large ones
    return _OFTEN * torch.where(usual, most[usual].max(), part * size)


def is_inexact(x: torch.Tensor) -> bool:
    """Whether rounding may change a value."""
    return x.is_floating_point() or x.is_complex()


def facts(
    whole: torch.Tensor,
    mine: torch.Tensor,
    specs: Sequence[P],
    axes: Mapping[str, int],
    coord: Mapping[str, int],
    tolerance: float,
    slack: torch.Tensor | float = 0.0,
) -> Statistics:
    """What the rank at `coord` finds out about its value, under each of these specs; `slack` is what it may be off besides."""
    v, size = numbers(mine), sizes(whole)
    bound = tolerance * size + slack if is_inexact(whole) else torch.zeros_like(size)
    fits = []
    for spec in specs:
        block = cut(whole, axes, spec, coord)
        here = [cut(x, axes, spec, coord).reshape(-1) for x in (bound, size)]
        fits.append(_fit(block, mine, *here) if block.shape == mine.shape else _NO_FIT)
    if not specs and v.numel() == bound.numel():  # the same elements under another shape, where dims are of ranks
        fits.append(_fit(whole, mine, bound.reshape(-1), size.reshape(-1)))
    finite = v.nan_to_num(0.0, 0.0, 0.0)
    spread = float(finite.abs().max()) * math.sqrt(v.numel()) if v.numel() else 0.0
    sums = tuple((_directions(v.numel()) @ v).tolist())
    return Statistics(
        tuple(mine.shape),
        mine.dtype,
        tuple(fits),
        sums,
        spread,
        float((finite * finite).sum()),
        moments(v, size),
        head(mine),
    )


def moments(v: torch.Tensor, size: torch.Tensor) -> tuple[float, ...]:
    """Sums that do not depend on the order of these numbers: of powers, and of a function in which small ones count too."""
    v, unit = v.nan_to_num(0.0, 0.0, 0.0), float(size.min()) or 1.0 if size.numel() else 1.0
    return (*(float((v**k).sum()) for k in (1, 2, 3)), float(torch.atan(10 * v / unit).sum()))


_NO_FIT = Fit(False, math.inf, math.inf, None, 0.0, (), False, "", "")


def _fit(block: torch.Tensor, mine: torch.Tensor, bound: torch.Tensor, size: torch.Tensor) -> Fit:
    wanted, v = numbers(block), numbers(mine)
    odd = ~(wanted.isfinite() & v.isfinite())
    other = odd & (wanted != v) & ~(wanted.isnan() & v.isnan())
    a, b = torch.where(odd, 0.0, wanted), torch.where(odd, 0.0, v)
    apart = (a - b).abs()
    difference = float(apart.max()) if a.numel() else 0.0
    relative = float((apart / size).nan_to_num(0.0, posinf=math.inf).max()) if a.numel() else 0.0
    differing = (other | (apart > bound)).nonzero()
    first = int(differing[0]) // (1 + block.is_complex()) if differing.numel() else 0
    square, ratio = float(a @ a), None
    if square > 0:
        r = float(a @ b) / square
        largest = max(float(b.abs().max()), abs(r) * float(a.abs().max()))
        if largest == 0 or bool(((b - r * a).abs() <= bound.clamp(min=NEAR * largest)).all()):
            ratio = r
    elif not bool(b.any()):
        ratio = math.nan  # both are zero: any factor will do
    sums = tuple((_directions(wanted.numel()) @ wanted).tolist())
    return Fit(
        not differing.numel(),
        difference,
        relative,
        ratio,
        square,
        sums,
        bool(other.any()),
        head(block, first),
        head(mine, first),
    )


def head(x: torch.Tensor, first: int = 0, count: int = 4) -> str:
    """A value in short: its type and some elements, from the one of this number on."""
    flat = x.detach().reshape(-1)[first : first + count].cpu()
    items = [f"{item:.5g}" if isinstance(item, (float, complex)) else str(item) for item in flat.tolist()]
    listed = ", ".join(["..."] * (first > 0) + items + ["..."] * (first + count < x.numel()))
    return f"{type_text(tuple(x.shape), x.dtype, P())} {items[0] if x.ndim == 0 else f'[{listed}]'}"
