"""Maps over some axes of a mesh, and maps inside maps, against the same function on whole plain tensors."""

import pytest
import torch
from torch.testing import assert_close

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.torch_internals import interception
from vescale_fn.errors import CollectiveError, MeshError, ReshardError, SpecError, TransformError, VaryingTypeError

D = torch.float64
MESHES = [
    ((2, 2), ("dp", "tp")),
    ((2, 3), ("dp", "tp")),
    ((3, 2), ("tp", "dp")),
    ((4, 1), ("dp", "tp")),
    ((1, 4), ("dp", "tp")),
]
ids = lambda mesh: ",".join(f"{name}={size}" for size, name in zip(*mesh))


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


W1, W2, X = numbers(6, 8, seed=1), numbers(8, 5, seed=2), numbers(12, 6, seed=3)


def whole_loss(w1, w2, x):
    return (torch.relu(x @ w1) @ w2).square().sum()


def body_loss(w1, w2, x):
    """Data parallel by hand, tensor parallel by annotation."""
    h = vfn.with_sharding(torch.relu(x @ w1), P(None, "tp"))
    return vfn.psum((h @ w2).square().sum(), "dp")


SPECS = [
    (P(), P(), P()),
    (P(None, "tp"), P("tp"), P("dp")),
    (P("tp"), P(None, "tp"), P("dp", "tp")),
    (P("dp"), P(("tp", "dp")), P(("dp", "tp"))),
    (P(("dp", "tp")), P("tp", "dp"), P(("tp", "dp"))),
]


@pytest.mark.parametrize("mesh", MESHES, ids=ids)
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_some_axes_manual(mesh, check):
    (value, grads) = vfn.value_and_grad(whole_loss, argnums=(0, 1, 2))(W1, W2, X)
    tangents = numbers(6, 8, seed=4), numbers(8, 5, seed=5), numbers(12, 6, seed=6)
    slope = vfn.jvp(whole_loss, (W1, W2, X), tangents)[1]
    with vfn.simulate(mesh[0][0] * mesh[0][1]):
        on = vfn.make_mesh(*mesh)
        f = vfn.shard_map(
            body_loss, mesh=on, axis_names={"dp"}, in_specs=(P(), P(), P("dp")), out_specs=P(), check_vma=check
        )
        for specs in SPECS if check else SPECS[1::2]:
            args = vfn.shard((W1, W2, X), on, specs)
            assert_close(vfn.unshard(f(*args)), value)
            got, gradients = vfn.value_and_grad(f, argnums=(0, 1, 2))(*args)
            assert_close(vfn.unshard((got, gradients)), (value, grads))
            assert [vfn.spec_of(g) for g in gradients] == [vfn.spec_of(a) for a in args]
            assert_close(vfn.unshard(torch.func.grad(f, argnums=(0, 1, 2))(*args)), grads)
            assert_close(vfn.unshard(vfn.jvp(f, args, vfn.shard(tangents, on, specs))[1]), slope)
        got, gradients = vfn.value_and_grad(f, argnums=(0, 1, 2))(W1, W2, X)  # plain in, plain out
        assert_close((vfn.unshard(got), gradients), (value, grads))
        assert not any(isinstance(g, torch.distributed.tensor.DTensor) for g in gradients)


def test_values_are_whole_along_the_other_axes():
    seen = []

    def body(x, y):
        seen.append((tuple(x.shape), vfn.spec_of(x), tuple(y.shape), vfn.spec_of(y)))
        return x * 2, y

    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("dp", "tp"))
        f = vfn.shard_map(body, mesh=mesh, axis_names={"dp"}, in_specs=(P("dp"), P()), out_specs=(P("dp"), P()))
        x, y = vfn.shard((X, W1), mesh, (P("dp", "tp"), P("tp")))
        with vfn.strict():
            two, same = f(x, y)
        assert seen == [((6, 6), P(None, "tp"), (6, 8), P("tp"))]
        assert (vfn.spec_of(two), vfn.spec_of(same)) == (P("dp", "tp"), P("tp"))
        assert_close(vfn.unshard((two, same)), (X * 2, W1), rtol=0, atol=0)


ROWS = {  # a body over "i", whose values are 4 x 6 there, and the same on whole 8 x 6 values (2 ranks along "i")
    "psum": (lambda x: vfn.psum(x, "i"), P(), lambda a, b: a + b),
    "pmean": (lambda x: vfn.pmean(x, "i"), P(), lambda a, b: (a + b) / 2),
    "pmax": (
        lambda x: vfn.pmax(x.detach(), "i") + vfn.psum(x, "i"),
        P(),
        lambda a, b: torch.maximum(a, b).detach() + a + b,
    ),
    "all_gather": (
        lambda x: vfn.all_gather(x, "i"),
        P(None, "i"),
        lambda a, b: torch.cat([torch.stack([a, b])] * 2, 1),
    ),
    "all_gather tiled": (
        lambda x: vfn.all_gather(x, "i", tiled=True, axis=1),
        P("i"),
        lambda a, b: torch.cat([torch.cat([a, b], 1)] * 2),
    ),
    "all_gather invarying": (
        lambda x: vfn.all_gather(x, "i", tiled=True, to="invarying"),
        P(),
        lambda a, b: torch.cat([a, b]),
    ),
    "psum_scatter": (lambda x: vfn.psum_scatter(x, "i", tiled=True), P("i"), lambda a, b: a + b),
    "psum_scatter dim 1": (
        lambda x: vfn.psum_scatter(x, "i", scatter_dimension=1, tiled=True),
        P(None, "i"),
        lambda a, b: a + b,
    ),
    "all_to_all": (lambda x: vfn.all_to_all(x, "i", 1, 0, tiled=True), P(None, "i"), lambda a, b: torch.cat([a, b])),
    "all_to_all back": (
        lambda x: vfn.all_to_all(x, "i", 0, 1, tiled=True),
        P("i"),
        lambda a, b: torch.cat([torch.cat([a[:2], b[:2]], 1), torch.cat([a[2:], b[2:]], 1)]),
    ),
    "ppermute": (lambda x: vfn.ppermute(x, "i", [(0, 1)]), P("i"), lambda a, b: torch.cat([torch.zeros_like(a), a])),
    "pbroadcast": (lambda x: vfn.pbroadcast(x, "i", 1), P("i"), lambda a, b: torch.cat([b, b])),
    "axis_index": (lambda x: x * (1 + vfn.axis_index("i")), P("i"), lambda a, b: torch.cat([a, 2 * b])),
    "softmax": (
        lambda x: x.softmax(1) @ x.mT,
        P("i"),
        lambda a, b: torch.cat([a.softmax(1) @ a.mT, b.softmax(1) @ b.mT]),
    ),
    "constant": (lambda x: vfn.psum(x + torch.ones(4, 1, dtype=D), "i"), P(), lambda a, b: a + b + 2),
    "tree": (
        lambda x: sum(vfn.psum({"a": x, "b": (x.sum(0), x.sum(1, keepdim=True))}, "i")["b"]) * 1.0,
        P(),
        lambda a, b: (a + b).sum(0) + (a + b).sum(1, keepdim=True),
    ),
}
LAYOUTS = [P(), P("i"), P(None, "j"), P("i", "j"), P(("i", "j")), P(("j", "i")), P("j", "i")]
REAL_LAYOUTS = [P("i", "j"), P(("j", "i"))]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("size", [2, 3, 4])  # 4 and 6 over 4: uneven, and an empty shard
def test_collectives_on_values_that_are_arrays(row, size):
    body, out, whole = ROWS[row]
    x, ct = numbers(8, 6, seed=7), None

    def one(x):
        return whole(x[:4], x[4:])

    want = one(x)
    ct = numbers(*want.shape, seed=8)
    grad = vfn.grad(lambda x: (one(x) * ct).sum())(x)
    second = vfn.grad(lambda x: (vfn.grad(lambda x: (one(x).sin() * ct).sum())(x) * numbers(8, 6, seed=9)).sum())(x)
    with vfn.simulate(2 * size):
        for shape, names in (((2, size), ("i", "j")), ((size, 2), ("j", "i"))):
            mesh = vfn.make_mesh(shape, names)
            f = vfn.shard_map(body, mesh=mesh, axis_names={"i"}, in_specs=P("i"), out_specs=out)
            for lying in LAYOUTS:
                xx = vfn.shard(x, mesh, lying)
                assert_close(vfn.unshard(f(xx)), want)
                got = vfn.grad(lambda x: (f(x) * ct).sum())(xx)
                assert_close(vfn.unshard(got), grad)
                assert vfn.spec_of(got) == vfn.spec_of(xx)
            xx = vfn.shard(x, mesh, P("i", "j"))
            assert_close(
                vfn.unshard(vfn.jvp(f, (xx,), (vfn.shard(ct_like(x), mesh, P("j")),))[1]),
                vfn.jvp(one, (x,), (ct_like(x),))[1],
            )
            batch = torch.stack([x, 2 * x, x - 1])
            assert_close(
                vfn.unshard(vfn.vmap(f)(vfn.shard(batch, mesh, P(None, "i", "j")))),
                torch.stack([one(b) for b in batch]),
            )
            got = vfn.grad(lambda x: (vfn.grad(lambda x: (f(x).sin() * ct).sum())(x) * numbers(8, 6, seed=9)).sum())(xx)
            assert_close(vfn.unshard(got), second)


def ct_like(x):
    return numbers(*x.shape, seed=11)


# --- transforms in the body ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=ids)
def test_gradients_taken_in_the_body(mesh):
    grads = vfn.grad(whole_loss, argnums=(0, 1))(W1, W2, X)

    def local_loss(w1, w2, x):
        return (vfn.with_sharding(torch.relu(x @ w1), P(None, "tp")) @ w2).square().sum()

    for engine in (vfn.grad, torch.func.grad):

        def body(w1, w2, x):
            return engine(local_loss, argnums=(0, 1))(w1, w2, x)  # summed over "dp" with no call by the user

        with vfn.simulate(mesh[0][0] * mesh[0][1]):
            on = vfn.make_mesh(*mesh)
            f = vfn.shard_map(body, mesh=on, axis_names={"dp"}, in_specs=(P(), P(), P("dp")), out_specs=P())
            for specs in SPECS:
                assert_close(vfn.unshard(f(*vfn.shard((W1, W2, X), on, specs))), grads)
            assert_close(vfn.unshard(f(W1, W2, X)), grads)


def test_a_closure_is_a_constant_with_a_gradient():
    want = vfn.grad(lambda w: (X @ w).square().sum())(W1)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))

        def loss(w):
            body = lambda x: vfn.psum((x @ w).square().sum(), "dp")
            return vfn.shard_map(body, mesh=mesh, axis_names={"dp"}, in_specs=P("dp"), out_specs=P())(X)

        assert_close(vfn.grad(loss)(W1), want)
        for spec in (P(), P("tp"), P(None, "tp")):
            w = vfn.shard(W1, mesh, spec)
            got = vfn.grad(loss)(w)
            assert_close(vfn.unshard(got), want)
            assert vfn.spec_of(got) == spec


def test_remat_and_draws():
    key = vfn.random.key(3)

    def one(w, x):
        return (vfn.random.dropout(key, x @ w, 0.5)).square().sum()

    want = vfn.grad(one)(W1, X)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))

        def body(w, x):
            h = vfn.remat(lambda w, x: torch.tanh(vfn.all_gather(x, "dp", tiled=True, to="invarying") @ w))(w, x)
            return (vfn.random.dropout(key, h, 0.5)).square().sum()

        f = vfn.shard_map(body, mesh=mesh, axis_names={"dp"}, in_specs=(P(), P("dp")), out_specs=P())
        for specs in ((P(), P()), (P(None, "tp"), P("dp")), (P("tp"), P("dp", "tp"))):
            got = vfn.grad(f)(*vfn.shard((W1, X), mesh, specs))
            assert_close(
                vfn.unshard(got),
                vfn.grad(lambda w, x: vfn.random.dropout(key, torch.tanh(x @ w), 0.5).square().sum())(W1, X),
            )
    assert want.shape == W1.shape


def test_writes_and_reading():
    def body(x):
        x = x.clone()
        x[0] = 7.0
        x.mul_(2)
        return x, vfn.pmax(x.detach().max(), "dp")

    want = X.clone()
    want[0], want[6] = 7.0, 7.0
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        f = vfn.shard_map(body, mesh=mesh, axis_names={"dp"}, in_specs=P("dp"), out_specs=(P("dp"), P()))
        y, top = f(vfn.shard(X, mesh, P("dp", "tp")))
        assert_close(vfn.unshard((y, top)), (want * 2, (want * 2).max()))
        g = vfn.shard_map(lambda x: x.add_(1), mesh=mesh, axis_names={"dp"}, in_specs=P("dp"), out_specs=P("dp"))
        with pytest.raises(vfn.errors.InPlaceError, match="belongs to the caller"):
            g(vfn.shard(X, mesh, P("dp", "tp")))
        h = vfn.shard_map(
            lambda x: x * float(x.sum()), mesh=mesh, axis_names={"dp"}, in_specs=P("dp"), out_specs=P("dp")
        )
        with pytest.raises(VaryingTypeError, match="differs by rank"):
            h(vfn.shard(X, mesh, P("dp", "tp")))
        k = vfn.shard_map(
            lambda x: x * float(vfn.psum(x.sum(), "dp")),
            mesh=mesh,
            axis_names={"dp"},
            in_specs=P("dp"),
            out_specs=P("dp"),
        )
        assert_close(vfn.unshard(k(vfn.shard(X, mesh, P("dp", "tp")))), X * float(X.sum()))


# --- maps inside maps ---------------------------------------------------------------------------------------------------


def nested(outer, inner, on):
    def ring(h, w2):
        return vfn.psum(h @ w2, inner)

    def body(w1, w2, x):
        h = torch.relu(x @ w1)
        y = vfn.shard_map(ring, axis_names={inner}, in_specs=(P(None, inner), P(inner)), out_specs=P())(h, w2)
        return vfn.psum(y.square().sum(), outer)

    return vfn.shard_map(body, mesh=on, axis_names={outer}, in_specs=(P(), P(), P(outer)), out_specs=P())


@pytest.mark.parametrize(
    "mesh", [((2, 2), ("dp", "tp")), ((3, 2), ("dp", "tp")), ((2, 3), ("tp", "dp")), ((1, 2), ("dp", "tp"))], ids=ids
)
def test_a_map_inside_a_map(mesh):
    value, grads = vfn.value_and_grad(whole_loss, argnums=(0, 1, 2))(W1, W2, X)
    tangents = numbers(6, 8, seed=4), numbers(8, 5, seed=5), numbers(12, 6, seed=6)
    slope = vfn.jvp(whole_loss, (W1, W2, X), tangents)[1]
    with vfn.simulate(mesh[0][0] * mesh[0][1]):
        on = vfn.make_mesh(*mesh)
        f = nested("dp", "tp", on)
        for specs in SPECS:
            args = vfn.shard((W1, W2, X), on, specs)
            got = vfn.value_and_grad(f, argnums=(0, 1, 2))(*args)
            assert_close(vfn.unshard(got), (value, grads))
            assert_close(vfn.unshard(torch.func.grad(f, argnums=(0, 1, 2))(*args)), grads)
            assert_close(vfn.unshard(vfn.jvp(f, args, vfn.shard(tangents, on, specs))[1]), slope)
        assert_close(vfn.unshard(vfn.value_and_grad(f, argnums=(0, 1, 2))(W1, W2, X)), (value, grads))


def test_three_axes_three_maps():
    x = numbers(8, 12, 2, seed=1)
    want = vfn.value_and_grad(lambda x: (x.sum(1) ** 2).sum() + x.sum())(x)
    with vfn.simulate(8):
        mesh = vfn.make_mesh((2, 2, 2), ("a", "b", "c"))

        def third(x):
            assert vfn.axis_size(("a", "b", "c")) == 8
            return vfn.psum((x**2).sum(), ("c", "a"))

        def second(x):
            y = vfn.psum(x.sum(1), "b")
            inner = vfn.shard_map(third, axis_names={"c"}, in_specs=P("c"), out_specs=P())
            return inner(y), vfn.psum(x.sum(), ("b", "a"))

        def first(x):
            return vfn.shard_map(second, axis_names={"b"}, in_specs=P(None, "b"), out_specs=(P(), P()))(x)

        f = vfn.shard_map(first, mesh=mesh, axis_names={"a"}, in_specs=P("a"), out_specs=(P(), P()))
        for spec in (P(), P("a", "b", "c"), P("c", ("b", "a")), P(("b", "c", "a"))):
            got = vfn.value_and_grad(lambda x: sum(f(x)))(vfn.shard(x, mesh, spec))
            assert_close(vfn.unshard(got), want)


def test_the_inner_map_sees_values_of_the_outer_body():
    x, w = numbers(4, 6, seed=1), numbers(6, 6, seed=2)
    want = vfn.value_and_grad(lambda x, w: ((x @ w) * x.sum(1, keepdim=True)).sin().sum(), argnums=(0, 1))(x, w)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))

        def body(x, w):
            scale = x.sum(1, keepdim=True)  # varies over dp; closed over below

            def inner(wt):
                return (x @ wt) * scale

            y = vfn.shard_map(inner, axis_names={"tp"}, in_specs=P(None, "tp"), out_specs=P(None, "tp"))(w)
            return vfn.psum(y.sin().sum(), "dp")

        f = vfn.shard_map(body, mesh=mesh, axis_names={"dp"}, in_specs=(P("dp"), P()), out_specs=P())
        for specs in ((P(), P()), (P("dp"), P(None, "tp")), (P("tp"), P("dp", "tp"))):
            got = vfn.value_and_grad(f, argnums=(0, 1))(*vfn.shard((x, w), mesh, specs))
            assert_close(vfn.unshard(got), want)


# --- real ranks ---------------------------------------------------------------------------------------------------------


def _on_real_ranks(shape, names):
    torch.set_num_threads(1)
    mesh = vfn.make_mesh(shape, names)
    found = []
    for f in (
        vfn.shard_map(body_loss, mesh=mesh, axis_names={"dp"}, in_specs=(P(), P(), P("dp")), out_specs=P()),
        vfn.shard_map(
            body_loss, mesh=mesh, axis_names={"dp"}, in_specs=(P(), P(), P("dp")), out_specs=P(), check_vma=False
        ),
        nested("dp", "tp", mesh),
    ):
        for specs in SPECS[2::2]:
            args = vfn.shard((W1, W2, X), mesh, specs)
            found.append(vfn.unshard(vfn.value_and_grad(f, argnums=(0, 1, 2))(*args)))
            found.append(vfn.unshard((f(*args), torch.func.grad(f, argnums=(0, 1, 2))(*args))))
        found.append(vfn.unshard(vfn.value_and_grad(f, argnums=(0, 1, 2))(W1, W2, X)))
    return found


def _collectives_on_real_ranks(shape, names):
    torch.set_num_threads(1)
    mesh, found = vfn.make_mesh(shape, names), {}
    for row, (body, out, _) in ROWS.items():
        f = vfn.shard_map(body, mesh=mesh, axis_names={"i"}, in_specs=P("i"), out_specs=out)
        for lying in REAL_LAYOUTS:
            x = vfn.shard(numbers(8, 6, seed=7), mesh, lying)
            found[row, lying] = vfn.unshard((f(x), vfn.grad(lambda x: f(x).sin().sum())(x)))
    return found


def test_real_ranks(gloo):
    want = vfn.value_and_grad(whole_loss, argnums=(0, 1, 2))(W1, W2, X)
    for results in gloo(4, _on_real_ranks, (2, 2), ("dp", "tp")):
        for got in results:
            assert_close(got, want)


def test_collectives_on_real_ranks(gloo):
    x = numbers(8, 6, seed=7)
    for found in gloo(4, _collectives_on_real_ranks, (2, 2), ("j", "i")):
        for row, (_, _, whole) in ROWS.items():
            one = lambda x: whole(x[:4], x[4:])
            for lying in REAL_LAYOUTS:
                assert_close(found[row, lying], (one(x), vfn.grad(lambda x: one(x).sin().sum())(x)))


# --- a body with types in one without ---------------------------------------------------------------------------------


def whole_rows(w, x, c):
    return sum((w * row * c).sum().square() for row in x)


def rows(w, x, c, mesh, closed):
    """The rows of `x` over "i", without types; their columns over "j", with types. `c` comes in by every way there is."""

    def outer(w, x, *given):
        scale = given[0] if given else c
        dot = lambda w, x: vfn.psum((w * x * scale).sum(), "j")
        dot = vfn.shard_map(dot, axis_names={"j"}, in_specs=(P("j"), P(None, "j")), out_specs=P())
        return vfn.psum(dot(w, x).square(), "i")

    f = vfn.shard_map(
        outer, mesh=mesh, axis_names={"i"}, in_specs=(P(), P("i"), P())[: 3 - closed], out_specs=P(), check_vma=False
    )
    return f(w, x) if closed else f(w, x, c)


def gradient_in_a_body(w, x):
    """By a value of the body without types, used as an argument and as a closure of the one with."""

    def loss(w):
        inner = lambda f, *specs: vfn.shard_map(f, axis_names={"j"}, in_specs=specs, out_specs=P())
        a = inner(lambda x: vfn.psum((x * w.sum()).sum(), "j"), P(None, "j"))(x)
        b = inner(lambda w, x: vfn.psum((w * x).sum(), "j"), P("j"), P(None, "j"))(w, x)
        return a.square() + b

    return vfn.grad(loss)(w)[None]


NESTED = numbers(4, seed=14), numbers(2, 4, seed=15), numbers(1, seed=16)[0]


def nested_types():
    mesh = vfn.make_mesh((2, 2), ("i", "j"))
    found = []
    for closed in (True, False):
        f = lambda *args, closed=closed: rows(*args, mesh, closed)
        gradients = vfn.grad(f, (0, 1, 2)), vfn.jit(vfn.grad(f, (0, 1, 2))), torch.func.grad(f, (0, 1, 2))
        found.append(vfn.unshard([f(*NESTED), *(g(*NESTED) for g in gradients)]))
    inside = vfn.shard_map(
        gradient_in_a_body, mesh=mesh, axis_names={"i"}, in_specs=(P(), P("i")), out_specs=P("i"), check_vma=False
    )
    return found, vfn.unshard(inside(*NESTED[:2]))


def test_types_in_a_body_without(gloo):
    value, gradients = vfn.value_and_grad(whole_rows, argnums=(0, 1, 2))(*NESTED)
    w, x, _ = NESTED
    one = lambda row: vfn.grad(lambda w: (row * w.sum()).sum().square() + (row * w).sum())(w)
    wanted = [[value, gradients, gradients, gradients]] * 2, torch.stack([one(x[0]), one(x[1])])
    with vfn.simulate(4):
        assert_close(nested_types(), wanted)
    for found in gloo(4, nested_types):
        assert_close(found, wanted)


def test_a_collective_over_an_axis_without_types():
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("i", "j"))

        def nested(f, x):
            inner = vfn.shard_map(f, axis_names={"j"}, in_specs=P(None, "j"), out_specs=P(None, "j"))
            specs = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": False}
            return vfn.unshard(vfn.shard_map(lambda x: inner(x), mesh=mesh, axis_names={"i"}, **specs)(x))

        x = torch.ones(2, 2)
        assert nested(lambda x: x * (vfn.axis_index("i") + vfn.axis_size("i")), x).tolist() == [[2, 2], [3, 3]]
        for names in ("i", ("i", "j")):
            with pytest.raises(CollectiveError) as raised:
                nested(lambda x, names=names: vfn.psum(x, names), x)
            assert str(raised.value) == (
                f"psum: axis_name={names!r}, but 'i' is of a shard_map around this one without types, so it is not known how "
                "values differ along it\n"
                "  Instead: the collective in the body of that one, before or after this one; or check_vma=True for both"
            )


# --- what is refused ------------------------------------------------------------------------------------------------------


def _refused(kind):
    x = torch.zeros(4, 4)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        part = lambda f, **k: vfn.shard_map(
            f, **{"mesh": mesh, "axis_names": {"dp"}, "in_specs": P("dp"), "out_specs": P("dp"), **k}
        )
        if kind == "unknown axis":
            part(lambda x: x, axis_names={"pp"})(x)
        if kind == "in_specs":
            part(lambda x: x, in_specs=P("tp"))(x)
        if kind == "out_specs":
            part(lambda x: x, out_specs=P("dp", "tp"))(x)
        if kind == "collective":
            part(lambda x: vfn.psum(x, ("dp", "tp")))(x)
        if kind == "with_sharding":
            part(lambda x: vfn.with_sharding(x, P("dp")))(x)
        if kind == "again":
            part(lambda x: part(lambda x: x)(x))(x)
        if kind == "all taken":
            whole = vfn.shard_map(lambda x: part(lambda x: x)(x), mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
            whole(x)
        if kind == "another mesh":
            other = vfn.make_mesh((4,), ("tp",))
            part(lambda x: vfn.shard_map(lambda x: x, mesh=other, in_specs=P(), out_specs=P())(x))(x)
        if kind == "unchecked inside":
            part(lambda x: vfn.shard_map(lambda x: x, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)(x))(x)
        if kind == "closure":
            y = vfn.shard(x, mesh, P("dp", "tp"))
            part(lambda x: x + y)(x)


REFUSED = {
    "unknown axis": (
        MeshError,
        """\
shard_map(<lambda>): axis_names={'pp'} does not fit the mesh (dp=2, tp=2)
  * 'pp' is not one of the axes ('dp', 'tp')
  Instead: the axes along which the body sees one rank's blocks; none: all of them""",
    ),
    "in_specs": (
        SpecError,
        """\
shard_map(<lambda>): the arguments do not fit in_specs on the mesh (dp=2, tp=2)
  * args[0] of shape f32[4,4], where args[0] is bound to <lambda>'s parameter 'x', corresponds to in_specs = P('tp'): axis 'tp' is not in axis_names={'dp'}: along it a value lies in the body as it does outside
  Instead: a spec without 'tp', or axis_names with it""",
    ),
    "out_specs": (
        SpecError,
        """\
shard_map(<lambda>): the results do not fit out_specs on the mesh (dp=2, tp=2)
  * out is f32[2,4]{V:dp}, for out_specs P('dp', 'tp'): axis 'tp' is not in axis_names={'dp'}: along it a value lies in the body as it does outside
  Instead: a spec without 'tp', or axis_names with it""",
    ),
    "collective": (
        CollectiveError,
        """\
psum: axis_name=('dp', 'tp'), but only ('dp',) are manual in this shard_map body
  * along 'tp' of the mesh (dp=2, tp=2) its values are whole
  Instead: x.sum(...) and its like, as on one device; or axis_names={'dp', 'tp'}""",
    ),
    "with_sharding": (
        SpecError,
        """\
with_sharding: this is the body of a shard_map: its values are one rank's blocks along 'dp'
  * axis 'dp' of P('dp') is manual here
  Instead: a collective (vfn.all_gather, vfn.psum_scatter, ...) in the body, or the spec in in_specs or out_specs""",
    ),
    "again": (
        MeshError,
        """\
shard_map(<lambda>): it was called inside the body of another shard_map, where 'dp' is manual already
  Instead: axis_names among the others, ('tp',)""",
    ),
    "all taken": (
        MeshError,
        """\
shard_map(<lambda>): it was called inside the body of another shard_map, where all axes are manual already
  Instead: call the function itself: its values are local too""",
    ),
    "another mesh": (
        MeshError,
        """\
shard_map(<lambda>): a map inside the body of another is on the same mesh
  * it was given the mesh (tp=4), the other is on the mesh (dp=2, tp=2)
  Instead: no mesh= for the inner one""",
    ),
    "unchecked inside": (
        VaryingTypeError,
        """\
shard_map(<lambda>): of a map inside the body of another, gradients are right only where it is checked
  * check_vma=True for the outer one, check_vma=False for this one
  Instead: check_vma=True, which is the default, for this one; or one shard_map over all axes""",
    ),
    "closure": (
        VaryingTypeError,
        """\
shard_map(<lambda>): the body uses an array from outside, of which each rank holds a part
  * it is f32[4@dp,4@tp] on the mesh (dp=2, tp=2)
  Instead: pass it as an argument, with in_specs=P('dp') for its block or P() for the whole""",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_messages(kind):
    error, text = REFUSED[kind]
    with pytest.raises(error) as raised:
        _refused(kind)
    assert str(raised.value) == text


@pytest.mark.parametrize("names", [None, set(), {"dp", "tp"}, ("tp", "dp"), frozenset(("dp", "tp"))])
def test_axis_names_says_all_axes_in_several_ways(names):
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        f = vfn.shard_map(
            lambda x: vfn.psum(x, ("dp", "tp")), mesh=mesh, axis_names=names, in_specs=P(("dp", "tp")), out_specs=P()
        )
        assert vfn.unshard(f(torch.arange(4.0))).tolist() == [6.0]


def test_an_axis_name_alone_is_one_axis():
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        f = vfn.shard_map(
            lambda x: (vfn.psum(x, "dp"), vfn.spec_of(x)), mesh=mesh, axis_names="dp", in_specs=P("dp"), out_specs=P()
        )
        y, spec = f(vfn.shard(torch.arange(4.0), mesh, P(("dp", "tp"))))
        assert (vfn.unshard(y).tolist(), spec) == ([2.0, 4.0], P("tp"))


# --- entries of a vmap that are split -------------------------------------------------------------------------------------


def scaled(x, w):
    return vfn.psum((x.sin() @ w).square(), "j")


def whole_scaled(x, w):
    a, b = (x[..., :3], w[:3]), (x[..., 3:], w[3:])
    return sum((x.sin() @ w).square() for x, w in (a, b))


@pytest.mark.parametrize("names", [None, {"j"}], ids=["all axes", "one axis"])
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_entries_of_a_vmap_stay_split_over_axes_that_a_map_does_not_use(names, check):
    batch, w = numbers(4, 5, 6, seed=12), numbers(6, 2, seed=13)
    want = torch.stack([whole_scaled(x, w) for x in batch])
    slopes = torch.stack([vfn.grad(lambda w: whole_scaled(x, w).sum())(w) for x in batch])
    both = vfn.grad(lambda x, w: torch.stack([whole_scaled(x, w) for x in x]).sum(), argnums=(0, 1))(batch, w)
    with vfn.simulate(4), vfn.strict():
        mesh = vfn.make_mesh((2, 2), ("i", "j"))
        f = vfn.shard_map(
            scaled, mesh=mesh, in_specs=(P(None, "j"), P("j")), out_specs=P(), axis_names=names, check_vma=check
        )
        xs, ws = vfn.shard((batch, w), mesh, (P("i", None, "j"), P("j")))
        with vfn.comm_log() as log:
            got = vfn.vmap(f, in_axes=(0, None))(xs, ws)
        assert [(entry.op, entry.axes) for entry in log] == [("all_reduce", ("j",))]
        assert vfn.spec_of(got) == P("i")
        assert_close(vfn.unshard(got), want)
        with vfn.comm_log() as log:  # a gradient of each entry
            each = vfn.vmap(vfn.grad(lambda w, x: f(x, w).sum()), in_axes=(None, 0))(ws, xs)
        assert {entry.axes for entry in log} <= {("j",)}
        assert vfn.spec_of(each) == P("i", "j")
        assert_close(vfn.unshard(each), slopes)
        grads = vfn.grad(lambda x, w: vfn.vmap(f, in_axes=(0, None))(x, w).sum(), argnums=(0, 1))(xs, ws)
        assert [vfn.spec_of(g) for g in grads] == [P("i", None, "j"), P("j")]
        assert_close(vfn.unshard(grads), both)


def _entries_on_real_ranks():
    mesh = vfn.make_mesh((2, 2), ("i", "j"))
    f = vfn.shard_map(scaled, mesh=mesh, in_specs=(P(None, "j"), P("j")), out_specs=P())
    batch, w = numbers(4, 5, 6, seed=12), numbers(6, 2, seed=13)
    xs, ws = vfn.shard((batch, w), mesh, (P("i", None, "j"), P("j")))
    found = []
    for g in (vfn.vmap(f, (0, None)), vfn.jit(vfn.vmap(f, (0, None))), vfn.vmap(f, (0, None), spmd_axis_name="i")):
        with vfn.strict(), vfn.comm_log() as log:
            got = g(xs, ws)
        found.append((vfn.spec_of(got), {entry.axes for entry in log}, vfn.unshard(got)))
    return found


def test_entries_of_a_vmap_on_real_ranks(gloo):
    batch, w = numbers(4, 5, 6, seed=12), numbers(6, 2, seed=13)
    want = torch.stack([whole_scaled(x, w) for x in batch])
    for results in gloo(4, _entries_on_real_ranks):
        for spec, axes, got in results:
            assert (spec, axes) == (P("i"), {("j",)})
            assert_close(got, want)


@pytest.mark.parametrize("lying", [P("i"), P(("i", "j")), P("j", "i"), P(None, None, "i")])
def test_entries_of_a_vmap_whose_body_does_not_communicate_move_nothing(lying):
    batch = numbers(3, 4, 2, seed=14)
    with vfn.simulate(4), vfn.strict(), vfn.comm_log() as log:
        mesh = vfn.make_mesh((2, 2), ("i", "j"))
        rest = P(*lying[1:])
        f = vfn.shard_map(lambda x: x.exp() * 2, mesh=mesh, in_specs=rest, out_specs=rest)
        got = vfn.vmap(vfn.vmap(f, 1, 1) if len(lying) == 1 else f)(xs := vfn.shard(batch, mesh, lying))
        assert len(log) == 0
        assert vfn.spec_of(got) == vfn.spec_of(xs) == lying
        assert_close(vfn.unshard(got), batch.exp() * 2)


def test_entries_of_a_vmap_are_gathered_where_the_map_uses_their_axis():
    batch, ran = numbers(4, 6, seed=15), []

    def over_both(x):  # its specs do not name "i"
        ran.append(1)
        return vfn.psum(x * (1.0 + vfn.axis_index("i")), ("i", "j"))

    def by_spec(x):
        return x * 2

    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("i", "j"))
        xs = vfn.shard(batch, mesh, P("i", "j"))
        f = vfn.shard_map(over_both, mesh=mesh, in_specs=P("j"), out_specs=P())
        for _ in range(2):
            assert_close(vfn.unshard(vfn.vmap(f)(xs)), 3 * (batch[:, :3] + batch[:, 3:]))
        assert len(ran) == 3  # what the body uses is found out once
        g = vfn.shard_map(by_spec, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        assert_close(vfn.unshard(vfn.vmap(g)(xs)), batch * 2)
        for h in (f, g):
            with (
                vfn.strict(),
                pytest.raises(ReshardError, match="its entries, under vmap, are split over axis 'i', which the map"),
            ):
                vfn.vmap(h)(xs)


def test_the_first_body_of_a_process_may_be_under_a_transform():
    interception._functions_are_seen.cache_clear()
    with vfn.simulate(2):
        f = vfn.shard_map(lambda x: x * 2, mesh=vfn.make_mesh((2,), ("i",)), in_specs=P("i"), out_specs=P("i"))
        assert_close(vfn.unshard(vfn.vmap(vfn.vmap(f))(torch.ones(2, 2, 2))), torch.full((2, 2, 2), 2.0))


MADE = {  # what a body makes itself, laid out or put together by the library, over 2 x 2 ranks: the result, its spec
    "stated": (lambda x: vfn.with_sharding(torch.ones(6, dtype=D), P("i")), P()),
    "stated, of a position": (
        lambda x: vfn.with_sharding(torch.zeros(4, dtype=D) + vfn.axis_index("j"), P("i")),
        P("j"),
    ),
    "an operand": (lambda x: x + vfn.with_sharding(torch.arange(6.0, dtype=D), P("i")), P("j")),
    "whole": (lambda x: vfn.unshard(x), P("j")),
    "a sum of the whole": (lambda x: vfn.psum(x.full_tensor(), "j"), P()),
    "a finished sum": (lambda x: vfn.with_sharding(x @ x.mT, P("i")), P("j")),
    "a tree": (lambda x: vfn.with_sharding((x @ x.mT, x + 1, torch.ones(4, dtype=D)), P("i")), P("j")),
}


@pytest.mark.parametrize("row", MADE)
def test_what_the_library_makes_in_an_unchecked_body_is_no_value_of_the_body(row):
    body, out = MADE[row]
    x = numbers(4, 6, seed=16)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("i", "j"))
        checked, unchecked = (
            vfn.shard_map(body, mesh=mesh, axis_names={"j"}, in_specs=P("j"), out_specs=out, check_vma=check)
            for check in (True, False)
        )
        for given in (vfn.shard(x, mesh, P("j", "i")), x):
            for needs_grad in (False, True):
                given = given.detach().requires_grad_(needs_grad)
                want, got = vfn.unshard(checked(given)), vfn.unshard(unchecked(given))
                assert all(type(leaf) is torch.Tensor for leaf in (got if isinstance(got, tuple) else (got,)))
                assert_close(got, want, rtol=0, atol=0)
                assert tree_specs(unchecked(given)) == tree_specs(checked(given))


def tree_specs(out):
    return [vfn.spec_of(leaf) for leaf in (out if isinstance(out, tuple) else (out,))]


def laid_out(x, w):
    return vfn.with_sharding(x @ w, P("j"))


@pytest.mark.parametrize("lying", [None, P(), P(None, "j"), P("i"), P(None, "i")], ids=repr)
def test_spmd_axis_name_lays_the_entries_of_a_vmap_out(lying):
    batch, w = numbers(4, 5, 6, seed=17), numbers(6, 2, seed=18)
    want = torch.stack([whole_scaled(x, w) for x in batch])
    slopes = torch.stack([vfn.grad(lambda w: whole_scaled(x, w).sum())(w) for x in batch])
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("i", "j"))
        xs = batch if lying is None else vfn.shard(batch, mesh, lying)
        for names in (None, {"j"}):
            f = vfn.shard_map(scaled, mesh=mesh, in_specs=(P(None, "j"), P("j")), out_specs=P(), axis_names=names)
            got = vfn.vmap(f, (0, None), spmd_axis_name="i")(xs, w)
            assert vfn.spec_of(got) == P("i")
            assert_close(vfn.unshard(got), want)
            each = vfn.vmap(vfn.grad(lambda w, x: f(x, w).sum()), (None, 0), spmd_axis_name="i")(w, xs)
            assert_close(vfn.unshard(each), slopes)
        with vfn.use_mesh(mesh):
            got = vfn.vmap(laid_out, (0, None), spmd_axis_name=("i",))(xs, w)
            assert vfn.spec_of(got) == P("i", "j")
            assert_close(vfn.unshard(got), batch @ w)
            again = vfn.vmap(lambda x: vfn.with_sharding(x, vfn.spec_of(x)), spmd_axis_name="i")(
                vfn.shard(batch, mesh, P(None, "j"))
            )
            assert vfn.spec_of(again) == P("i", "j")
            assert vfn.spec_of(vfn.vmap(laid_out, (0, None))(vfn.shard(batch, mesh, P()), w)) == P(
                None, "j"
            )  # it has ended


def test_spmd_axis_name_takes_an_axis_from_the_dims_of_an_argument():
    batch = numbers(4, 6, 6, seed=19)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("i", "j"))
        f = vfn.shard_map(torch.sin, mesh=mesh, in_specs=P(None, "j"), out_specs=P(None, "j"))
        with vfn.comm_log() as log:
            got = vfn.vmap(f, spmd_axis_name="i")(vfn.shard(batch, mesh, P(None, "i", "j")))
        assert vfn.spec_of(got) == P("i", None, "j")
        assert [(r.op, r.axis) for r in log] == [("all_to_all", "i")]
        assert_close(vfn.unshard(got), batch.sin())


def test_spmd_axis_name_is_refused_where_the_function_uses_the_axis():
    head = "it cannot lay out the entries of a vmap as its spmd_axis_name says\n  * "
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("i", "j"))
        xs = vfn.shard(numbers(4, 6, seed=19), mesh, P())
        by_spec = vfn.shard_map(lambda x: x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        by_sum = vfn.shard_map(
            lambda x: vfn.psum(x * (1.0 + vfn.axis_index("i")), "i"), mesh=mesh, in_specs=P(), out_specs=P()
        )
        stated = lambda x: vfn.with_sharding(x, P("i"))
        for f in (by_spec, by_sum, stated):
            with pytest.raises(TransformError) as error:
                vfn.vmap(f, spmd_axis_name="i")(xs)
            assert head + "axis 'i' is used here already" in str(error.value)
        with pytest.raises(TransformError) as error:
            vfn.vmap(stated, spmd_axis_name="k")(xs)
        assert head + "there is no axis 'k' on the mesh (i=2, j=2)" in str(error.value)
        inner = lambda x: vfn.vmap(lambda x: x, spmd_axis_name="i")(x)
        with pytest.raises(TransformError, match="'i' is that of a vmap around this one"):
            vfn.vmap(inner, spmd_axis_name="i")(xs)
    for wrong in (3, ("i", "i"), ("i", 2)):
        with pytest.raises(TransformError, match="spmd_axis_name must be an axis of the mesh, or a tuple of them"):
            vfn.vmap(torch.sin, spmd_axis_name=wrong)
