"""A pipelined function's plan, to look at: its stages, what each sends, and when its tasks are predicted to run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .._core.base.messages import count_text
from .._core.distributed.comm_log import CommLog
from ..schedules import Costs, Schedule, Timeline
from .ir.costs import rates, seconds
from .ir.graph import nbytes, value
from .ir.ranks_as_one import of_first_rank
from .lowered import Lowered
from .message_log import Messages
from .pipeline_drawing import html_text, trace_text
from .pipeline_memory import PipelineMemory, memory_of
from .stage_runs import names_from, names_to
from .staged import Staged
from .stages import PRE, B, F, W


@dataclass(frozen=True)
class PipelineStage:
    """A stage of a pipeline.

    Attributes:
        rank: its coordinate on the axis.
        calls: how many calls each of its tasks has: "PRE", which runs once a step; "F", "B" and "W", for each microbatch.
        seconds: how long these are predicted to take.
        sends: what one of its ranks sends for each microbatch: (task, to which stage) -> bytes.
    """

    rank: int
    calls: dict[str, int]
    seconds: dict[str, float]
    sends: dict[tuple[str, int], int]


@dataclass(frozen=True, repr=False)
class PipelinePlan:
    """The plan of a pipelined function; it prints as tables, and is drawn in a notebook.

    Attributes:
        stages: in order.
        schedule: which rank runs which task when.
    """

    stages: tuple[PipelineStage, ...]
    schedule: Schedule
    _staged: Staged = field(repr=False, compare=False)
    _homes: Sequence[Iterable[int]] = field(repr=False, compare=False)

    def costs(self) -> Costs:
        """What the tasks are predicted to cost, in seconds; messages nothing."""
        forward, back, weights = ([stage.seconds[kind] for stage in self.stages] for kind in (F, B, W))
        return Costs(forward, back, weights)

    def timeline(self, costs: Costs | None = None) -> Timeline:
        """When each task runs, given what tasks and messages cost: by default as predicted."""
        return self.schedule.simulate(self.costs() if costs is None else costs)

    def memory(self, costs: Costs | None = None) -> PipelineMemory:
        """What each rank is predicted to hold at each task, and at most: parameters, the batch, what is kept for later tasks,
        gradients, messages; `costs` are as for `timeline`."""
        return memory_of(self._staged, self._homes, self.timeline(costs))

    def comms(self, rank: int = 0) -> CommLog:
        """What a rank of the axis communicates in the tasks of a step, in order, as `comm_log` lists it: collectives over other
        axes, "send" and "receive". What is done with the sums of all parts comes after it and is not in it."""
        stages, schedule, log = self._staged.stages, self.schedule, CommLog()
        messages = Messages(stages, schedule.placement, self._staged.along.axis)
        tasks = {s: self._staged.all_tasks[s] for s, at in enumerate(schedule.placement) if at == rank}
        todo = [(PRE, s, 0) for s in tasks]
        todo += [action for at, action in self._staged.order if at == rank]
        for kind, stage, part in todo:
            rows = [messages.row("receive", name) for name in names_to(stages, kind, stage, part)]
            graph = tasks[stage][kind].graph
            rows += [] if graph is None else Lowered(graph, "").comms()
            rows += [messages.row("send", name) for name in names_from(stages, kind, stage, part)]
            for row in filter(None, rows):
                log.append(row)
        return log

    def text(self) -> str:
        """The stages, and what each rank holds at most."""
        lines = [repr(self.schedule), "stage rank   calls: once, F, B, W   predicted us: F, B, W   sends a microbatch"]
        for i, stage in enumerate(self.stages):
            calls = " ".join(f"{stage.calls[kind]:5}" for kind in (PRE, F, B, W))
            times = " ".join(f"{stage.seconds[kind] * 1e6:7.0f}" for kind in (F, B, W))
            sends = ", ".join(f"{kind} to {to}: {count_text(size, 'byte')}" for (kind, to), size in stage.sends.items())
            lines.append(f"{i:5} {stage.rank:4} {calls} {times}   {sends}".rstrip())
        return "\n".join([*lines, f"predicted bubble {self.timeline().bubble:.1%}", self.memory().text()])

    __repr__ = text

    def html(self) -> str:
        """The plan as a page shows it: the timeline, below it what each rank holds meanwhile, and the tables."""
        return html_text(self.timeline(), self.memory(), self.text())

    _repr_html_ = html

    def trace(self, path: str | os.PathLike[str], costs: Costs | None = None) -> None:
        """Write a trace for https://ui.perfetto.dev or chrome://tracing: a process for each rank, and what it holds as
        counters; costs, in seconds, are as for `timeline`."""
        Path(path).write_text(trace_text(self.timeline(costs), self.memory(costs)))


def planned(staged: Staged, homes: Sequence[Iterable[int] | None]) -> PipelinePlan:
    """What a plan is.

    Args:
        homes: for each parameter the ranks that have it; None for those that use it.
    """
    tasks, found = staged.stages.tasks, []
    of = rates(staged.graph)
    for s, rank in enumerate(staged.schedule.placement):
        times = {kind: sum(seconds(node, of) for node in tasks[kind, s]) for kind in (PRE, F, B, W)}
        sends: dict[tuple[str, int], int] = {}
        for (kind, source, _, to), nodes in staged.stages.messages.items():
            if source == s:
                sends[kind, to] = sends.get((kind, to), 0) + sum(nbytes(value(node)) for node in of_first_rank(nodes))
        calls = {kind: len(tasks[kind, s]) for kind in (PRE, F, B, W)}
        found.append(PipelineStage(rank, calls, times, sends))
    lies = [uses if home is None else home for home, uses in zip(homes, staged.uses(), strict=True)]
    return PipelinePlan(tuple(found), staged.schedule, staged, lies)
