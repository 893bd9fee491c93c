"""Everything before the first byte: shapes with layouts as leaves, meshes without ranks, and plans that are those of real ranks."""

import functools
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from whole import part

import vescale_fn as vfn
from benchmarks import any_size
from vescale_fn import P
from vescale_fn.errors import MeshError, NoValueError, SpecError

KEY = vfn.random.key(0)
SWEPT = [
    ("even", "llama", "fsdp+tp", 512),
    ("odd", "gpt", "hsdp", 64),
    ("odd", "mixtral", "fsdp+ep", 4096),
    ("even", "mixtral", "fsdp+ep", 8),  # dp has one rank
    ("even", "llama", "fsdp+cp-ulysses+tp", 8),
    ("odd", "llama", "fsdp+tp", 8),  # heads that tp does not divide
    ("odd", "mixtral", "fsdp+cp-ulysses+tp", 8),  # and heads of keys alone
    ("even", "mixtral", "fsdp+cp", 64),  # experts that see all of a sequence
    ("odd", "gpt", "zero1+tp+sp+vp", 64),
    ("even", "llama", "zero1+tp+sp+vp", 64),  # gradients of norms, scattered before they are added up
    ("even", "gpt", "fsdp+reshard", 8),
    ("odd", "dit", "dp+cp-gather", 8),
]
S, f32, i64 = vfn.ShapeDtype, torch.float32, torch.int64
MESHES = {
    "abstract": lambda sizes, names: vfn.abstract_mesh(sizes, names),
    "simulated": lambda sizes, names: vfn.make_mesh(sizes, names),
}


@pytest.fixture
def mesh():
    return vfn.abstract_mesh((4, 2), ("dp", "tp"))


# --- plans: the same text as on real ranks ----------------------------------------------------------------------------


def initial(key):
    a, b = vfn.random.split(key)
    return {"a": vfn.random.normal(a, (12, 20)), "b": vfn.random.normal(b, (20, 7)), "c": torch.zeros(7)}


def loss(p, x):
    return ((torch.relu(x @ p["a"]) @ p["b"] + p["c"]).softmax(-1) ** 2).mean()


OPT = vfn.optim.adamw(1e-3)


def train(f, p, s, x):
    value, g = vfn.value_and_grad(f)(p, x)
    updates, s = OPT.update(g, s, p)
    return vfn.optim.apply_updates(p, updates), s, value


def body(x):
    y = vfn.psum(x, "tp") * vfn.axis_index("dp") + torch.zeros(x.shape)
    return vfn.all_gather(vfn.ppermute(y, "tp", [(0, 1)]), "tp", axis=1, tiled=True)


def whole(p, x):
    return loss(vfn.with_sharding(p, P()), x)


def tied(w, t):
    return F.cross_entropy((vfn.nn.embedding(t, w) @ w.T).flatten(0, 1), t.flatten())


def heads(x):
    q = x.unflatten(-1, (5, 2)).transpose(1, 2)  # 5 heads
    return vfn.nn.attention(q, q, q, causal=True).transpose(1, 2).flatten(-2)


def plans(m):
    """Plans of programs with even, uneven and empty blocks; the mesh has the axes dp and tp."""
    split = lambda shape, spec, dtype=f32: S(shape, dtype, spec, m)
    mapped = functools.partial(vfn.shard_map, mesh=m, in_specs=P("dp", "tp"))
    params = vfn.init(initial, KEY, spec=[("a", P("dp", "tp")), ("b", P("tp")), ("", P())], mesh=m, abstract=True)
    flat = vfn.init(initial, KEY, spec=[("a|b", P(("dp", "tp"))), ("", P())], mesh=m, abstract=True)
    few, many = split((5, 12), P("dp")), split((8, 12), P(("dp", "tp")))
    programs = {
        "tp": (functools.partial(train, loss), (params, OPT.init(params), few), (0, 1)),
        "fsdp": (functools.partial(train, whole), (flat, OPT.init(flat), many), (0,)),
        "uneven": (
            lambda x: vfn.with_sharding(x.cumsum(0) @ x.T, P(None, "tp")),
            (split((7, 5), P(("dp", "tp"))),),
            (),
        ),
        "empty": (lambda x: vfn.with_sharding(x.sort(0).values, P()), (split((3, 2), P(("dp", "tp"))),), ()),
        "body": (mapped(body, out_specs=P("dp"), check_vma=False), (split((4, 8), P("dp", "tp")),), ()),
        "types": (
            vfn.grad(lambda x: mapped(lambda v: vfn.psum(v * v, ("dp", "tp")).sum(), out_specs=P())(x)),
            (split((4, 8), P("dp", "tp")),),
            (),
        ),
        "draws": (
            lambda x, k: vfn.random.dropout(k, x, 0.5) * vfn.random.normal(k, x.shape, spec=P("tp")),
            (few, KEY),
            (),
        ),
        "vocab": (vfn.grad(tied), (split((11, 6), P("tp")), split((4, 3), P("dp"), i64)), ()),
        "heads": (vfn.grad(lambda x: heads(x).square().sum()), (split((4, 6, 10), P("dp", None, "tp")),), ()),
        "remat": (vfn.grad(lambda p, x: vfn.remat(loss)(p, x)), (params, few), ()),
    }
    with vfn.use_mesh(m):
        for name, (f, args, donated) in programs.items():
            yield name, vfn.jit(f, donate_argnums=donated).lower(*args)


def texts(m):
    """Of each plan its peak, and what it says of itself but for its peak."""
    said = lambda plan: re.sub("peak .*", "", f"{plan.text(None)}{plan.recorded.text(None)}{plan.comms()!r}")
    return {name: (plan.memory().peak, said(plan)) for name, plan in plans(m)}


def _both(sizes):
    real = vfn.make_mesh(sizes, ("dp", "tp"))
    return texts(real), texts(vfn.abstract_mesh(sizes, ("dp", "tp"), rank=dist.get_rank()))


@pytest.mark.parametrize("sizes", part([(2, 2), (1, 4)], 2))
def test_plans_are_those_of_real_ranks(gloo, sizes):
    found = gloo(4, functools.partial(_both, sizes))
    for rank, (real, abstract) in enumerate(found):
        for name, (peak, text) in real.items():
            assert abstract[name][1] == text, (rank, name)
            by_gloo = "all_gather" in text or "reduce_scatter" in text  # which takes memory of its own for these
            assert abstract[name][0] <= peak if by_gloo else abstract[name][0] == peak, (rank, name)
    assert texts(vfn.abstract_mesh(sizes, ("dp", "tp"))) == found[0][1]  # in a process without ranks: rank 0's
    assert texts(vfn.abstract_mesh(sizes, ("dp", "tp"), rank=3)) == found[3][1]


# --- arrays without values --------------------------------------------------------------------------------------------


def eager(m):
    """Programs run as written: what they give, as types."""
    x, y = vfn.shard(torch.ones(9, 6), m, P("dp", "tp")), vfn.shard(torch.ones(6, 4), m, P("tp"))
    even = vfn.shard(torch.ones(8, 6), m, P("dp", "tp"))
    mapped = functools.partial(vfn.shard_map, mesh=m, in_specs=P("dp", "tp"))
    yield torch.relu(x @ y) + 1
    yield vfn.grad(lambda w: torch.relu(x @ w).square().mean())(y)
    yield x.softmax(1).amax(0), x.cumsum(0), x.t().reshape(18, 3)
    yield vfn.with_sharding(x, P(None, ("dp", "tp")))
    yield vfn.vmap(lambda row: (row * row).sum())(x), vfn.jvp(torch.sin, (x,), (x,))
    yield mapped(lambda v: v * vfn.psum(v, "tp") + vfn.axis_index("dp"), out_specs=P("dp", "tp"))(even)
    yield mapped(lambda v: vfn.all_gather(v, "tp", axis=1, tiled=True), out_specs=P("dp"), check_vma=False)(even)
    yield vfn.random.normal(KEY, (9, 4), spec=P("dp"), mesh=m), vfn.random.dropout(KEY, x, 0.5)
    yield vfn.from_local(lambda at: torch.ones(3), m, P("dp"))
    yield vfn.init(initial, KEY, spec=[("a", P("dp", "tp")), ("", P())], mesh=m)
    yield vfn.jit(lambda x, y: (x @ y, x.sum()))(x, y)
    yield OPT.init({"w": x})
    yield m["tp"].shape, vfn.shard(torch.ones(4), m["tp"], P("tp"))


def types(m):
    with vfn.comm_log() as log:
        out = vfn.tree.map(lambda x: str(vfn.typeof(x)) if isinstance(x, torch.Tensor) else x, list(eager(m)))
    return out, [(r.op, r.axes, r.bytes, r.why) for r in log]


def test_ops_give_what_they_do_on_ranks(mesh):
    with vfn.simulate(8):
        expected = types(vfn.make_mesh((4, 2), ("dp", "tp")))
    assert types(mesh) == expected


def test_nothing_takes_memory(mesh):
    w = vfn.random.normal(KEY, (1 << 20, 1 << 20), spec=P("dp"), mesh=mesh)
    whole_ = vfn.unshard(vfn.shard(S((1 << 20, 1 << 20), f32), mesh, P()) @ w.T)
    assert whole_.shape == w.shape
    gradient = vfn.jit(vfn.grad(lambda w: (w * w).sum()))(w)
    assert (gradient.spec, gradient.is_meta) == (P("dp"), True)


NEED = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool((x > 0).all()),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "format": lambda x: f"{x.sum():.3f}",
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "tolist": lambda x: x.tolist(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "unshard, then numpy": lambda x: vfn.unshard(x).numpy(),
    "block": lambda x: x.to_local().tolist(),
    "address": lambda x: x.to_local().data_ptr(),
    "dlpack": lambda x: torch.from_dlpack(vfn.unshard(x)),
    "parity": lambda x: vfn.check_parity(torch.sin, x),
}


@pytest.mark.parametrize("name", NEED)
def test_what_needs_a_value_says_so(mesh, name):
    with pytest.raises(NoValueError, match="this needs a value, and there is none: only shape, dtype and layout"):
        NEED[name](vfn.shard(torch.ones(9, 6), mesh, P("dp")))


def test_words(mesh, tmp_path):
    x = vfn.shard(torch.ones(9, 6), mesh, P("dp", "tp"))
    assert repr(x) == "Array f32[9@dp,6@tp] on mesh (dp=4, tp=2), without values"
    assert repr(vfn.unshard(x)) == f"{vfn.unshard(x)}" == "f32[9,6] without values"
    assert f"{x.sum()}" == "Array f32[]{U:dp,tp} on mesh (dp=4, tp=2), without values"
    assert repr(mesh) == "AbstractMesh(dp=4, tp=2)"
    assert repr(vfn.show({"x": x})).splitlines()[2].split() == [
        "['x']",
        "f32[9@dp,6@tp]",
        *"[3, 3] at most 36".split(),
    ]
    assert "svg" in vfn.show({"x": x})._repr_html_()
    large = vfn.ShapeDtype((16, 6), torch.float32, P(None, "tp"), vfn.abstract_mesh((4096, 2), ("dp", "tp")))
    assert re.findall(">([^<>]*)</text>", vfn.show(large)._repr_html_()) == ["0..8190", "1..8191"]
    with pytest.raises(vfn.errors.CheckpointError, match="on the meta device, without values"):
        vfn.save(tmp_path / "x", {"x": x})
    with pytest.raises(NoValueError) as error:
        x.sum().item()
    assert str(error.value) == (
        "item: this needs a value, and there is none: only shape, dtype and layout are known\n"
        "  Instead: the same on ranks: vfn.make_mesh under vfn.simulate(n), vfn.launch or torchrun, and tensors with values"
    )


# --- shapes as leaves -------------------------------------------------------------------------------------------------


def test_a_shape_and_a_dtype():
    x = S((8, 4), f32)
    assert (x.shape, x.dtype, x.spec, x.mesh, x.sharding) == ((8, 4), f32, None, None, None)
    assert repr(x) == "ShapeDtype f32[8,4]"
    assert {x: 1}[S((8, 4), f32)] == 1
    assert x == vfn.eval_shape(lambda: torch.ones(8, 4))
    assert x != S((8, 4), i64)
    assert isinstance(x, S)
    assert not isinstance(torch.ones(2), S)
    assert type(torch.zeros_like(x)) is S
    assert torch.zeros_like(x, device="cpu").tolist() == [[0.0] * 4] * 8
    for read in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, bool):
        with pytest.raises(NoValueError):
            read(S((), f32))


def test_a_layout(mesh):
    x = S((9, 4), f32, P("dp"), mesh)
    assert (x.shape, x.dtype, x.spec, x.mesh) == ((9, 4), f32, P("dp"), mesh)
    assert S((9, 4), f32, x.sharding).sharding == x.sharding
    assert isinstance(x, S)
    assert S((9, 4), f32, mesh=mesh).spec == P()
    with vfn.use_mesh(mesh):
        assert S((9, 4), f32, P("tp")).sharding.mesh == mesh
    assert S((9, 4), f32, P("tp")).spec is None  # on one device
    for sizes in ((9, 4), (3,), ()):
        with vfn.simulate(8):
            real = vfn.make_mesh((4, 2), ("dp", "tp"))
            spec = P(("dp", "tp")) if sizes else P()
            like = vfn.shard(torch.ones(sizes), real, spec)
            made = S(sizes, f32, spec, real)
            assert vfn.typeof(made) == vfn.typeof(like)
            assert [b.shape for b in made.to_local().blocks] == [b.shape for b in like.to_local().blocks]


@pytest.mark.parametrize("kind", MESHES)
def test_functions_take_and_give_shapes(kind, tmp_path):
    with vfn.simulate(8):
        m = MESHES[kind]((4, 2), ("dp", "tp"))
        rules = [("a", P("dp", "tp")), ("", P())]
        expected = {"a": P("dp", "tp"), "b": P(), "c": P()}
        shapes = vfn.eval_shape(initial, KEY)
        found = [
            vfn.shard(shapes, m, rules),
            vfn.init(initial, KEY, spec=rules, mesh=m, abstract=True),
            vfn.eval_shape(functools.partial(vfn.init, initial, spec=rules, mesh=m), KEY),
        ]
        for params in found:
            assert all(isinstance(x, S) for x in params.values())
            assert {name: vfn.spec_of(x) for name, x in params.items()} == expected
            state = OPT.init(params)
            assert {name: vfn.spec_of(x) for name, x in state.mean.items()} == expected
            x = S((5, 12), f32, P("dp"), m)
            step = vfn.jit(functools.partial(train, loss))
            after, _, value = vfn.eval_shape(step, params, state, x)
            assert {name: vfn.spec_of(x) for name, x in after.items()} == expected
            assert step(params, state, x)[2].shape == value.shape == ()
        f, start = vfn.deferred(lambda: torch.nn.Linear(4, 6))
        params = vfn.init(start, KEY, spec=P("tp"), mesh=m, abstract=True)
        assert f(params, S((8, 4), f32, P("dp"), m)).spec == P("dp", "tp")
        f, params = vfn.module_function(torch.nn.Linear(4, 6, device="meta"))
        assert vfn.shard(params, m, P("tp"))["weight"].spec == P("tp")
        real = vfn.make_mesh((8,), ("dp",))
        vfn.save(tmp_path / "x", vfn.shard(initial(KEY), real, P()))
        loaded = vfn.load(tmp_path / "x", vfn.shard(shapes, real, [("a", P("dp")), ("", P())]))
        assert loaded["a"].spec == P("dp")
        assert torch.equal(vfn.unshard(loaded["a"]), initial(KEY)["a"])


def test_shapes_on_one_device():
    f = vfn.jit(vfn.grad(loss))
    shapes = vfn.eval_shape(initial, KEY)
    assert f.lower(shapes, S((5, 12), f32)).text(None) == f.lower(initial(KEY), torch.ones(5, 12)).text(None)
    assert {name: isinstance(x, S) for name, x in f(shapes, S((5, 12), f32)).items()} == dict.fromkeys("abc", True)


# --- meshes -----------------------------------------------------------------------------------------------------------


def test_rank(mesh):
    for rank, shape in ((0, (3, 3)), (5, (3, 3)), (7, (0, 3))):
        m = vfn.abstract_mesh((4, 2), ("dp", "tp"), rank=rank)
        assert vfn.shard(S((9, 6), f32), m, P("dp", "tp")).to_local().shape == shape
        assert m.get_coordinate() == (rank // 2, rank % 2)
        assert m["tp"].rank == m["tp"].get_coordinate()[0] == rank % 2
    assert mesh == vfn.abstract_mesh((4, 2), ("dp", "tp")) != m
    assert mesh.at(dp=3).shape == (2,)


def test_in_a_bare_process_of_any_size():
    code = """
import resource, torch, vescale_fn as vfn
mesh = vfn.abstract_mesh((512, 8, 2), ("dp", "tp", "pp"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
w = vfn.ShapeDtype((65536, 65536), torch.float32, vfn.P("dp", "tp"), mesh)
plan = vfn.jit(vfn.grad(lambda w, x: (x @ w).square().sum())).lower(w, vfn.shard(w, mesh, vfn.P("dp")))
print([record.op for record in plan.comms()], torch.distributed.is_initialized())
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split()[-1] == "False"


WRONG = {
    "size": (lambda: vfn.abstract_mesh((4, -1), ("dp", "tp")), MeshError, "leaves an axis open with -1"),
    "names": (lambda: vfn.abstract_mesh((4, 2), ("dp", "dp")), MeshError, "axis 'dp' is named twice"),
    "rank": (lambda: vfn.abstract_mesh(4, "dp", rank=4), MeshError, "rank=4 is none of the ranks, which are 0 to 3"),
    "device": (lambda: vfn.abstract_mesh(4, "dp", device="tpu"), MeshError, "device='tpu' is neither"),
    "group": (lambda: vfn.abstract_mesh(4, "dp").get_group("dp"), MeshError, "torch has no process group"),
    "shape": (lambda: S(3, f32), SpecError, "shape must be a tuple of ints"),
    "negative": (lambda: S((3, -1), f32), SpecError, "a size must not be negative"),
    "dtype": (lambda: S((3,), float), SpecError, "dtype must be torch's, but it is the class float"),
    "spec": (lambda: S((3,), f32, "dp"), SpecError, "spec must be a vfn.P"),
    "axis": (lambda: S((3,), f32, P("pp"), vfn.abstract_mesh(4, "dp")), SpecError, "axis 'pp' (dim 0) is not an axis"),
    "dims": (lambda: S((3,), f32, P(None, "dp"), vfn.abstract_mesh(4, "dp")), SpecError, "it has 2 entries"),
    "one device": (lambda: S((3,), f32, P(None, "dp")), SpecError, "does not fit a value of shape (3,)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_mesh_and_no_shape(name):
    call, kind, words = WRONG[name]
    with pytest.raises(kind) as error:
        call()
    assert words in str(error.value)


def test_a_gpu_that_is_not_there(monkeypatch):
    """torch's autograd ends the process on a build for the CPU, and raises on one for CUDA."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(MeshError) as error:
        vfn.abstract_mesh(4, "dp", device="cuda")
    assert str(error.value) == (
        'abstract_mesh: device="cuda", but there are no GPUs here\n'
        "  * torch's autograd runs on no device that is not there\n"
        '  Instead: device="cpu", which has the same layouts, collectives and bytes'
    )


# --- the recipes on any number of ranks: a sample of `python -m benchmarks.any_size sweep` ----------------------------


def test_a_bucket_of_gathers_is_no_whole_model():
    """On 4,096 ranks each gives little of a layer, and gets all of it: layers are gathered one after the other."""

    def loss(ws, x):
        for w in ws:
            x = torch.tanh(x @ vfn.with_sharding(w, P()))
        return x.square().mean()

    mesh = vfn.abstract_mesh(4096, "dp")
    ws = [S((4096, 4096), f32, P("dp"), mesh)] * 6  # 64 MiB each
    plan = vfn.jit(vfn.grad(loss)).lower(ws, S((4096, 4096), f32, P("dp"), mesh))
    assert max(one.bytes for one in plan.comms() if one.op == "all_gather") == 128 << 20
    few = [S((64, 64), f32, P("dp"), mesh)] * 6  # and small ones still travel together
    sent = vfn.jit(vfn.grad(loss)).lower(few, S((4096, 64), f32, P("dp"), mesh)).comms()
    assert sum(one.op == "all_gather" for one in sent) == 1


@pytest.mark.parametrize(("kind", "name", "text", "n"), SWEPT)
def test_recipes_on_any_number_of_ranks(kind, name, text, n):
    config = {"even": any_size.EVEN, "odd": any_size.ODD}[kind][name]
    (row,) = any_size.swept((n,), {kind: {name: config}}, f"{name} {text}")
    assert row[:4] == [kind, name, text, n]
