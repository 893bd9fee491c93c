"""Gradients and the other transforms: over any tree, nested in every order, on plain tensors and on arrays."""

import dataclasses
import math
from collections import namedtuple

import optree
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vescale_fn as vfn
from vescale_fn import P, random
from vescale_fn._core.base import tree
from vescale_fn.errors import TransformError

Pair = namedtuple("Pair", ["first", "second"])


@optree.dataclasses.dataclass(namespace="")
class Linear:
    w: torch.Tensor
    b: torch.Tensor
    rate: float = dataclasses.field(default=0.5, metadata={"pytree_node": False})


@pytest.fixture(params=["plain", "arrays"])
def place(request):
    """Puts a tree on one device, or on a simulated mesh (dp=2, tp=3) under a prefix of specs."""
    if request.param == "plain":
        yield lambda tree, spec=None: tree
    else:
        with vfn.simulate(6):
            mesh = vfn.make_mesh((2, 3), ("dp", "tp"))
            yield lambda tree, spec=P(): vfn.shard(tree, mesh, spec)


@pytest.fixture
def mesh():
    with vfn.simulate(6):
        yield vfn.make_mesh((2, 3), ("dp", "tp"))


def close(a, b, **how) -> None:
    a, b = vfn.unshard(a), vfn.unshard(b)
    assert tree.paths(a) == tree.paths(b)
    for x, y in zip(tree.leaves(a), tree.leaves(b)):
        if isinstance(y, torch.Tensor):
            torch.testing.assert_close(x, y, **how)
        else:
            assert x == y


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


# --- arguments and results --------------------------------------------------------------------------------------------


def test_argnums(place) -> None:
    f = lambda x, y, z: (x * y**2 * z).sum()
    x, y, z = (place(randn(7, 5), P("dp", "tp")) for _ in range(3))
    close(vfn.grad(f)(x, y, z), y**2 * z)
    close(vfn.grad(f, argnums=1)(x, y, z), 2 * x * y * z)
    close(vfn.grad(f, argnums=-1)(x, y, z), x * y**2)
    close(vfn.grad(f, argnums=(0,))(x, y, z), (y**2 * z,))
    close(vfn.grad(f, argnums=(2, 0))(x, y, z), (x * y**2, y**2 * z))
    close(vfn.grad(f, argnums=(-1, 1))(x, y, z), (x * y**2, 2 * x * y * z))
    value, (gx, gz) = vfn.value_and_grad(f, argnums=[0, 2])(x, y, z)
    close((value, gx, gz), (f(x, y, z), y**2 * z, x * y**2))
    close(vfn.grad(lambda x, *, k: (x * k).sum())(x, k=3.0), 3 * torch.ones(7, 5, dtype=torch.float64))


def test_aux(place) -> None:
    f = lambda x: ((x**2).sum(), {"y": x * 2, "n": 3, "none": None, "name": "adam"})
    x = place(randn(7), P("dp"))
    g, aux = vfn.grad(f, has_aux=True)(x)
    close(g, 2 * x)
    close(aux, {"y": 2 * x, "n": 3, "none": None, "name": "adam"})
    (value, aux), g = vfn.value_and_grad(f, has_aux=True)(x)
    close((value, g), ((x**2).sum(), 2 * x))
    assert not aux["y"].requires_grad
    assert not value.requires_grad
    assert not g.requires_grad


def test_any_tree(place) -> None:
    key = random.key(3)
    params = {
        "linear": Linear(randn(5), randn(5)),
        "pair": Pair(randn(3), None),
        "list": [torch.arange(4), torch.tensor([True, False]), (randn(2), 7)],
        "key": key,
        "name": "adam",
        "flag": True,
        "complex": torch.complex(randn(2), randn(2)),
        "": randn(1),
    }
    params = place(params, P())

    def loss(p):
        assert isinstance(p["linear"], Linear)
        assert p["linear"].rate == 0.5
        assert p["name"] == "adam"
        draw = random.uniform(p["key"], (5,), torch.float64)
        terms = [
            p["linear"].w ** 2 * draw,
            p["linear"].b ** 3,
            p["pair"].first * 2,
            p["list"][2][0].exp(),
            p["complex"].abs(),
        ]
        return sum(t.sum() for t in terms) + p["list"][0].sum() * p["list"][2][1]

    g = vfn.grad(loss)(params)
    assert isinstance(g["linear"], Linear)
    assert isinstance(g["pair"], Pair)
    assert g["pair"].second is None
    assert (g["name"], g["flag"], g["list"][2][1]) == ("adam", True, 7)
    assert isinstance(g["key"], random.Key), "a key passes through"
    close(g["key"].data, key.data)
    draw = random.uniform(key, (5,), torch.float64)
    close(g["linear"].w, 2 * params["linear"].w * draw)
    close(g["linear"].b, 3 * params["linear"].b ** 2)
    close(g["list"][:2], [torch.zeros(4, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)])
    close(g["list"][2][0], params["list"][2][0].exp())
    close(g["complex"], params["complex"] / params["complex"].abs())
    close(g[""], torch.zeros(1, dtype=torch.float64))
    assert tree.paths(g) == tree.paths(params)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_gradients_have_the_dtype_of_their_primals(place, dtype) -> None:
    x = place(torch.arange(1, 8).to(dtype), P("dp"))
    for g in (
        vfn.grad(lambda x: (x.to(torch.complex128).abs() ** 2).sum())(x),
        torch.func.grad(lambda x: x.abs().float().sum())(x),
    ):
        assert g.dtype == dtype


def test_what_a_function_closes_over_is_constant(place) -> None:
    c = place(randn(7), P("dp")).requires_grad_()
    g = vfn.grad(lambda x: (x * c).sum())(place(randn(7), P("dp")))
    close(g, c.detach())
    assert c.grad is None


def test_a_constant_function(place) -> None:
    x = place(randn(7), P("dp"))
    value, g = vfn.value_and_grad(lambda x: torch.tensor(2.0))(x)
    close((value, g), (torch.tensor(2.0), torch.zeros(7, dtype=torch.float64)))


def test_inside_no_grad_and_on_variables(place) -> None:
    x = place(randn(7), P("dp"))
    with torch.no_grad():
        close(vfn.grad(lambda x: (x**2).sum())(x), 2 * x)
    leaf = x.clone().requires_grad_()
    g = vfn.grad(lambda x: (x**3).sum())(leaf)
    assert g.requires_grad, "an outer backward goes through it"
    g.sum().backward()
    close(leaf.grad, 6 * x)
    with torch.inference_mode():
        close(vfn.grad(lambda x: (x**2).sum())(x), 2 * x)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("s", [P(), P("dp"), P("tp", "dp"), P(("tp", "dp")), P(None, ("dp", "tp"))], ids=repr)
def test_a_gradient_lies_as_its_primal(mesh, s: P) -> None:
    x, w = randn(7, 5), randn(5, 3)
    a, expected = vfn.shard(x, mesh, s), torch.func.grad(lambda x: ((x @ w) ** 2).sum())(x)
    for data in (w, vfn.shard(w, mesh, P("tp")), vfn.shard(w, mesh, P(None, "dp"))):
        f = lambda a: ((a @ data) ** 2).sum()
        for g in (
            vfn.grad(f)(a),
            vfn.value_and_grad(f)(a)[1],
            vfn.vjp(f, a)[1](torch.ones((), dtype=torch.float64))[0],
        ):
            assert vfn.spec_of(g) == s
            close(g, expected)
        close(torch.func.grad(f)(a), expected)
    g = vfn.grad(lambda x: vfn.unshard(((x @ vfn.shard(w, mesh, P("tp"))) ** 2).sum()))(x)
    assert type(g) is torch.Tensor, "plain for plain"
    close(g, expected)


def test_reduced(mesh) -> None:
    """Over an axis that the spec calls reduced the gradient stays unreduced: the user delays the sum."""
    w, x = randn(5, 3), randn(8, 5)
    data = vfn.shard(x, mesh, P("dp"))
    expected = torch.func.grad(lambda w: ((x @ w) ** 2).sum())(w)
    for spec, after in [
        (P(reduced={"dp"}), P(unreduced={"dp"})),
        (P(None, "tp", reduced={"dp"}), P(None, "tp", unreduced={"dp"})),
        (P(reduced={"dp", "tp"}), P(unreduced={"dp", "tp"})),
    ]:
        a = vfn.shard(w, mesh, spec)
        assert vfn.spec_of(a) == spec
        with vfn.comm_log() as log:
            g = vfn.grad(lambda w: ((data @ w) ** 2).sum())(a)
        assert vfn.spec_of(g) == after
        assert log.bytes("all_reduce", "dp") <= 8, "at most the loss"
        close(g, expected)
        close(vfn.with_sharding(g, P("dp")), expected)
    moved = vfn.grad(lambda w: ((data @ vfn.with_sharding(w, P(reduced={"dp"}))) ** 2).sum())(
        vfn.shard(w, mesh, P("dp"))
    )
    assert vfn.spec_of(moved) == P("dp")
    close(moved, expected)


@pytest.mark.parametrize("grad", [vfn.grad, torch.func.grad], ids=["vfn", "torch.func"])
def test_microbatches_of_reduced_weights_are_added_over_the_ranks_once(mesh, grad) -> None:
    """Two weights of one dtype and one of another, over microbatches of unequal sizes: one all-reduce a dtype."""
    layers = {"w": randn(5, 3), "b": randn(3), "f": torch.linspace(-1, 1, 5)}
    batches = [randn(rows, 5) for rows in (8, 3, 7)]

    def loss(p, x):
        return torch.tanh(x @ p["w"] + p["b"]).square().sum() + (x.float() @ p["f"]).square().sum()

    def step(p, batches):
        total = grad(loss)(p, batches[0])
        for x in batches[1:]:
            more = grad(loss)(p, x)
            total = {name: g + more[name] for name, g in total.items()}
        return total

    expected = step(layers, batches)
    for axes in (P("dp"), P(("tp", "dp"))):
        over = {"dp"} if axes == P("dp") else {"dp", "tp"}
        p, data = vfn.shard(layers, mesh, P(reduced=over)), vfn.shard(batches, mesh, axes)
        with vfn.comm_log() as log:
            total = step(p, data)
        assert not list(log)
        assert {vfn.spec_of(g) for g in total.values()} == {P(unreduced=over)}
        with vfn.comm_log() as log:
            found = vfn.with_sharding(total, P())
        assert [(record.op, record.bytes) for record in log] == [("all_reduce", 18 * 8), ("all_reduce", 5 * 4)]
        close({k: found[k] for k in "wb"}, {k: expected[k] for k in "wb"}, rtol=1e-12, atol=1e-12)
        close(found["f"], expected["f"], rtol=1e-5, atol=1e-5)


def test_unreduced_primals(mesh) -> None:
    """The cotangent of partial sums is replicated, and marked so: its own cotangent is partial sums."""
    a = vfn.shard(randn(7, 5), mesh, P("tp", unreduced={"dp"}))
    for f in (lambda a: (a**2).sum(), lambda a: (vfn.with_sharding(a, P("tp")) ** 2).sum()):
        g = vfn.grad(f)(a)
        close(g, 2 * vfn.unshard(a))
        assert vfn.spec_of(g) == P("tp", reduced={"dp"})


# --- nesting ----------------------------------------------------------------------------------------------------------

GRADS = {"vfn": vfn.grad, "func": torch.func.grad}


@pytest.mark.parametrize("outer", GRADS)
@pytest.mark.parametrize("inner", GRADS)
@pytest.mark.parametrize("s", [P(), P("dp"), P(("tp", "dp"))], ids=repr)
def test_gradients_of_gradients(place, outer: str, inner: str, s: P) -> None:
    x = place(randn(7), s)
    f = lambda x: (x**4).sum() + x.sum() ** 3
    first = GRADS[inner](f)
    second = GRADS[outer](lambda x: (first(x) * x).sum())(x)
    plain = vfn.unshard(x)
    close(second, torch.func.grad(lambda x: (torch.func.grad(f)(x) * x).sum())(plain))
    third = GRADS[outer](lambda x: GRADS[inner](lambda y: (first(y) ** 2).sum())(x).sum())(x)
    close(
        third, torch.func.grad(lambda x: torch.func.grad(lambda y: (torch.func.grad(f)(y) ** 2).sum())(x).sum())(plain)
    )


def test_the_inner_gradient_may_be_of_something_else(place) -> None:
    x, y = place(randn(7), P("dp")), place(randn(7), P("tp"))
    f = lambda x: vfn.grad(lambda y: (x**2 * y**3).sum())(y).sum()
    close(vfn.grad(f)(x), 6 * x * y**2)
    close(torch.func.grad(f)(x), 6 * x * y**2)
    close(vfn.grad(lambda y: vfn.grad(lambda z: (z**2 * y).sum())(x).sum())(y), 2 * x)


def test_hessians(place) -> None:
    x = place(randn(5), P("tp"))
    f = lambda x: (x**3).sum() + x[0] * x.sum()
    expected = torch.func.hessian(f)(vfn.unshard(x))
    close(torch.func.hessian(f)(x), expected)
    close(torch.func.jacrev(vfn.grad(f))(x), expected)
    close(torch.func.jacfwd(vfn.grad(f))(x), expected)
    close(torch.func.jacrev(torch.func.grad(f))(x), expected)
    v = torch.arange(5, dtype=torch.float64)
    close(vfn.jvp(vfn.grad(f), (x,), (place(v, P("dp")),))[1], expected @ v)
    close(vfn.vjp(vfn.grad(f), x)[1](place(v, P()))[0], expected @ v)


def test_a_gradient_step_inside_a_gradient(place) -> None:
    """MAML: trees, auxiliary values and value_and_grad in a nest."""
    p = place({"w": randn(5, 3), "n": 2}, P("dp"))
    x = place(randn(8, 5), P("tp"))

    def loss(p):
        return (torch.tanh(x @ p["w"]) ** 2).sum() * p["n"]

    def after_a_step(p):
        (value, aux), g = vfn.value_and_grad(lambda p: (loss(p), p["n"]), has_aux=True)(p)
        assert g["n"] == aux == 2
        return loss({"w": p["w"] - 0.1 * g["w"], "n": 2}) + 0.01 * value

    def plain_loss(w):
        return (torch.tanh(vfn.unshard(x) @ w) ** 2).sum() * 2

    expected = torch.func.grad(lambda w: plain_loss(w - 0.1 * torch.func.grad(plain_loss)(w)) + 0.01 * plain_loss(w))(
        vfn.unshard(p["w"])
    )
    for grad in (vfn.grad, lambda f: lambda p: {"w": torch.func.grad(lambda w: f({"w": w, "n": 2}))(p["w"]), "n": 2}):
        close(grad(after_a_step)(p), {"w": expected, "n": 2}, rtol=1e-12, atol=1e-12)


# --- vjp, jvp, vmap ---------------------------------------------------------------------------------------------------


def test_vjp_can_be_called_again(place) -> None:
    f = lambda p, x: {"y": p["w"] * x, "s": (p["w"].sum(), None, 3)}
    p, x = place({"w": randn(7), "n": torch.tensor(2)}, P()), place(randn(7), P("dp"))
    out, pullback = vfn.vjp(f, p, x)
    assert out["s"][1:] == (None, 3)
    for scale in (1.0, 2.0):
        ct = {
            "y": place(torch.full((7,), scale, dtype=torch.float64), P("tp")),
            "s": (torch.tensor(scale, dtype=torch.float64), None, 3),
        }
        gp, gx = pullback(ct)
        close(gp, {"w": scale * (x + 1), "n": torch.tensor(0)})
        close(gx, scale * p["w"])
        assert (vfn.spec_of(gp["w"]), vfn.spec_of(gx)) == (vfn.spec_of(p["w"]), vfn.spec_of(x))
    _, inner = vfn.vjp(lambda x: vfn.vjp(torch.sin, x)[1](torch.ones(7, dtype=torch.float64))[0], x)
    close(inner(torch.ones(7, dtype=torch.float64))[0], -x.sin())


def test_jvp(place) -> None:
    f = lambda p, x: {"y": p["w"] * x, "s": (p["w"].sum() ** 2, 3)}
    p, x = place({"w": randn(7), "n": 2}, P("dp")), place(randn(7), P("tp"))
    out, slope = vfn.jvp(f, (p, x), ({"w": x, "n": None}, 2 * x))
    close(out, f(p, x))
    close(slope["y"], x * x + p["w"] * 2 * x)
    close(slope["s"][0], 2 * p["w"].sum() * x.sum())
    close(vfn.jvp(vfn.grad(lambda x: (x**3).sum()), (x,), (x,))[1], 6 * x * x)


def test_vmap(place) -> None:
    x, y = place(randn(7, 5), P("dp", "tp")), place(randn(5, 7), P("dp"))
    close(vfn.vmap(torch.dot)(x, y.t()), (x * y.t()).sum(1))
    close(vfn.vmap(torch.dot, in_axes=(0, 1))(x, y), (x * y.t()).sum(1))
    close(vfn.vmap(torch.dot, in_axes=(1, None))(x, y[0] * 1), vfn.unshard(x).t() @ vfn.unshard(y)[0])
    tree_ = {"a": x, "b": (y, 3), "c": None}
    out = vfn.vmap(
        lambda t: {"s": t["a"].sum() + t["b"][0].sum() * t["b"][1], "row": t["a"]},
        in_axes=({"a": 0, "b": 1, "c": None},),
    )(tree_)
    close(out["s"], vfn.unshard(x).sum(1) + 3 * vfn.unshard(y).sum(0))
    close(vfn.vmap(lambda r: r * 2, out_axes=1)(x), 2 * vfn.unshard(x).t())
    close(
        vfn.vmap(lambda r: {"a": r, "b": r.sum()}, out_axes={"a": 1, "b": 0})(x),
        {"a": vfn.unshard(x).t(), "b": vfn.unshard(x).sum(1)},
    )
    close(vfn.vmap(vfn.vmap(lambda v: v * 2))(x), 2 * x)
    close(vfn.vmap(vfn.grad(lambda r: (r**2).sum()))(x), 2 * x)
    close(vfn.grad(lambda x: vfn.vmap(lambda r: (r**2).sum())(x).sum())(x), 2 * x)
    keys = random.split(random.key(0), 7)
    close(
        vfn.vmap(lambda k, r: r * random.uniform(k, (), torch.float64))(keys, x),
        vfn.unshard(x) * torch.stack([random.uniform(k, (), torch.float64) for k in keys])[:, None],
    )


# --- remat ------------------------------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """How often an op ran below autograd."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.n = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func.overloadpacket.__name__ == self.name
        return func(*args, **(kwargs or {}))


def test_remat_computes_again(place) -> None:
    x = place(randn(7), P("dp"))
    calls = []

    def block(x, scale=1.0):
        calls.append(x.shape)
        return {"y": x.sin().exp() * scale, "n": 3, "none": None}

    f = lambda block: lambda x: (block(block(x)["y"], scale=2.0)["y"] ** 2).sum()
    expected = vfn.grad(f(block))(x)
    calls.clear()
    close(vfn.grad(f(vfn.remat(block)))(x), expected)
    assert len(calls) == 4, "twice forward, and twice in the backward pass"
    with torch.no_grad():
        close(vfn.remat(block)(x), block(x))


def test_remat_in_nests(place) -> None:
    x = place(randn(7), P("dp"))
    g = vfn.remat(lambda x: x.sin() * x)
    plain = lambda x: x.sin() * x
    for f in (lambda h: lambda x: (h(x) ** 2).sum(), lambda h: lambda x: h(h(x)).sum()):
        twice = lambda f: vfn.grad(lambda x: (vfn.grad(f)(x) ** 2).sum())
        close(twice(f(g))(x), twice(f(plain))(x))
        close(torch.func.grad(f(g))(x), vfn.grad(f(plain))(x))
        close(vfn.vmap(vfn.grad(f(g)))(x[None] * 1), vfn.grad(f(plain))(x)[None])
        close(vfn.jvp(f(g), (x,), (x,)), vfn.jvp(f(plain), (x,), (x,)))
        close(vfn.grad(vfn.remat(f(g)))(x), vfn.grad(f(plain))(x))


def test_remat_keeps_closures_keys_and_places(mesh) -> None:
    """What it closes over gets its gradient; keyed draws repeat; the mesh of the forward pass is the one of the backward."""
    x, w = vfn.shard(randn(6), mesh, P("dp")), vfn.shard(randn(6), mesh, P("tp"))
    key = random.key(1)

    def f(remat):
        def loss(p):
            block = remat(lambda x: vfn.with_sharding(random.dropout(key, x * p["w"], 0.5), P("tp")))
            with vfn.use_mesh(mesh):
                y = block(p["x"])
            return (y**2).sum()

        return vfn.grad(loss)({"x": x, "w": w})

    close(f(vfn.remat), f(lambda g: g))


def test_remat_keeps_less() -> None:
    """Of a chain of blocks, only the blocks' inputs live until the backward pass."""

    def peak(remat) -> int:
        alive = 0

        def pack(x):
            nonlocal alive
            alive += 1
            return x

        def block(x):
            for _ in range(5):
                x = x.sin().cos()
            return x

        def loss(x):
            for _ in range(4):
                x = remat(block)(x)
            return x.sum()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            vfn.value_and_grad(lambda x: loss(x))(torch.ones(3))
        return alive

    assert peak(lambda f: f) == 40
    assert peak(vfn.remat) <= 8


# --- messages ---------------------------------------------------------------------------------------------------------


def message(call) -> str:
    with pytest.raises(TransformError) as error:
        call()
    return str(error.value)


def test_messages(mesh) -> None:
    x, n = torch.ones(3), torch.arange(3)
    a = vfn.shard(torch.ones(6, 4), mesh, P("dp"))
    assert message(lambda: vfn.grad(lambda x: x * 2)(x)) == (
        "grad: the function must return one floating-point number, a 0-d tensor\n"
        "  * it returned f32[3]\n"
        "  Instead: reduce it: loss.mean() or loss.sum(); with more results, return (loss, aux) and has_aux=True"
    )
    assert "  * it returned f32[6@dp,4]\n" in message(lambda: vfn.grad(lambda a: a * 2)(a))
    assert "  * it returned the float 3.0\n" in message(lambda: vfn.grad(lambda x: 3.0)(x))
    assert "  * it returned i64[]\n" in message(lambda: vfn.grad(lambda x: n.sum())(x))
    assert "it returned a tuple of f32[], the int 1\n" in message(lambda: vfn.grad(lambda x: (x.sum(), 1))(x))
    assert message(lambda: vfn.grad(lambda x: x.sum(), has_aux=True)(x)) == (
        "grad: with has_aux=True the function must return (value, aux)\n  * it returned f32[]\n"
        "  Instead: return loss, aux; or leave has_aux out, where the loss is all there is"
    )
    assert message(lambda: vfn.grad(lambda p, x: x.sum())({"n": n, "m": 3}, x)) == (
        "grad: there is no floating-point tensor to differentiate\n"
        "  * argument 0 ('p') holds i64 tensors, int leaves\n"
        "  Instead: point argnums at the parameters, or convert them with .float()"
    )
    assert "argument 0 ('p') holds no leaves" in message(lambda: vfn.grad(lambda p: 0.0)(None))
    assert message(lambda: vfn.grad(lambda x: x.sum(), argnums=(0, 2))(x)) == (
        "grad: argnums=(0, 2) does not fit a call with 1 argument\n  * there is no argument 2\n"
        "  Instead: argnums=0; arguments that are given by name are not counted"
    )
    for wrong in (lambda x: x * 2, lambda x: n.sum()):
        assert message(lambda: vfn.value_and_grad(wrong)(x)).startswith("value_and_grad: ")
    assert message(lambda: vfn.value_and_grad(lambda x: x.sum(), argnums=3)(x)).startswith("value_and_grad: argnums=3")
    nested = lambda x: vfn.vmap(vfn.grad(lambda y: y * torch.ones(2)))(x)
    assert message(lambda: nested(x)).startswith("grad: the function must return one floating-point number")
    assert "a call with 0 arguments" in message(lambda: vfn.grad(lambda x: x.sum())(x=x))
    _, pullback = vfn.vjp(lambda x: {"y": x * 2}, x)
    assert message(lambda: pullback({"y": torch.ones(2)})) == (
        "vjp: pullback: the cotangent does not fit the result\n  * out['y'] is f32[3], its cotangent f32[2]\n"
        "  Instead: a tensor of the same shape and dtype for each, torch.ones_like(x) say"
    )
    assert "no tensor argument is mapped over" in message(lambda: vfn.vmap(lambda x: x, in_axes=None)(x))
    assert issubclass(TransformError, (vfn.errors.VfnError, TypeError))
    with pytest.raises(vfn.errors.SpecError, match="in_axes is not a prefix"):
        vfn.vmap(lambda p: p["a"], in_axes=({"b": 0},))({"a": x})


def test_jvp_names_the_tangents_that_do_not_fit() -> None:
    x = {"a": torch.ones(3), "b": [torch.ones(2), torch.arange(2)]}
    f = lambda p, y: p["a"].sum() * y + p["b"][0].sum()
    bad = {"a": torch.ones(2), "b": [torch.ones(2, dtype=torch.float64), None]}
    assert message(lambda: vfn.jvp(f, (x, torch.tensor(1.0)), (bad, 2.0))) == (
        "jvp: the tangents do not fit the primals\n"
        "  * primals[0]['a'] is f32[3], its tangent f32[2]\n"
        "  * primals[0]['b'][0] is f32[2], its tangent f64[2]\n"
        "  * primals[1] is f32[], its tangent is the float 2.0, not a tensor\n"
        "  Instead: a tensor of the same shape and dtype for each, torch.ones_like(x) say"
    )
    assert "primals has length 2, but tangents has length 1" in message(lambda: vfn.jvp(f, (x, x), (x,)))


def test_vmap_with_results_that_are_not_mapped() -> None:
    w = torch.tensor([1.0, 2.0])
    f = lambda x, w: (x @ w, w * 2, None)
    for axes in ((0, None, 0), (0, None, None)):
        y, z, n = vfn.vmap(f, in_axes=(0, None), out_axes=axes)(torch.eye(2), w)
        assert torch.equal(y, w)
        assert torch.equal(z, w * 2)
        assert n is None
    out = vfn.vmap(lambda x: {"k": w, "n": 3}, out_axes=None)(w)
    assert out["n"] == 3
    assert torch.equal(out["k"], w)

    def inner(x):  # mapped by the outer vmap, the same for all entries of the inner one
        return vfn.vmap(lambda y: (x * y, x * 2), out_axes=(0, None))(w)

    table, double = vfn.vmap(inner)(w)
    assert torch.equal(table, torch.outer(w, w))
    assert torch.equal(double, w * 2)
    g = vfn.grad(lambda w: vfn.vmap(f, in_axes=(0, None), out_axes=(0, None, None))(torch.eye(2), w)[1].sum())(w)
    assert torch.equal(g, torch.tensor([2.0, 2.0]))
    assert message(lambda: vfn.vmap(lambda x: {"a": x, "b": w}, out_axes=None)(w)) == (
        "vmap: out_axes=None is for results that are the same for all entries\n"
        "  * out['a'] differs between entries, but out_axes is None for it\n"
        "  Instead: out_axes=0 there, or reduce the result over the entries after vmap"
    )


def test_vmap_of_an_array_with_a_result_that_is_not_mapped(mesh) -> None:
    a, w = vfn.shard(torch.arange(24.0).view(6, 4), mesh, P("dp")), vfn.shard(torch.ones(4), mesh, P())
    y, z = vfn.vmap(lambda x, w: (x * w, w * 2), in_axes=(0, None), out_axes=(0, None))(a, w)
    assert torch.equal(vfn.unshard(y), torch.arange(24.0).view(6, 4))
    assert torch.equal(vfn.unshard(z), torch.full((4,), 2.0))


def test_names_and_documentation_stay() -> None:
    def loss(x):
        """Of a model."""
        return x.sum()

    for wrapped in (vfn.grad(loss), vfn.value_and_grad(loss), vfn.vmap(loss), vfn.remat(loss)):
        assert (wrapped.__name__, wrapped.__doc__) == ("loss", "Of a model.")
    assert math.isfinite(vfn.value_and_grad(loss)(torch.ones(2))[0])


# --- the commonest case, which has a short way of its own ---------------------------------------------------------------

X, Y, Z = torch.tensor([1.0, 2.0]), torch.tensor(3.0), torch.tensor([[4.0]])
TREES = [
    X,
    [X],
    (X, Y),
    {"b": X, "a": Y},
    {"b": [X, (Y, Z)], "a": {}, "c": (), "d": {2: Z, 1: X}},
    [X, [Y, []], X],
    [[[X]]],
]


@pytest.mark.parametrize("value", TREES, ids=str)
def test_a_tree_taken_apart_is_put_together_again(value) -> None:
    found = []
    shape = tree.flatten_plain(value, frozenset((torch.Tensor,)), found)
    assert sorted(map(id, found)) == sorted(map(id, optree.tree_leaves(value)))
    again = tree.unflatten_plain(shape, iter(found))
    assert repr(again) == repr(value)
    assert list(map(id, optree.tree_leaves(again))) == list(map(id, optree.tree_leaves(value)))


@pytest.mark.parametrize("value", TREES, ids=str)
def test_gradients_of_plain_trees(value) -> None:
    f = lambda p: sum((x**2).sum() for x in optree.tree_leaves(p))
    got = vfn.grad(f)(value)
    assert repr(got) == repr(optree.tree_map(lambda x: 2 * x, value))  # also the order of keys


def test_a_function_may_take_its_argument_apart() -> None:
    given = {"a": X, "b": [Y, Y]}

    def loss(p):
        loss = (p.pop("a") ** 2).sum() * p["b"].pop()
        p["c"] = loss
        p["b"].clear()
        given["a"], given["b"] = given.pop("b"), given.pop("a")
        return loss

    assert repr(vfn.grad(loss)(given)) == repr({"a": 6 * X, "b": [torch.tensor(0.0), torch.tensor(5.0)]})


def frozen() -> torch.Tensor:
    with torch.inference_mode():
        return torch.tensor([1.0, 2.0])


# What the short way does not take, beside a leaf that it does: each must be seen to be another.
OTHERS = {
    "int": (lambda: torch.arange(2), lambda g: torch.equal(g, torch.zeros(2, dtype=torch.int64))),
    "complex": (lambda: torch.tensor([1j, 2.0]), lambda g: torch.equal(g, torch.tensor([2j, 4.0]))),
    "bf16": (lambda: X.bfloat16(), lambda g: torch.equal(g, 2 * X.bfloat16())),
    "inference": (frozen, lambda g: torch.equal(g, 2 * X) and not g.is_inference()),
    "parameter": (lambda: torch.nn.Parameter(X.clone()), lambda g: torch.equal(g, 2 * X) and g.requires_grad),
    "frozen parameter": (
        lambda: torch.nn.Parameter(X.clone(), False),
        lambda g: torch.equal(g, 2 * X) and type(g) is torch.Tensor,
    ),
    "none": (lambda: None, lambda g: g is None),
    "number": (lambda: 3.0, lambda g: g == 3.0),
    "pair": (lambda: Pair(X, Y), lambda g: type(g) is Pair and torch.equal(g.first, 2 * X)),
    "dataclass": (lambda: Linear(X, Y), lambda g: torch.equal(g.w, 2 * X) and g.rate == 0.5),
    "key": (lambda: random.key(0), lambda g: isinstance(g, random.Key)),
    "array": (lambda: vfn.shard(X, vfn.make_mesh((2,), ("i",)), P("i")), lambda g: vfn.spec_of(g) == P("i")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_beside_leaves_of_every_kind(name) -> None:
    make, right = OTHERS[name]

    def loss(p):
        leaves = [x for x in optree.tree_leaves(p) if isinstance(x, torch.Tensor) and x.dtype.is_signed]
        return sum((x.abs() ** 2).sum() for x in leaves if x.is_floating_point() or x.is_complex())

    with vfn.simulate(2):
        got = vfn.grad(loss)([X, {"a": make()}])
        assert torch.equal(got[0].detach(), 2 * X)
        assert right(got[1]["a"])


def test_gradients_where_the_data_is_an_array_and_the_weights_are_plain() -> None:
    with vfn.simulate(2):
        x = vfn.shard(torch.arange(4.0), vfn.make_mesh((2,), ("i",)), P("i"))
        value, got = vfn.value_and_grad(lambda w: (w["a"] * x).sum())({"a": torch.tensor(2.0)})
    assert type(got["a"]) is torch.Tensor
    assert (got["a"], vfn.unshard(value)) == (6.0, 12.0)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


def test_a_function_that_can_be_differentiated_once():
    """Of what its gradient depends on torch says nothing: it would count as a constant."""
    x = torch.tensor(2.0)
    inner = vfn.grad(lambda x: Once.apply(x) + x**2)
    assert vfn.grad(Once.apply)(x) == 12
    for f in (inner, vfn.grad(Once.apply)):
        with pytest.raises(TransformError, match="can be differentiated only once"):
            vfn.grad(f)(x)
    assert vfn.grad(lambda x: inner(x).detach() * x)(x) == 16
    assert vfn.grad(vfn.grad(lambda x: x * 3))(x) == 0
