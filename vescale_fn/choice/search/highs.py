"""HiGHS, the solver: from installed or not to a run that an interrupt ends."""

from __future__ import annotations

import threading
import time
from typing import Any

from ..._core.base.errors import VfnError
from ..._core.base.messages import report


def highs() -> Any:
    """The solver.

    Raises:
        VfnError: it is not installed.
    """
    try:
        import highspy
    except ImportError:
        what = "the solver HiGHS is not installed"
        raise VfnError(report("auto", what, fix="pip install 'vescale_fn[auto]', or pip install highspy")) from None
    return highspy


class OutOfTime(VfnError):
    """The solver found nothing in the time that it had."""


class Deadline:
    """The time that all solutions of a search have together.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return max(0.0, self._end - time.monotonic())

    def part(self, share: float) -> Deadline:
        """A share of what is left."""
        return Deadline(share * self.left)

    def error(self) -> OutOfTime:
        """That nothing was found."""
        what = f"the solver found no layout in {self.seconds:g} s"
        return OutOfTime(report("auto", what, fix="more time, seconds=; or specs that are given, fixed="))


def solver_of(lp: Any) -> Any:
    """A solver with this program."""
    solver = highs().Highs.__base__()  # without the callbacks of its own, whose making prints a banner
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.passModel(lp)
    return solver


def is_infeasible(solver: Any) -> bool:
    """Whether what it was given has no solution."""
    kinds = highs().HighsModelStatus
    return solver.getModelStatus() in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible)


def run(solver: Any, deadline: Deadline) -> None:
    """Solve, in the time that is left. It runs beside the caller, who waits: an interrupt ends it, and comes through."""
    kinds = highs().cb.HighsCallbackType
    stop, failures = threading.Event(), list[BaseException]()

    def asked(kind: Any, message: str, out: Any, given: Any, data: Any) -> None:
        if stop.is_set():
            given.user_interrupt = True

    def work() -> None:
        try:
            solver.run()
        except BaseException as error:  # to whom waits
            failures.append(error)

    solver.setOptionValue("time_limit", solver.getRunTime() + deadline.left)  # of all its runs together
    solver.setCallback(asked, None)
    for kind in (kinds.kCallbackSimplexInterrupt, kinds.kCallbackIpmInterrupt, kinds.kCallbackMipInterrupt):
        solver.startCallback(kind)
    thread = threading.Thread(target=work, name="HiGHS", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.05)  # a wait without an end is not left where the signal came to another thread
    finally:
        stop.set()
        while thread.is_alive():
            thread.join()
        solver.setCallback(None, None)
    if failures:
        raise failures[0]
