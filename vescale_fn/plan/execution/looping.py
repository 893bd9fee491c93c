"""A loop of a plan as a Python function: what it runs for each iteration is the generated code of its body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ir.loop import EACH, LAST, STACKED, Loop, Sharing


def looping(
    loop: Loop, body: Callable[[list[Any]], Sequence[Any]], consumed: Sequence[bool]
) -> Callable[..., list[Any]]:
    """The function of a loop.

    Args:
        loop: what it is.
        body: the function of one iteration, which empties the list that it is given.
        consumed: for each argument whether nothing else needs it: what was kept of an iteration is let go when it was used.
    """
    order = range(loop.length - 1, -1, -1) if loop.reverse else range(loop.length)
    shared, carried, given = Sharing(loop), loop.carry, loop.given
    cut = [i for i, kind in enumerate(loop.slices) if kind is STACKED]
    stacked = [i for i, kind in enumerate(loop.keeps) if kind is STACKED]
    each = [i for i, kind in enumerate(loop.keeps) if kind is EACH]
    last = [i for i, kind in enumerate(loop.keeps) if kind is LAST]

    def run(*args: Any) -> list[Any]:
        values: list[Any] = list(args[:carried])
        rows, same = list(args[carried:given]), args[given:]
        del args
        for i in shared.enters:
            values[i] = values[i].clone()
        for i in cut:
            rows[i] = rows[i].unbind(0)
        eaten = [row for row, eats in zip(rows, consumed[carried:]) if eats and type(row) is list]
        kept: list[Any] = [[None] * loop.length if kind is EACH else None for kind in loop.keeps]
        for i in order:
            values += [row[i] for row in rows]
            for row in eaten:
                row[i] = None
            values += same
            outs = body(values)
            values = list(outs[:carried])
            for j in each:
                kept[j][i] = outs[carried + j].clone() if j in shared.kept else outs[carried + j]
            for j in stacked:
                y = outs[carried + j]
                if kept[j] is None:
                    kept[j] = torch.empty((loop.length, *y.shape), dtype=y.dtype, device=y.device)
                kept[j][i].copy_(y)
            for j in last:
                kept[j] = outs[carried + j].clone() if j in shared.kept else outs[carried + j]
            del outs
        return [x.clone() if i in shared.leaves else x for i, x in enumerate(values)] + kept

    return run
