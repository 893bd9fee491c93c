"""Initial values shard by shard: the bits of the whole, and no more memory than the shards; shapes before values."""

import math
import warnings

import optree
import pytest
import torch
from torch import nn

import vescale_fn as vfn
from vescale_fn import P, errors, random

KEY = random.key(11)


def initial(key):
    """A tree of what initialisers are made of."""
    keys = random.split(key, 6)
    embed = torch.empty(9, 6)
    embed.copy_(random.normal(keys[4], (9, 6)))
    embed[1].zero_()
    return {
        "embed": embed,
        "layers": [{"w": random.normal(k, (6, 10)) * 6**-0.5, "b": torch.zeros(10)} for k in keys[:2]],
        "head": random.init.he_normal()(keys[2], (6, 9)).to(torch.bfloat16),
        "both": torch.cat([random.uniform(keys[3], (4, 3)), torch.ones(4, 3)], dim=1),
        "turned": random.normal(keys[5], (4, 6)).T.reshape(6, 2, 2).contiguous(),
        "count": torch.tensor(3),
        "key": random.fold_in(key, 9),
    }


RULES = [
    (r"layers\.\d\.w$", P("tp", "dp")),
    (r"\.b$", P(("dp", "tp"))),
    ("head|both", P("dp")),
    ("turned", P("tp")),
    ("embed", P("dp", "tp")),
    ("", P()),
]


def same(got, want):
    got = vfn.unshard(got)
    assert optree.tree_structure(got) == optree.tree_structure(want)
    torch.testing.assert_close(optree.tree_leaves(got), optree.tree_leaves(want), rtol=0, atol=0)


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_shapes_without_values():
    shapes = vfn.eval_shape(initial, KEY)
    want = initial(KEY)
    assert optree.tree_structure(shapes) == optree.tree_structure(want)
    for got, x in zip(optree.tree_leaves(shapes), optree.tree_leaves(want), strict=True):
        assert (got.is_meta, got.shape, got.dtype) == (True, x.shape, x.dtype)


def test_shapes_of_what_is_too_large():
    def step(params, x, scale):
        return (x @ params["w"] * scale).sum(0), 3, None, params

    big = {"w": torch.empty(1 << 20, 1 << 18, device="meta", dtype=torch.bfloat16)}
    x = vfn.eval_shape(lambda: torch.zeros(7, 1 << 20, dtype=torch.bfloat16))
    out, three, none, params = vfn.eval_shape(step, big, x, scale=2.0)
    assert (out.shape, out.dtype, three, none) == ((1 << 18,), torch.bfloat16, 3, None)
    assert params["w"].shape == big["w"].shape


def test_shapes_of_arrays_are_those_of_the_whole():
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((4,), ("dp",))), vfn.comm_log() as log:
        x = vfn.shard(torch.ones(5, 3), vfn.current_mesh(), P("dp"))
        shape = vfn.eval_shape(lambda x: vfn.with_sharding(x.sum(0), P("dp")), x)
        assert shape.is_meta
        assert shape.shape == (3,)
    assert log.count() == 0


@pytest.mark.parametrize("check", [True, False])
def test_shapes_in_a_body_are_those_of_blocks(check):
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((4,), ("dp",))), vfn.comm_log() as log:
        w, plain = vfn.shard(torch.ones(3), vfn.current_mesh(), P()), torch.ones(3)
        functions = {
            "block": (lambda x: x.sum(1), (2,)),
            "psum": (lambda x: vfn.psum(x.sum(1), "dp"), (2,)),
            "all_gather": (lambda x: vfn.all_gather(x, "dp", tiled=True), (8, 3)),
            "closures": (lambda x: (x * w) @ plain + torch.zeros(2), (2,)),
            "grad": (lambda x: vfn.grad(lambda w: (x * w).sum())(w), (3,)),
            "vmap": (lambda x: vfn.vmap(lambda row: row[:2])(x), (2, 2)),
        }

        @vfn.shard_map(in_specs=P("dp"), out_specs=P("dp"), check_vma=check)
        def body(x):
            for name, (f, shape) in functions.items():
                got = vfn.eval_shape(f, x)
                assert (type(got), got.is_meta, got.shape) == (vfn.ShapeDtype, True, shape), name
            rows = vfn.eval_shape(lambda x: x.sum(1), vfn.eval_shape(lambda x: x * 2, x)).shape[0]
            return x * w * plain * rows  # the values that were closed over are not those of the other run

        x = torch.arange(24.0).view(8, 3)
        assert torch.equal(vfn.unshard(body(x)), 2 * x)
    assert [record.op for record in log] == ["all_gather"]  # that of `unshard`


def test_shapes_that_need_values():
    def reads(x):
        return x * 2 if x.sum() > 0 else x

    with pytest.raises(errors.TransformError) as error:
        vfn.eval_shape(reads, torch.ones(2))
    first, fix = str(error.value).splitlines()
    assert first.startswith("eval_shape: a value is read in Python, at ")
    assert first.endswith("`return x * 2 if x.sum() > 0 else x`")
    assert fix == "  Instead: the function itself, as its shapes may depend on values"


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 3)])
def test_each_rank_makes_its_shards_with_the_bits_of_the_whole(shape):
    want = initial(KEY)
    with vfn.simulate(math.prod(shape)), vfn.comm_log() as log:
        mesh = vfn.make_mesh(shape, ("dp", "tp"))
        got = vfn.init(initial, KEY, spec=RULES, mesh=mesh)
        assert log.count() == 0
        assert vfn.spec_of(got["layers"][0]["w"]) == P("tp", "dp")
        assert vfn.spec_of(got["embed"]) == P("dp", "tp")
        same(got, want)


def test_ways_to_say_the_spec():
    make = lambda key, n: {"a": random.normal(key, (n, 4)), "b": torch.ones(n)}
    want = make(KEY, 6)
    by_shape = lambda shapes: optree.tree_map(lambda x: P("dp") if x.ndim > 1 else P(), shapes)
    with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("dp",))):
        for spec, a, b in (
            (P("dp"), P("dp"), P("dp")),
            ({"a": P(None, "dp"), "b": P()}, P(None, "dp"), P()),
            ([("a", P("dp")), ("b", P())], P("dp"), P()),
            (by_shape, P("dp"), P()),
            (None, P(), P()),
            (lambda shapes: [("a", P("dp")), ("", P())], P("dp"), P()),
        ):
            got = vfn.init(make, KEY, 6, spec=spec)
            assert (vfn.spec_of(got["a"]), vfn.spec_of(got["b"])) == (a, b)
            same(got, want)
    same(vfn.init(make, KEY, 6, spec=[("a", P("dp")), ("b", P())]), want)  # one device


def test_specs_that_do_not_fit():
    make = lambda key: {"a": random.normal(key, (6, 4)), "b": torch.ones(6)}
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        with pytest.raises(errors.SpecError) as error:
            vfn.init(make, KEY, spec={"a": P("tp"), "b": P(None, "dp")}, mesh=mesh)
    assert str(error.value) == (
        "init: the specs do not fit the results on the mesh (dp=2)\n"
        "  * out['a'] is f32[6,4], its spec P('tp'): axis 'tp' (dim 0) is not an axis of the mesh (dp=2)\n"
        "  * out['b'] is f32[6], its spec P(None, 'dp'): it has 2 entries, but the value has 1 dim\n"
        "  Instead: the axes of the mesh, each at most once, at most one entry a dim"
    )
    with pytest.raises(errors.SpecError, match=r"out\['b'\] is f32\[6\], its spec P\(None, 'dp'\): it has 2 entries"):
        vfn.init(make, KEY, spec={"a": P("tp"), "b": P(None, "dp")})
    with pytest.raises(errors.SpecError, match=r"the spec of out\['a'\] is the str 'dp', not a vfn.P"):
        vfn.init(make, KEY, spec={"a": "dp", "b": P()})
    with pytest.raises(errors.SpecError, match="spec is not a prefix of the result"):
        vfn.init(make, KEY, spec={"a": P()})


def test_what_cannot_be_recorded_runs_as_written_and_says_so():
    def make(key):
        x = random.normal(key, (4, 4))
        return x / x.norm().item()

    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        with pytest.warns(UserWarning, match="each rank makes whole values first\n  . a value is read in Python, at "):
            got = vfn.init(make, KEY, spec=P("dp"), mesh=mesh)
        assert vfn.spec_of(got) == P("dp")
        same(got, make(KEY))


# --- modules ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """What constructors do: torch's layers, `torch.nn.init`, draws, tied weights, buffers."""

    def __init__(self, wide=6):
        super().__init__()
        self.embed = nn.Embedding(9, wide, padding_idx=1)
        self.mlp = nn.Sequential(nn.Linear(wide, 8), nn.ReLU(), nn.Linear(8, wide))
        self.conv, self.norm, self.recurrent = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(wide), nn.GRU(wide, 4)
        self.attend = nn.MultiheadAttention(8, 2)
        self.drawn = nn.Parameter(torch.randn(wide, 4) * 0.1)
        self.narrow = nn.Parameter(torch.empty(wide, 4, dtype=torch.bfloat16))
        self.cut, self.turned = nn.Parameter(torch.empty(64, wide)), nn.Parameter(torch.empty(wide, wide))
        nn.init.xavier_uniform_(self.narrow)
        nn.init.trunc_normal_(self.cut, std=0.5, a=-0.5, b=0.5)
        nn.init.orthogonal_(self.turned)
        self.head = nn.Linear(wide, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.arange(wide).float().cos())
        self.scale = torch.ones(1) * wide**-0.5

    def forward(self, tokens):
        return self.head(self.mlp(self.embed(tokens)) * self.angles * self.scale) + self.cut.sum()


def test_a_module_is_made_without_parameters():
    f, make = vfn.deferred(Net)
    assert all(p.is_meta for p in f._template.root.parameters())
    whole = make(KEY)
    torch.manual_seed(0)
    module = Net()
    named, torchs = f.state_dict(whole), module.state_dict()
    assert named.keys() == torchs.keys()
    for name, x in torchs.items():
        got = named[name].float()
        assert (got.shape, named[name].dtype) == (x.shape, x.dtype)
        if x.numel() > 30:  # torch's distributions, from other streams
            assert abs(got.std() / x.float().std() - 1) < 0.35, name
        elif name.startswith(("norm", "angles")):
            assert torch.equal(got, x.float()), name
    assert named["embed.weight"][1].abs().max() == 0
    assert named["cut"].abs().max() <= 0.5
    torch.testing.assert_close(named["turned"] @ named["turned"].T, torch.eye(6))
    module.load_state_dict(named)
    tokens = torch.arange(9)
    assert torch.equal(f(whole, tokens), module(tokens))
    assert not torch.equal(make(random.key(12))["drawn"], whole["drawn"])
    same(make(KEY), whole)


def test_a_module_is_made_shard_by_shard():
    f, make = vfn.deferred(Net, state="running|num_batches")
    want = make(KEY)
    assert list(want[1]) == ["norm"]
    with vfn.simulate(4), vfn.comm_log() as log:
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        rows = lambda x: P("dp", "tp") if x.ndim > 1 else P(("dp", "tp")) if x.ndim else P()
        got = vfn.init(make, KEY, spec=lambda shapes: optree.tree_map(rows, shapes), mesh=mesh)
        assert log.count() == 0
        same(got, want)
        tokens = vfn.shard(torch.arange(9), mesh, P())
        torch.testing.assert_close(vfn.unshard(f(*got, tokens)[0]), f(*want, torch.arange(9))[0])


def test_constructors_that_cannot_be_deferred():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, int(n)) for n in torch.full((2,), 3.0).cumsum(0))

    with pytest.warns(UserWarning, match="constructed as written, with all its parameters, to begin with"):
        f, _ = vfn.deferred(Reads)
    assert f.params.paths[-1] == "params['layers'][1]['weight']"

    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("noise", torch.randn(3))

    with pytest.raises(errors.RandomError, match="would be the same for all keys"):
        vfn.deferred(Drawn)
    with pytest.raises(errors.TransformError, match="deferred: module must be a torch.nn.Module, but it is the int 3"):
        vfn.deferred(lambda: 3)


def test_meta_buffers_are_refused():
    with torch.device("meta"):
        module = Net()
    f, params = vfn.module_function(module)
    assert vfn.eval_shape(lambda p: p["cut"] * 2, params).shape == (64, 6)
    real = optree.tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype), params)
    with pytest.raises(errors.TransformError) as error:
        f(real, torch.arange(3))
    assert "buffers on the meta device have no values\n  * 'angles', 'norm.running_mean', 'norm.running_var'" in str(
        error.value
    )
    assert "vfn.deferred(lambda: Module(...))" in str(error.value)


# --- memory -----------------------------------------------------------------------------------------------------------


def peak(run):
    """The most bytes that were alive at once, of those allocated while `run` ran; and its result."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as watched:
        out = run()
    alive = most = 0
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most, out


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(256, 256, padding_idx=0), nn.Linear(256, 512)
        self.down = nn.Parameter(torch.randn(512, 256) * 0.02)


def made_on_a_rank():
    _, make = vfn.deferred(Wide)
    mesh = vfn.make_mesh((4,), ("dp",))
    most, params = peak(lambda: vfn.init(make, KEY, spec=P("dp"), mesh=mesh))
    mine = sum(x.to_local().nbytes for x in optree.tree_leaves(params))
    return most, mine, vfn.unshard(params)


def test_no_rank_holds_more_than_its_shards(gloo):
    _, make = vfn.deferred(Wide)
    most, whole = peak(lambda: make(KEY))
    size = sum(x.nbytes for x in optree.tree_leaves(whole))
    assert most >= size  # the measure sees what is whole
    for most, mine, params in gloo(4, made_on_a_rank):
        assert mine == size / 4
        assert most < 1.5 * mine  # what a draw works with besides its result; the smallest whole one would be 2.3 of it
        same(params, whole)


# --- writes in plans --------------------------------------------------------------------------------------------------


def seen_before(x):
    y = torch.empty(4, 3)
    row = y[1]
    y.copy_(x)
    return row * 1, y


def seen_after(x):
    y = torch.empty(4, 3)
    y.copy_(x * 2)
    row = y[1]
    y.mul_(3)
    z = y[2]
    y[0].fill_(7)
    return row * 1, z * 1, y, y[0] + 1


def source_used_again(x):
    y, z = torch.empty(4, 3), x + 1
    y.copy_(z)
    y.add_(1)
    z.mul_(2)
    return y, z


def rows_written(x):
    y = x + 0
    y[1].zero_()
    kept = y[2]
    kept.fill_(5)
    y[:, 1].fill_(-1)
    return y, kept * 1


def several_rows(x):
    y = torch.empty(4, 3)
    y.copy_(x)
    y[0].zero_()
    y[3].fill_(2)
    return y


def named_twice(x):
    y = torch.empty(4, 3)
    a, b = y.detach(), nn.Parameter(y)
    with torch.no_grad():
        b.copy_(x)
        a.add_(1)
        return y * 1, a, b.detach() * 2


@pytest.mark.parametrize("f", [seen_before, seen_after, source_used_again, rows_written, several_rows, named_twice])
def test_writes_in_a_plan_are_those_of_the_function(f):
    x = torch.arange(12.0).reshape(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(vfn.jit(f)(x), f(x))
        with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("dp",))):
            same(vfn.jit(f)(vfn.shard(x, vfn.current_mesh(), P())), f(x))
            same(vfn.jit(several_rows, out_specs=P("dp"))(x), several_rows(x))


class _TiedHalves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("c", torch.ones(4))

    def forward(self, x):
        return self.b(self.a(x)) * self.c


def _tied_later():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(torch.bfloat16)
    module[1].weight = module[0].weight
    return module.double()


CONVERTED = {
    "to": lambda: torch.nn.Linear(4, 4).to(torch.bfloat16),
    "to a device": lambda: torch.nn.Linear(4, 4).to("cpu"),
    "half": lambda: torch.nn.Linear(4, 4).half(),
    "double, tied": lambda: _TiedHalves().double(),
    "tied between": _tied_later,
    "twice": lambda: torch.nn.Linear(4, 4).to(torch.bfloat16).to(torch.float64),
    "apply": lambda: (
        torch.nn.Linear(4, 4).double().apply(lambda m: torch.nn.init.ones_(m.weight)).requires_grad_(False)
    ),
    "parametrized": lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)).double(),
    "lstm": lambda: torch.nn.LSTM(4, 4).double(),
}


def test_a_deferred_constructor_may_assign_to_data(recwarn):
    """What a buffer was given by `.data = ` was lost."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(2, 2)
            self.lin.weight.data = torch.eye(3, 2)
            self.lin.weight.data.mul_(3)
            self.register_buffer("offset", torch.ones(2))
            self.offset.data = torch.arange(3.0) + 1

        def forward(self, x):
            return x @ self.lin.weight.mT + self.offset

    f, initial = vfn.deferred(Module)
    params = initial(vfn.random.key(0))
    assert torch.equal(params["lin"]["weight"], torch.eye(3, 2) * 3)
    assert torch.equal(f(params, torch.ones(1, 2)), torch.tensor([[4.0, 5.0, 3.0]]))
    assert not recwarn


@pytest.mark.parametrize("name", CONVERTED)
def test_a_deferred_module_may_be_converted(name):
    """It raised "Couldn't swap": the same dtypes, ties and values on a mesh as on one device."""
    f, initial = vfn.deferred(CONVERTED[name])
    key, module = vfn.random.key(0), CONVERTED[name]()
    params = initial(key)
    like = {name: (x.dtype, x.shape) for name, x in module.state_dict().items()}
    assert {name: (x.dtype, x.shape) for name, x in f.state_dict(params).items()} == like
    assert len(torch.utils._pytree.tree_leaves(params)) == len(list(module.parameters()))
    flags = torch.utils._pytree.tree_leaves(f.trainable)
    assert all(flags) == all(p.requires_grad for p in module.parameters())
    with vfn.simulate(2):
        laid = vfn.init(initial, key, spec=P(), mesh=vfn.make_mesh((2,), ("dp",)))
        torch.testing.assert_close(vfn.unshard(laid), params, rtol=0, atol=0)
    module.load_state_dict(f.state_dict(params))
    x = torch.ones(2, 4, dtype=next(module.parameters()).dtype)
    torch.testing.assert_close(f(params, x), module(x))
