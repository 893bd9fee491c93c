"""The world that whoever started this process describes in environment variables: torchrun, Slurm, MPI, Kubernetes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..base.errors import MeshError
from ..base.messages import report


@dataclass(frozen=True)
class World:
    """This process's place among those that were started with it."""

    rank: int
    size: int
    local_rank: int  # on this machine
    local_size: int
    address: str  # where rank 0 is met
    port: int
    agents: bool = False  # torchrun's agent holds the store, and tells where it is by variables of its own


@dataclass(frozen=True)
class Starter:
    """Who starts processes, and by which variables it tells each its place."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# The innermost first: mpirun starts its ranks in a Slurm job by srun, and torchrun may be what either of them starts.
TORCHRUN = Starter("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = Starter("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
OTHERS = (
    Starter(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    SLURM,
    Starter("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
COMING = "all ranks started within the timeout, on machines that reach this address"
MEETING = ("MASTER_ADDR", "MASTER_PORT")


def world(env: Mapping[str, str] = os.environ) -> World | None:
    """The world that the variables describe; None where this process is alone.

    Raises:
        MeshError: they contradict each other, or leave out where the ranks meet.
    """
    _ask_for_torchrun(env)
    starter = next((one for one in (TORCHRUN, *OTHERS) if one.rank in env and one.size in env), None)
    half = [name for one in (TORCHRUN, *OTHERS) for name in (one.rank, one.size) if name in env]
    if starter is None:
        if any(_number(env, name) > (0 if name.endswith(("RANK", "PROCID")) else 1) for name in half):
            other = " or ".join(
                f"{one.rank} and {one.size}" for one in (TORCHRUN, *OTHERS) if {one.rank, one.size} & {*half}
            )
            raise _contradiction(env, half, f"a rank's place takes both, {other}", _started_by(half))
        return None
    rank, size = _number(env, starter.rank), _number(env, starter.size)
    if rank >= size:
        raise _contradiction(env, [starter.rank, starter.size], f"the ranks are 0 to {size - 1}", "")
    _agrees(env, starter, rank, size)
    if size == 1 and not env.keys() >= {*MEETING}:
        return None
    local_rank, local_size = _on_this_machine(env, starter, rank, size)
    address, port = _met(env, starter, size, local_size)
    return World(rank, size, local_rank, local_size, address, port, env.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def ranks_here(env: Mapping[str, str] = os.environ) -> int:
    """How many ranks were started on this machine; 0 where this process is alone."""
    started = world(env)
    return started.local_size if started else 0


def _agrees(env: Mapping[str, str], starter: Starter, rank: int, size: int) -> None:
    """Raise where another starter of just as many processes gave this one another place.

    Of another number it is no contradiction: srun starts a torchrun on each machine.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return
    for other in OTHERS:
        if other is not starter and other.rank in env and other.size in env and _number(env, other.size) == size:
            if _number(env, other.rank) != rank:
                fix = f"unset {starter.rank}, or set it in each task: a job's script runs once, before there are ranks"
                names = [starter.rank, starter.size, other.rank, other.size]
                raise _contradiction(env, names, f"of {size} ranks this is one only", fix)


def _on_this_machine(env: Mapping[str, str], starter: Starter, rank: int, size: int) -> tuple[int, int]:
    """This rank's number on this machine, and how many are on it."""
    local_rank = _number(env, starter.local_rank) if starter.local_rank in env else rank
    local_size = _number(env, starter.local_size) if starter.local_size in env else size
    if starter is SLURM:
        if "SLURM_GPUS_PER_TASK" in env:  # each task sees its own GPUs alone, and counts them from 0
            return 0, 1
        local_size = _tasks_here(env, size)
    if local_rank >= local_size or local_size > size:
        names = [starter.local_rank, starter.local_size or "SLURM_STEP_TASKS_PER_NODE", starter.size]
        raise _contradiction(env, names, f"there are {local_size} of the {size} ranks on this machine", "")
    return local_rank, local_size


def _tasks_here(env: Mapping[str, str], size: int) -> int:
    """How many tasks of the step are on this machine: ``4(x2),3`` is 4, 4, 3."""
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        for _ in range(int(times or 1))
    ]
    node = _number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    return counts[node] if node < len(counts) else size


def _met(env: Mapping[str, str], starter: Starter, size: int, local_size: int) -> tuple[str, int]:
    """Where the ranks meet: as said, or as it follows from the Slurm job, or on this machine if all are here."""
    address, port = env.get("MASTER_ADDR"), _number(env, "MASTER_PORT") if "MASTER_PORT" in env else None
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    in_step = SLURM.size in env and _number(env, SLURM.size) == size  # the ranks are the step's tasks
    if in_step and nodes:
        address = address or first_node(nodes)
        port = port or _port(f"{env.get('SLURM_JOB_ID', 0)} {env.get('SLURM_STEP_ID', 0)}")
    elif starter in OTHERS and local_size == size:
        address = address or "127.0.0.1"
        port = port or _port(env.get("PMIX_NAMESPACE") or env.get("PMI_JOBID") or str(os.getppid()))
    if address is None or port is None:
        missing = " and ".join(name for name, value in zip(MEETING, (address, port), strict=True) if value is None)
        fix = f"{missing} in each process, for instance MASTER_ADDR=<rank 0's machine> MASTER_PORT=29500; torchrun sets them"
        raise _contradiction(env, [starter.rank, starter.size, *MEETING], "the ranks must know where they meet", fix)
    return address, port


def first_node(nodes: str) -> str:
    """The first machine of Slurm's list.

    >>> first_node("node[007-009,12],login"), first_node("gpu-a,gpu-b"), first_node("r[1-2]n[03,05]")
    ('node007', 'gpu-a', 'r1n03')
    """
    return re.match(r"(?:\[[^\]]*\]|[^,\[])+", re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes))[0]  # type: ignore[index]


def _port(job: str) -> int:
    """A port for this job that is none of those which connections are given as they come."""
    return 15000 + sum(byte * 31**i for i, byte in enumerate(job.encode())) % 15000


def _ask_for_torchrun(env: Mapping[str, str]) -> None:
    """Raise where variables for torchrun itself (a TrainJob sets them) tell of more processes than torchrun was asked for."""
    nodes, each = env.get("PET_NNODES", "1"), env.get("PET_NPROC_PER_NODE", "1")
    if TORCHRUN.rank not in env and (nodes != "1" or each not in ("1", "auto", "cpu", "gpu")):
        said = f"PET_NNODES={nodes} and PET_NPROC_PER_NODE={each} are for torchrun, which has not started this process"
        fix = "torchrun your.py as the job's command: it takes the rest from PET_* variables"
        raise MeshError(report("make_mesh", said, fix=fix))


def _started_by(names: list[str]) -> str:
    if SLURM.rank in names:
        return "srun python your.py: a job's script is no task of it"
    return "torchrun --nproc-per-node 8 your.py, which sets all of them; or unset these"


def _number(env: Mapping[str, str], name: str) -> int:
    if not env[name].isascii() or not env[name].isdigit():
        raise _contradiction(env, [name], "it must be an integer >= 0", "")
    return int(env[name])


def _contradiction(env: Mapping[str, str], names: list[str], needed: str, fix: str) -> MeshError:
    told = ", ".join(f"{name}={env[name]}" if name in env else f"no {name}" for name in names)
    return MeshError(report("make_mesh", f"the environment says {told}; {needed}", fix=fix))
