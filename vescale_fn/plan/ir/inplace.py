"""Replace a call by one that writes its result into existing memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from . import graph as plan


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of a call's result depends on the same element of its arguments alone (after broadcasting)."""
    op = plan.operator_of(node)
    return op is not None and op.pointwise


def alike(x: Any, y: Any) -> bool:
    """Whether two tensors have one shape, dtype, layout in memory and device, without holes or overlaps."""
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.shape == y.shape and x.dtype == y.dtype):
        return False
    return (found := kind(x)) is not None and found == kind(y)


def kind(x: Any) -> Any:
    """A tensor's shape, dtype, layout in memory and device; None for one with holes or overlaps."""
    # of a conjugate or a negative, what is written there would be seen conjugated, or negated
    if not isinstance(x, torch.Tensor) or x.is_conj() or x.is_neg() or not is_dense(x):
        return None
    return x.shape, x.dtype, x.stride(), x.device


def is_dense(x: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, each once."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size != 1):
        if stride != expected:
            return x.numel() == 0
        expected *= size
    return True


def written_into(node: fx.Node, target: fx.Node) -> Any:
    """How a pointwise call would be written into the memory of `target`, which is dead after it or one of its arguments.

    Returns:
        The operator, its arguments and its keywords; or None where there is no such operator.
    """
    op: Any = node.target
    first = node.args[0] if node.args else None
    if first is target and (inplace := _inplace(op)) is not None:
        return inplace, node.args, dict(node.kwargs)
    if (out := _out(op)) is not None:
        variant, name = out
        return variant, node.args, {**node.kwargs, name: target}
    return None


@functools.lru_cache(maxsize=1024)
def _inplace(op: Any) -> Any:
    """``add_`` for ``add``: the same arguments, the result in the first."""
    found = torch_internals.in_place(op)
    return found if found is not None and _same_arguments(op, found, 0) else None


@functools.lru_cache(maxsize=1024)
def _out(op: Any) -> tuple[Any, str] | None:
    """``add.out`` for ``add``, and the keyword that takes the memory; only where it is the kernel itself.

    Where torch generates such a variant from the plain op, it makes the result anew and copies it.
    """
    for found in torch_internals.overloads(op):
        last = torch_internals.schema(found).arguments[-1]
        if last.is_out and _same_arguments(op, found, 1) and torch_internals.has_kernel(found, "CPU"):
            return found, last.name
    return None


def _same_arguments(op: Any, variant: Any, more: int) -> bool:
    mine, its = torch_internals.schema(op).arguments, torch_internals.schema(variant).arguments
    return len(its) == len(mine) + more and all(
        (a.name, str(a.type)) == (b.name, str(b.type)) for a, b in zip(mine, its)
    )
