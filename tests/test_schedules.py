"""Schedules of pipelines: the formulas of the literature, the check against ranks that run by rendezvous."""

import itertools
import math
import random
import re
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

import vescale_fn as vfn
from benchmarks import pipelines, schedule_oracles
from vescale_fn.schedules import Costs, drawing
from vescale_fn.schedules.actions import actions_of

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
    found = [schedule_oracles.verdicts(seed) for seed in range(500)]
    assert [seed for seed, both in enumerate(found) if any(said != ran for said, ran in both)] == []
    assert {tuple(said for said, _ in both) for both in found} == {(False, False), (True, False), (True, True)}


def test_auto_is_the_best_that_there_is_on_small_instances() -> None:
    """300 instances in `benchmarks.pipelines`."""
    assert max(schedule_oracles.auto_over_optimum(seed) for seed in range(12)) <= 1.02


def test_the_branch_and_bound_finds_the_least_of_all_schedules() -> None:
    for m, limit, (f, b, w), way in ((3, 2, ((3, 7), (2, 9), (5, 1)), 2), (3, 3, ((1, 8), (6, 2), (4, 4)), 0)):
        best = schedule_oracles.least_of_all(2, m, Costs(f, b, w, p2p=way), limit)
        assert schedule_oracles.least_makespan(m, f, b, w, way, limit, math.inf) == best


def test_auto_is_never_slower_than_a_named_schedule_within_its_memory() -> None:
    """1,000 vectors of costs in `benchmarks.pipelines`."""
    assert [fault for seed in range(10) for fault in schedule_oracles.slower_than_named(seed, 3)] == []


def accepted_ones_run(seeds: range) -> int:
    """How many of the random schedules that `check` accepts this process has taken its part in."""
    vfn.make_mesh((4,), ("pp",), device="cpu")
    count = 0
    for seed in seeds:
        schedule = schedule_oracles.random_schedule(random.Random(seed))
        if schedule_oracles.runs(schedule, blocking=False) and dist.get_rank() < schedule.ranks:
            pipelines.slept(schedule, 0.0, width=1)()
            count += 1
    return count


def test_schedules_that_are_accepted_run_on_processes(gloo) -> None:
    """None hangs, and every value goes to the task that needs it."""
    counts = gloo(4, accepted_ones_run, range(340))
    assert counts[0] >= 200
    assert counts == sorted(counts, reverse=True)
    assert counts[3] >= 30


# --- what others read -------------------------------------------------------------------------------------------------

SCHEDULES = {
    "gpipe": vfn.schedules.gpipe(3, 4),
    "1f1b": vfn.schedules.one_f_one_b(4, 5),
    "interleaved": vfn.schedules.interleaved(2, 4, 3),
    "zb-h2": vfn.schedules.zb_h2(3, 6),
    "zbv": vfn.schedules.zbv(3, 6),
    "dualpipev": vfn.schedules.dualpipev(2, 5),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_what_is_written_and_writes_what_is_read(name: str, tmp_path: Path) -> None:
    """By the loader of torch's runtime, which also finds every send and receive that the tasks need."""
    schedule, path = SCHEDULES[name], tmp_path / "schedule.csv"
    schedule.to_csv(path)
    one = mock.MagicMock(num_stages=schedule.stages, group_size=schedule.ranks, group_rank=0, stage_index=0)
    theirs = torch_schedules._PipelineScheduleRuntime([one], n_microbatches=schedule.microbatches)
    theirs._load_csv(str(path))
    assert theirs.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    sends = [a for row in theirs.pipeline_order_with_comms.values() for a in row if re.search(r"\dSEND", str(a))]
    assert len(sends) == len(schedule.transfers)
    theirs._dump_csv(str(path), format="compute_only")
    assert vfn.schedules.Schedule.from_csv(path) == schedule


def test_idle_entries_of_torch_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,,,0B0\n,1F0,1B0,\n")
    assert vfn.schedules.Schedule.from_csv(path) == vfn.schedules.gpipe(2, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawing_shows_each_task_in_its_row(name: str) -> None:
    timeline = SCHEDULES[name].simulate(Costs(2, 3, 1))
    drawn = ElementTree.fromstring(re.sub("<pre>.*", "", timeline._repr_html_(), flags=re.DOTALL))
    told = [title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    actions = [(t, action) for row in timeline.rows for t in row for action in actions_of(t.task)]
    assert told == [f"{t.task}: {t.start} to {t.end}" for t, _ in actions]
    boxes = [box.attrib for box in drawn.iter("{http://www.w3.org/2000/svg}rect") if len(box)]
    scale = 900 / timeline.makespan
    for box, (t, action) in zip(boxes, actions, strict=True):
        assert float(box["x"]) == pytest.approx(60 + t.start * scale, abs=0.01)
        assert float(box["width"]) == pytest.approx((t.end - t.start) * scale, abs=0.01)
        assert box["fill"] == drawing.COLOURS[action.kind]
