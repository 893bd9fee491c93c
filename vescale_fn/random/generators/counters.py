"""Which elements of a draw to make: a rectangle of global indices, walked in blocks of counters.

The counter of an element is its row-major index in the *global* shape, in 64 bits. A rank's rectangle is one index
vector a dim. Whole trailing dims merge into runs of neighbouring counters; a long run is cut into blocks, short runs
are put together into one. No index is ever held for the whole draw at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..._core.base.tables import table
from .threefry import signed

Indices = range | Sequence[int]  # of one dim; a contiguous range wherever it can be
Block = tuple[int, int, int | torch.Tensor, torch.Tensor]  # local start and stop; high and low words of the counters


@dataclass(frozen=True, eq=False)
class Rectangle:
    """The elements of a draw that a rank makes: for each dim of the whole shape, their global indices."""

    shape: tuple[int, ...]
    indices: tuple[Indices, ...]

    @functools.cached_property
    def local(self) -> tuple[int, ...]:
        """The shape of the elements."""
        return tuple(map(len, self.indices))

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether the rectangle is everything."""
        return all(
            isinstance(index, range) and len(index) == size
            for index, size in zip(self.indices, self.shape, strict=True)
        )

    def encoded(self) -> torch.Tensor:
        """int64 [rows, 3], as an operator takes it: rows (dim, first, length), each a run of neighbours in one dim."""
        rows = [(dim, first, length) for dim, index in enumerate(self.indices) for first, length in _runs(index)]
        # by numpy, because torch's factories mean something else inside a body
        return table(torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, 3)))

    def where(self) -> torch.Tensor | None:
        """The same, or None for everything."""
        return None if self.is_whole else self.encoded()

    @functools.cached_property
    def walk(self) -> tuple[list[tuple[Indices, int]], Indices]:
        """Outer dims as (index, stride), and the offsets that are repeated for each of their rows."""
        shape, indices = self.shape, self.indices
        stride, inner, dim = 1, range(1), len(shape) - 1
        while dim >= 0 and isinstance(indices[dim], range) and len(indices[dim]) == shape[dim]:
            stride *= shape[dim]
            inner, dim = range(stride), dim - 1
        if dim >= 0:
            index = indices[dim]
            if isinstance(index, range):
                inner, dim = range(index.start * stride, index.stop * stride), dim - 1
            elif stride == 1:
                inner, dim = list(index), dim - 1
        return [(indices[d], math.prod(shape[d + 1 :])) for d in range(dim + 1)], inner

    @functools.cached_property
    def first(self) -> int | None:
        """The first counter, where the counters are neighbours; None where they are not."""
        outer, inner = self.walk
        if not isinstance(inner, range) or any(len(index) != 1 for index, _ in outer):
            return None
        return inner.start + sum(index[0] * stride for index, stride in outer)

    @functools.cached_property
    def vectors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The walk as int64: the lengths of the outer dims; their counters, one dim after the other; the offsets, if listed."""
        outer, inner = self.walk
        sizes = np.array([len(index) for index, _ in outer], dtype=np.int64)
        vectors = [np.asarray(index, dtype=np.int64) * stride for index, stride in outer]
        listed = None if isinstance(inner, range) else np.array(inner, dtype=np.int64)
        return sizes, np.concatenate(vectors) if vectors else sizes, listed


@functools.lru_cache(maxsize=256)
def whole(shape: tuple[int, ...]) -> Rectangle:
    """All elements of a draw."""
    return Rectangle(shape, tuple(map(range, shape)))


def decoded(shape: Sequence[int], where: torch.Tensor | None) -> Rectangle:
    """The rectangle that was encoded; without one, everything."""
    if where is None:
        return whole(tuple(shape))
    found: list[list[range]] = [[] for _ in shape]
    for dim, first, length in where.tolist():
        found[dim].append(range(first, first + length))
    indices = (pieces[0] if len(pieces) == 1 else [i for piece in pieces for i in piece] for pieces in found)
    return Rectangle(tuple(shape), tuple(indices))


def _runs(index: Indices) -> list[tuple[int, int]]:
    if isinstance(index, range) and index.step == 1:
        return [(index.start, len(index))]
    found: list[tuple[int, int]] = []
    for i in index:
        if found and sum(found[-1]) == i:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((i, 1))
    return found


def blocks(rectangle: Rectangle, size: int, device: torch.device) -> Iterator[Block]:
    """The counters of the rectangle in row-major order, in blocks of about `size`."""
    if not math.prod(rectangle.local):
        return
    outer, inner = rectangle.walk
    n = len(inner)
    rows = math.prod(len(index) for index, _ in outer)
    small = math.prod(rectangle.shape) <= 1 << 32  # then the high word is zero everywhere
    if n >= size or rows == 1:
        for row in range(rows):
            base = _row_base(outer, row)
            for a in range(0, n, size):
                piece = inner[a : a + size]
                yield from _run(base, piece, row * n + a, device)
        return
    offsets = _tensor(inner, device)
    group = size // n
    for r in range(0, rows, group):
        bases = _row_bases(outer, r, min(rows, r + group), device)
        start, stop = r * n, min(rows, r + group) * n
        if small:
            low = bases.to(torch.int32)[:, None] + offsets.to(torch.int32)
            yield start, stop, 0, low.view(-1)
        else:
            yield start, stop, *_words((bases[:, None] + offsets).view(-1))


def _row_base(outer: list[tuple[Indices, int]], row: int) -> int:
    base = 0
    for index, stride in reversed(outer):
        row, i = divmod(row, len(index))
        base += index[i] * stride
    return base


def _row_bases(outer: list[tuple[Indices, int]], start: int, stop: int, device: torch.device) -> torch.Tensor:
    rows = torch.arange(start, stop, device=device)
    base = torch.zeros_like(rows)
    for at, (index, stride) in reversed(list(enumerate(outer))):
        i = rows if at == 0 else rows % len(index)
        rows = rows if at == 0 else rows // len(index)
        i = i + index.start if isinstance(index, range) else _tensor(index, device)[i]
        base.add_(i, alpha=stride)
    return base


def _run(base: int, piece: Indices, at: int, device: torch.device) -> Iterator[Block]:
    """The blocks of one row: one, or two where the counters pass a multiple of 2**32."""
    if not isinstance(piece, range):
        yield at, at + len(piece), *_words(_tensor(piece, device) + base)
        return
    first, last = base + piece.start, base + piece.stop
    while first < last:
        end = min(last, (first >> 32) + 1 << 32)
        low = torch.arange(end - first, dtype=torch.int32, device=device).add_(signed(first))
        yield at, at + end - first, first >> 32, low
        at, first = at + end - first, end


def _words(counters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (counters >> 32).to(torch.int32), (counters & 0xFFFFFFFF).to(torch.int32)


def _tensor(index: Indices, device: torch.device) -> torch.Tensor:
    if isinstance(index, range):
        return torch.arange(index.start, index.stop, device=device)
    return torch.tensor(index, dtype=torch.int64, device=device)
