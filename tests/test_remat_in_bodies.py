"""Values made anew in the backward pass of a `shard_map` body, by `vfn.remat` and by torch's own checkpoint; and values that
are made in a body unseen."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,  # by name, as users do
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core import torch_internals
from vescale_fn.errors import TransformError, VaryingTypeError


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


W, X = draw(4, 4), draw(8, 4)
again = partial(checkpoint, use_reentrant=False)


def keep_products(_, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def layer(w, x):
    return torch.tanh(vfn.psum(x @ (w * (1 + vfn.axis_index("j"))), "j")) * x


def layer_on_one(w, x):
    return torch.tanh(3 * (x @ w)) * x


# of a layer, a function with the same arguments
PROGRAMS = {
    "checkpoint": lambda f: lambda w, x: again(f, w, x),
    "of a closure": lambda f: lambda w, x: again(lambda x: f(w, x), x),
    "twice": lambda f: lambda w, x: again(f, w, again(f, w, x)),
    "nested": lambda f: lambda w, x: again(lambda w, x: again(f, w, x) + x, w, x),
    "nested three times": lambda f: lambda w, x: again(lambda w, x: again(again, f, w, x.sin()) * w.sum(), w, x),
    "in remat": lambda f: lambda w, x: vfn.remat(lambda w, x: again(f, w, x.sin()))(w, x),
    "of remat": lambda f: lambda w, x: again(lambda w, x: vfn.remat(f)(w, x.sin()), w, x),
    "remat of remat": lambda f: lambda w, x: vfn.remat(lambda w, x: vfn.remat(f)(w, x.sin()))(w, x),
    "sequential": lambda f: (
        lambda w, x: checkpoint_sequential([lambda x: f(w, x), lambda x: f(w, x.sin())], 2, x, use_reentrant=False)
    ),
    "a gradient in it": lambda f: (
        lambda w, x: x * again(lambda w, x: vfn.grad(lambda w: f(w, x).sin().sum())(w), w, x).sum()
    ),
    "options": lambda f: lambda w, x: again(f, w, x, preserve_rng_state=False, determinism_check="none"),
    "keeping products": lambda f: (
        lambda w, x: again(f, w, x, context_fn=partial(create_selective_checkpoint_contexts, keep_products))
    ),
}


def gradients(name, check):
    """The gradient around the map, by a raw `backward`, of the gradient, and inside the body."""
    mesh = vfn.make_mesh((2, 2), ("i", "j"))

    def body(w, x):
        return vfn.psum(PROGRAMS[name](layer)(w, x).sin().sum(), "i")

    specs = dict(mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    f = vfn.shard_map(body, check_vma=check, **specs)
    leaf = W.clone().requires_grad_()
    vfn.unshard(f(leaf, X)).backward()
    found = [vfn.grad(f)(W, X), leaf.grad]
    if name != "keeping products":  # torch: "only allowed to backward once"
        found.append(vfn.grad(lambda w: (vfn.grad(f)(w, X) ** 2).sum())(W))
    return [vfn.unshard(g) for g in [*found, vfn.shard_map(vfn.grad(body), **specs)(W, X)]]


def wanted(name):
    f = lambda w: PROGRAMS[name](layer_on_one)(w, X).sin().sum()
    first = vfn.grad(f)(W)
    second = [vfn.grad(lambda w: (vfn.grad(f)(w) ** 2).sum())(W)] if name != "keeping products" else []
    return [first, first, *second, first]


WAYS = [(name, check) for name in PROGRAMS for check in (True, False)]
WAYS.remove(("a gradient in it", False))  # without types it is each rank's own, by definition


@pytest.mark.parametrize(("name", "check"), WAYS)
def test_gradients(name, check):
    with vfn.simulate(4):
        torch.testing.assert_close(gradients(name, check), wanted(name), rtol=1e-11, atol=1e-11)


def gradients_of_some():
    some = ("checkpoint", "nested three times", "of remat", "a gradient in it", "keeping products")
    return {(name, check): gradients(name, check) for name, check in WAYS if name in some}


def test_gradients_on_real_ranks(gloo):
    for found in gloo(4, gradients_of_some):
        for (name, _), mine in found.items():
            torch.testing.assert_close(mine, wanted(name), rtol=1e-11, atol=1e-11, msg=lambda text: f"{name}: {text}")


shared, by_w = vfn.plan.shared, lambda w: lambda c: c.sin() * w
REPEATED = {
    "scan": lambda w, x: vfn.remat(lambda x: vfn.scan(lambda c, _: (by_w(w)(c), None), x, None, 2)[0])(x * w),
    "cond": lambda w, x: vfn.remat(lambda x, w: vfn.cond(torch.tensor(True), by_w(w), torch.sin, x))(x * w, w),
    "shared": lambda w, x: again(lambda x: shared(by_w(w))(x), x),
    "shared sums": lambda w, x: vfn.remat(shared(lambda x: x.sin() * vfn.psum(x.sum(), "i")))(x * w),
}


def recorded_again():
    """Calls of a plan that a remat makes anew: what was promoted before them at first is promoted in them then."""
    mesh = vfn.make_mesh((2,), ("i",))
    w, x = vfn.shard(W[0], mesh, P()), vfn.shard(X[:2], mesh, P("i"))
    for name, f in REPEATED.items():
        local = lambda w, x, f=f: vfn.psum(f(w, x).sum(), "i")
        f = vfn.grad(vfn.shard_map(local, mesh=mesh, in_specs=(P(), P("i")), out_specs=P()), (0, 1))
        wanted, found = map(vfn.unshard, (f(w, x), vfn.jit(f)(w, x)))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


IN_CALLS = {
    "shared": shared,
    "scan": lambda f: lambda w, x: vfn.scan(lambda c, _: (c + f(w, x * c), None), w.sum(), None, 2)[0],
    "cond": lambda f: lambda w, x: vfn.cond(w.sum() > -99, f, lambda w, x: w.sum(), w, x),
}


def bodies_again(*names):
    """Bodies that the derivative of a call of the plan runs: in a remat, and in a user's rule."""
    mesh = vfn.make_mesh((2,), ("i",))
    w, x = vfn.shard(W[0], mesh, P()), vfn.shard(X[:2], mesh, P("i"))
    body = vfn.shard_map(lambda w, x: torch.sin(w.exp() * x), mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    ruled = vfn.custom_vjp(lambda w, x: (w.exp() * x).square().sum())
    ruled.defvjp(lambda w, x: (ruled(w, x), (w, x)), lambda kept, ct: vfn.vjp(body, *kept)[1](ct * body(*kept)))
    for inner in (vfn.remat(lambda w, x: body(w, x).square().sum()), ruled):
        for name in names:
            f = vfn.grad(IN_CALLS[name](inner), (0, 1))
            wanted, found = map(vfn.unshard, (f(w, x), vfn.jit(f)(w, x)))
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def test_recorded_again():
    with vfn.simulate(2):
        recorded_again()
        bodies_again(*IN_CALLS)


def test_recorded_again_on_real_ranks(gloo):
    gloo(2, recorded_again)
    gloo(2, bodies_again, "shared")


def test_the_reentrant_kind():
    with vfn.simulate(2):
        specs = dict(mesh=vfn.make_mesh((2,), ("j",)), in_specs=(P(), P("j")), out_specs=P())
        f = vfn.shard_map(lambda w, x: vfn.psum(checkpoint(layer, w, x, use_reentrant=True).sum(), "j"), **specs)
        g = vfn.shard_map(lambda w, x: vfn.psum(layer(w, x).sum(), "j"), **specs)
        torch.testing.assert_close(vfn.unshard(f(W, X)), vfn.unshard(g(W, X)))  # nothing is computed again
        with pytest.raises(TransformError) as error:
            vfn.grad(f)(W, X)
    assert str(error.value) == (
        "torch.utils.checkpoint: with use_reentrant=True the backward pass computes the function again outside of the "
        "shard_map body\n  Instead: vfn.remat(f)(...), or checkpoint(f, ..., use_reentrant=False)"
    )


# --- what no mode sees: a pybind extension, say -----------------------------------------------------------------------


def unseen(x):
    with torch_internals.no_torch_function():
        return x * 2


UNSEEN = {
    "of a varying value": lambda w, x: vfn.psum((unseen(x * w) * w).sum(), "i"),
    "into a collective": lambda w, x: vfn.psum(unseen(w * x), "i").sum(),
    "as the result": lambda w, x: unseen((x * w).sum()),
    "of an invariant value": lambda w, x: vfn.psum((unseen(w) * x).sum(), "i"),
    "through a view": lambda w, x: vfn.psum((unseen(w * x).t() @ x).sum(), "i"),
    "its gradient": lambda w, x: vfn.grad(lambda w: (unseen(w) * x).sum())(w).sum(),
}


def said(body):
    mesh = vfn.make_mesh((2,), ("i",))
    texts = []
    for check in (True, False):
        f = vfn.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=check)
        for grad in (vfn.grad, torch.func.grad):
            with pytest.raises(VaryingTypeError) as error:
                grad(lambda w, f=f: vfn.unshard(f(w, X)))(W[0])
            texts.append(str(error.value))
    return texts


@pytest.mark.parametrize("name", UNSEEN)
def test_a_gradient_through_an_unseen_extension_is_refused(name):
    with vfn.simulate(2):
        for text in said(UNSEEN[name]):
            first, what, instead = text.splitlines()
            assert first == (
                "shard_map: a value with a gradient was made in the body by something that the body cannot see, so "
                "nothing is known of how it differs by rank"
            )
            assert what.startswith("  * it is f64[")
            assert what.endswith("made by MulBackward0")
            assert instead == (
                "  Instead: wrap the extension that made it as a torch.library.custom_op or a torch.autograd.Function; "
                "a value from outside of the body should be its argument"
            )


def unseen_is_refused():
    return [text.startswith("shard_map: a value with a gradient") for body in UNSEEN.values() for text in said(body)]


def test_an_unseen_extension_on_real_ranks(gloo):
    assert all(all(found) and len(found) == 4 * len(UNSEEN) for found in gloo(2, unseen_is_refused))


def test_values_from_outside_are_no_offence():
    outside = (W[0] * 1.0).requires_grad_().exp()

    def f(w):
        c = w.exp()  # made by autograd, before the body is entered
        g = vfn.shard_map(lambda x: vfn.psum((c * outside * x).sum(), "i"), in_specs=P("i"), out_specs=P())
        return vfn.unshard(g(X))

    with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("i",))):
        found = vfn.grad(f)(W[1])
    torch.testing.assert_close(found, (W[1].exp() * outside * X).sum(0).detach())


def test_a_remat_that_raised_leaves_nothing_switched_on():
    def fails(x):
        raise ValueError("not today")

    x = torch.ones(3)
    with pytest.raises(ValueError, match="not today") as kept:
        vfn.grad(lambda x: vfn.remat(lambda x: vfn.remat(fails)(x.sin()))(x))(x)
    assert torch.equal(torch.func.grad(lambda x: x.square().sum())(x), 2 * x)
    assert kept.value.__traceback__ is not None
