"""The derivative of a choice as a choice that can be differentiated in turn: each branch is run anew, and differentiated."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..._core import torch_internals
from ..._core.base import context
from ..._core.control_flow.cond import Choice
from .loop_again import Leaves, around, as_cotangents, for_a_derivative, gradients, refuse_others


class ChoiceAgain:
    """A choice, of which autograd follows some results.

    Args:
        chosen: what is chosen between, a `cond.Choice`.
        outs: what the branches give.
        inputs: what they use that autograd follows.

    Attributes:
        can_run: whether a branch can be run once more.
    """

    def __init__(self, chosen: Any, outs: Sequence[Any], inputs: Leaves) -> None:
        self._chosen, self._outs, self._inputs, self.around = chosen, outs, inputs, around()
        self.can_run = chosen.runs_anywhere

    def derivative(self, cotangents: Sequence[torch.Tensor | None]) -> Choice:
        """What is chosen between for the cotangents of the inputs.

        Args:
            cotangents: of the results, None where nothing comes back.
        """
        likes = self._outs[0].leaves
        at = [i for i, ct in enumerate(cotangents) if ct is not None]
        cts = as_cotangents([cotangents[i] for i in at], [likes[i] for i in at])
        branches = [functools.partial(self._of_one, i, at) for i in range(len(self._outs))]
        return Choice(branches, tuple(cts), "cond", self._chosen.names)

    def _of_one(self, i: int, at: Sequence[int], *cts: torch.Tensor) -> Leaves:
        with torch.enable_grad(), context.setting(keeps_all=True), for_a_derivative():
            start = torch_internals.autograd_count()
            leaves = self._chosen.again(i, self._outs)
            refuse_others(leaves, start, self._inputs, [])
            pairs = [(leaves[place], ct) for place, ct in zip(at, cts, strict=True)]
            found = gradients([pair for pair in pairs if pair[0].requires_grad], [], self._inputs, True)
            return as_cotangents(found, self._inputs)
