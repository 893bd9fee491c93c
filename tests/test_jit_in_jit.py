"""A jitted function that another recording calls: one body for equal calls, the plan and the numbers of the function as written."""

import pytest
import torch
from torch.testing import assert_close

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.plan.ir.memory_use import call_text
from vescale_fn.plan.ir.nested import nested
from vescale_fn.plan.ir.shared_bodies import Shared

F = torch.float64


def layer(p, x):
    return x + torch.tanh(x @ p["a"]) @ p["b"]


def params(layers, width=4):
    values = torch.linspace(-1, 1, layers * 2 * width * width, dtype=F).view(layers, 2, width, width)
    return [{"a": a, "b": b} for a, b in values]


def loss(layer, through=lambda x: x):
    def f(ps, x):
        for p in ps:
            x = through(layer(p, x))
        return (x**2).mean()

    return f


X = torch.linspace(-1, 1, 12, dtype=F).view(3, 4)
PS = params(5)


def plan_of(jitted):
    (plan,) = jitted._plans.values()
    return plan


def shared(jitted):
    """How many calls were recorded as one node, and how many bodies they have."""
    found = [node.target for node in nested(plan_of(jitted).recorded.graph) if isinstance(node.target, Shared)]
    return len(found), len(set(found))


def ops(jitted):
    return sorted(call_text(node) for node in plan_of(jitted).graph.nodes if node.op == "call_function")


def sent(lowered):
    return sorted((record.op, record.axes, record.bytes) for record in lowered.comms())


def same(made, *given, calls=None, bodies=None, one=layer, alike=True, exact=True):
    """A function made of a jitted layer gives what that of the layer itself gives, in the same plan."""
    plain, within = vfn.jit(made(one)), vfn.jit(made(vfn.jit(one)))
    for _ in range(2):
        wanted, found = plain(*given), within(*given)
        assert_close(vfn.unshard(found), vfn.unshard(wanted), rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)
    if calls is not None:
        assert shared(within) == (calls, bodies)
    if alike:
        assert ops(within) == ops(plain)
        assert within.lower(*given).memory().peak == plain.lower(*given).memory().peak
    if alike is not None:
        assert sent(within.lower(*given)) == sent(plain.lower(*given))
    return within


MADE = {
    "as it is": (loss, 5, 1),
    "grad": (lambda one: vfn.grad(loss(one)), 10, 4),
    "value_and_grad of both": (lambda one: vfn.value_and_grad(loss(one), (0, 1)), 10, 2),
    "remat of it": (lambda one: vfn.grad(loss(vfn.remat(one))), 15, 4),
    "remat of all": (lambda one: vfn.grad(vfn.remat(loss(one))), 15, 4),
    "two gradients": (
        lambda one: lambda ps, x: (vfn.grad(loss(one))(ps, x), vfn.grad(loss(one), 1)(ps, x)),
        None,
        None,
    ),
    "vjp": (lambda one: lambda ps, x: vfn.vjp(lambda x: loss(one)(ps, x), x)[1](torch.ones((), dtype=F)), None, None),
}
INLINE = {
    "second order": lambda one: vfn.grad(lambda x: (vfn.grad(lambda x: loss(one)(PS, x))(x) ** 2).sum()),
    "jvp": lambda one: lambda x: vfn.jvp(lambda x: loss(one)(PS, x), (x,), (x,)),
    "vmap": lambda one: vfn.vmap(lambda x: loss(one)(PS, x)),
    "linearize": lambda one: lambda x: vfn.linearize(lambda x: loss(one)(PS, x), x)[1](x),
    "a policy": lambda one: vfn.grad(vfn.remat(lambda x: loss(one)(PS, x), policy=vfn.remat_policies.dots_saveable)),
}


@pytest.mark.parametrize("name", MADE)
def test_under_transforms(name: str) -> None:
    made, calls, bodies = MADE[name]
    same(made, PS, X, calls=calls, bodies=bodies)


@pytest.mark.parametrize("name", INLINE)
def test_what_is_recorded_where_it_stands(name: str) -> None:
    same(INLINE[name], X, calls=0, bodies=0, exact=False)


LAYOUTS = {
    "fsdp": (P("dp"), P("dp"), P("dp")),
    "tp": (P(None, "tp"), P("tp"), P()),
    "both": (P("dp", "tp"), P("tp", "dp"), P("dp")),
    "uneven": (P(("dp", "tp")), P(None, ("tp", "dp")), P("dp")),
}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("text", LAYOUTS)
def test_arrays(text: str, remat: bool) -> None:
    a, b, x = LAYOUTS[text]
    wrap = vfn.remat if remat else lambda f: f

    def one(p, x):
        p = vfn.with_sharding(p, P())
        return vfn.with_sharding(layer(p, x), P("dp"))

    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        ps = vfn.shard(params(4, 5), mesh, [{"a": a, "b": b}] * 4)
        x = vfn.shard(torch.linspace(-1, 1, 15, dtype=F).view(3, 5), mesh, x)
        given = ps, x
        within = same(lambda one: vfn.value_and_grad(loss(wrap(one))), *given, one=one, alike=False)
        calls, bodies = shared(within)
        assert calls >= 8 > bodies


def test_bodies_of_a_map() -> None:
    def made(one):
        def local(ps, x):
            value, g = vfn.value_and_grad(lambda ps: vfn.psum(loss(one)(ps, x), "dp"))(ps)
            return value, g

        return lambda ps, x: vfn.shard_map(local, in_specs=(P(), P("dp")), out_specs=(P(), P()))(ps, x)

    def one(p, x):
        return layer(p, x) + vfn.pmean(x, "dp").sum()

    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        with vfn.use_mesh(mesh):
            x = torch.linspace(-1, 1, 16, dtype=F).view(4, 4)
            calls, bodies = shared(same(made, PS, x, one=one, exact=False))
            assert calls == 10 > 2 * bodies - 2


def test_keys_that_differ_by_layer() -> None:
    def one(p, x, key):
        return vfn.random.dropout(key, layer(p, x), 0.5)

    def made(one):
        def f(ps, x, key):
            for p, k in zip(ps, vfn.random.split(key, len(ps)), strict=True):
                x = one(p, x, k)
            return (x**2).sum()

        return vfn.grad(f)

    within = same(made, PS, X, vfn.random.key(3), one=one)
    assert shared(within)[0] == 10
    assert_close(within(PS, X, vfn.random.key(3)), made(one)(PS, X, vfn.random.key(3)), rtol=1e-12, atol=1e-12)


def test_what_a_call_closes_over_counts() -> None:
    scale, weight = [1.0], [torch.ones(4, dtype=F)]

    def one(x):
        return torch.sin(x * weight[0]) * scale[0]

    def made(one):
        def f(x):
            for i in range(4):
                scale[0], weight[0] = 1.0 + i // 2, x[i // 2]
                x = one(x)
            return x.sum()

        return lambda x: (f(x), vfn.grad(f)(x))

    same(made, X, one=one, alike=False)


def test_arguments_that_are_no_tensors_count() -> None:
    def one(x, n, rate, name=None):
        return torch.sin(x * rate) ** n if name is None else x.cos()

    def made(one):
        def f(x, rate):
            for n, name in ((1, None), (2, None), (2, None), (2, "cos"), (True, None)):
                x = one(x, n, rate, name=name) + one(x, n, 0.5, name=name)
            return x.sum()

        return lambda x, rate: (f(x, rate), vfn.grad(f)(x, rate))

    within = same(made, X, 0.25, one=one, alike=False)
    assert_close(within(X, 0.75), made(one)(X, 0.75), rtol=1e-12, atol=1e-12)
    assert within.cache_info().records == 1


def test_one_tensor_twice_and_a_tied_weight() -> None:
    def one(a, b, x):
        return torch.tanh(x @ a) @ b

    def f(one):
        return vfn.grad(lambda w, x: one(w, w, one(w, w.T, one(w, w, x))).sum(), (0, 1))

    same(f, PS[0]["a"], X, one=one, exact=False, alike=False)


RESULTS = {
    "a view": lambda x: x.T,
    "its argument": lambda x: x,
    "twice the same": lambda x: (y := x.sin(), y),
    "two views of one": lambda x: (y := x.sin(), y.T),
    "numbers and nothing": lambda x: {"y": x.cos(), "n": 3, "none": None},
    "whole numbers besides": lambda x: (x.argmax(-1), x.sin()),
    "detached": lambda x: (x.sin().detach(), x.cos()),
    "a number that depends on the shape": lambda x: (x.shape[0], x * x.shape[0]),
    "a constant": lambda x: (torch.ones(3, dtype=F), x.sin()),
    "what it closes over": lambda x: (PS[0]["a"], x.sin()),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_all_kinds(name: str) -> None:
    def made(one):
        def f(x):
            outs = [one(x), one(x * 2)]
            tensors = [y for y in vfn.tree.leaves(outs) if isinstance(y, torch.Tensor)]
            return sum((y.double() ** 2).sum() for y in tensors) + (x * 0).sum(), outs

        return vfn.grad(f, has_aux=True)

    same(made, X, one=RESULTS[name], alike=False)


def test_a_write_after_the_call() -> None:
    """A result, or an argument, that is written in place: what the backward pass needs of it is refused as it is without jit."""

    def after(x, one):
        y = one(x * 1)
        y += 1
        return y.sum()

    same(lambda one: lambda x: after(x, one), X, one=torch.exp, alike=False)
    same(lambda one: vfn.grad(lambda x: after(x, one)), X, one=lambda x: x * 2, alike=False)
    for one in (torch.exp, vfn.jit(torch.exp)):
        with pytest.raises(vfn.errors.InPlaceError, match="an in-place op changed a value"):
            vfn.jit(vfn.grad(lambda x, one=one: after(x, one)))(X)

    def before(x, one):
        y = x * 1
        z = one(y)
        y.mul_(2)
        return (y + z).sum()

    same(lambda one: vfn.grad(lambda x: before(x, one)), X, one=lambda x: x * 2, alike=False)
    for one in (lambda x: x * x, vfn.jit(lambda x: x * x)):
        with pytest.raises(vfn.errors.InPlaceError, match="an in-place op changed a value"):
            vfn.jit(vfn.grad(lambda x, one=one: before(x, one)))(X)


def test_a_write_into_what_a_call_closes_over() -> None:
    def made(jit, between):
        def f(x):
            w = x.sin()
            one = jit(lambda x: x * w)
            y = one(x)
            between(w)
            return (y + one(x)).sum()

        return vfn.jit(vfn.grad(f))

    for jit in (lambda f: f, vfn.jit):
        with pytest.raises(vfn.errors.InPlaceError, match="an in-place op changed a value"):
            made(jit, lambda w: w.mul_(2))(X)
    assert_close(made(vfn.jit, lambda w: w * 2)(X), made(lambda f: f, lambda w: w * 2)(X), rtol=0, atol=0)


def test_a_value_that_is_kept_from_a_call() -> None:
    def made(one):
        def f(x):
            kept = []
            for _ in range(3):
                x = one(x, kept)
            return (x + sum(kept)).sum()

        return vfn.grad(f)

    def one(x, kept):
        kept.append(x.sin())
        return x.cos()

    plain = vfn.jit(made(one))
    inner = vfn.jit(lambda x: one(x, held[-1]))
    held = []

    def through(x, kept):
        held.append(kept)
        return inner(x)

    assert_close(vfn.jit(made(through))(X), plain(X), rtol=0, atol=0)


def test_nested_and_in_loops() -> None:
    half = vfn.jit(lambda w, x: torch.tanh(x @ w))

    def one(p, x):
        return x + half(p["b"], half(p["a"], x))

    same(lambda one: vfn.grad(loss(one)), PS, X, one=one)

    def scanned(one):
        stacked = {k: torch.stack([p[k] for p in PS]) for k in "ab"}
        body = lambda x, p: (one(p, one(p, x)), None)
        return vfn.grad(lambda x: vfn.scan(body, x, stacked)[0].sum())

    same(scanned, X, alike=False)

    def inside(p, x):
        return vfn.fori_loop(0, 3, lambda i, x: layer(p, x) * 0.5, x)

    same(lambda one: vfn.grad(loss(one)), PS, X, one=inside)


def test_what_cannot_be_recorded_or_drawn_says_so_as_before() -> None:
    one = vfn.jit(lambda x: x + torch.rand(4, dtype=F))
    with pytest.raises(vfn.errors.RandomError):
        vfn.jit(lambda x: one(x))(X)
    reads = vfn.jit(lambda x: x * 2 if x.sum() > 0 else x)
    with pytest.warns(UserWarning, match="runs as written"):
        assert_close(vfn.jit(lambda x: reads(x))(X), reads(X))


def test_settings_around_a_call_count() -> None:
    one = vfn.jit(lambda x: x @ x.T)

    def f(x):
        a = one(x)
        with torch.autocast("cpu", torch.bfloat16):
            b = one(x)
        with torch.no_grad():
            c = one(x)
        return a.sum() + b.sum() + c.sum()

    plain = lambda x: (lambda y: y)(f(x))
    x = X.float()
    with vfn.disable_jit():
        wanted = vfn.grad(plain)(x)
    assert_close(vfn.jit(vfn.grad(f))(x), wanted)
