"""A process of a run that is told to end does so where a step has ended, so that no step is taken again."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from .._core.distributed.worker import RESIZE, Left
from .buddies import Copies
from .manager import Manager
from .recovery import everyone

ALL_TOLD = 0.5  # seconds within which whoever ends a run tells all of its processes


class Leaving:
    """While it is entered, SIGTERM is noted instead of obeyed, and so is what `launch` tells processes of which there are to be
    another number; a second one ends the process as ever. A handler of the user's stays in force instead.

    Args:
        steps: how many there are to be in all; behind the last one it ends anyway.
        group: as of `Copies`.
        copies: what the others go on from.
        manager: saves the state where no others are left.
    """

    def __init__(self, steps: int, group: Any, copies: Copies | None, manager: Manager | None) -> None:
        self._steps, self._group, self._copies, self._manager = steps, group, copies, manager
        self._told = 0  # the number of the signal
        self._set: list[int] = []

    def __enter__(self) -> Leaving:
        keeps = self._copies is not None or self._manager is not None
        if keeps and threading.current_thread() is threading.main_thread():
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

    def after(self, step: int, state: Any) -> None:
        """End this process, where it or another one has been told to; called by all, with the state after each step."""
        if step == self._steps or (self._copies is None and self._manager is None):
            return
        told = everyone(self._group, self._told)
        if not any(told):
            return
        if self._copies is not None:
            self._copies.wait()
        time.sleep(0 if RESIZE in told else ALL_TOLD)
        told = everyone(self._group, self._told)  # by when all have their copies
        if RESIZE in told:
            raise Left()
        if all(told):
            where = self._saved(step, state)
            if self._group is None or os.environ.get("RANK", "0") == "0":
                print(f"elastic: told to end after step {step}{where}", file=sys.stderr, flush=True)
        if self._told:
            raise Left()
        everyone(self._group, None)  # which raises when they are gone; whoever starts processes again does so

    def _saved(self, step: int, state: Any) -> str:
        """Save a state that perhaps is not saved yet; where it is then."""
        if self._manager is None:
            return ", which memory alone has: there is no manager to save it with"
        if self._manager.latest() != step:
            self._manager.save(step, state)
        self._manager.wait()
        return f", saved in {self._manager.folder}"
