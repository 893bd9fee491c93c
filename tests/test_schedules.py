"""Schedules of pipelines: the formulas of the literature, the check against ranks that run by rendezvous."""

import itertools
import random

import pytest

import vescale_fn as vfn
from benchmarks import schedule_oracles
from vescale_fn.schedules import Costs

SIZES = [(1, 1), (2, 1), (2, 5), (3, 3), (4, 8), (4, 3), (5, 7), (8, 20)]


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_schedules_with_one_stage_a_rank_meet_their_formulas(name: str) -> None:
    """Whatever F, B and W are, with equal stages and free messages; for any number of microbatches."""
    for (p, m), (f, b, w) in itertools.product(SIZES, [(1, 1, 1), (3, 5, 2), (4, 0, 1)]):
        schedule = getattr(vfn.schedules, name)(p, m)
        schedule.check()
        timeline = schedule.simulate(Costs(f, b, w))
        assert timeline.idle == tuple((p - 1 - r) * (f + b + w) for r in range(p))
        assert timeline.makespan == (m + p - 1) * (f + b + w)
        held = {"gpipe": lambda r: m, "one_f_one_b": lambda r: min(m, p - r)}[name]
        assert timeline.in_flight == tuple(map(held, range(p)))


def test_the_check_agrees_with_ranks_that_run_by_rendezvous() -> None:
    """10,000 in `benchmarks.pipelines`."""
    verdicts = {False: set(), True: set()}
    for seed in range(500):
        schedule = schedule_oracles.random_schedule(random.Random(seed))
        for blocking in (False, True):
            try:
                schedule.check(blocking)
                said = True
            except vfn.errors.ScheduleError:
                said = False
            assert said == schedule_oracles.runs(schedule, blocking), (seed, blocking)
            verdicts[blocking].add(said)
    assert verdicts == {False: {True, False}, True: {True, False}}
