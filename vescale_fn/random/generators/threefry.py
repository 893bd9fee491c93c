"""Threefry-2x32, the keyed hash that every stream here is made of: on Python ints, on numpy arrays, on tensors.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); 20 rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

MASK = 0xFFFFFFFF
PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))

Word = int | torch.Tensor  # 32 bits: an int 0 <= word < 2**32, or an int32 tensor in two's complement


def signed(word: int) -> int:
    """The int32 with the same 32 bits."""
    word &= MASK
    return word - (1 << 32) if word >> 31 else word


def hash_ints(k0: int, k1: int, x0: int, x1: int) -> tuple[int, int]:
    """The hash of one counter (x0, x1) under one key (k0, k1); all four, and both results, are 0 <= word < 2**32."""
    schedule = (k0, k1, k0 ^ k1 ^ PARITY)
    x0, x1 = (x0 + k0) & MASK, (x1 + k1) & MASK
    for i in range(5):
        for r in ROTATIONS[i & 1]:
            x0 = (x0 + x1) & MASK
            x1 = ((x1 << r | x1 >> (32 - r)) & MASK) ^ x0
        x0 = (x0 + schedule[(i + 1) % 3]) & MASK
        x1 = (x1 + schedule[(i + 2) % 3] + i + 1) & MASK
    return x0, x1


def hash_words(k0: Word, k1: Word, x0: Word, x1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The hash of many counters (x0, x1); keys and x0 are ints, or int32 tensors, that broadcast with x1.

    On a CPU the rounds run in numpy, whose small operations cost a quarter of torch's.
    """
    if x1.device.type != "cpu":
        return rounds(k0, k1, x0, x1, as_tensor, rotate_tensor)
    with np.errstate(over="ignore"):  # of the scalars; arrays wrap without a word
        y0, y1 = rounds(k0, k1, x0, x1, as_array, rotate_array)
    return torch.from_numpy(y0.view(np.int32)), torch.from_numpy(y1.view(np.int32))


def rounds(k0: Word, k1: Word, hi: Word, low: torch.Tensor, own: Any, rotate: Any) -> tuple[Any, Any]:
    """The twenty rounds, on words that wrap: numpy's or torch's, by `own` and `rotate`."""
    k0, k1, x0, x1 = own(k0), own(k1), own(hi), own(low)
    schedule = (k0, k1, k0 ^ k1 ^ own(PARITY))
    x1 = x1 + schedule[1]
    x0 = x1 + (x0 + schedule[0])  # the first round's addition is in it
    scratch = rotate(x1, 0, None)
    for i in range(5):
        for j, r in enumerate(ROTATIONS[i & 1]):
            if i or j:
                x0 += x1
            rotate(x1, r, scratch)
            x1 ^= x0
        x0 += schedule[(i + 1) % 3]
        x1 += schedule[(i + 2) % 3] + own(i + 1)
    return x0, x1


def as_array(x: Word) -> Any:
    """A word as an unsigned numpy scalar or array."""
    return np.uint32(x) if isinstance(x, int) else x.numpy().view(np.uint32)


def as_tensor(x: Word) -> torch.Tensor:
    """A word as an int32 tensor."""
    return torch.tensor(signed(x), dtype=torch.int32, device="cpu") if isinstance(x, int) else x


def rotate_array(x: np.ndarray, r: int, scratch: Any) -> Any:
    """Rotate every word left by `r` bits in place; with `r` 0, make the scratch space for it."""
    if not r:
        return np.empty_like(x)
    np.left_shift(x, np.uint32(r), out=scratch)
    np.right_shift(x, np.uint32(32 - r), out=x)
    np.bitwise_or(x, scratch, out=x)


def rotate_tensor(x: torch.Tensor, r: int, scratch: Any) -> Any:
    """int32 shifts right with its sign, which the mask takes away; the two parts share no bit, so a sum unites them."""
    if not r:
        return torch.empty_like(x)
    torch.bitwise_right_shift(x, 32 - r, out=scratch).bitwise_and_((1 << r) - 1)
    torch.add(scratch, x, alpha=1 << r, out=x)
