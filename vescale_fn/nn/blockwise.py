"""Attention of some queries to some keys, and how such parts make up attention to all keys.

A part of attention is known by its result and by the logarithm of the sum of the exponentials of its scores: with these
two, results for different keys add up to the one for all keys, in any order, without a score being kept. The gradient
of a part needs the whole's result and logarithm alone.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867); Dao et al.,
    "FlashAttention" (arXiv 2205.14135), whose kernels run here where there is one.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .._core import torch_internals
from .._core.base import dtypes

Tensor = Any  # a tensor, or a Blocks


def wide(x: Tensor) -> Tensor:
    """As results are added up: of halves in float32."""
    dtype = dtypes.wide(x.dtype)
    return x if dtype is x.dtype else x.to(dtype)


def part(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of queries [B, H, T, D] to keys [B, G, S, D], G dividing H: the result, and the logarithm [B, H, T].

    With `causal`, query i looks at keys up to i, and T is S.
    """
    kernel = torch_internals.attention_kernel(q, k, v)
    if kernel is not None:
        return kernel.forward(q, k, v, scale, causal)
    scores = _scores(q, k, scale, causal)
    log = torch.logsumexp(scores, -1)
    out = grouped(torch.exp(scores - log.unsqueeze(-1)), k) @ wide(v)
    return out.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype), log


def part_backward(
    grad: Tensor,
    log_grad: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for q, k and v of a part, from the result and the logarithm of the whole, and the gradients of these.

    Where the logarithm is infinite the queries do not look at these keys at all. Differentiable where grad mode is on.
    """
    kernel = torch_internals.attention_kernel(q, k, v)
    if kernel is not None and log_grad is None and not torch.is_grad_enabled():
        return kernel.backward(grad, q, k, v, out, log, scale, causal)
    share = grouped(torch.exp(_scores(q, k, scale, causal) - log.unsqueeze(-1)), k)
    wide_grad = wide(grad)
    mean = (wide_grad * wide(out)).sum(-1, keepdim=True)  # of the scores' gradient, over the keys
    if log_grad is not None:
        mean = mean - log_grad.unsqueeze(-1)
    wide_grad, mean, queries = (grouped(x, k) for x in (wide_grad, mean, wide(q)))
    slope = share * (wide_grad @ wide(v).mT - mean) * scale
    return (
        (slope @ wide(k)).reshape(q.shape).to(q.dtype),
        (slope.mT @ queries).to(k.dtype),
        (share.mT @ wide_grad).to(v.dtype),
    )


def part_tangent(
    q: Tensor, k: Tensor, v: Tensor, tangents: tuple[Tensor, Tensor, Tensor], log: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """What a part adds to the tangents of the whole: to that of the logarithm, and to that of the result with the other's
    share in it. Both are sums over the keys; where the logarithm is infinite the queries do not look at these."""
    tq, tk, tv = map(wide, tangents)
    share = grouped(torch.exp(_scores(q, k, scale, causal) - log.unsqueeze(-1)), k)
    change = share * (grouped(tq, k) @ wide(k).mT + grouped(wide(q), k) @ tk.mT) * scale
    out = (change @ wide(v) + share @ tv).reshape(*q.shape[:-1], v.shape[-1])
    return out, change.sum(-1).reshape(q.shape[:-1])


def together(out: Tensor, log: Tensor, more: Tensor, more_log: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts, of the same queries and different keys, as one."""
    total = torch.logaddexp(log, more_log)
    weigh = lambda x, its: wide(x) * torch.exp(its - total).unsqueeze(-1)
    return weigh(out, log) + weigh(more, more_log), total


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    scores = (grouped(wide(q), k) @ wide(k).mT).reshape(*q.shape[:-1], k.shape[-2]) * scale
    if not causal:
        return scores
    after = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(after, -math.inf)


def grouped(x: Tensor, k: Tensor) -> Tensor:
    """The heads that share a key, one after the other along the queries: [B, G, H / G * T, ...]."""
    groups = k.shape[1]
    return x.reshape(x.shape[0], groups, x.shape[1] // groups * x.shape[2], x.shape[3])
