"""The best choices of a program, in the memory that there is, and the best others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..._core.base.errors import VfnError
from ..._core.base.messages import report
from ...plan.ir.memory_use import bytes_text
from .held import HeldBytes, held
from .highs import Deadline, OutOfTime
from .options import NONE
from .others import Best, ChoiceSolver, others
from .priced import Priced
from .program import Program
from .solver import Choices

SECONDS = 60.0  # that all solutions of a search have
_MOMENTS = 20  # that are weighed to tell the least memory


class NothingFits(VfnError):
    """No layout needs as little memory as there is."""


def best(made: Program, memory: float | None, candidates: int = 1, deadline: Deadline | None = None) -> list[Best]:
    """The best choices of a program, and the best others. Where time ends, those that were found by then.

    Raises:
        NothingFits: in the memory.
        OutOfTime: nothing was found by then.
    """
    found = BestChoices(made, memory, deadline or Deadline(SECONDS))
    return [found.best, *found.others(candidates - 1)]


class BestChoices:
    """The best choices of a program, and the way to others.

    Args:
        made: the program.
        memory: that a rank has; None: any.
        deadline: of all of it.

    Raises:
        NothingFits: in the memory.
        OutOfTime: nothing was found by then.
    """

    def __init__(self, made: Program, memory: float | None, deadline: Deadline) -> None:
        choices, holds, self._made = Choices(made), held(made), made
        priced = Priced(choices, holds, memory, deadline) if memory is not None and choices.is_large else None
        self._way: ChoiceSolver = priced or _Exact(choices, holds, memory, deadline)
        first = (priced or self._way).first()
        if first is None:
            least = priced.smallest if priced is not None else least_peak(made, holds, deadline)
            raise NothingFits(_does_not_fit(made, memory or 0.0, least, found=priced is not None))
        self.best = first

    def others(self, count: int, within: float = math.inf) -> list[Best]:
        """The best others, the fastest first: so many at most, which take no longer than `within`."""
        return others(self._made, self._way, self.best, count, within)


class _Exact:
    """The best choices, in the memory, if there is a bound: where too much is held at a moment, that moment is bounded, and all
    is solved again, until all fits or nothing does."""

    def __init__(self, choices: Choices, holds: HeldBytes, memory: float | None, deadline: Deadline) -> None:
        self.choices, self._holds, self._memory, self._deadline = choices, holds, memory, deadline
        self._bounds: dict[int, float] = {}

    def first(self, near: bool = False) -> Best | None:
        """The best choices that fit. A solver keeps bounds but for its tolerance: what exceeds one lowers it by as much."""
        while (one := self.choices.solve(self._deadline, near)) is not None:
            moments = self._holds.by_moment(one.chosen)
            moment, memory = int(moments.argmax()), self._memory
            peak = float(moments[moment])
            if memory is None or peak <= memory:
                return Best(one.chosen, one.seconds, peak, one.relaxed, one.proven, one.least)
            old = self._bounds.get(moment)
            self._bounds[moment] = memory if old is None else old - 2 * (peak - memory)
            self.choices.bound(*self._holds.row(moment), self._bounds[moment])
        return None

    def bound(self, without: Sequence[int], most: float) -> float:
        """As of `others.ChoiceSolver`."""
        with self.choices.without(without):
            return self.choices.bounded(self._deadline, most)

    def without(self, columns: Sequence[int]) -> Best | None:
        """As of `others.ChoiceSolver`."""
        with self.choices.without(columns):
            return self.first(near=True)


def _does_not_fit(made: Program, memory: float, least: float, found: bool) -> str:
    """By how much the least that is held exceeds the memory; `found`: of all that was tried, there may be less."""
    none = "no layout" + " was found" * found
    what = f"{none} on {dict(made.moves.axes)} that needs" if found else f"{none} on {dict(made.moves.axes)} needs"
    more = f", {bytes_text(int(least - memory))} more" if least > memory else ""
    rows = [f"the least that was found is {bytes_text(int(least))}{more}"]
    fix = f"memory={bytes_text(int(least))!r}, more ranks, or vfn.remat around layers"
    return report("auto", f"{what} as little as {bytes_text(int(memory))}", rows, fix)


def least_peak(made: Program, holds: HeldBytes, deadline: Deadline) -> float:
    """The least that choices need at their worst moment, or near it: as many moments are weighed as time allows."""
    choices = Choices(made)
    moments = holds.by_moment([0] * len(made.sites))
    peak = unit = float(moments.max())
    worst = choices.only_worst()
    weighed = set[int]()
    while (moment := int(moments.argmax())) not in weighed and len(weighed) < _MOMENTS:
        weighed.add(moment)
        choices.weigh(*holds.row(moment), worst, unit)
        try:
            one = choices.solve(deadline)
        except OutOfTime:
            break
        if one is None:
            break
        moments = holds.by_moment(one.chosen)
        peak = min(peak, float(moments.max()))
    return peak


def floor(made: Program) -> tuple[float, float]:
    """What all choices of a program take and hold at least: the fastest and the smallest option of each site, by itself."""
    seconds = sum(site.count * min(option.seconds for option in site.options) for site in made.sites)
    ranks, holds, total = float(np.prod([*made.moves.axes.values()])), held(made), np.zeros(len(made.step.calls))
    for (n, part), live in holds.values.items():
        options = made.sites[n].options
        if (n, part) in holds.early:  # it moves at once
            least = holds.bytes(n, part, (NONE,) * len(made.moves.axes)) / ranks
        else:
            least = min(holds.bytes(n, part, lies) for lies in {option.outs[part] for option in options})
        total += (live - holds.gaps.get((n, part), 0.0)) * least
    return seconds, float(total.max(initial=0.0))
