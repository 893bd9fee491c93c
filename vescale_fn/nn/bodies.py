"""Arguments of an autograd Function of ours in a `shard_map` body, where no mode sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _torch, context, marks, types
from ..ops.maps import promote
from ..ops.operands import refuse_unreduced
from ..ops.sending import local


def brought(where: str, xs: Sequence[Any], names: Sequence[str], body: context.Body) -> tuple[list[Any], types.Type]:
    """Local values that vary over these axes and over those that any of them varies over, and that type, the result's.

    Where a value was the same on all ranks, its gradient will be their sum.
    """
    leaves = [local(x, body, where) for x in xs]
    have = [marks.typeof(x, body.axes) if body.check else types.INVARIANT for x in leaves]
    refuse_unreduced(where, tuple(leaves), leaves, have, body.axes)
    want = types.of(varying={*names, *(a for t in have for a in types.differing(t, body.axes))})
    if body.check:
        with _torch.no_torch_function():
            leaves = [promote(x, t, want, body.mesh) for x, t in zip(leaves, have, strict=True)]
    return leaves, want
