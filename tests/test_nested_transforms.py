"""Transforms of transforms of transforms, around bodies that talk and inside them, on meshes of one rank along an axis, over
both orders of two axes, with nothing on any rank; against a loop over the ranks' blocks on one device."""

import math

import pytest
import torch
from torch import func

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import TransformError

# --- transforms of a function of w to a number, each of which is such a function again --------------------------------------


def three(w):
    return torch.stack([w, 2 * w, w.cos()])


STEPS = {
    "vfn.grad": lambda f: lambda w: (vfn.grad(f)(w) * w.cos()).sum(),
    "grad": lambda f: lambda w: (func.grad(f)(w) * w.cos()).sum(),
    "vfn.vjp": lambda f: lambda w: vfn.vjp(f, w)[1](torch.ones((), dtype=w.dtype))[0].sum(),
    "vfn.jvp": lambda f: lambda w: vfn.jvp(f, (w,), (w.sin(),))[1],
    "jvp": lambda f: lambda w: func.jvp(f, (w,), (w.sin(),))[1],
    "vfn.linearize": lambda f: lambda w: vfn.linearize(f, w)[1](w.sin()),
    "jacrev": lambda f: lambda w: func.jacrev(f)(w).sum(),
    "jacfwd": lambda f: lambda w: func.jacfwd(f)(w).sin().sum(),
    "vfn.vmap": lambda f: lambda w: vfn.vmap(f, in_axes=1)(three(w).mT).sum(),
    "vmap": lambda f: lambda w: func.vmap(f)(three(w)).sum(),
    "vfn.remat": lambda f: lambda w: vfn.remat(f)(w),
}
NESTS = [  # the outermost first
    "vmap jvp grad vfn.remat",
    "vfn.grad vfn.remat vfn.vmap",
    "vfn.linearize vfn.remat vfn.grad",
    "jacrev vmap grad",
    "vfn.grad vfn.grad vfn.grad",
    "vfn.jvp jvp vfn.grad",
    "jacfwd jacrev",
    "vfn.vjp vfn.remat jvp",
]


def nested(nest, f):
    for name in reversed(nest.split()):
        f = STEPS[name](f)
    return f


# --- bodies of w and this rank's block, over the axes `a`; and of w and the blocks of all ranks in the order of `a` ---------


def ring(n):
    return [(i, (i + 1) % n) for i in range(n)]


def normed(w, x, a):
    y = (x * w).sin()
    return vfn.psum(((y + w) / (1 + vfn.psum((y**2).sum(), a))).sum(), a)


def normed_on_one(w, xs):
    ys = [(x * w).sin() for x in xs]
    return sum(((y + w) / (1 + sum((y**2).sum() for y in ys))).sum() for y in ys)


def gathered(w, x, a):
    return vfn.psum((vfn.all_gather(x * w, a, tiled=True).sin().sum(0) * x * w).sum(), a)


def gathered_on_one(w, xs):
    return sum((torch.cat([x * w for x in xs]).sin().sum(0) * x * w).sum() for x in xs)


def scattered(w, x, a):
    rows = torch.outer(torch.arange(1, 1 + vfn.axis_size(a), dtype=w.dtype), w) * (1 + x.sum()).sin()
    return vfn.psum((vfn.psum_scatter(rows, a) ** 2 + x.sum()).sum(), a)


def scattered_on_one(w, xs):
    total = sum((1 + x.sum()).sin() for x in xs)
    return sum(((i + 1) * total * w) @ ((i + 1) * total * w) + 3 * x.sum() for i, x in enumerate(xs))


def sent_around(w, x, a):
    return vfn.psum((vfn.ppermute((x * w).sin(), a, ring(vfn.axis_size(a))) * x * w + w).sum(), a)


def sent_around_on_one(w, xs):
    return sum(((xs[i - 1] * w).sin() * x * w + w).sum() for i, x in enumerate(xs))


def gradient_inside(w, x, a):
    return (vfn.grad(lambda w: ((x * w).sin() ** 2 + w).sum())(w) * w).sum()  # summed over the ranks by itself


def gradient_inside_on_one(w, xs):
    return (vfn.grad(lambda w: sum(((x * w).sin() ** 2 + w).sum() for x in xs))(w) * w).sum()


BODIES = {
    "psum": (normed, normed_on_one),
    "all_gather": (gathered, gathered_on_one),
    "psum_scatter": (scattered, scattered_on_one),
    "ppermute": (sent_around, sent_around_on_one),
    "a gradient inside": (gradient_inside, gradient_inside_on_one),
}
PLACES = [  # shape of the mesh, the order of its axes, rows on each rank
    ((2, 3), ("x", "y"), 2),
    ((2, 3), ("y", "x"), 1),
    ((1, 3), ("y", "x"), 2),
    ((3, 1), ("x", "y"), 0),
    ((1, 1), ("y", "x"), 3),
]


def values(*shape):
    return torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).sin().view(shape)


def differences(nest, name, place):
    """Around the map with types and without, and inside: what they give beside what one device gives."""
    (shape, axes, rows), (body, on_one) = place, BODIES[name]
    w, xs = values(3) + 1.3, [values(rows, 3) + i for i in range(math.prod(shape))]
    wanted = nested(nest, lambda w: on_one(w, xs))(w)
    specs = dict(mesh=vfn.make_mesh(shape, ("x", "y")), in_specs=(P(), P(axes)), out_specs=P())
    x, found = torch.cat(xs), {}
    for check in (True, False) if name != "a gradient inside" else (True,):  # without types it is each rank's own
        f = vfn.shard_map(lambda w, x: body(w, x, axes), check_vma=check, **specs)
        found[f"around, check_vma={check}"] = nested(nest, lambda w, f=f: vfn.unshard(f(w, x)))(w)
    inside = vfn.shard_map(lambda w, x: nested(nest, lambda w: body(w, x, axes))(w), **specs)
    found["inside"] = vfn.unshard(inside(w, x))
    return [(key, value, wanted) for key, value in found.items()]


def compare(rows):
    for key, found, wanted in rows:  # sums in another order; third derivatives are in the hundreds
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=lambda text, k=key: f"{k}: {text}")


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("nest", NESTS)
def test_nests(nest, name):
    place = PLACES[(NESTS.index(nest) + list(BODIES).index(name)) % len(PLACES)]
    with vfn.simulate(math.prod(place[0])):
        compare(differences(nest, name, place))


def test_a_remat_of_a_gradient_under_vmap_is_by_a_rule_and_refuses_what_it_closes_over():
    """It is `torch.func` that takes that gradient, whose values a checkpoint cannot find again; draws are the same ones."""
    w, x = values(3, 3), values(4, 3)
    of_rows = lambda w, x: func.vmap(func.grad(lambda v: (v @ w).tanh().sum()))(x)
    loss = lambda run: lambda w: (run(of_rows)(w, x) ** 2).sum()
    for transform in (vfn.grad, lambda f: vfn.jit(vfn.grad(f)), lambda f: vfn.grad(lambda w: vfn.grad(f)(w).sum())):
        found, wanted = (transform(loss(run))(w) for run in (vfn.remat, lambda f: f))
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    dropped = lambda x: func.vmap(
        func.grad(lambda v: (torch.nn.functional.dropout(v) ** 2).sum()), randomness="different"
    )(x)
    out, back = vfn.vjp(vfn.remat(dropped), x)
    torch.testing.assert_close(back(torch.ones_like(out))[0] * x, out)
    with pytest.raises(TransformError) as caught:
        vfn.grad(lambda w: vfn.remat(lambda x: of_rows(w, x))(x).sum())(w)
    assert str(caught.value) == (
        "remat: the function closes over a tensor that is differentiated, for which its rule gives no derivative\n"
        "  Instead: the tensor as one more argument, with its derivative in the rule; or vfn.stop_gradient(x) of it"
    )


def each_nest():
    for i, nest in enumerate(NESTS):
        name = list(BODIES)[i % len(BODIES)]
        compare(differences(nest, name, ((2, 1), ("y", "x"), 2)))
    return "compared"


def test_nests_on_real_ranks(gloo):
    assert gloo(2, each_nest) == ["compared"] * 2


# --- lazy values: zeros that forward mode makes up, conjugates and minus signs ------------------------------------------


@pytest.mark.parametrize("checked", [True, False])
def test_a_gradient_of_a_jvp_whose_tangents_are_lazy_zeros(checked):
    """`torch._efficientzerotensor` has no memory: as a rank's block it ended the process."""
    w, x, v = values(3, 2), values(4, 3), values(3, 2) + 1
    wanted = func.jvp(func.grad(lambda w: (x @ w).square().sum()), (w,), (v,))[1]
    with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("dp",))):

        @vfn.shard_map(in_specs=(P(), P("dp")), out_specs=P(), check_vma=checked)
        def f(w, x):
            return vfn.pmean((x @ w).square().sum(), "dp") * 2

        found = func.grad(lambda w: func.jvp(lambda w: f(w, x), (w,), (v,))[1])(w)
        torch.testing.assert_close(vfn.unshard(found), wanted, rtol=1e-10, atol=1e-10)


def send_lazy_values():
    z = torch.complex(values(4, 4), values(4, 4) + 2)
    mesh = vfn.make_mesh((2,), ("dp",))
    gather = vfn.shard_map(
        lambda x: vfn.all_gather(x, "dp", to="invarying", tiled=True), mesh=mesh, in_specs=P("dp"), out_specs=P()
    )
    whole = vfn.shard_map(
        lambda x: vfn.all_gather(x.conj(), "dp", to="invarying", tiled=True), mesh=mesh, in_specs=P("dp"), out_specs=P()
    )
    minus = vfn.shard_map(
        lambda x: vfn.all_gather(x.conj().imag, "dp", to="invarying", tiled=True),
        mesh=mesh,
        in_specs=P("dp"),
        out_specs=P(),
    )
    for found, wanted in ((gather(z.conj()), z.conj()), (whole(z), z.conj()), (minus(z), -z.imag)):
        assert torch.equal(vfn.unshard(found), wanted)
    return "sent"


def test_lazy_values_are_sent_as_they_are(gloo):
    with vfn.simulate(2):
        send_lazy_values()
    assert gloo(2, send_lazy_values) == ["sent"] * 2
