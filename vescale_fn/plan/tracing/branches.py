"""Choices while a plan is recorded: `cond` and `switch`."""

from __future__ import annotations

from typing import Any

import torch

from ..._core import torch_internals
from ..._core.control_flow.cond import Choice
from ..._core.local_types import tensor_types
from .branch_calls import Branch, BranchCall, derivative
from .called import followed
from .frame import Unrecordable


def recorded(recorder: Any, index: torch.Tensor, chosen: Choice) -> tuple[Any, list[torch.Tensor]] | None:
    """Record a choice as one call.

    Returns:
        The tree of its results and their leaves; None where a branch reads a value, or uses something that autograd follows and
        that nothing has seen: then one of them has to be taken while recording.
    """
    try:
        branches = [Branch(recorder, chosen, i) for i in range(len(chosen.functions))]
    except Unrecordable:
        return None
    chosen.agree([branch.out for branch in branches], within=lambda i: recorder.within(branches[i].frame))
    call = BranchCall(recorder, chosen, recorder.sought(index), branches)
    if torch.is_grad_enabled() and any(x.requires_grad for branch in branches for x in branch.out.leaves):
        inputs = call.followed()
        if inputs is None:
            return None
        call.inputs = inputs
    outs = followed(call, derivative) if call.inputs else call.forward()
    with torch_internals.no_torch_function():
        for out, like in zip(outs, branches[0].out.leaves, strict=True):
            tensor_types.kept(out, like)
    return branches[0].out.treedef, outs
