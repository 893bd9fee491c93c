"""Loops under `jit`: one call in the plan, whose body is recorded once, forward and backward; the numbers of the unrolled loop."""

import contextlib

import pytest
import torch
from test_control_flow import LAYOUTS, TRANSFORMS, XS, F, W, body, by_hand, loss, scanned, total
from torch.testing import assert_close

import vescale_fn as vfn
from benchmarks.peak_memory import accounting
from vescale_fn import P
from vescale_fn._core.base import context
from vescale_fn.plan.ir.loop import loops
from vescale_fn.plan.ir.nested import all_collectives


def plan_of(jitted):
    (plan,) = jitted._plans.values()
    return plan


def rolled(jitted):
    return len(loops(plan_of(jitted).graph))


def same_as_eager(f, *given, loops=None, exact=True):
    """A jitted function gives what it gives eagerly, when it is recorded and when it is replayed; how many loops its plan has."""
    jitted, wanted = vfn.jit(f), f(*given)
    for _ in range(3):
        found = jitted(*given)
        assert_close(vfn.unshard(found), vfn.unshard(wanted), rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)
    assert jitted.cache_info()[:3] == (2, 1, 0)
    if loops is not None:
        assert rolled(jitted) == loops
    return jitted


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", [name for name in TRANSFORMS if not name.startswith("jit")])
def test_under_transforms(name: str, reverse: bool) -> None:
    jitted = vfn.jit(TRANSFORMS[name](loss(scanned, reverse)))
    given = W, XS[0] * 2, XS
    wanted = TRANSFORMS[name](loss(by_hand, reverse))(*given)
    for _ in range(2):
        assert_close(jitted(*given), wanted, rtol=1e-12, atol=1e-12)
    assert rolled(jitted) > 0


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays(layout: str, n: int) -> None:
    wanted = vfn.value_and_grad(loss(by_hand, False), (0, 1, 2))(W, XS[0], XS)
    with vfn.simulate(n):
        mesh = vfn.make_mesh((n,), ("i",))
        given = [vfn.shard(x, mesh, spec) for x, spec in zip((W, XS[0], XS), LAYOUTS[layout], strict=True)]

        def settled(w, c, xs, reverse=False):
            keeps = lambda c, x: (vfn.with_sharding(body(w)(c, x)[0], given[1].spec), c * x)
            return vfn.scan(keeps, c, xs)

        jitted = vfn.jit(vfn.value_and_grad(loss(settled, False), (0, 1, 2)))
        for _ in range(2):
            found = jitted(*given)
            assert [g.spec for g in found[1]] == [x.spec for x in given]
            assert_close(vfn.unshard(found), wanted, rtol=1e-12, atol=1e-12)
        assert rolled(jitted) == 2


MAPPED = {
    "split entries": (P(), P("i"), P()),
    "split slices": (P(None, "i"), P(None, "i"), P(None, "i")),
    "a leading dim": (P("i"), P("i"), P("i")),
    "plain entries": (P(), None, P()),
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("layout", MAPPED)
def test_mapped_arrays(layout: str, n: int) -> None:
    """As in JAX, `vmap` of a loop is a loop of the mapped body."""
    entries = torch.stack([XS[0], XS[0].cos(), 2 * XS[0], XS[0].sin()])
    mapped = lambda w, c, xs: vfn.vmap(scanned, (None, 0, None))(w, c, xs)
    wanted = mapped(W, entries, XS), vfn.grad(lambda w: total(mapped(w, entries, XS)))(W)
    with vfn.simulate(n):
        mesh = vfn.make_mesh((n,), ("i",))
        specs = zip((W, entries, XS), MAPPED[layout], strict=True)
        given = [x if spec is None else vfn.shard(x, mesh, spec) for x, spec in specs]
        both = lambda w, *rest: (mapped(w, *rest), vfn.grad(lambda w: total(mapped(w, *rest)))(w))
        assert_close(vfn.unshard(both(*given)), wanted, rtol=1e-12, atol=1e-12)
        jitted = same_as_eager(both, *given, exact=False)
        assert rolled(jitted) >= 2


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tangents_of_arrays(layout: str, n: int) -> None:
    """As in JAX, `jvp` of a loop is a loop that carries tangents, where there are any."""
    given, specs = (W, XS[0], XS), LAYOUTS[layout]

    def slopes(w, c, xs, goal=None):
        def keeps(c, x):
            new = body(w)(c[0], x)[0]
            return (new if goal is None else vfn.with_sharding(new, goal), c[1] + 1, x), c[0] * x

        f = lambda w, xs: vfn.scan(keeps, (c, 0, vfn.stop_gradient(c)), xs)
        return vfn.jvp(f, (w, xs), (w.cos(), xs.cos()))

    with vfn.simulate(n):
        mesh = vfn.make_mesh((n,), ("i",))
        arrays = [vfn.shard(x, mesh, spec) for x, spec in zip(given, specs, strict=True)]
        assert_close(vfn.unshard(slopes(*arrays, specs[1])), slopes(*given), rtol=1e-12, atol=1e-12)
        same_as_eager(lambda *a: slopes(*a, specs[1]), *arrays, loops=1, exact=False)
        back = vfn.grad(lambda w: sum(t.double().sum() for t in vfn.tree.leaves(slopes(w, *arrays[1:], specs[1]))))
        same_as_eager(back, arrays[0], loops=2, exact=False)


AGAIN = {
    "gradient of a gradient": lambda f: vfn.grad(
        lambda *a: sum((g**2).sum() for g in vfn.grad(f, (0, 1, 2))(*a)), (0, 1, 2)
    ),
    "linearize": lambda f: lambda *a: vfn.linearize(f, *a)[1](*map(torch.cos, a)),
    "gradients of entries": lambda f: (
        lambda w, c, xs: vfn.vmap(vfn.grad(f, (0, 1, 2)), (None, 0, None))(w, torch.stack([c, 2 * c]), xs)
    ),
    "jvp of a gradient": lambda f: lambda *a: vfn.jvp(vfn.grad(f, (0, 1, 2)), a, tuple(map(torch.cos, a))),
}


@pytest.mark.parametrize("name", AGAIN)
def test_derivatives_that_are_differentiated_again(name: str) -> None:
    """The derivative of a loop is a loop that can be differentiated again, and mapped."""
    given = W, XS[0], XS
    wanted = AGAIN[name](loss(by_hand, False))(*given)
    for n, layout in ((2, "split"), (3, "leading")):
        with vfn.simulate(n):
            mesh = vfn.make_mesh((n,), ("i",))
            arrays = [vfn.shard(x, mesh, spec) for x, spec in zip(given, LAYOUTS[layout], strict=True)]

            def settled(w, c, xs, reverse=False, goal=LAYOUTS[layout][1]):
                keeps = lambda c, x: (vfn.with_sharding(body(w)(c, x)[0], goal), c * x)
                return vfn.scan(keeps, c, xs)

            jitted = vfn.jit(AGAIN[name](loss(settled, False)))
            assert_close(vfn.unshard(jitted(*arrays)), wanted, rtol=1e-11, atol=1e-11)
            assert rolled(jitted) >= 2


SECOND = {
    "gradient of a gradient": AGAIN["gradient of a gradient"],
    "third order": lambda f: AGAIN["gradient of a gradient"](
        lambda *a: sum((g**2).sum() for g in vfn.grad(f, (0, 1, 2))(*a))
    ),
    "jvp of a gradient": AGAIN["jvp of a gradient"],
    "torch.func.grad": lambda f: torch.func.grad(f, (0, 1, 2)),
    "of entries": lambda f: lambda w, c, xs: vfn.vmap(vfn.grad(f), (0, None, None))(torch.stack([w, 2 * w]), c, xs),
}


def promoted_before(w, c, xs, total):
    """A loop among ranks whose constants were used before it, and whose body communicates."""
    h = c @ w

    def step(c, x):
        return torch.tanh(c @ w + h + total(c) * x), c * x

    last, ys = vfn.scan(step, h, xs)
    return (last**2).sum() + (ys**2).sum()


@pytest.mark.parametrize("name", SECOND)
def test_derivatives_in_bodies_are_differentiated_again(name: str) -> None:
    """Also of a constant of which the body has taken a local value before the loop."""
    c, xs = XS[:2], XS[:, None]
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        runs = []

        def inside(w, c, xs):
            def total(c):
                runs.append(None)
                return vfn.psum(c.sum(), "i")

            return vfn.psum(promoted_before(w, c, xs, total), "i")

        wanted = SECOND[name](sum_over_ranks)(W, c, xs)
        given = [vfn.shard(x, mesh, spec) for x, spec in ((W, P()), (c, P("i")), (xs, P()))]
        for check in (True, False):
            mapped = vfn.shard_map(inside, mesh=mesh, in_specs=(P(), P("i"), P()), out_specs=P(), check_vma=check)
            closing = lambda w, c, xs, check=check: vfn.shard_map(
                lambda c, xs: inside(w, c, xs), mesh=mesh, in_specs=(P("i"), P()), out_specs=P(), check_vma=check
            )(c, xs)
            for f in (mapped, closing):
                runs.clear()
                jitted = vfn.jit(SECOND[name](f))
                assert_close(vfn.unshard(jitted(*given)), wanted, rtol=1e-10, atol=1e-10)
                assert rolled(jitted) >= 2
                assert len(runs) <= 5


def sum_over_ranks(w, c, xs):
    """`promoted_before` of both ranks, with one row of the carry each."""
    h = now = c @ w
    out = 0.0
    for x in xs:
        out = out + ((now * x) ** 2).sum()
        now = torch.tanh(now @ w + h + now.sum() * x)
    return out + (now**2).sum()


def loops_beside_sums(h, x, e):
    """Loops that communicate, beside collectives, none of which waits for another: only their turns keep them in order."""
    looped = vfn.fori_loop(0, 3, lambda i, h: h + h.sum(0), h)
    wide = torch.outer(e, e).exp().sum(0)
    again = vfn.fori_loop(0, 2, lambda i, h: h * 0.5 + (h * h).sum(0), x)
    return looped.sum(0), x.exp().sum(0) * x.exp().sum(0), wide, again.sum()


def test_ranks_meet_in_loops_and_beside_them_in_one_order() -> None:
    """Five rows over four ranks, of which the last holds none."""
    orders = []
    for rank in range(4):
        mesh = vfn.abstract_mesh((4,), ("a",), rank=rank)
        sizes = (5, 6), (5, 6), (16,)
        plan = vfn.jit(loops_beside_sums).lower(*(vfn.ShapeDtype(size, torch.float32, P("a"), mesh) for size in sizes))
        orders.append([(node.meta["line"], times) for node, times, _ in all_collectives(plan.graph)])
    assert {times for _, times in orders[0]} == {1, 2, 3}
    assert orders == [orders[0]] * 4


def mapped_pullbacks(mesh):
    """Of a loop and a choice over arrays with uneven shards, and of both in a body that communicates."""
    x, cts = XS[:5, :3], torch.stack([XS[:5, :3].cos(), XS[:5, :3].sin()])
    w, spec = W[:3, :3], P("i")
    step = lambda c, w, total: torch.tanh(c @ w) * total(c.sum()) + c
    rounds = lambda f, x: vfn.cond(XS[1, 1] > 0, f, torch.cos, vfn.scan(lambda c, _: (f(c), c), x, None, length=3)[0])
    f = lambda w, x, kept=vfn.with_sharding: rounds(lambda c: kept(step(c, w, lambda s: 1), spec), x)
    entries = lambda f: lambda w, x, cts: vfn.vmap(vfn.vjp(f, w, x)[1])(cts)
    wanted = entries(lambda w, x: f(w, x, lambda x, _: x))(w, x, cts)
    given = [vfn.shard(leaf, mesh, one) for leaf, one in ((w, P()), (x, spec), (cts, P(None, "i")))]
    jitted = vfn.jit(entries(f))
    assert_close(vfn.unshard(jitted(*given)), wanted, rtol=1e-12, atol=1e-12)
    assert rolled(jitted) == 2

    total = lambda s: vfn.psum(s, "i")
    local = lambda w, x: total((rounds(lambda c: step(c, w, total), x) ** 2).sum())
    within = vfn.shard_map(entries(local), mesh=mesh, in_specs=(P(), spec, P()), out_specs=(P(), P(None, "i")))
    given = given[0], vfn.shard(XS[:4, :3], mesh, spec), XS[0]
    jitted = vfn.jit(within)
    assert_close(vfn.unshard(jitted(*given)), vfn.unshard(within(*given)), rtol=1e-12, atol=1e-12)
    assert rolled(jitted) == 2


def test_a_pullback_that_is_mapped() -> None:
    f = lambda x: vfn.scan(lambda c, y: (torch.tanh(c * y + x), c * x), x, XS)[0]
    assert_close(vfn.jit(torch.func.jacrev(f))(XS[0]), torch.func.jacfwd(f)(XS[0]))
    shared = lambda x: vfn.plan.shared(lambda c: torch.tanh(c * x))(x)
    rows = lambda x: vfn.vmap(vfn.vjp(shared, x)[1])(torch.eye(4, dtype=F))
    assert_close(vfn.jit(rows)(XS[0]), rows(XS[0]))
    with vfn.simulate(2):
        mapped_pullbacks(vfn.make_mesh((2,), ("i",)))


def of_all(w, c, xs, scan=vfn.scan, hidden=False, kept=lambda c: c):
    """A loop that closes over a weight, and over what was computed of it; `hidden`: once where no mode sees it."""
    h = w.sin()

    def step(c, x):
        with torch._C.DisableTorchFunction() if hidden else contextlib.nullcontext():
            y = c @ w
        return kept(torch.tanh(y + c @ h + x * w[0])), c * x

    last, ys = scan(step, c, xs)
    return (last**2).sum() + (ys * w.sum()).sin().sum()


def plain_scan(f, c, xs):
    rows = []
    for x in xs:
        c, y = f(c, x)
        rows.append(y)
    return c, torch.stack(rows)


def by_grads(order):
    def of(f):
        for _ in range(order):
            f = lambda w, f=f: (torch.func.grad(f)(w) * w.cos()).sum()
        return torch.func.grad(f)

    return of


NESTED = {  # with the calls of loops in the plan
    "grad grad": (by_grads(1), 4),
    "grad grad grad": (by_grads(2), 8),
    "jacrev": (lambda f: torch.func.jacrev(lambda w: f(w) * w), 2),
    "hessian": (torch.func.hessian, 2),
    "grad jacrev": (lambda f: torch.func.grad(lambda w: (torch.func.jacrev(f)(w) * w.cos()).sum()), 4),
    "vmap grad grad": (lambda f: lambda w: torch.func.vmap(by_grads(1)(f))(torch.stack([w, 2 * w])), 4),
}


@pytest.mark.parametrize("name", NESTED)
def test_transforms_of_torch_func_in_each_other(name: str) -> None:
    """When the inner one is over, what a body closes over counts for its derivative all the same."""
    transform, calls = NESTED[name]
    wanted = transform(lambda w: of_all(w, XS[0], XS, plain_scan))(W)
    jitted = vfn.jit(transform(lambda w: of_all(w, XS[0], XS)))
    assert_close(jitted(W), wanted, rtol=1e-10, atol=1e-10)
    assert rolled(jitted) == calls
    if name in ("grad grad", "jacrev"):
        hidden = vfn.jit(transform(lambda w: of_all(w, XS[0], XS, hidden=True)))
        assert_close(hidden(W), wanted, rtol=1e-10, atol=1e-10)


def test_transforms_of_torch_func_in_each_other_over_arrays() -> None:
    wanted = by_grads(1)(lambda w: of_all(w, XS[:5], XS, plain_scan))(W)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        w, c = vfn.shard(W, mesh, P(None, "i")), vfn.shard(XS[:5], mesh, P("i"))
        jitted = vfn.jit(by_grads(1)(lambda w: of_all(w, c, XS, kept=lambda c: vfn.with_sharding(c, P("i")))))
        assert_close(vfn.unshard(jitted(w)), wanted, rtol=1e-10, atol=1e-10)
        assert rolled(jitted) == 4


def test_a_pullback_in_forward_mode_runs_as_written() -> None:
    """What a `jvp` has wrapped autograd's own backward pass does not follow into calls of a plan."""

    def tangent(x, ct):
        back = vfn.vjp(lambda x: vfn.cond(x[0] > 0, torch.sin, torch.cos, x), x)[1]
        return vfn.jvp(lambda ct: back(ct)[0] * ct, (ct,), (ct.cos(),))

    with pytest.warns(UserWarning, match="runs as written"):
        assert_close(vfn.jit(tangent)(XS[0], XS[1]), tangent(XS[0], XS[1]))


def test_shapes_of_a_loop_are_those_of_one_iteration() -> None:
    runs = []

    def f(w, c, xs):
        def step(c, x):
            runs.append(None)
            return body(w)(c, x)[0], (c * x, c.sum() > 0)

        return vfn.scan(step, c, xs)

    def initial(key):
        def step(key, _):
            runs.append(None)
            key, now = vfn.random.split(key)
            return key, vfn.random.normal(now, (4, 6))

        return vfn.scan(step, key, None, length=40)[1]

    entries = lambda *a: vfn.vmap(f, (None, 0, None))(a[0], torch.stack([a[1], a[1]]), a[2])
    slopes = lambda *a: vfn.grad(lambda w: f(w, *a[1:])[0].sum())(a[0])
    for g in (f, entries, slopes):
        runs.clear()
        found = vfn.tree.leaves(vfn.eval_shape(g, W, XS[0], XS))
        assert len(runs) <= 2
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in vfn.tree.leaves(g(W, XS[0], XS))]
    with vfn.simulate(2):
        mesh, key = vfn.make_mesh((2,), ("i",)), vfn.random.key(0)
        runs.clear()
        assert vfn.init(initial, key, spec=P(None, "i"), mesh=mesh, abstract=True).shape == (40, 4, 6)
        assert len(runs) == 1
        assert_close(vfn.unshard(vfn.init(initial, key, spec=P(None, "i"), mesh=mesh)), initial(key), rtol=0, atol=0)


def test_entries_with_a_name_and_in_bodies() -> None:
    entries = torch.stack([XS[0], XS[0].cos(), 2 * XS[0], XS[0].sin()])
    among = lambda w, c, xs: vfn.scan(lambda c, x: (torch.tanh(c @ w + x * vfn.psum(c, "b")), c * x), c, xs)
    wanted = vfn.vmap(among, (None, 0, None), axis_name="b")(W, entries, XS)
    plain = vfn.vmap(scanned, (None, 0, None))(W, entries, XS)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        given = W, vfn.shard(entries, mesh, P("i")), XS
        named = same_as_eager(vfn.vmap(among, (None, 0, None), axis_name="b"), *given, loops=1, exact=False)
        assert_close(vfn.unshard(named(*given)), wanted, rtol=1e-12, atol=1e-12)
        kept = lambda w, c, xs: vfn.scan(lambda c, x: (vfn.with_sharding(body(w)(c, x)[0], P()), c * x), c, xs)
        spread = same_as_eager(vfn.vmap(kept, (None, 0, None), spmd_axis_name="i"), *given, loops=1)
        assert spread(*given)[0].spec == P("i")
        specs = P("i"), P(None, "i")
        for check in (True, False):
            mapped = vfn.shard_map(inside, mesh=mesh, in_specs=(P(), *specs), out_specs=specs, check_vma=check)
            around = same_as_eager(vfn.vmap(mapped, (None, 0, None)), W, entries, XS, loops=1)
            assert_close(vfn.unshard(around(W, entries, XS)), plain)
            within = vfn.shard_map(
                vfn.vmap(inside, (None, 0, None)),
                mesh=mesh,
                in_specs=(P(), P(None, "i"), P(None, "i")),
                out_specs=(P(None, "i"), P(None, None, "i")),
                check_vma=check,
            )
            same_as_eager(vfn.grad(lambda w, f=within: total(f(w, entries, XS))), W, loops=2, exact=False)


def test_forms_of_carries_settle() -> None:
    """What is carried comes to differ between entries, or to have tangents, in turns."""

    def f(x):
        step = lambda c, _: ((c[1] * 2, c[2] + 1, c[3].cos(), c[3] * x, c[4]), (c[0], c[4], 1))
        return vfn.scan(step, (XS[0], XS[1], XS[2], XS[3], XS[4]), None, length=6)

    same_as_eager(vfn.vmap(f), XS, loops=1, exact=False)
    same_as_eager(vfn.vmap(vfn.vmap(f)), XS.view(5, 4, 1), loops=1, exact=False)
    same_as_eager(lambda x: vfn.jvp(f, (x,), (x.sin(),)), XS[1], loops=1, exact=False)
    same_as_eager(lambda x: vfn.vmap(lambda t: vfn.jvp(f, (x,), (t,))[1])(XS.cos()), XS[1], loops=1, exact=False)
    twice = lambda x: vfn.jvp(lambda x: vfn.jvp(f, (x,), (x.sin(),)), (x,), (XS[2],))
    same_as_eager(twice, XS[1], loops=1, exact=False)


def inside(w, c, xs):
    def step(c, x):
        whole = vfn.all_gather(c, "i", axis=0, tiled=True)
        part = vfn.dynamic_slice(w, [0, 2 * vfn.axis_index("i")], [4, 2])
        return torch.tanh(whole @ part + x), c * x

    return vfn.scan(step, c, xs)


@pytest.mark.parametrize("check", [True, False])
def test_bodies_and_the_collectives_in_them(check: bool) -> None:
    wanted = vfn.grad(lambda w: total(by_hand(w, XS[0], XS)))(W)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        specs = P("i"), P(None, "i")
        mapped = vfn.shard_map(inside, mesh=mesh, in_specs=(P(), *specs), out_specs=specs, check_vma=check)
        given = [vfn.shard(x, mesh, spec) for x, spec in zip((W, XS[0], XS), (P(), *specs), strict=True)]
        jitted = vfn.jit(vfn.grad(lambda w: total(mapped(w, *given[1:]))))
        assert_close(vfn.unshard(jitted(given[0])), wanted)
        with vfn.comm_log() as log:
            assert_close(vfn.unshard(jitted(given[0])), wanted)
        assert rolled(jitted) == 2
        said = jitted.lower(given[0]).comms()
        assert len(log) == len(said) == sum(times for _, times, _ in all_collectives(plan_of(jitted).graph))
        assert len(log) >= 2 * len(XS)
        assert log.bytes() == said.bytes()


def sizes(length):
    xs = torch.linspace(0, 1, length * 4, dtype=F).view(length, 4)
    jitted = vfn.jit(vfn.grad(loss(scanned, False)))
    jitted(W, XS[0], xs)
    graph = plan_of(jitted).recorded.graph
    return len(graph.nodes), [len(node.target.body.nodes) for node in loops(graph)], jitted.lower(W, XS[0], xs)


def test_what_is_recorded_does_not_grow_and_memory_does() -> None:
    few, many = sizes(3), sizes(300)
    assert few[:2] == many[:2]
    assert many[2].memory().peak > 50 * (few[2].memory().peak - few[2].memory().arguments)
    assert "300 times" in many[2].text()
    assert "300 times, from the last" in many[2].text(None)


def test_a_body_may_use_what_is_around_it() -> None:
    table = torch.linspace(1, 2, 4, dtype=F)

    def f(params, lr, x):
        def loss(params):
            scale = params["scale"] ** 2
            layer = lambda h, w: (torch.tanh(h @ w) * scale * table + params["bias"] * lr, None)
            return vfn.scan(layer, x, params["w"])[0].sum()

        return {name: p - lr * g for (name, p), g in zip(params.items(), vfn.grad(loss)(params).values(), strict=True)}

    params = {"bias": XS[1], "scale": XS[2], "w": torch.linspace(-1, 1, 3 * 16, dtype=F).view(3, 4, 4)}
    jitted = same_as_eager(f, params, 0.25, XS, loops=2)
    assert_close(jitted(params, 0.5, XS), f(params, 0.5, XS), rtol=0, atol=0)
    assert jitted.cache_info().records == 1


def test_loops_in_loops() -> None:
    def f(w, x):
        inner = lambda c, w: (torch.sin(c @ w), c.sum() * c)
        outer = lambda c, x: (lambda out: (out[0] * c.cos(), out[1] * x))(vfn.scan(inner, c + x, w))
        last, ys = vfn.scan(outer, x[0], x)
        return (last * last).sum() + (ys**2).sum()

    w = torch.linspace(-1, 1, 3 * 16, dtype=F).view(3, 4, 4)
    same_as_eager(f, w, XS, loops=1)
    same_as_eager(vfn.grad(f, (0, 1)), w, XS, loops=2, exact=False)
    same_as_eager(vfn.grad(vfn.remat(f), (0, 1)), w, XS, exact=False)


def test_remat_in_a_body_keeps_its_arguments_alone() -> None:
    def f(layer):
        return vfn.jit(vfn.grad(lambda w, x: (vfn.scan(lambda h, w: (layer(h, w), None), x, w)[0] ** 2).sum()))

    layer = lambda h, w: torch.tanh(torch.sin(torch.exp(h) @ w) + h).cos()
    w, x = torch.linspace(-1, 1, 6 * 16, dtype=F).view(6, 4, 4), torch.linspace(-1, 1, 400, dtype=F).view(100, 4)
    kept, again = f(layer), f(vfn.remat(layer))
    assert_close(kept(w, x), again(w, x), rtol=0, atol=0)
    assert again.lower(w, x).memory().peak < 0.6 * kept.lower(w, x).memory().peak


def test_a_training_loop_in_a_loop() -> None:
    def train(params, batches):
        def step(state, batch):
            params, key = state
            key, now = vfn.random.split(key)
            noise = vfn.random.normal(now, batch.shape, dtype=F)
            value, g = vfn.value_and_grad(lambda p: ((torch.tanh(batch @ p["w"]) + p["b"] + noise) ** 2).mean())(params)
            return ({name: params[name] - 0.1 * g[name] for name in params}, key), value

        return vfn.scan(step, (params, vfn.random.key(1)), batches)

    batches = torch.linspace(-1, 1, 5 * 12, dtype=F).view(5, 3, 4)
    (params, _), values = train({"w": W, "b": XS[0]}, batches)
    jitted = vfn.jit(train)
    for _ in range(2):
        (found, _), losses = jitted({"w": W, "b": XS[0]}, batches)
        assert_close((found, losses), (params, values), rtol=0, atol=0)
    assert rolled(jitted) == 1


def test_carries_of_all_kinds() -> None:
    def f(x):
        def step(c, i):
            swapped = {
                "a": c["b"] * 2,
                "b": c["a"] + i,
                "same": c["same"],
                "n": c["n"] + 1,
                "half": c["half"] * 0.5,
                "t": c["t"].clone(),
            }
            return swapped, (c["a"], c["same"], c["n"])

        init = {"a": x, "b": x.flip(0), "same": x.exp(), "n": 0, "half": x.bfloat16(), "t": x.view(2, 2).t()}
        return vfn.scan(step, init, torch.arange(4))

    same_as_eager(f, XS[0], loops=1)
    grads = vfn.grad(
        lambda x: sum((leaf.double() ** 2).sum() for leaf in (f(x)[0]["a"], f(x)[1][1], f(x)[0]["half"], f(x)[1][0]))
    )
    same_as_eager(grads, XS[0], exact=False)


def test_a_carry_that_is_a_slice_or_an_argument_is_its_own_memory() -> None:
    def f(c, xs):
        last, _ = vfn.scan(lambda c, x: (x, None), c, xs)
        both, _ = vfn.scan(lambda c, x: ((c[0] + x, c[0] + x), None), (c, c), xs)
        kept, _ = vfn.scan(lambda c, x: (c, None), c, xs)
        return last, both, kept

    jitted = same_as_eager(f, XS[0], XS)
    xs, c = XS.clone(), XS[0].clone()
    last, (one, other), kept = jitted(c, xs)
    for x in (last, one, other, kept):
        x.zero_()
    assert_close((xs, c), (XS, XS[0]), rtol=0, atol=0)


def test_donated_arguments() -> None:
    def f(w, c, xs):
        g = vfn.grad(loss(scanned, False), (0, 1, 2))(w, c, xs)
        return w - g[0], c - g[1], xs - g[2]

    wanted = f(W, XS[0], XS)
    jitted = vfn.jit(f, donate_argnums=(0, 1, 2))
    for _ in range(2):
        assert_close(jitted(W.clone(), XS[0].clone(), XS.clone()), wanted, rtol=0, atol=0)
    assert len(jitted.lower(W.clone(), XS[0].clone(), XS.clone()).donated) == 3


def test_what_is_kept_from_a_body_is_recorded_for_each_iteration() -> None:
    def f(xs):
        seen = []

        def step(c, x):
            seen.append(c * x)
            return c + x, None

        last, _ = vfn.scan(step, torch.zeros(4, dtype=F), xs)
        return last, seen[-1]

    wanted = f(XS)
    jitted = vfn.jit(f)
    for _ in range(2):
        assert_close(jitted(XS), wanted, rtol=0, atol=0)
    assert rolled(jitted) == 0


def test_a_value_that_is_read_in_a_body_runs_as_written() -> None:
    jitted = vfn.jit(
        lambda xs: vfn.scan(lambda c, x: (c + x if x.sum() > 2 else c - x, None), torch.zeros(4, dtype=F), xs)[0]
    )
    with pytest.warns(UserWarning, match="a value is read in Python"):
        found = jitted(XS)
    wanted = sum(x if x.sum() > 2 else -x for x in XS)
    assert_close(found, wanted)


def test_prints_of_each_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    def f(xs):
        def step(c, x):
            vfn.debug_print("c is {}", c)
            return c + x, None

        return vfn.scan(step, torch.tensor(0), xs)[0]

    jitted = vfn.jit(f)
    for _ in range(2):
        assert jitted(torch.arange(3)) == 3
        assert capsys.readouterr().out.split("\n")[:3] == ["c is 0", "c is 0", "c is 1"]
    assert rolled(jitted) == 1


def on_gloo_ranks() -> list[str]:
    """What goes wrong on a real rank."""
    mesh = vfn.make_mesh((2,), ("i",))
    wanted = vfn.value_and_grad(loss(by_hand, False), (0, 1, 2))(W, XS[0], XS)
    wrong = []
    for layout, specs in LAYOUTS.items():
        given = [vfn.shard(x, mesh, spec) for x, spec in zip((W, XS[0], XS), specs, strict=True)]

        def settled(w, c, xs, reverse=False, goal=specs[1]):
            keeps = lambda c, x: (vfn.with_sharding(body(w)(c, x)[0], goal), c * x)
            return vfn.scan(keeps, c, xs)

        jitted = vfn.jit(vfn.value_and_grad(loss(settled, False), (0, 1, 2)))
        for _ in range(2):
            assert_close(vfn.unshard(jitted(*given)), wanted, rtol=1e-12, atol=1e-12)
        if rolled(jitted) != 2:
            wrong.append(f"{layout} is unrolled")
        for name in ("gradient of a gradient", "gradients of entries") if layout == "split" else ():
            again = vfn.jit(AGAIN[name](loss(settled, False)))
            found, goal = (
                (vfn.unshard(again(*given)) for _ in range(2)),
                AGAIN[name](loss(by_hand, False))(W, XS[0], XS),
            )
            assert_close(list(found), [goal] * 2, rtol=1e-11, atol=1e-11)
            if rolled(again) < 2:
                wrong.append(f"{name} is unrolled")
    specs = P("i"), P(None, "i")
    given = [vfn.shard(x, mesh, spec) for x, spec in zip((W, XS[0], XS), (P(), *specs), strict=True)]
    for check in (True, False):
        mapped = vfn.shard_map(inside, mesh=mesh, in_specs=(P(), *specs), out_specs=specs, check_vma=check)
        jitted = vfn.jit(vfn.grad(lambda w, mapped=mapped: total(mapped(w, *given[1:]))))
        with vfn.comm_log() as log:
            found = [vfn.unshard(jitted(given[0])) for _ in range(2)]
        assert_close(found, [vfn.grad(lambda w: total(by_hand(w, XS[0], XS)))(W)] * 2)
        if rolled(jitted) != 2 or len(log) < 4 * len(XS):
            wrong.append(f"the body with check_vma={check} is unrolled")
    mapped_pullbacks(mesh)

    each = lambda n: vfn.while_loop(lambda c: c[0] < n[0], lambda c: (c[0] + 1, c[1] * 2), (0, 1))[1][None]
    ends = vfn.shard_map(each, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(
        vfn.shard(torch.tensor([3, 5]), mesh, P("i"))
    )
    assert vfn.unshard(ends).tolist() == [8, 32]
    flags = vfn.shard(torch.tensor([True, False]), mesh, P("i"))
    chosen = vfn.shard_map(
        lambda p, x: vfn.cond(p[0], torch.sin, torch.cos, x), mesh=mesh, in_specs=P("i"), out_specs=P("i")
    )(flags, vfn.shard(torch.ones(2), mesh, P("i")))
    assert_close(vfn.unshard(chosen), torch.stack([torch.ones(()).sin(), torch.ones(()).cos()]))
    sums_of_slices(mesh)
    return wrong


def sums_of_slices(mesh) -> None:
    """Slices that are whole on all ranks: their gradients are summed over the ranks once, behind the loops, as op by op."""
    w, xs = vfn.shard(torch.stack([W, W.cos(), W.sin()]), mesh, P()), vfn.shard(XS, mesh, P("i"))
    layers = lambda x, w: vfn.scan(lambda x, w: (torch.tanh(x @ w), None), x, w)[0]
    step = vfn.grad(lambda w, xs: layers(layers(xs, w), w).square().sum())
    jitted = vfn.jit(step)
    assert torch.equal(vfn.unshard(jitted(w, xs)), vfn.unshard(step(w, xs)))
    with vfn.comm_log() as log:
        jitted(w, xs)
    assert [(r.op, r.bytes) for r in log] == [("all_reduce", w.nbytes)]
    if not context.simulated():  # there sums are made over what is summed
        with vfn.use_mesh(mesh), accounting([w.to_local(), xs.to_local()]) as account:
            plan_of(jitted).taking([w, xs], "step", "")
        assert account.peak == jitted.lower(w, xs).memory().peak


def test_gradients_of_whole_slices_are_summed_once() -> None:
    with vfn.simulate(2):
        sums_of_slices(vfn.make_mesh((2,), ("i",)))


def test_on_gloo_ranks(gloo) -> None:
    assert gloo(2, on_gloo_ranks) == [[], []]


@vfn.custom_vjp
def square(x):
    return x * x


square.defvjp(lambda x: (x * x, x), lambda x, ct: (3 * ct * x,))  # no derivative: it can be told apart
LAYERS = torch.linspace(-1, 1.2, 3 * 16, dtype=F).view(3, 4, 4)


def last(step, init=XS, xs=LAYERS, **more):
    return vfn.scan(step, init, xs, **more)[0]


DIFFERENTIATED = {
    "a custom derivative": (lambda w: last(lambda h, w: (square(h @ w), None), xs=w).sum(), LAYERS),
    "one of what is around": (
        lambda w: last(lambda h, _: (torch.tanh(square(w) * h), None), XS[0], None, length=4).sum(),
        XS[1],
    ),
    "stop_gradient": (
        lambda w: last(lambda h, _: (torch.tanh(w * vfn.stop_gradient(h) + w), None), XS[0], None, length=4).sum(),
        XS[1],
    ),
    "writes": (lambda w: last(lambda h, w: ((h @ w).add_(1).mul_(2).tanh_(), None), xs=w).sum(), LAYERS),
    "several results": (
        lambda w: last(lambda h, w: (torch.nn.functional.layer_norm(h @ w, (4,)), None), xs=w).pow(3).sum(),
        LAYERS,
    ),
    "a value and what it is of": (
        lambda v: last(
            lambda h, _, w=v**2, u=last(lambda h, _: (torch.tanh(h * v), None), v, None, length=2): (
                torch.tanh(h * w * u + v),
                None,
            ),
            XS[0],
            None,
            length=4,
        ).sum(),
        XS[1],
    ),
    "what it goes over, around it": (
        lambda w: last(lambda h, x: (torch.tanh(h @ x + w.sum((0, 1))), None), xs=w).sum(),
        LAYERS,
    ),
    "the first carry, around it": (lambda x: last(lambda h, w: (torch.tanh(h @ w + x), None), x).sum(), XS),
    "an int in the carry": (
        lambda w: last(lambda c, w: ((torch.tanh(c[0] @ w) * c[1], c[1] + 1), None), (XS, 1), w)[0].sum(),
        LAYERS,
    ),
    "fori_loop": (lambda w: vfn.fori_loop(0, 4, lambda i, h: torch.tanh(h @ w) * i, XS).sum(), W),
    "map": (lambda w: vfn.lax.map(lambda w: torch.linalg.inv(w + 3 * torch.eye(4, dtype=F)).sum(), w).sum(), LAYERS),
    "bfloat16": (
        lambda w: last(lambda h, w: (torch.tanh(h @ w.bfloat16()), None), XS.bfloat16(), w).double().sum(),
        LAYERS,
    ),
    "what has no gradient": (
        lambda w: vfn.scan(lambda h, w: (torch.tanh(h @ w), (h * 2, h.argmax())), XS, w)[1][0].sum(),
        LAYERS,
    ),
    "an expanded carry": (lambda b: last(lambda h, w: (torch.tanh(h @ w), None), b.expand(5, 4)).sum(), XS[0]),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_through(name: str) -> None:
    f, x = DIFFERENTIATED[name]
    same_as_eager(vfn.grad(f), x, loops=4 if name == "a value and what it is of" else 2, exact=False)


def test_layers_whose_weights_are_gathered_in_the_body() -> None:
    for n in (2, 3):  # three do not divide the weights
        with vfn.simulate(n):
            mesh = vfn.make_mesh((n,), ("i",))
            x, w = vfn.shard(XS, mesh, P("i")), vfn.shard(LAYERS, mesh, P(None, None, "i"))
            f = lambda w, x=x: last(lambda h, w: (torch.tanh(h @ vfn.with_sharding(w, P())), None), x, w).sum()
            jitted = same_as_eager(vfn.grad(f), w, loops=2, exact=False)
            kinds = [record.op for record in jitted.lower(w).comms()]
            assert kinds.count("all_gather") >= 3


def test_gradients_that_are_expanded() -> None:
    """What comes back of a sum repeats one entry; what comes out of a loop in its place does not."""
    step = lambda w: lambda c, x: (torch.tanh(c @ w + x), c.sum())
    through = lambda c, w: sum(part.sum() for part in vfn.scan(step(w), c.expand(3, 4), XS))
    twice = lambda c, w: vfn.scan(lambda c, x: (vfn.scan(step(w), c * x, XS)[0].mean(0).expand(3, 4), None), c, XS)[0]
    bias = lambda c, w: vfn.scan(lambda h, x: (torch.tanh(h @ w) + c, None), XS[:3], XS)[0].sum()
    f = lambda c, w: through(c, w) + bias(c, w) + vfn.scan(step(w), c, XS)[0].sum() + twice(c.expand(3, 4), w).sum()
    wanted = vfn.grad(f, (0, 1))(XS[0], W)
    for n in (1, 3):
        with vfn.simulate(n):
            mesh = vfn.make_mesh((n,), ("i",))
            given = vfn.shard((XS[0], W), mesh, P())
            jitted = vfn.jit(vfn.grad(f, (0, 1)))
            for _ in range(2):
                assert_close(vfn.unshard(jitted(*given)), wanted, rtol=1e-12, atol=1e-12)


@vfn.custom_vjp
def _steep(x):
    return x.sin()


_steep.defvjp(lambda x: (x.sin(), x), lambda x, g: (g * x.cos() * 1.5,))


@vfn.custom_jvp
def _steep_tangent(x):
    return x.sin()


_steep_tangent.defjvp(lambda primals, tangents: (primals[0].sin(), tangents[0] * primals[0].cos() * 1.5))


@pytest.mark.filterwarnings("ignore:jit. g runs as written", "ignore:jit. f runs as written")  # the choice
@pytest.mark.parametrize("rule", [_steep, _steep_tangent])
@pytest.mark.parametrize("kind", ["scan", "cond", "remat"])
def test_third_derivatives_of_rules_that_are_no_derivatives(rule, kind):
    def f(x):
        if kind == "cond":
            return vfn.cond(x > 0, lambda v: rule(rule(v)), torch.neg, x)
        loop = lambda x: vfn.scan(lambda c, _: (rule(c), None), x, None, length=2)[0]
        return (vfn.remat(loop) if kind == "remat" else loop)(x)

    third = vfn.grad(vfn.grad(vfn.grad(f)))
    x = torch.tensor(0.3, dtype=torch.float64)
    torch.testing.assert_close(vfn.jit(third)(x), third(x))
