"""A plan saved in a bare process, on an abstract mesh, serves every rank of the job: the same bits, and nothing is recorded."""

import contextlib
import functools
import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from whole import part

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import TransformError

KEY = vfn.random.key(3)
OPT = vfn.optim.adamw(1e-2)
MESHES = {(2, 2): ("dp", "tp"), (4,): ("dp",), (3,): ("tp",), (2, 3): ("dp", "tp"), (1, 2): ("dp", "tp")}
FEW = (
    "tp",
    "fsdp",
    "uneven",
    "empty",
    "vocabulary",
    "uneven draws",
    "drawn whole",
    "totalled",
    "written",
    "body",
)  # on one axis
FEWER = ("fsdp", "uneven", "vocabulary", "body")  # on odd meshes


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(p, h):
    return torch.tanh(h @ p["a"]) @ p["b"] + p["c"]


def loss(p, x):
    return ((layer(p, x)).softmax(-1) ** 2).mean()


def train(p, s, x):
    value, g = vfn.value_and_grad(loss)(p, x)
    updates, s = OPT.update(g, s, p)
    return vfn.optim.apply_updates(p, updates), s, value


def zero3(p, s, x):
    gathered = lambda p, x: loss(vfn.with_sharding(p, P()), x)
    value, g = vfn.value_and_grad(gathered)(p, x)
    updates, s = OPT.update(g, s, p)
    return vfn.optim.apply_updates(p, updates), s, value


def tied(w, t):
    return F.cross_entropy((vfn.nn.embedding(t, w) @ w.T).flatten(0, 1), t.flatten())


def dropped(key, x):
    mine = vfn.random.normal(key, x.shape, spec=vfn.spec_of(x))
    return vfn.random.dropout(key, torch.tanh(x), 0.5) * mine


def scanned(w, x):
    def step(h, w):
        h = vfn.with_sharding(torch.tanh(h @ w), vfn.spec_of(h))
        return h, h.sum()

    h, sums = vfn.scan(step, x, w)
    return h.square().mean() + sums.sum()


def chosen(w, x):
    return vfn.cond(x.sum() > 0, lambda w: (x @ w).square().mean(), lambda w: (x @ w).abs().mean(), w)


def shared(layers, x):
    """Ranks have biases that the first of them adds, and numbers of their own in a body that calls share."""

    @vfn.jit
    def block(p, h):
        part = vfn.with_sharding(vfn.with_sharding(h, P()), P(None, vfn.spec_of(p["b"])[0]))
        return layer(p, h) * part

    for p in layers:
        x = block(p, x)
    return x.square().mean()


def totalled(x):
    """A sum over ranks, seen in another shape, of which each needs its part."""
    whole = vfn.with_sharding(x.sum(0), P()).reshape(1, 1, -1)
    return vfn.with_sharding(whole, P(None, None, vfn.spec_of(x)[0])) * 2


def written(x):
    y = x * 2
    y[1:4] += 1.0
    return y.cumsum(0)


def body(x, axis):
    i = vfn.axis_index(axis)
    return vfn.psum(x * (i + 1), axis) + vfn.dynamic_slice(x, (i, 0), (1, x.shape[1])) * 0.5


def programs(mesh):
    """By name: a function, its arguments on the mesh, what is donated."""
    names = mesh.axis_names
    d, t = names[0], names[-1]
    every = names if len(names) > 1 else names[0]
    shard = lambda x, *spec: vfn.shard(x, mesh, P(*spec))
    weights = {"a": normal(1, 12, 24), "b": normal(2, 24, 12), "c": normal(3, 12)}
    columns = {"a": P(None, t), "b": P(t), "c": P()}
    split = {name: shard(w, *spec) for (name, w), spec in zip(weights.items(), columns.values())}
    flat = {name: shard(w, every) for name, w in weights.items()}
    odd = {"a": shard(normal(1, 12, 5), None, t), "b": shard(normal(2, 5, 7), t), "c": shard(normal(3, 7), t)}
    x, few = shard(normal(4, 24, 12), d), shard(normal(5, 5, 12), d)
    stack = shard(normal(6, 3, 12, 12), None, None, t)
    ids = torch.arange(24).reshape(12, 2) % 11
    mapped = vfn.shard_map(lambda x: body(x, t), mesh=mesh, in_specs=P(t), out_specs=P(t))
    found = {
        "tp": (train, (split, OPT.init(split), shard(normal(4, 6, 12))), (0, 1)),
        "dp and tp": (train, (split, OPT.init(split), x), ()),
        "fsdp": (zero3, (flat, OPT.init(flat), x), (0,)),
        "uneven": (train, (odd, OPT.init(odd), few), (0,)),
        "empty": (
            lambda x: vfn.with_sharding(x.sort(0).values @ x.T, P(None, d)),
            (shard(normal(8, 2, 5), every),),
            (),
        ),
        "vocabulary": (vfn.grad(tied), (shard(normal(9, 11, 6), t), shard(ids, d)), ()),
        "draws": (dropped, (KEY, x), ()),
        "uneven draws": (dropped, (KEY, few), ()),
        "drawn whole": (lambda key: vfn.with_sharding(vfn.random.normal(key, (7, 6)), P(t), mesh=mesh), (KEY,), ()),
        "scan": (vfn.grad(scanned), (stack, x), ()),
        "cond": (vfn.grad(chosen), (shard(normal(1, 12, 24), None, t), x), ()),
        "remat": (vfn.grad(lambda p, x: vfn.remat(loss)(p, x)), (split, x), ()),
        "shared layers": (vfn.grad(shared), ([split] * 3, x), ()),
        "totalled": (totalled, (x,), ()),
        "written": (written, (few,), ()),
        "body": (mapped, (shard(normal(2, 12, 6), t),), ()),
    }
    kept = FEW if mesh.mesh.ndim == 1 else found if mesh.shape == (2, 2) else FEWER
    return {name: found[name] for name in kept}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By the sizes of a mesh: a folder with a file for each program, saved without any rank; how many plans each has."""

    @functools.cache
    def of(sizes):
        folder = tmp_path_factory.mktemp("plans")
        return folder, _saved(folder, sizes, MESHES[sizes])

    return of


def _saved(folder, sizes, names):
    mesh, count = vfn.abstract_mesh(sizes, names), {}
    with vfn.use_mesh(mesh):
        for name, (f, args, donated) in programs(mesh).items():
            path = folder / name.replace(" ", "_")
            vfn.save_plan(vfn.jit(f, donate_argnums=donated).lower(*args), path)
            count[name] = len(json.loads(path.read_text())["plans"])
    return count


def copies(tree):
    return vfn.tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def blocks(tree):
    """The plain tensors of a tree on this process's ranks, each with the class of the leaf that it is of."""
    local = lambda x: x.to_local() if hasattr(x, "to_local") else x
    return [(type(x), block) for x in vfn.tree.leaves(tree) for block in getattr(local(x), "blocks", [local(x)])]


def _loaded(folder, sizes, names, kept=None):
    """By program: whether the bits, and what is sent, are those without the file, how many plans were recorded, what was warned of."""
    mesh, found = vfn.make_mesh(sizes, names), {}
    with vfn.use_mesh(mesh), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name, (f, args, donated) in programs(mesh).items():
            if kept is not None and name.replace(" ", "_") not in kept:
                continue
            recorded = vfn.jit(f, donate_argnums=donated)
            want = recorded(*copies(args))
            again = vfn.jit(f, donate_argnums=donated, plans=[vfn.load_plan(f"{folder}/{name.replace(' ', '_')}")])
            for _ in range(2):
                got = again(*copies(args))
            pairs = zip(blocks(got), blocks(want), strict=True)
            same = all(kind is other and torch.equal(a, b) for (kind, a), (other, b) in pairs)
            sent = [[(x.op, x.axes, x.bytes) for x in one.lower(*args).comms()] for one in (recorded, again)]
            found[name] = same and sent[0] == sent[1], again.cache_info().records
    return found, [str(one.message) for one in said]


def _elsewhere(path, kinds):
    """What is said where a plan for (dp=2, tp=2) is loaded on other meshes, and whether the values are right all the same."""
    found = []
    for sizes, names in kinds:
        mesh = vfn.make_mesh(sizes, names)
        f, args, _ = programs(mesh)["body"]
        with vfn.use_mesh(mesh), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            again = vfn.jit(f, plans=[vfn.load_plan(path)])
            same = torch.equal(vfn.unshard(again(*args)), vfn.unshard(f(*args)))
        found.append((same, again.cache_info().records, [str(one.message).splitlines()[0] for one in said]))
    return found


OTHERS = {
    ((2, 2), ("tp", "dp")): "it was made on the mesh (dp=2, tp=2), and here is the mesh (tp=2, dp=2)",
    ((2, 2), ("dp", "ep")): "it was made on the mesh (dp=2, tp=2), and here is the mesh (dp=2, ep=2)",
    ((4, 1), ("dp", "tp")): "it was made on the mesh (dp=2, tp=2), and here is the mesh (dp=4, tp=1)",
    ((4,), ("tp",)): "it was made on the mesh (dp=2, tp=2), and here is the mesh (tp=4)",
}


def test_other_meshes_are_named_and_the_function_is_recorded_anew(gloo, tmp_path):
    mesh = vfn.abstract_mesh((2, 2), ("dp", "tp"))
    f, args, _ = programs(mesh)["body"]
    with vfn.use_mesh(mesh):
        vfn.save_plan(vfn.jit(f).lower(*args), tmp_path / "plan")
    assert repr(vfn.load_plan(tmp_path / "plan")).startswith("<SavedPlan of <lambda> for 4 ranks, by torch ")
    for found in gloo(4, _elsewhere, str(tmp_path / "plan"), list(OTHERS)):
        for (same, records, said), why in zip(found, OTHERS.values(), strict=True):
            assert (same, records) == (True, 1)
            assert said == [f"jit: no saved plan serves <lambda>, which is recorded anew: {why}"]


def refused(f, *args):
    mesh = vfn.abstract_mesh((2, 2), ("dp", "tp"))
    with vfn.use_mesh(mesh), pytest.raises(TransformError) as raised:
        vfn.save_plan(vfn.jit(f).lower(vfn.shard(torch.ones(4, 6), mesh, P("dp"))), "plan")
    return str(raised.value)


def test_more_plans_than_were_allowed_are_refused_with_the_option(tmp_path):
    mesh = vfn.abstract_mesh((2, 2), ("dp", "tp"))
    f, args, _ = programs(mesh)["written"]
    with vfn.use_mesh(mesh):
        lowered = vfn.jit(f).lower(*args)
        with pytest.raises(TransformError) as raised:
            vfn.save_plan(lowered, tmp_path / "plan", most=1)
        vfn.save_plan(lowered, tmp_path / "plan", most=2)
    assert str(raised.value) == (
        "save_plan: the ranks of the mesh (dp=2, tp=2) need more than 1 plan of written\n"
        "  * the rank at dp=1, tp=0\n"
        "  * the rank at dp=1, tp=1\n"
        "  Instead: most=2: each plan is recorded twice, and stands in the file"
    )


def _saved_by_all(folder, sizes, names):
    """A file for each program, saved by ranks together: simulated ones where all do the same, or real ones."""
    mesh = vfn.make_mesh(sizes, names)
    with vfn.use_mesh(mesh):
        for name, (f, args, donated) in programs(mesh).items():
            with contextlib.suppress(TransformError):
                vfn.save_plan(vfn.jit(f, donate_argnums=donated).lower(*args), f"{folder}/{name.replace(' ', '_')}")


RECORDS = "a loop, or a choice, in which ranks communicate or differ"


@pytest.mark.parametrize("sizes", [(2, 2), (3,), (1, 2)])
def test_simulated_ranks_load_what_an_abstract_mesh_has_saved(saved, sizes):
    """A plan writes over what dies on one rank: simulated ranks that hold the same have copies of that."""
    with vfn.simulate(math.prod(sizes)):
        found, said = _loaded(str(saved(sizes)[0]), sizes, MESHES[sizes])
    recorded = {name for name in ("scan", "cond") if name in found}
    assert found == {name: (True, int(name in recorded)) for name in found}
    assert len(said) == len(recorded)
    assert all(RECORDS in one for one in said)


def test_simulated_ranks_load_what_real_ranks_have_saved(gloo, tmp_path):
    gloo(2, _saved_by_all, str(tmp_path), (1, 2), ("dp", "tp"))
    with vfn.simulate(2):
        found, said = _loaded(str(tmp_path), (1, 2), ("dp", "tp"))
    assert found == dict.fromkeys(found, (True, 0))
    assert not said


def test_real_ranks_and_simulated_ones_load_what_simulated_ranks_have_saved(gloo, tmp_path):
    with vfn.simulate(2):
        _saved_by_all(str(tmp_path), (1, 2), ("dp", "tp"))
        kept = sorted(path.name for path in tmp_path.iterdir())
        found = [_loaded(str(tmp_path), (1, 2), ("dp", "tp"), kept)]
    assert {"fsdp", "body"} <= set(kept)
    for each, said in (*found, *gloo(2, _loaded, str(tmp_path), (1, 2), ("dp", "tp"), kept)):
        assert each == dict.fromkeys(kept, (True, 0))
        assert not said


def test_a_plain_result_of_which_ranks_may_have_others_is_recorded_anew(tmp_path):
    mesh = vfn.abstract_mesh((2,), ("a",))
    f = lambda x: (x.sin().to_local().sum(), (x * 2).sum())
    with vfn.use_mesh(mesh):
        vfn.save_plan(vfn.jit(f).lower(vfn.shard(normal(1, 3, 4), mesh, P("a"))), tmp_path / "plan")
    with vfn.simulate(2):
        x = vfn.shard(normal(1, 3, 4), vfn.make_mesh((2,), ("a",)), P("a"))
        with vfn.use_mesh(x.mesh), pytest.warns(UserWarning, match="a result is a plain tensor"):
            _local, total = vfn.jit(f, plans=[vfn.load_plan(tmp_path / "plan")])(x)
        assert torch.equal(vfn.unshard(total), vfn.unshard(f(x)[1]))


def test_a_rank_that_python_asks_for_is_refused_by_name():
    mesh = vfn.abstract_mesh((2, 2), ("dp", "tp"))
    said = refused(lambda x: x * mesh.get_coordinate()[0])
    assert (
        said.splitlines()[0] == "save_plan: mesh.get_coordinate() is asked for in Python, and a plan is for every rank"
    )
    assert "vfn.axis_index(name), a tensor" in said
    assert "mesh.rank is asked for in Python" in refused(lambda x: x * mesh.rank)


def test_what_does_not_follow_from_a_ranks_place_is_refused():
    calls = []

    def f(x):
        calls.append(1)
        return x * len(calls)

    assert "does something in f that does not follow from its place alone" in refused(f)


def test_closed_over_tensors_are_refused_still():
    weights = torch.ones(6)
    assert "a plan whose function closes over 1 tensors, one of (6,)," in refused(lambda x: x * weights)


@pytest.mark.parametrize("sizes", part(MESHES, 2))
def test_every_rank_loads_what_a_bare_process_has_saved(gloo, saved, sizes):
    folder, count = saved(sizes)
    assert count["fsdp"] == count["body"] == count.get("tp", 1) == 1  # also where one rank alone adds a bias
    assert count["uneven"] > 1
    for found, said in gloo(math.prod(sizes), _loaded, str(folder), sizes, MESHES[sizes]):
        assert found == dict.fromkeys(found, (True, 0))
        assert said == []
