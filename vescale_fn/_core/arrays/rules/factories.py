"""How factories shard (`zeros_like`, `new_ones`): results of the operand's shape take its layout, others are replicated."""

from __future__ import annotations

from dataclasses import replace

import torch

from .rule import Call, Rule, none, same


def like(call: Call) -> Rule:
    """A new tensor of the argument's shape, whatever is in it."""
    return Rule((same(call.tensors[0].shape),), (same(call.outs[0]),), shape_only=(0,))


def like_primal(call: Call) -> Rule | None:
    """Zeros that a tangent is copied to, where its memory is not laid out as its primal's: they are sharded like the primal."""
    tangent, primal = call.tensors
    if call.outs[0] != primal.shape:
        return None
    op = lambda tangent, primal, **_: torch.zeros_like(primal, dtype=tangent.dtype)
    return Rule((none(tangent.shape), same(primal.shape)), (same(primal.shape),), shape_only=(0, 1), op=op)


def fill(call: Call) -> Rule:
    """The argument's layout, whatever is in it; the value is one number."""
    return Rule((same(call.tensors[0].shape), *((),) * (len(call.tensors) - 1)), (same(call.tensors[0].shape),))


def new(call: Call) -> Rule:
    """A new tensor of a shape of its own: whole on every rank. For a cotangent that is to be written autograd makes one of
    the same shape without values: it is laid out like the other."""
    if call.name == "new_empty_strided" and call.outs[0] == call.tensors[0].shape:
        return replace(like(call), op=lambda x, size, stride, **options: torch.ops.aten.empty_like(x, **options))
    return Rule(tuple(none(t.shape) for t in call.tensors), (none(call.outs[0]),), shape_only=(0,))
