"""Checkpoints: every kind of leaf, from every layout to every other, and what is said where that cannot be."""

import collections
import gc
import os
import pickle
import shutil
import threading
import time
import types
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import optree
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P, random
from vescale_fn._core.base import tree as tree_
from vescale_fn.checkpoint import chunks, manifest
from vescale_fn.errors import CheckpointError, MeshError, RankError, SpecError

MESHES = {"2x3": ((2, 3), ("a", "b")), "4": ((4,), ("a",)), "1x2x2": ((1, 2, 2), ("c", "b", "a"))}
LAYOUTS = [  # mesh, spec; the value is [7, 9], so that nothing divides evenly
    ("2x3", P("a", "b")),
    ("2x3", P("b", "a")),
    ("2x3", P(("a", "b"))),
    ("2x3", P(("b", "a"))),  # against the order of the mesh
    ("2x3", P(None, ("b", "a"))),
    ("2x3", P("a")),
    ("2x3", P()),
    ("4", P("a")),
    ("4", P(None, "a")),
    ("1x2x2", P(("a", "c", "b"))),
    ("1x2x2", P("c", ("b", "a"))),
]
WHOLE = torch.arange(63.0).reshape(7, 9)


def on(mesh):
    shape, names = MESHES[mesh]
    vfn.simulate(int(np.prod(shape)))
    return vfn.make_mesh(shape, names)


def blocks(x):
    return list(x.to_local().blocks)


def same(got, expected):
    assert type(got) is type(expected)
    assert got.dtype == expected.dtype
    assert got is expected or torch.equal(got, expected)


class State(NamedTuple):
    count: torch.Tensor
    mu: dict


def everything():
    """A tree with every kind of leaf."""
    return {
        "params": {"blocks": [{"w": WHOLE}, {"w": -WHOLE}], "empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5)},
        "dtypes": {
            str(dtype)[6:]: torch.arange(3).to(dtype)
            for dtype in (
                torch.bfloat16,
                torch.float16,
                torch.float64,
                torch.int8,
                torch.uint8,
                torch.int16,
                torch.int64,
                torch.uint16,
                torch.uint32,
                torch.bool,
                torch.complex64,
                torch.float8_e4m3fn,
            )
        },
        "opt": State(torch.tensor(3), {"w": np.arange(4, dtype=np.int16)}),
        "keys": [vfn.random.key(7), vfn.random.split(vfn.random.key(1), 3)],
        "plain": (3, 2.5, 1e-300, True, "a name", b"\0bytes", 2 + 1j, None),
        "numbers": {"f": np.float32(1.25), "i": np.int64(-3), "b": np.bool_(True)},
        "nothing": {"list": [], "dict": {}, "tuple": ()},
    }


def check_everything(got, expected):
    leaves, others = (
        tree_.flatten(tree, is_leaf=lambda x: isinstance(x, vfn.random.Key), none_is_leaf=True)[0]
        for tree in (got, expected)
    )
    assert len(leaves) == len(others) > 30
    for x, y in zip(leaves, others):
        assert type(x) is type(y)
        if isinstance(y, torch.Tensor):
            same(x, y)
        elif isinstance(y, np.ndarray):
            assert x.dtype == y.dtype
            assert (x == y).all()
        elif isinstance(y, vfn.random.Key):
            assert x.shape == y.shape
            assert (x == y).all()
        else:
            assert torch.as_tensor(x == y).all()  # keys are compared key by key


# --- there and back ---------------------------------------------------------------------------------------------------


def test_every_kind_of_leaf_comes_back(tmp_path):
    tree = everything()
    assert vfn.save(tmp_path / "c", tree) is None
    got = vfn.load(tmp_path / "c", tree)
    assert type(got["opt"]) is State
    check_everything(got, tree)


def test_without_an_example_containers_come_back_too(tmp_path):
    tree = everything()
    vfn.save(tmp_path / "c", tree)
    got = vfn.load(tmp_path / "c")
    assert list(got) == sorted(tree)
    assert got["opt"].keys() == {"count", "mu"}  # a named tuple, as a dictionary
    assert type(got["plain"]) is tuple
    assert type(got["keys"]) is list
    assert got["nothing"] == tree["nothing"]
    check_everything(got | {"opt": State(**got["opt"])}, tree)


@pytest.mark.parametrize("source", range(len(LAYOUTS)))
def test_from_every_layout_to_every_other(source, tmp_path):
    mesh_name, spec = LAYOUTS[source]
    mesh = on(mesh_name)
    vfn.save(tmp_path / "c", {"w": vfn.shard(WHOLE, mesh, spec)})
    same(vfn.load(tmp_path / "c")["w"], WHOLE)
    for name, wanted in LAYOUTS:
        mesh = on(name)
        expected = vfn.shard(WHOLE, mesh, wanted)
        for got in (
            vfn.load(tmp_path / "c", {"w": expected})["w"],
            vfn.load(tmp_path / "c", mesh=mesh, spec=wanted)["w"],
        ):
            assert vfn.spec_of(got) == wanted
            assert [b.shape for b in blocks(got)] == [b.shape for b in blocks(expected)]
            assert all(map(torch.equal, blocks(got), blocks(expected)))


def test_each_byte_is_stored_once(tmp_path):
    mesh = on("2x3")
    tree = {str(i): vfn.shard(WHOLE, mesh, spec) for i, (name, spec) in enumerate(LAYOUTS) if name == "2x3"}
    vfn.save(tmp_path / "c", tree)
    contents = manifest.read(tmp_path / "c", "test")
    for name in tree:
        owners = torch.zeros(7, 9)
        for chunk in contents.leaves[name].chunks:
            owners[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes))] += 1
        assert (owners == 1).all()
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    assert (
        sum(len(one.chunks) for one in contents.leaves.values())
        == len(metadata.storage_data)
        == sum(len(entry.chunks) for entry in metadata.state_dict_metadata.values())
    )


def test_a_block_that_is_several_pieces(tmp_path):
    """Thirteen rows over two axes against the order of the mesh: the rank at a=2, b=0 has rows 6 and 11."""
    x = torch.arange(13.0)
    with vfn.simulate(6):
        array = vfn.shard(x, vfn.make_mesh((3, 2), ("a", "b")), P(("b", "a")))
    assert blocks(array)[4].tolist() == [6, 11]
    found = sorted((piece.offsets[0], piece.sizes[0]) for piece in chunks.held(array))
    assert found == [(0, 3), (3, 3), (6, 1), (7, 2), (9, 2), (11, 1), (12, 1)]
    for piece in chunks.held(array):
        assert torch.equal(piece.tensor, x[piece.offsets[0] : piece.offsets[0] + piece.sizes[0]])
    vfn.save(tmp_path / "c", {"x": array})
    same(vfn.load(tmp_path / "c")["x"], x)
    assert all(map(torch.equal, blocks(vfn.load(tmp_path / "c", {"x": array})["x"]), blocks(array)))


def test_merged_dims(tmp_path):
    mesh = on("2x3")
    x = torch.arange(24.0)
    merged = vfn.shard(x.reshape(4, 6), mesh, P("a", "b")).reshape(24)
    assert "merged" in repr(vfn.spec_of(merged)).lower() or "*" in merged.type_text
    vfn.save(tmp_path / "c", {"x": merged})
    same(vfn.load(tmp_path / "c")["x"], x)
    got = vfn.load(tmp_path / "c", {"x": merged})["x"]
    assert vfn.spec_of(got) == vfn.spec_of(merged)
    assert all(map(torch.equal, blocks(got), blocks(merged)))


def test_what_is_unreduced_is_added_up_by_one_collective(tmp_path):
    mesh = on("2x3")
    x = vfn.with_sharding(WHOLE, P(None, "b", unreduced={"a"}), mesh=mesh)
    y = vfn.with_sharding(WHOLE * 2, P("b", unreduced={"a"}), mesh=mesh)
    with vfn.comm_log() as log:
        vfn.save(tmp_path / "c", {"x": x, "y": y, "z": vfn.shard(WHOLE, mesh, P("a", "b"))})
    assert [record.op for record in log] == ["all_reduce"]
    got = vfn.load(tmp_path / "c")
    same(got["x"], WHOLE)
    same(got["y"], WHOLE * 2)
    back = vfn.load(tmp_path / "c", {"x": x}, partial=True)["x"]
    assert vfn.spec_of(back) == vfn.spec_of(x)
    same(vfn.unshard(back), WHOLE)


def test_nothing_moves_between_ranks(tmp_path):
    tree = vfn.shard({"w": WHOLE, "v": WHOLE}, on("2x3"), {"w": P(("b", "a")), "v": P("a")})
    with vfn.comm_log() as log, vfn.strict():
        vfn.save(tmp_path / "c", tree)
        vfn.load(tmp_path / "c", tree)
        vfn.load(tmp_path / "c", mesh=on("4"), spec=P(None, "a"))
    assert len(log) == 0


def test_keys_lie_as_asked(tmp_path):
    keys = vfn.random.split(vfn.random.key(5), 6)
    vfn.save(tmp_path / "c", {"keys": vfn.shard(keys, on("2x3"), P("a")), "one": vfn.random.key(9)})
    got = vfn.load(tmp_path / "c", mesh=on("4"), spec={"keys": P("a"), "one": P()})
    assert vfn.spec_of(got["keys"].data) == P("a")
    assert (vfn.unshard(got)["keys"] == keys).tolist() == [True] * 6
    assert vfn.load(tmp_path / "c")["one"] == vfn.random.key(9)


def test_other_containers_and_keys_that_are_no_strings(tmp_path):
    tree = {
        "ordered": collections.OrderedDict(b=WHOLE, a=1),
        "default": collections.defaultdict(list, {"x": [WHOLE]}),
        "deque": collections.deque([1, WHOLE]),
        "numbers": {3: WHOLE, 1: {2: "two"}},
        "pairs": {(1, 2): 3},
        "list": {"dict": [], "list": {"tuple": ()}},
        "named": State(WHOLE, {}),
    }
    vfn.save(tmp_path / "c", tree)
    got = vfn.load(tmp_path / "c", tree)
    for name, container in tree.items():
        assert type(got[name]) is type(container)
    assert list(got["ordered"]) == ["b", "a"]
    same(got["deque"][1], WHOLE)
    plain = vfn.load(tmp_path / "c")
    assert plain["numbers"][1] == {2: "two"}
    assert plain["pairs"] == {"(1, 2)": 3}
    assert plain["list"] == tree["list"]
    assert plain["deque"][0] == 1


def test_numbers_of_another_byte_order(tmp_path):
    tree = {"x": np.arange(3, dtype=">i4"), "y": np.float64(3)}
    vfn.save(tmp_path / "c", tree)
    for got in vfn.load(tmp_path / "c"), vfn.load(tmp_path / "c", tree):
        assert got["x"].tolist() == [0, 1, 2]
        assert type(got["y"]) is np.float64


def test_shapes_before_values_serve_as_an_example(tmp_path):
    def start(key):
        keys = vfn.random.split(key)
        return {"w": vfn.random.normal(keys[0], (7, 9)), "key": keys[1]}

    vfn.save(tmp_path / "c", start(vfn.random.key(3)))
    like = vfn.eval_shape(start, vfn.random.key(0))
    got = vfn.load(tmp_path / "c", like, mesh=on("2x3"), spec={"w": P("a", "b"), "key": P()})
    same(vfn.unshard(got["w"]), start(vfn.random.key(3))["w"])
    assert got["key"] == start(vfn.random.key(3))["key"]


def test_a_tree_of_one_leaf_and_of_none(tmp_path):
    vfn.save(tmp_path / "one", WHOLE)
    same(vfn.load(tmp_path / "one"), WHOLE)
    same(vfn.load(tmp_path / "one", torch.empty(7, 9)), WHOLE)
    vfn.save(tmp_path / "none", {})
    assert vfn.load(tmp_path / "none") == vfn.load(tmp_path / "none", {}) == {}


def test_views_are_stored_without_what_is_around_them(tmp_path):
    big = torch.arange(100_000.0).reshape(100, 1000)
    tree = {
        "view": big[3, 5:9],
        "turned": big[:3, :4].T,
        "expanded": torch.ones(1).expand(1000, 1),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "alone": big[0, 5:6:4].as_strided((1,), (4,)),  # contiguous, and its stride is not 1
    }
    vfn.save(tmp_path / "c", tree)
    got = vfn.load(tmp_path / "c")
    for name in tree:
        same(got[name], tree[name].resolve_conj())
    assert (tmp_path / "c" / "__0_0.distcp").stat().st_size < 12_000


# --- where things go --------------------------------------------------------------------------------------------------


def test_an_example_says_where_and_its_values_are_not_touched(tmp_path):
    mesh = on("2x3")
    weight = torch.nn.Parameter(torch.zeros(7, 9))
    frozen = torch.nn.Parameter(torch.zeros(7, 9), requires_grad=False)
    array = vfn.shard(torch.zeros(7, 9), mesh, P("b")).requires_grad_()
    vfn.save(tmp_path / "c", dict.fromkeys(("weight", "frozen", "array", "meta", "struct"), WHOLE))
    like = {
        "weight": weight,
        "frozen": frozen,
        "array": array,
        "meta": torch.empty(7, 9, device="meta"),
        "struct": types.SimpleNamespace(shape=(7, 9), dtype=torch.float32),
    }
    got = vfn.load(tmp_path / "c", like)
    assert isinstance(got["weight"], torch.nn.Parameter)
    assert [got[name].requires_grad for name in ("weight", "frozen", "array", "meta")] == [True, False, True, False]
    assert vfn.spec_of(got["array"]) == P("b")
    for x in got.values():
        assert torch.equal(vfn.unshard(x), WHOLE)
    assert not any(x.detach().any() for x in (weight, frozen, vfn.unshard(array)))


def test_a_spec_goes_before_the_example_and_the_current_mesh_serves(tmp_path):
    mesh = on("2x3")
    vfn.save(tmp_path / "c", {"w": vfn.shard(WHOLE, mesh, P("a")), "step": 3, "none": None})
    like = {"w": vfn.shard(WHOLE, mesh, P("a")), "step": 0, "none": None}
    with vfn.use_mesh(mesh):
        got = vfn.load(tmp_path / "c", like, spec={"w": P("b", "a"), "step": P(), "none": P()})
        assert vfn.spec_of(got["w"]) == P("b", "a")
        assert (got["step"], got["none"]) == (3, None)
        assert vfn.spec_of(vfn.load(tmp_path / "c", like, spec=P("b"))["w"]) == P("b")


def test_a_part_of_a_checkpoint(tmp_path):
    vfn.save(tmp_path / "c", {"params": {"w": WHOLE, "b": WHOLE[0]}, "state": [WHOLE, 3]})
    got = vfn.load(tmp_path / "c", {"params": {"b": torch.empty(9)}}, partial=True)
    assert list(got) == ["params"]
    same(got["params"]["b"], WHOLE[0])


def test_only_what_is_wanted_is_read(tmp_path, monkeypatch):
    """A rank's share, not the whole: one column of four blocks, two of the three rows of blocks."""
    vfn.save(tmp_path / "c", {"w": vfn.shard(WHOLE, on("2x3"), P("a", "b")), "v": WHOLE})
    read = []
    plain = torch.frombuffer
    monkeypatch.setattr(torch, "frombuffer", lambda data, **kw: read.append(len(data)) or plain(data, **kw))
    mesh = on("4")
    vfn.load(tmp_path / "c", {"w": vfn.shard(WHOLE, mesh, P("a"))}, partial=True)
    assert len(read) == 6  # each stored piece once, though four ranks need parts of it


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_flat_dictionary_and_back():
    tree = everything()
    flat = vfn.checkpoint.state_dict(tree)
    assert flat["params.blocks.1.w"] is tree["params"]["blocks"][1]["w"]
    assert flat["opt.mu.w"] is tree["opt"].mu["w"]
    assert flat["plain.7"] is None
    assert flat["keys.0"] is tree["keys"][0]
    back = vfn.checkpoint.from_state_dict(flat, tree)
    check_everything(back, tree)
    assert back["nothing"] == tree["nothing"]


def test_a_module_takes_it():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    tree = {
        str(i): {"weight": torch.randn_like(m.weight), "bias": torch.randn_like(m.bias)} for i, m in enumerate(model)
    }
    model.load_state_dict(vfn.checkpoint.state_dict(tree))
    assert torch.equal(model[1].weight, tree["1"]["weight"])
    back = vfn.checkpoint.from_state_dict(model.state_dict(), tree)
    assert torch.equal(back["0"]["bias"], tree["0"]["bias"])


def test_a_flat_dictionary_of_other_names():
    with pytest.raises(CheckpointError) as error:
        vfn.checkpoint.from_state_dict({"wieght": 1, "x": 2}, {"weight": 0, "bias": 0})
    assert str(error.value) == (
        "from_state_dict: the names are not those of like\n"
        "  * like['bias'] is missing: there is no 'bias'\n"
        "  * like['weight'] is missing: there is no 'weight'; did you mean 'wieght'?\n"
        "  * 'wieght' is not in like\n"
        "  * 'x' is not in like"
    )


# --- in the background ------------------------------------------------------------------------------------------------


def test_what_happens_afterwards_is_not_saved(tmp_path):
    """Writes in place, and a step that takes the memory over."""
    mesh = on("4")
    tree = {"plain": WHOLE.clone(), "array": vfn.shard(WHOLE.clone(), mesh, P("a")), "numpy": np.arange(5.0)}
    step = vfn.jit(lambda x: x * 2 + 1, donate_argnums=0)
    saving = vfn.save(tmp_path / "c", tree, background=True)
    tree["plain"].mul_(-1)
    tree["numpy"][:] = 9
    given = tree["array"]
    step(given)
    saving.wait()
    assert saving.done()
    got = vfn.load(tmp_path / "c")
    same(got["plain"], WHOLE)
    same(got["array"], WHOLE)
    assert (got["numpy"] == np.arange(5.0)).all()


def test_a_load_waits_for_the_save_before_it(tmp_path):
    for i in range(3):
        saving = vfn.save(tmp_path / "c", {"i": i, "x": torch.full((1000, 100), i)}, background=True)
        assert vfn.load(tmp_path / "c")["i"] == i
        assert saving.done()
    assert repr(saving) == f"Saving({str(tmp_path / 'c')!r}, done)"


def test_memory_that_the_program_has_given_up_is_free(tmp_path):
    """While the copy is being written, nothing else of the tree is held."""
    gate = threading.Event()
    x = torch.zeros(100)
    gone = weakref.ref(x)
    array = vfn.shard(torch.zeros(8), on("4"), P("a"))
    block = weakref.ref(blocks(array)[0])
    plain, os.fsync = os.fsync, lambda handle: gate.wait(10)
    try:
        saving = vfn.save(tmp_path / "c", {"x": x, "array": array}, background=True)
        del x, array
        gc.collect()
        assert gone() is None
        assert block() is None
        assert not saving.done()
        with pytest.raises(CheckpointError, match="still goes on after 0 s"):
            saving.wait(0)
        assert repr(saving) == f"Saving({str(tmp_path / 'c')!r}, in progress)"
    finally:
        gate.set()
        os.fsync = plain
    saving.wait()


def test_a_rank_that_returns_finishes_its_save_first(tmp_path):
    def run(name, broken):
        plain = os.fsync

        def slow(handle):
            time.sleep(0.3)
            if broken:
                raise OSError(28, "No space left on device")
            plain(handle)

        os.fsync = slow
        vfn.save(tmp_path / name, {"x": WHOLE}, background=True)

    vfn.launch(run, 1, "c", False, device="cpu")
    same(vfn.load(tmp_path / "c")["x"], WHOLE)
    with pytest.raises(RankError, match="No space left on device"):
        vfn.launch(run, 1, "d", True, device="cpu")


def broken_writes(monkeypatch):
    def fsync(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_failure_is_told_by_wait(tmp_path, monkeypatch):
    broken_writes(monkeypatch)
    saving = vfn.save(tmp_path / "c", {"x": WHOLE}, background=True)
    with pytest.raises(CheckpointError, match="No space left on device"):
        saving.wait()
    monkeypatch.undo()
    vfn.save(tmp_path / "c", {"x": WHOLE})  # it has been told


def test_a_failure_is_told_by_the_next_save(tmp_path, monkeypatch):
    broken_writes(monkeypatch)
    vfn.save(tmp_path / "c", {"x": WHOLE}, background=True)
    with pytest.raises(CheckpointError, match="there is nothing at"):  # a load waits for it, and tells what it sees
        vfn.load(tmp_path / "c")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="No space left on device"):
        vfn.save(tmp_path / "d", {"x": WHOLE})
    vfn.save(tmp_path / "d", {"x": WHOLE})


# --- what cannot be ---------------------------------------------------------------------------------------------------


def text_of(call, *args, kind=CheckpointError, **kwargs):
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    return str(error.value)


def test_leaves_that_cannot_be_stored_are_all_listed(tmp_path):
    tree = {
        "set": {1},
        "meta": torch.empty(2, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
        "module": torch.nn.Linear(1, 1),
        "generator": torch.Generator(),
        "strings": np.array(["a"]),
        "fine": 1,
    }
    assert text_of(vfn.save, tmp_path / "c", tree) == (
        "save: some leaves cannot be stored\n"
        "  * tree['generator'] is a Generator\n"
        "  * tree['meta'] is the tensor f32[2] on the meta device, without values\n"
        "  * tree['module'] is a Linear\n"
        "  * tree['set'] is the set {1}\n"
        "  * tree['sparse'] is the tensor f32[2,2] with the memory format torch.sparse_coo\n"
        "  * tree['strings'] is the numpy array <U1[1] of dtype <U1, which torch has not\n"
        "  Instead: generator.get_state(), a tensor; a tensor with values; dict(module.named_parameters()), or "
        "module.state_dict(); tensors, arrays, keys, numbers, strings and None; leave other things out, or write them as "
        "such; x.to_dense(); numbers that torch has"
    )
    assert not (tmp_path / "c").exists()


def test_leaves_of_one_name(tmp_path):
    assert text_of(vfn.save, tmp_path / "c", {"a": {"b": 1}, "a.b": 2}) == (
        "save: leaves are stored by their names, and some have the same name\n"
        "  * tree['a']['b'] and tree['a.b'] are both 'a.b'\n"
        "  Instead: keys without dots, or other keys"
    )


def test_where_values_are_not_to_be_had(tmp_path):
    mesh = on("4")

    def body(x):
        vfn.save(tmp_path / "c", {"x": x})
        return x

    assert "this is the body of a shard_map" in text_of(
        vfn.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a")), torch.ones(4)
    )
    assert "x'] is the tensor f32[4], which a transform follows" in text_of(
        torch.func.grad(lambda x: body(x).sum()), torch.ones(4)
    )
    assert "vfn.jit is recording" in text_of(vfn.jit(body), torch.ones(4))


def test_where_nothing_can_be_loaded(tmp_path):
    vfn.save(tmp_path / "c", {"x": WHOLE})

    def body(x):
        return vfn.load(tmp_path / "c")["x"] + x

    mesh = on("4")
    assert text_of(vfn.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a")), torch.ones(4)) == (
        "load: this is the body of a shard_map\n  Instead: load outside, and give the function what is loaded"
    )
    assert "load: vfn.jit is recording" in text_of(vfn.jit(body), torch.ones(9))


def test_another_tree_shape_and_dtype(tmp_path):
    vfn.save(
        tmp_path / "c", {"params": {"weight": WHOLE, "bias": WHOLE[0]}, "key": vfn.random.key(0), "step": 3, "n": None}
    )
    like = {
        "params": {"wieght": WHOLE, "bias": WHOLE[0].double()},
        "key": torch.zeros(2, dtype=torch.int32),
        "step": 0.5,
        "n": torch.zeros(2),
        "more": 1,
    }
    assert text_of(vfn.load, tmp_path / "c", like) == (
        f"load: {tmp_path}/c does not hold what is to be loaded\n"
        "  * like['key'] is i32[2] in like, but key in the checkpoint\n"
        "  * like['more'] is not in the checkpoint\n"
        "  * like['n'] is f32[2] in like, but None in the checkpoint\n"
        "  * like['params']['bias'] is f64[9] in like, but f32[9] in the checkpoint\n"
        "  * like['params']['wieght'] is not in the checkpoint; did you mean 'params.weight'?\n"
        "  * like['step'] is float in like, but int in the checkpoint\n"
        "  * params.weight, f32[7,9], is in the checkpoint but not in like\n"
        "  Instead: a like of what was saved; a tree of the same names (vfn.load(path) shows what there is); a like of f32, "
        "then .to(...): no dtype is changed silently; partial=True passes over what like has not"
    )
    params = {"params": {"weight": torch.empty(9, 7), "bias": torch.empty(9)}}
    assert text_of(vfn.load, tmp_path / "c", params, partial=True) == (
        f"load: {tmp_path}/c does not hold what is to be loaded\n"
        "  * like['params']['weight'] is f32[9,7] in like, but f32[7,9] in the checkpoint\n"
        "  Instead: a like of what was saved"
    )


def test_specs_that_do_not_fit(tmp_path):
    vfn.save(tmp_path / "c", {"w": WHOLE, "key": vfn.random.key(0)})
    mesh = on("2x3")
    assert text_of(vfn.load, tmp_path / "c", mesh=mesh, spec=P("b", None, "q"), kind=SpecError) == (
        "load: 4 specs do not fit on the mesh (a=2, b=3)\n"
        "  * key is key, its spec P('b', None, 'q'): axis 'q' (dim 2) is not an axis of the mesh (a=2, b=3)\n"
        "  * key is key, its spec P('b', None, 'q'): it has 3 entries, but the value has 1 dim\n"
        "  * w is f32[7,9], its spec P('b', None, 'q'): axis 'q' (dim 2) is not an axis of the mesh (a=2, b=3)\n"
        "  * w is f32[7,9], its spec P('b', None, 'q'): it has 3 entries, but the value has 2 dims\n"
        "  Instead: each axis of the mesh at most once, and at most one entry a dim"
    )
    assert "is not a prefix of" in text_of(vfn.load, tmp_path / "c", mesh=mesh, spec={"v": P()}, kind=SpecError)
    assert "it must be a vfn.P, but it is 'a'" in text_of(vfn.load, tmp_path / "c", mesh=mesh, spec="a", kind=SpecError)
    assert "must stay together" in text_of(
        vfn.load, tmp_path / "c", mesh=mesh, spec={"w": P(), "key": P("a")}, kind=SpecError
    )
    assert "the mesh must be a DeviceMesh" in text_of(vfn.load, tmp_path / "c", spec=P(), kind=MeshError)
    assert text_of(vfn.load, tmp_path / "c", mesh=mesh, kind=SpecError) == (
        "load: a mesh is given, but no spec\n  Instead: spec=vfn.P(...), or a tree of them"
    )


def test_paths(tmp_path):
    assert text_of(vfn.save, 3, {}) == (
        'save: path must be a path, but it is the int 3\n  Instead: vfn.save("checkpoints/last", ...)'
    )
    assert "is no path of a file system" in text_of(vfn.load, "s3://bucket/last")
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("mine")
    assert text_of(vfn.save, tmp_path / "notes", {}) == (
        f"save: {tmp_path}/notes is a file, and is left as it is\n  Instead: another path, or remove it"
    )
    assert "is a folder that is no checkpoint of vescale_fn, and is left as it is" in text_of(
        vfn.save, tmp_path / "folder", {}
    )
    assert sorted(os.listdir(tmp_path)) == ["folder", "notes"]
    assert "folder is no checkpoint" in text_of(vfn.load, tmp_path / "folder")
    vfn.save(tmp_path / "run" / "step-3", {})
    assert f"{tmp_path}/run is no checkpoint\n  * there are checkpoints in it: step-3\n" in text_of(
        vfn.load, tmp_path / "run"
    )
    assert text_of(vfn.load, tmp_path / "fodler") == (
        f"load: there is nothing at {tmp_path}/fodler\n  * {tmp_path} has folder, notes, run"
    )
    (tmp_path / "empty").mkdir()
    vfn.save(tmp_path / "empty", {"x": 1})
    assert vfn.load(tmp_path / "empty") == {"x": 1}


def test_metadata_that_would_run_a_program(tmp_path):
    class Harm:
        def __reduce__(self):
            return os.system, ("touch harm",)

    vfn.save(tmp_path / "c", {"x": 1})
    (tmp_path / "c" / "vescale_fn.json").unlink()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Harm()))
    assert text_of(vfn.load, tmp_path / "c") == (
        f"load: {tmp_path}/c/.metadata is damaged, or no metadata of torch.distributed.checkpoint\n"
        "  * UnpicklingError: it names posix.system, which no metadata has"
    )


# --- checkpoints of older formats ---------------------------------------------------------------------------------------

FORMAT_1 = Path(__file__).parent / "goldens" / "checkpoint_of_format_1"  # written on two ranks
OF_FORMAT_1 = {
    "w": torch.arange(15.0).reshape(5, 3),
    "half": torch.arange(6).to(torch.bfloat16),
    "key": random.key(7),
    "step": 12,
    "name": "old",
    "none": None,
    "np": np.arange(4, dtype=np.int16),
    "nested": [torch.tensor(2.5), (3.5, True)],
}


def test_a_checkpoint_of_the_first_format_loads_and_is_replaced(tmp_path):
    for like in None, OF_FORMAT_1:
        found = vfn.load(FORMAT_1, like=like)
        assert optree.tree_structure(found) == optree.tree_structure(OF_FORMAT_1)
        for one, other in zip(optree.tree_leaves(found), optree.tree_leaves(OF_FORMAT_1), strict=True):
            assert type(one) is type(other)
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
            assert bool((one == other).all() if hasattr(one, "all") else one == other)
    with vfn.simulate(3):
        mesh = vfn.make_mesh((3,), ("tp",))
        like = OF_FORMAT_1 | {"w": vfn.shard(torch.zeros(5, 3), mesh, P(None, "tp"))}
        assert torch.equal(vfn.unshard(vfn.load(FORMAT_1, like=like)["w"]), OF_FORMAT_1["w"])
    shutil.copytree(FORMAT_1, tmp_path / "run")
    vfn.save(tmp_path / "run", {"w": torch.ones(2)})
    assert vfn.load(tmp_path / "run")["w"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["vescale_fn.json", ".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_of_the_first_format_is_refused(tmp_path, name):
    shutil.copytree(FORMAT_1, tmp_path / "run")
    data = bytearray((tmp_path / "run" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "run" / name).write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        vfn.load(tmp_path / "run")
