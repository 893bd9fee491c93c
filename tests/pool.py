"""Gloo ranks for tests: started once, sent functions, replaced when a test leaves them broken.

The ranks are forked from a *nursery*: a process forked from pytest's own after collection and before the first test. It
has imported everything, and no test has done anything to it yet (used CUDA, OpenMP, autograd), so forking from it is
fast and safe at any later time.
"""

import gc
import os
import pickle
import resource
import signal
import sys
import tempfile
from typing import Any

from vescale_fn._core.base import state
from vescale_fn._core.distributed import launcher, worker
from vescale_fn._core.distributed.failure_text import first_and_others
from vescale_fn._core.distributed.streams import Streams
from vescale_fn._core.distributed.worker import Job, Message
from vescale_fn.errors import RankError

TIMEOUT = 60.0  # seconds, of one collective
LIMIT = 240.0  # seconds, of one function
RENEW = 20  # functions, after which ranks are replaced: every mesh that a test makes leaves sockets and threads behind


class Pool:
    """Runs a function on the first `n` ranks of a pool of processes; ranks that fail are replaced."""

    def __init__(self) -> None:
        self._nursery = launcher.fork(_nurse, os.getpid())

    def run(self, n: int, fn: Any, *args: Any) -> list[Any]:
        """``fn(*args)`` on each of `n` ranks: the results in rank order, or RankError with the first traceback."""
        pipe = self._nursery.pipe
        pipe.send((n, worker.dumps_call(fn, args)))
        answer: Message | None = launcher.read(pipe)
        if answer is None:
            raise RankError("the process that starts the ranks of the tests is gone")
        if answer.kind == "failed":
            raise RankError(answer.text)
        return [pickle.loads(result) for result in answer.value]

    def close(self) -> None:
        """End all ranks."""
        launcher.tell([self._nursery], None)
        self._nursery.process.join(10)
        launcher.end([self._nursery])


class _Crew:
    """`n` ranks of one process group, in a folder of their own."""

    def __init__(self, n: int) -> None:
        self.used = 0
        self._folder = tempfile.TemporaryDirectory(prefix="vescale_fn-tests-")
        job = Job(n, "cpu", TIMEOUT, self._folder.name, {}, os.getpid())
        self.ranks = [launcher.fork(_be_rank, rank, job) for rank in range(n)]

    def run(self, body: bytes) -> Message:
        self.used += 1
        launcher.tell(self.ranks, body)
        with Streams() as streams:
            done, failed = launcher.hear(self.ranks, "done", streams, LIMIT)
        if failed:
            text = first_and_others(failed, list(done), len(self.ranks))
            return Message("failed", failed[0].rank, text=text)
        return Message("done", 0, value=[done[rank] for rank in range(len(self.ranks))])

    def close(self) -> None:
        launcher.end(self.ranks)
        self._folder.cleanup()


def _nurse(parent: int, pipe: Any) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    worker.end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # the ranks write where pytest's process does
    gc.freeze()  # a collection in a rank would touch, and so copy, all that it has from here
    crews: dict[int, _Crew] = {}
    while (order := _receive(pipe)) is not None:
        n, body = order
        crew = crews[n] = crews.get(n) or _Crew(n)
        answer = crew.run(body)
        if answer.kind == "failed" or crew.used == RENEW:
            crews.pop(n).close()
        pipe.send(answer)
    for crew in crews.values():
        crew.close()


def _be_rank(rank: int, job: Job, pipe: Any) -> None:
    worker.settle(rank, job)
    worker.join_group(rank, job)
    while (body := _receive(pipe)) is not None:
        state.clear()
        try:
            message = Message("done", rank, value=worker.dumps(worker.call_pickled(body)))
        except BaseException as error:
            message = worker.failure(rank, error)
        pipe.send(message)


def _receive(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None
