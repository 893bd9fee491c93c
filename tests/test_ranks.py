"""Where ranks come from: `simulate`, `launch` (forked and fresh), torchrun, and the tests' own pool."""

import logging
import math
import multiprocessing
import os
import pdb
import re
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from processes import descendants
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from vescale_fn._core import torch_internals
from vescale_fn._core.base import context
from vescale_fn._core.distributed import process_group, ranks, worker
from vescale_fn._core.distributed.communicator import coordinates
from vescale_fn._core.distributed.mesh import make_mesh
from vescale_fn._core.distributed.ranks import launch, simulate
from vescale_fn.errors import MeshError, RankError, SpecError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _nothing_left_behind(request, tmp_path, monkeypatch):
    """No test leaves a process or a rendezvous file, but for the pool's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = descendants()
    yield
    assert "gloo" in request.fixturenames or descendants() <= before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("vescale_fn-")] == []


@pytest.fixture(params=["fork", "fresh"])
def way(request, monkeypatch):
    """Both ways to start ranks; the fresh interpreter does without a module of tests to import."""
    if request.param == "fresh":
        monkeypatch.setattr(ranks, "_why_not_fork", lambda: "a test wants a fresh interpreter")
    return request.param


@pytest.fixture
def forked_only(monkeypatch):
    def refuse(*_):
        raise AssertionError("this should have forked")

    monkeypatch.setattr(ranks, "run_fresh", refuse)


# simulate


def test_simulate_is_on_from_the_call_and_restores_on_exit():
    assert context.simulated() is None
    simulate(4)
    assert context.simulated() == 4
    with simulate(8) as outer:
        assert context.simulated() == 8
        with simulate(2):
            assert context.simulated() == 2
        assert context.simulated() == 8
    assert context.simulated() == 4
    with outer:
        assert context.simulated() == 8
        with outer:
            assert context.simulated() == 8
        assert context.simulated() == 8
    assert context.simulated() == 4


def test_simulate_restores_after_an_exception():
    with pytest.raises(KeyError), simulate(3):
        raise KeyError
    assert context.simulated() is None


def test_more_ranks_than_can_be():
    with pytest.raises(
        MeshError, match=r"simulate: n=1,000,000,000 ranks are more than the 1,048,576 that one process"
    ):
        simulate(10**9)
    assert context.simulated() is None
    with pytest.raises(
        MeshError, match=r"launch: nprocs=1,000,000,000 are more processes than the 4,096 of one machine"
    ):
        launch(print, 10**9)
    with simulate(4), pytest.raises(MeshError, match=r"= 1000000000000000000 ranks, but there are 4 ranks"):
        make_mesh((10**9, 10**9), ("a", "b"))


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "4", None])
def test_simulate_refuses(n):
    with pytest.raises(MeshError) as error:
        simulate(n)
    assert str(error.value).splitlines()[0] == f"simulate: n={n!r} is not a number of ranks; it must be an integer >= 1"
    assert context.simulated() is None


# launch: results


class Pair(NamedTuple):
    total: torch.Tensor
    rank: int


def test_a_closure_its_results_in_rank_order_and_what_surrounds_it(way, capsys):
    weights = torch.arange(6.0).view(2, 3)

    class Local:
        def __init__(self, rank):
            self.rank = rank

    def whole_sum(extra):
        rank = dist.get_rank()
        mine = weights * rank + extra
        dist.all_reduce(mine)
        print(f"rank {rank} prints")
        os.write(1, b"and from below\n")
        print(f"rank {rank} warns", file=sys.stderr)
        ambient = torch.get_default_dtype(), torch.is_grad_enabled(), torch.randn(3)
        return {"pair": Pair(mine, rank), "more": [None, "s", Local(rank).rank], "ambient": ambient}

    torch.set_default_dtype(torch.float64)
    with torch.no_grad():
        torch.manual_seed(7)
        results = launch(whole_sum, 3, 10.0, device="cpu")
        torch.manual_seed(7)
        draws = torch.randn(3)
    for rank, result in enumerate(results):
        assert type(result["pair"]) is Pair
        assert torch.equal(result["pair"].total, weights * 3 + 30)
        assert result["pair"].rank == rank
        assert result["more"] == [None, "s", rank]
        assert result["ambient"][:2] == (torch.float64, False)
        assert torch.equal(result["ambient"][2], draws)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["and from below"] * 3 + [f"rank {rank} prints" for rank in range(3)]
    assert {f"rank {rank} warns" for rank in range(3)} <= set(err.splitlines())


def test_a_rank_knows_its_place_and_computes_on_one_thread(forked_only):
    def place():
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
        return [int(os.environ[name]) for name in names], torch.get_num_threads(), ranks.ensure_process_group()

    assert launch(place, 2, device="cpu") == [([0, 2, 0, 2], 1, (0, 2)), ([1, 2, 1, 2], 1, (1, 2))]


def test_ranks_do_not_simulate(forked_only):
    with simulate(8):
        assert launch(lambda: (context.simulated(), dist.get_world_size()), 2, device="cpu") == [(None, 2)] * 2
        assert context.simulated() == 8


def test_results_may_be_large_and_local_classes_and_functions(forked_only):
    class Local(NamedTuple):
        x: torch.Tensor

    big, local, function = launch(
        lambda: (torch.ones(3_000_000), Local(torch.ones(2)), lambda y: y + 1), 1, device="cpu"
    )[0]
    assert big.sum() == 3_000_000
    assert local.x.tolist() == [1, 1]
    assert function(1) == 2


def test_a_class_of_the_caller_comes_back_as_itself(forked_only):
    assert type(launch(lambda: Pair(torch.zeros(1), 0), 1, device="cpu")[0]) is Pair


def test_a_launched_rank_can_launch(forked_only):
    assert launch(lambda: dist.get_world_size(), 2, device="cpu") == [2, 2]


def test_a_launched_rank_launches_from_a_fresh_interpreter():
    def outer():
        rank = dist.get_rank()
        return launch(lambda: (rank, dist.get_rank(), dist.get_world_size()), 2, device="cpu")

    assert launch(outer, 1, device="cpu") == [[(0, 0, 2), (0, 1, 2)]]


def test_after_autograd_and_openmp_in_the_caller(forked_only):
    """OpenMP's threads are gone in a fork: a rank that used more than one would hang in the first large op."""
    torch.set_num_threads(2)
    try:
        x = torch.randn(500, 500, requires_grad=True)
        (x @ x).exp().sum().backward()
    finally:
        torch.set_num_threads(1)

    def gradient():
        w = torch.full((500, 500), 2.0, requires_grad=True)
        (w @ w).sum().backward()
        dist.all_reduce(w.grad)
        return w.grad[0, 0].item()

    assert launch(gradient, 2, device="cpu") == [2 * (1000.0 + 1000.0)] * 2


def test_with_a_store_serving_in_the_caller(forked_only):
    """The server's thread may hold the resolver's lock at the fork; ranks that meet by names would hang in it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False).set("a", "b")
    for _ in range(3):
        assert launch(lambda: dist.get_rank(), 2, device="cpu") == [0, 1]


def test_a_fork_that_cannot_compute_is_replaced_by_a_fresh_interpreter(monkeypatch):
    """As where the caller's autograd engine has GPU threads."""

    def refused():
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")

    monkeypatch.setattr(worker, "_compute_a_little", refused)
    scale = 3
    assert launch(lambda: scale * dist.get_rank(), 2, device="cpu") == [0, 3]


def test_a_group_that_is_there_is_taken_as_it_is():
    dist.init_process_group("fake", rank=1, world_size=4, store=dist.HashStore())
    try:
        assert ranks.ensure_process_group() == (1, 4)
        assert ranks.device_type() == "cpu"
    finally:
        dist.destroy_process_group()


def test_more_is_printed_than_a_pipe_holds(forked_only, capsys):
    launch(lambda: print("x" * 300_000), 2, device="cpu")
    assert capsys.readouterr().out.count("x") == 600_000


@pytest.mark.gpu
def test_on_a_gpu_before_and_after_cuda_is_used_here():
    def body(x):
        y = x.cuda() * 2
        dist.all_reduce(y)
        return y, str(y.device), dist.get_backend(), ranks.device_type(), x.device.type

    expected = torch.tensor([2.0, 4.0])
    for x in torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], device="cuda"):  # the second one initialises CUDA
        result, device, backend, kind, given = launch(body, 1, x)[0]
        assert torch.equal(result, expected)
        assert (device, backend, kind, given) == ("cuda:0", "nccl", "cuda", x.device.type)


# launch: failures


def failing_rank(how):
    def body():
        if dist.get_rank() == 1:
            time.sleep(0.2)  # the others wait by now
            how()
        dist.all_reduce(torch.ones(1))

    return body


def wrong_key():
    return {}["no such key"]


def message_of(fn, nprocs=3, **options):
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        launch(fn, nprocs, device="cpu", **options)
    return str(error.value), time.monotonic() - start


def test_an_exception_on_one_rank_while_the_others_wait(way):
    message, seconds = message_of(failing_rank(wrong_key))
    title, empty, *trace = message.splitlines()
    assert title == "launch: rank 1 of 3 raised KeyError; the other ranks were ended"
    assert empty == ""
    assert trace[0] == "Traceback (most recent call last):"
    assert "in body" in trace[1]  # the user's own frame, not one of ours
    assert trace[-1] == "KeyError: 'no such key'"
    assert "Connection" not in message  # no victim's complaint
    assert seconds < (5 if way == "fork" else 30)


@pytest.mark.parametrize(
    ("how", "title"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL (out of memory?)"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM"),
        (lambda: os._exit(3), "exited with code 3 and returned nothing"),
        (lambda: os._exit(0), "exited with code 0 and returned nothing"),
        (lambda: sys.exit(4), "called sys.exit(4)"),
    ],
    ids=["kill", "term", "_exit(3)", "_exit(0)", "sys.exit"],
)
def test_a_rank_that_dies_is_named_before_those_it_broke(how, title, forked_only):
    message, seconds = message_of(failing_rank(how))
    assert message.splitlines()[0] == f"launch: rank 1 of 3 {title}; the other ranks were ended"
    assert seconds < 5


def test_of_two_failures_the_first_by_time_comes_first(forked_only):
    def body():
        time.sleep(0.05 * (3 - dist.get_rank()))
        raise ValueError(f"of rank {dist.get_rank()}")

    message, _ = message_of(body)
    assert message.startswith("launch: rank 2 of 3 raised ValueError")
    assert "After it, rank 1 raised ValueError: of rank 1" in message


def test_of_a_later_failure_the_first_line_is_quoted(forked_only):
    def body():
        time.sleep(0.05 * (1 - dist.get_rank()))
        raise SpecError("f: the spec does not fit\n  * why\n  Instead: another")

    message, _ = message_of(body, 2)
    *_, last = message.splitlines()
    assert last == "After it, rank 0 raised SpecError: f: the spec does not fit"


def test_a_rank_that_returns_is_told_of_beside_another_ranks_own_failure(forked_only):
    def body():
        if dist.get_rank():
            time.sleep(0.5)
            raise ValueError("mine")

    message, _ = message_of(body, 2)
    assert message.startswith("launch: rank 1 of 2 raised ValueError")
    assert message.endswith("By then rank 0 had returned.")


def test_a_rank_that_leaves_out_a_collective(forked_only):
    message, seconds = message_of(lambda: dist.get_rank() == 0 or dist.all_reduce(torch.ones(1)), 2)
    first, fix, empty, *_ = message.splitlines()
    assert first == (
        "launch: rank 1 of 2 waited in a collective that others had left out: rank 0 had returned by then. "
        "It raised RuntimeError; the other ranks were ended"
    )
    assert fix.startswith("  Instead: call the same collectives on every rank")
    assert empty == ""
    assert "had returned" not in message.partition("\n")[2]
    assert seconds < 2 * worker.LINGER + 3


def test_timeout_is_of_one_collective_on_every_group(forked_only):
    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        if dist.get_rank() == 0:
            time.sleep(30)
        dist.all_reduce(torch.ones(1), group=mesh.get_group("a"))

    message, seconds = message_of(body, 4, timeout=0.5)
    assert message.startswith("launch: rank 2 of 4 raised RuntimeError")
    assert "Timed out waiting 500ms" in message
    assert seconds < 10


def test_a_stopped_rank_is_named(forked_only):
    def body():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))

    message, _ = message_of(body, 2, timeout=0.5)
    assert message.startswith("launch: rank 0 of 2 raised RuntimeError")
    assert re.search(r"\nMeanwhile rank 1 was stopped, by SIGSTOP or a debugger \(`kill -CONT \d+` would", message)


def test_the_limit_of_the_whole_run(forked_only):
    def body():
        if dist.get_rank():
            time.sleep(60)  # the line at which it is

    message, seconds = message_of(body, 2, limit=0.3)
    title, where = message.splitlines()
    assert title == "launch: rank 1 of 2 did not answer within 0.3 seconds; the ranks were ended"
    assert where.startswith("  * rank 1 was at ")
    assert where.endswith("`time.sleep(60)  # the line at which it is`")
    assert seconds < 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"timeout": 0},
            "timeout must be a number of seconds above 0, but it is the int 0\n"
            "  Instead: timeout=300.0, or timeout=math.inf for none",
        ),
        (
            {"limit": math.nan},
            "limit must be a number of seconds above 0, but it is the float nan\n"
            "  Instead: limit=300.0, or limit=math.inf for none",
        ),
        (
            {"kwargs": [1]},
            "kwargs must be a dict of fn's keyword arguments, but it is the list [1]\n"
            '  Instead: for instance kwargs={"steps": 10}',
        ),
        ({"stdin_rank": 2}, "stdin_rank=2 is none of the ranks, which are 0 to 1"),
        (
            {"logs": 3},
            "logs must be a folder to write to, but it is the int 3\n"
            "  * expected str, bytes or os.PathLike object, not int",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_launch_refuses_options(options, said):
    with pytest.raises(MeshError) as error:
        launch(print, 2, device="cpu", **options)
    assert str(error.value) == f"launch: {said}"


@pytest.fixture
def stdin(tmp_path):
    """What the process reads, as a file to write to."""
    before = os.dup(0)
    given = tmp_path / "stdin"
    given.touch()
    with open(given) as file:
        os.dup2(file.fileno(), 0)
    yield given
    os.dup2(before, 0)
    os.close(before)


def test_by_name_without_end_into_files_and_reading(way, tmp_path, stdin, capsys):
    stdin.write_text("read")
    logs = tmp_path / "runs" / "first"
    logs.mkdir(parents=True)
    (logs / "rank-1.log").write_text("of an earlier run\n")

    def body(base, *, timeout, device):  # launch's own words are fn's as well
        print("from", dist.get_rank())
        os.write(2, b"from below\n")
        return base + timeout + device, sys.stdin.read()

    found = launch(
        body, 2, 1, kwargs={"timeout": 10, "device": 100}, device="cpu", timeout=math.inf, logs=logs, stdin_rank=1
    )
    assert found == [(111, ""), (111, "read")]
    assert capsys.readouterr() == ("", "")
    assert (logs / "rank-0.log").read_text() == "from 0\nfrom below\n"
    assert (logs / "rank-1.log").read_text() == "of an earlier run\nfrom 1\nfrom below\n"


def test_a_breakpoint_with_a_terminal_and_without(forked_only, stdin, capsys):
    def body():
        answer = 1
        if dist.get_rank() == 1:
            if sys.breakpointhook is sys.__breakpointhook__:
                sys.breakpointhook = pdb.Pdb(
                    nosigint=True
                ).set_trace  # as Python has it: pytest puts its own in its place
            breakpoint()
        return answer

    stdin.write_text("p 'seen', answer\nanswer = 42\nc\n")
    assert launch(body, 2, device="cpu", stdin_rank=1) == [1, 42]
    assert "('seen', 1)" in capsys.readouterr().out
    message, _ = message_of(body, 2)
    assert (
        "RankError: breakpoint: rank 1 cannot ask for commands: it does not read what the caller reads\n"
        "  Instead: launch(..., stdin_rank=1, timeout=math.inf), which gives it the caller's terminal; or a debugger "
        "over a socket, PYTHONBREAKPOINT=remote_pdb.set_trace say\n"
    ) in message


def test_from_several_threads_at_once(forked_only):
    """Each counts the shapes-only modes that it is in itself: a mode that threads share was left in a wrong state."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    results, errors, filters = {}, [], list(warnings.filters)

    def run(i):
        try:
            for _ in range(3):
                results[i] = launch(lambda: i, 1, device="cpu")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert results == {i: [i] for i in range(4)}
    assert not logger.disabled
    assert warnings.filters == filters


def test_shapes_only_in_two_threads_in_turn():
    """One thread leaves an inner block while the other is inside."""
    steps, values = [threading.Event() for _ in range(3)], []

    def other():
        steps[0].wait()
        with torch_internals.shapes_only():
            values.append(type(torch.empty(1)).__name__)
            steps[1].set()
            steps[2].wait()

    thread = threading.Thread(target=other)
    thread.start()
    with torch_internals.shapes_only():
        with torch_internals.shapes_only():
            steps[0].set()
            steps[1].wait()
        values.append(type(torch.empty(1)).__name__)
        steps[2].set()
    thread.join()
    assert values == ["FakeTensor", "FakeTensor"]
    assert type(torch.empty(1)) is torch.Tensor


def of_a_daemon(pipe):
    pipe.send(launch(os.path.join, 1, "a", kwargs={}, device="cpu"))


def test_from_a_daemon_process():
    ours, theirs = multiprocessing.Pipe()
    daemon = multiprocessing.get_context("fork").Process(target=of_a_daemon, args=(theirs,), daemon=True)
    daemon.start()
    theirs.close()
    assert ours.recv() == ["a"]
    daemon.join(20)


def test_no_file_of_the_users_stands_for_one_of_pythons_own(tmp_path, monkeypatch):
    """The fresh interpreter takes Python's library first, and then finds what the caller would find."""
    for name in "struct", "queue", "random":
        (tmp_path / f"{name}.py").write_text(f"open('ran {name}', 'w')\n")
    (tmp_path / "of_the_user.py").write_text("VALUE = 5\n")
    (tmp_path / "also").mkdir()
    (tmp_path / "also" / "on_the_path.py").write_text("VALUE = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(tmp_path / "also"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path / "also"))
    monkeypatch.setattr(ranks, "_why_not_fork", lambda: "a test wants a fresh interpreter")

    def body():
        import of_the_user
        import on_the_path

        return of_the_user.VALUE + on_the_path.VALUE, os.environ["PYTHONPATH"]

    assert launch(body, 1, device="cpu") == [(12, os.environ["PYTHONPATH"])]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("ran ")] == []


def test_the_timeout_of_a_mesh(forked_only):
    def late(group):
        try:
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            return str(error)[-60:]

    def body():
        of_group = [torch_internals.group_timeout(make_mesh((2, 1), ("a", "b")).get_group(name)) for name in "ab"]
        quick = make_mesh((1, 2), ("a", "b"), timeout=0.3)
        both = process_group.group_along(quick, ("a", "b"))[0]
        times = [torch_internals.group_timeout(group) for group in (quick.get_group("b"), both)]
        return of_group, times, late(both)

    first, second = launch(body, 2, device="cpu", timeout=77)
    assert first[0] == [77, 77]  # whatever torch's default is
    assert first[1] == [0.3, 0.3]
    assert "Timed out waiting 300ms" in first[2]
    assert second[2] is None


def test_a_mesh_refuses_a_timeout():
    with pytest.raises(MeshError, match="make_mesh: timeout must be a number of seconds above 0, but it is the int -1"):
        make_mesh((1,), ("a",), timeout=-1)


def test_a_slow_rank_is_no_failure(forked_only):
    def body():
        dist.all_reduce(torch.ones(1))
        time.sleep(1.5 * dist.get_rank())
        return dist.get_rank()

    assert launch(body, 2, device="cpu", timeout=1.0) == [0, 1]


def test_a_sharded_result_says_what_to_return(forked_only):
    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        return {"w": distribute_tensor(torch.ones(4, 2), mesh)}

    message, _ = message_of(body, 2)
    assert "returned cannot be sent to the caller" in message
    assert "a sharded array of shape (4, 2)" in message
    assert "return vfn.unshard(tree), whole, or x.to_local(), this rank's block" in message


def test_a_result_that_does_not_pickle(forked_only):
    message, _ = message_of(lambda: (i for i in range(3)), 1)
    assert message.splitlines()[2].startswith("launch: what rank 0 returned cannot be sent to the caller")
    assert "generator" in message


def test_without_cloudpickle_a_function_of_main_says_what_to_install(monkeypatch):
    monkeypatch.setattr(ranks, "_why_not_fork", lambda: "CUDA is in use in this process, so that it cannot fork")
    monkeypatch.setattr(worker, "cloudpickle", None)
    message, _ = message_of(lambda: 1, 2)
    assert message.startswith("launch: fn or its arguments cannot be sent to the ranks")
    assert "CUDA is in use in this process" in message
    assert "pip install vescale_fn[launch]" in message


def test_without_cloudpickle_an_importable_function_still_goes(monkeypatch):
    monkeypatch.setattr(ranks, "_why_not_fork", lambda: "a test wants a fresh interpreter")
    monkeypatch.setattr(worker, "cloudpickle", None)
    assert launch(os.path.join, 1, "a", "b", device="cpu") == [os.path.join("a", "b")]


@pytest.mark.parametrize("nprocs", [0, -2, 1.5, True, "2"])
def test_launch_refuses_a_number(nprocs):
    with pytest.raises(MeshError) as error:
        launch(print, nprocs)
    assert str(error.value) == (
        f"launch: nprocs={nprocs!r} is not a number of ranks; it must be an integer >= 1\n"
        "  Instead: launch(fn, nprocs, *args), for instance launch(train, 4, config)"
    )


def test_launch_refuses_a_device():
    with pytest.raises(MeshError) as error:
        launch(print, 2, device="tpu")
    assert str(error.value) == 'launch: device=\'tpu\' is neither "cpu" nor "cuda"'
    gpus = torch.cuda.device_count()
    with pytest.raises(MeshError) as error:
        launch(print, gpus + 1, device="cuda")
    assert f'device="cuda" needs {gpus + 1} GPUs, one for each rank, but there are {gpus}' in str(error.value)


# The caller's own end


def sleeping_caller(pipe, err):
    """A process that launches two ranks, which tell their numbers and sleep."""

    def sleep():
        print(os.getpid())
        time.sleep(300)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    os.setsid()
    os.dup2(pipe, 1)
    os.dup2(os.open(err, os.O_CREAT | os.O_WRONLY), 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    launch(sleep, 2, device="cpu")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_when_the_caller_ends_so_do_its_ranks(end, way, tmp_path):
    """Killed, or by Ctrl-C, which a terminal sends to the ranks as well."""
    source, sink = os.pipe()
    caller = multiprocessing.get_context("fork").Process(target=sleeping_caller, args=(sink, tmp_path / "err"))
    caller.start()
    os.close(sink)
    with open(source) as lines:
        pids = [int(lines.readline()) for _ in range(2)]
        assert all(map(alive, pids))
        start = time.monotonic()
        (os.killpg if end == signal.SIGINT else os.kill)(caller.pid, end)
        assert lines.read() == ""  # until the ranks have closed their ends of the pipe
    while any(map(alive, pids)):
        assert time.monotonic() - start < 10
        time.sleep(0.02)
    caller.join(10)
    err = (tmp_path / "err").read_text()
    assert err.count("Traceback") == err.count("KeyboardInterrupt") == (1 if end == signal.SIGINT else 0), err


def caller_of_savers(pipe, saves):
    """A process that launches two ranks, which go on until they are told to end, and then save or do not."""

    def work():
        told = []
        if saves:
            signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        print("working", flush=True)
        late = time.monotonic() + 60
        while not told and time.monotonic() < late:
            time.sleep(0.01)
        os.write(1, b"saved\n" if told else b"late\n")

    os.dup2(pipe, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(launch(work, 2, device="cpu"), flush=True)


def test_a_caller_that_is_told_to_end_tells_its_ranks(way):
    for saves, end in [(True, signal.SIGTERM), (True, signal.SIGINT), (False, signal.SIGTERM)][
        : 3 if way == "fork" else 2
    ]:
        source, sink = os.pipe()
        caller = multiprocessing.get_context("fork").Process(target=caller_of_savers, args=(sink, saves))
        caller.start()
        os.close(sink)
        with open(source) as lines:
            assert [lines.readline() for _ in range(2)] == ["working\n"] * 2
            os.kill(caller.pid, end)
            results = "[None, None]\n" if end == signal.SIGTERM else ""  # KeyboardInterrupt, once they have saved
            assert lines.read() == ("saved\nsaved\n" + results if saves else "")
        caller.join(20)
        assert caller.exitcode == (-signal.SIGTERM if not saves else 1 if end == signal.SIGINT else 0)


def test_the_environment_that_torchrun_sets():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def place():
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        place = ranks.ensure_process_group("cpu", 88)
        assert torch_internals.group_timeout() == 88
        assert place == ranks.ensure_process_group()
        x = torch.ones(1)
        dist.all_reduce(x)
        return place, x.item(), ranks.device_type()

    assert launch(place, 2, device="cpu") == [((0, 2), 2, "cpu"), ((1, 2), 2, "cpu")]


def test_a_bare_process_is_one_rank_without_a_group():
    assert ranks.ensure_process_group() == (0, 1)
    assert not ranks.has_process_group()
    assert ranks.device_type() == "cpu"


# The tests' own pool


def summed(x):
    dist.all_reduce(x)
    return os.getpid(), x


def test_the_pool_keeps_its_ranks_and_their_order(gloo):
    first, again, third = (gloo(4, summed, torch.arange(3.0)) for _ in range(3))
    pids = [[pid for pid, _ in found] for found in (first, again, third)]
    assert pids[1] in (pids[0], pids[2])  # between two calls of many the ranks are renewed
    assert all(torch.equal(x, 4 * torch.arange(3.0)) for _, x in first)
    assert gloo(3, lambda: (dist.get_rank(), dist.get_world_size())) == [(0, 3), (1, 3), (2, 3)]


def test_the_pool_survives_a_failure(gloo):
    with pytest.raises(RankError) as error:
        gloo(2, failing_rank(wrong_key))
    assert str(error.value).startswith("launch: rank 1 of 2 raised KeyError")
    with pytest.raises(RankError) as error:
        gloo(2, failing_rank(lambda: os._exit(1)))
    assert str(error.value).startswith("launch: rank 1 of 2 exited with code 1")
    assert [x.item() for _, x in gloo(2, summed, torch.ones(1))] == [2, 2]


def _meshes():
    one, same = (make_mesh((2, 2), ("a", "b")) for _ in range(2))
    turned = make_mesh((2, 2), ("b", "a"))
    return one.get_group("a") is same.get_group("a"), turned.mesh_dim_names, dict(coordinates(turned, 1))


def test_meshes_of_one_kind_share_their_groups(gloo):
    assert gloo(4, _meshes) == [(True, ("b", "a"), {"b": 0, "a": 1})] * 4
