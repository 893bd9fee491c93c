"""A group of ranks forked from this process: start them, watch them, end them; none is left behind."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, connection, get_context
from pathlib import Path
from typing import Any

from .. import torch_internals
from ..base.errors import RankError
from ..base.source_lines import is_users, quoted
from . import worker
from .failure_text import BROKEN, first_and_others, how_it_ended, waited
from .restarts import Lost, Requests, Resized, check_left, lost, started_again
from .streams import Streams
from .worker import Job, Message, Settings

# Seconds: for all ranks to have met, for finished ranks to leave, to hear of more failures after the first one; and
# where all complain of others' ends, to hear of the rank that was first, which a busy machine may take to bury.
START, LEAVE, GRACE, BURIAL, ANSWER = {"cpu": 30.0, "cuda": 120.0}, 5.0, 0.2, 3.0, 1.0
HANDOVER = 30.0  # for ranks of which there are to be another number to end their step


class NotStarted(Exception):
    """The ranks did not get as far as calling the function."""


@dataclass(frozen=True)
class Rank:
    """A rank's process and the pipe to it."""

    process: Any
    pipe: connection.Connection


MOST = 2**12  # ranks on one machine: beyond that a number is a mistake, which would take all memory


def run(call: Callable[[], Any], settings: Settings) -> list[bytes]:
    """Fork the ranks, watch them, and return their pickled results; none of them is left when it returns."""
    return started_again(functools.partial(_run, call), settings)


def _run(call: Callable[[], Any], settings: Settings) -> list[bytes]:
    torch_internals.preload()
    ranks: list[Rank] = []
    nprocs = settings.nprocs
    reads = settings.stdin_rank is not None
    with told_to_end(ranks), tempfile.TemporaryDirectory(prefix="vescale_fn-") as folder, Streams(reads) as streams:
        job = Job(
            nprocs,
            settings.device,
            settings.timeout,
            folder,
            streams.ends,
            os.getpid(),
            settings.logs,
            settings.stdin_rank,
            memory=settings.memory,
        )
        try:
            for rank in range(nprocs):
                ranks.append(fork(worker.run_rank, rank, job, call))
            return results(ranks, settings, streams, START[settings.device], functools.partial(whereabouts, folder))
        except (RankError, Resized):
            for rank in ranks if settings.memory is not None else ():  # which note that they are told to end
                rank.process.kill()
            raise
        finally:
            end(ranks)


def results(
    ranks: list[Rank],
    settings: Settings,
    streams: Streams,
    start: float,
    where: Callable[[list[Rank], list[int]], dict[int, str]],
) -> list[bytes]:
    """Let ranks that have been started, within `start` seconds, run; their pickled results. `where` asks what some do now."""
    requests, again = Requests(settings.resize), settings.restarts > 0
    _, failed = hear(ranks, "ready", streams, start, requests)
    if failed:
        if again and lost(failed):
            raise Lost(first_and_others(failed, [], len(ranks)))
        raise NotStarted(failed[0].text or f"rank {failed[0].rank} {failed[0].title} before it could start")
    tell(ranks, "go")
    try:
        done, failed = hear(ranks, "done", streams, settings.limit, requests, settings.timeout if again else math.inf)
    except Resized:
        found = handed_over(ranks, streams)
        if found is None:
            raise
        done, failed = found, []
    except KeyboardInterrupt:  # as where this process is told to end; a second one ends them at once
        for rank in ranks:
            rank.process.terminate()
        hear(ranks, "done", streams, math.inf)
        raise
    if failed:
        check_left(failed, len(ranks), settings)
        if again and lost(failed):
            raise Lost(first_and_others(failed, list(done), len(ranks)))
        raise RankError(_told(failed, done, ranks, where))
    tell(ranks, "leave")
    late = time.monotonic() + LEAVE
    while any(rank.process.is_alive() for rank in ranks) and time.monotonic() < late:
        streams.wait([rank.process.sentinel for rank in ranks if rank.process.is_alive()], 0.05)
    return [done[rank] for rank in range(len(ranks))]


def _told(failed: list[Message], done: dict[int, Any], ranks: list[Rank], where: Callable[..., dict[int, str]]) -> str:
    """What is said of failures, and of where the other ranks are."""
    heard = {*done, *(message.rank for message in failed if message.kind == "failed")}
    ask = failed[0].kind == "late" or any(map(waited, failed))
    at = where(ranks, [i for i in range(len(ranks)) if i not in heard]) if ask else {}
    return first_and_others(failed, list(done), len(ranks), at)


def handed_over(ranks: list[Rank], streams: Streams) -> dict[int, Any] | None:
    """Let ranks of which there are to be another number end where they can go on from; what they give, if all are done."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, worker.RESIZE)
    said: dict[int, Message | None] = {}
    late = time.monotonic() + HANDOVER
    while len(said) < len(ranks) and time.monotonic() < late:
        silent = [i for i in range(len(ranks)) if i not in said]
        streams.wait([ranks[i].pipe for i in silent], 0.2)
        said |= {i: read(ranks[i].pipe) for i in silent if ranks[i].pipe.poll()}
    done = {i: message.value for i, message in said.items() if message is not None and message.kind == "done"}
    return done if len(done) == len(ranks) else None


@contextlib.contextmanager
def told_to_end(ranks: list[Rank]) -> Iterator[None]:
    """Where SIGTERM tells this process to end, its ranks are told, since they may have work to save.

    If they then return, all is well; if they end, this process ends as the signal alone would have ended it. A second
    SIGTERM ends it at once. A handler of the user's stays in force instead.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    told = False

    def tell_them(*_: Any) -> None:
        nonlocal told
        if told:
            raise RankError("launch: ended by SIGTERM, a second time")
        told = True
        for rank in ranks:
            with contextlib.suppress(ValueError):  # it has ended, and is put away
                rank.process.terminate()

    signal.signal(signal.SIGTERM, tell_them)
    try:
        yield
    except (NotStarted, RankError, Resized):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if told:
            os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def fork(target: Callable[..., None], *args: Any) -> Rank:
    """Fork a process that runs ``target(*args, pipe)``."""
    for stream in sys.stdout, sys.stderr:
        if stream is not None:
            stream.flush()
    with worker.forking:  # filters of warnings are the process's, and no other rank may hold this one's ends
        ours, theirs = Pipe()
        process = get_context("fork").Process(target=target, args=(*args, theirs))
        with warnings.catch_warnings():
            # Python warns of a fork beside threads; a rank that a fork has broken does not say "ready".
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
    return Rank(process, ours)


def tell(ranks: list[Rank], word: Any) -> None:
    """Send `word` to every rank."""
    for rank in ranks:
        with contextlib.suppress(OSError):  # it has gone already: `hear` finds out, where it matters
            rank.pipe.send(word)


def hear(
    ranks: list[Rank],
    kind: str,
    streams: Streams,
    seconds: float,
    requests: Requests | None = None,
    stopped: float = math.inf,
) -> tuple[dict[int, Any], list[Message]]:
    """Wait for every rank's message of this kind, or for the first failure and those that come with it.

    A rank that was stopped by a signal has failed after so many seconds.
    """
    heard: dict[int, Any] = {}
    since: dict[int, float] = {}
    ends = requests.ends if requests else []
    failed: list[Message] = []
    start = time.monotonic()
    while len(heard) + len(failed) < len(ranks):
        silent = [i for i in range(len(ranks)) if i not in heard and i not in {message.rank for message in failed}]
        if failed:
            victims = all(message.follows or BROKEN.search(message.text) for message in failed)
            if time.monotonic() > min(message.when for message in failed) + (BURIAL if victims else GRACE):
                break
        elif time.monotonic() > start + seconds:
            failed = [Message("late", i, title=f"did not answer within {seconds:g} seconds") for i in silent]
            break
        streams.wait([*ends, *(end for i in silent for end in (ranks[i].pipe, ranks[i].process.sentinel))], 0.2)
        if requests and not failed:
            requests.check(MOST)
            ends = requests.ends
        for i in silent if stopped < math.inf else ():
            now = time.monotonic()
            since[i] = min(since.get(i, now), now) if _is_stopped(ranks[i]) else math.inf
            if now > since[i] + stopped:
                failed.append(Message("failed", i, title=f"was stopped for {stopped:g} seconds", when=now))
        silent = [i for i in silent if i not in {message.rank for message in failed}]
        for i in silent:
            ended = ranks[i].process.exitcode is not None  # asked before the pipe: it may hold a last word
            told = ranks[i].pipe.poll()
            if not (told or ended):
                continue
            message = read(ranks[i].pipe) if told else None
            if message is None:
                ranks[i].process.join(5)
                message = Message("failed", i, title=how_it_ended(ranks[i].process.exitcode), when=time.monotonic())
            if message.kind == kind:
                heard[i] = message.value
            else:
                failed.append(message)
    # A rank that died breaks the others' collectives, and their complaints may be here before its death.
    return heard, sorted(failed, key=lambda message: (message.text != "", message.follows, message.when))


def read(pipe: connection.Connection) -> Message | None:
    """The next message, or None when the other end is gone."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def whereabouts(folder: str, ranks: Mapping[int, Rank] | Sequence[Rank], silent: list[int]) -> dict[int, str]:
    """What each of the `silent` ranks is doing now: the user's line at which it is, or that it has been stopped."""
    found = {}
    for i in silent:
        pid = ranks[i].process.pid
        if state(pid) in ("T", "t"):
            found[i] = f"was stopped, by SIGSTOP or a debugger (`kill -CONT {pid}` would have let it go on)"
        with contextlib.suppress(OSError):
            os.kill(pid, worker.ASK)
    late = time.monotonic() + ANSWER
    while len(found) < len(silent) and time.monotonic() < late:
        time.sleep(0.02)
        for i in set(silent) - set(found):
            told = Path(folder, f"where {i}").read_text().rpartition("Thread 0x")[2]  # the main thread is the last one
            lines = re.findall(r'File "(.*)", line (\d+)', told.rpartition("most recent call first")[2])
            users = [f"{file}:{line}" for file, line in lines if is_users(file)]
            if users:
                found[i] = f"was at {quoted(users[0])}"
    return found


def _is_stopped(rank: Rank) -> bool:
    """Whether a signal has stopped a rank of this machine."""
    return state(getattr(rank.process, "pid", 0)) == "T"


def state(pid: int) -> str:
    """The state of a process, as the letter that ``ps`` shows; "" where that cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def end(ranks: list[Rank]) -> None:
    """End what is left of the ranks, and wait until it is gone; for one that cannot be reached, not long."""
    for rank in ranks:
        rank.process.terminate()
    _joined(ranks, 2.0)
    left = [rank for rank in ranks if rank.process.is_alive()]
    for rank in left:
        rank.process.kill()
    _joined(left, LEAVE)
    for rank in ranks:
        rank.pipe.close()
        with contextlib.suppress(ValueError):  # it still runs: what it waits for cannot be interrupted
            rank.process.close()


def _joined(ranks: list[Rank], seconds: float) -> None:
    late = time.monotonic() + seconds
    for rank in ranks:
        rank.process.join(max(0.0, late - time.monotonic()))
