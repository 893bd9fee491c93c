"""Which of the cuts in a program a pipeline uses."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from .._core.base.errors import TransformError
from .._core.base.messages import count_text, report, short
from .._core.distributed.collectives import Collective
from .ir.costs import rates, seconds
from .stages import B, CutStep, F, Stages, W, cut_into

Used = Callable[[int], bool]


def chosen(
    step: CutStep,
    places: Sequence[Any],
    cuts: Any,
    placement: Sequence[int],
    homes: Mapping[fx.Node, Sequence[int]],
    agreed: Callable[[Sequence[float]], Sequence[float]],
) -> Stages:
    """The tasks of a step in so many stages.

    Args:
        step: to be cut.
        places: the calls of `vfn.cut` in it.
        cuts: "balanced", or the numbers or the names of the cuts to use.
        placement: for each stage that there is to be the place of its rank.
        homes: of inputs that some ranks alone have, their places. Balanced stages use what their ranks have, if that can be:
            also for other arguments than those for which the parameters were laid out so, and without gradients.
        agreed: makes the times of this rank those of all ranks, which are to choose the same cuts.

    Raises:
        TransformError: the program has too few cuts, or these do not make so many stages.
    """
    count = len(placement)
    if cuts == "balanced":
        every = cut_into(step, lambda number: True)
        if every.count < count:
            needed = f"{count_text(count, 'stage')} need {count_text(count - 1, 'cut')}, one behind the other"
            fix = "x = vfn.cut(layer(x)) behind each layer; or fewer stages"
            raise TransformError(report("pipeline", f"{needed}, and the function has {every.count - 1}", fix=fix))
        behind = every.behind
        times = agreed(_times(step, every))
        firsts = balanced(times, count, _fitting(every, placement, homes)) or balanced(times, count)
        assert firsts is not None
        return cut_into(step, lambda number: behind.get(number) in firsts)
    numbers = _numbers(places, cuts)
    found = cut_into(step, numbers.__contains__)
    if found.count != count:
        what = f"the cuts {short(cuts)} make {count_text(found.count, 'stage')}, and the schedule has {count}"
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
    """The seconds that each stage's tasks are predicted to take, without those that a collective takes however small it is: one
    that sums the loss would outweigh the layers of a small model."""
    of = rates(step.graph)
    of = replace(of, collective=of.call)
    tasks = [[node for kind in (F, B, W) for node in stages.tasks[kind, s]] for s in range(stages.count)]
    if not step.of_ranks:
        return [sum(seconds(node, of) for node in nodes) for nodes in tasks]
    takes = lambda node: of.call if isinstance(node.target, Collective) else seconds(node, of)
    by_rank = [[sum(takes(node) for node in nodes if node in own) for nodes in tasks] for own in step.of_ranks]
    return [max(column) for column in zip(*by_rank, strict=True)]


def _fitting(stages: Stages, placement: Sequence[int], homes: Mapping[fx.Node, Sequence[int]]) -> list[set[int]]:
    """For each stage of a program that is cut everywhere those of the placement that have what it uses."""
    found = [set(range(len(placement))) for _ in range(stages.count)]
    for (_, s), nodes in stages.tasks.items():
        for home in (homes[x] for node in nodes for x in node.all_input_nodes if x in homes):
            found[s] &= {i for i, place in enumerate(placement) if place in home}
    return found


def balanced(times: Sequence[float], count: int, fits: Sequence[Container[int]] | None = None) -> frozenset[int] | None:
    """Where to begin each of so many runs of neighbours, but the first, for the longest run to be as short as it can be.

    Args:
        fits: for each neighbour the runs, by their numbers, that it may be of; by default all. None if there are no such runs.
    """
    total = [0.0]
    for time in times:
        total.append(total[-1] + time)
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        0: (0.0, ())
    }  # of the first so many: the longest run, and the begins
    for run in range(count):
        first, longer = 0, {}
        for end in range(1, len(times) + 1):
            if fits is not None and run not in fits[end - 1]:
                first = end
            found = [
                (max(longest, total[end] - total[begin]), (*begins, begin))
                for begin, (longest, begins) in best.items()
                if first <= begin < end
            ]
            if found:
                longer[end] = min(found)
        best = longer
    return frozenset(best[len(times)][1][1:]) if len(times) in best else None
