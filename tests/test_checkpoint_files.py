"""Checkpoints and other programs: plain files of torch and of safetensors, and torch.distributed.checkpoint itself."""

import json
import os
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from test_checkpoint import WHOLE, blocks, check_everything, everything, on, same, text_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.base import tree


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """torch warns where one process saves alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(disabled, unavailable or uninitialized|TypedStorage).*")
        yield


def laid_out():
    mesh = on("2x3")
    return {
        "w": vfn.shard(WHOLE, mesh, P(("b", "a"))),
        "blocks": [vfn.shard({"u": WHOLE.bfloat16()}, mesh, P("b", "a")), {"u": torch.ones(3, dtype=torch.bool)}],
        "key": vfn.random.key(11),
        "step": torch.tensor(4),
        "none": vfn.shard(torch.zeros(0, 3), mesh, P(None, "b")),
    }


NAMES = {"w", "blocks.0.u", "blocks.1.u", "key", "step", "none"}


def check_laid_out(got, like):
    assert got["key"] == like["key"]
    for x, y in zip(tree.leaves(got), tree.leaves(like)):
        if vfn.spec_of(y) != P():
            assert vfn.spec_of(x) == vfn.spec_of(y)
            assert all(map(torch.equal, blocks(x), blocks(y)))
        same(vfn.unshard(x), vfn.unshard(y))


# --- plain files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "folder", "many"])
def test_exported_and_loaded_again(name, tmp_path):
    like = laid_out()
    vfn.export_weights(tmp_path / "x" / name, like, max_bytes=200 if name == "many" else 10**9)
    assert not [file for file in os.listdir(tmp_path / "x") if file.startswith(".")]
    check_laid_out(vfn.load(tmp_path / "x" / name, like), like)
    got = vfn.load(tmp_path / "x" / name)
    assert got.keys() == NAMES
    same(got["w"], WHOLE)
    wanted = vfn.load(tmp_path / "x" / name, {"w": WHOLE}, mesh=on("4"), spec=P(None, "a"), partial=True)["w"]
    assert all(map(torch.equal, blocks(wanted), blocks(vfn.shard(WHOLE, on("4"), P(None, "a")))))


def test_torch_reads_what_is_exported(tmp_path):
    tree = everything()
    vfn.export_weights(tmp_path / "x.pt", tree)
    plain = torch.load(tmp_path / "x.pt")
    assert plain.keys() == vfn.checkpoint.state_dict(tree).keys()
    same(plain["params.blocks.1.w"], -WHOLE)
    assert (plain["plain.3"], plain["plain.7"]) == (True, None)
    check_everything(vfn.load(tmp_path / "x.pt", tree), tree)


def test_safetensors_reads_what_is_exported(tmp_path):
    like = laid_out()
    vfn.export_weights(tmp_path / "one.safetensors", like)
    vfn.export_weights(tmp_path / "many", like, max_bytes=130)
    one = load_file(tmp_path / "one.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) == 3
    many = {}
    for file in files:
        many |= load_file(tmp_path / "many" / file)
    assert one.keys() == many.keys() == NAMES == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in many.values())
    for found in one, many:
        same(found["w"], WHOLE)
        same(found["blocks.0.u"], WHOLE.bfloat16())


def test_safetensors_that_others_wrote(tmp_path):
    save_file({"a.w": WHOLE, "a.b": WHOLE[0].half()}, tmp_path / "x.safetensors")
    like = {"a": {"w": vfn.shard(torch.empty(7, 9), on("2x3"), P("b", "a")), "b": torch.empty(9, dtype=torch.half)}}
    got = vfn.load(tmp_path / "x.safetensors", like)
    same(vfn.unshard(got["a"]["w"]), WHOLE)
    same(got["a"]["b"], WHOLE[0].half())


def test_torch_files_that_others_wrote(tmp_path):
    tree = {"a": {"w": WHOLE, "b": [WHOLE[0], 3]}}
    torch.save(tree, tmp_path / "new.pt")
    torch.save(tree, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in "new.pt", "old.pt":
        got = vfn.load(tmp_path / name, {"a": {"w": vfn.shard(torch.empty(7, 9), on("4"), P("a")), "b": [WHOLE[0], 0]}})
        same(vfn.unshard(got["a"]["w"]), WHOLE)
        assert got["a"]["b"][1] == 3


def test_an_export_leaves_other_files_and_no_old_ones(tmp_path):
    vfn.export_weights(tmp_path, {"a": WHOLE, "b": WHOLE}, max_bytes=10)
    (tmp_path / "config.json").write_text("{}")
    vfn.export_weights(tmp_path, {"a": WHOLE + 1})
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    same(vfn.load(tmp_path)["a"], WHOLE + 1)


def test_values_in_the_header_of_safetensors(tmp_path):
    tree = {"x": WHOLE, "step": 3, "rate": 0.1, "name": "a", "on": True, "none": None}
    vfn.export_weights(tmp_path / "x.safetensors", tree)
    got = vfn.load(tmp_path / "x.safetensors", tree)
    same(got.pop("x"), WHOLE)
    assert got == {"step": 3, "rate": 0.1, "name": "a", "on": True, "none": None}
    assert text_of(
        vfn.export_weights, tmp_path / "y.safetensors", {"z": 1j, "c": torch.zeros(1, dtype=torch.complex128)}
    ) == (
        "export_weights: safetensors has no room for some leaves\n"
        "  * tree['c'] is c128[1]\n"
        "  * tree['z'] is 1j\n"
        "  Instead: a .pt file, or vfn.save"
    )


def test_damaged_plain_files(tmp_path):
    for name in "x.pt", "x.safetensors":
        vfn.export_weights(tmp_path / name, {"x": WHOLE})
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        assert f"load: {tmp_path}/{name} is damaged, or no file of" in text_of(vfn.load, tmp_path / name)
    vfn.export_weights(tmp_path / "many", {"a": WHOLE, "b": WHOLE}, max_bytes=10)
    (tmp_path / "many" / "model-00001-of-00002.safetensors").unlink()
    assert text_of(vfn.load, tmp_path / "many") == (
        f"load: {tmp_path}/many is damaged\n"
        "  * model-00001-of-00002.safetensors is missing\n"
        "  Instead: another checkpoint"
    )
    (tmp_path / "many" / "model.safetensors.index.json").write_text("[]")
    assert "no index of safetensors: it has no weight_map" in text_of(vfn.load, tmp_path / "many")


def test_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert text_of(vfn.export_weights, tmp_path / "x.safetensors", {"x": WHOLE}) == (
        "export_weights: files of safetensors need the library of that name\n  Instead: pip install vescale_fn[safetensors]"
    )
    vfn.export_weights(tmp_path / "x.pt", {"x": WHOLE})


def test_an_export_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    vfn.export_weights(tmp_path / "x.pt", {"x": WHOLE})

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in text_of(vfn.export_weights, tmp_path / "x.pt", {"x": WHOLE + 1})
    assert os.listdir(tmp_path) == ["x.pt"]
    same(vfn.load(tmp_path / "x.pt")["x"], WHOLE)


# --- torch.distributed.checkpoint ------------------------------------------------------------------------------------


def test_torch_reads_what_is_saved(tmp_path):
    like = laid_out()
    vfn.save(tmp_path / "c", like | {"name": "a", "rate": np.float64(0.5)})
    into = {
        "w": torch.zeros(7, 9),
        "blocks": [{"u": torch.zeros(7, 9).bfloat16()}, {"u": torch.zeros(3).bool()}],
        "key": torch.zeros(2).int(),
        "step": torch.tensor(0),
        "none": torch.ones(0, 3),
        "name": "",
        "rate": torch.tensor(0.0).double(),
    }
    dcp.load(into, checkpoint_id=tmp_path / "c")
    same(into["w"], WHOLE)
    same(into["blocks"][0]["u"], WHOLE.bfloat16())
    same(into["key"], like["key"].data)
    assert (into["name"], into["rate"].item(), into["step"].item()) == ("a", 0.5, 4)
    dcp_to_torch_save(tmp_path / "c", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    same(plain["w"], WHOLE)
    same(plain["blocks"]["0"]["u"], WHOLE.bfloat16())


def test_what_torch_saves_is_loaded(tmp_path):
    state = {"model": {"w": WHOLE, "layers": [WHOLE[0], WHOLE[1]]}, "step": 3, "name": "a", "none": torch.zeros(0, 2)}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    like = {
        "model": {"w": vfn.shard(torch.empty(7, 9), on("2x3"), P(("b", "a"))), "layers": [WHOLE[0], WHOLE[0]]},
        "step": 0,
        "name": "",
        "none": torch.zeros(0, 2),
    }
    got = vfn.load(tmp_path / "c", like)
    same(vfn.unshard(got["model"]["w"]), WHOLE)
    same(got["model"]["layers"][1], WHOLE[1])
    assert (got["step"], got["name"], got["none"].shape) == (3, "a", (0, 2))
    assert vfn.load(tmp_path / "c").keys() == {"model.w", "model.layers.0", "model.layers.1", "step", "name", "none"}
    assert "values are of other types\n  * like['step'] is float in like, but int in the checkpoint" in text_of(
        vfn.load, tmp_path / "c", like | {"step": 0.5}
    )
    torch.save({"w": WHOLE}, tmp_path / "plain.pt")
    torch_save_to_dcp(tmp_path / "plain.pt", tmp_path / "d")
    same(vfn.load(tmp_path / "d")["w"], WHOLE)
