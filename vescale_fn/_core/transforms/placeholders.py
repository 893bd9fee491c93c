"""Tensors without values, by which those of a function are known that are not computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..arrays.array import made
from ..base import op_arguments
from ..distributed.blocks import Blocks, held, parts
from ..distributed.rows import row_of
from ..sharding.layout import WHOLE, layout, type_text

Tensor = torch.Tensor


def memories(*values: Any) -> frozenset[int]:
    """The memory that the tensors in values lie in; of an array, and of what several ranks hold, that of each block: each may
    have been made on its own."""
    found = (torch_internals.local(x) if isinstance(x, DTensor) else x for x in op_arguments.tensors_in(*values))
    return frozenset(torch_internals.memory_number(part) for x in found for part in held(x))


@dataclass(frozen=True)
class Placeholder:
    """A tensor without its values."""

    shape: Any
    stride: Any
    dtype: torch.dtype
    device: torch.device
    parts: Sequence[Any] = ()  # of the blocks of several ranks
    spec: Any = field(default=None, compare=False)  # of an array

    def text(self) -> str:
        if self.spec is not None:
            return type_text(self.spec.shape, self.dtype, layout(self.spec))
        return self.parts[0].text() if self.parts else type_text(self.shape, self.dtype, WHOLE)

    def empty(self) -> Any:
        """One that may hold anything."""
        if self.spec is not None:
            return made(self.parts[0].empty(), self.spec, layout(self.spec))
        if self.parts:
            return Blocks(one.empty() for one in self.parts)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def placeholder(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, DTensor):
        return Placeholder(
            None, None, x.dtype, x.device, (placeholder(torch_internals.local(x)),), torch_internals.spec(x)
        )
    if type(x) is Blocks:
        return Placeholder(None, None, x.dtype, x.device, tuple(map(placeholder, x.blocks)))
    return Placeholder(x.shape, x.stride(), x.dtype, x.device)


def restored(x: Tensor, like: Placeholder) -> Tensor:
    """The whole of a step's result, of which `x` is a view."""
    if like.spec is not None:
        return made(restored(torch_internals.local(x), like.parts[0]), like.spec, layout(like.spec))
    if (row := row_of(x)) is not None:
        return Blocks(row.like(restored(row.one, like.parts[0])))
    if like.parts:
        return Blocks(restored(one, of) for one, of in zip(parts(x), like.parts, strict=True))
    same = x.shape == like.shape and x.stride() == like.stride
    return x.detach() if same else x.detach().as_strided(like.shape, like.stride, 0)
