"""Which elements of a draw to make: a rectangle of global indices, walked in blocks of counters.

The counter of an element is its row-major index in the *global* shape, in 64 bits. A rank's rectangle is one index
vector a dim. Whole trailing dims merge into runs of neighbouring counters; a long run is cut into blocks, short runs
are put together into one. No index is ever held for the whole draw at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from .threefry import signed

Indices = range | Sequence[int]  # of one dim; a contiguous range wherever it can be
Block = tuple[int, int, int | torch.Tensor, torch.Tensor]  # local start and stop; high and low words of the counters


def is_whole(shape: Sequence[int], indices: Sequence[Indices]) -> bool:
    """Whether the rectangle is everything."""
    return all(isinstance(index, range) and len(index) == size for index, size in zip(indices, shape, strict=True))


def encode(indices: Sequence[Indices]) -> list[list[int]]:
    """The rectangle as rows (dim, first, length), each one run of neighbours in one dim."""
    return [[dim, first, length] for dim, index in enumerate(indices) for first, length in _runs(index)]


def decode(shape: Sequence[int], rows: Sequence[Sequence[int]] | None) -> list[Indices]:
    """The rectangle that `encode` wrote down; without rows, the whole shape."""
    if rows is None:
        return [range(size) for size in shape]
    found: list[list[range]] = [[] for _ in shape]
    for dim, first, length in rows:
        found[dim].append(range(first, first + length))
    return [pieces[0] if len(pieces) == 1 else [i for piece in pieces for i in piece] for pieces in found]


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


def blocks(shape: Sequence[int], indices: Sequence[Indices], size: int, device: torch.device) -> Iterator[Block]:
    """The counters of the rectangle in row-major order, in blocks of about `size`."""
    if not math.prod(map(len, indices)):
        return
    outer, inner = plan(shape, indices)
    n = len(inner)
    rows = math.prod(len(index) for index, _ in outer)
    small = math.prod(shape) <= 1 << 32  # then the high word is zero everywhere
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


def plan(shape: Sequence[int], indices: Sequence[Indices]) -> tuple[list[tuple[Indices, int]], Indices]:
    """Outer dims as (index, stride), and the offsets that are repeated for each of their rows."""
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
    outer: list[tuple[Indices, int]] = []
    for d in range(dim, -1, -1):
        outer.insert(0, (indices[d], math.prod(shape[d + 1 :])))
    return outer, inner


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
