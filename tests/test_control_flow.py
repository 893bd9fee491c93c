"""Loops and branches, eager: against the Python loop that they stand for, under every transform, on arrays and in bodies."""

import pytest
import torch
from torch.testing import assert_close

import vescale_fn as vfn
from vescale_fn import P, lax
from vescale_fn.errors import TransformError

F = torch.float64
W = torch.linspace(-0.9, 1.1, 16, dtype=F).view(4, 4)
XS = torch.linspace(0.1, 1.3, 20, dtype=F).view(5, 4)


def test_axes_of_size_1_may_be_named_in_any_order():
    """A carry whose spec names them in another order than ops give is no other layout."""
    w, x = torch.randn(3, 4, 4), torch.randn(5, 4)
    want = vfn.scan(lambda h, w: (torch.tanh(h @ w), h.sum()), x, w)
    with vfn.simulate(6):
        held = vfn.shard(x, vfn.make_mesh((6, 1), ("a", "b")), P(("b", "a")))
        for run in (lambda f: f, vfn.jit):
            got = run(lambda x, w: vfn.scan(lambda h, w: (torch.tanh(h @ w), h.sum()), x, w))(held, w)
            torch.testing.assert_close(vfn.unshard(got), want)


def test_arrays_under_transforms() -> None:
    """The layout of a carry is that of its unbatched dims."""
    inside = {
        "vmap": lambda c, xs: vfn.vmap(lambda c: scanned(W, c, xs), out_axes=(0, 1))(torch.stack([c, 2 * c])),
        "jvp": lambda c, xs: vfn.jvp(lambda c: scanned(W, c, xs), (c,), (c.cos(),)),
    }
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        given = vfn.shard(XS[0], mesh, P()), vfn.shard(XS, mesh, P("i"))
        for run in inside.values():
            assert_close(vfn.unshard(run(*given)), run(XS[0], XS), rtol=1e-12, atol=1e-12)


def body(w):
    return lambda c, x: (torch.tanh(c @ w + x), c * x)


def by_hand(w, c, xs, reverse=False):
    ys = [None] * len(xs)
    for i in reversed(range(len(xs))) if reverse else range(len(xs)):
        c, ys[i] = body(w)(c, xs[i])
    return c, torch.stack(ys)


def total(pair):
    return (pair[0] ** 2).sum() + (pair[1] * torch.arange(1.0, 1 + pair[1].numel(), dtype=F).view(pair[1].shape)).sum()


def loss(loop, reverse):
    return lambda w, c, xs: total(loop(w, c, xs, reverse))


def scanned(w, c, xs, reverse=False):
    return vfn.scan(body(w), c, xs, reverse=reverse)


TRANSFORMS = {
    "value": lambda f: f,
    "grad": lambda f: vfn.grad(f, (0, 1, 2)),
    "second order": lambda f: vfn.grad(lambda *a: sum((g**2).sum() for g in vfn.grad(f, (0, 1, 2))(*a)), (0, 1, 2)),
    "vjp": lambda f: lambda *a: vfn.vjp(f, *a)[1](torch.ones((), dtype=F)),
    "jvp": lambda f: lambda *a: vfn.jvp(f, a, tuple(map(torch.cos, a))),
    "linearize": lambda f: lambda *a: vfn.linearize(f, *a)[1](*map(torch.cos, a)),
    "vmap": lambda f: lambda w, c, xs: vfn.vmap(f, (None, 0, None))(w, torch.stack([c, 2 * c]), xs),
    "vmap of grad": lambda f: lambda w, c, xs: vfn.vmap(vfn.grad(f), (None, 0, None))(w, torch.stack([c, 2 * c]), xs),
    "grad of vmap": lambda f: (
        lambda w, c, xs: vfn.grad(lambda w: vfn.vmap(f, (None, 0, None))(w, torch.stack([c, 2 * c]), xs).sum())(w)
    ),
    "remat": lambda f: vfn.grad(vfn.remat(f), (0, 1, 2)),
    "jit": vfn.jit,
    "jit of grad": lambda f: vfn.jit(vfn.grad(f, (0, 1, 2))),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_scan_is_the_loop(name: str, reverse: bool) -> None:
    given = W, XS[0] * 2, XS
    found, wanted = (TRANSFORMS[name](loss(loop, reverse))(*given) for loop in (scanned, by_hand))
    assert_close(found, wanted, rtol=1e-12, atol=1e-12)


LAYOUTS = {"whole": (P(), P(), P()), "split": (P(None, "i"), P("i"), P(None, "i")), "leading": (P("i"), P(), P("i"))}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scan_of_arrays(layout: str, n: int) -> None:
    wanted = vfn.value_and_grad(loss(by_hand, False), (0, 1, 2))(W, XS[0], XS)
    with vfn.simulate(n):
        mesh = vfn.make_mesh((n,), ("i",))
        given = [vfn.shard(x, mesh, spec) for x, spec in zip((W, XS[0], XS), LAYOUTS[layout], strict=True)]

        def settled(w, c, xs, reverse=False):
            keeps = lambda c, x: (vfn.with_sharding(body(w)(c, x)[0], given[1].spec), c * x)
            return vfn.scan(keeps, c, xs)

        found = vfn.value_and_grad(loss(settled, False), (0, 1, 2))(*given)
        assert [g.spec for g in found[1]] == [x.spec for x in given]
        assert_close(vfn.unshard(found), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("check", [True, False])
def test_scan_in_bodies(check: bool) -> None:
    wanted = vfn.grad(lambda w: total(by_hand(w, XS[0], XS)))(W)

    def inside(w, c, xs):
        def step(c, x):
            whole = vfn.all_gather(c, "i", axis=0, tiled=True)
            part = vfn.dynamic_slice(w, [0, 2 * vfn.axis_index("i")], [4, 2])
            return torch.tanh(whole @ part + x), c * x

        return vfn.scan(step, c, xs)

    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        specs = P("i"), P(None, "i")
        mapped = vfn.shard_map(inside, mesh=mesh, in_specs=(P(), *specs), out_specs=specs, check_vma=check)
        given = [vfn.shard(x, mesh, spec) for x, spec in zip((W, XS[0], XS), (P(), *specs), strict=True)]
        assert_close(vfn.unshard(vfn.grad(lambda w: total(mapped(w, *given[1:])))(given[0])), wanted)


def test_leaves_of_all_kinds() -> None:
    key = vfn.random.key(3)
    init = {"n": 0, "none": None, "half": torch.ones(2, dtype=torch.bfloat16), "key": key, "flag": True}

    def step(c, xs):
        x, k = xs
        draw = vfn.random.normal(c["key"], (2,)) + vfn.random.normal(k, (2,))
        new = {
            "n": c["n"] + x,
            "none": None,
            "half": c["half"] * 2,
            "key": vfn.random.fold_in(c["key"], 1),
            "flag": ~c["flag"],
        }
        return new, (draw, None, 1)

    keys = vfn.random.split(key, 3)
    last, (draws, none, ones) = vfn.scan(step, init, (torch.tensor([0.5, 1.0, 2.0]), keys))
    assert (last["n"].item(), last["none"], last["half"].tolist(), last["flag"].item(), none) == (
        3.5,
        None,
        [8, 8],
        False,
        None,
    )
    assert last["half"].dtype == torch.bfloat16
    assert last["n"].dtype == torch.float32  # the number 0 took it
    assert ones.tolist() == [1, 1, 1]
    k, wanted = key, []
    for i in range(3):
        wanted.append(vfn.random.normal(k, (2,)) + vfn.random.normal(keys[i], (2,)))
        k = vfn.random.fold_in(k, 1)
    assert_close(draws, torch.stack(wanted), rtol=0, atol=0)


def test_no_iteration_gives_init_and_empty_ys() -> None:
    last, ys = vfn.scan(body(W), XS[0], XS[:0])
    assert_close(last, XS[0])
    assert ys.shape == (0, 4)
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        last, ys = vfn.scan(lambda c, x: (c + x, c), XS[0], vfn.shard(XS[:0], mesh, P()))
        assert (last.shape, ys.spec, ys.shape) == ((4,), P(), (0, 4))
    assert vfn.fori_loop(3, 3, lambda i, x: x + i, 7) == 7


def test_fori_loop_counts() -> None:
    steps = lambda lower, upper: vfn.fori_loop(lower, upper, lambda i, x: x * 2 + i, torch.tensor(1.0, dtype=F))
    assert steps(2, 6) == steps(torch.tensor(2), 6) == steps(2, torch.tensor(6)) == 16 + 2 * 8 + 3 * 4 + 4 * 2 + 5
    assert vfn.grad(lambda x: vfn.fori_loop(0, 3, lambda i, x: x * x, x))(
        torch.tensor(1.1, dtype=F)
    ).item() == pytest.approx(8 * 1.1**7)


def test_forms_that_jax_takes() -> None:
    assert_close(vfn.switch(1, [torch.sin, torch.cos], operand=XS), XS.cos())
    for unroll in (0, 1, 7, True, False):
        assert vfn.scan(lambda c, x: [c + x, c], 0, torch.arange(4), unroll=unroll)[1].tolist() == [0, 0, 1, 3]
    dtypes = []
    for n in (torch.tensor(2, dtype=torch.int8), 2):
        vfn.fori_loop(0, n, lambda i, c: dtypes.append(i.dtype) or c, 0)
    assert set(dtypes) == {torch.int8, torch.int32}


def collatz(n):
    return vfn.while_loop(
        lambda c: c[0] != 1, lambda c: (torch.where(c[0] % 2 == 0, c[0] // 2, 3 * c[0] + 1), c[1] + 1), (n, 0)
    )[1]


def test_while_loop_by_entry_and_by_rank() -> None:
    numbers, wanted = torch.tensor([1, 6, 7, 27]), torch.tensor([0, 8, 16, 111])
    assert collatz(numbers[2]) == 16
    assert_close(vfn.vmap(collatz)(numbers), wanted)
    assert_close(vfn.vmap(vfn.vmap(collatz))(numbers.view(2, 2)), wanted.view(2, 2))
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("i",))
        each = lambda n: collatz(n[0])[None]
        for check in (True, False):
            mapped = vfn.shard_map(each, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check)
            assert_close(vfn.unshard(mapped(vfn.shard(numbers, mesh, P("i")))), wanted)
        assert collatz(vfn.shard(numbers[2], mesh, P())) == 16


def test_each_entry_of_an_array_stops_by_itself() -> None:
    numbers, wanted = torch.tensor([1, 6, 7, 27]), torch.tensor([0, 8, 16, 111])
    with vfn.simulate(2):
        for spec in P(), P("i"):
            found = vfn.vmap(collatz)(vfn.shard(numbers, vfn.make_mesh((2,), ("i",)), spec))
            assert_close(vfn.unshard(found), wanted)
    with pytest.raises(TransformError, match=r"init_val is f64\[4\] and comes back as f64\[\]"):
        vfn.vmap(lambda x: vfn.while_loop(lambda c: c.sum() < 9, lambda c: c.sum(), x))(XS)


def test_while_loop_has_forward_derivatives() -> None:
    f = lambda x: vfn.while_loop(lambda c: c < 5, lambda c: c * 2, x)
    assert vfn.jvp(f, (torch.tensor(1.5),), (torch.tensor(1.0),)) == (6, 4)
    for x in torch.tensor([1.5, 9.0]):  # after no iteration, too
        with pytest.raises(TransformError, match="while_loop: it has no gradient"):
            vfn.grad(f)(x)


def branches(p, x):
    return vfn.cond(p, lambda x: {"a": x.sin(), "b": x * 0}, lambda x: {"a": x.cos(), "b": x.sum().expand_as(x)}, x)


def test_cond_by_entry_and_by_rank() -> None:
    for p in (True, torch.tensor(False), torch.tensor(2)):
        wanted = {"a": XS.sin(), "b": XS * 0} if p else {"a": XS.cos(), "b": XS.sum().expand_as(XS)}
        assert_close(branches(p, XS), wanted)
    flags = torch.tensor([True, False, True, False, False])
    wanted = torch.stack([branches(bool(p), x)["a"] for p, x in zip(flags, XS, strict=True)])
    assert_close(vfn.vmap(branches)(flags, XS)["a"], wanted)
    slope = vfn.vmap(vfn.grad(lambda x, p: branches(p, x)["a"].sum()))(XS, flags)
    assert_close(slope, torch.where(flags[:, None], XS.cos(), -XS.sin()))
    with vfn.simulate(5):
        mesh = vfn.make_mesh((5,), ("i",))
        each = lambda p, x: branches(p[0], x[0])["a"][None]
        for check in (True, False):
            mapped = vfn.shard_map(each, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check)
            assert_close(vfn.unshard(mapped(*vfn.shard((flags, XS), mesh, P("i")))), wanted)
        together = lambda x: vfn.cond(
            vfn.psum(x, "i").sum() > 0, lambda x: vfn.psum(x, "i"), lambda x: 0 * vfn.psum(x, "i"), x
        )
        mapped = vfn.shard_map(together, mesh=mesh, in_specs=P("i"), out_specs=P())
        assert_close(vfn.unshard(mapped(vfn.shard(XS, mesh, P("i")))), XS.sum(0, keepdim=True))


def test_switch_clamps() -> None:
    ways = [lambda x: x + 1, lambda x: x * 2, lambda x: -x]
    x = torch.tensor(3.0)
    assert [vfn.switch(i, ways, x).item() for i in (-5, 0, 1, 2, 9)] == [4, 4, 6, -3, -3]
    found = vfn.vmap(lambda i: vfn.switch(i, ways, x))(torch.tensor([-5, 0, 1, 2, 9]))
    assert found.tolist() == [4, 4, 6, -3, -3]


@pytest.mark.parametrize("batch_size", [None, 1, 2, 5, 7])
def test_map_is_vmap_in_turns(batch_size: int | None) -> None:
    f = lambda x: {"a": x.sum(), "b": x.cumsum(0)}
    assert_close(vfn.lax.map(f, XS, batch_size=batch_size), vfn.vmap(f)(XS))


@pytest.mark.parametrize("n", range(1, 10))
def test_associative_scan(n: int) -> None:
    elems = {
        "m": torch.linspace(-1, 1, n * 4, dtype=F).view(n, 2, 2),
        "v": torch.linspace(0, 2, n * 2, dtype=F).view(n, 2, 1),
    }
    compose = lambda one, other: {"m": other["m"] @ one["m"], "v": other["m"] @ one["v"] + other["v"]}
    for reverse in (False, True):
        order = range(n - 1, -1, -1) if reverse else range(n)
        wanted, c = [None] * n, None
        for i in order:
            x = {name: leaf[i] for name, leaf in elems.items()}
            c = wanted[i] = x if c is None else compose(c, x)
        found = vfn.associative_scan(compose, elems, reverse=reverse)
        assert_close(found, {name: torch.stack([x[name] for x in wanted]) for name in elems}, rtol=1e-12, atol=1e-12)
    assert_close(vfn.associative_scan(torch.add, XS, axis=-1), XS.cumsum(1))
    with vfn.simulate(2):
        split = vfn.shard(XS, vfn.make_mesh((2,), ("i",)), P("i"))
        assert_close(vfn.unshard(vfn.associative_scan(torch.add, split)), XS.cumsum(0))


def test_lax_has_the_same_functions() -> None:
    assert all(getattr(lax, name) is getattr(vfn, name) for name in lax.__all__ if hasattr(vfn, name))
    assert lax.with_sharding_constraint is vfn.with_sharding


HALF = torch.tensor(0.5, dtype=F)
NO_ITERATION = {
    "while_loop": lambda n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * HALF), (0, 3)),
    "fori_loop": lambda n: lax.fori_loop(0, n, lambda i, c: c * HALF, 1),
    "entries": lambda n: vfn.vmap(lambda n: NO_ITERATION["while_loop"](n))(n[None]),
    "another one in it": lambda n: lax.while_loop(
        lambda c: c[0] < n, lambda c: (lax.while_loop(lambda x: x != 7, lambda x: x * 1, c[0]), c[1] * HALF), (0, 3)
    ),
}


@pytest.mark.parametrize("name", NO_ITERATION)
def test_numbers_have_the_dtype_of_the_body_after_no_iteration(name):
    """As in jax, which traces it; a loop in the body, whose condition might hold for ever there, does not begin."""
    for found in (NO_ITERATION[name](torch.tensor(0)), vfn.jit(NO_ITERATION[name])(torch.tensor(0))):
        leaves = vfn.tree.leaves(found)
        assert leaves[-1].dtype == F
        assert [x.dtype for x in leaves[:-1]] == [torch.int64] * (len(leaves) - 1)


@pytest.mark.parametrize("transform", [vfn.grad, lambda f: lambda x: vfn.jvp(f, (x,), (x,))[1]])
def test_a_scan_of_no_iterations_asks_for_no_derivative(transform):
    """Not even of a function that has a rule for cotangents alone, or none."""
    ruled = vfn.custom_vjp(lambda x: x * 2)
    ruled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))
    body = lambda c, _: (ruled(c), lax.while_loop(lambda c: c < 3, lambda c: c * 2, c))
    f = lambda x: (lambda c, ys: c + ys.sum())(*vfn.scan(body, x, length=0))
    assert transform(f)(torch.tensor(2.0)) == transform(lambda x: x * 1)(torch.tensor(2.0))
