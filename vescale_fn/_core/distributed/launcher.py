"""A group of ranks forked from this process: start them, watch them, end them; none is left behind."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe, connection, get_context
from pathlib import Path
from typing import Any

from .. import torch_internals
from ..base.errors import RankError
from ..base.source_lines import is_users, quoted
from . import worker
from .worker import Job, Message, Settings

# Seconds: for all ranks to have met, for finished ranks to leave, to hear of more failures after the first one; and
# where all complain of others' ends, to hear of the rank that was first, which a busy machine may take to bury.
START, LEAVE, GRACE, BURIAL, ANSWER = {"cpu": 30.0, "cuda": 120.0}, 5.0, 0.2, 3.0, 1.0
BROKEN = re.compile("[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited")
LATE = re.compile("[Tt]ime(d |)out")
OF_TRANSPORT = re.compile("raised (RuntimeError|Dist[A-Za-z]*Error)")  # a user's own TimeoutError is none


class NotStarted(Exception):
    """The ranks did not get as far as calling the function."""


@dataclass(frozen=True)
class Rank:
    """A rank's process and the pipe to it."""

    process: Any
    pipe: connection.Connection


def run(call: Callable[[], Any], settings: Settings) -> list[bytes]:
    """Fork the ranks, watch them, and return their pickled results; none of them is left when it returns."""
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
        )
        try:
            for rank in range(nprocs):
                ranks.append(fork(worker.run_rank, rank, job, call))
            _, failed = hear(ranks, "ready", streams, START[settings.device])
            if failed:
                raise NotStarted(failed[0].text or f"rank {failed[0].rank} {failed[0].title} before it could start")
            tell(ranks, "go")
            try:
                done, failed = hear(ranks, "done", streams, settings.limit)
            except KeyboardInterrupt:  # as where this process is told to end; a second one ends them at once
                for rank in ranks:
                    rank.process.terminate()
                hear(ranks, "done", streams, float("inf"))
                raise
            if failed:
                heard = {*done, *(message.rank for message in failed if message.kind == "failed")}
                ask = failed[0].kind == "late" or any(map(waited, failed))
                at = whereabouts(ranks, [i for i in range(nprocs) if i not in heard], folder) if ask else {}
                raise RankError(first_and_others(failed, list(done), nprocs, at))
            tell(ranks, "leave")
            late = time.monotonic() + LEAVE
            while any(rank.process.is_alive() for rank in ranks) and time.monotonic() < late:
                streams.wait([rank.process.sentinel for rank in ranks if rank.process.is_alive()], 0.05)
            return [done[rank] for rank in range(nprocs)]
        finally:
            end(ranks)


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
    except (NotStarted, RankError):
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


def hear(ranks: list[Rank], kind: str, streams: Streams, seconds: float) -> tuple[dict[int, Any], list[Message]]:
    """Wait for every rank's message of this kind, or for the first failure and those that come with it."""
    heard: dict[int, Any] = {}
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
        streams.wait([end for i in silent for end in (ranks[i].pipe, ranks[i].process.sentinel)], 0.2)
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


def how_it_ended(code: int | None) -> str:
    """A process's exit code in words."""
    if code is None or code >= 0:
        return f"exited with code {code} and returned nothing"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def whereabouts(ranks: list[Rank], silent: list[int], folder: str) -> dict[int, str]:
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


def state(pid: int) -> str:
    """The state of a process, as the letter that ``ps`` shows; "" where that cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def first_and_others(
    failed: list[Message], returned: list[int], nprocs: int, at: Mapping[int, str] | None = None
) -> str:
    """The message of a failed launch: the first failure in full, a line for each other one, and where the rest were."""
    first, *others = failed
    if first.kind == "late":
        some = ", ".join(str(message.rank) for message in failed)
        text = f"launch: rank{'s' * (len(failed) > 1)} {some} of {nprocs} {first.title}; the ranks were ended"
        return "\n".join([text, *(f"  * rank {rank} {doing}" for rank, doing in sorted((at or {}).items()))])
    text = f"launch: rank {first.rank} of {nprocs} {first.title}; the other ranks were ended"
    gone = f"rank{'s' * (len(returned) > 1)} {', '.join(map(str, sorted(returned)))} had returned"
    if returned and waited(first) and not at:  # its words are those of the transport, which knows no ranks
        text = (
            f"launch: rank {first.rank} of {nprocs} waited in a collective that others had left out: {gone} by then. "
            f"It {first.title}; the other ranks were ended"
        )
        returned = []
        text += "\n  Instead: call the same collectives on every rank, in the same order, before fn returns"
    text += "\n\n" + first.text if first.text else ""
    for other in others:
        said = re.sub(rf"^[\w.]*{re.escape(other.title.rpartition(' ')[2])}: ", "", said_first(other.text))[:200]
        at_line = f" at {other.line}" if waited(other) and other.line else ""
        text += f"\nAfter it, rank {other.rank} {other.title}{at_line}" + (f": {said}" if said else "")
    if returned:  # perhaps the cause: it left out a collective that the others wait in
        text += f"\nBy then {gone}."
    for rank, doing in sorted((at or {}).items()):
        text += f"\nMeanwhile rank {rank} {doing}."
    if waited(first) or "SIGABRT" in first.title:  # with which gloo and NCCL end what does not fit together
        text += "\nUnder `with vfn.debug():` ranks whose calls differ say so, and which."
    return text


def waited(message: Message) -> bool:
    """Whether a rank failed in a collective because another one was gone or did not come."""
    of_others = BROKEN.search(message.text) or LATE.search(said_first(message.text))
    return bool(OF_TRANSPORT.fullmatch(message.title) and of_others)


def said_first(text: str) -> str:
    """The first line of a traceback's message: what stands below the frames, which are indented."""
    lines = text.strip().split("\n")
    frames = [i for i, line in enumerate(lines) if line.startswith("  File ")]
    below = (line for line in lines[frames[-1] + 1 if frames else 0 :] if line and not line.startswith("  "))
    return next(below, lines[-1])


def end(ranks: list[Rank]) -> None:
    """End what is left of the ranks, and wait until it is gone."""
    for rank in ranks:
        rank.process.terminate()
    for rank in ranks:
        rank.process.join(2)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.pipe.close()
        rank.process.close()


class Streams:
    """Carries what the ranks print to `sys.stdout` and `sys.stderr` where those are not the process's own.

    A notebook and a test's capture put objects there that no other process can write to. Elsewhere the ranks write
    to the same terminal or file as the caller, and nothing is carried. `stdin`: whether a rank is to read what this
    process would.
    """

    def __init__(self, stdin: bool = False) -> None:
        self.ends: dict[int, int] = {0: os.dup(0)} if stdin else {}
        self._from: dict[int, tuple[Any, Any]] = {}
        for number, name in (1, "stdout"), (2, "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream is not getattr(sys, f"__{name}__"):
                source, self.ends[number] = os.pipe()
                os.set_blocking(source, False)
                self._from[source] = stream, codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> Streams:
        return self

    def wait(self, others: list[Any], seconds: float) -> None:
        """Wait for one of `others`, or for something to carry; carry all that there is."""
        connection.wait([*others, *self._from], seconds)
        for source, (stream, decoder) in self._from.items():
            try:
                while chunk := os.read(source, 1 << 16):
                    stream.write(decoder.decode(chunk))
            except BlockingIOError:
                stream.flush()

    def __exit__(self, *_: object) -> None:
        self.wait([], 0)
        for end in (*self._from, *self.ends.values()):
            os.close(end)
