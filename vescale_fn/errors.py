"""The error classes of vescale_fn, and how a message is put together.

A message says which function, which argument, what was there, what was needed, the arithmetic, the mesh, and what to
write instead; it lists every failure at once. `report` is the one place that lays these parts out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from . import tracebacks


class VfnError(Exception):
    """Base of every error that vescale_fn raises on purpose; it is shown with the user's line as the last frame."""

    ends_at_the_users_line = True  # for `tracebacks`

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        tracebacks.hide_from_pytest()


class SpecError(VfnError, ValueError):
    """A partition spec does not fit its mesh, its value or its tree."""


class MeshError(VfnError, ValueError):
    """A mesh cannot be made, is missing, or two meshes were mixed."""


class CollectiveError(VfnError, ValueError):
    """A collective was called with arguments that do not fit its operand or its axis."""


class TypingError(VfnError, ValueError):
    """A value was used against its type: varying, invariant, unreduced or reduced.

    No TypeError: out of one of those, torch's operators make Python's "unsupported operand type(s)", without the
    message.
    """


class TransformError(VfnError, TypeError):
    """A transform was given something that it cannot transform."""


class RandomError(VfnError, TypeError):
    """Something is not a key, or a draw was asked for what it cannot give."""


class RankError(VfnError, RuntimeError):
    """A launched rank failed; the message carries that rank's own traceback."""


class DivergenceError(VfnError, RuntimeError):
    """In debug mode: the ranks do not do the same, or one has left while others wait for it.

    `follows` says that another rank's own failure comes first.
    """

    def __init__(self, message: str, follows: bool = False) -> None:
        super().__init__(message)
        self.follows = follows


class InPlaceError(VfnError, RuntimeError):
    """A write would be lost, or would change what other ranks hold."""


class ReshardError(VfnError, RuntimeError):
    """Under `strict`: a move of data that the program did not ask for."""


def report(where: str, what: str, failures: Iterable[str] = (), fix: str = "") -> str:
    """Lay out a message: ``where: what``, one bullet for each failure, and what to write instead."""
    lines = [f"{where}: {what}", *(f"  * {failure}" for failure in failures)]
    if fix:
        lines.append(f"  Instead: {fix}")
    return "\n".join(lines)


def mesh_text(axes: Mapping[str, int]) -> str:
    """A mesh on one short line: ``mesh (dp=2, tp=4)``."""
    return "mesh (" + ", ".join(f"{name}={size}" for name, size in axes.items()) + ")"
