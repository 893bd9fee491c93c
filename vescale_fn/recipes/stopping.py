"""A graceful stop: a run that is told to end finishes its step, saves, and says so."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Stopping:
    """While it is entered, SIGTERM is noted instead of obeyed; a second one ends the process as ever."""

    def __init__(self) -> None:
        self.told = False
        self._before: Any = None

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        self.told = True

    def now(self, device: str) -> bool:
        """Whether some rank was told to end. All ranks ask together, once a step, and get one answer."""
        if not (dist.is_available() and dist.is_initialized()):
            return self.told
        told = torch.tensor(int(self.told), device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return bool(told)
