"""What every collective must obey, over one list of them: its values, its transpose, its derivatives, under transforms.

Values are small integers, so that everything but a mean is exact; what a collective computes comes from a plain loop
over the ranks, and its Jacobian from that loop, entry by entry.
"""

import functools

import pytest
import torch
from collectives import COLLECTIVES, LINEAR, MESH, mapped, oracle, size_of, stacked
from torch import func

import vescale_fn as vfn
from vescale_fn.errors import CollectiveError, InPlaceError

ORDERS = ["y", ("x", "y"), ("y", "x")]


@pytest.fixture(scope="module")
def mesh():
    with vfn.simulate(6):
        yield vfn.make_mesh((2, 3), ("x", "y"))


@pytest.fixture(autouse=True)
def _played(mesh):
    with vfn.simulate(6):
        yield


def function(name, axis, mesh, **options):
    line = COLLECTIVES[name]
    f = mapped(line.call, axis, line.same, mesh, **options)
    return lambda x: vfn.unshard(f(x))


def inputs(name, axis, *seeds, mesh=MESH, **options):
    shape = COLLECTIVES[name].shape(size_of(axis, mesh))
    return [stacked(shape, seed, mesh, **options) for seed in seeds]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)  # exact but for the quotient of a mean


@functools.cache
def jacobian(name, axis, sizes):
    """d out / d in, by putting a one at each place of the input of the plain loop."""
    mesh = dict(sizes)
    (x,) = inputs(name, axis, 0, mesh=mesh)
    columns = [oracle(one.view(x.shape), axis, COLLECTIVES[name], mesh) for one in torch.eye(x.numel(), dtype=x.dtype)]
    return torch.stack(columns, -1).view(*columns[0].shape, *x.shape)


def times(jacobian, x):
    return torch.tensordot(jacobian, x, x.ndim)


def transposed(jacobian, x, ct):
    return torch.tensordot(ct, jacobian, ct.ndim).view(x.shape)


# --- values -----------------------------------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]


def result_type(name, dtype):
    if name == "pmean" and not dtype.is_floating_point:
        return torch.float32
    counts = ("psum", "pvary", "pcast", "dynamic_slice", "axis_index")
    if dtype is torch.bool and name.startswith(counts) and not name.startswith("psum_scatter"):
        return torch.int32
    return dtype


@pytest.mark.parametrize("axis", ["x", *ORDERS], ids=str)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_values_of_every_dtype(name, axis, mesh):
    f = function(name, axis, mesh)
    for dtype in DTYPES:
        (x,) = inputs(name, axis, 0, dtype=dtype)
        found = f(x)
        assert found.dtype == result_type(name, dtype), dtype
        close(found, oracle(x, axis, COLLECTIVES[name]).to(found.dtype))


# --- laws: each of a linear collective f, its Jacobian by brute force, inputs x and dx, and cotangents g ------------------


def adjoint(f, j, x, dx, g):
    """<A* g, dx> = <g, A dx>, for every way to a pullback."""
    leaf = x.clone().requires_grad_()
    (raw,) = torch.autograd.grad(f(leaf), leaf, g)
    for back in (vfn.vjp(f, x)[1](g)[0], func.vjp(f, x)[1](g)[0], raw):
        close((back * dx).sum(), (g * f(dx)).sum())
        close(back, transposed(j, x, g))


def tangents(f, j, x, dx, g):
    """The derivative along dx is A dx, for every way to it."""
    for out, slope in (
        vfn.jvp(f, (x,), (dx,)),
        func.jvp(f, (x,), (dx,)),
        (lambda out, move: (out, move(dx)))(*vfn.linearize(f, x)),
    ):
        close(out, times(j, x))
        close(slope, times(j, dx))


def jacobians(f, j, x, dx, g):
    """`jacrev` maps the transpose over a batch of cotangents, `jacfwd` the map over a batch of tangents."""
    close(func.jacrev(f)(x), j)
    close(func.jacfwd(f)(x), j)


def involution(f, j, x, dx, g):
    """The transpose of the transpose is the map."""
    back = lambda g: func.vjp(f, x)[1](g)[0]
    close(func.vjp(back, g)[1](dx)[0], times(j, dx))
    own = lambda g: vfn.vjp(f, x)[1](g)[0]
    close(vfn.vjp(own, g)[1](dx)[0], times(j, dx))


def second_order(f, j, x, dx, g):
    """The Hessian of sum(g * (A x)^3) along dx, forward over reverse and reverse over reverse."""
    loss = lambda x: (g * f(x) ** 3).sum()
    wanted = transposed(j, x, 6 * g * times(j, x) * times(j, dx))
    for grad in (vfn.grad, func.grad):
        close(func.jvp(grad(loss), (x,), (dx,))[1], wanted)
        close(grad(lambda x: (grad(loss)(x) * dx).sum())(x), wanted)


def again(f, j, x, dx, g):
    """Computed anew in the backward pass."""
    close(vfn.grad(lambda x: (g * vfn.remat(f)(x)).sum())(x), transposed(j, x, g))


def batches(f, j, x, dx, g):
    """A batch of inputs is a loop over its entries, whichever dim it is, also twice, and so are gradients of entries."""
    xs = torch.stack([x, dx, x * dx])
    each = torch.stack([times(j, x) for x in xs])
    close(func.vmap(f)(xs), each)
    close(vfn.vmap(f, in_axes=2, out_axes=1)(xs.movedim(0, 2)), each.movedim(0, 1))
    close(
        func.vmap(func.vmap(f, in_dims=-1, out_dims=-1))(torch.stack([xs, -xs]).movedim(1, -1)),
        torch.stack([each, -each]).movedim(1, -1),
    )
    slopes = torch.stack([transposed(j, x, 2 * g * times(j, x)) for x in xs])
    close(func.vmap(func.grad(lambda x: (g * f(x) ** 2).sum()))(xs), slopes)
    close(vfn.grad(lambda xs: (g * func.vmap(f)(xs) ** 2).sum())(xs), slopes)
    close(func.vmap(lambda x: func.jvp(f, (x,), (dx,))[1])(xs), times(j, dx).expand(3, *g.shape))


LAWS = [adjoint, tangents, jacobians, involution, second_order, again, batches]


def check(law, name, axis, f, mesh=MESH):
    x, dx = inputs(name, axis, 0, 1, mesh=mesh)
    j = jacobian(name, axis, tuple(mesh.items()))
    g = torch.randint(-4, 5, j.shape[: -x.ndim], generator=torch.Generator().manual_seed(2)).to(x.dtype)
    law(f, j, x, dx, g)


def in_turn(law, name):
    """One of the orders of axes: so each law and each collective meets all of them."""
    return ORDERS[(LAWS.index(law) + LINEAR.index(name)) % len(ORDERS)]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", LINEAR)
def test_law(name, law, mesh):
    for axis in ORDERS if law is adjoint else [in_turn(law, name)]:
        check(law, name, axis, function(name, axis, mesh))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", LINEAR)
def test_law_without_types(name, law, mesh):
    """Derivatives taken outside of a map do not depend on whether it checks."""
    check(law, name, in_turn(law, name), function(name, in_turn(law, name), mesh, check_vma=False))


@pytest.mark.parametrize("name", LINEAR)
def test_a_result_may_be_written_in_place(name, mesh):
    """Except that of a cast, which is another name for its operand, and says so."""
    number, line = LINEAR.index(name), COLLECTIVES[name]
    axis = ORDERS[number % len(ORDERS)]
    (x,) = inputs(name, axis, 0)
    j = jacobian(name, axis, tuple(MESH.items()))
    g = torch.randint(-4, 5, j.shape[: -x.ndim], generator=torch.Generator().manual_seed(2)).to(x.dtype)

    def call(x, a):
        y = line.call(x, a)
        y *= 3
        y[..., -1:] += 1
        return y

    def loss(x):
        return (g * vfn.unshard(f(x))).sum()

    ways = [vfn.grad, func.grad, *([lambda loss: vfn.jit(vfn.grad(loss))] if number % 4 == 0 else [])]
    for check_vma in True, False:
        f = mapped(call, axis, line.same, mesh, check_vma=check_vma)
        if name in ("pvary", "pcast", "psum as reduced", "all_gather reduced tiled") and check_vma:
            with pytest.raises(
                InPlaceError, match="this writes into memory that belongs to the caller, or to another value"
            ):
                loss(x)
            continue
        for grad in ways:
            close(grad(loss)(x), transposed(j, x, 3 * g))


EXTREMES = [name for name, line in COLLECTIVES.items() if not line.linear]
WITHOUT = {
    "vfn.grad": lambda f: lambda x: vfn.grad(lambda x: f(x).sum())(x),
    "vfn.vjp": lambda f: lambda x: vfn.vjp(f, x)[1](torch.ones_like(f(x))),
    "vfn.jvp": lambda f: lambda x: vfn.jvp(f, (x,), (x,)),
    "vfn.linearize": lambda f: lambda x: vfn.linearize(f, x)[1](x),
    "torch.func.grad": lambda f: func.grad(lambda x: f(x).sum()),
    "torch.func.jvp": lambda f: lambda x: func.jvp(f, (x,), (x,)),
    "torch.func.jacrev": func.jacrev,
    "torch.func.jacfwd": func.jacfwd,
    "vmap(grad)": lambda f: lambda x: func.vmap(func.grad(lambda x: f(x).sum()))(x[None]),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", EXTREMES)
def test_a_maximum_has_batches_but_no_derivative(name, check_vma, mesh):
    f = function(name, ("y", "x"), mesh, check_vma=check_vma)
    xs = torch.stack(inputs(name, ("y", "x"), 0, 1, 2))
    each = torch.stack([oracle(x, ("y", "x"), COLLECTIVES[name]) for x in xs])
    close(func.vmap(f, 3, 1)(xs.movedim(0, 3)), each.movedim(0, 1))
    for transform in WITHOUT.values():
        with pytest.raises(CollectiveError) as caught:
            transform(f)(xs[0])
        assert str(caught.value) == (
            f"{name}: it was differentiated, but it has no derivative (nor has JAX's)\n"
            f"  Instead: vfn.{name}(x.detach(), ...) where the result only stabilises, as in log-sum-exp; or "
            f"vfn.all_gather, then x.{name.replace('p', 'a', 1)}(0)"
        )


# --- real ranks -------------------------------------------------------------------------------------------------------


def each_law():
    """On real ranks values of three dtypes, the law of the adjoint, and of the others one in turn."""
    mesh, sizes, done = vfn.make_mesh((2, 2), ("x", "y")), {"x": 2, "y": 2}, 0
    for i, (name, line) in enumerate(COLLECTIVES.items()):
        axis = ORDERS[i % len(ORDERS)]
        f = function(name, axis, mesh, check_vma=i % 4 != 3)
        for dtype in (torch.bfloat16, torch.int64, torch.bool):
            (x,) = inputs(name, axis, 0, dtype=dtype, mesh=sizes)
            close(f(x), oracle(x, axis, line, sizes).to(result_type(name, dtype)))
        for law in (adjoint, LAWS[1 + i % (len(LAWS) - 1)]) if line.linear else ():
            check(law, name, axis, f, sizes)
            done += 1
    return done


def test_laws_on_real_ranks(gloo):
    assert gloo(4, each_law) == [2 * len(LINEAR)] * 4
