"""Checksums of the blocks of a whole value, which add up: each rank gives the share of the bytes that it holds.

A block is 1 MiB of a value's bytes in row-major order, as 32-bit words w[i], the lowest byte first. Its checksum is four
numbers; number l is the sum over i of ``keys[i + l] * w[i]``, modulo 2**64, with fixed random 64-bit keys. A sum does not ask
who adds what: bytes that a rank does not hold are zeros, and no split of a value, however uneven, changes the total.

Two blocks that differ, whatever they are as long as nobody made them with these keys in mind, have one of the four numbers
alike with a probability of 2**-33 at most, and all four with 2**-132 (the Toeplitz form of multilinear hashing: Carter and
Wegman 1979, Krawczyk 1994, Lemire and Kaser 2014). Where every bit is as likely to differ, it is 2**-256. Someone who wants
to find two such blocks solves a linear equation: against that these sums are no protection.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable

import torch

from .._core import torch_internals
from .._core.base import dtypes
from .._core.sharding.layout import contiguous_stride
from .chunks import Piece

BLOCK, SUMS = 2**20, 4  # bytes of a block, numbers of its checksum
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def count(x: torch.Tensor) -> int:
    """How many blocks a value has."""
    return -(-x.numel() * x.element_size() // BLOCK)


def of_pieces(pieces: Iterable[Piece], x: torch.Tensor) -> torch.Tensor:
    """The shares that these pieces of a value, a plain tensor or an array, have in its checksums: int64 [blocks, 4]."""
    totals = torch.zeros((count(x), SUMS), dtype=torch.int64, device=x.device)
    with torch.no_grad():
        for piece in pieces:
            if piece.tensor.numel():
                _add(totals, piece, tuple(x.shape))
    return totals


def _add(totals: torch.Tensor, piece: Piece, shape: tuple[int, ...]) -> None:
    """Add the shares of a piece: rows of bytes, evenly apart, that begin at every place in its outer dims."""
    size, strides = piece.tensor.element_size(), contiguous_stride(shape)
    parted = [dim for dim, n in enumerate(shape) if piece.sizes[dim] != n]
    inner = parted[-1] if parted else 0  # a row goes through this dim and those behind it
    outer = max((dim for dim in parted if dim < inner), default=0)  # from here on rows are evenly apart
    first = sum(offset * stride for offset, stride in zip(piece.offsets, strides)) * size
    step = shape[inner] * strides[inner] * size if shape else size
    data = dtypes.as_bytes(piece.tensor.detach().resolve_conj().resolve_neg())
    rows = data.view(math.prod(piece.sizes[:outer]), math.prod(piece.sizes[outer:inner]), -1)
    starts = itertools.product(*(range(0, n * stride, stride) for n, stride in zip(piece.sizes[:outer], strides)))
    for part, start in zip(rows, starts, strict=True):
        _add_rows(totals, part, first + sum(start) * size, step)


def _add_rows(totals: torch.Tensor, rows: torch.Tensor, first: int, step: int) -> None:
    """Add the shares of rows of bytes that begin every `step` bytes, as many at a time as end in one block."""
    if rows.shape[1] == step:
        rows = rows.view(1, -1)
    (n, width), row = rows.shape, 0
    while row < n:
        block, at = divmod(first + row * step, BLOCK)
        fit = min((BLOCK - at - width) // step + 1, n - row)
        if at + width <= BLOCK:
            totals[block] += _share(rows[row : row + fit], at, step)
            row += fit
            continue
        done = 0
        while done < width:  # a row that goes on in the next block
            part = rows[row : row + 1, done : done + BLOCK - at]
            totals[block] += _share(part, at, BLOCK)
            done, block, at = done + part.shape[1], block + 1, 0
        row += 1


def _share(rows: torch.Tensor, at: int, step: int) -> torch.Tensor:
    """What rows of bytes, `step` apart from place `at` of a block on, add to its checksum."""
    if rows.shape[0] == 1:
        rows, step = rows[0], BLOCK
    unit = math.gcd(4, at, rows.shape[-1], step)
    if any(n % unit for n in (rows.storage_offset(), *rows.stride()[:-1])):
        rows = rows.clone(memory_format=torch.contiguous_format)
    values, keys = rows.view(_UNSIGNED[unit]).to(torch.int64), _keys(unit, rows.device)
    strides = (step // unit, 1)[-values.ndim :]
    windows = [keys.as_strided(values.shape, strides, at // unit + i * (4 // unit)) for i in range(SUMS)]
    if values.ndim == 1 and values.is_cpu:  # twice as fast
        return torch.stack([torch.dot(values, window) for window in windows])
    return torch.stack([(values * window).sum() for window in windows])


@functools.lru_cache(maxsize=12)
@torch_internals.never_recorded
def _keys(unit: int, device: torch.device) -> torch.Tensor:
    """The keys of the units, of 1, 2 or 4 bytes, of a block, and of as many behind it as sums are apart.

    A unit is a word with zeros around it: its key is the word's, shifted.
    """
    words = hashlib.shake_256(b"vescale_fn.digest").digest(8 * (BLOCK // 4 + SUMS))
    keys = torch.frombuffer(bytearray(words), dtype=torch.int64)
    return (keys[:, None] << torch.arange(0, 32, 8 * unit, device="cpu")).reshape(-1).to(device)
