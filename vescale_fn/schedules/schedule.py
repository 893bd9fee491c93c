"""Schedules of pipelines as data: which rank has which stage, and what each rank runs in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .._core.base.messages import count_text
from . import validation
from .actions import Task, actions_in
from .costs import Costs
from .deadlocks import raise_deadlock
from .task_graph import TaskGraph, Transfer, task_graph
from .timeline import Timeline, simulated


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
