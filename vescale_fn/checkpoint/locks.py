"""One writer at a time for each path: a lock beside it names its owner, which can be seen to be dead.

The lock of `name` is the folder `.name.lock` with one file in it, which is called by a token and says who holds the lock.
It is prepared under another name and renamed, which works where the lock is missing or empty: so it appears with its
owner in it, and of several that try one succeeds. A dead owner's file is removed by its token, never that of another.

Whether an owner on this machine is alive is asked of the operating system. One on another machine (or in another
container) renews the time of its file every few seconds, and counts as dead when it has not done so for two minutes.

An interrupt may come between any two lines of what gives a lock back. So a lock is held as long as a call of this package
is on the stack of the thread that took it; one that was left behind is given back by the thread that renews it, and before
that taken over by the next call in the same process that asks for it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .._core.base.errors import CheckpointError
from .._core.base.messages import report
from .paths import failing

RENEWED, DEAD = 10.0, 120.0  # seconds: how often a lock is renewed, and after how long without that its owner is dead


class Owner(NamedTuple):
    """Who holds a lock."""

    host: str
    machine: str  # what tells this machine, and this container, from others of the same name
    pid: int
    started: str  # when the process did, as the system counts: its number may be used again
    thread: str
    since: str


def token() -> str:
    """A name that no other writer has; later ones come later in order."""
    return f"{time.time_ns():016x}{secrets.token_hex(3)}"


def beside(path: Path, word: str) -> Path:
    """What is kept beside `path` while it is written or removed, under a name that no other writer uses."""
    return path.with_name(f".{path.name}.{word}-{token()}")


def all_beside(path: Path, word: str) -> list[Path]:
    """What is there under such names, in the order in which it was made."""
    form = re.compile(rf"\.{re.escape(path.name)}\.{word}(-[0-9a-f]+)?")
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(path.with_name(each) for each in os.listdir(path.parent) if form.fullmatch(each))
    return []


class Busy(CheckpointError):
    """Somebody else has the lock."""


class Lock:
    """The right to write at a path, until it is released."""

    def __init__(self, path: Path, token: str) -> None:
        self._path, self._token, self._folder = path, token, _folder_of(path)
        self._released = threading.Event()
        self._last: dict[str, int] = {}  # "by": the thread that holds it to its end, the first that says so

    def check(self, where: str) -> None:
        """Raise if somebody else has taken the lock over."""
        if not self.is_mine():
            raise CheckpointError(
                report(
                    where,
                    f"something else has begun to write {self._path}, and this is void",
                    ["the same thread, in a signal handler say, or this process was forked meanwhile"],
                )
            )
        if not (self._folder / self._token).exists():
            raise CheckpointError(
                report(
                    where,
                    f"another process took over the writing of {self._path}",
                    [f"this one stood still for more than {DEAD:.0f} s"],
                )
            )

    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return _held.get(self._token) == threading.get_ident()

    def hand_over(self) -> bool:
        """Let the thread that calls this hold it to its end; False if another one has begun to give it back."""
        if self._last.setdefault("by", threading.get_ident()) == threading.get_ident() and self._token in _held:
            _held[self._token] = threading.get_ident()
        return self.is_mine()

    def keep(self) -> bool:
        """Hand it over no more; False if this thread does not hold it, or another one does to its end."""
        return self.is_mine() and self._last.setdefault("by", threading.get_ident()) == threading.get_ident()

    def release(self) -> None:
        """Give the right back, if this thread has it. Once is enough."""
        if self.is_mine():
            self._give_back()

    def renew(self) -> None:
        """Show every few seconds that the owner is alive, until it has given the lock back or has left it behind."""
        while not self._released.wait(RENEWED):
            if not _works(_held.get(self._token)):
                return self._give_back()
            with contextlib.suppress(OSError):
                os.utime(self._folder / self._token)

    def _give_back(self) -> None:
        self._released.set()
        with contextlib.suppress(OSError):
            os.unlink(self._folder / self._token)
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)  # which fails where another writer has put its own there
        _held.pop(self._token, None)


_held: dict[str, int] = {}  # the tokens of this process, with the thread that holds each
os.register_at_fork(after_in_child=_held.clear)
_PACKAGE = os.path.dirname(__file__) + os.sep


def _works(thread: int | None) -> bool:
    """Whether a call of this package is on the stack of a thread."""
    frame = None if thread is None else sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame is not None


def acquire(path: Path, where: str) -> Lock:
    """The lock of a path, or a CheckpointError, `Busy`, that names its owner."""
    made, folder = token(), _folder_of(path)
    prepared = folder.with_name(f"{folder.name}-{made}")
    _held[made] = threading.get_ident()  # before another thread can see it
    try:
        with failing(where, path):
            while not _taken(prepared, folder, made):
                holder = _holder(folder, prepared / made)
                if holder is not None:
                    raise Busy(_refusal(path, where, *holder))
    except BaseException:
        Lock(path, made).release()
        _remove(prepared)
        raise
    lock = Lock(path, made)
    with contextlib.suppress(RuntimeError):  # Python is ending: then this will not take long
        threading.Thread(target=lock.renew, name=f"lock of {path.name}", daemon=True).start()
    return lock


@contextlib.contextmanager
def locked(path: Path, where: str) -> Iterator[Lock]:
    """The lock of a path for a while."""
    lock = acquire(path, where)
    try:
        yield lock
    finally:
        lock.release()


def remains(path: Path) -> list[Path]:
    """The locks of `path` that were prepared and not used: whoever made them died, or makes another one."""
    return [each for each in all_beside(path, "lock") if each != _folder_of(path)]


def sweep(path: Path) -> None:
    """Remove these."""
    for each in remains(path):
        _remove(each)


def _folder_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(folder / name)
        os.rmdir(folder)


def _taken(prepared: Path, folder: Path, made: str) -> bool:
    """Prepare a lock if that has not been done, and put it in its place; False where there is one already."""
    try:
        if not (prepared / made).exists():
            prepared.mkdir(exist_ok=True)
            (prepared / made).write_text(json.dumps(_me()._asdict()))
        os.rename(prepared, folder)
    except FileNotFoundError:  # swept away by the one that has the lock
        if not folder.parent.is_dir():
            raise
        return False
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _holder(folder: Path, now: Path) -> tuple[Owner | None, float] | None:
    """Who holds a lock, and how many seconds ago it was renewed; None if nobody does, where the lock is free then.

    `now` is a file that has just been made: times are compared as the file system has them, not the clocks of machines.
    """
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            with open(folder / name, errors="replace") as file:
                owner, age = _parsed(file.read()), now.stat().st_mtime - os.fstat(file.fileno()).st_mtime
            if _is_alive(owner, name, age):
                return owner, age
            os.unlink(folder / name)
            _held.pop(name, None)
    return None


def _parsed(text: str) -> Owner | None:
    try:
        owner = Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None
    return owner if isinstance(owner.pid, int) and owner.pid > 0 else None


def _is_alive(owner: Owner | None, name: str, age: float) -> bool:
    me = _me()
    if owner is None or (owner.host, owner.machine) != (me.host, me.machine):
        return age < DEAD
    if (owner.pid, owner.started) == (me.pid, me.started):
        holder = _held.get(
            name
        )  # a thread that asks for its own lock has left it behind: it never asks twice otherwise
        return holder != threading.get_ident() and _works(holder)
    return _started(owner.pid) in (owner.started, "")


def _refusal(path: Path, where: str, owner: Owner | None, age: float) -> str:
    me = _me()
    if owner is None:
        who = f"the lock {_folder_of(path)} cannot be read"
    elif (owner.host, owner.machine, owner.pid) == (me.host, me.machine, me.pid):
        who = f"this process, in its thread {owner.thread!r}, since {owner.since}"
    else:
        who = f"process {owner.pid} on {owner.host}, in its thread {owner.thread!r}, since {owner.since}"
    failures = [who]
    if owner is None or (owner.host, owner.machine) != (me.host, me.machine):
        failures.append(f"its last sign of life is {max(age, 0):.0f} s old; after {DEAD:.0f} s it counts as dead")
    return report(
        where, f"{path} is being written by somebody else", failures, "another path, or wait for the other to end"
    )


def _me() -> Owner:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return Owner(
        socket.gethostname(),
        _machine(),
        os.getpid(),
        _started(os.getpid()) or "",
        threading.current_thread().name,
        since,
    )


def _machine() -> str:
    """What differs between machines, and between containers whose processes do not see each other."""
    parts = list[str]()
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: int) -> str | None:
    """When a process was started, in the words of the system; "" if it does not say, None if there is none."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError, ValueError):
        return None
    except OSError:
        pass  # it is there, and another user's
    try:
        fields: Any = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""
