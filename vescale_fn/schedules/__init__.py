"""Schedules of pipelines as data: named ones, a check that they cannot deadlock, a simulator."""

from .._core.base import front_door
from .actions import Action, Overlap
from .auto import auto
from .costs import Costs
from .named import dualpipev, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2, zbv
from .schedule import Schedule
from .task_graph import Transfer
from .timed_task import TimedTask
from .timeline import Timeline

__all__ = [
    "Action",
    "Costs",
    "Overlap",
    "Schedule",
    "TimedTask",
    "Timeline",
    "Transfer",
    "auto",
    "dualpipev",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "zb_h1",
    "zb_h2",
    "zbv",
]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
