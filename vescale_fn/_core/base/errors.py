"""The error classes of vescale_fn."""

from __future__ import annotations

from typing import Any

from . import tracebacks


class VfnError(Exception):
    """Base of every error that vescale_fn raises on purpose; it is shown with the user's line as the last frame."""

    ends_at_the_users_line = True  # for `tracebacks`
    __module__ = "vescale_fn.errors"  # where users find them: tracebacks and pickles name it

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:
            cls.__module__ = VfnError.__module__

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        tracebacks.hide_from_pytest()


class SpecError(VfnError, ValueError):
    """A partition spec does not fit its mesh, its value or its tree."""


class TreeError(VfnError, ValueError):
    """A leaf of a tree is a container that trees do not go into, or another library's array; or a class cannot be a node."""


class MeshError(VfnError, ValueError):
    """A mesh cannot be made, is missing, or two meshes were mixed."""


class CollectiveError(VfnError, ValueError):
    """A collective was called with arguments that do not fit its operand or its axis."""


class VaryingTypeError(VfnError, ValueError):
    """A value was used against its type: varying, invariant, unreduced or reduced.

    No TypeError: out of one of those, torch's operators make Python's "unsupported operand type(s)", without the
    message. `TypingError` is its earlier name, which stays.
    """


TypingError = VaryingTypeError  # its earlier name, which stays


class TransformError(VfnError, TypeError):
    """A transform was given something that it cannot transform."""


class RandomError(VfnError, TypeError):
    """Something is not a key, or a draw was asked for what it cannot give."""


class CheckpointError(VfnError, RuntimeError):
    """A checkpoint cannot be written, or what is in it cannot be had, or is not what was asked for."""


class RankError(VfnError, RuntimeError):
    """A launched rank failed; the message carries that rank's own traceback."""


class DivergenceError(VfnError, RuntimeError):
    """In debug mode: the ranks do not do the same, or one has left while others wait for it. Under `deterministic(check=)`: a
    run has other bits than that with which it is compared.

    `follows` says that another rank's own failure comes first.
    """

    def __init__(self, message: str, follows: bool = False) -> None:
        super().__init__(message)
        self.follows = follows


class InPlaceError(VfnError, RuntimeError):
    """A write would be lost, or would change what other ranks hold."""


class DonationError(VfnError, RuntimeError):
    """A value was used whose memory a jitted function has taken over, or one is given to it that it cannot take."""


class RecordError(VfnError, RuntimeError):
    """Under `jit`, a value of one recording is used in another, or recording raised on another rank.

    `follows` says that another rank's own failure comes first.
    """

    def __init__(self, message: str, follows: bool = False) -> None:
        super().__init__(message)
        self.follows = follows


class DataError(VfnError, ValueError):
    """A data set cannot be read in batches, or a batch is not as the others."""


class NoValueError(VfnError, ValueError):
    """A value was asked for where only shapes are known: of a `ShapeDtype`, or of an array on an abstract mesh."""


class ScheduleError(VfnError, ValueError):
    """A schedule of a pipeline is not complete, would deadlock, or cannot be made for these sizes."""


class HardwareError(VfnError, ValueError):
    """Figures of hardware that cannot be, or hardware with fewer ranks than a mesh has."""


class ReshardError(VfnError, RuntimeError):
    """Under `strict`: a move of data that the program did not ask for."""


class ParityError(VfnError, AssertionError):
    """`check_parity`: a function gives other numbers on a mesh than on one device. ``report`` is the table of all values."""

    report: Any = None
