"""Several writers at one path, writers that die, files that are not the checkpoint's own, and failures at exit."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path

import pytest
from test_checkpoint import WHOLE, same, text_of

import vescale_fn as vfn
from vescale_fn.checkpoint import Manager, async_save, locks
from vescale_fn.errors import CheckpointError


def forked(work):
    """A process that runs `work`; its exit status is 3 where that raised."""
    child = os.fork()
    if child == 0:
        status = 3
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def status_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def stopped_while_saving(path, moment="fsync", save=lambda path: vfn.save(path, {"x": 9})):
    """A process that is in the middle of a save, and stays there until it is killed."""
    ready, told = os.pipe()

    def work():
        def stop(*_):
            os.write(told, b"!")
            time.sleep(60)

        setattr(os, moment, stop)
        save(path)

    child = forked(work)
    os.read(ready, 1)
    os.close(ready)
    os.close(told)
    return child


# --- two writers ------------------------------------------------------------------------------------------------------


def test_two_processes_that_save_in_a_loop_leave_whole_checkpoints(tmp_path):
    """And a third one that loads meanwhile always gets what one of them has saved."""
    path = tmp_path / "last"
    vfn.save(path, {"w": WHOLE, "who": -1, "step": 0})

    def write(who):
        step = 0
        while step < 12:
            try:
                vfn.save(path, {"w": WHOLE + 100 * who + step, "who": who, "step": step})
            except CheckpointError as error:
                assert "is being written by somebody else" in str(error)
                time.sleep(0.002)
            else:
                step += 1
                time.sleep(0.01)  # in which the other comes in

    children = [forked(lambda who=who: write(who)) for who in range(2)]
    for _ in range(20):
        got = vfn.load(path)
        same(got["w"], WHOLE + (100 * got["who"] + got["step"] if got["who"] >= 0 else 0))
    assert [status_of(child) for child in children] == [0, 0]
    vfn.save(path, {"x": 1})
    assert vfn.load(path) == {"x": 1}
    assert os.listdir(tmp_path) == ["last"]


def test_a_second_writer_is_refused_and_the_owner_named(tmp_path):
    path = tmp_path / "run" / "step-5"
    vfn.save(path, {"x": 1})
    child = stopped_while_saving(path)
    try:
        refusal = (
            rf"save: {path} is being written by somebody else\n"
            rf"  \* process {child} on \S+, in its thread 'MainThread', since \d+-\d+-\d+ \d+:\d+:\d+\n"
            r"  Instead: another path, or wait for the other to end"
        )
        assert re.fullmatch(refusal, text_of(vfn.save, path, {"x": 2}))
        manager = Manager(tmp_path / "run", keep=1)
        assert re.fullmatch(refusal, text_of(manager.save, 5, {"x": 2}))
        manager.save(6, {"x": 3})  # what would go now is being written, and stays
        assert manager.steps() == [5, 6]
        assert "is being written by somebody else" in text_of(manager.rewind, 4)
        assert vfn.load(path) == {"x": 1}
        assert vfn.load(tmp_path / "run" / "step-6") == {"x": 3}
    finally:
        os.kill(child, signal.SIGKILL)
    while Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":  # dead, and its parent has not asked for it yet
        time.sleep(0.01)
    manager.save(7, {"x": 4})
    assert sorted(os.listdir(tmp_path / "run")) == ["step-7"]
    os.waitpid(child, 0)


@pytest.mark.parametrize("moment", ["mkdir", "rename", "unlink", "rmdir"])
def test_killed_in_the_middle_by_the_system(moment, tmp_path):
    path = tmp_path / "last"
    vfn.save(path, {"x": 1})
    child = stopped_while_saving(path, moment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert vfn.load(path)["x"] in (1, 9)
    vfn.save(path, {"x": 2})
    assert vfn.load(path) == {"x": 2}
    assert os.listdir(tmp_path) == ["last"]


def test_two_exports_to_one_path(tmp_path):
    for name in "x.pt", "many":
        vfn.export_weights(tmp_path / name, {"x": WHOLE, "y": WHOLE}, max_bytes=10)
        child = stopped_while_saving(
            tmp_path / name, save=lambda path: vfn.export_weights(path, {"x": WHOLE + 1, "y": WHOLE + 1}, max_bytes=10)
        )
        assert f"{tmp_path / name} is being written by somebody else\n  * process {child} on" in text_of(
            vfn.export_weights, tmp_path / name, {"x": WHOLE}
        )
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        same(vfn.load(tmp_path / name)["y"], WHOLE)
        vfn.export_weights(tmp_path / name, {"x": WHOLE + 2})
        same(vfn.load(tmp_path / name)["x"], WHOLE + 2)
    assert sorted(os.listdir(tmp_path)) == ["many", "x.pt"]
    assert os.listdir(tmp_path / "many") == ["model.safetensors"]


def test_two_threads_and_two_managers_of_one_process(tmp_path, monkeypatch):
    inside, go_on, plain = threading.Event(), threading.Event(), os.fsync

    def slow(handle):
        if threading.current_thread().name == "first":
            inside.set()
            assert go_on.wait(30)
        plain(handle)

    monkeypatch.setattr(os, "fsync", slow)
    failures = []

    def first():
        try:
            Manager(tmp_path).save(1, {"x": 1})
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=first, name="first")
    thread.start()
    assert inside.wait(30)
    assert "* this process, in its thread 'first', since" in text_of(Manager(tmp_path).save, 1, {"x": 2})
    Manager(tmp_path).save(2, {"x": 3})
    go_on.set()
    thread.join()
    assert not failures
    assert Manager(tmp_path).steps() == [1, 2]
    assert [vfn.load(tmp_path / f"step-{step}") for step in (1, 2)] == [{"x": 1}, {"x": 3}]


def test_threads_that_save_in_the_background(tmp_path):
    """Each to its own path; none of them is forgotten."""

    def work(i):
        for k in range(5):
            vfn.save(tmp_path / f"{i}", {"i": i, "k": k}, background=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    vfn.save(tmp_path / "last", {})
    assert [vfn.load(tmp_path / f"{i}") for i in range(3)] == [{"i": i, "k": 4} for i in range(3)]
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "last"]


def test_a_save_that_has_not_begun_is_not_waited_for(tmp_path, monkeypatch):
    """Another thread looks for saves to wait for just before this one's thread starts."""
    begin = threading.Thread.start

    def start(thread):
        async_save.finish_last(tell=False)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    vfn.save(tmp_path / "last", {"x": 1}, background=True).wait()
    assert vfn.load(tmp_path / "last") == {"x": 1}


def test_a_lock_of_another_machine(tmp_path):
    """Its process cannot be seen from here: it shows that it is alive, or counts as dead after a while."""
    path, folder = tmp_path / "last", tmp_path / ".last.lock"
    vfn.save(path, {"x": 1})
    folder.mkdir()
    owner = locks._me()._replace(host="n17", machine="elsewhere", pid=1234, since="noon")
    (folder / "00aa").write_text(json.dumps(owner._asdict()))
    assert text_of(vfn.save, path, {"x": 2}) == (
        f"save: {path} is being written by somebody else\n"
        "  * process 1234 on n17, in its thread 'MainThread', since noon\n"
        "  * its last sign of life is 0 s old; after 120 s it counts as dead\n"
        "  Instead: another path, or wait for the other to end"
    )
    before = time.time() - 130
    os.utime(folder / "00aa", (before, before))
    vfn.save(path, {"x": 3})
    for damaged in b"", b"[]", b'{"pid": "x"}', b"\xff":
        folder.mkdir()
        (folder / "00bb").write_bytes(damaged)
        assert f"the lock {folder} cannot be read" in text_of(vfn.save, path, {"x": 4})
        os.utime(folder / "00bb", (before, before))
        vfn.save(path, {"x": 5})
    assert os.listdir(tmp_path) == ["last"]


def test_a_live_owner_renews_its_lock_and_sees_that_it_was_taken_over(tmp_path, monkeypatch):
    folder = tmp_path / ".last.lock"

    def slow(handle):
        for file in folder.iterdir():
            if file.name != "00aa":
                os.utime(file, (0, 0))
                while file.stat().st_mtime == 0:
                    time.sleep(0.01)
                file.rename(file.with_name("00aa"))

    monkeypatch.setattr(locks, "RENEWED", 0.01)
    monkeypatch.setattr(os, "fsync", slow)
    assert text_of(vfn.save, tmp_path / "last", {"x": 1}) == (
        f"save: another process took over the writing of {tmp_path}/last\n  * this one stood still for more than 120 s"
    )
    assert [each.name for each in folder.iterdir()] == ["00aa"]  # the other's stays


def test_a_lock_that_an_interrupt_left_behind(tmp_path, monkeypatch):
    """The thread that had it takes it over, so does another one, and for other processes it is given back soon."""
    lock, other = (
        locks.acquire(tmp_path / "last", "save"),
        threading.Thread(target=lambda: vfn.save(tmp_path / "last", 1)),
    )
    vfn.save(tmp_path / "last", 0)
    assert "something else has begun to write" in text_of(lock.check, "save")
    lock.release()
    lock = locks.acquire(tmp_path / "last", "save")
    other.start()
    other.join()
    assert vfn.load(tmp_path / "last") == 1
    monkeypatch.setattr(locks, "RENEWED", 0.01)
    lock = locks.acquire(tmp_path / "last", "save")
    while (tmp_path / ".last.lock").exists() or lock.is_mine():
        time.sleep(0.01)


def test_a_save_in_a_signal_handler_of_the_same_path(tmp_path, monkeypatch):
    """The later one is complete, the earlier one says that it is void."""
    plain, saved = os.fsync, []

    def interrupted(handle):
        monkeypatch.setattr(os, "fsync", plain)
        saved.append(vfn.save(tmp_path / "last", "in the handler"))

    monkeypatch.setattr(os, "fsync", interrupted)
    assert re.search("is void|cannot be written", text_of(vfn.save, tmp_path / "last", "outside"))
    assert saved
    assert vfn.load(tmp_path / "last") == "in the handler"
    assert os.listdir(tmp_path) == ["last"]


# --- what is not ours -------------------------------------------------------------------------------------------------


def test_other_files_in_a_checkpoint_stay(tmp_path):
    path, outside = tmp_path / "last", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")

    def check():
        assert (path / "notes.txt").read_text() == "mine"
        assert (path / "sub" / "deep" / "file").read_text() == "mine"
        assert os.readlink(path / "link") == str(outside)
        assert os.readlink(path / "dangling") == "nowhere"
        assert (outside / "precious").read_text() == "mine"

    vfn.save(path, {"x": 0})
    (path / "notes.txt").write_text("mine")
    (path / "sub" / "deep").mkdir(parents=True)
    (path / "sub" / "deep" / "file").write_text("mine")
    (path / "link").symlink_to(outside)
    (path / "dangling").symlink_to("nowhere")
    for i in range(1, 3):
        vfn.save(path, {"x": i})
        check()
        assert vfn.load(path) == {"x": i}
        assert sorted(os.listdir(tmp_path)) == ["last", "outside"]
    manager = Manager(tmp_path, keep=1)
    path.rename(tmp_path / "step-1")
    path = tmp_path / "step-1"
    manager.save(2, {"x": 9})
    check()
    assert manager.steps() == [2]
    assert sorted(os.listdir(path)) == ["dangling", "link", "notes.txt", "sub"]


def test_a_folder_in_which_a_manager_keeps_steps_is_not_replaced(tmp_path):
    path = tmp_path / "run"
    vfn.save(path, {"x": 0})
    manager = Manager(path)
    manager.save(1, {"x": 1})
    assert text_of(vfn.save, path, {"x": 2}) == (
        f"save: {path} is a folder of checkpoints, and is left as it is\n"
        "  * in it there are step-1\n"
        "  Instead: another path, or remove it"
    )
    assert manager.restore() == {"x": 1}
    assert vfn.load(path) == {"x": 0}


def test_what_no_manifest_of_ours_lists_is_not_replaced(tmp_path):
    for name in "some.metadata", ".metadata", "__0_0.distcp":
        path = tmp_path / name.strip("._")
        path.mkdir()
        (path / name).write_text("mine")
        assert text_of(vfn.save, path, {"x": 2}) == (
            f"save: {path} is a folder that is no checkpoint of vescale_fn, and is left as it is\n"
            "  Instead: another path, or remove it"
        )
        assert (path / name).read_text() == "mine"
    path = tmp_path / "c"
    vfn.save(path, {"x": 1})
    (path / "__1_0.distcp").write_text("mine")
    assert "its manifest does not list __1_0.distcp" in text_of(vfn.save, path, {"x": 2})
    (path / "__1_0.distcp").unlink()
    (path / ".metadata").write_text("another program's")
    said = text_of(vfn.save, path, {"x": 2})
    assert said.startswith(f"save: {path} is a damaged checkpoint, and is left as it is\n")
    (tmp_path / "link").symlink_to(path)
    assert f"is a link, and is left as it is\n  * it leads to {path}" in text_of(vfn.save, tmp_path / "link", {})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-7").symlink_to(path)
    assert "step-7 is not removed" in text_of(Manager(tmp_path / "run").rewind, 1)
    assert (tmp_path / "run" / "step-7").is_symlink()


def test_leftovers_with_files_of_others(tmp_path):
    """Killed after the new one got its name and before the old one's other files had come over; or long ago, elsewhere."""
    vfn.save(tmp_path / "c", {"x": 1})
    (tmp_path / "c" / "notes").write_text("old")
    for word in "replaced-00aa", "removed-00bb", "saving-00cc":
        (tmp_path / f".c.{word}").mkdir()
        (tmp_path / f".c.{word}" / "notes").write_text(word)
        (tmp_path / f".c.{word}" / f"notes {word}").write_text(word)
        (tmp_path / f".c.{word}" / "__0_0.distcp").write_text(word)
    vfn.save(tmp_path / "c", {"x": 2})
    assert vfn.load(tmp_path / "c") == {"x": 2}
    found = {file.read_text() for file in tmp_path.rglob("notes*")}
    assert found == {"old", "replaced-00aa", "removed-00bb", "saving-00cc"}
    assert (tmp_path / "c" / "notes").read_text() == "old"


# --- failures at exit -------------------------------------------------------------------------------------------------


def test_a_background_save_that_fails_at_exit_is_an_exit_status(tmp_path):
    """Of the program and of its child processes; what else is done at exit is done."""
    program = textwrap.dedent("""
        import atexit, multiprocessing, os, sys
        atexit.register(lambda: print("registered before", flush=True))
        import torch, vescale_fn as vfn

        def full(handle):
            raise OSError(28, "No space left on device")

        def saves():
            os.fsync = full
            vfn.save(sys.argv[1], {"x": 1}, background=True)

        def saves_and_raises():
            saves()
            raise ValueError("its own error")

        for work in saves, saves_and_raises:
            child = multiprocessing.get_context("fork").Process(target=work)
            child.start()
            child.join()
            print(child.exitcode, flush=True)
        saves()
    """)
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "c"], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stdout == "1\n1\nregistered before\n"
    assert (
        done.stderr.count(
            "a save in the background failed, as was found when the program ended\n"
            f"save: {tmp_path}/c cannot be written\n  * No space left on device\n"
        )
        == 3
    )
    assert "ValueError: its own error" in done.stderr
