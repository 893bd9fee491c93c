"""Which keys a query looks at, where ranks have different numbers of them or tokens are in another order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..ops import axis_index
from .zigzag import zigzag_order

LARGE = 2.0**15, 2.0**10  # both are float16; their product, times a scale, is a score whose exponential is 0


def without_padding(q: Any, k: Any, v: Any, names: tuple[str, ...], counts: tuple[int, ...], scale: float) -> Any:
    """q, k and v that are one wider, and a scale, so that no query looks at more of a rank's keys than its `counts`.

    The added width makes the score of each key that is padding very negative, and adds 0 to all others: so any kernel
    and any derivative serves, and a part of the keys may be all padding.
    """
    if scale < 2**-10:  # or negative, where the score of padding would be large
        q, scale = q * scale, 1.0
    count = torch.tensor(counts, device=k.device).index_select(0, axis_index(names).reshape(1))
    padding = torch.arange(k.shape[2], device=k.device) >= count
    column = torch.where(padding, -LARGE[0], 0.0).to(k.dtype).reshape(1, 1, -1, 1).expand(*k.shape[:3], 1)
    q = F.pad(q, [0, 1], value=LARGE[1])
    return q, torch.cat([k, column], 3), F.pad(v, [0, 1]), scale


def positions(length: int, zigzag: int, counts: tuple[int, ...] | None, device: Any) -> torch.Tensor:
    """The position of each of `length` tokens, of which each rank has as many as `counts` says, and then padding."""
    if not zigzag:
        return torch.arange(length, device=device)
    if counts is None:
        return zigzag_order(length, zigzag).to(device)
    part = length // len(counts)
    parts = zigzag_order(sum(counts), zigzag).split(counts)
    return torch.cat([F.pad(one, [0, part - len(one)]) for one in parts]).to(device)
