"""Where ranks come from: `simulate` (this process plays them all), `launch` (processes started from here), torchrun."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe, connection
from typing import Any

import torch
import torch.distributed as dist

from . import _rank_process, context
from ._rank_group import NotStarted, Rank, Streams, how_it_ended, read, run, told_to_end
from ._rank_process import Message
from .errors import MeshError, RankError, described, report, short

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
        fix = 'as many as the mesh is to have, simulate(8) for make_mesh((2, 4), ("dp", "tp")) say'
        raise MeshError(report("simulate", f"n={n!r} is not a number of ranks; it must be an integer >= 1", fix=fix))
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
    """This process's rank and the number of ranks.

    A process group that is there is taken as it is, of any backend; under torchrun one is initialised from the
    environment; otherwise this is rank 0 of 1, without a process group.
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


def world() -> Any:
    """The process group of all ranks."""
    return dist.group.WORLD


def device_type() -> str:
    """Where the ranks compute: "cuda" in an NCCL group, "cpu" in any other; without a group torch's default device."""
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


def check_device(device: Any, where: str) -> None:
    """Raise unless `device` names a type of device that is there."""
    if device not in ("cpu", "cuda"):
        try:
            if isinstance(device, str) and torch.device(device).type == device:
                return
        except RuntimeError:
            pass
        raise MeshError(report(where, f'device={short(device)} is no type of device, such as "cpu" or "cuda"'))
    if device == "cuda" and torch.cuda.device_count() == 0:
        raise MeshError(report(where, 'device="cuda", but there are no GPUs here', fix='device="cpu", or no device'))


# Real processes started from here


def launch(fn: Callable[..., Any], nprocs: int, *args: Any, device: str | None = None, timeout: float = 300.0) -> list:
    """Run ``fn(*args)`` on `nprocs` ranks, one process each, and return their results in rank order.

    The ranks share a process group (NCCL on GPUs, gloo on CPUs), so `make_mesh` works in `fn`. They are forked, and so
    take closures, lambdas and what a notebook cell defines. Where a fork cannot work (CUDA or a process group is in use
    here) they are forked from a fresh interpreter instead: `fn` then travels by cloudpickle (``pip install
    vescale_fn[launch]``), or has to be importable. Each rank computes on one thread. A SIGTERM that this process gets is
    passed on to the ranks: one that handles it may save its work and return.

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
        raise MeshError(report("launch", f"nprocs={short(nprocs)} is not a number of ranks; it must be an integer >= 1",
                               fix="launch(fn, nprocs, *args), for instance launch(train, 4, config)"))  # fmt: skip
    if not callable(fn):
        raise MeshError(report("launch", f"fn must be a function, but it is {described(fn)}",
                               fix="launch(fn, nprocs, *args); args are what it is called with"))  # fmt: skip
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0:
        raise MeshError(report("launch", f"timeout must be a number of seconds, but it is {described(timeout)}"))
    device = _device(device, nprocs, "launch")
    reason = _why_not_fork()
    if reason is None:
        try:
            results = run(functools.partial(fn, *args), nprocs, device, timeout)
            return [pickle.loads(result) for result in results]
        except NotStarted as error:  # no rank has called fn yet
            reason = str(error)
    return [pickle.loads(result) for result in _run_fresh(fn, args, nprocs, device, timeout, reason)]


def _why_not_fork() -> str | None:
    if torch.cuda.is_initialized():
        return "CUDA is in use in this process, so that it cannot fork"
    if has_process_group():
        return "this process belongs to a process group, so that it cannot fork"
    if sys.platform == "darwin":
        return "a fork is unsafe on macOS"
    return None


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
        body = _rank_process.dumps_call(fn, args)
    except Exception as error:
        fix = "call launch before this process uses CUDA or a process group"
        if _rank_process.cloudpickle is None:
            fix = f"pip install vescale_fn[launch], which carries closures and a notebook's functions; or {fix}"
        what = "fn or its arguments cannot be sent to the ranks"
        raise RankError(report("launch", what, [str(error), reason], fix)) from error
    ours, theirs = Pipe()
    interpreter: list[Rank] = []
    with told_to_end(interpreter), Streams() as streams:
        command = [sys.executable, "-c", _BOOT, str(theirs.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=streams.ends.get(1),
                                   stderr=streams.ends.get(2), pass_fds=[theirs.fileno()])  # fmt: skip
        interpreter.append(Rank(process, ours))
        theirs.close()
        try:
            with contextlib.suppress(OSError):  # it has ended: so says the pipe
                ours.send(sys.path)
                ours.send((body, nprocs, device, timeout, os.getpid()))
            while not ours.poll():
                streams.wait([ours], 0.2)
            answer = read(ours)
            if answer is None:
                raise RankError(f"launch: the interpreter that was to start the ranks {how_it_ended(process.wait(5))}")
            if answer.kind == "failed":
                raise RankError(answer.text)
            return answer.value
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
    body, nprocs, device, timeout, caller = pipe.recv()
    _rank_process.end_with(caller)
    try:
        results = run(functools.partial(_rank_process.call_pickled, body), nprocs, device, timeout)
        pipe.send(Message("done", 0, value=results))
    except RankError as error:
        pipe.send(Message("failed", 0, text=str(error)))
    except NotStarted as error:
        pipe.send(Message("failed", 0, text=f"launch: the ranks could not start\n\n{error}"))
    except Exception:
        pipe.send(Message("failed", 0, text=f"launch: the ranks could not be watched\n\n{traceback.format_exc()}"))
    finally:
        os._exit(0)  # the ranks are gone, and nothing else here needs an orderly end
