"""Branches and loops of unknown length under `jit`: one call in the plan, with each body recorded once; eager's numbers."""

import contextlib
from functools import partial

import pytest
import torch
from test_control_flow import XS, F, W
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.plan.ir import graph as plans
from vescale_fn.plan.ir.nested import all_collectives, nested

YES, NO = torch.tensor(1.0), torch.tensor(-1.0)


def same_as_eager(f, *calls, tolerance=0.0):
    """A jitted function gives for each of some arguments what it gives eagerly, of one plan."""
    jitted = vfn.jit(f)
    for given in (*calls, *calls):
        assert_close(vfn.unshard(jitted(*given)), vfn.unshard(f(*given)), rtol=tolerance, atol=tolerance)
    assert jitted.cache_info()[:3] == (2 * len(calls) - 1, 1, 0)
    return jitted


def calls_of(jitted):
    (plan,) = jitted._plans.values()
    return [node.target.name for node in nested(plan.graph)]


def tanh_or_cos(p, w, x):
    """Branches with results of which one is a number, and with an operand, something around, and views."""
    y = x @ w
    true = lambda y: {"a": torch.tanh(y) * w.sum(), "b": (y.sum(), y.t())}
    false = lambda y: {"a": y.sum().expand_as(y), "b": (2, y.t().cos())}
    found = vfn.cond(p.sum() > 0, true, false, y)
    return (found["a"] ** 2).sum() + found["b"][0] * 3 + (found["b"][1] * y.t()).sum() + y.sum()


def three_ways(p, w, x):
    inner = lambda x: vfn.cond(x.sum() > 0, lambda: x * w.sum(), lambda: x.exp())
    return (vfn.switch(p.int() + 1, [lambda x: x @ w, torch.sin, inner], x) ** 3).sum()


def a_loop_in_a_branch(p, w, x):
    looped = lambda x: vfn.scan(lambda c, _: (torch.tanh(c @ w), c.sum()), x, None, length=3)
    last, ys = vfn.cond(p > 0, looped, lambda x: (x * 2, torch.zeros(3, dtype=F)), x)
    return (last**2).sum() + (ys**2).sum()


def a_branch_in_a_loop(p, w, x):
    def step(c, i):
        now = vfn.cond(c.sum() * p > 0, lambda c: torch.tanh(c @ w), lambda c: c.cos() * x, c)
        return now, now.sum()

    last, ys = vfn.scan(step, x, torch.arange(4))
    return (last**2).sum() + (ys**2).sum()


def as_they_come(p, w, x):
    y = x @ w
    one, other = vfn.cond(p > 0, lambda y: (y, y), lambda y: (x, y), y)
    return (one * other).sum()


TRANSFORMS = {
    "value": lambda f: f,
    "grad": lambda f: vfn.grad(f, (1, 2)),
    "vjp": lambda f: lambda p, w, x: vfn.vjp(lambda *a: f(p, *a), w, x)[1](torch.full((), 2.0, dtype=F)),
    "remat": lambda f: lambda p, w, x: vfn.value_and_grad(vfn.remat(lambda *a: f(p, *a)), (0, 1))(w, x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("f", [tanh_or_cos, three_ways, a_loop_in_a_branch, a_branch_in_a_loop, as_they_come])
def test_under_transforms(f, name: str) -> None:
    calls = [(p, W, sign * XS) for p in (YES, NO, 0 * YES) for sign in (1, -1)]
    jitted = same_as_eager(TRANSFORMS[name](f), *calls, tolerance=1e-12)
    assert len(calls_of(jitted)) == {"value": 1, "remat": 3}.get(name, 2)


@pytest.mark.parametrize("layout", [P(), P("i"), P(None, "i")])
@pytest.mark.parametrize("n", [2, 3])
def test_arrays(layout: P, n: int) -> None:
    def f(w, x):
        true = lambda x: vfn.with_sharding((x @ w).sum(0), P())
        found = vfn.cond(x.sum() > 0, true, lambda x: vfn.with_sharding(x.sum(0) * w.sum(), P()), x)
        doubled = vfn.while_loop(lambda c: (c * c).sum() < 500, lambda c: c * 2, vfn.stop_gradient(x))
        return (found**2).sum() + (doubled * x).sum()

    with vfn.simulate(n):
        mesh = vfn.make_mesh((n,), ("i",))
        w, x = vfn.shard(W, mesh, P("i")), vfn.shard(XS, mesh, layout)
        jitted = same_as_eager(vfn.value_and_grad(f, (0, 1)), (w, x), (w, -x), tolerance=1e-12)
        assert_close(vfn.unshard(jitted(w, x)), vfn.value_and_grad(f, (0, 1))(W, XS))
        assert [g.spec for g in jitted(w, x)[1]] == [P("i"), layout]


def inside(x, w):
    """A predicate out of a collective, collectives in branches of different number, a loop as long as a sum says."""
    total = vfn.psum(x.sum(), "i")
    two = lambda x: vfn.psum(torch.sin(vfn.psum(x, "i") @ w) * x, "i").sum(0)
    chosen = vfn.cond(total > 20, lambda x: vfn.psum(x.sum(0) * w.sum(), "i"), two, x)
    more = lambda c: vfn.psum(c[0].sum(), "i") < 100
    grown, count = vfn.while_loop(more, lambda c: (c[0] * 2, c[1] + 1), (vfn.stop_gradient(x), 0))
    return chosen, grown, count


@pytest.mark.parametrize("check", [True, False])
def test_bodies_and_the_collectives_in_them(check: bool) -> None:
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        mapped = vfn.shard_map(inside, mesh=mesh, in_specs=(P("i"), P()), out_specs=(P(), P("i"), P()), check_vma=check)
        x, w = vfn.shard(XS[:4], mesh, P("i")), vfn.shard(W, mesh, P())
        jitted = same_as_eager(mapped, (x, w), (3 * x, w), tolerance=1e-12)
        loss = lambda x, w: (mapped(x, w)[0] ** 2).sum()
        same_as_eager(vfn.grad(loss, (0, 1)), (x, w), (3 * x, w), tolerance=1e-12)
        log = jitted.lower(x, w).comms()
        assert len(log) == len(list(all_collectives(jitted._plans[next(iter(jitted._plans))].graph)))
        if check:  # the two ways of a choice, and of a loop one time; without types simulated ranks go both ways
            false = ["psum, if false_fun is chosen"] * 2
            assert [x.why for x in log] == ["psum", "psum, if true_fun is chosen", *false, "psum, each time"]


def collatz(n):
    return vfn.while_loop(
        lambda c: c[0] != 1, lambda c: (torch.where(c[0] % 2 == 0, c[0] // 2, 3 * c[0] + 1), c[1] + 1), (n, 0)
    )[1]


def test_while_loops() -> None:
    jitted = same_as_eager(collatz, *((torch.tensor(n),) for n in (1, 6, 7, 27)))
    assert calls_of(jitted) == ["while_loop"]
    root = lambda a: vfn.while_loop(
        lambda s: (s[0] - s[1]).abs() > 1e-9, lambda s: ((s[0] + a / s[0]) / 2, s[0]), (a, a + 1)
    )
    same_as_eager(root, *((torch.tensor(a, dtype=F),) for a in (9.0, 2.0, 1e6)))
    numbers = torch.tensor([1, 6, 7, 27])
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("i",))
        for check in (True, False):  # each rank stops by itself
            each = lambda n: collatz(n[0])[None]
            mapped = vfn.shard_map(each, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check)
            same_as_eager(mapped, (vfn.shard(numbers, mesh, P("i")),), (vfn.shard(numbers.flip(0), mesh, P("i")),))


def test_what_nobody_needs_of_a_while_loop_is_left_out() -> None:
    def f(n, w, x):
        def step(c):
            unused = torch.exp(c["unused"] @ w)
            return {
                "i": c["i"] + 1,
                "x": c["y"] * 2,
                "y": c["x"],
                "w": c["w"],
                "unused": unused + c["only for it"],
                "only for it": -x,
            }

        asks = lambda c: (c["i"] < n) & (c["w"].sum() < 1e9)
        last = vfn.while_loop(asks, step, {"i": 0, "x": x, "y": -x, "w": w, "unused": x, "only for it": x})
        return last["x"], last["w"]

    jitted = same_as_eager(f, *((torch.tensor(n), W, XS) for n in (0, 1, 4)))
    (plan,) = jitted._plans.values()
    (node,) = nested(plan.graph)
    assert node.target.carry == 3
    assert not {"exp", "mm", "neg"} & {plans.name_of(x) for body in node.target.bodies for x in plans.calls(body)}
    tangents = lambda n, x: vfn.jvp(lambda x: f(n, W, x)[0], (x,), (x.cos(),))
    same_as_eager(tangents, *((torch.tensor(n), XS) for n in (0, 1, 4)), tolerance=1e-12)
    nobody = vfn.jit(lambda x: (vfn.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x), x.sin())[1])
    nobody(XS)
    assert calls_of(nobody) == []


def test_a_fori_loop_between_tensors() -> None:
    f = lambda n, x: vfn.fori_loop(0, n, lambda i, x: x * 2 + i, x)
    same_as_eager(f, *((torch.tensor(n), XS) for n in (0, 3, 7)))
    nested_ = lambda n, x: vfn.fori_loop(0, n, lambda i, x: vfn.fori_loop(i, n, lambda j, x: x + j, x), x)
    same_as_eager(nested_, *((torch.tensor(n), XS) for n in (0, 3, 7)))


def test_a_while_loop_has_no_gradient() -> None:
    f = lambda w, x: vfn.while_loop(lambda c: c[0].sum() < 9, lambda c: (c[0] * 2, c[1] + w.sum()), (x / 100, 0.0))
    jitted = vfn.jit(f)
    assert_close(jitted(W, XS), f(W, XS))
    for at, of in ((0, 1), (1, 0)):
        with pytest.raises(vfn.errors.TransformError, match="while_loop: it has no gradient"):
            vfn.jit(vfn.grad(lambda w, x, of=of: f(w, x)[of].sum(), at))(W, XS)
    assert vfn.jit(vfn.grad(lambda w, x: f(w, x)[0].sum()))(W, XS).abs().sum() == 0  # of which it makes no use


def test_draws_and_keys() -> None:
    def f(p, key):
        one = lambda key: vfn.random.normal(key, (3,))
        drawn = vfn.cond(p > 0, one, lambda key: vfn.random.uniform(vfn.random.split(key)[0], (3,)), key)
        step = lambda c: (vfn.random.split(c[0])[0], c[1] + vfn.random.uniform(c[0]))
        last, total = vfn.while_loop(lambda c: c[1] < 5, step, (key, 0.0))
        return drawn, total, vfn.random.bits(last, (2,))

    same_as_eager(f, *((p, vfn.random.key(seed)) for p in (YES, NO) for seed in (1, 2)))


def test_floats_are_inputs_in_branches() -> None:
    f = lambda p, lr: vfn.cond(p > 0, lambda: XS * lr, lambda: XS + 2 * lr)
    same_as_eager(f, (YES, 0.5), (NO, 0.25), (YES, 0.125))


def test_results_are_memory_of_their_own() -> None:
    f = lambda p, x: vfn.cond(p > 0, lambda: (x, x, x[0]), lambda: (x * 2, x, x[1]))
    g = lambda x: vfn.while_loop(lambda c: c[0].sum() < 9, lambda c: (c[1] * 2, c[0], c[0]), (x, x, x))
    for jitted, calls in ((same_as_eager(f, (YES, XS), (NO, XS)), [(YES,), (NO,)]), (same_as_eager(g, (XS,)), [()])):
        for more in calls:
            x = XS.clone()
            outs = jitted(*more, x)
            for i, out in enumerate(outs):
                out.fill_(i + 1)
            assert_close(x, XS, rtol=0, atol=0)
            assert [out.unique().tolist() for out in outs] == [[1], [2], [3]]


def test_donated_arguments() -> None:
    f = lambda p, x, w: vfn.cond(p > 0, lambda x: (x * 2, w + 1), lambda x: (x, w), x)
    jitted = vfn.jit(f, donate_argnums=(1, 2))
    for p in (YES, NO):
        assert_close(jitted(p, XS.clone(), W.clone()), f(p, XS, W), rtol=0, atol=0)


def test_prints_of_the_branch_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def f(p):
        def branch(name):
            return lambda: vfn.debug_print(name)

        vfn.cond(p > 0, branch("yes"), branch("no"))
        return vfn.while_loop(lambda c: c < 2, lambda c: (vfn.debug_print("again"), c + 1)[1], p)

    jitted = vfn.jit(f)
    for p, said in ((YES, "yes again"), (NO, "no again again again"), (YES, "yes again")):
        jitted(p)
        assert capsys.readouterr().out.split() == said.split()
    assert jitted.cache_info().records == 1


def test_what_is_shown() -> None:
    jitted = vfn.jit(vfn.grad(tanh_or_cos, 1))
    jitted(YES, W, XS)
    plan = jitted.lower(YES, W, XS)
    for words in ("true_fun: ", "false_fun: ", "-> "):
        assert words in plan.text(None)
    assert "true_fun" in plan.text(40)
    loop = vfn.jit(collatz).lower(torch.tensor(7))
    assert "as long as: carry, carry_1" in loop.text(None)
    assert "each time: carry, carry_1" in loop.text(None)


def test_memory_of_the_largest_branch() -> None:
    x = torch.ones(1000, dtype=F)
    peak = lambda true, false: vfn.jit(lambda p: vfn.cond(p > 0, true, false)).lower(YES).memory().peak
    large = lambda: (torch.outer(x, x).sin() + 1).sum()
    assert peak(large, large) == peak(lambda: x.sum(), large) == peak(large, lambda: x.sum()) >= 8e6
    # what the derivatives need of two branches has one place
    step = lambda x: torch.tanh(torch.sin(torch.exp(x)))
    grad = lambda false: vfn.jit(vfn.grad(lambda x, p: vfn.cond(p > 0, step, false, x).sum())).lower(x, YES)
    one, two = grad(lambda x: x).memory().peak, grad(lambda x: torch.cos(torch.sinh(torch.exp(x)))).memory().peak
    assert two <= one + 8 * 1000


def test_a_branch_that_reads_a_value_is_taken_while_recording() -> None:
    f = lambda n, x: vfn.cond(n > 0, lambda x: x if n > 3 else x * 2, torch.cos, x)
    jitted = vfn.jit(f)
    for n in (5, 2, -1, 5):  # a plan for each answer
        assert_close(jitted(torch.tensor(n), XS), f(torch.tensor(n), XS))
    assert jitted.cache_info()[:3] == (1, 3, 0)


def test_on_shapes_alone() -> None:
    found = vfn.eval_shape(tanh_or_cos, YES, W, XS)
    assert (found.shape, found.dtype) == ((), F)
    mesh = vfn.abstract_mesh((8,), ("i",))
    x, w = (vfn.ShapeDtype(shape, F, spec, mesh) for shape, spec in (((16, 4), P("i")), ((4, 4), P())))
    f = lambda x, w: vfn.cond(x.sum() > 0, lambda x: x @ w, lambda x: x * 2, x)
    assert f"{P('i')}" == f"{vfn.eval_shape(f, x, w).spec}"
    assert "true_fun" in vfn.jit(f).lower(x, w).text(None)


def test_saved(tmp_path) -> None:
    f = vfn.grad(lambda w, p, x: tanh_or_cos(p, w, x))
    g = lambda w, p, x: (f(w, p, x), collatz(p.long() + 5))
    vfn.save_plan(vfn.jit(g).lower(W, YES, XS), tmp_path / "plan")
    again = vfn.jit(g, plans=[vfn.load_plan(tmp_path / "plan")])
    for p in (YES, NO):
        assert_close(again(W, p, XS), g(W, p, XS), rtol=1e-12, atol=1e-12)
    assert again.cache_info()[:3] == (1, 0, 0)


def chosen(p, w, x):
    return vfn.cond(p > 0, lambda x: (x @ w, x.sum()), lambda x: (x.cos(), w.sum()), x)


def grown(w, x):
    return vfn.while_loop(lambda c: c[0].sum() < 100, lambda c: (c[0] * 2 + w.sum(), c[1] + 1), (x, 0))


LEVELS = {
    "jvp": lambda p, w, x: vfn.jvp(lambda x: chosen(p, w, x), (x,), (x * 2,)),
    "jvp of what is around": lambda p, w, x: vfn.jvp(lambda w: chosen(p, w, x), (w,), (w * 2,)),
    "vmap": lambda p, w, x: vfn.vmap(lambda x: chosen(p, w, x))(x),
    "vmap of what is around": lambda p, w, x: vfn.vmap(lambda w: chosen(p, w, x))(torch.stack([w, 2 * w])),
    "vmap of jvp": lambda p, w, x: vfn.vmap(lambda x: vfn.jvp(lambda x: chosen(p, w, x), (x,), (x * 2,)))(x),
    "grad of vmap": lambda p, w, x: vfn.grad(lambda w: vfn.vmap(lambda x: chosen(p, w, x))(x)[0].pow(2).sum())(w),
    "while, jvp": lambda p, w, x: vfn.jvp(lambda x: grown(w, x)[0], (x,), (x * 2,)),
    "while, jvp of what is around": lambda p, w, x: vfn.jvp(lambda w: grown(w, x)[0], (w,), (w * 2,)),
    "while, vmap": lambda p, w, x: vfn.vmap(lambda x: grown(w, x))(x),
    "while, vmap of jvp": lambda p, w, x: vfn.vmap(lambda x: vfn.jvp(lambda x: grown(w, x)[0], (x,), (x,)))(x),
    "while, vmap of vmap": lambda p, w, x: vfn.vmap(vfn.vmap(lambda x: grown(w, x)))(x[:4].view(2, 2, 4)),
    "in a loop, vmap": lambda p, w, x: vfn.vmap(lambda x: a_branch_in_a_loop(p, w, x))(torch.stack([x, -x])),
}


@pytest.mark.parametrize("name", LEVELS)
def test_under_vmap_and_jvp(name: str) -> None:
    same_as_eager(LEVELS[name], (YES, W, XS), (NO, W, XS), tolerance=1e-12)


def test_under_vmap_and_jvp_on_a_mesh() -> None:
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        x, w = vfn.shard(XS[:4], mesh, P("i")), vfn.shard(W, mesh, P())
        f = lambda p, w, x: vfn.cond(p > 0, lambda x: x @ w, lambda x: x.cos(), x)
        same_as_eager(lambda p, w, x: vfn.jvp(lambda x: f(p, w, x), (x,), (x * 2,)), (YES, w, x), (NO, w, x))
        same_as_eager(lambda p, w, x: vfn.vmap(lambda w: f(p, w, x))(torch.stack([w, 2 * w])), (YES, w, x), (NO, w, x))
        same_as_eager(lambda w, x: vfn.vmap(lambda x: grown(w, x)[0], 1, 1)(x), (w, x))
        doubled = lambda x: vfn.while_loop(lambda c: vfn.psum(c.sum(), "i") < 100, lambda c: c * 2, x)
        mapped = vfn.shard_map(vfn.vmap(doubled), mesh=mesh, in_specs=P(None, "i"), out_specs=P(None, "i"))
        same_as_eager(mapped, (vfn.shard(XS[:4], mesh, P(None, "i")),))


def squares(f):
    return lambda x: sum((g**2).sum() for g in f(x))


def in_a_scan(x, choice):
    return vfn.scan(lambda c, _: (choice(c), c.sum()), x, None, length=3)[0]


FURTHER = {
    "grad of grad": lambda f: vfn.grad(squares(vfn.grad(f))),
    "third order": lambda f: vfn.grad(squares(vfn.grad(squares(vfn.grad(f))))),
    "jvp of grad": lambda f: lambda x: vfn.jvp(vfn.grad(f), (x,), (x.cos(),))[1],
    "vmap of grad": lambda f: lambda x: vfn.vmap(vfn.grad(f))(torch.stack([x, 2 * x])),
    "grad of vmap": lambda f: vfn.grad(lambda x: vfn.vmap(vfn.grad(f))(torch.stack([x, 2 * x])).sum()),
    "torch.func.grad": torch.func.grad,
}


@pytest.mark.parametrize("around", [lambda x, choice: choice(x), in_a_scan])
@pytest.mark.parametrize("name", FURTHER)
def test_a_derivative_of_a_derivative_is_a_choice(name: str, around) -> None:
    """Its branches run those of the choice anew, and differentiate them."""

    def f(p, x):
        true = lambda x: torch.tanh(x * W[0]) * x.sum()
        return (around(x, lambda x: vfn.cond(p > 0, true, lambda x: x.sin() ** 3 + x[0], x)) ** 2).sum()

    g = lambda p, x: FURTHER[name](lambda x: f(p, x))(x)
    same_as_eager(g, (YES, XS[:2]), (NO, XS[:2]), tolerance=1e-10)
    if name == "grad of grad":
        with vfn.simulate(3):
            x = vfn.shard(XS[:2], vfn.make_mesh((3,), ("i",)), P(None, "i"))
            jitted = same_as_eager(g, (YES, x), (NO, x), tolerance=1e-10)
            assert_close(vfn.unshard(jitted(YES, x)), g(YES, XS[:2]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FURTHER)
def test_a_derivative_of_a_derivative_in_bodies(name: str) -> None:
    def f(p, x, total, w=W[0]):
        h = x * w  # which takes a local value of w before the choice
        true = lambda x: torch.tanh(x * w) * total(x.sum())
        return (vfn.cond(p > 0, true, lambda x: x.sin() ** 3 + x * w, h) ** 2).sum()

    g = lambda p, x, f: FURTHER[name](lambda x: f(p, x))(x)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        x = vfn.shard(XS[:2], mesh, P("i"))
        inside = lambda p, x: vfn.psum(f(p, x, lambda x: vfn.psum(x, "i")), "i")
        mapped = vfn.shard_map(inside, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
        jitted = vfn.jit(lambda p, x: g(p, x, mapped))
        for p in (YES, NO):
            wanted = g(p, XS[:2], lambda p, x: f(p, x, lambda x: x))
            assert_close(vfn.unshard(jitted(p, x)), wanted, rtol=1e-10, atol=1e-10)
        assert jitted.cache_info()[:3] == (1, 1, 0)


@pytest.mark.parametrize("how", ["a remat in a branch", "a checkpoint in a branch", "a remat around"])
def test_second_order_with_a_remat(how: str) -> None:
    def f(p, x):
        y = x @ W
        if how == "a remat around":
            return (
                vfn.remat(lambda y, x: vfn.scan(lambda c, _: (c * x.cos() + W[0], None), y, None, 3)[0])(y, x) ** 2
            ).sum()
        inside = vfn.remat(lambda y, x: y * x.cos())
        if how == "a checkpoint in a branch":
            inside = partial(checkpoint, lambda y, x: (y * x).sin().sin(), use_reentrant=False)
        return (vfn.cond(p > 0, inside, lambda y, x: y.sin(), y, x) ** 2).sum()

    g = FURTHER["grad of grad"]
    jitted = same_as_eager(lambda p, x: g(lambda x: f(p, x))(x), (YES, XS), (NO, XS), tolerance=1e-10)
    assert len(calls_of(jitted)) >= 3
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        mapped = vfn.shard_map(lambda p, x: vfn.psum(f(p, x), "i"), mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
        jitted = same_as_eager(
            lambda p, x: g(lambda x: mapped(p, x))(x), (YES, vfn.shard(XS[:4], mesh, P("i"))), tolerance=1e-10
        )
        found = jitted(YES, vfn.shard(XS[:4], mesh, P("i")))
        assert_close(vfn.unshard(found), g(lambda x: f(YES, x))(XS[:4]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(squares(torch.func.grad(f))),
        lambda f: torch.func.grad(lambda x: vfn.jvp(f, (x,), (x,))[1]),
    ],
)
def test_several_gradients_of_torch_run_as_written(transform) -> None:
    f = lambda p, x: transform(lambda x: (vfn.cond(p > 0, torch.sin, lambda x: x**3, x) ** 2).sum())(x)
    with pytest.warns(UserWarning, match="a value is read in Python"):
        assert_close(vfn.jit(f)(NO, XS), f(NO, XS))


def on_gloo_ranks() -> None:
    mesh = vfn.make_mesh((2,), ("i",))
    x, w = vfn.shard(XS[:4], mesh, P("i")), vfn.shard(W, mesh, P())
    for check in (True, False):
        mapped = vfn.shard_map(inside, mesh=mesh, in_specs=(P("i"), P()), out_specs=(P(), P("i"), P()), check_vma=check)
        same_as_eager(mapped, (x, w), (3 * x, w), tolerance=1e-12)
        same_as_eager(
            vfn.grad(lambda x, w, f=mapped: (f(x, w)[0] ** 2).sum(), (0, 1)), (x, w), (3 * x, w), tolerance=1e-12
        )
    each = vfn.shard_map(lambda n: collatz(n[0])[None], mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    found = same_as_eager(each, (vfn.shard(torch.tensor([6, 27]), mesh, P("i")),))
    assert calls_of(found) == ["while_loop"]


def test_on_gloo_ranks(gloo) -> None:
    gloo(2, on_gloo_ranks)


def test_branches_of_two_layouts_give_what_they_give_eager() -> None:
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        x = vfn.shard(torch.arange(4.0), mesh, P("i"))

        def f(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return vfn.cond(c.sum() > 1, lambda: x.sin(), lambda: vfn.with_sharding(2 * x, P())) + 1

        for values, said in (
            ([0, 3], contextlib.nullcontext()),
            ([0.0, 3.0], pytest.warns(UserWarning, match=r"@i\] of")),
        ):
            jitted = vfn.jit(f)
            with said:
                for value in map(torch.tensor, (*values, *values)):
                    found, wanted = jitted(x, value), f(x, value)
                    assert found.spec == wanted.spec
                    assert torch.equal(vfn.unshard(found), vfn.unshard(wanted))
            assert jitted.cache_info().records == 2 * isinstance(values[0], int)
