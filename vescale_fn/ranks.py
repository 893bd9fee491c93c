"""Where ranks come from: `simulate` (this process plays them all), `launch` (processes started from here), torchrun."""

from __future__ import annotations

import codecs
import contextlib
import functools
import linecache
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe, connection, get_context
from typing import Any

import torch
import torch.distributed as dist

from . import _ranks_worker, context
from ._ranks_worker import Job, Message
from .errors import MeshError, RankError, report

# Seconds: for all ranks to have met, to hear of more failures after the first, for finished ranks to leave.
START, GRACE, LEAVE = {"cpu": 30.0, "cuda": 120.0}, 0.2, 5.0


# Simulated


def simulate(n: int) -> Simulation:
    """Let this process play `n` ranks, from the call on; as a context manager, until the block ends.

    Meshes made from here on are simulated: one tensor stands for every rank's block, ops run once a rank, collectives
    move blocks inside this process. No process group is needed. It can be entered again, with another `n` too.

    Args:
        n: how many ranks, at least 1.

    Raises:
        MeshError: `n` is not a positive integer.

    Source: the role of JAX's ``--xla_force_host_platform_device_count``.

    >>> import vescale_fn as vfn
    >>> with vfn.simulate(8):
    ...     mesh = vfn.make_mesh((2, 4), ("dp", "tp"))
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise MeshError(report("simulate", f"n={n!r} is not a number of ranks; it must be an integer, at least 1"))
    return Simulation(n)


class Simulation:
    """The simulation that `simulate` switched on; leaving its block brings back what was before."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._before = [context.simulated()]
        self._entered = 0
        context.set_simulated(n)

    def __enter__(self) -> Simulation:
        if self._entered >= len(self._before):  # entered again: what is to come back is what is now
            self._before.append(context.simulated())
        self._entered += 1
        context.set_simulated(self.n)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        context.set_simulated(self._before.pop())

    def __repr__(self) -> str:
        return f"simulate({self.n})"


# Real processes that somebody else started


def ensure_process_group(device: str | None = None) -> tuple[int, int]:
    """This process's rank and the number of ranks, initialising the process group from torchrun's environment if need be.

    A process group that is there is taken as it is; without one, and without torchrun, this is rank 0 of 1.
    """
    if has_process_group():
        return dist.get_rank(), dist.get_world_size()
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return 0, 1
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if _device(device, on_this_machine, "make_mesh") == "cuda":
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def has_process_group() -> bool:
    """Whether this process belongs to an initialised process group."""
    return dist.is_available() and dist.is_initialized()


def device_type() -> str:
    """Where the ranks compute: "cuda" on an NCCL group, "cpu" on another one, torch's default device without a group."""
    if not has_process_group():
        return torch.get_default_device().type
    return "cuda" if "nccl" in dist.get_backend_config() else "cpu"


def _device(device: str | None, nprocs: int, where: str) -> str:
    # Counting devices goes through NVML and leaves CUDA uninitialised, so that a fork stays possible.
    gpus = torch.cuda.device_count()
    if device is None:
        return "cuda" if gpus >= nprocs else "cpu"
    if device not in ("cpu", "cuda"):
        raise MeshError(report(where, f'device={device!r} is neither "cpu" nor "cuda"'))
    if device == "cuda" and gpus < nprocs:
        raise MeshError(report(where, f'device="cuda" needs {nprocs} GPUs, one for each rank, but there are {gpus}',
                               fix='device="cpu", or fewer ranks'))  # fmt: skip
    return device


# Real processes started from here


def launch(fn: Callable[..., Any], nprocs: int, *args: Any, device: str | None = None, timeout: float = 300.0) -> list:
    """Run ``fn(*args)`` on `nprocs` ranks, one process each, and return their results in rank order.

    The ranks share a process group (NCCL on GPUs, gloo on CPUs), so `make_mesh` works in `fn`. They are forked, and so
    take closures, lambdas and what a notebook cell defines. Where a fork cannot work (CUDA or a process group is in use
    here) they are forked from a fresh interpreter instead: `fn` then travels by cloudpickle (``pip install
    vescale_fn[launch]``), or has to be importable. Each rank computes on one thread.

    Args:
        fn: the function of a rank; it may return anything that pickles: tensors come back on the CPU, sharded arrays do
            not come back (return ``vfn.unshard(x)``).
        nprocs: how many ranks.
        args: given to every rank.
        device: "cpu" or "cuda" (rank i on GPU i); by default "cuda" if there are `nprocs` GPUs.
        timeout: of one collective, in seconds: a rank that waits longer fails.

    Raises:
        RankError: a rank raised, was killed or exited; the message begins with the rank that failed first and its own
            traceback. The other ranks are ended.
        MeshError: not a number of ranks, or not enough GPUs.

    Source: `torch.multiprocessing.spawn`, Accelerate's ``notebook_launcher``.

    >>> import torch.distributed as dist, vescale_fn as vfn
    >>> scale = 10
    >>> vfn.launch(lambda x: scale * dist.get_rank() + x, 2, 5, device="cpu")
    [5, 15]
    """
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise MeshError(report("launch", f"nprocs={nprocs!r} is not a number of ranks; it must be an integer, at least 1",
                               fix=f"launch(fn, 4, ...), where fn={getattr(fn, '__name__', fn)!r}"))  # fmt: skip
    device = _device(device, nprocs, "launch")
    reason = _why_not_fork()
    if reason is None:
        try:
            results = _run(functools.partial(fn, *args), nprocs, device, timeout)
            return [pickle.loads(result) for result in results]
        except _NotStarted as error:  # no rank has called fn yet
            reason = str(error)
    return [pickle.loads(result) for result in _run_fresh(fn, args, nprocs, device, timeout, reason)]


class _NotStarted(Exception):
    """The ranks did not get as far as calling the function."""


def _why_not_fork() -> str | None:
    if torch.cuda.is_initialized():
        return "CUDA is in use in this process, so that it cannot fork"
    if has_process_group():
        return "this process belongs to a process group, so that it cannot fork"
    if sys.platform == "darwin":
        return "a fork is unsafe on macOS"
    return None


@dataclass(frozen=True)
class _Rank:
    process: Any
    pipe: connection.Connection


def _run(call: Callable[[], Any], nprocs: int, device: str, timeout: float) -> list[bytes]:
    """Fork `nprocs` ranks, watch them, and return their pickled results; none of them is left when it returns."""
    with tempfile.TemporaryDirectory(prefix="vescale_fn-") as folder, _Streams() as streams:
        job = Job(nprocs, device, timeout, folder, streams.ends, os.getpid())
        ranks: list[_Rank] = []
        try:
            for rank in range(nprocs):
                ranks.append(_fork(rank, job, call))
            _, failed = _hear(ranks, "ready", streams, START[device])
            if failed:
                raise _NotStarted(failed[0].text or f"rank {failed[0].rank} {failed[0].title} before it could start")
            _tell(ranks, "go")
            done, failed = _hear(ranks, "done", streams, float("inf"))
            if failed:
                raise RankError(_first_and_others(failed, nprocs))
            _tell(ranks, "leave")
            late = time.monotonic() + LEAVE
            while any(rank.process.is_alive() for rank in ranks) and time.monotonic() < late:
                streams.wait([rank.process.sentinel for rank in ranks if rank.process.is_alive()], 0.05)
            return [done[rank] for rank in range(nprocs)]
        finally:
            _end(ranks)


def _fork(rank: int, job: Job, call: Callable[[], Any]) -> _Rank:
    ours, theirs = Pipe()
    process = get_context("fork").Process(target=_ranks_worker.run_rank, args=(rank, job, theirs, call))
    sys.stdout and sys.stdout.flush()
    sys.stderr and sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns of a fork beside threads; a rank that a fork has broken does not say "ready".
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return _Rank(process, ours)


def _tell(ranks: list[_Rank], word: str) -> None:
    for rank in ranks:
        with contextlib.suppress(OSError):  # it has gone already: `_hear` finds out, where it matters
            rank.pipe.send(word)


def _hear(ranks: list[_Rank], kind: str, streams: _Streams, seconds: float) -> tuple[dict[int, Any], list[Message]]:
    """Wait for every rank's message of this kind, or for the first failure and those that come with it."""
    heard: dict[int, Any] = {}
    failed: list[Message] = []
    until = time.monotonic() + seconds
    while len(heard) + len(failed) < len(ranks):
        silent = [i for i in range(len(ranks)) if i not in heard and i not in {message.rank for message in failed}]
        if time.monotonic() > until:
            if not failed:
                failed = [Message("failed", i, title=f"did not start within {seconds:g} seconds") for i in silent]
            break
        streams.wait([end for i in silent for end in (ranks[i].pipe, ranks[i].process.sentinel)], 0.2)
        for i in silent:
            ended = ranks[i].process.exitcode is not None  # asked before the pipe: it may hold a last word
            message = _message(ranks[i].pipe) if ranks[i].pipe.poll() else None
            if message is None and (ended or ranks[i].pipe.poll()):
                ranks[i].process.join(1)
                message = Message("failed", i, title=_how_it_ended(ranks[i].process.exitcode), when=time.monotonic())
            if message is not None and message.kind == kind:
                heard[i] = message.value
            elif message is not None:
                failed.append(message)
        if failed:
            until = min(until, time.monotonic() + GRACE)
    # A rank that died breaks the others' collectives, and their complaint may be here before its death is.
    return heard, sorted(failed, key=lambda message: (message.text != "", message.when))


def _message(pipe: connection.Connection) -> Message | None:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exited with code {code} and returned nothing"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _first_and_others(failed: list[Message], nprocs: int) -> str:
    first, *others = failed
    text = f"launch: rank {first.rank} of {nprocs} {first.title}; the other ranks were ended"
    text += "\n\n" + first.text if first.text else ""
    for other in others:
        last = other.text.strip().rpartition("\n")[2][:200]
        text += f"\nAfter it, rank {other.rank} {other.title}" + (f": {last}" if last else "")
    return text


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.process.terminate()
    for rank in ranks:
        rank.process.join(2)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.pipe.close()
        rank.process.close()


class _Streams:
    """Carries what the ranks print to `sys.stdout` and `sys.stderr` where those are not the process's own.

    A notebook and a test's capture put objects there that no other process can write to. Elsewhere the ranks write
    to the same terminal or file as the caller, and nothing is carried.
    """

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}
        self._from: dict[int, tuple[Any, Any]] = {}
        for number, name in (1, "stdout"), (2, "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream is not getattr(sys, f"__{name}__"):
                source, self.ends[number] = os.pipe()
                os.set_blocking(source, False)
                self._from[source] = stream, codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> _Streams:
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


# Where this process cannot fork: a fresh interpreter that imports once, and forks

_BOOT = """
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
from vescale_fn.ranks import _serve
_serve(pipe)
"""


def _run_fresh(fn: Any, args: Any, nprocs: int, device: str, timeout: float, reason: str) -> list[bytes]:
    try:
        body = _ranks_worker.dumps_call((fn, args, _settings()))
    except Exception as error:
        install = "pip install vescale_fn[launch], which carries closures and notebook functions, or " * (
            _ranks_worker.cloudpickle is None)  # fmt: skip
        raise RankError(report("launch", "fn or its arguments cannot be sent to the ranks", [str(error), reason],
                               f"{install}call launch before this process uses CUDA or a process group")) from error  # fmt: skip
    ours, theirs = Pipe()
    with _Streams() as streams:
        process = subprocess.Popen([sys.executable, "-c", _BOOT, str(theirs.fileno())], stdin=subprocess.DEVNULL,
                                   stdout=streams.ends.get(1), stderr=streams.ends.get(2),
                                   pass_fds=[theirs.fileno()])  # fmt: skip
        theirs.close()
        try:
            ours.send(sys.path)
            ours.send((body, nprocs, device, timeout, os.getpid()))
            while not ours.poll():
                streams.wait([ours], 0.2)
            answer = _message(ours)
            if answer is None:
                code = process.wait(5)
                raise RankError(f"launch: the interpreter that should start the ranks {_how_it_ended(code)}")
            if answer.kind == "failed":
                raise RankError(answer.text)
            return answer.value
        except (BrokenPipeError, ConnectionResetError) as error:
            raise RankError(f"launch: the interpreter that should start the ranks {_how_it_ended(process.wait(5))}") from error
        finally:
            ours.close()
            process.terminate()  # it ends its ranks first
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _serve(pipe: connection.Connection) -> None:
    """The fresh interpreter's part."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    body, nprocs, device, timeout, caller = pipe.recv()
    _ranks_worker.end_with(caller)
    try:
        results = _run(functools.partial(_call, body), nprocs, device, timeout)
        pipe.send(Message("done", 0, value=results))
    except RankError as error:
        pipe.send(Message("failed", 0, text=str(error)))
    except _NotStarted as error:
        pipe.send(Message("failed", 0, text=f"launch: the ranks could not start\n\n{error}"))


def _settings() -> dict[str, Any]:
    """What a fork would have carried along besides the function."""
    # The source of notebook cells, for tracebacks. Without a time of change, or Python looks for the file.
    cells = {name: (entry[0], None, *entry[2:]) for name, entry in linecache.cache.items()
             if len(entry) == 4 and not os.path.exists(name)}  # fmt: skip
    return {"dtype": torch.get_default_dtype(), "grad": torch.is_grad_enabled(), "draws": torch.get_rng_state(), "cells": cells}


def _call(body: bytes) -> Any:
    fn, args, settings = pickle.loads(body)
    torch.set_default_dtype(settings["dtype"])
    torch.set_grad_enabled(settings["grad"])
    torch.set_rng_state(settings["draws"])
    linecache.cache.update(settings["cells"])
    return fn(*args)
