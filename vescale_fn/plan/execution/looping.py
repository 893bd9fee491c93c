"""A loop of a plan as a Python function: what it runs for each iteration is the generated code of its body, or of its parts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ..ir.loop import EACH, LAST, STACKED, Sharing, is_used_up, loop_of
from ..ir.rotated_loop import Rotated

Body = Callable[[list[Any]], Sequence[Any]]


class Looping:
    """The function of a loop.

    Args:
        node: its call.
        body: the function of one iteration, which empties the list that it is given.
    """

    def __init__(self, node: fx.Node, body: Body) -> None:
        loop = loop_of(node)
        self.loop, self.body, self.shared = loop, body, Sharing(loop)
        self.consumed = list(map(is_used_up, node.args[loop.carry :]))
        self.order = range(loop.length - 1, -1, -1) if loop.reverse else range(loop.length)
        self.cut = [i for i, kind in enumerate(loop.slices) if kind == STACKED]
        self.places = [self.numbered(kind) for kind in loop.keeps]

    def __call__(self, *args: Any) -> list[Any]:
        run, body = self._begun(args), self.body
        del args
        for i in self.order:
            run.take(i, body(run.given(i)))
        return run.results()

    def _begun(self, args: Sequence[Any]) -> _Run:
        return _Run(self, args)

    def numbered(self, kind: str | tuple[int, ...]) -> dict[int, int] | None:
        """The iterations that are kept along a new dim, with their places there; None where all are listed, or one is kept."""
        if kind in (EACH, LAST):
            return None
        return {i: place for place, i in enumerate(range(self.loop.length) if kind == STACKED else kind)}  # type: ignore


class RotatedLooping(Looping):
    """The function of a loop in parts.

    Args:
        node: its call.
        parts: the functions of the parts that it has.
    """

    def __init__(self, node: fx.Node, *parts: Body) -> None:
        loop: Any = node.target
        super().__init__(node, parts[loop.begins])
        self.begin = parts[0] if loop.begins else None
        self.end = parts[-1] if loop.late else None

    def _begun(self, args: Sequence[Any]) -> _Run:
        return _RotatedRun(self, args)


class _Run:
    """One run of a loop.

    Attributes:
        values: the carry.
        rows: what it goes over, by iterations; of these those are `eaten` that are let go when they were used.
        same: what is the same in all iterations.
        kept: what iterations give besides the carry.
    """

    def __init__(self, how: Looping, args: Sequence[Any]) -> None:
        self.loop, self.shared, self.places = how.loop, how.shared, how.places
        self.values, rows = list(args[: how.loop.carry]), list(args[how.loop.carry : how.loop.given])
        self.rows, self.same = rows, args[how.loop.given :]
        for i in self.shared.enters:
            self.values[i] = self.values[i].clone()
        for i in how.cut:
            rows[i] = rows[i].unbind(0)
        self.eaten = [row for row, eats in zip(rows, how.consumed) if eats and type(row) is list]
        self.kept: list[Any] = [[None] * self.loop.length if kind == EACH else None for kind in self.loop.keeps]

    def given(self, i: int) -> list[Any]:
        """What an iteration is given."""
        values, self.values = self.values, []
        values += [row[i] for row in self.rows]
        for row in self.eaten:
            row[i] = None
        values += self.same
        return values

    def take(self, i: int, outs: Sequence[Any]) -> None:
        """Take what it has given."""
        self.values = list(outs[: self.loop.carry])
        if self.kept:
            self.keep(i, enumerate(outs[self.loop.carry :]))

    def keep(self, i: int, outs: Iterable[tuple[int, Any]]) -> None:
        """Keep some of it, each thing with its place."""
        kept = self.kept
        for j, y in outs:
            kind, places = self.loop.keeps[j], self.places[j]
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

    def results(self) -> list[Any]:
        """What the loop gives."""
        return [x.clone() if i in self.shared.leaves else x for i, x in enumerate(self.values)] + self.kept


class _RotatedRun(_Run):
    """One run of a loop in parts.

    Attributes:
        begun: what was begun for the next iteration.
        left: what the last iteration has left for its end, and which it was; None where nothing is left.
        totals: of the carry, what only the ends of iterations use.
    """

    loop: Rotated

    def __init__(self, how: RotatedLooping, args: Sequence[Any]) -> None:
        super().__init__(how, args)
        self.how = how
        self.totals: Sequence[Any] = [self.values[i] for i in self.loop.totals]
        self.left: tuple[int, Sequence[Any]] | None = None
        self.begun = self.begin(how.order[0])

    def begin(self, i: int) -> Sequence[Any]:
        """Begin an iteration, if there is one."""
        if self.how.begin is None or i not in self.how.order:
            return ()
        return self.how.begin([*[row[i] for row in self.rows], *self.same])

    def given(self, i: int) -> list[Any]:
        values = super().given(i)
        values += self.begun
        self.begun = self.begin(i - 1 if self.loop.reverse else i + 1)
        return values

    def take(self, i: int, outs: Sequence[Any]) -> None:
        count = self.loop.carry + len(self.kept)
        super().take(i, outs[:count])
        self.end()
        if self.how.end is not None:
            self.left = i, outs[count:]

    def keep(self, i: int, outs: Iterable[tuple[int, Any]]) -> None:
        super().keep(i, (one for one in outs if one[1] is not None))  # the rest comes late

    def end(self) -> None:
        """End the iteration that has left something."""
        if self.left is None or self.how.end is None:
            return
        (i, left), self.left = self.left, None
        given, totals = [*self.totals, *left, *self.same], len(self.totals)
        self.totals = left = ()
        outs = self.how.end(given)
        self.totals = outs[:totals]
        late = [place - self.loop.carry for place in self.loop.late[totals:]]
        self.keep(i, zip(late, outs[totals:], strict=True))

    def results(self) -> list[Any]:
        self.end()
        for i, x in zip(self.loop.totals, self.totals, strict=True):
            self.values[i] = x
        return super().results()


def own_row(block: torch.Tensor, turn: torch.Tensor, held: tuple[int, ...]) -> torch.Tensor:
    """Of a block with the entries `held` of a leading dim, the one whose turn it is; where another rank has that, a tensor of
    its shape in which nothing is."""
    i = int(turn)
    place = bisect_left(held, i)
    if held[place : place + 1] == (i,):
        return block[place].contiguous()
    return block.new_empty(()).expand(block.shape[1:])
