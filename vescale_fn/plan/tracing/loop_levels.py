"""A loop under a transform of `torch.func`, as a loop below it, over what the transform wraps.

As in JAX: `vmap` of a loop is a loop of the mapped body, `jvp` of a loop is a loop of the body that carries tangents as well.
Which carried values differ between entries, or have tangents, is found by running the body until no more do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.overrides

from ..._core import torch_internals
from ..._core.arrays.array import is_array, mesh_of, moved, spec_of
from ..._core.base import context, op_arguments
from ..._core.control_flow import leaves as leaves_
from ..._core.control_flow.scan import Repeated
from ..._core.shard_map import body
from . import ended_transforms
from .frame import Unrollable
from .loop_again import Differentiated, Leaves, captured, is_smooth


class Unsettled(Exception):
    """What is carried below a transform changes its layout or type each time."""


@dataclass
class IterationBelow:
    """What one iteration gives, below the transform.

    Attributes:
        leaves: of it.
        above: the same above.
        forms: for each leaf above how it is made of those below.
    """

    leaves: Leaves
    above: Any
    forms: list[Any]


class BelowTransform:
    """The body of a loop, as a function of what a transform wraps; to be used as `scan.Repeated` is.

    Args:
        above: the body.
        xs: what it goes over.
        layer: the transform, which is on.
    """

    def __init__(self, above: Any, xs: Leaves, layer: Any) -> None:
        self.above, self.xs_above, self.layer, self.changes = above, xs, layer, 0
        self.forms = [self.layer.form(x) for x in above.init]
        self.x_forms = [self.layer.form(x) for x in xs]
        with layer.off():
            self.xs = self._below(xs, self.x_forms, 1)
            self.init = self._below(above.init, self.forms, 0)

    @property
    def runs_anywhere(self) -> bool:
        """Whether it can be run when the transform is over: what has a tangent has none then."""
        return self.layer.lasts and self.above.runs_anywhere

    def step(self, carry: Leaves, x: Leaves) -> tuple[IterationBelow, IterationBelow]:
        """One iteration, unchecked."""
        with self.layer.on():
            now, y = self.above.step(self._above(carry, self.forms, 0), self._above(x, self.x_forms, 0))
            forms = [list(map(self.layer.form, one.leaves)) for one in (now, y)]
        goals = forms[0]
        if len(goals) == len(self.forms):
            goals = [a or b for a, b in zip(goals, self.forms)]
        self.y_forms = forms[1]
        rows = [self.layer.parts(x, form, 0) for x, form in zip(y.leaves, forms[1], strict=True)]
        lead = [self.above.leading.get(i) for i, parts in enumerate(rows) for _ in parts]
        self.leading = {i: one for i, one in enumerate(lead) if one is not None}
        return IterationBelow(self._below(now.leaves, goals, 0), now, goals), IterationBelow(
            [part for parts in rows for part in parts], y, forms[1]
        )

    def adapt(self, now: IterationBelow) -> bool:
        """Give the first carry the types that it is to have, and say whether it had others."""
        with self.layer.on():
            changed = self.above.adapt(now.above)
            forms = list(map(self.layer.form, self.above.init))
        if len(now.forms) != len(forms):
            return False
        forms = [a or b for a, b in zip(now.forms, forms)]
        if changed or forms != self.forms:
            self.forms, self.init = forms, self._below(self.above.init, forms, 0)
            return True
        pairs = list(zip(self.init, now.leaves, strict=True))
        if any(x.shape != like.shape or x.dtype != like.dtype for x, like in pairs):
            return False  # `checked` will say so
        different = [leaves_.facts(x) != leaves_.facts(like) for x, like in pairs]
        if any(different):
            if self.changes > 2:
                raise Unsettled
            self.changes += 1
            self.init = [_like(*pair) if differs else pair[0] for pair, differs in zip(pairs, different)]
        return any(different)

    def checked(self, now: IterationBelow) -> Leaves:
        """The leaves of a new carry."""
        with self.layer.on():
            self.above.checked(now.above)
        return now.leaves

    def results_of(self, carried: Leaves, collected: Leaves, count: int, reverse: bool) -> tuple[Leaves, Leaves]:
        """The last carry and what is collected, above the transform, which is on."""
        return self._above(carried, self.forms, 0), self._above(collected, self.y_forms, 1)

    def _below(self, xs: Sequence[torch.Tensor], forms: Sequence[Any], dim: int) -> Leaves:
        return [part for x, form in zip(xs, forms, strict=True) for part in self.layer.parts(x, form, dim)]

    def _above(self, parts: Sequence[torch.Tensor], forms: Sequence[Any], dim: int) -> Leaves:
        found = iter(parts)
        return [self.layer.whole(found, form, dim) for form in forms]


class BelowGradient(BelowTransform):
    """The body of a loop, as a function of what a `grad` of `torch.func` wraps.

    Below it the loop gives its results, and the carry of each iteration. What the transform sees is one Function with these
    results, whose derivative is a loop above it.
    """

    def __init__(self, above: Any, xs: Leaves, layer: Any) -> None:
        self.follows = torch.is_grad_enabled()
        self.moving = self.follows and any(layer.followed(x) is not None for x in (*above.init, *xs))
        self.moving_xs = [self.moving and layer.followed(x) is not None for x in xs]
        super().__init__(above, xs, layer)

    def step(self, carry: Leaves, x: Leaves) -> tuple[IterationBelow, IterationBelow]:
        if self.layer.is_over:
            return self._values(carry, x)
        with self.layer.on(), torch.set_grad_enabled(self.follows), Watching(self.layer) as seen:
            start = torch_internals.autograd_count()
            self.given = self._above(carry, self.forms, 0)
            self.cut = self._above(x, self.x_forms, 0)
            for leaf, moves in (*zip(self.given, map(is_smooth, self.given)), *zip(self.cut, self.moving_xs)):
                if self.moving and moves:
                    torch_internals.begin_following(leaf)
            now, y = self.above.step(self.given, self.cut)
            self.results = [*now.leaves, *y.leaves]
            self.begins = self.follows and not self.moving and any(x.requires_grad for x in self.results)
            self.captured = self._captured(start, seen.found) if self.moving else []
            more = self.given if self.moving else []
        self.y_forms, self.leading = [True for _ in y.leaves], self.above.leading
        forms = [True for _ in now.leaves]
        rows = [*y.leaves, *more]
        return (
            IterationBelow(self._below(now.leaves, forms, 0), now, forms),
            IterationBelow(self._below(rows, [True] * len(rows), 0), y, self.y_forms),
        )

    def _values(self, carry: Leaves, x: Leaves) -> tuple[IterationBelow, IterationBelow]:
        """One iteration when the transform is over: its values alone, which whoever runs it follows."""
        with ended_transforms.Instead():
            now, y = self.above.step(carry, x)
        leaves, rows = (list(map(ended_transforms.now, leaves)) for leaves in (now.leaves, y.leaves))
        more = carry if self.moving else []
        return IterationBelow(leaves, now, [True for _ in leaves]), IterationBelow([*rows, *more], y, self.y_forms)

    @property
    def runs_anywhere(self) -> bool:
        """Whether it can be run when the transform is over: other transforms within it would come back in another place, and of
        a `shard_map` body nothing is known of what has become of its values."""
        within = self.above
        return context.body() is None and (
            type(within) is Repeated or (type(within) is BelowGradient and within.runs_anywhere)
        )

    def adapt(self, now: IterationBelow) -> bool:
        begins, self.moving = self.begins, self.moving or self.begins
        with self.layer.on():
            begins |= body.taken_in(self.captured or ())
        return super().adapt(now) or begins

    def checked(self, now: IterationBelow) -> Leaves:
        if self.captured is None or (self.moving and not self.above.runs_anywhere):
            raise Unsettled
        if self.layer.is_over:
            self.above.checked(now.above)
            return now.leaves
        return super().checked(now)

    def results_of(self, carried: Leaves, collected: Leaves, count: int, reverse: bool) -> tuple[Leaves, Leaves]:
        outs = self._above([*carried, *collected], [True] * (len(carried) + len(collected)), 0)
        if self.moving and self.captured is not None:
            likes = [*self.results, *self.given]
            call = Differentiated(
                self.above,
                list(self.above.init),
                self.xs_above,
                self.given,
                self.cut,
                likes,
                self.captured,
                count,
                reverse,
                self.layer,
            )
            carries = outs[len(self.results) :]

            def back(kept: Any, cotangents: Any) -> Any:
                if not (self.layer.is_on or (self.layer.is_over and self.runs_anywhere)):
                    raise Unrollable
                return call.differentiable(cotangents, kept[: len(call.moved_xs)], kept[len(call.moved_xs) :])

            outs = list(self.layer.apply(outs, [*call.moved_xs, *carries], back, *call.inputs))
        return outs[: len(carried)], outs[len(carried) : len(self.results)]

    def _captured(self, start: int, seen: Sequence[torch.Tensor]) -> Leaves | None:
        """The tensors from outside that the transform follows into the results; None where one of them was not seen."""
        return captured(self.results, start, seen, [*self.given, *self.cut])


class Watching(torch.overrides.TorchFunctionMode):
    """Notes what a transform follows of what torch's functions are given, and of what a body may give them instead."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.found = layer, [x for x in map(layer.followed, body.remembered()) if x is not None]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = (self.layer.followed(x) for x in op_arguments.tensors_in(args, kwargs))
        self.found += [x for x in found if x is not None]
        return func(*args, **kwargs)


def _like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`x`, of the layout and type of `like`: a transform's own dim, and tangents, may have any."""
    if is_array(like):
        return moved(x, mesh_of(like), spec_of(like), "a carry keeps its layout")
    if is_array(x):
        raise Unsettled
    return leaves_.varied(x, leaves_.facts(like)[3].varying)
