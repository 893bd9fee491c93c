"""A program that torchrun, srun, mpirun or a TrainJob starts finds its world by itself, or is told what contradicts what."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from vescale_fn._core.distributed import environment, ranks
from vescale_fn._core.distributed.environment import World
from vescale_fn._core.distributed.ranks import launch
from vescale_fn.errors import MeshError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MET = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
STEP = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
JOB = {
    "SLURM_NTASKS": "8",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[07-08,12]",
    "SLURM_STEP_NODELIST": "gpu[08,12]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
}


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "0"}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "a[1-2]"}, None),  # a job's script
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # the shell of salloc
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, None),
        (TORCHRUN | MET, World(5, 8, 1, 4, "host0", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1"} | MET, World(0, 1, 0, 1, "host0", 29500)),
        (TORCHRUN | MET | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, World(5, 8, 1, 4, "host0", 29500, True)),
        (TORCHRUN | MET | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, World(5, 8, 1, 4, "host0", 29500, False)),
        (STEP | JOB, World(5, 8, 1, 4, "gpu08", environment._port("7 0"))),
        (STEP | JOB | MET, World(5, 8, 1, 4, "host0", 29500)),
        (STEP | JOB | {"SLURM_GPUS_PER_TASK": "1"}, World(5, 8, 0, 1, "gpu08", environment._port("7 0"))),
        (STEP | JOB | TORCHRUN, World(5, 8, 1, 4, "gpu08", environment._port("7 0"))),  # a script that exports them
        # srun starts a torchrun on each of two machines
        (
            STEP | JOB | TORCHRUN | MET | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
            World(5, 8, 1, 4, "host0", 29500),
        ),
        (OPEN_MPI | {"PMIX_NAMESPACE": "x"}, World(1, 2, 1, 2, "127.0.0.1", environment._port("x"))),
        (
            OPEN_MPI | MET | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            World(1, 2, 0, 1, "host0", 29500),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "j"}, World(1, 2, 1, 2, "127.0.0.1", environment._port("j"))),
    ],
)
def test_a_place(env, found):
    assert environment.world(env) == found


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            TORCHRUN,
            "RANK=5, WORLD_SIZE=8, no MASTER_ADDR, no MASTER_PORT; the ranks must know where they meet\n"
            "  Instead: MASTER_ADDR and MASTER_PORT in each process, for instance MASTER_ADDR=<rank 0's machine> "
            "MASTER_PORT=29500; torchrun sets them",
        ),
        (TORCHRUN | MET | {"RANK": "8"}, "RANK=8, WORLD_SIZE=8; the ranks are 0 to 7"),
        (TORCHRUN | MET | {"RANK": "two"}, "RANK=two; it must be an integer >= 0"),
        (TORCHRUN | MET | {"MASTER_PORT": ""}, "MASTER_PORT=; it must be an integer >= 0"),
        (
            TORCHRUN | MET | {"LOCAL_RANK": "4"},
            "LOCAL_RANK=4, LOCAL_WORLD_SIZE=4, WORLD_SIZE=8; there are 4 of the 8 ranks on this machine",
        ),
        (
            {"WORLD_SIZE": "8"},
            "WORLD_SIZE=8; a rank's place takes both, RANK and WORLD_SIZE\n"
            "  Instead: torchrun --nproc-per-node 8 your.py, which sets all of them; or unset these",
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"},
            "SLURM_PROCID=3; a rank's place takes both, SLURM_PROCID and SLURM_STEP_NUM_TASKS\n"
            "  Instead: srun python your.py: a job's script is no task of it",
        ),
        (
            STEP | JOB | {"RANK": "0", "WORLD_SIZE": "8"} | MET,
            "RANK=0, WORLD_SIZE=8, SLURM_PROCID=5, SLURM_STEP_NUM_TASKS=8; of 8 ranks this is one only\n"
            "  Instead: unset RANK, or set it in each task: a job's script runs once, before there are ranks",
        ),
    ],
)
def test_a_contradiction_is_refused_by_name(env, said):
    with pytest.raises(MeshError) as error:
        environment.world(env)
    assert str(error.value) == f"make_mesh: the environment says {said}"


def test_variables_for_torchrun_do_not_make_ranks():
    with pytest.raises(MeshError) as error:
        environment.world({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"})
    assert str(error.value) == (
        "make_mesh: PET_NNODES=2 and PET_NPROC_PER_NODE=4 are for torchrun, which has not started this process\n"
        "  Instead: torchrun your.py as the job's command: it takes the rest from PET_* variables"
    )


def as_srun_starts(rank, size, job):
    for name in os.environ.keys() & {*TORCHRUN, *MET}:
        del os.environ[name]
    os.environ.update(JOB | STEP | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": job})
    os.environ.update(SLURM_STEP_NUM_TASKS=str(size), SLURM_NODEID="0", SLURM_STEP_NODELIST="localhost")
    os.environ["SLURM_STEP_TASKS_PER_NODE"] = str(size)


def test_tasks_of_a_slurm_step_meet():
    def task(job):
        rank = dist.get_rank()
        dist.destroy_process_group()
        as_srun_starts(rank, 2, job)
        place = ranks.ensure_process_group("cpu", 60)
        x = torch.ones(1)
        dist.all_reduce(x)
        return place, x.item()

    assert launch(task, 2, str(os.getpid()), device="cpu") == [((0, 2), 2), ((1, 2), 2)]


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_said():
    def task(job):
        dist.destroy_process_group()
        as_srun_starts(0, 2, job)
        start = time.monotonic()
        with pytest.raises(MeshError) as error:
            ranks.ensure_process_group("cpu", 1)
        return str(error.value), time.monotonic() - start

    [(said, seconds)] = launch(task, 1, str(os.getpid() + 1), device="cpu")
    assert said.startswith("make_mesh: rank 0 of 2 has not met the others at localhost:")
    assert said.endswith(f"\n  Instead: {environment.COMING}")
    assert seconds < 10
