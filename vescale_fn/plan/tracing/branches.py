"""Choices while a plan is recorded: `cond` and `switch`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..._core import torch_internals
from ..._core.control_flow.cond import Choice, LayoutsDiffer
from ..._core.local_types import tensor_types
from ..._core.shard_map import body
from .branch_again import ChoiceAgain
from .branch_calls import Branch, BranchCall, derivative
from .branch_levels import ChoiceBelow, ChoiceBelowGradient
from .called import followed
from .frame import Unrecordable, Unrollable
from .loop_levels import Unsettled


def recorded(recorder: Any, index: torch.Tensor, choice: Choice) -> tuple[Any, list[torch.Tensor]] | None:
    """Record a choice as one call.

    Returns:
        The tree of its results and their leaves; None where one is to be taken while recording: a branch reads a value, gives
        another layout than the others, uses something that autograd follows and that nothing has seen, or runs under a
        transform that is not known here.
    """
    return _under_transforms(recorder, recorder.sought(index), choice)


def _under_transforms(recorder: Any, read: list[torch.Tensor], choice: Any) -> tuple[Any, list[torch.Tensor]] | None:
    layer = torch_internals.innermost_layer()
    if layer is None:
        return _recorded(recorder, read, choice)
    if layer is False:
        return None
    below = (ChoiceBelowGradient if hasattr(layer, "followed") else ChoiceBelow)(choice, layer)
    with layer.off():
        try:
            found = _under_transforms(recorder, read, below)
        except Unsettled:
            return None
    if found is None or not isinstance(below, ChoiceBelowGradient):
        return None if found is None else (found[0], below.results(found[1]))

    def above(further: Any) -> list[torch.Tensor] | None:
        recorded = _under_transforms(recorder, read, further)
        return None if recorded is None else recorded[1]

    return found[0], below.followed(found[1], above)


def _recorded(recorder: Any, read: list[torch.Tensor], choice: Any) -> tuple[Any, list[torch.Tensor]] | None:
    while True:
        try:
            branches = [Branch(recorder, choice, i) for i in range(len(choice.functions))]
        except Unrecordable:
            return None
        outs = [branch.out for branch in branches]
        try:
            again = choice.agree(outs, within=functools.partial(_within, recorder, branches))
        except (
            LayoutsDiffer
        ) as why:  # a plan has one layout for what follows; the branch that runs decides it, as in eager
            recorder.reads_for(why.said)
            return None
        call = BranchCall(recorder, choice, read, branches)
        follows = torch.is_grad_enabled() and any(x.requires_grad for out in outs for x in out.leaves)
        inputs = call.followed() if follows else []
        if inputs is None:
            return None
        if not again and not body.taken_in(inputs):
            break
    call.inputs, call.again = inputs, ChoiceAgain(choice, outs, inputs)
    found = followed(call, derivative, _differentiable) if call.inputs else call.forward()
    with torch_internals.no_torch_function():
        for out, like in zip(found, outs[0].leaves, strict=True):
            tensor_types.kept(out, like)
    return outs[0].treedef, found


def _within(recorder: Any, branches: list[Branch], i: int | None) -> contextlib.AbstractContextManager[None]:
    """What is computed with the values of a branch; None: around them."""
    return contextlib.nullcontext() if i is None else recorder.within(branches[i].frame)


def _differentiable(call: BranchCall, cotangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Record the derivative of a choice as a choice, and give the cotangents of its inputs, which autograd follows."""
    if not call.again.can_run or (torch_internals.transforming() and type(call.chosen) is not Choice):
        raise Unrollable  # its branches run under transforms, which those that are active now would be taken for
    with call.again.around:
        found = _under_transforms(call.recorder, call.index, call.again.derivative(cotangents))
    if found is None:
        raise Unrollable
    return found[1]
