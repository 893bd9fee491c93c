"""A pipelined function's plan, to look at: its stages, what each sends, and when its tasks are predicted to run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .._core.base.messages import count_text
from ..schedules import Costs, Schedule, Timeline
from .ir.costs import rates, seconds
from .ir.graph import nbytes, value
from .pipeline_memory import PipelineMemory, memory_of
from .staged import Staged
from .stages import PRE, B, F, W


@dataclass(frozen=True)
class PipelineStage:
    """A stage of a pipeline.

    Attributes:
        rank: its coordinate on the axis.
        calls: how many calls each of its tasks has: "PRE", which runs once a step; "F", "B" and "W", for each microbatch.
        seconds: how long these are predicted to take.
        sends: what it sends for each microbatch: (task, to which stage) -> bytes.
    """

    rank: int
    calls: dict[str, int]
    seconds: dict[str, float]
    sends: dict[tuple[str, int], int]


@dataclass(frozen=True, repr=False)
class PipelinePlan:
    """The plan of a pipelined function; it prints as a table.

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

    def text(self) -> str:
        """The table."""
        lines = [repr(self.schedule), "stage rank   calls: once, F, B, W   predicted us: F, B, W   sends a microbatch"]
        for i, stage in enumerate(self.stages):
            calls = " ".join(f"{stage.calls[kind]:5}" for kind in (PRE, F, B, W))
            times = " ".join(f"{stage.seconds[kind] * 1e6:7.0f}" for kind in (F, B, W))
            sends = ", ".join(f"{kind} to {to}: {count_text(size, 'byte')}" for (kind, to), size in stage.sends.items())
            lines.append(f"{i:5} {stage.rank:4} {calls} {times}   {sends}".rstrip())
        return "\n".join([*lines, f"predicted bubble {self.timeline().bubble:.1%}"])

    __repr__ = text


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
                sends[kind, to] = sends.get((kind, to), 0) + sum(nbytes(value(node)) for node in nodes)
        calls = {kind: len(tasks[kind, s]) for kind in (PRE, F, B, W)}
        found.append(PipelineStage(rank, calls, times, sends))
    lies = [uses if home is None else home for home, uses in zip(homes, staged.uses(), strict=True)]
    return PipelinePlan(tuple(found), staged.schedule, staged, lies)
