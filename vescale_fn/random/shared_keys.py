"""Warn when one key is used on values that differ by rank: every rank would draw the same numbers."""

from __future__ import annotations

from typing import Any

import torch

from .._core.base import context, source_lines
from .._core.base.messages import axes_text, report
from .._core.local_types import tensor_types
from .._core.sharding.spec import P, axes_named
from .keys import Key


def warn(where: str, key: Key, values: dict[str, Any], spec: Any = None) -> None:
    """Warn in a `shard_map` body where one of the values varies over axes over which the key does not, nor the draw by
    its `spec`."""
    body = context.body()
    if body is None or not body.check or torch.compiler.is_compiling():
        return
    own = tensor_types.typeof(key.data, body.axes).varying | (axes_named(spec) if isinstance(spec, P) else frozenset())
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            continue
        differs = tensor_types.typeof(value, body.axes).varying - own
        axes = tuple(axis for axis in body.axes if axis in differs and body.sizes[axis] > 1)
        if axes:
            place = repr(axes[0] if len(axes) == 1 else axes)
            source_lines.warn(
                report(
                    where,
                    f"the same numbers are drawn on all ranks along {axes_text(axes)}, where {name} differs",
                    [
                        f"{name} is {tensor_types.text(value, tensor_types.typeof(value, body.axes))}",
                        "the key is the same on all of them",
                    ],
                    f"vfn.random.fold_in(key, vfn.axis_index({place})) for numbers of each rank's own; spec=... for one rank's "
                    f"block of a whole draw; vfn.pvary(key, {place}), if the same numbers are meant",
                )
            )
            return
