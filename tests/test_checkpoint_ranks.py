"""Checkpoints of real ranks: training that goes on elsewhere, ranks that fail alone, ranks that are killed."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_checkpoint import WHOLE, same
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.base import tree
from vescale_fn.checkpoint import manifest
from vescale_fn.errors import CheckpointError, RankError

# --- a small training run, which knows how to go on -------------------------------------------------------------------

SPECS = {"up": P("dp", "tp"), "down": P("tp", "dp"), "bias": P("tp")}
X, Y = torch.linspace(-1, 1, 12 * 6).reshape(12, 6), torch.linspace(0, 1, 12).reshape(12, 1).square()
OPTIMIZER = vfn.optim.adamw(vfn.optim.warmup_cosine(0.05, 2, 6), weight_decay=0.1)


def start():
    keys = vfn.random.split(vfn.random.key(1), 3)
    params = {
        "up": vfn.random.normal(keys[0], (6, 10)),
        "down": vfn.random.normal(keys[1], (10, 1)),
        "bias": torch.zeros(10),
    }
    return {
        "params": params,
        "opt": OPTIMIZER.init(params),
        "key": keys[2],
        "step": 0,
        "data": {"position": 0, "epoch": 0},
    }


def specs(state):
    return {
        "params": SPECS,
        "opt": vfn.spec_from_rules(state["opt"], [(f"{name}$", s) for name, s in SPECS.items()] + [("", P())]),
        "key": P(),
        "step": P(),
        "data": P(),
    }


def loss(params, x, y, key):
    hidden = vfn.random.dropout(key, torch.tanh(x @ params["up"] + params["bias"]), 0.2)
    return (hidden @ params["down"] - y).square().mean()


@vfn.jit
def update(params, opt, x, y, key):
    grads = vfn.grad(loss)(params, x, y, key)
    updates, opt = OPTIMIZER.update(grads, opt, params)
    return vfn.optim.apply_updates(params, updates), opt


def train(state, place, until, each=lambda state: None):
    """Steps up to `until`; a batch is four rows from the position on."""
    while state["step"] < until:
        at = state["data"]["position"]
        x, y = place((X[at : at + 4], Y[at : at + 4]))
        params, opt = update(state["params"], state["opt"], x, y, vfn.random.fold_in(state["key"], state["step"]))
        data = {"position": (at + 4) % 12, "epoch": state["data"]["epoch"] + (at + 4) // 12}
        state = {"params": params, "opt": opt, "key": state["key"], "step": state["step"] + 1, "data": data}
        each(state)
    return state


def whole(state):
    """Its numbers, as plain tensors."""
    return vfn.unshard({"params": state["params"], "opt": state["opt"]}), state["step"], state["data"]


def close(got, expected, exact=False):
    assert got[1:] == expected[1:]
    for x, y in zip(tree.leaves(got[0]), tree.leaves(expected[0]), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0 if exact else 1e-6)


def part(folder, shape, until, resume):
    """Train on this mesh, from the beginning or from where another part has stopped; save, and return what there is."""
    mesh = vfn.make_mesh(shape, ("dp", "tp"))
    place = lambda batch: vfn.shard(batch, mesh, P("dp"))
    state = start()
    if resume:
        state = vfn.load(folder, state, mesh=mesh, spec=specs(state))
    else:
        state = {**vfn.shard(state, mesh, specs(state))}
    state = train(state, place, until)
    vfn.save(folder, state)
    return whole(state)


@pytest.fixture(scope="module")
def uninterrupted():
    """Six steps on one device."""
    return whole(train(start(), lambda batch: batch, 6))


@pytest.mark.parametrize("first", ["two ranks", "simulated"])
def test_six_steps_are_three_and_three_elsewhere(first, uninterrupted, tmp_path, gloo):
    """Saved by two processes or by six simulated ranks; gone on with on four processes, on one device, simulated."""
    if first == "two ranks":
        half = gloo(2, part, tmp_path / "half", (2, 1), 3, False)[0]
    else:
        with vfn.simulate(6):
            half = part(tmp_path / "half", (3, 2), 3, False)
    state = vfn.load(tmp_path / "half", start())
    close(whole(state), half, exact=True)  # nothing is lost on the way
    assert state["key"] == start()["key"]
    close(whole(train(state, lambda batch: batch, 6)), uninterrupted)
    with vfn.simulate(4):
        for shape in (1, 4), (4, 1):
            vfn.save(tmp_path / "other", state)
            close(part(tmp_path / "other", shape, 6, True), uninterrupted)
    if first == "simulated":
        close(gloo(4, part, tmp_path / "half", (2, 2), 6, True)[3], uninterrupted)


def test_where_no_sum_crosses_ranks_every_bit_is_the_same(tmp_path):
    """Columns of the weights and of what goes in; each rank adds over rows, which it has whole."""
    x = torch.linspace(-2, 2, 40).reshape(5, 8)

    def step(w, m):
        m = 0.9 * m + (w * x).tanh().sum(0)
        return w - 0.1 * m, m

    w = m = torch.linspace(0, 1, 8)
    for _ in range(6):
        w, m = step(w, m)
    whole_x = x
    with vfn.simulate(6):
        state = torch.linspace(0, 1, 8), torch.linspace(0, 1, 8)
        for shape, spec in ((2, 3), P("b")), ((3, 2), P(("b", "a"))):
            mesh = vfn.make_mesh(shape, ("a", "b"))
            if shape == (2, 3):
                state = vfn.shard(state, mesh, spec)
            else:
                state = vfn.load(tmp_path / "c", tuple(state), mesh=mesh, spec=spec)
            x = vfn.shard(whole_x, mesh, P(None, *spec))
            for _ in range(3):
                state = step(*state)
            vfn.save(tmp_path / "c", state)
    got = vfn.load(tmp_path / "c")
    same(got[0], w)
    same(got[1], m)


# --- what ranks do together -------------------------------------------------------------------------------------------


def layouts(mesh):
    return {
        "a": vfn.shard(WHOLE, mesh, P("dp", "tp")),
        "b": vfn.shard(WHOLE + 1, mesh, P(("tp", "dp"))),
        "whole": vfn.shard(WHOLE + 2, mesh, P()),
        "also whole": vfn.shard(WHOLE + 3, mesh, P()),
        "plain": WHOLE + 4,
        "sum": vfn.with_sharding(WHOLE + 5, P(unreduced={"dp"}), mesh=mesh),
        "step": 3,
    }


def several(folder):
    """What four ranks see, one after the other; collectively, so that they are started once."""
    mesh, rank = vfn.make_mesh((2, 2), ("dp", "tp")), dist.get_rank()
    tree, seen = layouts(mesh), {}
    with vfn.comm_log() as log:
        vfn.save(folder / "c", tree)
        vfn.load(folder / "c", tree)
    seen["moved"] = [(record.op, record.why) for record in log]
    back = vfn.load(folder / "c", tree)
    seen["same"] = [torch.equal(x.to_local(), tree[name].to_local()) for name, x in back.items() if name in "ab"]
    seen["plain"] = torch.equal(back["plain"], WHOLE + 4)

    def said(call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except CheckpointError as error:
            return str(error)

    seen["leaf"] = said(vfn.save, folder / "c", {"x": {1} if rank == 2 else 1})
    seen["tree"] = said(vfn.save, folder / "c", {"x": 1, "y": 2} if rank == 3 else {"x": rank // 2})
    seen["path"] = said(vfn.save, folder / f"c{rank // 3}", {"x": 1})
    seen["like"] = said(vfn.load, folder / "c", {"a": torch.empty(3)}, partial=True)
    plain = os.fsync

    def full(handle):
        raise OSError(28, "No space left on device")

    for background in False, True:
        os.fsync = full if rank == 1 else plain
        try:
            saving = vfn.save(folder / "c", tree | {"step": 4}, background=background)
        except CheckpointError as error:
            seen["disk"] = str(error)
        else:
            seen["disk in the background"] = said(saving.wait)
        finally:
            os.fsync = plain
    vfn.save(folder / "d", tree, background=True)
    tree["plain"].zero_()
    seen["step"] = vfn.load(folder / "c")["step"]
    seen["background"] = torch.equal(vfn.load(folder / "d", {"plain": WHOLE}, partial=True)["plain"], WHOLE + 4)
    manager = vfn.checkpoint.Manager(folder / "run", keep=2, background=True)
    for step in range(4):
        manager.save(step, {"x": tree["a"], "step": step})
    seen["meanwhile"] = manager.latest() in (2, 3)  # asked while the last one is being written
    seen["steps"] = said(manager.save, 2 + 2 * (rank == 3), {"x": 1})  # one of them comes too late, too
    seen["restored"] = manager.restore({"step": 0}, partial=True)["step"], manager.steps()
    dist.barrier()
    vfn.export_weights(folder / "x.pt", tree)
    vfn.export_weights(folder / "hf", tree, max_bytes=400)
    seen["export"] = [
        torch.equal(vfn.load(folder / name, tree)["b"].to_local(), tree["b"].to_local()) for name in ("x.pt", "hf")
    ]
    return seen


def test_four_ranks_agree_and_fail_alike(tmp_path, gloo):
    first, *others = gloo(4, several, tmp_path)
    for other in others:
        assert other == first
    assert first == {
        "moved": [("all_reduce", "save")],
        "same": [True, True],
        "plain": True,
        "leaf": "on rank 2 of 4: save: some leaves cannot be stored\n"
        "  * tree['x'] is the set {1}\n"
        "  Instead: tensors, arrays, keys, numbers, strings and None; leave other things out, or write them as such",
        "tree": "save: the ranks must bring the same tree\n"
        "  * tree['x']: rank 0 has int 0, rank 2 has int 1\n"
        "  * tree['x']: rank 0 has int 0, rank 3 has int 1\n"
        "  * tree['y']: rank 0 has nothing, rank 3 has int 2\n"
        "  Instead: the same on all ranks; what differs by rank as one array: vfn.from_local(lambda coord: ..., mesh, P(...))",
        "path": "save: the ranks must bring the same tree\n"
        "  * path: rank 0 has c0, rank 3 has c1\n"
        "  Instead: the same on all ranks; what differs by rank as one array: vfn.from_local(lambda coord: ..., mesh, P(...))",
        "like": f"load: {tmp_path}/c does not hold what is to be loaded\n"
        "  * like['a'] is f32[3] in like, but f32[7,9] in the checkpoint\n"
        "  Instead: a like of what was saved",
        "disk": f"on rank 1 of 4: save: {tmp_path}/c cannot be written\n"
        "  * No space left on device\n"
        "  Instead: make room on the disk and save again; what was saved there before is untouched",
        "disk in the background": first["disk"],
        "step": 3,
        "background": True,
        "meanwhile": True,
        "steps": "Manager.save: the ranks must save the same step\n"
        "  * rank 0 saves step 2\n  * rank 1 saves step 2\n  * rank 2 saves step 2\n  * rank 3 saves step 4",
        "restored": (3, [2, 3]),
        "export": [True, True],
    }
    got = vfn.load(tmp_path / "c")
    for name, add in {"a": 0, "b": 1, "whole": 2, "also whole": 3, "plain": 4, "sum": 5}.items():
        same(got[name], WHOLE + add)
    contents = manifest.read(tmp_path / "c", "test")
    for one in contents.leaves.values():
        if one.shape is not None:
            assert sum(chunk.sizes[0] * chunk.sizes[1] for chunk in one.chunks) == 63  # each element once
    assert contents.files.keys() == {f"__{rank}_0.distcp" for rank in range(4)}  # all ranks write
    assert max(contents.files.values()) < sum(contents.files.values()) / 2


def one_saves(folder):
    mesh = vfn.make_mesh((2,), ("dp",))
    x = vfn.shard(torch.ones(4), mesh, P("dp"))
    with vfn.debug():
        if dist.get_rank() == 0:
            vfn.save(folder / "c", {"x": x})
        else:
            vfn.unshard(x.sum())


def test_one_rank_that_saves_alone_is_named_in_debug_mode(tmp_path, gloo):
    with pytest.raises(RankError) as error:
        gloo(2, one_saves, tmp_path)
    assert "vfn.save over all ranks at" in str(error.value)
    assert "DivergenceError" in str(error.value)


# --- ranks that are killed --------------------------------------------------------------------------------------------


def trained_and_killed(folder, where):
    """A run that saves each step; in the fourth one rank 1 is killed, in the step itself or while it writes its file."""
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    manager = vfn.checkpoint.Manager(folder, keep=2)
    state = start()
    state = vfn.shard(state, mesh, specs(state))

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def each(state):
        if state["step"] == 4 and dist.get_rank() == 1:
            if where == "save":
                os.fsync = die
            else:
                die()
        manager.save(state["step"], state)

    train(state, lambda batch: vfn.shard(batch, mesh, P("dp")), 6, each)


def resumed(folder):
    """From the last checkpoint, with half as many ranks."""
    mesh = vfn.make_mesh((1, 2), ("dp", "tp"))
    manager = vfn.checkpoint.Manager(folder, keep=2)
    state = start()
    latest = manager.latest()
    state = manager.restore(state, mesh=mesh, spec=specs(state))
    state = train(state, lambda batch: vfn.shard(batch, mesh, P("dp")), 6, lambda s: manager.save(s["step"], s))
    return latest, whole(state), manager.steps()


@pytest.mark.parametrize("where", ["step", "save"])
def test_a_killed_rank_costs_no_saved_step(where, uninterrupted, tmp_path, gloo):
    with pytest.raises(RankError, match="rank 1 of 4 was killed"):
        gloo(4, trained_and_killed, tmp_path / "run", where)
    for latest, got, steps in gloo(2, resumed, tmp_path / "run"):
        assert latest == 3
        assert steps == [5, 6]
        close(got, uninterrupted)
    assert sorted(os.listdir(tmp_path / "run")) == ["step-5", "step-6"]


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def with_torch(folder):
    mesh = vfn.make_mesh((2,), ("dp",))
    dtensors = {
        "model": {
            "w": distribute_tensor(WHOLE, mesh, [Shard(0)]),
            "b": distribute_tensor(WHOLE[0], mesh, [Replicate()]),
        }
    }
    dcp.save(dtensors, checkpoint_id=folder / "theirs")
    like = {"model": {"w": vfn.shard(torch.zeros(7, 9), mesh, P(None, "dp")), "b": torch.zeros(9)}}
    got = vfn.load(folder / "theirs", like)
    ours = [torch.equal(vfn.unshard(got["model"][name]), x) for name, x in {"w": WHOLE, "b": WHOLE[0]}.items()]
    vfn.save(folder / "ours", {"model": {"w": got["model"]["w"], "b": WHOLE[0]}})
    vfn.save(folder / "raw", dtensors)
    out = []
    for name in "ours", "raw":
        into = {"model": {"w": distribute_tensor(torch.zeros(7, 9), mesh, [Shard(0)]), "b": torch.zeros(9)}}
        dcp.load(into, checkpoint_id=folder / name)
        out.append(torch.equal(into["model"]["w"].full_tensor(), WHOLE) and torch.equal(into["model"]["b"], WHOLE[0]))
    return ours, out


def test_dtensors_of_torch_there_and_back(tmp_path, gloo):
    assert gloo(2, with_torch, tmp_path) == [([True, True], [True, True])] * 2
