"""What a rank of a pipeline does: forward, backward by inputs, backward by weights, or two of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["F", "B", "W", "BW"]
KINDS = ("F", "B", "W", "BW")


class Action(NamedTuple):
    """One task of a pipeline: what is run, of which stage, for which microbatch.

    Args:
        kind: "F", the forward pass; "B", the gradient of the stage's inputs, which the stage before waits for; "W", the
            gradient of its parameters, which nobody waits for; "BW", both in one.
        stage: counted along the model, from 0.
        microbatch: which part of the batch, from 0.

    Source: the split of B and W is of zero-bubble pipelines, arXiv 2401.10241.

    >>> import vescale_fn as vfn
    >>> str(vfn.schedules.Action("BW", stage=2, microbatch=5))
    '2BW5'
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """Two actions that a rank runs at once, so that one computes while the other communicates.

    Both begin when both have their inputs; the results of both are there when both have ended.

    Source: DualPipe, https://github.com/deepseek-ai/DualPipe.

    >>> from vescale_fn.schedules import Action, Overlap
    >>> str(Overlap(Action("F", 0, 3), Action("BW", 1, 0)))
    '(0F3;1BW0)'
    """

    a: Action
    b: Action

    def __str__(self) -> str:
        return f"({self.a};{self.b})"


Task: TypeAlias = Action | Overlap


def actions_of(task: Task) -> tuple[Action, ...]:
    """The actions of one entry of a row: itself, or both of an `Overlap`."""
    return tuple(task) if isinstance(task, Overlap) else (task,)


def actions_in(row: tuple[Task, ...]) -> Iterator[Action]:
    """All actions of a row, in order."""
    for task in row:
        yield from actions_of(task)
