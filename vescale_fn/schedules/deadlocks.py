"""Tasks of a schedule that wait for each other in a circle, in words."""

from __future__ import annotations

from .._core.base.errors import ScheduleError
from .._core.base.messages import report
from .actions import actions_of
from .task_graph import TaskGraph, Transfer


def raise_deadlock(graph: TaskGraph, cycle: list[int], blocking: bool) -> None:
    """Raise with the cycle: nodes of which each waits for the next, and the last for the first."""
    begin = next(k for k, i in enumerate(cycle) if not isinstance(graph.node(i), Transfer))
    cycle = cycle[begin:] + cycle[:begin]
    lines: list[str] = []
    for i, j in zip(cycle, [*cycle[1:], cycle[0]]):
        _add(lines, graph, i, j)
    sends = " where sends wait for their receives" if blocking else ""
    fix = "Schedule.check(blocking=False), if each rank goes on before what it sends is received" if blocking else ""
    raise ScheduleError(report("Schedule.check", f"deadlock{sends}: each of these waits for the next", lines, fix))


def _add(lines: list[str], graph: TaskGraph, i: int, j: int) -> None:
    """Say why the node i waits for the node j."""
    later, earlier = graph.node(i), graph.node(j)
    if isinstance(later, Transfer):
        if isinstance(earlier, Transfer):
            lines.append(f"rank {later.source} sends {later.made} after {earlier.made}")
        elif later.made not in actions_of(earlier[1]):
            lines.append(f"rank {later.target} has room for {later.made} when it has run {earlier[1]}")
        return  # a transfer waits for its maker: said of who waits for the transfer
    rank, task = later
    if isinstance(earlier, Transfer):
        if earlier.used in actions_of(task):
            lines.append(f"rank {rank} runs {task} when it has {earlier.made} from rank {earlier.source}")
        else:
            lines.append(f"rank {rank} runs {task} when {earlier.made} has arrived on rank {earlier.target}")
    elif i == j:
        lines.append(f"rank {rank} runs {task} at once, but one needs the other")
    elif i != j + 1:
        lines.append(f"rank {rank} runs {task}, which needs {earlier[1]}")
    elif lines and lines[-1].startswith(f"rank {rank} runs") and f" after {task}" in lines[-1]:
        lines[-1] = f"{lines[-1]}, after {earlier[1]}"
    else:
        lines.append(f"rank {rank} runs {task} after {earlier[1]}")
