"""Results with the strides that were recorded, for operators whose meta kernels (fake tensors) give other strides.

While recording, an operator gives tensors without values, of which torch says how they would lie; passes and ``view``s rely
on it. For arguments without gaps and in order it is right. For others it sometimes is not (on a CPU, `batch_norm` of a
transposed tensor lies in order, where the account says transposed), and what the plan does next would raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..ir import graph as plan

_RELIABLE = frozenset(
    """
    mm bmm addmm baddbmm dot mv clone contiguous _to_copy copy cat stack empty_like full_like ones_like zeros_like
    sum mean amax embedding embedding_dense_backward
""".split()
)
_POINTWISE_BUT = {"aten::div.Tensor_mode", "aten::pow.Scalar", "aten::native_dropout_backward"}


def uncertain(node: fx.Node) -> Any:
    """The strides that a call's result must have been given, a tuple, or one for each result; None where they are sure."""
    if not plan.is_aten(node) or plan.viewed(node) or plan.name_of(node) in _RELIABLE:
        return None
    op: Any = node.target
    if torch.Tag.pointwise in op.tags and op.name() not in _POINTWISE_BUT:
        return None
    if plan.name_of(node).startswith("_foreach") or not any(map(_out_of_order, node.all_input_nodes)):
        return None
    out = plan.value(node)
    if isinstance(out, torch.Tensor):
        return _strides(out)
    if not isinstance(out, (list, tuple)):
        return None
    found = tuple(_strides(x) if isinstance(x, torch.Tensor) else None for x in out)
    return found if any(found) else None


def _out_of_order(node: fx.Node) -> bool:
    x = plan.value(node)
    return isinstance(x, torch.Tensor) and not x.is_contiguous()


def _strides(x: torch.Tensor) -> tuple[int, ...] | None:
    several = sum(size > 1 for size in x.shape) > 1 and x.numel() > 0
    return tuple(x.stride()) if several and x.layout is torch.strided else None


def as_recorded(out: Any, strides: Sequence[Any]) -> Any:
    """The result of a call, of which each tensor lies so: as it is, or copied."""
    if isinstance(out, torch.Tensor):
        return out if out.stride() == strides else _restrided(out, strides)
    return [
        x if x is None or wanted is None or x.stride() == wanted else _restrided(x, wanted)
        for x, wanted in zip(out, strides, strict=True)
    ]


def _restrided(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    if all(a == b for a, b, size in zip(x.stride(), strides, x.shape, strict=True) if size != 1):
        return x
    out = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    each_once(out).copy_(each_once(x, strides))
    return out


def each_once(x: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
    """A tensor without the repetitions of what is expanded, in it or in one with these strides."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride() if strides is None else strides)):
        if size > 1 and stride == 0:
            x = x.narrow(dim, 0, 1)
    return x
