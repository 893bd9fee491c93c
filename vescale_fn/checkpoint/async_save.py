"""Saves that go on while the program does: one at a time, and never lost silently."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._core.base.errors import CheckpointError
from .._core.base.messages import report
from .._core.distributed import worker


class Saving:
    """A save that goes on in the background: what ``save(..., background=True)`` returns.

    >>> import tempfile, torch, vescale_fn as vfn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = vfn.save(folder + "/last", {"w": torch.ones(3)}, background=True)
    ...     saving.wait()
    ...     saving.done()
    True
    """

    def __init__(self, path: Path, begin: Callable[[], bool], work: Callable[[], None]) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(begin, work), name=f"save {path.name}")

    def _run(self, begin: Callable[[], bool], work: Callable[[], None]) -> None:
        if begin():
            _running.append(self)  # not before its thread has started: another one may wait for what is listed here
        self._begun.set()
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


_running: list[Saving] = []  # and those that have ended, until it is told how


def start(path: Path, begin: Callable[[], bool], work: Callable[[], None]) -> Saving:
    """Begin a save; the one before has ended (see `finish_last`).

    An interrupt comes before its thread has called `begin`, which is False where the caller has closed the save by then, and
    `work` fails; or after that, and the save goes on, as one that `finish_last` waits for.
    """
    saving = Saving(path, begin, work)
    saving._thread.start()
    saving._begun.wait()
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _end_child, exitpriority=0)
    return saving


def finish_last(tell: bool = True) -> None:
    """Wait for the save that may go on; raise what it failed with, unless that has been raised, or is not to be told."""
    for saving in list(_running):  # several, if several threads of the program save
        saving._thread.join()
        if tell:
            with contextlib.suppress(ValueError):  # another thread was quicker
                _running.remove(saving)
            saving.wait()


def _tell_all() -> bool:
    """Wait for all saves, and write what they failed with to stderr; whether one has failed."""
    failed = False
    while _running:
        try:
            finish_last()
        except Exception as error:
            failed = True
            print(f"a save in the background failed, as was found when the program ended\n{error}", file=sys.stderr)
    return failed


def _end_process() -> None:
    """At Python's end: fail if a save has. What is raised here would be printed and the exit status stay 0; only streams
    that cannot be flushed make Python end with another one (120)."""
    if _tell_all():
        sys.stderr = _Unflushable(sys.stderr)


def _end_child() -> None:
    """The same for a process of `multiprocessing`, which ends without that."""
    ending_with = sys.exc_info()[1]
    if _tell_all() and ending_with is None:
        sys.exit(1)


class _Unflushable:
    """A stream whose last flush, after all other things that are done at exit, fails."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError("a save in the background failed")


os.register_at_fork(after_in_child=_running.clear)  # the child has not the threads
atexit.register(_end_process)
worker.at_end.append(finish_last)  # a launched rank ends without Python's own farewell
