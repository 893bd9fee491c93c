"""Bodies of one call: what each uses from outside, as placeholders that all of them have in one order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.arrays.array import is_array
from ..._core.distributed.blocks import Blocks, parts
from ..ir.nested import Nested
from . import leaves as leaves_
from .frame import Frame
from .loop_again import Leaves
from .loop_calls import rebuilt

Column = dict[int, fx.Node]  # by the number of a body, what it has of something
Uses = dict[int, tuple[Any, Column]]  # by its id, what is used, with the placeholders for it


def uses(frames: Sequence[Frame], places: Iterable[Sequence[fx.Node]]) -> Uses:
    """What bodies that were recorded in these frames use from outside, for which they have these placeholders."""
    found: Uses = {}
    for i, (frame, row) in enumerate(zip(frames, places, strict=True)):
        of = dict(zip(frame.places, frame.constants, strict=True))
        for place in row:
            found.setdefault(id(of[place]), (of[place], {}))[1][i] = place
    return found


def given(columns: Iterable[Column], i: int) -> list[fx.Node]:
    """What becomes the placeholders of a body: its own, and for what only others have theirs."""
    return [column[i] if i in column else next(iter(column.values())) for column in columns]


def columns(used: Uses) -> list[Column]:
    """The placeholders for what is used."""
    return [column for _, column in used.values()]


def recorded_call(
    recorder: Any, step: Nested, args: Sequence[fx.Node], used: Uses, vals: list[Any]
) -> tuple[fx.Node, list[Any]]:
    """Record a call with bodies, and give it and stand-ins of its results.

    Args:
        args: what it is given before what its bodies use from outside.
        vals: what its results are like.
    """
    with torch_internals.no_torch_function():
        outer = [recorder.outer(x) for x, _ in used.values()]
        for x, column in zip(outer, columns(used), strict=True):
            if any("alike" in place.meta for place in column.values()):
                x.meta["alike"] = True
        return recorder.called(step, (*args, *outer), [recorder.fake_like(val) for val in vals])


class OneOfEach:
    """What stands in one place in several bodies: its plain tensors, as many of each body.

    Args:
        leaves: of the bodies; None of one that has nothing there.
    """

    def __init__(self, leaves: Sequence[torch.Tensor | None]) -> None:
        self.like: Any = next(x for x in leaves if x is not None)
        blocks = [x.blocks for x in leaves if type(x) is Blocks]
        first: dict[Any, int] = {}  # of the ranks that hold the same in every body
        self.holders = [first.setdefault(tuple(map(id, row)), i) for i, row in enumerate(zip(*blocks))]

    @property
    def count(self) -> int:
        """How many plain tensors there are."""
        return leaves_.count_of(self.like) if is_array(self.like) or not self.holders else len(set(self.holders))

    def plain(self, x: torch.Tensor) -> Leaves:
        """The plain tensors of one body."""
        if is_array(x) or not self.holders:
            return leaves_.plain_of(x)
        return [x.blocks[i] if type(x) is Blocks else x for i in dict.fromkeys(self.holders)]

    def of(self, found: Iterator[torch.Tensor]) -> torch.Tensor:
        """What the call gives there, of the next plain tensors."""
        if is_array(self.like) or not self.holders:
            return rebuilt(self.like, found)
        made = {i: next(found) for i in dict.fromkeys(self.holders)}
        return Blocks([made[i] for i in self.holders])

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, with a block of its own for each rank that has one of its own in another body."""
        if is_array(x) or len(set(self.holders)) <= len(set(map(id, parts(x)))):
            return x
        return Blocks([block.clone() for _, block in zip(self.holders, itertools.cycle(parts(x)))])
