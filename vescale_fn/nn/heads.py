"""Heads of queries that share heads of keys, for ranks that each have some of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F

Tensor = Any  # a tensor, an array, or a Blocks


def repeats(q: Tensor, k: Tensor, starts: Iterable[int]) -> int:
    """How often to repeat each head of keys, so that none is shared by heads of two ranks, which begin at these."""
    shared = q.shape[1] // k.shape[1]
    return shared // math.gcd(shared, *starts)


def divided(q: Tensor, k: Tensor, v: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads that n ranks divide: those of keys and values repeated, and zeros for heads after the last."""
    part = -(-q.shape[1] // n)
    times = repeats(q, k, (part,))
    if times > 1:
        k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    shared = q.shape[1] // k.shape[1]
    return with_heads(q, part * n), with_heads(k, part * n // shared), with_heads(v, part * n // shared)


def with_heads(x: Tensor, count: int) -> Tensor:
    """Zeros for heads that are not there."""
    return x if x.shape[1] == count else F.pad(x, [0, 0, 0, 0, 0, count - x.shape[1]])
