"""A graceful stop: a run that is told to end, by SIGTERM or ^C, finishes its step, saves, and says so."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Stopping:
    """While it is entered, SIGTERM and SIGINT are noted instead of obeyed; a second one ends the process as ever.

    A rank that ignores SIGINT goes on doing so: `launch` passes ^C on to its ranks as a SIGTERM.
    """

    def __init__(self) -> None:
        self.told = 0  # the number of the signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in signal.SIGTERM, signal.SIGINT:
                if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                    self._before[number] = before  # first: the signal may come with the handler
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.__exit__()
        self.told = number

    def now(self, device: str) -> bool:
        """Whether some rank was told to end. All ranks ask together, once a step, and get one answer."""
        if not (dist.is_available() and dist.is_initialized()):
            return bool(self.told)
        told = torch.tensor(int(bool(self.told)), device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return bool(told)
