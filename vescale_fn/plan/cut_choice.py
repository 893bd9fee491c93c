"""Which of the cuts in a program a pipeline uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._core.base.errors import TransformError
from .._core.base.messages import count_text, report, short
from .ir.costs import rates, seconds
from .stages import B, CutStep, F, Stages, W, cut_into

Used = Callable[[int], bool]


def chosen(step: CutStep, places: Sequence[Any], cuts: Any, count: int) -> Stages:
    """The tasks of a step in so many stages.

    Args:
        step: to be cut.
        places: the calls of `vfn.cut` in it.
        cuts: "balanced", or the numbers or the names of the cuts to use.
        count: how many stages there are to be.

    Raises:
        TransformError: the program has too few cuts, or these do not make so many stages.
    """
    if cuts == "balanced":
        every = cut_into(step, lambda number: True)
        if every.count < count:
            needed = f"{count_text(count, 'stage')} need {count_text(count - 1, 'cut')}, one behind the other"
            fix = "x = vfn.cut(layer(x)) behind each layer; or fewer stages"
            raise TransformError(report("pipeline", f"{needed}, and the function has {every.count - 1}", fix=fix))
        behind = every.behind
        firsts = balanced(_times(step, every), count)
        return cut_into(step, lambda number: behind.get(number) in firsts)
    numbers = _numbers(places, cuts)
    found = cut_into(step, numbers.__contains__)
    if found.count != count:
        what = f"the cuts {short(cuts)} make {found.count} stages, and the schedule has {count}"
        raise TransformError(report("pipeline", what, fix=f"{count_text(count - 1, 'cut')}, one behind the other"))
    return found


def _numbers(places: Sequence[Any], cuts: Sequence[Any]) -> frozenset[int]:
    """The numbers of these cuts."""
    known = {place.name: i for i, place in enumerate(places) if place.name is not None}
    wrong = [x for x in cuts if not (x in known if isinstance(x, str) else 0 <= x < len(places))]
    if wrong:
        named = [f"the function has {len(places)} cuts" + (f", with the names {', '.join(known)}" if known else "")]
        raise TransformError(report("pipeline", f"there is no cut {', '.join(map(short, wrong))}", named))
    return frozenset(i for i, place in enumerate(places) if i in cuts or place.name in cuts)


def _times(step: CutStep, stages: Stages) -> list[float]:
    """The seconds that each stage's tasks are predicted to take."""
    of = rates(step.graph)
    return [sum(seconds(node, of) for kind in (F, B, W) for node in stages.tasks[kind, s]) for s in range(stages.count)]


def balanced(times: Sequence[float], count: int) -> frozenset[int]:
    """Where to begin each of so many runs of neighbours, but the first, for the longest run to be as short as it can be."""
    total = [0.0]
    for time in times:
        total.append(total[-1] + time)
    best = {0: (0.0, ())}  # of the first so many: the longest run, and where the runs begin
    for _ in range(count):
        best = {
            end: min(
                (max(longest, total[end] - total[begin]), (*begins, begin))
                for begin, (longest, begins) in best.items()
                if begin < end
            )
            for end in range(1, len(times) + 1)
            if any(begin < end for begin in best)
        }
    return frozenset(best[len(times)][1][1:])
