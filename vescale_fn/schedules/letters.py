"""Rows of a schedule in letters, one for each task, so that a schedule is written as its formula."""

from __future__ import annotations

from collections import deque

from .actions import Action, Kind, Overlap, Task

_KINDS: dict[str, Kind] = {"f": "F", "b": "B", "d": "BW"}


def row(letters: str, stage: int, other: int = -1, m: int | None = None) -> tuple[Task, ...]:
    """The tasks of one rank; forward and backward passes take the microbatches in ascending order.

    Args:
        letters: f for F, b for B, d for BW, of the first stage in lower case, of the second in upper case; w for W of what is
            longest without it, of either; ``[fD]`` for an `Overlap`.
        stage: the first stage.
        other: the second, if there is one.
        m: where given, later microbatches are left out.

    >>> " ".join(map(str, row("ffFBw[fD]", 0, 3)))
    '0F0 0F1 3F0 3B0 3W0 (0F2;3BW1)'
    """
    counts = dict.fromkeys("fbFB", 0)
    split: deque[Action] = deque()
    tasks: list[Task] = []
    opened: list[Action] | None = None  # what stands in brackets
    for letter in letters:
        if letter == "[":
            opened = []
        elif letter == "]" and opened is not None:
            tasks.append(Overlap(*opened))
            opened = None
        else:
            if letter == "w":
                _, where, i = split.popleft()
                action = Action("W", where, i)
            else:
                counted = {"d": "b", "D": "B"}.get(letter, letter)  # a microbatch has either of B and BW
                action = Action(_KINDS[letter.lower()], other if letter.isupper() else stage, counts[counted])
                counts[counted] += 1
            if action.kind == "B":
                split.append(action)
            if m is None or action.microbatch < m:
                (tasks if opened is None else opened).append(action)
    return tuple(tasks)
