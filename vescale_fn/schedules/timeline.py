"""When each task of a schedule runs, given what tasks cost: a simulation, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .actions import Task, actions_of
from .costs import Costs
from .task_graph import TaskGraph


class TimedTask(NamedTuple):
    """One entry of a row with the times at which it begins and ends."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank runs what.

    Args:
        makespan: from the begin of the first task to the end of the last.
        idle: for each rank, how long it waits between its own first task and its last. What it waits before and after these
            is no loss where the next step begins on each rank as soon as the last one has ended there, which zero-bubble
            schedules presume; `makespan` counts it.
        in_flight: for each rank, the most (stage, microbatch) whose activations it holds at once. They are held from the
            begin of F to the end of W or BW. A rank with two stages holds two such chunks for a whole microbatch.
        rows: for each rank its `TimedTask` (task, start, end), in order.

    >>> import vescale_fn as vfn
    >>> timeline = vfn.schedules.gpipe(3, 4).simulate(vfn.schedules.Costs(F=2, B=3, W=1))
    >>> timeline.makespan, timeline.idle, timeline.in_flight
    (36, (12, 6, 0), (4, 4, 4))
    >>> timeline.rows[2][0]
    TimedTask(task=Action(kind='F', stage=2, microbatch=0), start=4, end=6)
    """

    makespan: float
    idle: tuple[float, ...]
    in_flight: tuple[int, ...]
    rows: tuple[tuple[TimedTask, ...], ...]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, how long it runs tasks."""
        return tuple(sum(timed.end - timed.start for timed in row) for row in self.rows)

    @property
    def bubble(self) -> float:
        """The part of the ranks' time, from the first task to the last, in which no task runs: 0 to 1."""
        total = self.makespan * len(self.rows)
        return 1 - sum(self.busy) / total if total else 0.0

    def __repr__(self) -> str:
        lines = [f"makespan {self.makespan:.6g}, bubble {self.bubble:.1%}"]
        each = zip(self.busy, self.idle, self.in_flight)
        lines += [
            f"rank {rank}: busy {busy:.6g}, idle {idle:.6g}, {count} in flight"
            for rank, (busy, idle, count) in enumerate(each)
        ]
        return "\n".join(lines)


def simulated(stages: int, ranks: int, graph: TaskGraph, in_order: list[int], costs: Costs) -> Timeline:
    """The timeline of a graph without a cycle: each node begins when all that it waits for has ended."""
    each = costs.of(stages)
    ends: list[float] = [0] * len(graph.before)
    tasks = len(graph.tasks)
    rows: list[list[TimedTask]] = [[] for _ in range(ranks)]
    for i in in_order:
        start = max((ends[j] for j in graph.before[i]), default=0)
        if i < tasks:
            rank, task = graph.tasks[i]
            ends[i] = start + each.task(task)
            rows[rank].append(TimedTask(task, start, ends[i]))
        else:
            transfer = graph.transfers[i - tasks]
            ends[i] = start + each.transfer(transfer.made, transfer.used)
    begin = min((row[0].start for row in rows if row), default=0)
    makespan = max((row[-1].end for row in rows if row), default=0) - begin
    busy = [sum(timed.end - timed.start for timed in row) for row in rows]
    idle = tuple(row[-1].end - row[0].start - time if row else 0 for row, time in zip(rows, busy))
    return Timeline(makespan, idle, tuple(map(in_flight, rows)), tuple(map(tuple, rows)))


def in_flight(row: list[TimedTask]) -> int:
    """The most chunks whose activations a rank holds at once."""
    held = most = 0
    for timed in row:
        kinds = [action.kind for action in actions_of(timed.task)]
        held += kinds.count("F")
        most = max(most, held)
        held -= kinds.count("W") + kinds.count("BW")
    return most
