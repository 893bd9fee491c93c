"""`vfn.elastic`: the bits of an undisturbed run, whoever is killed, stopped or lost, and however many processes there are."""

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import vescale_fn as vfn
from benchmarks import chaos
from vescale_fn import P
from vescale_fn._core import torch_internals
from vescale_fn._core.distributed import process_end, restarts, worker
from vescale_fn.checkpoint import memory_files, shares
from vescale_fn.checkpoint.buddies import Copies
from vescale_fn.checkpoint.recovery import Survey

# --- whole runs -------------------------------------------------------------------------------------------------------


def begin():
    mesh = vfn.make_mesh((4,), ("dp",), device="cpu")
    w = vfn.random.normal(vfn.random.key(0), (6, 5), spec=P("dp"), mesh=mesh)
    return {"w": w, "sum": vfn.shard(torch.zeros(()), mesh, P()), "n": 0}


def step(state, batch):
    noise = vfn.random.normal(vfn.random.fold_in(vfn.random.key(1), state["n"]), (6, 5), spec=P("dp"))
    w = state["w"] * 0.9 + noise * batch
    return {"w": w, "sum": state["sum"] + vfn.with_sharding(w.sum(), P()), "n": state["n"] + 1}, state["n"]


def follow(folder, disturb=None, steps=8, **how):
    """The digest of a run, and the steps that this process has taken since it was started."""
    taken = []

    def on_step(i, aux):
        assert aux == i - 1
        taken.append(i)
        if disturb is not None:
            disturb(folder, i)

    state = vfn.elastic(step, begin, lambda i: i / 8, steps=steps, virtual=4, on_step=on_step, **how)
    return None if state is None else (vfn.digest(state), state["n"], taken)


def once(folder, name):
    """Whether this is the first process to ask."""
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@pytest.fixture(scope="module")
def undisturbed():
    digest, n, taken = follow(None)
    assert (n, taken) == (8, [*range(1, 9)])
    return digest


def test_it_is_the_loop_that_a_user_would_write(undisturbed):
    with vfn.deterministic(virtual=4):
        state = begin()
        with vfn.use_mesh(state["w"].device_mesh):
            for i in range(8):
                state, _ = step(state, i / 8)
    assert vfn.digest(state) == undisturbed


def test_a_process_too_many_is_a_spare(undisturbed):
    found = vfn.launch(follow, 3, None, device="cpu")
    assert found == [(undisturbed, 8, [*range(1, 9)])] * 2 + [None]


def test_killed_processes_lose_a_step_at_most(undisturbed, tmp_path, capfd):
    def kill(folder, i):
        if i == 5 and dist.get_rank() in (0, 3) and once(folder, f"killed {dist.get_rank()}"):
            os.kill(os.getpid(), signal.SIGKILL)

    found = vfn.launch(follow, 4, tmp_path, kill, device="cpu", restarts=2)
    assert [each[:2] for each in found] == [(undisturbed, 8)] * 4
    assert all(each[2] in ([5, 6, 7, 8], [6, 7, 8]) for each in found)
    assert "all start again" in capfd.readouterr().err


def test_a_machine_is_lost_and_its_neighbour_has_its_part(undisturbed, tmp_path):
    def lose(folder, i):
        if i == 5 and dist.get_rank() == 1 and once(folder, "lost"):
            (folder / "machine-1").rename(folder / "gone")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_machines():
        return follow(tmp_path, lose, memory=tmp_path / f"machine-{dist.get_rank()}")

    found = vfn.launch(on_machines, 4, device="cpu", restarts=1)
    assert [each[:2] for each in found] == [(undisturbed, 8)] * 4
    assert all(each[2] in ([5, 6, 7, 8], [6, 7, 8]) for each in found)
    assert not list(tmp_path.glob("machine-*/*"))  # nothing is left in memory


def test_where_all_memory_is_lost_the_checkpoint_is_left(undisturbed, tmp_path):
    def lose(folder, i):
        if i == 5 and dist.get_rank() == 1 and once(folder, "lost"):
            (folder / "machine").rename(folder / "gone")
            os.kill(os.getpid(), signal.SIGKILL)

    def saving():
        manager = vfn.checkpoint.Manager(tmp_path / "saved")
        return follow(tmp_path, lose, memory=tmp_path / "machine", manager=manager, save_every=3)

    found = vfn.launch(saving, 2, device="cpu", restarts=1)
    assert found == [(undisturbed, 8, [4, 5, 6, 7, 8])] * 2
    assert vfn.checkpoint.Manager(tmp_path / "saved").steps() == [3, 6, 8]


def test_another_number_of_processes_goes_on(undisturbed, tmp_path):
    asked, asking = multiprocessing.Pipe(False)

    def ask(folder, i):
        world = dist.get_world_size()
        if (world, i) in ((2, 3), (4, 6)) and dist.get_rank() == 0 and once(folder, str(world)):
            asking.send({2: 4, 4: 1}[world])
            is_told()

    found = vfn.launch(follow, 2, tmp_path, ask, device="cpu", resize=asked)
    assert [each[:2] for each in found] == [(undisturbed, 8)]
    assert found[0][2] == [7, 8]  # no step is taken again


def is_told():
    """Wait until this process has been told to end."""
    while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        time.sleep(0.01)


def test_a_process_that_is_told_to_end_hands_its_step_over(undisturbed, tmp_path, capfd):
    """The others go on behind it, with one less: two play the ranks, one is a spare."""

    def tell(folder, i):
        if i == 5 and dist.get_rank() == 1 and once(folder, "told"):
            os.kill(os.getpid(), signal.SIGTERM)

    found = vfn.launch(follow, 4, tmp_path, tell, device="cpu", restarts=1)
    assert found == [(undisturbed, 8, [6, 7, 8])] * 2 + [None]
    assert "launch: rank 1 of 4 had been told to end; all start again (1 restart is left)" in capfd.readouterr().err


def test_a_run_that_is_told_to_end_saves_its_step(tmp_path):
    def tell(folder, i):
        if i == 5:
            if dist.get_rank() == 1:
                os.kill(os.getppid(), signal.SIGTERM)
            is_told()  # and the spare

    def run():
        saving = lambda: follow(tmp_path, tell, manager=vfn.checkpoint.Manager(tmp_path / "saved"))
        vfn.launch(saving, 3, device="cpu", restarts=1)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
    assert vfn.checkpoint.Manager(tmp_path / "saved").steps() == [5]


def test_a_stopped_process_is_started_again(undisturbed, tmp_path):
    def stop(folder, i):
        if i == 4 and once(folder, "stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)

    found = vfn.launch(follow, 1, tmp_path, stop, device="cpu", restarts=1, timeout=0.5)
    assert [each[:2] for each in found] == [(undisturbed, 8)]


@pytest.mark.parametrize("seed", [1, 5])
def test_chaos(seed, small_chaos):
    kinds = ("kill", "machine", "machines", "all", "again", "damage", "resize")
    assert {*chaos.run(seed, steps=20, events=2, kinds=kinds).digests} == {small_chaos}


@pytest.fixture(scope="module")
def small_chaos():
    return chaos.train(20, False)


PROGRAM = """
    import os, pathlib, signal, sys
    sys.path[:0] = [{tests!r}, os.path.dirname({tests!r})]
    import torch.distributed as dist
    import test_elastic
    from vescale_fn._core.distributed import process_end

    def kill(folder, i):
        if i == 5 and dist.get_rank() == 1 and test_elastic.once(folder, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)

    found = test_elastic.follow(pathlib.Path({folder!r}), kill)
    rank = os.environ["RANK"]
    pathlib.Path({folder!r}, "found-" + rank).write_text(repr(found))
    process_end._at_work = lambda: (pathlib.Path({folder!r}, "let go " + rank).touch(), iter(()))[1]
"""


@pytest.mark.slow
def test_under_torchrun(undisturbed, tmp_path):
    (tmp_path / "program.py").write_text(
        textwrap.dedent(PROGRAM.format(tests=os.path.dirname(__file__), folder=str(tmp_path)))
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--max-restarts", "1", "--monitor-interval", "0.1", str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = [eval((tmp_path / f"found-{rank}").read_text()) for rank in range(2)]
    assert [each[:2] for each in found] == [(undisturbed, 8)] * 2
    assert all(each[2] in ([5, 6, 7, 8], [6, 7, 8]) for each in found)
    assert len([*tmp_path.glob("let go *")]) == 2  # at the end, where threads that hold tensors would abort the process


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system does not say what threads do")
def test_a_process_that_ends_waits_for_the_threads_of_gloo_that_work_and_for_no_others():
    done, held = [], threading.Lock()

    def named(work):
        def run():
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(torch_internals.GLOO_THREAD)
            begun.set()
            work()
            done.append(work)

        begun = threading.Event()
        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
        return thread

    compute = lambda: [hashlib.sha256(bytes(2**24)).digest() for _ in range(8)]  # without Python's lock
    with held:
        threads = [named(held.acquire), named(compute)]
        process_end.let_go()
        assert done == [compute]
    for thread in threads:
        thread.join()


# --- copies -----------------------------------------------------------------------------------------------------------


def tree_of_all_kinds():
    with vfn.deterministic(virtual=4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"), device="cpu")
        x = torch.arange(30.0).view(6, 5)
        x[0, 0] = torch.frombuffer(bytearray(b"\x01\x00\xc0\x7f"), dtype=torch.float32)[0]  # a NaN of its own
        return {
            "uneven": vfn.shard(x, mesh, P(("b", "a"))),
            "rows": vfn.shard(x.to(torch.bfloat16), mesh, P("a", "b")),
            "whole": vfn.shard(x.long(), mesh, P()),
            "none": vfn.shard(torch.zeros(0, 3), mesh, P("a")),
            "plain": torch.nn.Parameter(x.clone()),
            "number": torch.tensor(3, dtype=torch.uint8),
            "key": vfn.random.key(7),
            "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
            "numpy": np.arange(3),
            "values": [1, 2.5, "text", None, True, float("nan")],
        }


def test_an_image_brings_every_kind_of_leaf_back():
    tree = tree_of_all_kinds()
    share = shares.Share(tree, "elastic")
    image = torch.empty(share.nbytes, dtype=torch.uint8)
    share.write(image)
    table, data = shares.opened(image)
    parts = {part.key: part for part in table.parts}
    filling = shares.Filling(tree, "elastic")
    for key, tensor in filling.pieces():
        tensor.copy_(parts[key].of(data))
    back = filling.finished(table.values)
    assert vfn.digest(back) == vfn.digest(tree)
    assert [type(x) for x in back.values()] == [type(x) for x in tree.values()]
    assert back["plain"].requires_grad
    assert back["plain"] is not tree["plain"]


def kept(folder, steps):
    copies = Copies(folder, None, ["here"], "ab12", buddies=True)
    for i in steps:
        copies.keep(i, {"w": torch.full((3,), float(i)), "i": i})
    copies.wait()
    return copies


def test_the_newest_copy_that_is_whole_is_taken(tmp_path):
    copies = kept(tmp_path, range(6))
    survey = Survey(tmp_path, None)
    like = {"w": torch.zeros(3), "i": 0}
    assert survey.newest.step == 5
    assert survey.state(survey.newest, like)["w"].tolist() == [5.0] * 3
    newest = max(memory_files.copies_in(tmp_path), key=lambda copy: copy.step)
    size = os.path.getsize(newest.path)
    for at in (0, 8, 9, 16, 24, 64, size // 2, size - 1):  # a bit of the lid, or of the image
        with open(newest.path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 4]))
        survey = Survey(tmp_path, None)
        assert survey.newest.step == 4, at
        with open(newest.path, "r+b") as file:
            file.seek(at)
            file.write(byte)
    assert Survey(tmp_path, None).newest.step == 5
    copies.remove()
    assert not tmp_path.exists()


def test_a_copy_that_is_being_written_does_not_count(tmp_path):
    copies = kept(tmp_path, range(6))
    image = copies._own[0].uncovered(copies._own[0]._bytes.numel() - 64)
    assert [copy.step for copy in memory_files.copies_in(tmp_path)] == [5]
    image.zero_()
    assert Survey(tmp_path, None).newest.step == 5


def test_a_state_of_another_form_is_refused(tmp_path):
    copies = kept(tmp_path, range(2))
    with pytest.raises(
        vfn.errors.CheckpointError, match="step must return a state like that which it was given\n  \\* w is"
    ):
        copies.keep(2, {"w": torch.zeros(4), "i": 2})
    survey = Survey(tmp_path, None)
    with pytest.raises(vfn.errors.CheckpointError, match="is another than state\\(\\) gives"):
        survey.state(survey.newest, {"w": torch.zeros(4), "i": 0})
    with pytest.raises(vfn.errors.CheckpointError, match="has other leaves: i, j"):
        survey.state(survey.newest, {"w": torch.zeros(3), "j": 0})


def test_sums_that_are_still_to_be_made_are_refused():
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        x = vfn.shard(torch.ones(4), mesh, P(unreduced={"dp"}))
        with pytest.raises(vfn.errors.CheckpointError, match="sums over ranks are still to be made"):
            shares.Share({"x": x}, "elastic")


def test_what_a_dead_session_has_left_is_removed(tmp_path, monkeypatch):
    dead = subprocess.Popen(["true"])
    name = f"vescale_fn-{os.getuid()}-{restarts.process_name(dead.pid)}"
    dead.wait()
    (tmp_path / f"{name}-00").mkdir()
    monkeypatch.setenv(worker.SESSION, f"{restarts.process_name(os.getppid())}-11")
    monkeypatch.setenv(worker.FOLDER, "")
    mine = memory_files.folder_of(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [mine.name]
    assert memory_files.folder_of(tmp_path) != mine  # of another run of this process
    monkeypatch.setenv(worker.SESSION, f"{restarts.process_name(os.getpid())}-11")
    assert memory_files.folder_of(tmp_path) is None  # who would start this process again is not its parent
    monkeypatch.delenv(worker.SESSION)
    assert memory_files.folder_of(tmp_path) is None  # nobody would


CALLER = """
    import os, pathlib, signal, sys, threading
    sys.path[:0] = [{tests!r}]
    import vescale_fn as vfn
    import test_elastic
    from vescale_fn._core.distributed import worker

    def kill(folder, i):
        if i == 3:
            (folder / "memory").write_text(os.environ[worker.FOLDER])
            os.kill(os.getppid(), signal.SIGKILL)
            threading.Event().wait()

    vfn.launch(test_elastic.follow, 1, pathlib.Path({folder!r}), kill, device="cpu", restarts=1)
"""


def test_where_the_caller_is_killed_nothing_is_left_in_memory(tmp_path):
    program = textwrap.dedent(CALLER.format(tests=os.path.dirname(__file__), folder=str(tmp_path)))
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE)  # until its rank has gone, too
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
    assert not os.path.exists((tmp_path / "memory").read_text())


def two_runs(folder):
    """The second run of a program is disturbed."""

    def kill(folder, i):
        if i == 3 and dist.get_rank() == 0 and once(folder, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)

    first = follow(folder, steps=4)
    return first[0], follow(folder, kill)


def test_a_program_of_two_runs_does_not_mix_them(undisturbed, tmp_path):
    ((first, second),) = vfn.launch(two_runs, 1, tmp_path, device="cpu", restarts=1)
    assert first == follow(None, steps=4)[0]
    assert second[:2] == (undisturbed, 8)
    assert second[2] in ([3, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8])


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_arguments_that_make_no_run():
    with pytest.raises(vfn.errors.CheckpointError) as error:
        vfn.elastic(1, {}, [1, 2], steps=3.0, virtual=4, save_every=0)
    assert str(error.value) == textwrap.dedent("""\
        elastic: the arguments do not make a run
          * step must be a function, but it is the int 1
          * state must be a function, but it is the dict {}
          * steps must be a whole number of at least 0, but it is 3.0
          * save_every must be a whole number of at least 1, but it is 0
          * save_every=0, but there is no manager to save with""")
    with pytest.raises(vfn.errors.CheckpointError, match="a sequence of one for each step, but it is \\[1, 2\\]"):
        vfn.elastic(step, begin, [1, 2], steps=3, virtual=4)
    with pytest.raises(vfn.errors.CheckpointError, match="step must return \\(state, aux\\), but it returned"):
        vfn.elastic(lambda state, batch: state, begin, [1, 2], steps=2, virtual=4)


def test_a_run_that_is_to_end_earlier_than_it_is(tmp_path):
    manager = vfn.checkpoint.Manager(tmp_path)
    follow(None, manager=manager)
    with pytest.raises(vfn.errors.CheckpointError, match="to end after 7 steps, but there is a state after 8"):
        follow(None, steps=7, manager=manager)
    assert follow(None, steps=9, manager=manager)[1:] == (9, [9])


def test_a_rank_that_raises_is_not_started_again(tmp_path):
    def wrong(folder, i):
        assert once(folder, f"{dist.get_rank()} {i}"), "again"
        if i == 2 and dist.get_rank() == 1:
            raise KeyError("of the program")

    with pytest.raises(vfn.errors.RankError, match="rank 1 of 2 raised KeyError"):
        vfn.launch(follow, 2, tmp_path, wrong, device="cpu", restarts=3)


def test_restarts_have_an_end(tmp_path, capfd):
    def kill(folder, i):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(vfn.errors.RankError, match="rank 0 of 1 was killed by SIGKILL"):
        vfn.launch(follow, 1, tmp_path, kill, device="cpu", restarts=1)
    assert capfd.readouterr().err.count("all start again (no restarts are left)") == 1


def test_what_launch_says_of_its_options():
    with pytest.raises(
        vfn.errors.MeshError, match="restarts=-1 is not a number of restarts; it must be an integer >= 0"
    ):
        vfn.launch(begin, 1, restarts=-1)
    asked, asking = multiprocessing.Pipe(False)
    asking.send("many")
    with pytest.raises(vfn.errors.MeshError, match="what came through resize must be a number of ranks"):
        vfn.launch(threading.Event().wait, 1, device="cpu", resize=asked)
    with pytest.raises(vfn.errors.MeshError, match='on="torchrun" the number of ranks is the engine'):
        vfn.launch(begin, 1, on="torchrun", resize=asked)
