"""When each task of a schedule runs, given what tasks cost."""

from __future__ import annotations

from .actions import actions_of
from .costs import Costs
from .task_graph import TaskGraph
from .timed_task import TimedTask
from .timeline import Timeline


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
