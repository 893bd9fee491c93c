"""Equal layers of a Python loop, found in a recording: calls of one body, which inlined are the recording again, and the plan that
there would be without them."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.testing import assert_close

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.plan import PASSES
from vescale_fn.plan.ir.graph import calls, name_of
from vescale_fn.plan.ir.nested import nested
from vescale_fn.plan.ir.periods import Span, spans
from vescale_fn.plan.ir.shared_bodies import inlined
from vescale_fn.plan.passes.equal_parts import equal_parts
from vescale_fn.plan.passes.kept_calls import kept
from vescale_fn.plan.tracing import repeated

F, DIM, KEY = torch.float64, 4, vfn.random.key(3)
X = torch.linspace(-1, 1, 3 * DIM, dtype=F).view(3, DIM)
KEYS = vfn.random.split(KEY, 16)
MASK = torch.linspace(0, 1, DIM, dtype=F)
MANY = 4
FOUND = functools.partial(equal_parts, many=MANY)
KEEPS = functools.partial(kept, many=MANY)
FOUND.__name__, KEEPS.__name__ = "equal_parts", "kept"
WITH = tuple({equal_parts: FOUND, kept: KEEPS}.get(one, one) for one in PASSES)
OTHERWISE = tuple({FOUND: lambda graph: graph}.get(one, one) for one in WITH)
WITHOUT = tuple(one for one in PASSES if one is not equal_parts)


@pytest.fixture(autouse=True)
def _nothing_is_found_before(monkeypatch):
    """While it is recorded."""
    monkeypatch.setattr(repeated, "MANY", 1000)


def params(layers, dim=DIM):
    values = torch.linspace(-1, 1, layers * 3 * dim * 2 * dim, dtype=F).view(layers, 3, dim, 2 * dim)
    return [{"gate": gate, "up": up, "down": down.T.clone()} for gate, up, down in values.unbind()]


def layer(p, x, i=0):
    h = functional.rms_norm(x, x.shape[-1:]) * torch.arange(x.shape[-1], dtype=x.dtype).cos()
    return x + (torch.tanh(h @ p["gate"]) * (h @ p["up"]).relu()) @ p["down"]


def masked(p, x, i):
    return layer(p, x * MASK.to(x.dtype), i)


def other(p, x, i):
    return layer(p, x).sin() if i % 4 == 3 else layer(p, x)


def two_kinds(p, x, i):
    return layer(p, x) if i % 2 else x + torch.sigmoid(functional.layer_norm(x, x.shape[-1:]) @ p["gate"]) @ p["down"]


def in_place(p, x, i):
    h = layer(p, x) * 2
    h += x
    h.mul_(0.5)
    return h


def carried_in_place(p, x, i):
    x.mul_(0.5)
    return layer(p, x)


def dropout(p, x, i):
    return vfn.random.dropout(vfn.random.fold_in(KEY, i), layer(p, x), 0.5)


def keyed(p, x, i):
    return vfn.random.dropout(KEYS[i], layer(p, x), 0.5)


def tied(p, x, i):
    return layer(p, x)


def step(one):
    def sgd(ps, x):
        def loss(ps):
            y = x
            for i, p in enumerate(ps):
                y = one({**p, "up": ps[0]["up"]} if one is tied else p, y, i)
            return (y**2).mean()

        value, g = vfn.value_and_grad(loss)(ps)
        return value, vfn.tree.map(lambda p, g: p - 0.1 * g, ps, g)

    return sgd


VIEWS = "clone detach alias view _unsafe_view t transpose permute expand unsqueeze squeeze select slice".split()


def said(graph):
    """What a graph does, in order, but for views, which are said where they are used."""
    number, again, found = {}, {}, []

    def use(x):
        return number[x] if x in number else (use(x.args[0]), str(x.target), say(x.args[1:]), say(x.kwargs))

    def say(args):
        return torch.fx.map_arg(args, lambda x: _Said(use(x)))

    for node in graph.nodes:
        if name_of(node) in VIEWS:
            continue
        number[node] = len(number)
        if node.op == "call_function":
            at = again.setdefault(node.meta["again"], len(again)) if "again" in node.meta else None
            found.append((str(node.target), say(node.args), say(node.kwargs), node.meta["line"], at, number[node]))
        elif node.op == "output":
            found.append(say(node.args))
    return found


class _Said(str):
    def __new__(cls, x):
        return super().__new__(cls, f"{x}")


def recording(f, *args):
    return vfn.jit(f, passes=()).lower(*args).recorded.graph


LOOPS = {
    "2": (layer, 2, 0),
    "8": (layer, 8, 14),
    "16": (layer, 16, 30),
    "a mask that is closed over": (masked, 8, 14),
    "every fourth is another": (other, 24, 10),
    "two kinds": (two_kinds, 12, 11),
    "in place": (in_place, 8, 14),
    "written by the next": (lambda p, x, i: carried_in_place(p, x.clone() if i == 0 else x, i), 8, 13),
    "remat": (vfn.remat(layer), 8, 15),
    "dropout": (dropout, 8, 14),
    "dropout of given keys": (keyed, 8, 14),
    "tied": (tied, 8, 13),
}


@pytest.mark.parametrize("name", LOOPS)
def test_inlined_it_is_the_recording(name) -> None:
    one, layers, parts = LOOPS[name]
    graph = recording(step(one), params(layers), X)
    found = equal_parts(graph, many=MANY)
    assert said(inlined(found)) == said(graph)
    assert len(nested(found)) == parts
    assert all(len(list(calls(node.target.bodies[0]))) > 10 for node in nested(found))


@pytest.mark.parametrize(("name", "dtype"), [*((name, F) for name in LOOPS if name != "16"), ("tied", torch.bfloat16)])
def test_bits(name, dtype) -> None:
    one, layers, parts = LOOPS[name]
    ps, x = vfn.tree.map(lambda x: x.to(dtype), (params(layers), X))
    found, lowered = [], []
    for passes in (WITHOUT, WITH):
        jitted = vfn.jit(step(one), passes=passes, donate_argnums=0)
        for _ in range(2):
            found.append(jitted(vfn.tree.map(torch.clone, ps), x))
        lowered.append(jitted.lower(ps, x))
    for other in found[1:]:
        for a, b in zip(vfn.tree.leaves(found[0]), vfn.tree.leaves(other), strict=True):
            assert torch.equal(a, b)
    without, few = (one.memory().peak for one in lowered)
    assert few <= 1.02 * without
    assert len(nested(lowered[1].graph)) in (parts, parts - 1)  # one of which less is needed is another call


def test_few_or_small_parts_stay() -> None:
    assert list(spans([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 8], 3, 2)) == [Span(1, 11, 3)]
    assert not list(spans([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 8], 4, 2))
    assert not list(spans([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 8], 3, 4))
    count = lambda one, layers: len(nested(vfn.jit(step(one)).lower(params(layers), X).graph))
    assert count(layer, 15) == 0
    assert count(layer, 18) >= 34  # forward and backward; of the first layer's input no gradient is asked
    assert count(lambda p, x, i: x.tanh(), 18) == 0


def test_each_leaf_of_a_tree_is_no_layer() -> None:
    def each(x):
        for _ in range(4):
            x = x.sin() * x.cos() + x.exp()
        return x

    graph = recording(lambda xs: vfn.tree.map(each, xs), [X + i for i in range(8)])
    assert equal_parts(graph, many=MANY) is graph


def test_what_is_printed_stays() -> None:
    def printing(p, x, i):
        vfn.plan.debug_print("x {}", x.sum())
        return layer(p, x)

    graph = recording(step(printing), params(8), X)
    found = equal_parts(graph, many=MANY)
    assert not any(node.target.effect for node in nested(found))
    assert said(inlined(found)) == said(graph)


SPECS = {
    "tp": {"gate": P(None, "tp"), "up": P(None, "tp"), "down": P("tp")},
    "dp": P(),
    "fsdp": P("dp"),
}


def on_mesh(at, params_at=None):
    """A layer that reduces what it adds; with `at` None on one device."""

    def one(p, x, i):
        p = p if params_at is None else vfn.with_sharding(p, params_at)
        h = functional.rms_norm(x, x.shape[-1:])
        y = (torch.tanh(h @ p["gate"]) * (h @ p["up"]).relu()) @ p["down"]
        return x + (y if at is None else vfn.with_sharding(y, at))

    return one


@pytest.mark.parametrize(
    "name", ["dp", "tp", "fsdp", "partial"]
)  # of two, passes put collectives of several layers together
@pytest.mark.parametrize("remat", [False, True])
def test_collectives_and_memory(name, remat) -> None:
    mesh = vfn.abstract_mesh((256, 2), ("dp", "tp"))
    one = layer if name == "partial" else on_mesh(P("dp"), P() if name == "fsdp" else None)
    specs = SPECS[name] if name in ("dp", "fsdp") else [SPECS["tp"]] * 6
    ps, x = vfn.shard(params(6, 512), mesh, specs), vfn.shard(torch.ones(512, 512, dtype=F), mesh, P("dp"))
    told = []
    with vfn.use_mesh(mesh):
        for passes in (WITHOUT, WITH):
            lowered = vfn.jit(step(vfn.remat(one) if remat else one), passes=passes).lower(ps, x)
            told.append([[(record.op, record.axes, record.bytes) for record in lowered.comms()], lowered.memory().peak])
    assert told[0] == told[1]
    assert bool(nested(lowered.graph)) == (name in ("dp", "tp"))


@pytest.mark.parametrize("how", ["simulated", "memory", "arena"])
def test_where_no_calls_stay(how) -> None:
    ps, x = params(18), X
    more = {"simulated": {}, "memory": {"memory": "100 %"}, "arena": {"arena": True}}[how]
    with vfn.simulate(2):
        if how == "simulated":
            mesh = vfn.make_mesh((1, 2), ("dp", "tp"))
            ps, x = vfn.shard(ps, mesh, [SPECS["tp"]] * 18), vfn.shard(x, mesh, P())
        found = [vfn.jit(step(layer), passes=passes, **more) for passes in (WITHOUT, PASSES)]
        a, b = (vfn.tree.leaves(vfn.unshard(jitted(ps, x))) for jitted in found)
        assert not nested(found[1].lower(ps, x).graph)
    assert all(map(torch.equal, a, b))


def test_a_saved_plan(tmp_path) -> None:
    ps, jitted = params(6), vfn.jit(step(layer), passes=WITH)
    vfn.save_plan(jitted.lower(ps, X), tmp_path / "plan")
    again = vfn.jit(step(layer), passes=WITH, plans=[vfn.load_plan(tmp_path / "plan")])
    assert all(map(torch.equal, vfn.tree.leaves(jitted(ps, X)), vfn.tree.leaves(again(ps, X))))
    assert again.cache_info().records == 0


def _on_ranks(size):
    mesh, ps = vfn.make_mesh((size,), ("tp",)), params(5)
    x = torch.linspace(-1, 1, 5 * DIM, dtype=F).view(5, DIM)
    wanted = step(on_mesh(None))(ps, x)
    for specs in ([{**SPECS["tp"]}] * 5, [P()] * 5):  # two of three ranks have three columns, and the last one two
        at = P("tp") if specs[0] == P() else P()
        split, rows = [vfn.shard(p, mesh, spec) for p, spec in zip(ps, specs, strict=True)], vfn.shard(x, mesh, at)
        found = []
        for passes in (WITHOUT, OTHERWISE if dist.get_rank() else WITH, WITH):  # the second: rank 0 alone finds them
            jitted = vfn.jit(step(on_mesh(at)), passes=passes)
            found.append(vfn.tree.leaves(vfn.unshard(jitted(split, rows))))
        assert all(itertools.starmap(torch.equal, itertools.chain(zip(*found[:2]), zip(*found[1:]))))
        assert_close(found[1], vfn.tree.leaves(wanted), rtol=1e-12, atol=1e-12)
        assert nested(jitted.lower(split, rows).graph)


@pytest.mark.parametrize("size", [2, 3])
def test_on_ranks(gloo, size) -> None:
    gloo(size, _on_ranks, size)
