"""Equal calls that stay calls to the end of the passes: the values, the collectives and no more memory than inlined ones."""

import functools

import pytest
import torch
from torch.testing import assert_close

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.plan import PASSES
from vescale_fn.plan.ir.graph import calls, collectives, name_of
from vescale_fn.plan.ir.nested import nested
from vescale_fn.plan.ir.shared_bodies import Shared, inlined
from vescale_fn.plan.passes.dce import dead, needed_collectives
from vescale_fn.plan.passes.kept_calls import MANY, kept
from vescale_fn.plan.passes.overlap import overlap
from vescale_fn.plan.passes.rematerialize import recompute

F = torch.float64
X = torch.linspace(-1, 1, 32, dtype=F).view(4, 8)


def params(layers, hidden=16):
    values = torch.linspace(-1, 1, layers * 3 * 8 * hidden, dtype=F).view(layers, 3, 8, hidden)
    return [{"gate": gate, "up": up, "down": down.T} for gate, up, down in values.unbind()]


def layer(p, x):
    wave = torch.arange(p["gate"].shape[1], dtype=F).cos()
    h = torch.nn.functional.rms_norm(x, (8,))
    return x + (torch.tanh(h @ p["gate"]) * (h @ p["up"]) * wave) @ p["down"]


def step(one):
    def sgd(ps, x):
        value, g = vfn.value_and_grad(lambda ps: (functools.reduce(lambda x, p: one(p, x), ps, x) ** 2).mean())(ps)
        return value, vfn.tree.map(lambda p, g: p - 0.1 * g, ps, g)

    return sgd


def passes(many=2, smallest=1 << 18, on_cpu=False):
    """The passes; with `many` None all calls are inlined."""
    instead = {
        kept: inlined if many is None else functools.partial(kept, many=many),
        recompute: functools.partial(recompute, smallest=smallest),
        overlap: functools.partial(overlap, on_cpu=on_cpu),
    }
    found = [instead.get(one, one) for one in PASSES]
    for one in found:
        if isinstance(one, functools.partial):
            one.__name__ = one.func.__name__
    return tuple(found)


def graph_of(jitted):
    (plan,) = jitted._plans.values()
    return plan.graph


def bodies(graph):
    return list(dict.fromkeys(node.target.bodies[0] for node in nested(graph)))


@pytest.mark.parametrize("donate", [(), (0,)])
@pytest.mark.parametrize("smallest", [1, 1 << 18])
def test_values(donate, smallest) -> None:
    ps = params(6)
    wanted = step(layer)(ps, X)
    jitted = vfn.jit(step(vfn.plan.shared(layer)), passes=passes(smallest=smallest), donate_argnums=donate)
    for _ in range(2):
        assert_close(jitted(vfn.tree.map(torch.clone, ps), X), wanted, rtol=1e-12, atol=1e-12)
    graph = graph_of(jitted)
    assert (len(nested(graph)), len(bodies(graph))) == (10, 2)  # of the first layer's input no gradient is asked
    assert not any(name_of(node) == "tanh" for node in calls(graph))
    if donate and smallest == 1:
        assert any("again" in node.meta for body in bodies(graph) for node in body.nodes)


def test_few_are_inlined_and_what_looks_into_calls_has_none() -> None:
    few, many = params(MANY), params(MANY + 1)  # the input of the first one is another
    made = lambda **how: vfn.jit(step(vfn.plan.shared(layer)), **how)
    count = lambda jitted, ps: len(nested(jitted.lower(ps, X).graph))
    assert count(made(), few) == 0
    assert count(made(), many) > MANY
    assert count(made(arena=True), many) == 0
    assert count(made(memory="100 %"), many) == 0
    assert count(made(), many) == count(vfn.jit(step(vfn.jit(layer))), many)


def test_what_is_the_same_in_all_calls_is_computed_once() -> None:
    jitted = vfn.jit(step(vfn.plan.shared(layer)), passes=passes())
    jitted(params(6), X)
    graph = graph_of(jitted)
    assert [name_of(node) for node in calls(graph)].count("arange") == 1
    assert not any(name_of(node) in ("arange", "cos", "cos_") for body in bodies(graph) for node in calls(body))


def test_a_loop_in_a_body_is_inlined() -> None:
    def one(p, x):
        return vfn.fori_loop(0, 3, lambda i, x: layer(p, x) * 0.5, x)

    jitted = vfn.jit(step(vfn.plan.shared(one)), passes=passes())
    assert_close(jitted(params(3), X), step(one)(params(3), X), rtol=1e-12, atol=1e-12)
    assert not any(isinstance(node.target, Shared) for node in nested(graph_of(jitted)))


SPLIT = {"gate": P("dp", "tp"), "up": P("dp", "tp"), "down": P("tp", "dp")}
LAYOUTS = {
    "fsdp": ({"gate": P("dp"), "up": P("dp"), "down": P("dp")}, P()),
    "dp": (P(), P()),
    "tp": ({"gate": P(None, "tp"), "up": P(None, "tp"), "down": P("tp")}, None),
    "fsdp+tp": (SPLIT, {"gate": P(None, "tp"), "up": P(None, "tp"), "down": P("tp")}),
    "uneven": ({"gate": P(("dp", "tp")), "up": P(None, "tp"), "down": P("dp")}, P()),
    "rows": ({"gate": P("dp"), "up": P("dp"), "down": P("dp")}, None),  # which are not gathered
}


def on_mesh(at):
    def one(p, x):
        p = p if at is None else vfn.with_sharding(p, at)
        return vfn.with_sharding(layer(p, x), P("dp"))

    return one


@pytest.mark.parametrize(("name", "remat"), [(name, remat) for name in LAYOUTS for remat in (False, True)][:-1])
def test_collectives_and_memory(name: str, remat: bool) -> None:
    specs, at = LAYOUTS[name]
    mesh = vfn.abstract_mesh((3, 2) if name == "uneven" else (2, 2), ("dp", "tp"))
    ps = vfn.shard(params(6), mesh, [specs] * 6 if isinstance(specs, dict) else specs)
    x = vfn.shard(X.repeat(3, 1), mesh, P("dp"))
    one = vfn.remat(on_mesh(at)) if remat else on_mesh(at)
    found = {}
    with vfn.use_mesh(mesh):
        for many, layers in ((None, one), (100, vfn.plan.shared(one)), (2, vfn.plan.shared(one))):
            lowered = vfn.jit(step(layers), passes=passes(many)).lower(ps, x)
            sent = sorted((record.op, record.axes, record.bytes) for record in lowered.comms())
            found[many] = sent, lowered.memory().peak
            within = [c for body in bodies(lowered.graph) for c in collectives(body)]
            assert name == "rows" or all("tp" in node.target.axes for node in within)
            assert bool(nested(lowered.graph)) == (many == 2)
    assert found[2][0] == found[100][0] == found[None][0]
    assert found[100][1] <= found[None][1]
    assert found[2][1] <= 1.05 * found[None][1]


def test_gathers_of_cast_parameters_stand_outside_of_calls() -> None:
    """So that these stay calls where devices compute meanwhile."""
    mesh = vfn.abstract_mesh((2,), ("dp",))
    ws, x = vfn.shard([torch.ones(8, 8)] * 6, mesh, P("dp")), vfn.shard(X.to(torch.bfloat16), mesh, P("dp"))
    one = vfn.plan.shared(lambda w, x: (x @ vfn.with_sharding(w.to(torch.bfloat16), P())).relu())
    alone = [functools.partial(kept, many=2, on_cpu=True) if of is kept else of for of in PASSES]
    with vfn.use_mesh(mesh):
        forward = vfn.jit(lambda ws, x: functools.reduce(lambda x, w: one(w, x), ws, x), passes=tuple(alone))
        graph = forward.lower(ws, x).graph
    assert len(nested(graph)) == 6
    assert not any(map(collectives, bodies(graph)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_collectives_that_are_needed_are_found_without_inlining(name: str) -> None:
    specs, at = LAYOUTS[name]
    mesh = vfn.abstract_mesh((3, 2) if name == "uneven" else (2, 2), ("dp", "tp"))
    ps = vfn.shard(params(4), mesh, [specs] * 4 if isinstance(specs, dict) else specs)
    x = vfn.shard(X.repeat(3, 1), mesh, P("dp"))
    one = vfn.plan.shared(vfn.remat(on_mesh(at)))

    def some(ps, x):  # not all gradients, and not what the last call gives
        value, g = step(one)(ps, x)
        one(ps[0], x)
        return value * 2, g[1], g[3]["up"] * 2

    with vfn.use_mesh(mesh):
        graph = vfn.jit(some).lower(ps, x).origin.plan.recorded.graph
    whole = inlined(graph)
    found = needed_collectives(graph)
    assert found == needed_collectives(whole)
    stays = [node.target for node in collectives(dead(whole))]
    assert stays == [node.target for i, node in enumerate(collectives(whole)) if i in found]
    assert len(found) < len(collectives(whole))
    assert any(isinstance(node.target, Shared) for node in nested(graph))


def _on_ranks():
    mesh, ps, rows = vfn.make_mesh((3,), ("dp",)), params(4, 12), X.repeat(2, 1)[:5]
    split, x = vfn.shard(ps, mesh, P("dp")), vfn.shard(rows, mesh, P("dp"))
    wanted = step(layer)(ps, rows)
    with vfn.use_mesh(mesh):
        for one in (on_mesh(P()), vfn.remat(on_mesh(P())), layer):
            jitted = vfn.jit(step(vfn.plan.shared(one)), passes=passes(smallest=1, on_cpu=True))
            assert_close(vfn.unshard(jitted(split, x)), wanted, rtol=1e-12, atol=1e-12)
            assert nested(graph_of(jitted))


def test_on_ranks_with_blocks_of_other_sizes(gloo) -> None:
    gloo(3, _on_ranks)
