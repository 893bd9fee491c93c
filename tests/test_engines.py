"""`launch(..., on=...)`: ranks that an engine starts behave as forked ones do, and end as they do."""

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from processes import descendants

import vescale_fn as vfn
from vescale_fn._core.distributed import engines, remote, worker
from vescale_fn._core.distributed.agent import BOOT
from vescale_fn._core.distributed.engines import Engine, Trouble
from vescale_fn.errors import MeshError, RankError


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path, monkeypatch):
    """No test leaves a process, a thread or a file."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before, threads = descendants(), threading.active_count()
    yield
    assert descendants() <= before
    assert threading.active_count() <= threads
    assert [path.name for path in tmp_path.iterdir() if "vescale_fn-" in path.name] == []


class Forks(Engine):
    """Agents forked from here, where all is imported: an engine as quick as a test needs it."""

    name, missing, dying = "forks", 0, 0
    awaited: ClassVar[list[int]] = []  # where to write once ranks are waited for

    def start(self, command, env):
        self.processes = []
        for index in range(self.nprocs - self.missing):
            process = multiprocessing.get_context("fork").Process(
                target=boot, args=(command, env, index, index < self.dying)
            )
            process.start()
            self.processes.append(process)

    def check(self, lost=""):
        if self.awaited:
            os.write(self.awaited.pop(), b"working\n" * 2)
        if lost:
            raise Trouble(lost)

    def state(self):
        return ("forks says: all is well",)

    def __exit__(self, *_):
        for process in getattr(self, "processes", ()):
            process.join(10)
            assert process.exitcode is not None


def boot(command, env, index, dies):
    os.environ |= {**env, "FORKS_INDEX": str(index)}
    sys.argv = ["-c", *command[4:], "FORKS_INDEX"]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exec(BOOT.replace("library, path", "os._exit(1)\nlibrary, path") if dies else BOOT, {})
    os._exit(0)


@pytest.fixture
def forks(monkeypatch):
    monkeypatch.setitem(engines.ENGINES, "forks", Forks)
    return "forks"


def message_of(fn, nprocs, on, **options):
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        vfn.launch(fn, nprocs, on=on, device="cpu", **options)
    return str(error.value), time.monotonic() - start


def alike(on, fn, nprocs=3, **options):
    """What a launch says in processes of this machine and on an engine: one text, but for what broken ranks add."""
    texts = [message_of(fn, nprocs, where, **options) for where in (None, on)]
    here, there = (
        re.sub(r"\]:\d+", "", re.split(r"\n+(?:After it|Meanwhile|Under)", text)[0].rstrip()) for text, _ in texts
    )
    assert there == here
    return texts[1]


def failing_rank(how):
    def body():
        if dist.get_rank() == 1:
            time.sleep(0.3)  # the others wait by now
            how()
        dist.all_reduce(torch.ones(1))

    return body


def test_results_prints_and_place(forks, capsys):
    weights = torch.arange(6.0).view(2, 3)

    class Local:
        def __init__(self, rank):
            self.rank = rank

    def body(x, *, y):
        mesh = vfn.make_mesh((3,), ("dp",))
        print(f"rank {dist.get_rank()} prints")
        os.write(2, b"from below\n")
        mine = weights * dist.get_rank() + x + y
        dist.all_reduce(mine)
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
        return mine, Local(dist.get_rank()).rank, [int(os.environ[name]) for name in names], mesh.size(), os.getcwd()

    results = vfn.launch(body, 3, 10.0, kwargs={"y": 1}, on=forks, device="cpu")
    for rank, (total, again, place, size, folder) in enumerate(results):
        assert torch.equal(total, weights * 3 + 33)
        assert (again, place, size, folder) == (rank, [rank, 3, rank, 3], 3, os.getcwd())
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [f"rank {rank} prints" for rank in range(3)]
    assert err.splitlines() == ["from below"] * 3


def test_more_is_printed_and_returned_than_a_socket_holds(forks, capsys):
    def body():
        print("x" * 300_000)
        return torch.ones(3_000_000)

    assert [x.sum().item() for x in vfn.launch(body, 2, on=forks, device="cpu")] == [3_000_000] * 2
    assert capsys.readouterr().out.count("x") == 600_000


def test_logs_are_files_here(forks, tmp_path, capsys):
    vfn.launch(lambda: print("of", dist.get_rank()), 2, on=forks, device="cpu", logs=tmp_path / "logs")
    assert [(tmp_path / "logs" / f"rank-{i}.log").read_text() for i in range(2)] == ["of 0\n", "of 1\n"]
    assert capsys.readouterr() == ("", "")


def wrong_key():
    return {}["no such key"]


@pytest.mark.parametrize(
    "how",
    [
        wrong_key,
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: os._exit(3),
        lambda: sys.exit(4),
    ],
    ids=["raises", "kill", "_exit(3)", "sys.exit"],
)
def test_a_rank_that_fails_is_told_as_of_forked_ranks(how, forks):
    text, seconds = alike(forks, failing_rank(how))
    assert text.startswith("launch: rank 1 of 3 ")
    assert seconds < 10


def test_a_rank_that_is_killed_before_the_first_collective_and_after_the_last(forks):
    def before():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    def after():
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return "returned"

    for body in before, after:
        text, seconds = alike(forks, body)
        assert text.startswith("launch: rank 1 of 3 was killed by SIGKILL (out of memory?); the other ranks were ended")
        assert seconds < 10

    def returned():
        if dist.get_rank() == 1:  # once its result is sent
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return dist.get_rank()

    assert vfn.launch(returned, 2, on=forks, device="cpu") == [0, 1]


def test_of_two_failures_the_first_by_time_comes_first(forks):
    def body():
        time.sleep(0.1 * (3 - dist.get_rank()))
        raise ValueError(f"of rank {dist.get_rank()}")

    text, _ = alike(forks, body)
    assert text.startswith("launch: rank 2 of 3 raised ValueError")
    assert "After it, rank 1 raised ValueError: of rank 1" in text


def test_a_collective_left_out_and_results_that_cannot_be_sent(forks):
    text, _ = alike(forks, lambda: dist.get_rank() == 0 or dist.all_reduce(torch.ones(1)), 2)
    assert "waited in a collective that others had left out: rank 0 had returned by then" in text
    text, _ = alike(forks, lambda: (i for i in range(3)), 1)
    assert "launch: what rank 0 returned cannot be sent to the caller" in text


def test_timeouts_and_the_limit_say_where_each_rank_was(forks):
    def body():
        if dist.get_rank():
            time.sleep(60)  # the line
        dist.all_reduce(torch.ones(1))

    text, seconds = alike(forks, body, 2, timeout=0.5)
    assert "Timed out waiting 500ms" in text
    assert re.search(r"\nMeanwhile rank 1 was at .*: `time.sleep\(60\)  # the line`\.", text)
    assert seconds < 15

    def asleep():
        time.sleep(60)  # the line

    text, seconds = message_of(asleep, 2, forks, limit=0.5)
    assert text.splitlines()[0] == "launch: ranks 0, 1 of 2 did not answer within 0.5 seconds; the ranks were ended"
    assert text.count("`time.sleep(60)  # the line`") == 2
    assert seconds < 15


# Ranks that do not come


def test_a_rank_that_never_comes(forks, monkeypatch):
    monkeypatch.setattr(Forks, "missing", 1)
    text, seconds = message_of(lambda: 1, 3, forks, queue=1)
    assert text == (
        "launch: forks has not started the ranks\n"
        "  * 2 of 3 ranks have come within 1 seconds\n"
        "  * forks says: all is well\n"
        "  Instead: queue=3600.0, seconds that they may wait for their place"
    )
    assert seconds < 10


def test_a_rank_that_goes_before_it_is_told_what_to_do(forks, monkeypatch):
    monkeypatch.setattr(Forks, "missing", 1)
    monkeypatch.setattr(Forks, "dying", 1)
    text, seconds = message_of(lambda: 1, 3, forks, queue=60)
    assert text.splitlines() == [
        "launch: forks has not started the ranks",
        f"  * the process that was to start a rank on {os.uname().nodename} has gone",
    ]
    assert seconds < 10


def test_an_agent_that_is_lost(forks):
    """As when its machine goes: the rank ends with it, and the engine is asked what it knows."""

    def body():
        if dist.get_rank() == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    text, seconds = message_of(body, 2, forks)
    assert text.splitlines() == [
        f"launch: rank 1 of 2 was lost with the connection to {os.uname().nodename}; the other ranks were ended",
        "forks says: all is well",
    ]
    assert seconds < 15


def test_strangers_are_not_let_in(forks, monkeypatch):
    """One with another key, one that says nothing, one that is gone at once."""
    start, silent = Forks.start, []

    def with_strangers(self, command, env):
        place = command[-2], int(command[-1])
        socket.create_connection(place).close()
        silent.append(socket.create_connection(place))
        with socket.create_connection(place) as liar:
            liar.sendall(b"\0\0\0\x20" + b"x" * 32)
        start(self, command, env)

    monkeypatch.setattr(Forks, "start", with_strangers)
    monkeypatch.setattr(remote, "HANDSHAKE", 1)
    assert vfn.launch(lambda: dist.get_rank(), 2, on=forks, device="cpu") == [0, 1]
    silent[0].close()


def test_ranks_of_one_machine_are_beside_each_other():
    class One:
        def __init__(self, index, machine):
            self.index, self.machine = index, machine

    agents = [One(3, "b"), One(0, "a"), One(1, "b"), One(2, "a")]
    assert [(x.index, x.machine) for x in remote.in_order(agents)] == [(0, "a"), (2, "a"), (1, "b"), (3, "b")]


# The caller's own end


def caller_of_savers(sink, saves, waits):
    """A process that launches two ranks, which go on until they are told to end, and then save or do not."""

    def work():
        told = []
        if saves:
            signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        os.write(sink, b"working\n")
        late = time.monotonic() + 60
        while not told and time.monotonic() < late:
            time.sleep(0.01)
        os.write(sink, b"saved\n" if told else b"late\n")

    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stderr = sys.__stderr__
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    engines.ENGINES["forks"] = Forks
    Forks.missing = int(waits)
    Forks.awaited = [sink] * waits
    os.write(sink, f"{vfn.launch(work, 2, on='forks', device='cpu')}\n".encode())


@pytest.mark.parametrize(
    ("saves", "waits", "how", "said", "code"),
    [
        (True, False, signal.SIGTERM, "saved\nsaved\n[None, None]\n", 0),
        (True, False, signal.SIGINT, "saved\nsaved\n", 1),
        (False, False, signal.SIGTERM, "", -signal.SIGTERM),
        (False, False, signal.SIGKILL, "", -signal.SIGKILL),
        (False, True, signal.SIGTERM, "", -signal.SIGTERM),
        (False, True, signal.SIGINT, "", 1),
    ],
)
def test_a_caller_that_is_told_to_end_tells_its_ranks(saves, waits, how, said, code):
    source, sink = os.pipe()
    caller = multiprocessing.get_context("fork").Process(target=caller_of_savers, args=(sink, saves, waits))
    caller.start()
    os.close(sink)
    with open(source) as lines:
        assert [lines.readline() for _ in range(2)] == ["working\n"] * 2
        start = time.monotonic()
        os.kill(caller.pid, how)
        assert lines.read() == said  # until no process has the pipe any more
    caller.join(20)
    assert caller.exitcode == code
    assert time.monotonic() - start < 15


# What is refused before anything starts


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"on": "Ray"},
            "on='Ray' is no engine; did you mean 'ray'?\n"
            "  Instead: one of 'ray', 'slurm', 'torchrun'; without on=..., processes of this machine",
        ),
        (
            {"on": 3},
            "on=3 is no engine\n"
            "  Instead: one of 'ray', 'slurm', 'torchrun'; without on=..., processes of this machine",
        ),
        (
            {"options": {"nodes": 2}},
            'options with \'nodes\' are an engine\'s, but there is no on=...\n  Instead: on="slurm" or on="ray"',
        ),
        ({"on": "torchrun", "options": 3}, "options must be a dict of the engine's, but it is the int 3"),
        (
            {"on": "torchrun", "options": {"nodes": 2}},
            "options['nodes'] is no option of torchrun\n  Instead: options out of address",
        ),
        (
            {"on": "torchrun", "stdin_rank": 0},
            'stdin_rank=0, but on="torchrun" no rank reads what this process would\n'
            "  Instead: no on=... to look into a rank; PYTHONBREAKPOINT=remote_pdb.set_trace",
        ),
        (
            {"queue": -1},
            "queue must be a number of seconds above 0, but it is the int -1\n"
            "  Instead: queue=300.0, or queue=math.inf for none",
        ),
    ],
)
def test_launch_refuses(given, said):
    with pytest.raises(MeshError) as error:
        vfn.launch(print, 2, **{"device": "cpu", **given})
    assert str(error.value) == f"launch: {said}"


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_package_that_is_missing_is_named_with_its_extra(engine, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MeshError) as error:
        vfn.launch(print, 2, on=engine)
    first, _, last = str(error.value).splitlines()
    assert first == f'launch: on="{engine}" needs {package}, which cannot be imported'
    assert last == f"  Instead: pip install vescale_fn[{engine}]"


def test_a_function_may_use_each_module():
    used = lambda: [vars(vfn)[name] for name in ("checkpoint", "data", "nn", "optim", "plan", "random")]
    manager = lambda: vfn.checkpoint.Manager  # by value, with the modules that it names
    assert worker.call_pickled(worker.dumps_call(manager, ())) is vfn.checkpoint.Manager
    assert worker.call_pickled(worker.dumps_call(used, ())) == used()


def test_without_cloudpickle_a_function_of_main_says_what_to_install(monkeypatch):
    monkeypatch.setattr(worker, "cloudpickle", None)
    text, _ = message_of(lambda: 1, 2, "torchrun")
    assert text.startswith("launch: fn or its arguments cannot be sent to the ranks")
    assert text.endswith("  Instead: pip install vescale_fn[launch], which carries closures and a notebook's functions")


def psum_by_two():
    mesh = vfn.make_mesh(4, "dp")
    over = vfn.shard_map(lambda v: vfn.psum(v, "dp"), mesh=mesh, in_specs=vfn.P("dp"), out_specs=vfn.P())
    return vfn.digest(over(vfn.random.normal(vfn.random.key(0), (4, 99)))), mesh.played_ranks


def test_ranks_that_an_engine_starts_play_several_under_deterministic(forks):
    with vfn.deterministic(virtual=4):
        bits, _ = psum_by_two()
        assert vfn.launch(psum_by_two, 2, on=forks, device="cpu") == [(bits, range(2)), (bits, range(2, 4))]


def test_what_a_scheduler_sends_before_time_is_up_reaches_the_rank_as_a_sigterm(forks):
    def body(number):
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append("saved"))
        if dist.get_rank() == 0:
            os.kill(os.getppid(), number)  # Slurm and Kubernetes signal what they have started
            while not told:
                time.sleep(0.01)
        return told

    for number in signal.SIGTERM, signal.SIGUSR2:
        assert vfn.launch(body, 2, number, on=forks, device="cpu", limit=30) == [["saved"], []]


# The engines themselves


def sum_and_place():
    x = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    print("rank", dist.get_rank(), "prints")
    return x.item(), dist.get_rank(), int(os.environ["LOCAL_RANK"])


def both_raise():
    print("rank", dist.get_rank(), "prints")
    dist.barrier()  # else a rank that a busy machine starts late raises second
    time.sleep(0.5 * dist.get_rank())
    raise ValueError(f"of rank {dist.get_rank()}")


def test_on_torchrun(capsys):
    text, _ = alike("torchrun", both_raise, 2)
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(["rank 0 prints", "rank 1 prints"] * 2)
    assert text.startswith("launch: rank 0 of 2 raised ValueError; the other ranks were ended\n\nTraceback")


def test_on_slurm_by_the_local_executor_of_submitit(capsys):
    on = {"on": "slurm", "options": {"cluster": "local"}}
    assert vfn.launch(sum_and_place, 2, device="cpu", **on) == [(3, 0, 0), (3, 1, 1)]
    assert sorted(capsys.readouterr().out.splitlines()) == ["rank 0 prints", "rank 1 prints"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cluster": "local", "nodes": 3}, 'options["nodes"]=3 does not divide the 2 ranks'),
        ({}, 'on="slurm", but there is no srun here'),
    ],
)
def test_slurm_refuses(options, said, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MeshError) as error:
        vfn.launch(print, 2, on="slurm", options=options)
    assert str(error.value).splitlines()[0] == f"launch: {said}"


def test_what_slurm_is_asked_for(monkeypatch, tmp_path):
    """Without a cluster: what submitit writes for sbatch, by stand-ins for Slurm's two commands."""
    for name, text in ("srun", ""), ("sbatch", f"cp $1 {tmp_path}/script; echo Submitted batch job 12"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    for name, text in ("sacct", "echo 'JobID|State'; echo '12|TIMEOUT'"), ("scancel", f"echo $1 > {tmp_path}/ended"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(MeshError) as error:
        vfn.launch(print, 4, on="slurm")
    assert str(error.value) == (
        'launch: on="slurm" needs to know when Slurm may end the job\n'
        '  Instead: limit=3600.0, seconds, or options={"timeout_min": 60}'
    )
    options = {"nodes": 2, "slurm_partition": "gpu", "gpus_per_node": 2}
    text, _ = message_of(print, 4, "slurm", options=options, limit=1800, queue=0.3)
    assert text.splitlines()[1:3] == [
        "  * 0 of 4 ranks have come within 0.3 seconds",
        "  * Slurm's job 12 is TIMEOUT",
    ]
    script = (tmp_path / "script").read_text()
    for line in "nodes=2", "ntasks-per-node=2", "partition=gpu", "gpus-per-node=2", "time=35":
        assert f"#SBATCH --{line}\n" in script
    assert (tmp_path / "ended").read_text() == "12\n"


RAY = """
import json, os, signal, sys, time
import ray, torch, torch.distributed as dist, vescale_fn as vfn
from test_engines import sum_and_place

def said(fn, n, **more):
    try:
        return vfn.launch(fn, n, on="ray", device="cpu", **more)
    except (vfn.errors.RankError, vfn.errors.MeshError) as error:
        return str(error)

ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
found = {
    "results": said(sum_and_place, 2),
    "killed": said(lambda: os.kill(os.getpid(), signal.SIGKILL), 1),
    "too many": said(sum_and_place, 4),
}
@ray.remote(num_cpus=2)
class Busy:
    def there(self):
        return True

busy = Busy.remote()
ray.get(busy.there.remote())
found["no room"] = said(sum_and_place, 2, queue=2)
ray.kill(busy)
late = time.monotonic() + 20
while ray.available_resources().get("CPU", 0) < 3 and time.monotonic() < late:
    time.sleep(0.1)  # nothing of the launches is left
found["free"] = ray.available_resources()["CPU"]
ray.shutdown()
json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.mark.slow
def test_on_ray(tmp_path):
    """In one session of Ray's own processes, in a process of its own: pytest's is to fork."""
    (tmp_path / "program.py").write_text(RAY)
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "program.py", "found"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert found["results"] == [[3, 0, 0], [3, 1, 1]]
    assert sorted(line for line in done.stdout.splitlines() if "prints" in line) == ["rank 0 prints", "rank 1 prints"]
    assert found["killed"].startswith("launch: rank 0 of 1 was killed by SIGKILL (out of memory?)")
    assert found["too many"] == (
        "launch: the Ray cluster is too small\n"
        "  * 4 ranks need 4 CPU, and there are 3 in the cluster\n"
        '  Instead: fewer ranks, more machines, or options={"num_cpus": ...}, what each rank takes'
    )
    assert found["no room"] == (
        "launch: ray has not started the ranks\n"
        "  * 0 of 2 ranks have come within 2 seconds\n"
        "  * each rank needs 1 CPU; 1 are free\n"
        "  Instead: queue=3600.0, seconds that they may wait for their place"
    )
    assert found["free"] == 3
