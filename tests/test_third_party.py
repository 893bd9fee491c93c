"""What others wrote runs in a body as it is: autograd Functions, custom ops, compiled kernels; also where the backward
pass computes the body again. Each against the same function on one device."""

import numpy as np
import pytest
import torch
from torch import func
from torch.utils.checkpoint import checkpoint

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core import torch_internals
from vescale_fn._core.shard_map import body
from vescale_fn._core.torch_internals import interception
from vescale_fn.errors import CollectiveError, TransformError

# --- ways in which y = x**3 * w, of a block x[rows, 3] and a weight w[3], comes with a derivative of its own ---------------


def cube_back(g, x, w):
    return 3 * g * x**2 * w, (g * x**3).sum(0)


class Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, power):
        ctx.save_for_backward(x, w)
        ctx.power = power
        return x**power * w

    @staticmethod
    def backward(ctx, g):
        return *cube_back(g, *ctx.saved_tensors), None


class New(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x**3 * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return cube_back(g, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx, dx, dw):
        x, w = ctx.saved_tensors
        return 3 * x**2 * w * dx + x**3 * dw


class AlsoPlaces(torch.autograd.Function):
    """A result that has no derivative, and one that has."""

    @staticmethod
    def forward(ctx, x, w):
        places = x.argmax(0)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(x, w)
        return places, x**3 * w

    @staticmethod
    def backward(ctx, _, g):
        return cube_back(g, *ctx.saved_tensors)


class Anew(torch.autograd.Function):
    """Keeps nothing but its arguments, as other libraries' checkpoints do."""

    @staticmethod
    def forward(ctx, f, *xs):
        ctx.f = f
        ctx.save_for_backward(*xs)
        with torch.no_grad():
            return f(*xs)

    @staticmethod
    def backward(ctx, g):
        xs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.f(*xs)
        return None, *torch.autograd.grad(y, xs, g)


def saved(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@torch.library.custom_op("vfn_tests::cube", mutates_args=())
def custom(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() ** 3 * w.numpy())  # nothing that torch could look into


@torch.library.custom_op("vfn_tests::cube_back", mutates_args=())
def custom_back(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dw = cube_back(g.numpy(), x.numpy(), w.numpy())
    return torch.from_numpy(dx), torch.from_numpy(np.asarray(dw))


custom.register_autograd(lambda ctx, g: custom_back(g, *ctx.saved_tensors), setup_context=saved)

LIBRARY = torch.library.Library("vfn_tests_kernels", "DEF")  # as an extension in C++ registers its own
LIBRARY.define("cube(Tensor x, Tensor w) -> Tensor")
LIBRARY.define("cube_back(Tensor g, Tensor x, Tensor w) -> (Tensor, Tensor)")
LIBRARY.impl("cube", lambda x, w: torch.from_numpy(x.numpy() ** 3 * w.numpy()), "CPU")
LIBRARY.impl("cube_back", lambda *args: custom_back(*args), "CPU")
kernels = torch.ops.vfn_tests_kernels


class OfKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return kernels.cube(x, w)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return kernels.cube_back(g, *ctx.saved_tensors)


compiled = torch.compile(lambda x, w: x**3 * w, backend="eager")
old, new, places, anew, of_kernels = Old.apply, New.apply, AlsoPlaces.apply, Anew.apply, OfKernels.apply
OPS = {
    "a Function": lambda x, w: Old.apply(x, w, 3),
    "its apply, kept under a name": lambda x, w: old(x, w, 3),
    "with setup_context": lambda x, w: New.apply(x, w),
    "with setup_context, kept under a name": new,
    "of two results": lambda x, w: places(x, w)[1],
    "that computes again": lambda x, w: anew(lambda x, w: x**3 * w, x, w),
    "of compiled kernels": of_kernels,
    "a custom op of NumPy": custom,
    "what torch.compile made": compiled,
}
ONCE = ("that computes again", "of compiled kernels", "a custom op of NumPy")  # their backward has no derivative
FOR_FUNC = "with setup_context, kept under a name"  # torch.func takes no others
AGAIN = {
    "as it is": lambda f: f,
    "in remat": vfn.remat,
    "in checkpoint": lambda f: lambda x, w: checkpoint(f, x, w, use_reentrant=False),
    "in both": lambda f: vfn.remat(lambda x, w: checkpoint(f, vfn.remat(f)(x, w), w, use_reentrant=False)),
}


def values(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).sin().view(shape)


W, X = values(3) + 1.5, values(8, 3)


def loss(op, sum_over_rows):
    """Between two uses of the op the ranks talk; the weight is used by both, and by others."""

    def f(w, x):
        h = op(x, w) * w
        h = torch.tanh(sum_over_rows(h.sum(0))) * x
        return sum_over_rows((op(h, w) * x).sum())

    return f


def transforms(name, again):
    found = {"vfn.grad": vfn.grad, "vjp": lambda f: lambda w, x: vfn.vjp(lambda w: f(w, x), w)[1](W[0])[0]}
    if name not in ONCE:
        found["grad(grad)"] = lambda f: vfn.grad(lambda w, x: vfn.grad(f)(w, x).square().sum())
    if name == FOR_FUNC and again in ("as it is", "in remat"):  # nor torch's checkpoint
        found |= {
            "torch.func.grad": func.grad,
            "torch.func.jvp": lambda f: lambda w, x: func.jvp(lambda w: f(w, x), (w,), (w.sin(),))[1],
            "vmap": lambda f: lambda w, x: func.vmap(func.grad(f), (0, None))(torch.stack([w, w.exp()]), x),
        }
    return found


def everywhere(name, again, mesh):
    """Around the map, without types too, and in the body."""
    specs = dict(mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    body = loss(AGAIN[again](OPS[name]), lambda y: vfn.pmean(vfn.psum(y, "i"), "j"))
    for key, transform in transforms(name, again).items():
        yield key, vfn.unshard(vfn.shard_map(transform(body), **specs)(W, X))
        for check in (True, False):
            f = vfn.shard_map(body, check_vma=check, **specs)
            yield key, transform(lambda w, x, f=f: vfn.unshard(f(w, x)))(W, X)


def captured(name, check, mesh):
    """The gradient of a weight that the body does not get as an argument, but closes over."""

    def f(w, x):
        body = lambda x: loss(OPS[name], lambda y: vfn.pmean(vfn.psum(y, "i"), "j"))(w, x)
        return vfn.unshard(vfn.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=check)(x))

    return vfn.grad(f, argnums=(0, 1))(W, X)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", OPS)
def test_a_captured_weight(name, check):
    wanted = vfn.grad(loss(lambda x, w: x**3 * w, lambda y: y), argnums=(0, 1))(W, X)
    with vfn.simulate(4):
        found = captured(name, check, vfn.make_mesh((2, 2), ("i", "j")))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def captured_on_real_ranks():
    mesh = vfn.make_mesh((2, 1), ("i", "j"))
    return {(name, check): captured(name, check, mesh) for name in OPS for check in (True, False)}


def test_a_captured_weight_on_real_ranks(gloo):
    wanted = vfn.grad(loss(lambda x, w: x**3 * w, lambda y: y), argnums=(0, 1))(W, X)
    for found in gloo(2, captured_on_real_ranks):
        for way, gradients in found.items():
            torch.testing.assert_close(
                gradients, wanted, rtol=1e-11, atol=1e-11, msg=lambda text, w=way: f"{w}: {text}"
            )


def on_one_device(name, again):
    """By torch's own ops and derivatives."""
    f = loss(AGAIN[again](lambda x, w: x**3 * w), lambda y: y)
    return {key: transform(f)(W, X) for key, transform in transforms(name, again).items()}


@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("name", OPS)
def test_gradients(name, again):
    wanted = on_one_device(name, again)
    with vfn.simulate(4):
        for key, found in everywhere(name, again, vfn.make_mesh((2, 2), ("i", "j"))):
            torch.testing.assert_close(
                found, wanted[key], rtol=1e-11, atol=1e-11, msg=lambda text, k=key: f"{k}: {text}"
            )


def each_on_real_ranks():
    mesh = vfn.make_mesh((2, 1), ("i", "j"))
    ways = [(name, list(AGAIN)[i % len(AGAIN)]) for i, name in enumerate(OPS)] + [(FOR_FUNC, "in remat")]
    return {way: list(everywhere(*way, mesh)) for way in ways}


def test_gradients_on_real_ranks(gloo):
    for found in gloo(2, each_on_real_ranks):
        for (name, again), rows in found.items():
            wanted = on_one_device(name, again)
            for key, value in rows:
                torch.testing.assert_close(
                    value, wanted[key], rtol=1e-11, atol=1e-11, msg=lambda text: f"{name}: {text}"
                )


@pytest.mark.parametrize("check", [True, False])
def test_ranks_cannot_talk_where_others_compute_again(check):
    """The backward pass of a Function runs outside of the body, and it is not ours to bring in."""
    body = loss(OPS["a Function"], lambda y: y)
    with vfn.simulate(2):
        f = vfn.shard_map(
            lambda w, x: vfn.pmean(anew(lambda w, x: vfn.psum(body(w, x), "i"), w, x), "i"),
            mesh=vfn.make_mesh((2,), ("i",)),
            in_specs=(P(), P("i")),
            out_specs=P(),
            check_vma=check,
        )
        with pytest.raises(CollectiveError) as caught:
            vfn.grad(f)(W, X)
    assert str(caught.value) == (
        "psum: axis_name='i', but no axis is manual here: this is the backward pass of an autograd.Function, which does not "
        "run inside the shard_map body\n"
        "  Instead: for what is to be computed again, vfn.remat(f) or torch.utils.checkpoint(f, ..., use_reentrant=False); "
        "else call it in the forward pass, and keep the result with ctx.save_for_backward"
    )


# --- a torch that cannot be watched -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("_functions_are_seen", "autograd.Functions are applied"),
        ("_gradients_are_seen", "torch.func takes gradients"),
        ("_checkpoints_are_seen", "torch.utils.checkpoint computes again"),
    ],
)
def test_a_torch_in_which_a_body_would_miss_something_is_refused(name, what, monkeypatch):
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("i",))
        f = vfn.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        monkeypatch.setattr(interception, name, lambda: False)
        monkeypatch.setattr(body, "_intercepted", [])  # as before the first body
        with pytest.raises(TransformError) as error:
            f(torch.ones(2))
        assert str(error.value) == (
            f"shard_map: a body cannot see how, in torch {torch.__version__}, {what}: gradients would be wrong\n"
            "  Instead: a release of torch that is tested, 2.11 to 2.15"
        )
        monkeypatch.undo()
        assert vfn.unshard(f(torch.ones(2))).tolist() == [2, 2]  # nothing is left switched on


def test_a_torch_that_no_test_has_seen_is_warned_of():
    for version in ("2.11.0", "2.15.1+cu130"):
        torch_internals.warn_of_untested(version)
    with pytest.warns(UserWarning, match=r"vescale_fn is tested with torch 2.11 to 2.15, not with 2.16.0a0\+git1"):
        torch_internals.warn_of_untested("2.16.0a0+git1")
