"""How local values are laid out in memory: which strides they take from an array, and whether elements are one in memory."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ..distributed import blocks
from ..distributed.blocks import Blocks


def packed(local: Any) -> Any:
    """A local value that is contiguous: arrays are, unless an op made them otherwise."""
    if type(local) is not Blocks:
        return local.contiguous()
    if all(block.is_contiguous() for block in local.blocks):
        return local
    return blocks.of_each(torch.Tensor.contiguous, local)


def in_order(local: Any, x: torch.Tensor) -> Any:
    """`local` with its dims in memory in the order of those of `x`, so that what is a view of `x` is one of each block."""
    if (
        x.is_contiguous()
        or 0 in x.stride()
        or (order := sorted(range(x.ndim), key=lambda d: -x.stride(d))) == [*range(x.ndim)]
    ):
        return local
    back = sorted(range(x.ndim), key=order.__getitem__)

    def one(block: torch.Tensor) -> torch.Tensor:
        return block.permute(order).contiguous().permute(back)

    return blocks.of_each(one, local)


def strided_as(local: Any, x: torch.Tensor) -> Any:
    """A whole local value with the strides of `x`, so that what is a view, or a copy, of `x` is one of it."""
    if x.is_contiguous() or x.numel() == 0:
        return local
    shape, stride = tuple(x.shape), _close(tuple(x.shape), tuple(x.stride()))

    def one(block: torch.Tensor) -> torch.Tensor:
        if block.stride() == stride:
            return block
        out = torch.empty_strided(shape, stride, dtype=block.dtype, device=block.device)
        target = out
        for dim, step in enumerate(stride):  # of elements that are one in memory, the first is written
            if step == 0:
                target, block = target.narrow(dim, 0, 1), block.narrow(dim, 0, 1)
        target.copy_(block)
        return out

    return blocks.of_each(one, local)


@functools.lru_cache(maxsize=4096)
def _close(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """These strides; where they leave out most of the memory, smaller ones, by which the same dims follow each other."""
    if 1 + sum((n - 1) * s for n, s in zip(shape, stride)) <= 4 * math.prod(shape):
        return stride
    out = list(stride)
    below, size, step = 0, 1, 1  # the dim whose elements come next in memory: its stride, its size, its new stride
    for d in sorted((d for d, s in enumerate(stride) if s), key=lambda d: (stride[d], shape[d] > 1)):
        joined = stride[d] == below * size if below else stride[d] == 1
        out[d] = step * size + (not joined)
        if shape[d] > 1:
            below, size, step = stride[d], shape[d], out[d]
    return tuple(out)


@functools.lru_cache(maxsize=4096)
def overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements may be one in memory, as those of an expanded tensor are."""
    end = 1
    for s, n in sorted((s, n) for s, n in zip(stride, shape) if n > 1):
        if s < end:
            return 0 not in shape
        end += (n - 1) * s
    return False
