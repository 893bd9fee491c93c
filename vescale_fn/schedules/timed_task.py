"""A task with its times."""

from __future__ import annotations

from typing import NamedTuple

from .actions import Task


class TimedTask(NamedTuple):
    """One entry of a row with the times at which it begins and ends."""

    task: Task
    start: float
    end: float
