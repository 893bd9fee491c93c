"""A loop of a plan as a Python function: what it runs for each iteration is the generated code of its body."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..ir.loop import EACH, LAST, STACKED, Loop, Sharing, loop_of


class Looping:
    """The function of a loop.

    Args:
        node: its call.
        body: the function of one iteration, which empties the list that it is given.
    """

    def __init__(self, node: fx.Node, body: Callable[[list[Any]], Sequence[Any]]) -> None:
        loop = loop_of(node)
        self.loop, self.body, self.shared = loop, body, Sharing(loop)
        self.consumed = list(map(_is_used_up, node.args[loop.carry :]))
        self.order = range(loop.length - 1, -1, -1) if loop.reverse else range(loop.length)
        self.cut = [i for i, kind in enumerate(loop.slices) if kind == STACKED]
        self.places = [self.numbered(kind) for kind in loop.keeps]

    def __call__(self, *args: Any) -> list[Any]:
        loop, carried, body = self.loop, self.loop.carry, self.body
        values: list[Any] = list(args[:carried])
        rows, same = list(args[carried : loop.given]), args[loop.given :]
        del args
        for i in self.shared.enters:
            values[i] = values[i].clone()
        for i in self.cut:
            rows[i] = rows[i].unbind(0)
        eaten = [row for row, eats in zip(rows, self.consumed) if eats and type(row) is list]
        kept: list[Any] = [[None] * loop.length if kind == EACH else None for kind in loop.keeps]
        for i in self.order:
            values += [row[i] for row in rows]
            for row in eaten:
                row[i] = None
            values += same
            outs = body(values)
            values = list(outs[:carried])
            if kept:
                self.keep(kept, i, outs[carried:])
            del outs
        return [x.clone() if i in self.shared.leaves else x for i, x in enumerate(values)] + kept

    def numbered(self, kind: str | tuple[int, ...]) -> dict[int, int] | None:
        """The iterations that are kept along a new dim, with their places there; None where all are listed, or one is kept."""
        if kind in (EACH, LAST):
            return None
        return {i: place for place, i in enumerate(range(self.loop.length) if kind == STACKED else kind)}  # type: ignore

    def keep(self, kept: list[Any], i: int, outs: Sequence[Any]) -> None:
        """Keep what an iteration has given."""
        for j, (y, kind, places) in enumerate(zip(outs, self.loop.keeps, self.places)):
            if places is not None:
                if kept[j] is None:
                    kept[j] = torch.empty((len(places), *y.shape), dtype=y.dtype, device=y.device)
                if i in places:
                    kept[j][places[i]].copy_(y)
                continue
            y = y.clone() if j in self.shared.kept else y
            if kind == EACH:
                kept[j][i] = y
            else:
                kept[j] = y


def own_row(block: torch.Tensor, turn: torch.Tensor, held: tuple[int, ...]) -> torch.Tensor:
    """Of a block with the entries `held` of a leading dim, the one whose turn it is; where another rank has that, a tensor of
    its shape in which nothing is."""
    i = int(turn)
    place = bisect_left(held, i)
    if held[place : place + 1] == (i,):
        return block[place].contiguous()
    return block.new_empty(()).expand(block.shape[1:])


def _is_used_up(x: Any) -> bool:
    """Whether a call is the only one that needs what a loop has kept, which is let go when it was used."""
    return x.target is operator.getitem and isinstance(x.args[0].target, Loop) and len(x.users) == 1
