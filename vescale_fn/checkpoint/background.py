"""Saves that go on while the program does: one at a time, and never lost silently."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from pathlib import Path

from .. import _rank_process
from ..errors import CheckpointError, report


class Saving:
    """A save that goes on in the background: what ``save(..., background=True)`` returns.

    >>> import tempfile, torch, vescale_fn as vfn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = vfn.save(folder + "/last", {"w": torch.ones(3)}, background=True)
    ...     saving.wait()
    ...     saving.done()
    True
    """

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"save {path.name}")

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether it has come to an end, good or bad."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete and on the disk.

        Args:
            timeout: for so many seconds at most.

        Raises:
            CheckpointError: the save failed, on whichever rank; or it still goes on when the time is over.
        """
        self._thread.join(timeout)
        if not self.done():
            raise CheckpointError(report("wait", f"saving {self.path} still goes on after {timeout} s"))
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __repr__(self) -> str:
        return f"Saving({str(self.path)!r}, {'done' if self.done() else 'in progress'})"


_last: Saving | None = None


def start(path: Path, work: Callable[[], None]) -> Saving:
    """Begin a save; the one before has ended (see `finish_last`)."""
    global _last
    _last = Saving(path, work)
    _last._thread.start()
    return _last


def finish_last(tell: bool = True) -> None:
    """Wait for the save that may go on; raise what it failed with, unless that has been raised, or is not to be told."""
    global _last
    if _last is None:
        return
    if not tell:
        _last._thread.join()
        return
    before, _last = _last, None
    before.wait()


def _forget() -> None:
    global _last
    _last = None


os.register_at_fork(after_in_child=_forget)  # the child has not the thread
atexit.register(finish_last)
_rank_process.at_end.append(finish_last)  # a launched rank ends without Python's own farewell
