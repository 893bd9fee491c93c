"""What several models are made of: norms, rotary positions, attention, dropout, initial matrices. For one device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F

import vescale_fn as vfn


def keys_of(key: vfn.random.Key | None, count: int) -> Iterator[Any]:
    """Keys for `count` dropouts; None for each where there is no key."""
    return iter(vfn.random.split(key, count)) if key is not None else repeat(None)


def matrix(key: vfn.random.Key, rows: int, columns: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers that keep the size of what the matrix is applied to, times `scale`."""
    return vfn.random.normal(key, (rows, columns), dtype) * (scale * rows**-0.5)


def dropout(key: vfn.random.Key | None, x: torch.Tensor, rate: float) -> torch.Tensor:
    """Dropout where there is a key."""
    return x if key is None or not rate else vfn.random.dropout(key, x, rate)


def rms_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Root mean square normalisation (arXiv 1910.07467)."""
    return F.rms_norm(x, scale.shape, scale, eps=1e-5)


def group_norm(x: torch.Tensor, groups: int, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Group normalisation (arXiv 1803.08494) of [B, C, H, W]; by groups as a dim, so that channels may be split with them."""
    parts = x.unflatten(1, (groups, -1))
    parts = F.layer_norm(parts, parts.shape[2:])
    return parts.flatten(1, 2) * scale[:, None, None] + shift[:, None, None]


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, T, heads * d] as [B, heads, T, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """`vfn.nn.attention` of [B, heads, T, d], as [B, T, heads * d]; keys and values may have fewer heads (arXiv 2305.13245)."""
    return vfn.nn.attention(q, k, v, **options).transpose(1, 2).flatten(2)


def rotation(length: int, dim: int, base: float, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [T, dim] of rotary positions (arXiv 2104.09864), in the dtype and on the device of `like`."""
    there: Any = {"dtype": torch.float64, "device": like.device}
    speeds = torch.exp(torch.arange(0, dim, 2, **there) * (-math.log(base) / dim))
    angles = torch.outer(torch.arange(length, **there), speeds)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1).to(like.dtype), torch.cat([-sin, sin], dim=-1).to(like.dtype)


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn each pair (i, i + dim / 2) of the last dim by its position's angle."""
    return x * angles[0] + x.roll(x.shape[-1] // 2, -1) * angles[1]


def next_token_loss(scores: torch.Tensor, targets: torch.Tensor, smoothing: float, ignored: int | None) -> torch.Tensor:
    """Mean cross entropy in nats of scores [B, T, V] for targets [B, T], of which those that are `ignored` do not count; in
    float32 at least.

    Of each target a share of `smoothing` is spread over all tokens (arXiv 1512.00567).
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    count = targets.numel() if ignored is None else (targets != ignored).sum()
    ignored = -1 if ignored is None else ignored
    scores, targets = scores.flatten(0, 1), targets.flatten()
    return F.cross_entropy(scores, targets, ignore_index=ignored, label_smoothing=smoothing, reduction="sum") / count
