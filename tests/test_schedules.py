"""Schedules of pipelines: the formulas of the literature, the check against ranks that run by rendezvous."""

import itertools
import random

import pytest

import vescale_fn as vfn
from benchmarks import schedule_oracles
from vescale_fn.schedules import Costs

SIZES = [(1, 1), (1, 2), (2, 1), (2, 5), (3, 2), (3, 6), (4, 8), (4, 9), (5, 7), (8, 20)]
COSTS = [(6, 6, 6), (12, 30, 6), (12, 12, 6), (24, 6, 18), (6, 18, 12)]  # multiples of 2 and 3 chunks


@pytest.mark.parametrize("name", schedule_oracles.FORMULAS)
def test_named_schedules_meet_the_formulas_of_the_literature(name: str) -> None:
    """All sizes up to 16 ranks and 64 microbatches in `benchmarks.pipelines`."""
    assert [fault for p, m in SIZES for fault in schedule_oracles.formula_faults(name, p, m, COSTS)] == []


def test_what_an_overlap_hides_is_gained_at_both_ends() -> None:
    """DualPipeV with F = B >= W: its formula, and for each of p - 2 overlaps what it hides."""
    for p, (f, b, w) in itertools.product((1, 2, 3, 4), [(6, 6, 6), (6, 6, 3)]):
        timeline = vfn.schedules.dualpipev(p, 2 * p + 1).simulate(Costs(f, b, w, overlap=1))
        assert timeline.idle[0] == (p - 1) * ((b + w) + (b + w) - 3 * w) - max(0, p - 2) * f


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
