"""The files for clusters: what their schemas say of them, what their commands come to, and that all ask for as many ranks."""

import json
import os
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from torch.distributed.run import get_args_parser

from vescale_fn.recipes import command_line

FILES = Path(__file__).parents[1] / "vescale_fn" / "recipes" / "cluster"
SCHEMAS = Path(__file__).parent / "schemas"
RANKS = 16


def loaded(name):
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    return yaml.safe_load((FILES / f"{name}.yaml").read_text()), jsonschema.Draft202012Validator(schema)


def ran(script, tmp_path, **env):
    """The words with which a script calls srun or torchrun, and the variables that it sets for them."""
    for name in "srun", "torchrun":
        (tmp_path / name).write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@"\n')
        (tmp_path / name).chmod(0o700)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **env}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check_job(words):
    """The main job's command line is one, and its mesh has all ranks."""
    assert words[0] == "vescale_fn.recipes.train"
    mesh = command_line.make_parser().parse_args(words[1:]).mesh
    sizes = mesh.values() if isinstance(mesh, dict) else map(int, re.findall(r"\d+", str(mesh)))
    product = 1
    for size in sizes:
        product *= size
    assert product == RANKS


def of_torchrun(words):
    assert words[0] == "torchrun"
    args = get_args_parser().parse_args(words[1:])
    assert args.module
    check_job([args.training_script, *args.training_script_args])
    return args


@pytest.mark.parametrize("name", ["train_job", "sky"])
def test_a_file_fits_its_schema_and_a_wrong_one_does_not(name):
    job, schema = loaded(name)
    schema.validate(job)
    wrong = [{**job, "nodes": 2}, {**job, "spec": {"trainer": {"numNodes": "2"}}}, {**job, "num_nodes": "two"}]
    assert not any(schema.is_valid(one) for one in wrong)


def test_the_train_job():
    job, _ = loaded("train_job")
    trainer = job["spec"]["trainer"]
    args = of_torchrun(trainer["command"] + trainer["args"])
    # Kubeflow sets these for torchrun, so the command must not
    assert (args.nnodes, args.nproc_per_node, args.master_addr) == ("1:1", "1", "127.0.0.1")
    assert trainer["numNodes"] * trainer["numProcPerNode"] == RANKS
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


def test_the_task_of_skypilot(tmp_path):
    task, _ = loaded("sky")
    given = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    args = of_torchrun(ran(task["run"], tmp_path, SKYPILOT_NUM_GPUS_PER_NODE="8", **given, **task["envs"]))
    assert (args.nnodes, args.node_rank, args.nproc_per_node) == ("2", 1, "8")
    assert (args.master_addr, args.master_port) == ("10.0.0.1", 29500)
    assert task["num_nodes"] * int(task["resources"]["accelerators"].partition(":")[2]) == RANKS


def test_the_slurm_job(tmp_path):
    script = (FILES / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))
    assert int(asked["nodes"]) * int(asked["ntasks-per-node"]) == RANKS
    assert asked["gpus-per-node"] == asked["ntasks-per-node"]
    words = ran(script, tmp_path, SLURM_SUBMIT_DIR="/shared")
    at = words.index("-m")
    assert words[:at] == ["srun", "--kill-on-bad-exit=1", "python"]
    check_job(words[at + 1 :])


def test_torchrun_by_hand(tmp_path):
    script = (FILES / "torchrun.sh").read_text()
    args = of_torchrun(ran(script, tmp_path, HEAD="node0"))
    assert (args.nnodes, args.nproc_per_node, args.rdzv_endpoint) == ("2", "8", "node0:29500")
    assert (args.rdzv_backend, args.rdzv_conf, args.max_restarts) == ("c10d", "join_timeout=300", 3)
