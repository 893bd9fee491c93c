"""A choice, and a loop of unknown length, under a transform of `torch.func`: as such below it, over what the transform wraps.

As in JAX: `vmap` of a choice by one value is a choice between mapped branches, `vmap` of a loop goes on as long as the
condition of some entry holds, in which the others keep their carry, and `jvp` carries tangents as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..._core import torch_internals
from ..._core.control_flow import leaves as leaves_
from ..._core.shard_map import body
from .branch_again import ChoiceAgain
from .frame import Unrollable
from .loop_again import Leaves, captured, distinct
from .loop_levels import BelowTransform, IterationBelow, Unsettled, Watching

Within = Callable[[int | None], AbstractContextManager[Any]]  # a branch, by its number, or what is around them


class OutBelow:
    """What a branch gives below the transform, as `leaves`; `above` is the same above."""

    def __init__(self, above: Any) -> None:
        self.above, self.leaves, self.treedef = above, [], above.treedef
        self.start, self.seen = (
            0,
            [],
        )  # of a gradient: autograd's count of nodes before, and what it follows of what was used


class ChoiceBelow:
    """What is chosen between, as functions that give what a transform wraps; to be used as `cond.Choice` is.

    Args:
        above: the choice.
        layer: the transform, which is on.
    """

    def __init__(self, above: Any, layer: Any) -> None:
        self.above, self.layer = above, layer
        self.functions, self.operands, self.names = above.functions, above.operands, above.names

    @property
    def runs_anywhere(self) -> bool:
        """Whether a branch can be run when the transform is over."""
        return self.layer.lasts and self.above.runs_anywhere

    def again(self, i: int, outs: Sequence[OutBelow]) -> Leaves:
        """The leaves of what a branch gives once more."""
        with self.layer.on():
            leaves = self.above.again(i, [out.above for out in outs])
        return self._below(leaves)

    def _below(self, leaves: Leaves) -> Leaves:
        return [part for x, form in zip(leaves, self.forms, strict=True) for part in self.layer.parts(x, form, 0)]

    def __call__(self, i: int) -> OutBelow:
        """What a branch gives."""
        with self.layer.on():
            return OutBelow(self.above(i))

    def agree(self, outs: Sequence[OutBelow], within: Within) -> bool:
        """Give what branches give one type, above and below; and say whether they are to be run again."""

        @contextlib.contextmanager
        def on(i: int | None) -> Iterator[None]:
            with within(i), self.layer.on():
                yield

        again = bool(self.above.agree([out.above for out in outs], within=on))
        rows = []
        for i, out in enumerate(outs):
            with on(i):
                rows.append(list(map(self.layer.form, out.above.leaves)))
        self.forms = [any(column) for column in zip(*rows, strict=True)]
        for i, out in enumerate(outs):
            with within(i):
                out.leaves = self._below(out.above.leaves)
        for column in zip(*(out.leaves for out in outs), strict=True):
            if len({str(leaves_.facts(x)) for x in column}) > 1:
                raise Unsettled
        return again

    def results(self, found: Leaves) -> Leaves:
        """What the call gives, above the transform, which is on."""
        parts = iter(found)
        return [self.layer.whole(parts, form, 0) for form in self.forms]


class ChoiceBelowGradient(ChoiceBelow):
    """What is chosen between, below a `grad` of `torch.func`: that sees one Function, whose derivative is a choice above it.

    Attributes:
        inputs: what the branches use that the transform follows.
    """

    def __init__(self, above: Any, layer: Any) -> None:
        super().__init__(above, layer)
        self.follows, self.inputs = torch.is_grad_enabled(), list[torch.Tensor]()

    def __call__(self, i: int) -> OutBelow:
        with self.layer.on(), torch.set_grad_enabled(self.follows), Watching(self.layer) as seen:
            start = torch_internals.autograd_count()
            out = OutBelow(self.above(i))
        out.start, out.seen = start, seen.found
        return out

    def agree(self, outs: Sequence[OutBelow], within: Within) -> bool:
        again = super().agree(outs, within)
        rows: list[Leaves] = []
        for i, out in enumerate(outs if self.follows else ()):
            with within(i), self.layer.on():
                found = captured(out.above.leaves, out.start, out.seen, [])
            if found is None:
                raise Unsettled
            rows.append(found)
        self.inputs = distinct(rows)
        with within(None), self.layer.on():
            again |= body.taken_in(self.inputs)
        self._again = ChoiceAgain(self.above, [out.above for out in outs], self.inputs)
        if self.inputs and not self._again.can_run:
            raise Unsettled
        return again

    def followed(self, found: Leaves, record: Callable[[Any], Leaves | None]) -> Leaves:
        """What the call gives, above the transform, which is on and follows it; `record` records a choice there."""

        def back(kept: Any, cotangents: Any) -> Any:
            if not self.layer.is_on:
                raise Unrollable
            with self._again.around:
                grads = record(self._again.derivative(cotangents))
            if grads is None:
                raise Unrollable
            return grads

        outs = self.results(found)
        return list(self.layer.apply(outs, [], back, *self.inputs)) if self.inputs else outs


class WhileBelow(BelowTransform):
    """A loop of unknown length, as one of what a transform wraps; to be used as `while_loop.Conditioned` is."""

    def __init__(self, above: Any, layer: Any) -> None:
        super().__init__(above, [], layer)
        self.each = False  # whether entries have conditions of their own

    def holds(self, carry: Leaves) -> Any:
        """The condition of a carry: whether that of some entry holds."""
        with self.layer.on():
            found = self.above.holds(self._above(carry, self.forms, 0))
            if not isinstance(found, torch.Tensor):
                return found
            form = self.layer.form(found)
        self.each = form and self.layer.lasts
        below = self.layer.parts(found, form, 0)[0]
        return (below != 0).any() if self.each else below

    def vary(self, holds: Any) -> bool:
        """Let ranks keep their own carries, and say whether these were others before."""
        with self.layer.on():
            changed = self.above.vary(holds)
        if changed:
            self.init = self._below(self.above.init, self.forms, 0)
        return changed

    def step(self, carry: Leaves, holds: Any) -> Any:  # type: ignore[override]
        """One iteration, unchecked."""
        with self.layer.on():
            above = self._above(carry, self.forms, 0)
            now = self.above.step(above, self.above.holds(above) if self.each else holds)
            forms = list(map(self.layer.form, now.leaves))
        if len(forms) == len(self.forms):
            forms = [a or b for a, b in zip(forms, self.forms)]
        return IterationBelow(self._below(now.leaves, forms, 0), now, forms)

    def results(self, carried: Leaves) -> Leaves:
        """The last carry, above the transform, which is on."""
        return self._above(carried, self.forms, 0)
