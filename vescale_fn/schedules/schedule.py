"""Schedules of pipelines as data: which rank has which stage, and what each rank runs in which order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from .._core.base.messages import count_text
from . import drawing, files, validation
from .actions import Task, actions_in
from .costs import Costs
from .deadlocks import raise_deadlock
from .simulator import simulated
from .task_graph import TaskGraph, Transfer, task_graph
from .timeline import Timeline


@dataclass(frozen=True, repr=False)
class Schedule:
    """Which rank runs which stage of a pipeline, and in which order each rank runs its tasks.

    Args:
        placement: for each stage the rank that has it: its coordinate on the axis of the pipeline.
        order: for each rank its row: an `Action` for each task, or an `Overlap` of two, in the order in which they run.

    >>> import vescale_fn as vfn
    >>> from vescale_fn.schedules import Action, Schedule
    >>> row = lambda stage: tuple(Action(kind, stage, i) for kind in ("F", "BW") for i in range(2))
    >>> schedule = Schedule(placement=(0, 1), order=(row(0), row(1)))
    >>> schedule == vfn.schedules.gpipe(2, 2)
    True
    >>> schedule
    Schedule(2 stages on 2 ranks, 2 microbatches)
    """

    placement: tuple[int, ...]
    order: tuple[tuple[Task, ...], ...]

    if TYPE_CHECKING:  # any sequences are taken

        def __init__(self, placement: Sequence[int], order: Sequence[Sequence[Task]]) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "order", tuple(map(tuple, self.order)))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.order)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    @cached_property
    def microbatches(self) -> int:
        """How many microbatches there are."""
        return 1 + max((action.microbatch for row in self.order for action in actions_in(row)), default=-1)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What goes from one rank to another; between two stages in the order in which it is sent.

        >>> import vescale_fn as vfn
        >>> vfn.schedules.gpipe(2, 1).transfers[0]
        Transfer(source=0, target=1, made=Action(kind='F', stage=0, microbatch=0), used=Action(kind='F', stage=1, microbatch=0))
        """
        return tuple(self._checked(False)[0].transfers)

    def check(self, blocking: bool = True) -> tuple[tuple[int, Task], ...]:
        """Raise if the schedule is not complete, or if it can deadlock.

        Complete: every stage has one F for each microbatch, and one BW, or one B and one W, on the rank that has the stage.
        It cannot deadlock if no tasks wait for each other in a circle: along the rows, for their inputs, and for what
        other ranks send, which arrives in the order in which it is sent.

        Args:
            blocking: also where sends wait for their receives (rendezvous) and one receive is posted ahead from each
                neighbouring stage: a rank begins no task before what its last one made has arrived, and a value arrives
                when the task that used the one before it has ended. Without, a send never waits.

        Returns:
            (rank, task) for all tasks, in an order in which one process can run all of them.

        Raises:
            vescale_fn.errors.ScheduleError: with what is missing, or with the tasks that wait for each other.

        >>> import vescale_fn as vfn
        >>> [f"{task} on {rank}" for rank, task in vfn.schedules.gpipe(2, 2).check()][:3]
        ['0F0 on 0', '0F1 on 0', '1F0 on 1']
        """
        graph, order = self._checked(blocking)
        return tuple(graph.tasks[i] for i in order if i < len(graph.tasks))

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """When each task runs, given what tasks and transfers cost; without, F, B and W take 1 each and transfers nothing.

        Raises:
            vescale_fn.errors.ScheduleError: as `check` does, with sends that block if they do in `costs`.

        >>> import vescale_fn as vfn
        >>> vfn.schedules.one_f_one_b(2, 4).simulate()
        makespan 15, bubble 20.0%
        rank 0: busy 12, idle 3, 2 in flight
        rank 1: busy 12, idle 0, 1 in flight
        """
        costs = Costs() if costs is None else costs
        graph, order = self._checked(costs.blocking)
        return simulated(self.stages, self.ranks, graph, order, costs)

    def text(self) -> str:
        """A line for each rank, a column for each unit of time if F, B and W take one each.

        >>> import vescale_fn as vfn
        >>> print(vfn.schedules.zb_h1(2, 3).text())
        rank 0: F0 F1 .  B0 W0 F2 B1 W1 B2 W2
        rank 1: .  F0 B0 F1 B1 W0 F2 B2 W1 W2
        """
        return self.simulate().text()

    def _repr_html_(self) -> str:
        timeline = self.simulate()
        return drawing.html_text(timeline.rows, repr(timeline))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a file that ``torch.distributed.pipelining`` reads, as a schedule of tasks alone (compute_only).

        There "I" is B, and "B" is BW.

        >>> import tempfile
        >>> from pathlib import Path
        >>> import vescale_fn as vfn
        >>> path = Path(tempfile.mkdtemp()) / "schedule.csv"
        >>> vfn.schedules.zb_h1(2, 2).to_csv(path)
        >>> print(path.read_text())
        0F0,0F1,0I0,0W0,0I1,0W1
        1F0,1I0,1F1,1I1,1W0,1W1
        <BLANKLINE>
        >>> vfn.schedules.Schedule.from_csv(path) == vfn.schedules.zb_h1(2, 2)
        True
        """
        Path(path).write_text(files.csv_text(self.order))

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> Schedule:
        """The schedule of a file as `to_csv` and torch write them. `check` says whether it is complete.

        Raises:
            vescale_fn.errors.ScheduleError: an entry is no task, as those of torch's schedules with communication are not.
        """
        return cls(*files.from_csv_text(Path(path).read_text()))

    def trace(self, path: str | os.PathLike[str], costs: Costs | None = None, unit: float = 1.0) -> None:
        """Write what `simulate(costs)` gives for https://ui.perfetto.dev or chrome://tracing; see `Timeline.trace`."""
        self.simulate(costs).trace(path, unit)

    def __repr__(self) -> str:
        counted = (count_text(self.stages, "stage"), count_text(self.ranks, "rank"))
        parts = f"{self.microbatches} microbatch{'' if self.microbatches == 1 else 'es'}"
        return f"Schedule({counted[0]} on {counted[1]}, {parts})"

    def _checked(self, blocking: bool) -> tuple[TaskGraph, list[int]]:
        return self._blocking if blocking else self._buffered

    @cached_property
    def _blocking(self) -> tuple[TaskGraph, list[int]]:
        self._buffered  # noqa: B018  # a schedule that no send can save is told so
        return self._graph(True)

    @cached_property
    def _buffered(self) -> tuple[TaskGraph, list[int]]:
        validation.check(self.placement, self.order, self.microbatches)
        return self._graph(False)

    def _graph(self, blocking: bool) -> tuple[TaskGraph, list[int]]:
        graph = task_graph(self.placement, self.order, blocking)
        order, cycle = graph.in_order()
        if cycle:
            raise_deadlock(graph, cycle, blocking)
        return graph, order
