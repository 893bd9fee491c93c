"""One launched rank's life, in its own process: settle in, join the group, run, report, leave.

`launcher.py` is the other end of the pipe. On it the rank says ``ready`` once it can compute and has met the others,
hears ``go``, says ``done`` or ``failed``, and stays until it is told to leave or is ended.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import io
import linecache
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import dtypes, state, tracebacks
from ..base.errors import DivergenceError, RankError, RecordError
from ..base.messages import report
from ..base.source_lines import is_users, quoted

try:
    import cloudpickle
except ImportError:  # the extra `launch`
    cloudpickle = None

ASK = signal.SIGUSR1  # makes a rank write down where it is, also while it waits in a collective
RESIZE = signal.SIGUSR2  # tells a rank to end, where it can go on from, as there are to be another number of them
MEETING = 120.0  # seconds for ranks of several machines to meet
LINGER = 2.0  # seconds that a finished rank keeps its connections open
PDB = ("", "pdb.set_trace")  # values of PYTHONBREAKPOINT that stand for Python's own debugger
LONGEST = 10 * 365 * 86400.0  # seconds, which torch can still count in nanoseconds
FOLDER, SESSION = "VESCALE_FN_MEMORY", "VESCALE_FN_SESSION"  # variables in which a rank finds its `RestartMemory`
at_end: list[Callable[[], None]] = []  # what a rank still has to do when its function has returned


forking = threading.Lock()  # held while this process forks a rank: one thread at a time
os.register_at_fork(after_in_child=lambda: forking.release() if forking.locked() else None)  # the parent held it


@dataclass(frozen=True)
class RestartMemory:
    """Where ranks that may be started again keep what they go on from.

    Attributes:
        folder: in memory; it outlives them.
        session: the name of all their starts, which begins with that of the process that starts them.
    """

    folder: str
    session: str


@dataclass(frozen=True)
class Settings:
    """What `launch` was asked for; `launch` says what each is."""

    nprocs: int
    device: str
    timeout: float
    limit: float
    logs: str | None
    stdin_rank: int | None
    queue: float = 300.0
    restarts: int = 0
    resize: Any = None
    memory: RestartMemory | None = None


@dataclass(frozen=True)
class Job:
    """What every rank of one launch knows."""

    nprocs: int
    device: str
    timeout: float
    folder: str  # of the rendezvous file; exists as long as the launch
    streams: dict[int, int]  # 1 and 2 -> where this rank's stdout and stderr go, if not where the caller's go
    caller: int  # the process that must outlive this one
    logs: str | None = None  # the folder of a file for each rank, where stdout and stderr go instead
    stdin_rank: int | None = None
    local: tuple[int, int] | None = None  # this rank's number on its machine, and how many are there; None: all are
    memory: RestartMemory | None = None
    store: tuple[str, int, int | None] | None = None  # where ranks of several machines meet, and rank 0 listens


@dataclass(frozen=True)
class Message:
    """What a rank tells its caller."""

    kind: str  # ready, done, failed; left: told to end, it has; late: said of a rank that has sent nothing
    rank: int
    value: Any = None  # done: the pickled result
    title: str = ""  # failed: "raised ValueError"
    text: str = ""  # failed: the traceback
    line: str = ""  # failed: the user's line
    follows: bool = False  # the error says that it is only about another rank's
    when: float = 0.0  # of the machine's monotonic clock, the same for all processes


class Left(SystemExit):
    """A process that was told to end has handed over what it had; the exit status is that of SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def run_rank(rank: int, job: Job, call: Callable[[], Any], pipe: Connection) -> None:
    """Be rank `rank` of `job`: compute ``call()`` and send what came of it through `pipe`."""
    try:
        settle(rank, job)
        _compute_a_little()
        join_group(rank, job)
    except Exception as error:
        return _stay(pipe, failure(rank, error))
    pipe.send(Message("ready", rank))
    pipe.recv()  # go: no rank calls the function before all ranks can
    try:
        result = call()
        for finish in at_end:
            finish()
        if job.device == "cuda":
            torch.cuda.synchronize()
    except BaseException as error:  # sys.exit in the function too
        return _stay(pipe, failure(rank, error))
    try:
        message = Message("done", rank, value=dumps(result))
    except Exception as error:
        what = report("launch", f"what rank {rank} returned cannot be sent to the caller", [str(error)])
        message = Message("failed", rank, title="returned what cannot be sent", text=what, when=time.monotonic())
    pipe.send(message)
    # Closing at once could cut off what another rank is still receiving. Staying for good would let a rank that waits
    # for this one in a collective wait out the timeout, where a closed connection tells it at once.
    _wait(pipe, LINGER)
    if dist.is_initialized():
        dist.destroy_process_group()
    return None


def failure(rank: int, error: BaseException) -> Message:
    """The report of an exception, timed, without this file's own frames."""
    below = error.__traceback__
    while below is not None and below.tb_frame.f_code.co_filename == __file__:
        below = below.tb_next
    text = tracebacks.text(error, below)
    how = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {type(error).__name__}"
    follows = isinstance(error, (DivergenceError, RecordError)) and error.follows
    users = [entry for entry in traceback.extract_tb(below) if is_users(entry.filename)]
    line = quoted(f"{users[-1].filename}:{users[-1].lineno}") if users else ""
    if isinstance(error, Left):
        return Message("left", rank, title="was told to end", when=time.monotonic())
    return Message("failed", rank, title=how, text=text, line=line, follows=follows, when=time.monotonic())


def _stay(pipe: Connection, message: Message) -> None:
    """Report a failure and wait for the end: leaving would break the others' collectives and bury the cause."""
    pipe.send(message)
    _wait(pipe, 60)


def _wait(pipe: Connection, seconds: float) -> None:
    try:
        pipe.poll(seconds)
    except OSError:
        pass  # the caller is gone


def settle(rank: int, job: Job) -> None:
    """Leave behind what belonged to the caller: its context, signals, streams, threads."""
    state.clear()
    gc.freeze()  # a collection would touch, and so copy, all the memory that this rank shares with its caller
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller, which ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    where = dict(job.streams)
    if job.logs is not None:
        log = os.path.join(job.logs, f"rank-{rank}.log")
        where[1] = where[2] = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number, name in (1, "stdout"), (2, "stderr"):
        if number in where:
            os.dup2(where[number], number)
        encoding = "utf-8" if number in where else None
        # A stream of its own, by line: the caller's may be a notebook's, or hold half a line.
        setattr(sys, name, open(number, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False))
    if rank == job.stdin_rank:
        os.dup2(where[0], 0)
        sys.stdin = open(0, closefd=False)
    elif sys.breakpointhook is sys.__breakpointhook__ and os.environ.get("PYTHONBREAKPOINT", "") in PDB:
        sys.breakpointhook = functools.partial(_no_terminal, rank)
    told = open(os.path.join(job.folder, f"where {rank}"), "w")  # faulthandler keeps it open
    faulthandler.register(ASK, file=told, all_threads=True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.nprocs))
    local_rank, local_size = job.local or (rank, job.nprocs)
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size))
    memory = job.memory or RestartMemory("", "")  # not another launch's, of which this process's caller is a rank
    os.environ.update({FOLDER: memory.folder, SESSION: memory.session})
    for name in "MASTER_ADDR", "MASTER_PORT":  # of another job, which this rank is not part of
        os.environ.pop(name, None)
    # OpenMP's threads do not come along in a fork, and the first parallel loop would wait for them for ever.
    torch.set_num_threads(1)
    end_with(job.caller, job.folder, *([] if job.memory is None else [job.memory.folder]))


def _no_terminal(rank: int, *_: Any, **__: Any) -> None:
    """`breakpoint()` on a rank that has nothing to read."""
    raise RankError(
        report(
            "breakpoint",
            f"rank {rank} cannot ask for commands: it does not read what the caller reads",
            fix=f"launch(..., stdin_rank={rank}, timeout=math.inf), which gives it the caller's terminal; or a debugger over "
            "a socket, PYTHONBREAKPOINT=remote_pdb.set_trace say",
        )
    )


def end_with(caller: int, *folders: str) -> None:
    """End this process soon after the process `caller` that started it, however that one ended, and remove these folders."""

    def watch() -> None:
        while os.getppid() == caller:
            time.sleep(0.2)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="end with the caller", daemon=True).start()


def _compute_a_little() -> None:
    """Raise where a fork has left autograd unusable, as it does once the caller's engine had started GPU threads."""
    with torch.enable_grad():
        x = torch.ones(2, device="cpu", requires_grad=True)
        (x * x).sum().backward()


def time_of(seconds: float) -> timedelta:
    """A timeout as torch takes it, where none is a very long one."""
    return timedelta(seconds=min(seconds, LONGEST))


def join_group(rank: int, job: Job) -> None:
    """Initialise the process group of the ranks of `job`."""
    most = time_of(job.timeout)
    torch_internals.set_default_group_timeout(most)
    bound = None
    if job.device == "cuda":
        # An engine may let each rank see its own GPU alone.
        bound = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(bound)
    else:  # by default gloo looks up this machine's name, which on a laptop may lead nowhere
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo",
        store=_met(job),
        rank=rank,
        world_size=job.nprocs,
        timeout=most if job.store is None else time_of(max(job.timeout, MEETING)),  # machines do not start at once
        device_id=bound,
    )
    torch_internals.set_group_timeout(dist.group.WORLD, most)


def _met(job: Job) -> Any:
    """Where the ranks of `job` meet."""
    if job.store is None:
        # A file, not a TCPStore: that needs a free port, and a server's thread in a process that forks may hold the
        # resolver's lock at that moment, so that every later connection of the child hangs.
        return dist.FileStore(os.path.join(job.folder, "rendezvous"), job.nprocs)
    host, port, listening = job.store
    return dist.TCPStore(
        host, port, job.nprocs, listening is not None, wait_for_workers=False, master_listen_fd=listening
    )


# From process to process


def dumps(value: Any) -> bytes:
    """Pickle what a rank returns: by reference where that works, so that the caller gets its own classes back."""
    try:
        return _pickled(pickle.Pickler, value, _for_the_caller)
    except Unsendable:
        raise
    except Exception:
        if cloudpickle is None:
            raise
        return _pickled(cloudpickle.Pickler, value, _for_the_caller)


def dumps_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle ``fn(*args)`` for a fresh process, with what a fork would have carried along besides."""
    # The source of notebook cells, for tracebacks. Without a time of change, or Python looks for the file.
    cells = {
        name: (entry[0], None, *entry[2:])
        # a copy made at once: another thread may add to it, or a plan that Python throws away leave it
        for name, entry in linecache.cache.copy().items()
        if len(entry) == 4 and not os.path.exists(name)
    }
    ambient = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_rng_state(), cells
    return _pickled(pickle.Pickler if cloudpickle is None else cloudpickle.Pickler, (fn, args, ambient), _for_a_rank)


def call_pickled(body: bytes) -> Any:
    """``fn(*args)`` of `dumps_call`."""
    fn, args, (dtype, grad_enabled, generator, cells) = pickle.loads(body)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad_enabled)
    torch.set_rng_state(generator)
    linecache.cache.update(cells)
    return fn(*args)


class Unsendable(TypeError):
    """A value that means nothing in another process."""


def _for_the_caller(x: Any) -> Any:
    if isinstance(x, DTensor):
        raise Unsendable(
            f"a sharded array of shape {tuple(x.shape)} on {x.device_mesh}: its other blocks are on the other ranks, "
            "which end with the launch. Instead: return vfn.unshard(tree), whole, or x.to_local(), this rank's block"
        )
    # On the CPU: a caller that need not touch the GPUs should not have to, and can still fork.
    return x.detach().cpu() if isinstance(x, torch.Tensor) and x.is_cuda else x


def _for_a_rank(x: Any) -> Any:
    if isinstance(x, DTensor):
        raise Unsendable(
            f"a sharded array of shape {tuple(x.shape)} on {x.device_mesh}, which the ranks do not have. "
            "Instead: pass vfn.unshard(tree) and shard it in the function"
        )
    if cloudpickle is None and isinstance(x, (FunctionType, type)) and x.__module__ == "__main__":
        raise Unsendable(f"{x.__qualname__} is defined in __main__, which a fresh process cannot import")
    return x


def _to_this_gpu(x: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return x.cuda().requires_grad_(requires_grad)


# What torch writes of these it cannot read: they travel as the bits of a type that it can.
_AS_BITS = dtypes.UNSIGNED[1:]


def _as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.view(dtype)


def _of_file(name: str, make: Callable[..., CodeType], args: tuple[Any, ...]) -> CodeType:
    return make(*args).replace(co_filename=name)


def _pickled(pickler: Any, value: Any, change: Callable[[Any], Any]) -> bytes:
    code = None if cloudpickle is None else cloudpickle.Pickler.dispatch_table[CodeType]

    class Pickler(pickler):
        def reducer_override(self, x: Any) -> Any:
            changed = change(x)
            if isinstance(changed, torch.Tensor) and changed.dtype in _AS_BITS:
                return _as_dtype, (changed.view(dtypes.SIGNED[changed.itemsize]), changed.dtype)
            if changed is not x:
                return changed.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if isinstance(x, torch.Tensor) and x.is_cuda:  # each rank gets it on its own GPU
                return _to_this_gpu, (x.detach().cpu(), x.requires_grad)
            if isinstance(x, CodeType) and code is not None:  # which cloudpickle sends without its file since 3.1.3
                return _of_file, (x.co_filename, *code(x))
            inherited = getattr(super(), "reducer_override", None)
            return inherited(x) if inherited else NotImplemented

    buffer = io.BytesIO()
    Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
