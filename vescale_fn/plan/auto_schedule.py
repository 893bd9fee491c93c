"""The schedule of a pipeline whose stages are cut: the fastest that is found for what they are predicted to take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import fx

from .. import schedules
from .ir.costs import rates, seconds
from .stages import B, F, Stages, W


def found_for(
    graph: fx.Graph, stages: Stages, ranks: int, count: int, agreed: Callable[[Sequence[float]], Sequence[float]]
) -> schedules.Schedule:
    """A schedule of one stage a rank that holds no more than 1F1B does on the first one.

    Args:
        graph: of the step.
        stages: cut out of it.
        ranks, count: of ranks and of microbatches.
        agreed: makes the times of this rank those of all ranks, which are to find the same schedule.
    """
    of, n = rates(graph), stages.count
    mine = [sum(seconds(node, of) for node in stages.tasks[kind, s]) for kind in (F, B, W) for s in range(n)]
    times = agreed(mine)
    return _fastest(schedules.Costs(times[:n], times[n : 2 * n], times[2 * n :]), ranks, count)


@functools.lru_cache(maxsize=64)
def _fastest(costs: schedules.Costs, ranks: int, count: int) -> schedules.Schedule:
    return schedules.auto(costs, ranks, count, memory=min(ranks, count))
