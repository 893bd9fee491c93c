"""Checkpoints under misfortune: killed at any moment, cut off, bits that flip, disks that are full. Nothing saved is lost."""

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from test_checkpoint import WHOLE, on, same, text_of

import vescale_fn as vfn
from vescale_fn import P

CALLS = [(os, name) for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir")] + [(torch, "save")]


def killed_at(count, work):
    """Run `work` in a process that ends, as if killed, at the `count`-th of these calls; whether it lived to see the end."""
    child = os.fork()
    if child == 0:
        left = [count]

        def dying(call):
            def wrapper(*args, **kwargs):
                if left[0] == 0:
                    os._exit(1)
                left[0] -= 1
                return call(*args, **kwargs)

            return wrapper

        try:
            for owner, name in CALLS:
                setattr(owner, name, dying(getattr(owner, name)))
            work()
            os._exit(0)
        finally:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return status == 0


def moments(work, prepare):
    """Each moment at which `work`, after `prepare`, can be killed; and at last none."""
    count = 0
    while True:
        prepare()
        lived = killed_at(count, work)
        yield count
        if lived:
            return
        count += 1


def test_a_save_killed_at_any_moment_leaves_the_one_before(tmp_path):
    def prepare():
        shutil.rmtree(tmp_path)
        vfn.save(tmp_path / "run" / "last", {"w": WHOLE, "step": 1})

    seen = []
    for count in moments(lambda: vfn.save(tmp_path / "run" / "last", {"w": WHOLE + 1, "step": 2}), prepare):
        got = vfn.load(tmp_path / "run" / "last")
        seen.append(got["step"])
        same(got["w"], WHOLE + got["step"] - 1)
        vfn.save(tmp_path / "run" / "last", {"w": WHOLE + 2, "step": 3})
        assert vfn.load(tmp_path / "run" / "last")["step"] == 3
        assert os.listdir(tmp_path / "run") == ["last"], f"killed at call {count}"
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, 2)
    assert len(seen) > 10


def test_a_manager_killed_at_any_moment(tmp_path):
    def prepare():
        shutil.rmtree(tmp_path)
        for step in 1, 2:
            vfn.checkpoint.Manager(tmp_path / "run", keep=1).save(step, {"step": step})

    manager = vfn.checkpoint.Manager(tmp_path / "run", keep=1)
    for _ in moments(lambda: manager.save(3, {"step": 3}), prepare):
        latest = manager.latest()
        assert latest in (2, 3)
        assert vfn.load(tmp_path / "run" / f"step-{latest}")["step"] == latest
        assert manager.restore()["step"] == latest
        manager.save(4, {"step": 4})
        assert os.listdir(tmp_path / "run") == ["step-4"]
    assert latest == 3


def test_an_export_killed_at_any_moment(tmp_path):
    for _ in moments(
        lambda: vfn.export_weights(tmp_path / "x.pt", {"w": WHOLE + 1}),
        lambda: vfn.export_weights(tmp_path / "x.pt", {"w": WHOLE}),
    ):
        (got,) = vfn.load(tmp_path / "x.pt").values()
        assert torch.equal(got, WHOLE) or torch.equal(got, WHOLE + 1)
    assert torch.equal(got, WHOLE + 1)


def test_several_files_killed_at_any_moment_are_the_old_ones_or_the_new_ones(tmp_path):
    """And what is there, and loaded, is whole: files of both never meet. From three files to two, to one, and back."""
    trees = {size: {name: WHOLE + size + i for i, name in enumerate("abc")} for size in (100, 600, 1000)}
    write = lambda size: vfn.export_weights(tmp_path / "m", trees[size], max_bytes=size)
    for old, new in (100, 100), (100, 600), (600, 1000), (1000, 100):

        def prepare(old=old):
            shutil.rmtree(tmp_path)
            (tmp_path / "m").mkdir(parents=True)
            (tmp_path / "m" / "model-00007-of-00009.safetensors").write_text("mine")
            write(old)
            trees[new] = {name: x + 1 for name, x in trees[new].items()}

        for _ in moments(lambda new=new: write(new), prepare):
            before = trees[old] if old != new else {name: x - 1 for name, x in trees[new].items()}
            got = vfn.load(tmp_path / "m")
            assert any(all(torch.equal(got[name], tree[name]) for name in "abc") for tree in (before, trees[new]))
        for size, count in (100, 3), (1000, 1):
            write(size)
            left = sorted(os.listdir(tmp_path / "m"))
            assert len(left) == count + 1 + (count > 1), left
            assert (tmp_path / "m" / "model-00007-of-00009.safetensors").read_text() == "mine"


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    mesh = on("4")
    vfn.save(tmp_path / "c", {"params": {"w": vfn.shard(WHOLE, mesh, P("a")), "b": WHOLE[0]}, "step": 3})
    return tmp_path / "c"


def sums(folder):
    """File, offset, length, checksum and leaf of each stored piece."""
    leaves = json.loads((folder / "vescale_fn.json").read_text().splitlines()[2])["leaves"]
    return [(*chunk[2:], name) for name, *_, chunks in leaves for chunk in chunks]


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_bit_that_flips_anywhere_is_found_and_its_leaf_named(saved):
    """One bit in the middle of each stored piece, and in the values themselves."""
    whole = (saved / "__0_0.distcp").read_bytes()
    for file, offset, length, _, leaf in sums(saved):
        for at in offset, offset + length // 3, offset + length // 2, offset + length - 1:
            flip(saved / file, at)
            assert text_of(vfn.load, saved) == (
                f"load: {saved} is damaged\n"
                f"  * {leaf}: in {file}, bytes {offset} to {offset + length}, the checksum does not fit\n"
                "  Instead: another checkpoint"
            )
            (saved / file).write_bytes(whole)
    flip(saved / "__0_0.distcp", sums(saved)[0][1] + 5)
    damaged = sums(saved)[0][4]
    assert damaged == "params.b"
    same(
        vfn.unshard(vfn.load(saved, {"params": {"w": WHOLE}}, partial=True))["params"]["w"], WHOLE
    )  # the rest is sound


@pytest.mark.parametrize("name", [".metadata", "vescale_fn.json"])
def test_what_it_says_of_itself(saved, name):
    whole = (saved / name).read_bytes()
    for at in range(0, len(whole), len(whole) // 40):
        flip(saved / name, at)
        said = text_of(vfn.load, saved)
        assert said.startswith(f"load: {saved}/{name} is damaged") or "is of a newer vescale_fn" in said
        (saved / name).write_bytes(whole[:at])
        assert text_of(vfn.load, saved).startswith(f"load: {saved}/{name} is damaged")
        (saved / name).write_bytes(whole)
    vfn.load(saved)


def test_cut_off_or_missing(saved):
    data = (saved / "__0_0.distcp").read_bytes()
    last = sums(saved)[-1]
    (saved / "__0_0.distcp").write_bytes(data[:-1])
    assert text_of(vfn.load, saved) == (
        f"load: {saved} is damaged\n"
        f"  * __0_0.distcp has {len(data) - 1} bytes of {len(data)}: {last[4]}\n"
        "  Instead: another checkpoint"
    )
    (saved / "__0_0.distcp").unlink()
    assert text_of(vfn.load, saved) == (
        f"load: {saved} is damaged\n"
        "  * __0_0.distcp is missing: params.b, params.w, step\n"
        "  Instead: another checkpoint"
    )
    (saved / "__0_0.distcp").write_bytes(data)
    (saved / "vescale_fn.json").unlink()
    assert "vescale_fn.json is missing" in text_of(vfn.load, saved)
    (saved / ".metadata").unlink()
    assert text_of(vfn.load, saved) == (
        f"load: {saved} is no checkpoint\n"
        "  * .metadata is missing, which says what is in __0_0.distcp\n"
        "  Instead: a folder made by vfn.save, a .pt file or .safetensors files"
    )


def test_of_a_newer_version(saved):
    lines = (saved / "vescale_fn.json").read_text().splitlines()
    (saved / "vescale_fn.json").write_text("\n".join([json.dumps(json.loads(lines[0]) | {"format": 99}), *lines[1:]]))
    assert text_of(vfn.load, saved) == (
        f"load: {saved}/vescale_fn.json is of a newer vescale_fn\n  Instead: a newer vescale_fn"
    )


# --- places that cannot be written ------------------------------------------------------------------------------------


def test_files_that_may_not_become_so_large(saved):
    """As on a disk that is full, by a limit of the operating system: the file is cut off in the middle of a tensor."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        said = text_of(vfn.save, saved, {"params": {"b": torch.ones(10), "w": torch.zeros(100_000)}})
        exported = text_of(vfn.export_weights, saved.parent / "x.pt", {"w": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == (
        f"save: {saved} cannot be written, at tree['params']['w']\n"
        "  * File too large\n"
        "  Instead: raise the limit on the size of a file and save again; what was saved there before is untouched"
    )
    assert exported.startswith(f"export_weights: {saved.parent}/x.pt cannot be written\n")
    same(vfn.load(saved)["params"]["w"], WHOLE)
    vfn.save(saved, {"w": WHOLE})
    assert os.listdir(saved.parent) == ["c"]


@pytest.mark.parametrize("count", range(5))
def test_a_full_disk_at_any_moment(saved, count, monkeypatch):
    left = [count]
    plain = os.fsync

    def fsync(handle):
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        plain(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    said = text_of(vfn.save, saved, {"w": WHOLE + 1})
    assert f"save: {saved} cannot be written" in said
    assert "No space left on device" in said
    assert "make room on the disk and save again" in said
    monkeypatch.undo()
    got = vfn.load(saved)
    if "w" in got:  # the last flush comes when it is there
        same(got["w"], WHOLE + 1)
    else:
        same(got["params"]["w"], WHOLE)
    vfn.save(saved, {"x": 1})
    assert vfn.load(saved) == {"x": 1}


def test_where_nothing_may_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert text_of(vfn.save, tmp_path / "file" / "c", {}).startswith(f"save: {tmp_path}/file/c cannot be written\n")

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert text_of(vfn.save, tmp_path / "c", {}) == (
        f"save: {tmp_path}/c cannot be written\n"
        f"  * Permission denied: {tmp_path}\n"
        "  Instead: a folder that this user may write to"
    )


def test_where_nothing_may_be_read(saved, monkeypatch):
    plain = Path.read_bytes

    def refuse(self):
        if self.name == ".metadata":
            raise PermissionError(13, "Permission denied", str(self))
        return plain(self)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert text_of(vfn.load, saved) == (f"load: {saved} cannot be read\n  * Permission denied: {saved}/.metadata")


def test_a_disk_that_cannot_read(saved, monkeypatch):
    def broken(self, path, offset, length):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("vescale_fn.checkpoint.torch_zip.Reader.read", broken)
    assert text_of(vfn.load, saved) == f"load: {saved} cannot be read, at step\n  * Input/output error"
