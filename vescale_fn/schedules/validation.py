"""Whether a schedule is complete: each task of each stage is there once, on the rank that has the stage, after its inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .._core.base.errors import ScheduleError
from .._core.base.messages import report
from .actions import KINDS, Action, Overlap, Task, actions_in, actions_of

_SHOWN = 6  # failures


def check(placement: tuple[int, ...], order: tuple[tuple[Task, ...], ...], microbatches: int) -> None:
    """Raise with all that is missing or twice, or where it cannot be.

    Raises:
        vescale_fn.errors.ScheduleError: as `Schedule.check` says.
    """
    failures = list(_misplaced(placement, order)) or list(_incomplete(placement, order, microbatches))
    if microbatches == 0:
        failures = ["there is no task"]
    if failures:
        more = len(failures) - _SHOWN
        shown = failures[:_SHOWN] + [f"and {more} more"] * (more > 0)
        raise ScheduleError(report("Schedule.check", "the schedule is not complete", shown))


def _misplaced(placement: tuple[int, ...], order: tuple[tuple[Task, ...], ...]) -> Iterator[str]:
    """Entries that no rank could run."""
    for stage, rank in enumerate(placement):
        if rank not in range(len(order)):
            yield f"stage {stage} is on rank {rank}, but there are rows for {len(order)} ranks"
    for rank, row in enumerate(order):
        for task in row:
            if not isinstance(task, (Action, Overlap)):
                yield f"rank {rank} has {task!r} in its row, which is neither an Action nor an Overlap"
                continue
            for action in actions_of(task):
                if action.kind not in KINDS:
                    yield f"rank {rank} runs {action}, but {action.kind!r} is not among {', '.join(KINDS)}"
                elif action.stage not in range(len(placement)):
                    yield f"rank {rank} runs {action}, but there are {len(placement)} stages"
                elif action.microbatch < 0:
                    yield f"rank {rank} runs {action}, but microbatches are counted from 0"
                elif placement[action.stage] != rank:
                    yield f"rank {rank} runs {action}, but stage {action.stage} is on rank {placement[action.stage]}"


def _incomplete(placement: tuple[int, ...], order: tuple[tuple[Task, ...], ...], microbatches: int) -> Iterator[str]:
    """Actions that are missing, that are there twice, or that stand ahead of what they need of their own stage."""
    seen = Counter(action for row in order for action in actions_in(row))
    for stage, rank in enumerate(placement):
        for i in range(microbatches):
            f, b, w, both = (seen[Action(kind, stage, i)] for kind in KINDS)
            counted = {"F": f, "B": b, "W": w, "BW": both}
            for kind in (kind for kind, count in counted.items() if count > 1):
                yield f"rank {rank} runs {stage}{kind}{i} {counted[kind]} times"
            if not f:
                yield f"rank {rank} never runs {stage}F{i}"
            if both and (b or w):
                yield f"rank {rank} runs {stage}BW{i} and also {stage}{'B' if b else 'W'}{i}"
            elif not both and not (b and w):
                missing = f"{stage}BW{i}" if not (b or w) else f"{stage}{'W' if b else 'B'}{i}"
                yield f"rank {rank} never runs {missing}"
    for rank, row in enumerate(order):
        yield from _early(rank, row, set(seen))


def _early(rank: int, row: tuple[Task, ...], there: set[Action]) -> Iterator[str]:
    """Backward tasks ahead of what the same stage must have run for the same microbatch."""
    done: set[Action] = set()
    for task in row:
        for kind, stage, i in actions_of(task):
            needed = Action("B" if kind == "W" else "F", stage, i)
            if kind != "F" and needed in there - done:
                yield f"rank {rank} runs {stage}{kind}{i} before {needed}"
        done.update(actions_of(task))
