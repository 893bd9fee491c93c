"""When the ranks of a pipeline run what, and what follows from it: how long they are idle, what they hold."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from . import drawing, files
from .timed_task import TimedTask


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

    def text(self) -> str:
        """A line for each rank, and a column for the time of the shortest task: ``-`` continues a task, ``.`` is idle.

        >>> import vescale_fn as vfn
        >>> print(vfn.schedules.one_f_one_b(2, 2).simulate(vfn.schedules.Costs(F=1, B=2, W=0)).text())
        rank 0: F0  F1  .   .   BW0 -   .   BW1 -
        rank 1: .   F0  BW0 -   F1  BW1 -
        """
        return drawing.text(self.rows)

    def _repr_html_(self) -> str:
        return drawing.html_text(self.rows, repr(self))

    def trace(self, path: str | os.PathLike[str], unit: float = 1.0) -> None:
        """Write a trace for https://ui.perfetto.dev or chrome://tracing, in which each rank is a process.

        Args:
            path: the file, in JSON.
            unit: how many seconds a unit of time lasts.

        >>> import json, tempfile
        >>> from pathlib import Path
        >>> import vescale_fn as vfn
        >>> path = Path(tempfile.mkdtemp()) / "trace.json"
        >>> vfn.schedules.gpipe(2, 1).simulate().trace(path)
        >>> [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
        ['process_name', '0F0', '0BW0', 'process_name', '1F0', '1BW0']
        """
        Path(path).write_text(files.trace_text(self.rows, unit))
