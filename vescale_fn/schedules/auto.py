"""A schedule for stages of any costs within a limit of memory: the best of a beam search and of the named ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .._core.base.errors import ScheduleError
from .._core.base.messages import count_text, report
from . import named
from .costs import Costs
from .partial import Partial, Problem
from .schedule import Schedule

_EXPANDED, _WIDEST = 20_000, 200  # beginnings that a search goes on from, in all and at once


def auto(costs: Costs, p: int, m: int, memory: int | Sequence[int] | None = None) -> Schedule:
    """A schedule that is fast for these costs and holds no more than so many activations.

    The costs say how many stages there are, p or a multiple of p; where all are single numbers, p. Several stages of a rank
    are placed as `interleaved` does, two also as `zbv`. What comes out is, simulated with these costs, never slower than any
    named schedule within the limit. Unless the costs say that sends block, it is for sends that do not.

    Args:
        costs: what stages and transfers cost, predicted or measured.
        p: ranks.
        m: microbatches.
        memory: how many chunks (activations of a stage for a microbatch) a rank may hold at once, one number for all or one for
            each; as many as there are by default.

    Source: tasks are added in time as Giffler and Thompson (1960) do, a beam of the best beginnings is kept; the named
    schedules are those of their papers. Searching for a schedule under a limit: arXiv 2401.10241.

    >>> import vescale_fn as vfn
    >>> uneven = vfn.schedules.Costs(F=[2, 1, 1, 4], B=[2, 1, 1, 4], W=[2, 1, 1, 3])
    >>> vfn.schedules.auto(uneven, p=4, m=8, memory=4).simulate(uneven).makespan
    92
    >>> vfn.schedules.one_f_one_b(4, 8).simulate(uneven).makespan
    100
    """
    named.check_sizes("auto", p=p, m=m)
    stages = max([len(x) for x in (costs.F, costs.B, costs.W) if isinstance(x, tuple)], default=p)
    v, rest = divmod(stages, p)
    if rest:
        what = f"the costs are of {stages} stages, but {p} ranks have an equal number each"
        raise ScheduleError(report("schedules.auto", what, fix=f"costs of {v * p} or {v * p + p} stages" if v else ""))
    limits = (v * m,) * p if memory is None else tuple(memory) if isinstance(memory, Sequence) else (memory,) * p
    if len(limits) != p or min(limits) < v:
        what = f"a microbatch needs {count_text(v, 'chunk')} on each of {p} ranks, but memory is {memory}"
        raise ScheduleError(report("schedules.auto", what, fix=f"at least {v} for each rank"))
    each = costs.of(stages)
    placements = [tuple(s % p for s in range(stages))]
    if v == 2:
        placements.append((*range(p), *reversed(range(p))))
    found = [_searched(Problem(placement, m, each, limits)) for placement in placements]
    times: list[tuple[float, Schedule]] = []
    for schedule in (*found, *_named(p, m, v)):
        try:
            timeline = schedule.simulate(costs)
        except ScheduleError:  # a deadlock where sends block
            continue
        if all(held <= limit for held, limit in zip(timeline.in_flight, limits)):
            times.append((timeline.makespan, schedule))
    if not times:
        raise ScheduleError(report("schedules.auto", "no schedule was found that cannot deadlock where sends block"))
    return min(times, key=lambda pair: pair[0])[1]


def _named(p: int, m: int, v: int) -> Iterator[Schedule]:
    """The named schedules with v stages a rank."""
    if v == 1:
        yield from (f(p, m) for f in (named.gpipe, named.one_f_one_b, named.zb_h1, named.zb_h2))
    else:
        yield named.interleaved(p, m, v)
    if v == 2:
        yield named.zbv(p, m)
        if m >= 2 * p:
            yield named.dualpipev(p, m)


def _searched(problem: Problem) -> Schedule:
    """The best schedule of a beam search: task by task, the beginnings with the least bounds go on."""
    beam = [Partial(problem)]
    tasks = 3 * problem.m * len(problem.placement)
    width = max(1, min(_WIDEST, _EXPANDED // tasks))
    for _ in range(tasks):
        new: dict[object, Partial] = {}
        for partial in beam:
            for candidate in partial.next_tasks():
                longer = partial.then(candidate)
                new.setdefault(longer.key(), longer)
        beam = sorted(new.values(), key=lambda x: (x.bound, sum(x.free)))[:width]
    return Schedule(problem.placement, beam[0].rows())
