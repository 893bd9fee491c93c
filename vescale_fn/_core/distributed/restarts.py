"""Ranks that are lost, or of which there are to be another number: all are ended and started again, as what one of them
lacks the others wait for. What they keep for that, they keep in a folder in memory, which outlives them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..base.errors import MeshError, RankError
from ..base.messages import described, report
from .failure_text import BROKEN, LATE, said_first
from .worker import Message, RestartMemory, Settings

IN_MEMORY = "/dev/shm"


class Lost(RankError):
    """Ranks are gone, or say that others are; nothing says that the program is wrong."""


class Resized(Exception):
    """There are to be so many ranks."""

    def __init__(self, nprocs: int, why: str = "") -> None:
        super().__init__(nprocs, why)
        self.nprocs, self.why = nprocs, why or f"there are to be {nprocs} ranks"


def lost(failed: list[Message]) -> bool:
    """Whether ranks have failed as they do where some are gone: one was killed, or has ended without a word, or all complain of
    a connection or of the time that a collective took."""
    if failed[0].kind == "late":
        return False
    of_others = [BROKEN.search(one.text) or LATE.search(said_first(one.text)) for one in failed if one.text]
    return len(of_others) < len(failed) or all(of_others)


def check_left(failed: list[Message], count: int, settings: Settings) -> None:
    """Raise where some ranks, or all, have ended as they were told to."""
    left = sorted(message.rank for message in failed if message.kind == "left")
    told = f"rank{'s' * (len(left) > 1)} {', '.join(map(str, left))} of {count} had been told to end"
    if len(left) == count:
        raise RankError(f"launch: {told}")
    if left and settings.memory is not None:
        raise Resized(count - len(left), told)


def started_again(run: Callable[[Settings], list[bytes]], settings: Settings) -> list[bytes]:
    """What `run` gives, which is called again where ranks were lost, ``settings.restarts`` times at most."""
    if not settings.restarts and settings.resize is None:
        return run(settings)
    left, late = settings.restarts, time.monotonic() + settings.limit
    with _in_memory() as memory:
        settings = dataclasses.replace(settings, memory=memory)
        while True:
            try:
                return run(dataclasses.replace(settings, limit=max(0.1, late - time.monotonic())))
            except Resized as asked:
                settings = dataclasses.replace(settings, nprocs=asked.nprocs)
                why = asked.why
            except Lost as error:
                if not left:
                    raise
                left -= 1
                why = str(error).split("\n")[0].removeprefix("launch: ").partition(";")[0]
            more = "1 restart is left" if left == 1 else f"{left or 'no'} restarts are left"
            print(f"launch: {why}; all start again ({more})", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _in_memory() -> Iterator[RestartMemory]:
    """A folder in memory for ranks, of which nothing is left."""
    folder = tempfile.mkdtemp(prefix="vescale_fn-", dir=IN_MEMORY if os.path.isdir(IN_MEMORY) else None)
    try:
        yield RestartMemory(folder, f"{process_name(os.getpid())}-{secrets.token_hex(4)}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def process_name(pid: int) -> str:
    """A process's number, and when it was started, which together are no other's on this machine."""
    return f"{pid}-{_started(pid)}"


def is_alive(name: str) -> bool:
    """Whether the process of this `process_name` is there."""
    pid, _, started = name.partition("-")
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """When a process was started, as the system counts; "" if there is none, or the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


class Requests:
    """How many ranks there are to be, as it is asked for through a connection."""

    def __init__(self, asked: Any) -> None:
        self.ends: list[Any] = [] if asked is None else [asked]

    def check(self, most: int) -> None:
        """Raise `Resized` where another number has been asked for."""
        for end in self.ends:
            if not end.poll():
                continue
            try:
                count = end.recv()
            except (EOFError, OSError):  # nobody is left who could ask
                self.ends = []
                return
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
                what = f"what came through resize must be a number of ranks, but it is {described(count)}"
                raise MeshError(report("launch", what, fix=f"an integer from 1 to {most:,}"))
            raise Resized(count)
