"""The checkpoints of a training run: which there are, which go, and that the last good one never goes."""

import os
import shutil

import pytest
import torch
from test_checkpoint import WHOLE, on, same, text_of

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.checkpoint import Manager
from vescale_fn.errors import CheckpointError


def tree(step):
    return {"w": WHOLE + step, "step": step}


@pytest.mark.parametrize("background", [False, True])
def test_the_last_few_are_kept(background, tmp_path):
    with Manager(tmp_path / "run", keep=2, background=background) as manager:
        assert manager.latest() is None
        assert manager.steps() == []
        for step in 1, 2, 10, 11, 30:
            manager.save(step, tree(step))
    assert manager.steps() == [11, 30]
    assert manager.latest() == 30
    assert sorted(os.listdir(tmp_path / "run")) == ["step-11", "step-30"]
    assert manager.restore(tree(0))["step"] == 30
    same(manager.restore(step=11)["w"], WHOLE + 11)
    got = manager.restore({"w": WHOLE}, mesh=on("2x3"), spec=P("b", "a"), partial=True)
    same(vfn.unshard(got["w"]), WHOLE + 30)


def test_one_is_enough_all_are_too_and_some_stay_for_good(tmp_path):
    for keep, every, left in (1, None, [6]), (None, None, [0, 1, 2, 3, 4, 5, 6]), (2, 3, [0, 3, 5, 6]):
        manager = Manager(tmp_path / f"{keep}", keep, keep_every=every)
        for step in range(7):
            manager.save(step, tree(step))
        assert manager.steps() == left


def test_a_save_that_fails_costs_no_checkpoint(tmp_path, monkeypatch):
    for background in False, True:
        manager = Manager(tmp_path / str(background), keep=1, background=background)
        manager.save(1, tree(1))
        manager.wait()

        def full(handle):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            manager.save(2, tree(2))
            manager.wait()
        monkeypatch.undo()
        assert manager.steps() == [1]
        assert manager.restore()["step"] == 1
        manager.save(3, tree(3))
        manager.wait()
        assert manager.steps() == [3]
        assert sorted(os.listdir(manager.folder)) == ["step-3"]


def test_leftovers_do_not_count_and_go(tmp_path):
    manager = Manager(tmp_path, keep=3)
    manager.save(1, tree(1))
    for name in ".step-2.saving", ".step-0.removed", "step-7", "step-x":
        (tmp_path / name).mkdir()
    assert manager.steps() == [1]
    manager.save(2, tree(2))
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2", "step-7", "step-x"]  # what is not ours stays
    assert manager.steps() == [1, 2]


def test_interrupted_between_two_renames(tmp_path):
    """The older one has given way, the newer one is not in its place yet: the older one counts."""
    manager = Manager(tmp_path)
    manager.save(4, tree(4))
    (tmp_path / "step-4").rename(tmp_path / ".step-4.replaced")
    shutil.copytree(tmp_path / ".step-4.replaced", tmp_path / ".step-4.saving")
    assert manager.latest() == 4
    assert manager.restore()["step"] == 4
    manager.save(5, tree(5))
    assert manager.steps() == [4, 5]


def test_an_earlier_step_than_there_is(tmp_path):
    manager = Manager(tmp_path, keep=None)
    for step in 1, 2, 5:
        manager.save(step, tree(step))
    assert text_of(manager.save, 2, tree(2)) == (
        f"Manager.save: step 2 comes before step 5, which is in {tmp_path} already\n"
        "  Instead: manager.rewind(2), which removes what is later; or another folder"
    )
    manager.rewind(2)
    assert manager.steps() == [1, 2]
    manager.save(2, {"again": 1})
    assert manager.restore() == {"again": 1}


def test_a_damaged_one_is_not_passed_over(tmp_path):
    manager = Manager(tmp_path)
    for step in 1, 2:
        manager.save(step, tree(step))
    file = tmp_path / "step-2" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    said = text_of(manager.restore)
    assert said.startswith(f"load: {tmp_path}/step-2 is damaged\n")
    assert said.endswith("\n  Besides step 2 there is step 1: restore(like, step=1)")
    assert manager.restore(step=1)["step"] == 1


def test_mistakes(tmp_path):
    assert text_of(Manager, tmp_path, 0) == "Manager: keep must be a positive integer or None, but it is 0"
    assert "keep_every must be" in text_of(Manager, tmp_path, keep_every=True)
    assert "path must be a path" in text_of(Manager, None)
    manager = Manager(tmp_path / "run")
    assert text_of(manager.restore) == f"Manager.restore: {tmp_path}/run has no checkpoint"
    assert "step must be a whole number, but it is 1.0" in text_of(manager.save, 1.0, {})
    assert "step must be a whole number" in text_of(manager.save, {}, 1)
    manager.save(1, tree(1))
    assert text_of(manager.restore, step=3) == (
        f"Manager.restore: there is no checkpoint of step 3 in {tmp_path}/run\n  * there is step 1"
    )
    assert torch.equal(manager.restore()["w"], WHOLE + 1)
