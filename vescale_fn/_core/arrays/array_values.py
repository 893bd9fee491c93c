"""The local value of an array in another layout: brought there, whole on every rank, or put back where the array lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import torch_internals
from ..base import op_lines
from ..base.array_notes import notes_of
from ..base.errors import InPlaceError
from ..base.messages import op_text, report
from ..distributed import blocks, value_flow
from ..distributed.blocks import Blocks
from ..distributed.mesh import is_part
from ..sharding.layout import WHOLE, axes_items, layout, spec_for, text, type_text
from ..sharding.spec import P, split_axes
from . import reshard, reshard_plan
from .refusals import OTHER_SHAPE
from .rules.traits import COPY


def reason(func: Any, shape: tuple[int, ...], dtype: torch.dtype, spec: P, target: P, ruled: bool = True) -> str:
    """Why an argument moves, for the log: ``softmax needs dim 1 whole: f32[8,4@tp]``. `ruled`: whether a rule says so."""
    name, value = torch_internals.operator_name(func).split("::")[-1].strip("_"), type_text(shape, dtype, spec)
    name += "" if ruled else " has no rule and"
    before, after = split_axes(spec, len(shape)), split_axes(target, len(shape))
    gathered = [str(d) for d, (a, b) in enumerate(zip(before, after, strict=True)) if a and not b]
    if spec.unreduced - target.unreduced and before == after:
        return f"{name} needs the sum: {value}"
    if gathered and all(a == b for a, b in zip(before, after, strict=True) if b):
        return f"{name} needs dim{'s' * (len(gathered) > 1)} {' and '.join(gathered)} whole: {value}"
    return f"{name} needs {type_text(shape, dtype, target)}: {value}"


def brought(x: Any, target: P, why: str, owned: bool = False) -> Any:
    """The local value of an array, brought to `target`. What a partial value adds up to is remembered until it is written.

    With `owned` the result is nobody else's: it is given away, and may be written.
    """
    local, own = _brought(x, target, why)
    out = local if own or not owned else copied(local)
    if op_lines.listeners:
        value_flow.give(local, out)
    return out


def _brought(x: Any, target: P, why: str) -> tuple[Any, bool]:
    """The local value of an array, brought to `target`, and whether it is nobody else's."""
    mesh, shape = torch_internals.mesh(x), tuple(x.shape)
    steps = reshard_plan.plan(shape, axes_items(mesh), layout(torch_internals.spec(x)), target)
    cell = notes_of(x).sums
    if cell and cell[0] == (torch_internals.version(x), steps):
        return cell[1], False
    if cell is not None and steps and steps[0].kind == "all_reduce" and not target.unreduced and _sees(x):
        return brought(_view_of_sum(x), target, why), False
    out = reshard.run(torch_internals.local(x), shape, mesh, steps, why)
    if cell is not None and steps and steps[0].kind == "all_reduce" and not x.is_inference():
        cell[:] = [(torch_internals.version(x), steps), out]
        return out, False
    return out, True


def _sees(x: Any) -> bool:
    """Whether `x` is a view of all of a partial value, which still lies as it did then."""
    seen = notes_of(x).seen
    return seen is not None and torch_internals.spec(seen[0]) is seen[1]


def _view_of_sum(x: Any) -> Any:
    """A view of a partial value as the same view of what that adds up to, which is known, or is from now on."""
    source, _, func, args, kwargs = notes_of(x).seen  # type: ignore[misc]
    spec = layout(torch_internals.spec(source))
    goal = P(*spec)
    local = brought(source, goal, f"{op_text(func)} of a sum")
    whole = spec_for(torch_internals.mesh(source), goal, source.shape, tuple(source.stride()), source.dtype)
    added = torch_internals.new_dtensor(type(source), local, whole)
    return type(source).redispatch(func, (added, *args), kwargs)


def copied(local: Any) -> Any:
    """A copy of a local value; ranks that share a block share its copy."""
    return blocks.of_each(torch.clone, local)


# --- whole, and back --------------------------------------------------------------------------------------------------


def steps_to_whole(x: Any) -> tuple[reshard_plan.MoveStep, ...]:
    """The steps that make an array whole on every rank."""
    return reshard_plan.plan(
        tuple(x.shape), axes_items(torch_internals.mesh(x)), layout(torch_internals.spec(x)), WHOLE
    )


def the_one(local: Any, mesh: Any) -> Any:
    """What all ranks hold, once: of blocks the first. Where the mesh is only a part of one, they may differ: all of them."""
    return local.blocks[0] if type(local) is Blocks and not is_part(mesh) else local


def whole_tensor(func: Any, x: Any, written: bool, each_rank: bool = False, ruled: bool = True) -> tuple[Any, bool]:
    """An array as one whole tensor with the array's strides, and whether that is a copy.

    Args:
        written: it will be written.
        each_rank: in each rank's own memory, not once for all ranks of a simulated mesh.
        ruled: whether the op has a rule.
    """
    spec, shape = layout(torch_internals.spec(x)), tuple(x.shape)
    steps = steps_to_whole(x)
    local = brought(x, WHOLE, reason(func, shape, x.dtype, spec, WHOLE, ruled)) if steps else torch_internals.local(x)
    one = local if each_rank else the_one(local, torch_internals.mesh(x))
    strided = one.stride() == tuple(x.stride()) or x.numel() == 0 or (0 in x.stride() and not written)
    if strided and not (written and spec != WHOLE):
        return one, bool(steps)  # where it is not a copy, what is written lands in the array's own storage
    return _in_own_memory(one, shape, x.stride()), True


def _in_own_memory(one: Any, shape: Sequence[int], stride: Sequence[int]) -> Any:
    if type(one) is Blocks:
        return Blocks([_in_own_memory(block, shape, stride) for block in one.blocks])
    return torch.empty_strided(shape, stride, dtype=one.dtype, device=one.device).copy_(one)


def put_back(func: Any, x: Any, whole: torch.Tensor) -> None:
    """Put a whole value into the storage of an array, as it lies."""
    mesh = torch_internals.mesh(x)
    if whole.shape != x.shape:
        raise InPlaceError(
            report(
                op_text(func),
                OTHER_SHAPE,
                [f"it is {text(x)}, the result has shape {list(whole.shape)}"],
                "an array of the result's shape, or the op without out=",
            )
        )
    steps = reshard_plan.plan(tuple(x.shape), axes_items(mesh), WHOLE, layout(torch_internals.spec(x)))
    value = reshard.run(whole, tuple(x.shape), mesh, steps, "")
    local = torch_internals.local(x)
    if type(local) is Blocks:
        blocks.run_ranks(COPY, len(local.blocks), (local, value), {}, local)
    elif local is not value:
        local.copy_(value)
