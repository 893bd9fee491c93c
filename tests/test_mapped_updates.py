"""An optimiser's update of many leaves is one call of a plan: the same bits, in place, whatever else uses the leaves."""

import functools

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import optim
from vescale_fn._core.base import tree
from vescale_fn.plan.ir.graph import calls, name_of
from vescale_fn.plan.ir.mapped import mapped
from vescale_fn.plan.passes import mapped_in_parts

ADAMW = optim.adamw(1e-2)


def leaves():
    draw = torch.Generator().manual_seed(0)
    return {f"w{i}": torch.randn(4, i % 5, generator=draw) for i in range(12)}


def mixed():
    """Leaves that are not alike."""
    draw = torch.Generator().manual_seed(0)
    halves = {f"h{i}": torch.randn(i, 3, generator=draw).bfloat16() for i in range(4)}
    large = {f"l{i}": torch.randn(260, 256, generator=draw) for i in range(2)}
    turned = {f"t{i}": torch.randn(2 + i, 3, generator=draw).t() for i in range(3)}
    return {**leaves(), **halves, **large, **turned, "one": torch.tensor(2.0), "depth": 3, "none": None}


def grads_of(params):
    grads = tree.map_(lambda x: x.cos() if isinstance(x, torch.Tensor) else x, params)
    return {k: x.clone(memory_format=torch.contiguous_format) if k == "t1" else x for k, x in grads.items()}


def updated(params, state, grads, opt=ADAMW):
    updates, state = opt.update(grads, state, params)
    return optim.apply_updates(params, updates), state


def as_eagerly(step, *args, **options):
    """The jitted step, which gives twice the bits of the step itself, and writes over what it may."""
    copied = lambda: tree.map_(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args)
    f = vfn.jit(step, donate_argnums=(0, 1), **options)
    expected = tree.leaves(step(*copied()))
    for given in (copied(), copied()):
        for x, y in zip(tree.leaves(f(*given)), expected, strict=True):
            assert x is y or x == y if not isinstance(x, torch.Tensor) else torch.equal(x, y) and x.dtype == y.dtype
    return f


@pytest.mark.parametrize("options", [{}, {"arena": True}, {"passes": []}], ids=str)
@pytest.mark.parametrize(
    "opt",
    [
        ADAMW,
        optim.chain(optim.clip_by_value(0.5), optim.lion(1e-3), optim.params_ema(0.9)),
        optim.sgd(0.1, momentum=0.9),
    ],
    ids=repr,
)
def test_leaves_that_are_not_alike(opt, options):
    params = mixed()
    as_eagerly(lambda p, s, g: updated(p, s, g, opt), params, opt.init(params), grads_of(params), **options)


def used_later(p, s, g):
    return *updated(p, s, g), sum((x * x).sum() for x in p.values())


def given_back(p, s, g):
    return *updated(p, s, g), p["w3"], p["w4"].t(), s.mean["w6"] + 1


def with_updates(p, s, g):
    updates, s = ADAMW.update(g, s, p)
    return optim.apply_updates(p, updates), s, updates


def twice(p, s, g):
    return updated(*updated(p, s, g), g)


def by_themselves(p, s, g):
    return updated(p, s, p)


def one_gradient(p, s, g):
    return updated(p, s, {k: g["w1"] if x.shape == g["w1"].shape else g[k] for k, x in p.items()})


def written_between(p, s, g):
    """An update that is written before it is added to the parameters: it is not a part of what adds it."""
    updates, s = ADAMW.update(g, s, p)
    for x in updates.values():
        x.mul_(0.5)
    return optim.apply_updates(p, updates), s


def to_later_values(p, s, g):
    updates, s = ADAMW.update(g, s, p)
    return optim.apply_updates({k: x * 3 for k, x in p.items()}, updates), s


def added_twice(p, s, g):
    updates, s = ADAMW.update(g, s, p)
    return optim.apply_updates(optim.apply_updates(p, updates), updates), s


LATER = [used_later, given_back, with_updates, twice, by_themselves, one_gradient]


@pytest.mark.parametrize("step", [*LATER, written_between, to_later_values, added_twice])
def test_leaves_that_something_else_uses(step):
    params = leaves() if step is not written_between else {str(i): torch.tensor([1.0 + i]) for i in range(3)}
    as_eagerly(step, params, ADAMW.init(params), grads_of(params))


def test_results_lie_where_donated_leaves_lay():
    params = leaves()
    args = params, ADAMW.init(params)
    lay = [x.data_ptr() for x in tree.leaves(args)]
    out = vfn.jit(updated, donate_argnums=(0, 1))(*args, grads_of(params))
    assert [x.data_ptr() for x in tree.leaves(out)] == lay


def test_one_call_for_all_that_are_alike():
    count = lambda n: {str(i): torch.ones(2, 1 + i) for i in range(n)}
    bodies, nodes = [], []
    for n in (3, 30):
        params = count(n)
        graph = vfn.jit(updated).lower(params, ADAMW.init(params), params).graph
        found = list(mapped(graph))
        assert [target.rows for _, target in found] == [n]  # the update, with the new parameters
        bodies.append([len(target.bodies[0].nodes) for _, target in found])
        nodes.append(sum(1 for _ in calls(graph)))
    assert bodies[0] == bodies[1]
    assert nodes[1] - nodes[0] == 27 * 3  # which take a leaf's results out: two means, the new parameter


def masked(p, s, g):
    """Some leaves decay, some are looked at, and all gradients are."""
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, mask=lambda p: {k: "1" in k for k in p}))
    return *updated(p, s, g, opt), p["w3"].sum()


def test_what_runs_has_one_node_for_many_leaves():
    found = []
    for step, opt in ((updated, ADAMW), (masked, optim.chain(optim.clip_by_global_norm(0.5), ADAMW))):
        for n in (8, 24):
            draw = torch.Generator().manual_seed(0)
            params = {f"w{i}": torch.randn(4, 1 + i % 5, generator=draw) for i in range(n)}
            f = as_eagerly(step, params, opt.init(params), grads_of(params))
            (plan,) = f._plans.values()
            found.append(len(plan.code.graph.nodes))
            assert len(plan.graph.nodes) > 7 * n  # which shows them all
    assert found[0] == found[1]
    assert found[3] - found[2] < 16 * 5  # gradients have nodes of their own


def test_predicted_peak_is_that_of_single_calls():
    params = {str(i): torch.ones(64, 64) for i in range(20)}
    args = params, ADAMW.init(params), params
    together = vfn.jit(updated, donate_argnums=(0, 1)).lower(*args).memory()
    single = vfn.jit(updated, donate_argnums=(0, 1), arena=True).lower(*args).memory()
    assert together.arguments == single.arguments
    assert together.peak <= single.peak


def trained(params, state, x):
    loss = lambda params: torch.stack([(x @ w).tanh().square().mean() for w in params.values()]).sum()
    return updated(params, state, vfn.grad(loss)(params))


def test_it_is_a_few_calls_where_it_would_need_the_most(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    params = {str(i): torch.randn(120, 120, generator=draw) for i in range(16)}
    args = params, ADAMW.init(params), torch.randn(200, 120, generator=draw)
    lowered = as_eagerly(trained, *args).lower(*args)
    found = [target.rows for _, target in mapped(lowered.graph)]
    assert found == [8, 8]
    monkeypatch.setattr(mapped_in_parts, "MOST", 1)
    whole = vfn.jit(trained, donate_argnums=(0, 1)).lower(*args)
    assert [target.rows for _, target in mapped(whole.graph)] == [16]
    assert lowered.memory().peak < whole.memory().peak


def test_lists_of_leaves_are_taken_in_runs_where_calls_would_be():
    params = {str(i): torch.randn(60, 60, generator=torch.Generator().manual_seed(i)) for i in range(16)}
    f = as_eagerly(updated, params, ADAMW.init(params), grads_of(params))
    (plan,) = f._plans.values()
    assert [target.runs for _, target in mapped(plan.code.graph)] == [((0, 8), (8, 16))]
    assert [target.rows for _, target in mapped(plan.graph)] == [8, 8]


def test_lists_of_leaves_are_taken_in_runs_that_stay_in_the_cache():
    short = functools.partial(mapped_in_parts.in_parts, cached=100)
    passes = [short if one is mapped_in_parts.in_parts else one for one in vfn.plan.PASSES]
    for params in (leaves(), {f"e{i}": torch.zeros(0, 2) for i in range(3)}):
        f = as_eagerly(updated, params, ADAMW.init(params), grads_of(params), passes=passes)
        (plan,) = f._plans.values()
        runs = {target.runs for _, target in mapped(plan.code.graph)}
        assert runs == {()} if "e0" in params else len(max(runs)) > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_plan(dtype, tmp_path):
    params = {k: x.to(dtype) for k, x in leaves().items()}
    args = params, ADAMW.init(params), grads_of(params)
    vfn.save_plan(vfn.jit(updated, donate_argnums=(0, 1)).lower(*args), tmp_path / "update")
    f = as_eagerly(updated, *args, plans=[vfn.load_plan(tmp_path / "update")])
    assert f.cache_info().records == 0


def test_a_meta_gradient_goes_through_each_leaf():
    params = leaves()

    def after(rate):
        return sum(x.sum() for x in updated(params, None, grads_of(params), optim.scale(rate))[0].values())

    rate = torch.tensor(0.5)
    torch.testing.assert_close(vfn.jit(vfn.grad(after))(rate), vfn.grad(after)(rate))


SPLIT = {"columns": vfn.P(None, "dp"), **{f"rows{i}": vfn.P("dp") for i in range(3)}, "uneven": vfn.P("dp")}
SIZES = {"columns": (3, 4), **{f"rows{i}": (4, 1 + i) for i in range(3)}, "uneven": (5, 2)}


def of_parts(params, state, grads):
    """ZeRO-1: each rank updates its parts, which are gathered."""
    mine = vfn.with_sharding(params, SPLIT)
    updates, state = ADAMW.update(vfn.with_sharding(grads, SPLIT), state, mine)
    return vfn.with_sharding(optim.apply_updates(mine, updates), vfn.P()), state


def lying(params):
    blocks = (x.to_local() for x in tree.leaves(params))
    return [block.data_ptr() for x in blocks for block in getattr(x, "blocks", [x])]


def updated_in_parts(mesh, **options):
    """Whether a plan gives the bits of its function, each parameter where the old one lay; and the plan."""
    draw = torch.Generator().manual_seed(0)
    given = [{name: torch.randn(shape, generator=draw) for name, shape in SIZES.items()} for _ in range(2)]
    params, grads = (vfn.shard(x, mesh, vfn.P()) for x in given)
    state = ADAMW.init(vfn.with_sharding(params, SPLIT))
    f, same = vfn.jit(of_parts, donate_argnums=(0, 1), **options), []
    expected = tree.leaves(vfn.unshard(of_parts(params, state, grads)))
    for _ in range(2):
        args = tree.map_(torch.clone, (params, state))
        lay = lying(args[0])
        out = f(*args, grads)
        same.append(all(map(torch.equal, tree.leaves(vfn.unshard(out)), expected)) and lying(out[0]) == lay)
    return same, f.lower(params, state, grads)


def test_what_is_gathered_together_is_written_over_donated_leaves():
    """And is not there twice: what arrives goes where it stays."""
    with vfn.simulate(2):
        same, plan = updated_in_parts(vfn.make_mesh((2,), ("dp",)))
    assert same[1]
    unpacks = [node for node in calls(plan.graph) if node.target.__name__ == "unpack" and node.target.into]
    for node in unpacks:
        assert [x is not None and x.op == "placeholder" for x in node.args[1]] == [True] * 4 + [False]
        # new tensors, which know nothing of those that were given away
        assert {y.target.__name__ for x in node.users if x.args[1] < 4 for y in x.users} == {"handed_over"}
    assert (
        sum(name_of(node) == "copy_" for node in calls(plan.graph)) == len(unpacks) == 1
    )  # what is padded is cut first


def _in_parts():
    mesh = vfn.make_mesh((2,), ("dp",))
    return [one for options in ({}, {"arena": True}) for one in updated_in_parts(mesh, **options)[0]]


def test_they_are_on_real_ranks(gloo):
    assert gloo(2, _in_parts) == [[True] * 4] * 2
