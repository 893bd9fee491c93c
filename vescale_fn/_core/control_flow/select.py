"""Conditions: one truth for all, or one for each rank or entry, where both ways are computed and `torch.where` takes one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from .. import torch_internals
from ..arrays.array import mesh_of, moved
from ..base import context
from ..base.errors import TransformError
from ..base.messages import described, report
from ..distributed.blocks import Blocks
from ..distributed.places import place_of, whole_mesh
from ..local_types import tensor_types
from ..shard_map import body
from ..sharding.layout import WHOLE


def scalar(x: Any, where: str, name: str, whole: bool = False) -> Any:
    """A condition, or with `whole` an index, that is a Python value or a 0-d tensor; else an error."""
    x = body.local(x)
    if isinstance(x, torch.Tensor):
        if x.ndim == 0 and not (whole and (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)):
            return _on_all_ranks(x, where)
    elif isinstance(x, int) and not (whole and isinstance(x, bool)) or (not whole and isinstance(x, float)):
        return x
    kind = "a 0-d integer tensor or an int" if whole else "a 0-d tensor or a bool"
    fix = "x.all() or x.any() of a condition with dims; torch.where(x, a, b) for one choice per element"
    raise TransformError(report(where, f"{name} must be {kind}, but it is {described(x)}", fix="" if whole else fix))


def _on_all_ranks(x: torch.Tensor, where: str) -> torch.Tensor:
    """What all ranks are to decide by: a value at a place is told to the others, which would go another way."""
    mesh = mesh_of(x)
    return x if place_of(mesh) is None else moved(x, whole_mesh(mesh), WHOLE, where)


def varying(x: Any) -> tuple[str, ...]:
    """The axes of the body that runs over which a condition differs, as far as its type says."""
    running = context.body()
    if running is None or not running.check or not isinstance(x, torch.Tensor):
        return ()
    type_ = tensor_types.typeof(x, running.axes)
    return tuple(axis for axis in running.axes if axis in type_.varying | type_.unreduced)


def differs(x: Any) -> bool:
    """Whether a condition is one for each entry of a `vmap`, or for each rank: in a body as its type says, where it has one."""
    if not isinstance(x, torch.Tensor):
        return False
    running = context.body()
    if torch_internals.is_batched(x) or (running is not None and running.check):
        return torch_internals.is_batched(x) or bool(varying(x))
    inner = torch_internals.peel(x)
    return type(inner) is Blocks and not _is_one(inner)


def _is_one(x: Blocks) -> bool:
    return len(set(map(id, x.blocks))) == 1


def apart(x: Any, where: str) -> contextlib.AbstractContextManager[None]:
    """A block in which nothing may communicate over the axes along which the condition `x` differs."""
    axes = varying(x)
    return (
        context.setting(apart=(*context.apart(), *((axis, where) for axis in axes)))
        if axes
        else contextlib.nullcontext()
    )


def anywhere(x: Any) -> bool:
    """Whether a condition holds; where it differs, for some entry of a `vmap` on some rank that this process plays."""
    if not differs(x):
        return bool(x)
    with torch_internals.no_torch_function(), torch_internals.no_transforms():
        inner = torch_internals.peel(x)
        return any(bool(block.any()) for block in inner.blocks) if type(inner) is Blocks else bool(inner.any())


def chosen(x: torch.Tensor, one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each leaf of `one` where the condition holds, of `other` where it does not."""
    return [torch.where(x, a, b) for a, b in zip(one, other, strict=True)]
