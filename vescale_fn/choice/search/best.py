"""The best choices of a program, in the memory that there is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..._core.base.errors import VfnError
from ..._core.base.messages import report
from ...plan.ir.memory_use import bytes_text
from .held import HeldBytes, held
from .highs import Deadline, OutOfTime
from .options import NONE
from .program import Program
from .solver import Choices

SECONDS = 60.0  # that all solutions of a search have
_MOMENTS = 20  # that are weighed to tell the least memory
_OTHER = 0.01  # of the bytes of the arguments: what the next best layouts place differently at least


class Best(NamedTuple):
    """The choices that a search found.

    Attributes:
        chosen: of each site the number of its option.
        seconds: what they take.
        bytes: the most that a rank holds.
        relaxed: whether the linear relaxation gave them, without a branch.
        proven: whether there are no better ones.
    """

    chosen: list[int]
    seconds: float
    bytes: float
    relaxed: bool
    proven: bool


class NothingFits(VfnError):
    """No layout needs as little memory as there is."""


def best(made: Program, memory: float | None, candidates: int = 1, deadline: Deadline | None = None) -> list[Best]:
    """The best choices of a program. Where time ends, those that were found by then.

    Raises:
        NothingFits: in the memory.
        OutOfTime: nothing was found by then.
    """
    deadline = deadline or Deadline(SECONDS)
    choices, holds = Choices(made), held(made)
    found: list[Best] = []
    while len(found) < candidates:
        try:
            one = _fitting(choices, holds, memory, deadline)
        except OutOfTime:
            if found:
                break
            raise
        if one is None:
            break
        found.append(one)
        inputs = _large_inputs(made)
        choices.forbid(one.chosen, inputs or range(len(made.sites)))
    if not found:
        raise NothingFits(report("auto", *_does_not_fit(made, holds, memory or 0.0, deadline)))
    return found


def _fitting(choices: Choices, holds: HeldBytes, memory: float | None, deadline: Deadline) -> Best | None:
    """The best choices that fit: where too much is held at a moment, that moment is bounded, and all is solved again, until
    all fits or nothing does. A solver keeps bounds but for its tolerance: one that is exceeded is lowered by as much."""
    bounds: dict[int, float] = {}
    while (one := choices.solve(deadline)) is not None:
        moments = holds.by_moment(one.chosen)
        moment = int(moments.argmax())
        peak = float(moments[moment])
        if memory is None or peak <= memory:
            return Best(one.chosen, one.seconds, peak, one.relaxed, one.proven)
        bounds[moment] = bounds[moment] - 2 * (peak - memory) if moment in bounds else memory
        choices.bound(*holds.row(moment), bounds[moment])
    return None


def _large_inputs(made: Program) -> list[int]:
    """The sites of arguments that are at least a hundredth of all."""
    inputs = [site for site in made.sites if site.of is not None and site.of.is_input and site.outs[0] is not None]
    sizes = {
        site.number: site.count * float(np.prod(site.outs[0].sizes)) * site.of.outs[0].element_size()  # type: ignore[union-attr]
        for site in inputs
    }
    return [n for n, size in sizes.items() if size >= _OTHER * sum(sizes.values())]


def _does_not_fit(made: Program, holds: HeldBytes, memory: float, deadline: Deadline) -> tuple[str, list[str], str]:
    """By how much the least that is held exceeds the memory."""
    peak = least_peak(made, holds, deadline)
    what = f"no layout on {dict(made.moves.axes)} needs as little as {bytes_text(int(memory))}"
    rows = [f"the least that was found is {bytes_text(int(peak))}, {bytes_text(int(peak - memory))} more"]
    return what, rows, f"memory={bytes_text(int(peak))!r}, more ranks, or vfn.remat around layers"


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
