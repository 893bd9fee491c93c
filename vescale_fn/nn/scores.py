"""What cross entropy needs of the scores ``x @ weight.T``, without all of them being there at once.

The scores of some tokens at a time are made, summed up, and forgotten; the backward pass makes them again. What is kept
are numbers a token.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (arXiv 2411.09009); Hsu et al., "Liger
    Kernel" (arXiv 2410.10989) for how many tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from .._core import torch_internals
from .blockwise import wide

Tensor = Any  # a tensor, or a Blocks


def summed_up(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    first: Tensor,
    chunk: int,
    count: Tensor | None = None,
    shares: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the scores of each token for some classes: the logarithm of the sum of e^score, the score of its target (0 if
    that is another class), and the sum.

    Args:
        x: [N, D].
        weight: [C, D], of the classes from `first` on.
        target: i64[N].
        first: a 0-d integer tensor.
        chunk: how many tokens at a time.
        count: how many rows of the weight stand for a class, a 0-d integer tensor; the others are zeros. None: all of them.
        shares: [C], what each class counts for in the sum; each for 1 if there are none.
    """
    return torch_internals.apply(_SummedUp, chunk, first, count, target, shares, x, weight)


class _SummedUp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        chunk: int,
        first: Tensor,
        count: Tensor | None,
        target: Tensor,
        shares: Tensor | None,
        x: Tensor,
        weight: Tensor,
    ) -> Any:
        parts = []
        for rows in _chunks(x, chunk):
            scores = wide(x[rows] @ weight.mT)
            at, here = _at(target[rows], first, weight.shape[0] if count is None else count)
            picked = torch.where(here, scores.gather(1, at.unsqueeze(1)).squeeze(1), 0.0)
            total = scores.sum(1) if shares is None else scores @ shares
            parts.append((torch.logsumexp(_of_classes(scores, count), 1), picked, total))
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.chunk, *leaves = inputs
        ctx.save_for_backward(*leaves, output[0])
        ctx.save_for_forward(*leaves, output[0])

    @staticmethod
    def backward(ctx: Any, log_grad: Tensor, picked_grad: Tensor, sum_grad: Tensor) -> Any:
        """Made of differentiable ops, so that it has derivatives, too."""
        first, count, target, shares, x, weight, log = ctx.saved_tensors
        log = torch.where(log == -math.inf, 0.0, log)  # of no classes
        of_x, of_weight = [], None
        for rows in _chunks(x, ctx.chunk):
            column = lambda one, rows=rows: one[rows].unsqueeze(1)
            scores = _of_classes(wide(x[rows] @ weight.mT), count)
            of_sum = column(sum_grad) if shares is None else column(sum_grad) * shares
            grad = column(log_grad) * torch.exp(scores - column(log)) + of_sum
            at, here = _at(target[rows], first, weight.shape[0] if count is None else count)
            grad = grad.scatter_add(1, at.unsqueeze(1), torch.where(here, picked_grad[rows], 0.0).unsqueeze(1))
            grad = grad.to(x.dtype)
            of_x.append(grad @ weight)
            more = wide(grad.mT @ x[rows])
            of_weight = more if of_weight is None else of_weight + more
        assert of_weight is not None
        return None, None, None, None, None, torch.cat(of_x), of_weight.to(weight.dtype)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        first, count, target, shares, x, weight, log = ctx.saved_tensors
        of_x, of_weight = (torch.zeros_like(one) if t is None else t for one, t in zip((x, weight), tangents[-2:]))
        log = torch.where(log == -math.inf, 0.0, log)
        parts = []
        for rows in _chunks(x, ctx.chunk):
            scores = _of_classes(wide(x[rows] @ weight.mT), count)
            change = wide(of_x[rows] @ weight.mT + x[rows] @ of_weight.mT)
            at, here = _at(target[rows], first, weight.shape[0] if count is None else count)
            picked = torch.where(here, change.gather(1, at.unsqueeze(1)).squeeze(1), 0.0)
            of_log = (torch.exp(scores - log[rows].unsqueeze(1)) * change).sum(1)
            parts.append((of_log, picked, change.sum(1) if shares is None else change @ shares))
        return tuple(map(torch.cat, zip(*parts, strict=True)))


def _chunks(x: Tensor, chunk: int) -> Iterator[slice]:
    for start in range(0, max(x.shape[0], 1), chunk):
        yield slice(start, min(start + chunk, x.shape[0]))


def _of_classes(scores: Tensor, count: Tensor | None) -> Tensor:
    """The scores, -inf where a row of the weight stands for no class."""
    if count is None:
        return scores
    return scores.masked_fill(torch.arange(scores.shape[1], device=scores.device) >= count, -math.inf)


def _at(target: Tensor, first: Tensor, count: Any) -> tuple[Tensor, Tensor]:
    """Where each target is among these classes, and whether it is; somewhere, if it is not."""
    at = target - first
    here = (at >= 0) & (at < count)
    return torch.where(here, at, 0), here
