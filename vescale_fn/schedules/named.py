"""Schedules by their names in the literature, for p ranks and m microbatches."""

from __future__ import annotations

from .._core.base.errors import ScheduleError
from .._core.base.messages import report, short
from .actions import Action, Kind, Task
from .schedule import Schedule


def gpipe(p: int, m: int) -> Schedule:
    """All forward passes, then all backward passes.

    With equal stages each step has an idle time of (p - 1)(F + B + W), and every rank holds m microbatches.

    Args:
        p: ranks, each with one stage.
        m: microbatches.

    Source: GPipe, arXiv 1811.06965.

    >>> import vescale_fn as vfn
    >>> timeline = vfn.schedules.gpipe(4, 8).simulate()
    >>> timeline.idle[0], timeline.in_flight
    (9, (8, 8, 8, 8))
    """
    check_sizes("gpipe", p=p, m=m)
    return Schedule(tuple(range(p)), tuple(_row(r, "F" * m + "D" * m) for r in range(p)))


def one_f_one_b(p: int, m: int) -> Schedule:
    """As many forward passes as there are ranks from here on, then backward and forward in turns.

    The idle time is that of `gpipe`, (p - 1)(F + B + W) with equal stages, but rank r holds min(m, p - r) microbatches.

    Args:
        p: ranks, each with one stage.
        m: microbatches.

    Source: PipeDream-flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473.

    >>> import vescale_fn as vfn
    >>> timeline = vfn.schedules.one_f_one_b(4, 8).simulate()
    >>> timeline.idle[0], timeline.in_flight
    (9, (4, 3, 2, 1))
    """
    check_sizes("one_f_one_b", p=p, m=m)
    rows = []
    for r in range(p):
        ahead = min(m, p - 1 - r)
        rows.append(_row(r, "F" * ahead + "FD" * (m - ahead) + "D" * ahead))
    return Schedule(tuple(range(p)), tuple(rows))


_KINDS: dict[str, Kind] = {"F": "F", "B": "B", "W": "W", "D": "BW"}


def _row(stage: int, letters: str) -> tuple[Task, ...]:
    """The row of a rank with one stage, in letters (D for BW); each kind runs the microbatches in ascending order."""
    counts = dict.fromkeys(letters, 0)
    row = []
    for letter in letters:
        row.append(Action(_KINDS[letter], stage, counts[letter]))
        counts[letter] += 1
    return tuple(row)


def check_sizes(name: str, **sizes: int) -> None:
    """Raise unless all are whole numbers from 1 on."""
    wrong = [f"{key} is {short(value)}" for key, value in sizes.items() if type(value) is not int or value < 1]
    if wrong:
        raise ScheduleError(report(f"schedules.{name}", "sizes are whole numbers from 1 on", wrong))
