"""Arguments of an autograd Function of ours in a `shard_map` body, where no mode sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core import torch_internals
from .._core.base import context
from .._core.local_types import tensor_types, types
from .._core.shard_map.collective_calls import local
from .._core.shard_map.collective_maps import promote
from .._core.shard_map.collective_operands import refuse_unreduced


def brought(where: str, xs: Sequence[Any], names: Sequence[str], body: context.Body) -> tuple[list[Any], types.Type]:
    """Local values that vary over these axes and over those that any of them varies over, and that type, the result's.

    Where a value was the same on all ranks, its gradient will be their sum.
    """
    leaves = [local(x, body, where) for x in xs]
    have = [tensor_types.type_in(x, body) for x in leaves]
    refuse_unreduced(where, tuple(leaves), leaves, have, body.axes)
    want = types.of(varying={*names, *(a for t in have for a in types.differing(t, body.axes))})
    if body.check:
        with torch_internals.no_torch_function():
            leaves = [promote(x, t, want, body.mesh) for x, t in zip(leaves, have, strict=True)]
    return leaves, want
