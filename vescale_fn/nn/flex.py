"""`torch.nn.attention.flex_attention` of arrays and in bodies: as the ops that it consists of, which shard as any op."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from .._core import torch_internals
from .._core.arrays.array import is_array, mesh_of, moved_as_one, spec_of
from .._core.base import context
from .._core.base.errors import ReshardError, TransformError
from .._core.base.messages import described, report
from .._core.distributed.blocks import Blocks
from .._core.sharding.spec import from_split_axes, split_axes


@torch_internals.not_compiled
def _flex_attention(
    by_kernel: Any,
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """By torch's kernel on plain tensors. Else by ops: scores are made, and kept for the gradient.

    Indices of batch and heads are those of the whole array, or in a body those of the rank's block. Keys and values of a
    split sequence are gathered.
    """
    tensors = [x for x in (query, key, value) if isinstance(x, torch.Tensor)]
    read = [*tensors, *_held(score_mod, getattr(block_mask, "mask_mod", None))]
    ours = any(is_array(x) or isinstance(torch_internals.peel(x), Blocks) for x in read)
    watched = context.body() is not None or torch_internals.watched()
    no_kernel = any(x.device.type == "cpu" and x.requires_grad for x in tensors)  # torch has a gradient on GPUs alone
    if not (ours or watched or no_kernel):
        return by_kernel(query, key, value, score_mod, block_mask, *args, **kwargs)
    if missing := torch_internals.missing_of_flex_attention():
        raise TransformError(
            report(
                "flex_attention",
                f"torch {torch.__version__} has no {missing[0]}, by which it is kept from its kernel",
                fix="a release of torch that is tested, 2.11 to 2.15; or vfn.nn.attention",
            )
        )
    if all(map(is_array, (key, value))):
        key, value = _with_whole_sequence(key, value)
    return torch_internals.flex_attention_in_ops(query, key, value, score_mod, block_mask, *args, **kwargs)


def _with_whole_sequence(*xs: Any) -> list[Any]:
    """Keys and values, the ranks' parts of the sequence put together."""
    rows = [split_axes(spec_of(x), x.ndim) for x in xs]
    if not any(row[2] for row in rows):
        return list(xs)
    whole = [from_split_axes([*row[:2], (), *row[3:]]) for row in rows]
    if context.is_strict():
        raise ReshardError(
            report(
                "flex_attention",
                "strict: it needs the whole sequence of keys and values, of which ranks have parts",
                [f"{name} is {described(x)}" for name, x in zip(("key", "value"), xs)],
                f"key, value = vfn.with_sharding((key, value), {tuple(whole)!r}) before it, or vfn.nn.attention, by which "
                "ranks pass their parts on",
            )
        )
    return moved_as_one(xs, mesh_of(xs[0]), whole, "flex_attention needs the whole sequence of keys and values")


def _held(*functions: Any) -> list[torch.Tensor]:
    """The tensors that functions read by names of theirs, or functions that these close over."""
    todo, found = list(functions), {}
    while todo:
        f = todo.pop()
        if isinstance(f, torch.Tensor):
            found[id(f)] = f
        elif isinstance(f, functools.partial):
            todo += [f.func, *f.args, *f.keywords.values()]
        elif isinstance(f, types.FunctionType) and id(f) not in found:
            found[id(f)] = f
            todo += [cell.cell_contents for cell in f.__closure__ or () if cell != types.CellType()]
            todo += [x for name in f.__code__.co_names if isinstance(x := f.__globals__.get(name), torch.Tensor)]
    return [x for x in found.values() if isinstance(x, torch.Tensor)]


torch_internals.intercept_flex_attention(_flex_attention)
