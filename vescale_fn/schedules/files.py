"""Schedules as files that others read: CSV of torch's pipelines, and traces for Chrome and Perfetto."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence

from .._core.base.errors import ScheduleError
from .._core.base.messages import report
from .actions import Action, Kind, Overlap, Task, actions_of
from .timed_task import TimedTask

_TORCH: dict[Kind, str] = {"F": "F", "B": "I", "W": "W", "BW": "B"}  # how torch's actions are called
_OURS: dict[str, Kind] = {theirs: ours for ours, theirs in _TORCH.items()}
_ACTION = re.compile(r"(\d+)(F|I|W|B)(\d+)")
_OVERLAP = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")


def csv_text(order: Sequence[Sequence[Task]]) -> str:
    """A line for each rank, in the format of ``compute_only`` schedules in ``torch.distributed.pipelining``."""
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows([map(_written, row) for row in order])
    return lines.getvalue()


def _written(task: Task) -> str:
    actions = [f"{action.stage}{_TORCH[action.kind]}{action.microbatch}" for action in actions_of(task)]
    return actions[0] if len(actions) == 1 else f"({';'.join(actions)})OVERLAP_F_B"


def from_csv_text(text: str) -> tuple[list[int], list[list[Task]]]:
    """Placement and order of a schedule in that format; empty entries, in which torch's ranks are idle, are left out."""
    order = [
        [_read(entry.strip(), rank) for entry in row if entry.strip()]
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    ]
    ranks = {action.stage: rank for rank, row in enumerate(order) for task in row for action in actions_of(task)}
    missing = sorted(set(range(1 + max(ranks, default=-1))) - set(ranks))
    if missing:
        failures = [f"no rank runs stage {stage}" for stage in missing]
        raise ScheduleError(report("Schedule.from_csv", "stages are missing", failures))
    return [ranks[stage] for stage in range(len(ranks))], order


def _read(entry: str, rank: int) -> Task:
    """The task of an entry."""
    if both := _OVERLAP.fullmatch(entry):
        a, b = (_ACTION.fullmatch(part.strip()) for part in both.groups())
        if a and b:
            return Overlap(_action(a), _action(b))
    elif one := _ACTION.fullmatch(entry):
        return _action(one)
    what = f"rank {rank} has the entry {entry!r}, which is no task of a stage"
    fix = "the schedule that has tasks alone (compute_only), as 0F3, 0I3, 0W3, 0B3 or (0F3;1B0)OVERLAP_F_B"
    raise ScheduleError(report("Schedule.from_csv", what, fix=fix))


def _action(match: re.Match[str]) -> Action:
    stage, kind, microbatch = match.groups()
    return Action(_OURS[kind], int(stage), int(microbatch))


def trace_text(rows: Sequence[Sequence[TimedTask]], unit: float) -> str:
    """The events of a timeline in JSON, where a unit of time lasts so many seconds; a process for each rank."""
    events: list[dict[str, object]] = []
    for rank, row in enumerate(rows):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for timed in row:
            start, length = timed.start * unit * 1e6, (timed.end - timed.start) * unit * 1e6
            for lane, action in enumerate(actions_of(timed.task)):
                event: dict[str, object] = {
                    "ph": "X",
                    "name": str(action),
                    "cat": action.kind,
                    "pid": rank,
                    "tid": lane,
                }
                event["args"] = {"stage": action.stage, "microbatch": action.microbatch}
                events.append({**event, "ts": start, "dur": length})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
