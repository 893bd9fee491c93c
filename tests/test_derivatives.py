"""Functions with derivative rules of their own: `custom_vjp`, `custom_jvp`, `stop_gradient`."""

import json

import derivatives
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import TransformError, VaryingTypeError

GOLDENS = json.loads(derivatives.GOLDENS.read_text())["cases"]


class lib:
    """Our names where jax has them."""

    class lax:
        stop_gradient = staticmethod(vfn.stop_gradient)

    custom_vjp, custom_jvp, remat, jit = vfn.custom_vjp, vfn.custom_jvp, vfn.remat, vfn.jit
    grad, value_and_grad, vjp, jvp = vfn.grad, vfn.value_and_grad, vfn.vjp, vfn.jvp
    vmap, linearize = vfn.vmap, vfn.linearize


class functorch(lib):
    """The same cases by `torch.func`, a level for each transform."""

    grad, vjp, jvp = torch.func.grad, torch.func.vjp, torch.func.jvp

    @staticmethod
    def value_and_grad(f, argnums=0):
        both = torch.func.grad_and_value(f, argnums)
        return lambda *args: both(*args)[::-1]


def number(x):
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("name", derivatives.CASES)
def test_as_jax(name):
    for ours in (lib, functorch):
        found = derivatives.found(name, ours, torch, number, (TransformError,))
        assert (found == "error") == (GOLDENS[name] == "error"), (ours, found)
        if found != "error":
            flat = lambda x: [n for y in x for n in flat(y)] if isinstance(x, list) else [x]
            torch.testing.assert_close(number(flat(found)), number(flat(GOLDENS[name])), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("transform", [vfn.grad, torch.func.grad])
@pytest.mark.parametrize("wrap", [lambda f: f, vfn.jit])
def test_values_of_an_inner_transform_that_an_outer_one_meets(wrap, transform):
    """A rule that an outer `jvp` uses closes over a value that an inner gradient has wrapped, and does not follow."""

    def cubed(x, by_itself):
        n = (x > 0) * 2
        f = vfn.custom_jvp(lambda x: n * x**3)
        f.defjvp(lambda primals, tangents: (f(*primals), 2 * f(*primals) * tangents[0]))
        return f(x) if by_itself else x * f(x)

    x = number(0.7)
    for by_itself, wanted in ((True, [4 * x**3, 8 * x**3]), (False, [2 * x**3 * (1 + 2 * x), 8 * x**3 * (1 + x)])):
        slope = transform(lambda x, by_itself=by_itself: cubed(x, by_itself))
        found = wrap(lambda x, slope=slope: vfn.jvp(slope, (x,), (torch.ones_like(x),)))(x)
        torch.testing.assert_close(list(found), wanted)


def test_a_rule_for_tangents_mapped_and_differentiated_twice():
    def product(v, s):
        f = vfn.custom_jvp(lambda v, s: v * s)
        f.defjvp(lambda primals, tangents: (f(*primals), 2 * tangents[0] + f(*primals) * tangents[1]))
        return f(v, s)

    v, s = number(0.7), number([0.3, 0.5])
    of_one = lambda v, s: sum(product(v, x) ** 2 for x in s.unbind())
    mapped = lambda v, s: (vfn.vmap(lambda x: product(v, x))(s) ** 2).sum()
    found, wanted = (vfn.grad(lambda v, f=f: vfn.grad(f)(v, s) ** 2)(v) for f in (mapped, of_one))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("itself", [True, False])
def test_raw_autograd(itself):
    """On autograd alone the rule counts at every order, as an `autograd.Function`'s does."""
    x, y = number(0.7).requires_grad_(), number(1.3).requires_grad_()
    product, sine = derivatives.product(lib, torch, itself), derivatives.sine(lib, torch, itself)
    product(x, y).backward()
    sine(x).backward()
    torch.testing.assert_close([x.grad, y.grad], [2 * torch.sin(y) + 2 * torch.cos(x), x * torch.cos(y)])
    (slope,) = torch.autograd.grad(product(x, y), y, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(slope, (x, y)), (torch.cos(y), -x * torch.sin(y)))
    (slope,) = torch.autograd.grad(y * sine(x) ** 2, y, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(slope, x), (2 * torch.sin(x) * 2 * torch.cos(x),))


def test_dual_numbers():
    f, x = derivatives.sine(lib, torch, True), number(0.7)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, number(2.0))
        slope = torch.autograd.forward_ad.unpack_dual(f(dual)).tangent
        with pytest.raises(TransformError, match="a rule for cotangents alone"):
            derivatives.product(lib, torch, True)(dual, x)
    assert slope == 2 * torch.cos(x) * 2


def test_integers_and_other_leaves():
    @vfn.custom_vjp
    def take(x, i, how):
        return x[i] * how["scale"], i

    take.defvjp(
        lambda x, i, how: (take(x, i, how), (x.shape, i, how)),
        lambda kept, g: (torch.zeros(kept[0]).index_put((kept[1],), g[0] * kept[2]["scale"]), g[1], None),
    )
    loss = lambda x, i: take(x, i, {"scale": 3.0, "name": "a", "none": None})[0]
    x, i = torch.arange(3.0), torch.tensor(1)
    for derive in (vfn.grad, lambda f, argnums=0: torch.func.grad(f)):
        assert derive(loss)(x, i).tolist() == [0, 3, 0]
    found = vfn.grad(loss, (0, 1))(x, i)
    assert repr(found[1]) == "tensor(0)"  # as everywhere: an integer's gradient is zeros of its dtype


def test_stop_gradient():
    tree = {"w": torch.tensor([1.0, 2.0]), "n": 3, "key": vfn.random.key(0), "i": torch.tensor(1)}
    out = vfn.stop_gradient(tree)
    assert (out["w"].tolist(), out["n"], out["i"]) == ([1, 2], 3, 1)
    assert vfn.random.bits(out["key"], ()) == vfn.random.bits(tree["key"], ())
    f = lambda x: (x * vfn.stop_gradient(x)).sum()
    x = torch.tensor([1.0, 2.0])
    assert vfn.grad(f)(x).tolist() == [1, 2]
    assert vfn.jvp(f, (x,), (x,))[1] == 5
    assert vfn.grad(lambda x: vfn.grad(f)(x).sum())(x).tolist() == [0, 0]
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        assert vfn.spec_of(vfn.stop_gradient(vfn.shard(x, mesh, P("i")))) == P("i")
        g = vfn.shard_map(lambda w, x: vfn.psum((vfn.stop_gradient(w) * x * w).sum(), "i"), mesh, (P(), P("i")), P())
        assert vfn.unshard(vfn.grad(g)(x[:1], x)).tolist() == [3]


# --- in a body --------------------------------------------------------------------------------------------------------

W = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).sin()
X = torch.linspace(-2, 2, 24, dtype=torch.float64).view(8, 3).cos()


def matmul(adds_up):
    """A product whose rule adds the weight's cotangent up over dp, or leaves it a part."""

    @vfn.custom_vjp
    def f(w, x):
        return x @ w

    def bwd(kept, g):
        w, x = kept
        part = x.T @ g
        return vfn.psum(part, "dp") if adds_up else part, g @ w.T

    f.defvjp(lambda w, x: (f(w, x), (w, x)), bwd)
    return f


def on_one(w, x):
    return (x @ w).sin().sum()


def in_bodies(adds_up, check):
    """Gradients by the weight: around the map by each transform, raw, of the gradient, under remat and jit; in the body."""
    mesh, f = vfn.make_mesh((2, 2), ("dp", "tp")), matmul(adds_up)
    body = lambda w, x: vfn.psum(f(w, x).sin().sum(), "dp")
    specs = dict(mesh=mesh, in_specs=(P(), P("dp")), out_specs=P())
    mapped = vfn.shard_map(body, check_vma=check, **specs)
    leaf = W.clone().requires_grad_()
    vfn.unshard(mapped(leaf, X)).backward()
    twice = lambda derive: derive(lambda w: (derive(mapped)(w, X) ** 2).sum())(W)
    found = {
        "raw": leaf.grad,
        "vfn.grad": vfn.grad(mapped)(W, X),
        "torch.func.grad": torch.func.grad(mapped)(W, X),
        "remat": vfn.grad(vfn.remat(mapped))(W, X),
        "remat in the body": vfn.grad(vfn.shard_map(vfn.remat(body), check_vma=check, **specs))(W, X),
        "jit": vfn.jit(vfn.grad(mapped))(W, X),
        "second": twice(vfn.grad),
        "second by torch.func": twice(torch.func.grad),
    }
    if check:
        found["in the body"] = vfn.shard_map(vfn.grad(body), **specs)(W, X)
    return {name: vfn.unshard(g) for name, g in found.items()}


def check_bodies(found):
    first = vfn.grad(on_one)(W, X)
    second = vfn.grad(lambda w: (vfn.grad(on_one)(w, X) ** 2).sum())(W)
    for name, g in found.items():
        torch.testing.assert_close(
            g,
            second if "second" in name else first,
            rtol=1e-11,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("check", [True, False])
def test_in_bodies(check):
    with vfn.simulate(4):
        check_bodies(in_bodies(check, check))  # without types the map's own end adds up


def both_in_bodies():
    return [in_bodies(check, check) for check in (True, False)]


def test_in_bodies_of_real_ranks(gloo):
    for found in gloo(4, both_in_bodies):
        list(map(check_bodies, found))


def test_a_cotangent_has_the_type_of_its_argument():
    with vfn.simulate(4):
        with pytest.raises(VaryingTypeError) as error:
            in_bodies(False, True)
    assert str(error.value) == (
        "custom_vjp of f: the rule gives a cotangent whose type is not that of its value\n"
        "  * args[0] is f64[3,4], its cotangent f64[3,4]{V:dp}\n"
        "  Instead: vfn.psum(x, 'dp') of it in the rule"
    )


def test_a_tangent_has_the_type_of_its_result():
    f = vfn.custom_jvp(lambda x: vfn.psum(x, "i"))
    f.defjvp(lambda primals, tangents: (vfn.psum(primals[0], "i"), tangents[0]))
    with vfn.simulate(2):
        mapped = vfn.shard_map(f, vfn.make_mesh((2,), ("i",)), P("i"), P())
        for derive in (lambda: vfn.grad(lambda x: mapped(x).sum())(X), lambda: vfn.jvp(mapped, (X,), (X,))):
            with pytest.raises(VaryingTypeError) as error:
                derive()
            assert str(error.value) == (
                "custom_jvp of <lambda>: the rule gives a tangent whose type is not that of its value\n"
                "  * out is f64[4,3], its tangent f64[4,3]{V:i}\n"
                "  Instead: vfn.psum(x, 'i') of it in the rule"
            )


def test_an_invariant_cotangent_serves_a_varying_argument():
    f = vfn.custom_vjp(lambda x: 3 * x)
    f.defvjp(lambda x: (3 * x, x.shape), lambda shape, g: (torch.full(shape, 7.0, dtype=torch.float64),))
    with vfn.simulate(2):
        mapped = vfn.shard_map(lambda x: vfn.psum(f(x).sum(), "i"), vfn.make_mesh((2,), ("i",)), P("i"), P())
        for derive in (vfn.grad, torch.func.grad):
            assert vfn.unshard(derive(mapped)(X)).unique().tolist() == [7]


def test_axis_names_in_a_rule():
    @vfn.custom_vjp
    def share(x):
        return x / vfn.psum(x, "i")

    def bwd(x, g):
        total = vfn.psum(x, "i")
        return (g / total - vfn.psum(g * x, "i") / total**2 + 0 * vfn.axis_index("i"),)

    share.defvjp(lambda x: (x / vfn.psum(x, "i"), x), bwd)
    x, c = torch.tensor([1.0, 3.0, 4.0]), torch.tensor([1.0, -1.0, 2.0])
    wanted = vfn.grad(lambda x: (c * (x / x.sum()).sin()).sum())(x)
    for derive in (vfn.grad, torch.func.grad):
        found = derive(lambda x: (c * vfn.vmap(share, axis_name="i")(x).sin()).sum())(x)
        torch.testing.assert_close(found, wanted)


def on_arrays():
    """Gradients of arrays in their layouts, whatever the rule gives: an array that lies otherwise, a plain tensor."""
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    w, x = vfn.shard(W, mesh, P(None, "tp")), vfn.shard(X, mesh, P("dp"))
    f = vfn.custom_vjp(lambda w, x: x @ w)
    f.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T))
    total = vfn.custom_vjp(lambda x: x.sum())
    total.defvjp(lambda x: (x.sum(), x.shape), lambda shape, g: (torch.full(shape, 2.0, dtype=torch.float64),))
    found = []
    for derive in (vfn.grad, torch.func.grad, lambda f, argnums=0: vfn.jit(vfn.grad(f, argnums))):
        found += derive(lambda w, x: f(w, x).sin().sum(), (0, 1))(w, x)
        found.append(derive(total)(x))
    return [(str(vfn.spec_of(g)), vfn.unshard(g)) for g in found]


def check_arrays(found):
    wanted = [*vfn.grad(on_one, (0, 1))(W, X), torch.full_like(X, 2)]
    for i, (spec, g) in enumerate(found):
        assert spec == ["P(None, 'tp')", "P('dp')", "P('dp')"][i % 3]
        torch.testing.assert_close(g, wanted[i % 3], rtol=1e-12, atol=1e-12)


def test_on_arrays():
    with vfn.simulate(4):
        check_arrays(on_arrays())


def test_on_arrays_of_real_ranks(gloo):
    for found in gloo(4, on_arrays):
        check_arrays(found)


# --- errors, and writes -----------------------------------------------------------------------------------------------


def doubled(bwd=lambda _, g: (2 * g,), fwd=lambda x: (2 * x, None)):
    @vfn.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(fwd, bwd)
    return double


def paired(fwd):
    @vfn.custom_vjp
    def pair(x):
        return {"a": x, "b": torch.stack([x, x])}

    pair.defvjp(fwd, lambda _, g: (g["a"],))
    return pair


@vfn.custom_jvp
def half(x):
    return x / 2


def derived(rule):
    half.defjvp(rule)
    return vfn.grad(half)


def around_a_value(x):
    n = x.long()
    f = vfn.custom_jvp(lambda x: x * n)
    f.defjvp(lambda primals, tangents: (f(*primals), n * tangents[0]))
    return f(x)


def keyword_only(x, *, y):
    return x * y


ONE = torch.tensor(1.0)
SAID = {
    "no rule": (
        lambda: vfn.custom_vjp(keyword_only)(ONE, y=ONE),
        "custom_vjp of keyword_only: it has no rule yet\n  Instead: f.defvjp(fwd, bwd) before the first call",
    ),
    "no pair": (
        lambda: vfn.grad(doubled(fwd=lambda x: x))(ONE),
        "custom_vjp of double: fwd must return a pair, (out, residuals)\n  * it returned the tensor f32[]\n"
        "  Instead: return (out, residuals)",
    ),
    "fwd gives another tree": (
        lambda: vfn.grad(lambda x: doubled(fwd=lambda x: ((2 * x, x), None))(x)[0])(ONE),
        "custom_vjp of double: fwd must return a pair, of what the function itself returns, and of residuals for bwd\n"
        "  * out is a tuple, but double(...) is a leaf (Tensor)\n  Instead: return f(*args), residuals",
    ),
    "fwd gives less": (
        lambda: vfn.grad(lambda x: paired(lambda x: ({"a": x}, None))(x)["a"])(ONE),
        "custom_vjp of pair: fwd must return a pair, of what the function itself returns, and of residuals for bwd\n"
        "  * out lacks 'b': pair(...) has 'a', 'b'\n  Instead: return f(*args), residuals",
    ),
    "fwd gives other shapes": (
        lambda: vfn.vmap(vfn.grad(lambda x: paired(lambda x: ({"a": x, "b": x.double()}, None))(x)["a"]))(ONE[None]),
        "custom_vjp of pair: fwd must return a pair, of what the function itself returns, and of residuals for bwd\n"
        "  * out['b'] is f64[], but pair(...)['b'] is f32[2]\n  Instead: return f(*args), residuals",
    ),
    "no tuple": (
        lambda: vfn.grad(doubled(lambda _, g: g))(ONE),
        "custom_vjp of double: bwd must return a tuple with a cotangent for each of the 1 argument\n"
        "  * it returned the tensor f32[]\n"
        "  Instead: a tuple with a cotangent for each differentiated argument, None for zero: (ct,) for one argument",
    ),
    "another tree": (
        lambda: vfn.grad(doubled(lambda _, g: ({"a": g},)))(ONE),
        "custom_vjp of double: cotangents is not a prefix of args\n"
        "  * cotangents[0] is a dict, but args[0] is a leaf (Tensor)\n"
        "  Instead: give cotangents the structure of args, or one entry for a whole subtree",
    ),
    "another shape": (
        lambda: vfn.grad(doubled(lambda _, g: (g[None],)))(ONE),
        "custom_vjp of double: the rule gives cotangents that do not fit\n  * args[0] is f32[], its cotangent f32[1]\n"
        "  Instead: a cotangent of the same shape and dtype, or None for zero",
    ),
    "another dtype": (
        lambda: vfn.grad(doubled(lambda _, g: (g.double(),)))(ONE),
        "custom_vjp of double: the rule gives cotangents that do not fit\n  * args[0] is f32[], its cotangent f64[]\n"
        "  Instead: a cotangent of the same shape and dtype, or None for zero",
    ),
    "closed over": (
        lambda: vfn.grad(lambda w: doubled(fwd=lambda x: (x * w, None))(w))(ONE),
        "custom_vjp of double: the function closes over a tensor that is differentiated, for which its rule gives no "
        "derivative\n  Instead: the tensor as one more argument, with its derivative in the rule; or vfn.stop_gradient(x) "
        "of it",
    ),
    "a value of an inner transform": (
        lambda: vfn.jvp(
            vfn.vmap(vfn.grad(lambda x: vfn.vmap(around_a_value)(x[None]).sum())), (ONE[None],), (ONE[None],)
        ),
        "custom_jvp of <lambda>: an outer transform runs the function, or its rule, which closes over a value of a transform "
        "inside of it\n  Instead: the value as one more argument",
    ),
    "keyword only": (
        lambda: vfn.grad(with_rule(keyword_only))(ONE, y=ONE),
        "custom_vjp of keyword_only: arguments by keyword must have a position, since the rule takes them by position\n"
        "  * 'y' has no position\n  Instead: give y by position",
    ),
    "a name that is none": (
        lambda: vfn.custom_vjp(keyword_only, nondiff_argnames="z"),
        "custom_vjp: nondiff_argnums are places of arguments, nondiff_argnames their names\n"
        "  * there is no parameter 'z'\n  Instead: nondiff_argnums=(0,), or nondiff_argnames=('f',)",
    ),
    "symbolic zeros": (
        lambda: doubled().defvjp(lambda x: x, lambda x: x, symbolic_zeros=True),
        "custom_vjp.defvjp: symbolic_zeros=True is not supported: fwd gets values, and bwd tensors\n"
        "  Instead: a rule for cotangents that may be zeros",
    ),
    "a tangent of another dtype": (
        lambda: derived(lambda primals, tangents: (primals[0], tangents[0].double()))(ONE),
        "custom_jvp of half: the rule gives tangents that do not fit\n  * out is f32[], its tangent f64[]\n"
        "  Instead: a tangent of the same shape and dtype, or None for zero",
    ),
    "a tangent alone": (
        lambda: derived(lambda primals, tangents: tangents[0])(ONE),
        "custom_jvp of half: the rule must return a pair, (out, tangent_out)\n  * it returned the tensor f32[]\n"
        "  Instead: return (out, tangent_out)",
    ),
    "defjvps": (
        lambda: vfn.custom_jvp(keyword_only, nondiff_argnums=0).defjvps(None),
        "custom_jvp.defjvps: not together with nondiff_argnums\n"
        "  Instead: f.defjvp(rule), which takes those arguments first",
    ),
}


def with_rule(f):
    f = vfn.custom_vjp(f)
    f.defvjp(lambda *args: (args[0], None), lambda _, g: (g, None))
    return f


@pytest.mark.parametrize("name", SAID)
def test_errors(name):
    call, text = SAID[name]
    with pytest.raises(TransformError) as error:
        call()
    assert str(error.value) == text


def test_writes_into_results():
    """Into a result's own memory they are followed; into an argument's or a residual's they are refused."""
    kept = vfn.custom_vjp(torch.exp)
    kept.defvjp(lambda x: (torch.exp(x),) * 2, lambda y, g: (g * y,))
    identity = vfn.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), lambda _, g: (g,))
    x = torch.ones(2, requires_grad=True)
    y = doubled()(x)
    y.mul_(3)
    y.sum().backward()
    assert x.grad.tolist() == [6, 6]
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        identity(x).add_(1)
    assert x.tolist() == [1, 1]
    y = kept(x)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_methods_and_signatures():
    class Layer:
        scale = 3.0

        @vfn.custom_vjp
        def __call__(self, x):
            return self.scale * x

    Layer.__call__.defvjp(lambda self, x: (self.scale * x, self.scale), lambda scale, g: (None, scale * g * 2))
    assert vfn.grad(Layer())(ONE) == 6
    assert (doubled().__name__, vfn.custom_jvp(torch.sin).__name__) == ("double", "sin")
