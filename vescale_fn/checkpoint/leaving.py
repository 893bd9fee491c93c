"""A process of a run that is told to end does so where a step has ended, so that no step is taken again."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from .._core.distributed.worker import RESIZE, Left
from .recovery import everyone

ALL_TOLD = 0.5  # seconds within which whoever ends a run tells all of its processes


class Leaving:
    """While it is entered, SIGTERM is noted instead of obeyed, and so is what `launch` tells processes of which there are to be
    another number; a second one ends the process as ever. A handler of the user's stays in force instead.

    Args:
        group: as of `buddies.Copies`.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._told = group, 0  # the number of the signal
        self._set: list[int] = []

    def __enter__(self) -> Leaving:
        if threading.current_thread() is threading.main_thread():
            for number in signal.SIGTERM, RESIZE:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._set.append(number)
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        while self._set:
            signal.signal(self._set.pop(), signal.SIG_DFL)

    def _note(self, number: int, *_: Any) -> None:
        self.__exit__()
        self._told = number

    def after(self, step: int, keep: Callable[[], None], save: Callable[[], str]) -> None:
        """End this process, where it or another one has been told to; called by all, after each step.

        Args:
            step: how many are done.
            keep: waits until the copies of this step are complete.
            save: saves it where no process goes on; it says where.
        """
        told = everyone(self._group, self._told)
        if not any(told):
            return
        keep()
        time.sleep(0 if RESIZE in told else ALL_TOLD)
        told = everyone(self._group, self._told)  # by when all have kept it
        if RESIZE in told:
            raise Left()
        if all(told):
            where = save()
            if self._group is None or os.environ.get("RANK", "0") == "0":
                print(f"elastic: told to end after step {step}{where}", file=sys.stderr, flush=True)
        if self._told:
            raise Left()
        everyone(self._group, None)  # which raises when they are gone; whoever starts processes again does so
