"""The schedule of a pipeline whose stages are cut: the fastest that is found for what they are predicted to take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import fx

from .. import schedules
from .ir.costs import rates, seconds
from .stages import B, F, Stages, W


def found_for(
    graph: fx.Graph,
    stages: Stages,
    ranks: int,
    count: int,
    agreed: Callable[[Sequence[float]], Sequence[float]],
    limits: int | tuple[int, ...],
) -> schedules.Schedule:
    """A fast schedule of one stage a rank.

    Args:
        graph: of the step.
        stages: cut out of it.
        ranks, count: of ranks and of microbatches.
        agreed: makes the times of this rank those of all ranks, which are to find the same schedule.
        limits: how many activations a rank may hold, one number for all or one for each.
    """
    of, n = rates(graph), stages.count
    mine = [sum(seconds(node, of) for node in stages.tasks[kind, s]) for kind in (F, B, W) for s in range(n)]
    times = agreed(mine)
    return _fastest(schedules.Costs(times[:n], times[n : 2 * n], times[2 * n :]), ranks, count, limits)


@functools.lru_cache(maxsize=64)
def _fastest(costs: schedules.Costs, ranks: int, count: int, limits: int | tuple[int, ...]) -> schedules.Schedule:
    return schedules.auto(costs, ranks, count, memory=limits)
