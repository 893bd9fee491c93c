"""Where ranks come from: `simulate` (this process plays them all), `launch` (processes started from here), torchrun."""

from __future__ import annotations

import atexit
import functools
import math
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from multiprocessing import current_process
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..base import context, state
from ..base.errors import MeshError
from ..base.front_door import public
from ..base.messages import described, meant, report, short
from . import environment, process_end
from .deterministic import carried, check_divides
from .engines import ENGINES, Engine
from .fork_server import run_fresh
from .launcher import MOST, NotStarted, run
from .remote import run_on
from .restarts import started_again
from .worker import Settings, time_of

atexit.register(process_end.let_go)  # on import: what is registered later, as for saves that go on, comes before it
MOST_PLAYED = 2**20  # ranks: beyond that a number is a mistake, which would take all memory

# Simulated


@public("simulate")
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
    if n > MOST_PLAYED:
        raise MeshError(
            report("simulate", f"n={n:,} ranks are more than the {MOST_PLAYED:,} that one process may play")
        )
    virtual = context.virtual()
    if virtual not in (None, n):
        what = f"n={n}, but there are {virtual} ranks under deterministic(virtual={virtual})"
        raise MeshError(report("simulate", what, fix=f"simulate({virtual}), or none: a process alone plays them all"))
    return Simulation(n)


class Simulation:
    """The simulation that `simulate` switched on; leaving its block brings back what was before.

    An interrupt between any two lines does too, unless it comes before `__enter__` or `__exit__` has done anything: a ``with``
    is no other than the bare call until then, or has not begun to leave its block.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._before = [context.simulated()]
        self._entered = 0
        context.set_simulated(n)

    def __enter__(self) -> Simulation:
        entered = self._entered
        try:
            if entered >= len(self._before):  # entered again: what is to come back is what is now
                self._before.append(context.simulated())
            self._entered = entered + 1
            context.set_simulated(self.n)
            return self
        except BaseException:
            self._entered = entered
            while len(self._before) > entered:
                context.set_simulated(self._before.pop())
            raise

    def __exit__(self, *_: object) -> None:
        state.process.simulated = self._before[-1]  # not by a call: an interrupt in there would leave it on
        self._before.pop()
        self._entered = len(self._before)

    def __repr__(self) -> str:
        return f"simulate({self.n})"


# Real processes that somebody else started


def ensure_process_group(device: str | None = None, timeout: float | None = None) -> tuple[int, int]:
    """This process's rank and the number of ranks.

    A process group that is there is taken as it is, of any backend; under torchrun, srun or mpirun one is initialised
    from the environment, with this timeout for a collective; otherwise this is rank 0 of 1, without a process group.
    """
    if has_process_group():
        return dist.get_rank(), dist.get_world_size()
    started = environment.world()
    if started is None:
        return 0, 1
    most = None if timeout is None else time_of(timeout)
    how: dict[str, Any] = dict(rank=started.rank, world_size=started.size, timeout=most)
    try:
        if started.agents:
            how |= dict(store=_agents_store(most))
        else:
            how |= dict(init_method=f"tcp://{started.address}:{started.port}")
        if _device(device, started.local_size, "make_mesh") == "cuda":
            torch.cuda.set_device(started.local_rank)
            dist.init_process_group("nccl", device_id=torch.device("cuda", started.local_rank), **how)
        else:
            dist.init_process_group("gloo", **how)
    except dist.DistError as error:
        met = f"rank {started.rank} of {started.size} has not met the others at {started.address}:{started.port}"
        raise MeshError(report("make_mesh", met, [str(error).splitlines()[0]], environment.COMING)) from None
    return dist.get_rank(), dist.get_world_size()


def _agents_store(timeout: Any) -> Any:
    """The store of torchrun's agent. It still has what processes wrote that it has started again since (seen in torch 2.13)."""
    how = {} if timeout is None else {"timeout": timeout}
    store, _, _ = next(iter(dist.rendezvous("env://", **how)))
    return dist.PrefixStore(f"started {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} times", store)


def has_process_group() -> bool:
    """Whether this process belongs to an initialised process group."""
    return dist.is_available() and dist.is_initialized()


def talks_to_nobody() -> bool:
    """Whether no other process can be asked: there is no group, or torch's fake one, whose ranks are not there."""
    return not has_process_group() or dist.get_backend() == "fake"


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
        raise MeshError(
            report(
                where,
                f'device="cuda" needs {nprocs} GPUs, one for each rank, but there are {gpus}',
                fix='device="cpu", or fewer ranks',
            )
        )
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


R = TypeVar("R")


@public("launch")
def launch(
    fn: Callable[..., R],
    nprocs: int,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    device: str | None = None,
    timeout: float = 300.0,
    limit: float = math.inf,
    logs: str | os.PathLike[str] | None = None,
    stdin_rank: int | None = None,
    on: str | None = None,
    options: Mapping[str, Any] | None = None,
    queue: float = 300.0,
    restarts: int = 0,
    resize: Any = None,
) -> list[R]:
    """Run ``fn(*args, **kwargs)`` on `nprocs` ranks, one process each, and return their results in rank order.

    The ranks share a process group (NCCL on GPUs, gloo on CPUs), so `make_mesh` works in `fn`. They are forked, and so
    take closures, lambdas and what a notebook cell defines. Where a fork cannot work (CUDA or a process group is in use
    here, or this is a daemon of multiprocessing) they are forked from a fresh interpreter instead: `fn` then travels by
    cloudpickle (``pip install vescale_fn[launch]``), or has to be importable. Each rank computes on one thread. A SIGTERM
    that this process gets, or ^C, is passed on to the ranks as a SIGTERM: one that handles it may save its work and return.

    `on` an engine the ranks are started by it, on its machines, and all the rest is the same: the results, the first failing
    rank's traceback, prints, SIGTERM and ^C, and that none is left. `fn` travels by cloudpickle. The ranks must reach this
    process (at an address that ``options["address"]`` may name) and each other by TCP, and have this library.

    Args:
        fn: the function of a rank; it may return anything that pickles: tensors come back on the CPU, sharded arrays do
            not come back (return ``vfn.unshard(x)``).
        nprocs: how many ranks.
        args: given to every rank.
        kwargs: given to every rank by name: ``launch(train, 4, kwargs={"device": "cpu"})``.
        device: "cpu" or "cuda" (rank i on GPU i); by default "cuda" if there are `nprocs` GPUs: here, in Ray's cluster, or
            asked of Slurm in `options`.
        timeout: of one collective, in seconds: a rank that waits longer fails. ``math.inf``: it waits.
        limit: of the whole run of `fn`, in seconds: ranks that have not returned by then are ended.
        logs: a folder, made if need be: what rank i prints is added to ``rank-i.log`` in it, instead of printed here.
        stdin_rank: the rank that reads what this process would, so that ``breakpoint()`` on it is a prompt in this
            terminal (give ``timeout=math.inf`` beside it, since the others wait). On the other ranks, and by default,
            there is nothing to read; a debugger over a socket, named in ``PYTHONBREAKPOINT``, works on every rank.
        on: None, processes of this machine; "torchrun", those of TorchElastic's agent on it; "slurm", a job by submitit
            (``pip install vescale_fn[slurm]``); "ray", actors (``pip install vescale_fn[ray]``).
        options: of the engine. "slurm": what submitit's ``update_parameters`` takes (``{"nodes": 2, "gpus_per_node": 8,
            "timeout_min": 60, "slurm_partition": "gpu"}``), ``folder``, which the machines share (by default this one), and
            ``cluster="local"``, which tries it without Slurm. "ray": what ``actor.options`` takes (``num_cpus``, by default
            1, ``num_gpus``, ``resources``, ``runtime_env``), ``strategy`` of the placement group, and ``init``, arguments
            of ``ray.init`` where this process has not called it.
        queue: seconds that an engine may take to give all ranks their place, ``math.inf`` for as long as it takes.
        restarts: how often all ranks are ended, and `fn` is called anew, where ranks were killed, have ended without a word,
            were stopped for longer than the timeout, or fail because others are gone. `elastic` goes on from where they were.
            A rank that raises by itself ends the launch.
        resize: a `multiprocessing.connection.Connection` through which other numbers of ranks may be asked for, by an
            integer each; all start again, as many.

    Raises:
        RankError: a rank raised, was killed or exited; the message begins with the rank that failed first and its own
            traceback. Or the limit was reached; it says where each rank was. The other ranks are ended. Or an engine has
            not started the ranks.
        MeshError: not a number of ranks, not enough GPUs, a Ray cluster that is too small, an engine's package that is not
            there, or options that are not as above.

    Source: `torch.multiprocessing.spawn`, Accelerate's ``notebook_launcher``; `submitit`, `ray.remote`.

    >>> import torch.distributed as dist, vescale_fn as vfn
    >>> scale = 10
    >>> vfn.launch(lambda x: scale * dist.get_rank() + x, 2, 5, device="cpu")
    [5, 15]
    """
    _check_call(fn, nprocs, kwargs)
    engine = _engine(on, options, nprocs, device, limit, stdin_rank, resize)
    settings = Settings(
        nprocs,
        _device(device, nprocs, "launch") if engine is None or on == "torchrun" else device or "cpu",
        seconds("launch", "timeout", timeout),
        seconds("launch", "limit", limit),
        _folder(logs),
        _reader(stdin_rank, nprocs),
        seconds("launch", "queue", queue),
        _restarts(restarts),
        resize,
    )
    call = carried(functools.partial(fn, *args, **(kwargs or {})))
    if engine is not None:
        anew = lambda settings: run_on(
            ENGINES[engine.name](nprocs, device, settings.limit, options or {}), call, settings
        )
        return [pickle.loads(result) for result in started_again(anew, settings)]
    reason = _why_not_fork()
    if resize is not None and reason is not None:
        raise MeshError(report("launch", "resize=... cannot be carried to where the ranks are forked", [reason]))
    if reason is None:
        try:
            return [pickle.loads(result) for result in run(call, settings)]
        except NotStarted as error:  # no rank has called fn yet
            reason = str(error)
    return [pickle.loads(result) for result in run_fresh(call, settings, reason)]


def _check_call(fn: Any, nprocs: Any, kwargs: Any) -> None:
    """Raise unless `fn`, the number of ranks and `kwargs` can be those of a launch."""
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise MeshError(
            report(
                "launch",
                f"nprocs={short(nprocs)} is not a number of ranks; it must be an integer >= 1",
                fix="launch(fn, nprocs, *args), for instance launch(train, 4, config)",
            )
        )
    if nprocs > MOST:
        raise MeshError(report("launch", f"nprocs={nprocs:,} are more processes than the {MOST:,} of one machine"))
    if not callable(fn):
        raise MeshError(
            report(
                "launch",
                f"fn must be a function, but it is {described(fn)}",
                fix="launch(fn, nprocs, *args); args are what it is called with",
            )
        )
    if not isinstance(kwargs, (Mapping, type(None))) or not all(isinstance(name, str) for name in kwargs or ()):
        raise MeshError(
            report(
                "launch",
                f"kwargs must be a dict of fn's keyword arguments, but it is {described(kwargs)}",
                fix='for instance kwargs={"steps": 10}',
            )
        )
    check_divides("launch", nprocs)


def _engine(
    on: Any, options: Any, nprocs: int, device: str | None, limit: Any, stdin_rank: int | None, resize: Any
) -> Engine | None:
    """The engine called `on`, or None: processes of this machine."""
    if not isinstance(options, (Mapping, type(None))) or not all(isinstance(name, str) for name in options or ()):
        raise MeshError(report("launch", f"options must be a dict of the engine's, but it is {described(options)}"))
    if on is None:
        if options:
            what = f"options with {', '.join(map(repr, options))} are an engine's, but there is no on=..."
            raise MeshError(report("launch", what, fix='on="slurm" or on="ray"'))
        return None
    if not isinstance(on, str) or on not in ENGINES:
        what = f"on={short(on)} is no engine{meant(on, ENGINES)}"
        fix = f"one of {', '.join(map(repr, ENGINES))}; without on=..., processes of this machine"
        raise MeshError(report("launch", what, fix=fix))
    if resize is not None:
        raise MeshError(report("launch", f'resize=..., but on="{on}" the number of ranks is the engine\'s'))
    if stdin_rank is not None:
        what = f'stdin_rank={stdin_rank}, but on="{on}" no rank reads what this process would'
        raise MeshError(
            report("launch", what, fix="no on=... to look into a rank; PYTHONBREAKPOINT=remote_pdb.set_trace")
        )
    if device not in ("cpu", "cuda", None):
        raise MeshError(report("launch", f'device={device!r} is neither "cpu" nor "cuda"'))
    return ENGINES[on](nprocs, device, seconds("launch", "limit", limit), options or {})


def _restarts(count: Any) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        what = f"restarts={short(count)} is not a number of restarts; it must be an integer >= 0"
        raise MeshError(report("launch", what, fix="restarts=10"))
    return count


def _why_not_fork() -> str | None:
    if torch.cuda.is_initialized():
        return "CUDA is in use in this process, so that it cannot fork"
    if has_process_group():
        return "this process belongs to a process group, so that it cannot fork"
    if current_process().daemon:
        return "this process is a daemon of multiprocessing, which lets it start no other"
    if sys.platform == "darwin":
        return "a fork is unsafe on macOS"
    return None


def seconds(where: str, name: str, value: Any) -> float:
    """`value`, a time of more than none, infinity too; or an error."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:  # nor NaN
        raise MeshError(
            report(
                where,
                f"{name} must be a number of seconds above 0, but it is {described(value)}",
                fix=f"{name}=300.0, or {name}=math.inf for none",
            )
        )
    return float(value)


def _folder(logs: Any) -> str | None:
    if logs is None:
        return None
    try:
        folder = Path(logs).absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except (TypeError, OSError) as error:
        raise MeshError(
            report("launch", f"logs must be a folder to write to, but it is {described(logs)}", [str(error)])
        ) from None
    return str(folder)


def _reader(rank: Any, nprocs: int) -> int | None:
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < nprocs):
        raise MeshError(report("launch", f"stdin_rank={short(rank)} is none of the ranks, which are 0 to {nprocs - 1}"))
    try:
        os.fstat(0)
    except OSError:
        if rank is not None:
            raise MeshError(report("launch", f"stdin_rank={rank}, but the stdin of this process is closed")) from None
    return rank
