"""`shard_map`: the same programs as on one device, on meshes of all shapes and on real ranks; typing; messages."""

import copy
import gc
import math
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.local_types import tensor_types
from vescale_fn.errors import InPlaceError, MeshError, ReshardError, SpecError, VaryingTypeError

MESHES = [((1,), ("t",)), ((1, 1), ("d", "t")), ((4,), ("t",)), ((2, 3), ("d", "t")), ((2, 2, 2), ("c", "d", "t"))]


def over(x, axes, reduce=vfn.psum):
    """A reduction over axes, of which there may be none."""
    return reduce(x, axes) if axes else x


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


# --- programs: one function on one device, a body for each rank -------------------------------------------------------
# Each gives (the function, its arguments, the body, in_specs) for the axes: `t` is the last, `d` the others. The first
# arguments are parameters; bodies return a loss that is the same on all ranks.


def tensor_parallel_mlp(d, t):
    def one(w1, w2, x):
        return (torch.tanh(x @ w1) @ w2).square().sum()

    def body(w1, w2, x):
        return over(vfn.psum(torch.tanh(x @ w1) @ w2, t).square().sum(), d)

    return one, (draw(5, 12), draw(12, 3), draw(24, 5)), body, (P(None, t), P(t), P(d))


def fully_sharded(to):
    def make(d, t):
        every = (*d, t)

        def one(w, b, x):
            return torch.sin(x @ w.view(24, 3) + b).sum()

        def body(w, b, x):
            w = vfn.all_gather(w, every, tiled=True, to=to)
            b = vfn.pcast(b, every, to=to) if to == "reduced" else b
            return vfn.psum(torch.sin(x @ w.view(24, 3) + b).sum(), every)

        return one, (draw(72), draw(3), draw(24, 24)), body, (P(every), P(), P(every))

    return make


def vocabulary_parallel_loss(d, t):
    def one(w, x, targets):
        return F.cross_entropy(x @ w, targets, reduction="sum")

    def body(w, x, targets):
        logits = x @ w
        first = vfn.axis_index(t) * logits.shape[-1]
        largest = vfn.pmax(logits.detach().amax(-1), t)
        total = vfn.psum(torch.exp(logits - largest[:, None]).sum(-1), t)
        here = targets - first
        mine = (here >= 0) & (here < logits.shape[-1])
        picked = logits.gather(-1, here.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
        picked = vfn.psum(torch.where(mine, picked, torch.zeros_like(picked)), t)
        return over((largest + total.log() - picked).sum(), d)

    return one, (draw(5, 12), draw(24, 5), torch.arange(24) * 5 % 12), body, (P(None, t), P(d), P(d))


def ring(d, t):
    def one(k, q):
        return (q.exp() @ k.T).square().sum()

    def body(k, q):
        n, out = vfn.axis_size(t), torch.zeros((), dtype=q.dtype)
        for _ in range(n):
            out += (q.exp() @ k.T).square().sum()  # in place into a value that begins the same on all ranks
            k = vfn.ppermute(k, t, [(i, (i + 1) % n) for i in range(n)])
        return vfn.psum(out, (*d, t))

    return one, (draw(12, 3), draw(24, 3)), body, (P(t), P((*d, t)))


def heads_and_sequence(d, t):
    def one(w, x):  # x: [sequence, heads, dim]
        scores = torch.einsum("shd,thd->hst", x * w, x).softmax(-1)
        return torch.einsum("hst,thd->shd", scores, x).sin().sum()

    def body(w, x):
        x = vfn.all_to_all(x, t, 1, 0, tiled=True)  # my heads, the whole sequence
        scores = torch.einsum("shd,thd->hst", x * w, x).softmax(-1)
        y = vfn.all_to_all(torch.einsum("hst,thd->shd", scores, x), t, 0, 1, tiled=True)
        return vfn.psum(y.sin().sum(), t)

    return one, (draw(3), draw(12, 12, 3)), body, (P(), P(t))


def a_weight_used_often(d, t):
    constant = draw(4)

    def one(w, x):
        for i in range(4):
            x = torch.tanh(x @ w + constant * i + torch.arange(4, dtype=x.dtype))
        return x.sum()

    def body(w, x):
        return vfn.psum(one(w, x), (*d, t))

    return one, (draw(4, 4), draw(24, 4)), body, (P(), P((*d, t)))


def buffers(d, t):
    def one(w, x):
        out = torch.empty(3, dtype=x.dtype)
        out[0] = (w * x).sum()
        out[1:] = out[0].clone().sin()
        return out.square().sum()

    def body(w, x):
        out = torch.empty(3, dtype=x.dtype)
        rows = torch.zeros(2, dtype=x.dtype)
        rows[:1].add_((w * x).sum())  # written through a view
        out[0] = vfn.psum(rows.sum(), (*d, t))
        out[1:] = out[0].clone().sin()
        return vfn.pmean(out.square().sum(), (*d, t))

    return one, (draw(3), draw(24, 3)), body, (P(), P((*d, t)))


def gradient_inside(d, t):
    def loss(w, x):
        return torch.sin(x @ w).sum()

    def one(w, x):
        return vfn.grad(loss)(w, x).square().sum()

    def body(w, x):
        return vfn.grad(loss)(w, x).square().sum()  # the gradient of w is summed over the ranks by itself

    return one, (draw(4), draw(24, 4)), body, (P(), P((*d, t)))


PROGRAMS = {
    "tensor parallel": tensor_parallel_mlp,
    "fully sharded, varying": fully_sharded("varying"),
    "fully sharded, invarying": fully_sharded("invarying"),
    "fully sharded, reduced": fully_sharded("reduced"),
    "vocabulary parallel": vocabulary_parallel_loss,
    "ring": ring,
    "all to all": heads_and_sequence,
    "weight used often": a_weight_used_often,
    "buffers": buffers,
    "gradient inside": gradient_inside,
}


# Without types a gradient inside a body is each rank's own, by definition.
WAYS = [(name, check) for name in PROGRAMS for check in (True, False) if check or name != "gradient inside"]


def program(name, names):
    """One program for a mesh's axes: the function, its arguments, which of them are parameters, and what maps the body."""
    one, args, body, in_specs = PROGRAMS[name](names[:-1], names[-1])
    params = tuple(i for i, x in enumerate(args) if x.is_floating_point())
    return one, args, params, lambda **options: vfn.shard_map(body, in_specs=in_specs, out_specs=P(), **options)


@pytest.mark.filterwarnings("ignore:vfn.psum over")
@pytest.mark.parametrize("shape_names", MESHES, ids=str)
@pytest.mark.parametrize(
    ("name", "check"), WAYS, ids=lambda x: x if isinstance(x, str) else ("unchecked", "checked")[x]
)
def test_programs(name, shape_names, check):
    shape, names = shape_names
    one, args, params, make = program(name, names)
    with vfn.simulate(math.prod(shape)):
        f = make(mesh=vfn.make_mesh(shape, names), check_vma=check)
        value, grads = vfn.value_and_grad(f, argnums=params)(*args)
        torch.testing.assert_close(vfn.unshard(value), one(*args), rtol=1e-12, atol=1e-12)
        wanted = vfn.grad(one, argnums=params)(*args)
        torch.testing.assert_close(grads, wanted, rtol=1e-11, atol=1e-12)
        if shape == (2, 3):
            found = torch.func.grad(lambda *args: vfn.unshard(f(*args)), argnums=params)(*args)
            torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
            sharded = vfn.shard(args, vfn.make_mesh(shape, names), P())
            found = vfn.grad(f, argnums=params)(*sharded)
            torch.testing.assert_close(vfn.unshard(found), wanted, rtol=1e-11, atol=1e-12)


def programs_on_real_ranks():
    shape, names = (2, 2), ("d", "t")
    found = {}
    for name in PROGRAMS:
        _, args, params, make = program(name, names)
        for check in (True, False):
            if check or name != "gradient inside":
                f = make(mesh=vfn.make_mesh(shape, names), check_vma=check)
                value, grads = vfn.value_and_grad(f, argnums=params)(*args)
                again = torch.func.grad(lambda *args, f=f: vfn.unshard(f(*args)), argnums=params)(*args)
                found[name, check] = vfn.unshard(value), grads, again
    return found


def test_programs_on_real_ranks(gloo):
    for found in gloo(4, programs_on_real_ranks):
        for (name, _), (value, grads, again) in found.items():
            one, args, params, _ = program(name, ("d", "t"))
            wanted = vfn.grad(one, argnums=params)(*args)
            torch.testing.assert_close(value, one(*args), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(grads, wanted, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(again, wanted, rtol=1e-11, atol=1e-12)


# --- transforms, inside and outside -----------------------------------------------------------------------------------


def coupled(w, d):
    h = torch.tanh(w[:, None] * d)
    mean = vfn.pmean(h.sum(1), "i")
    return vfn.psum((h * mean[:, None] * w.sum()).sum(), "i")


def coupled_on_one(w, d):
    h = torch.tanh(w[:, None] * d)
    return (h * h.sum(1)[:, None] / 2 * w.sum()).sum()


def directional(derive):
    return lambda f: lambda w, d: derive(lambda w: f(w, d), (w,), (w.sin(),))[1]


TRANSFORMS = {
    "vfn.grad": vfn.grad,
    "func.grad": torch.func.grad,
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": torch.func.hessian,
    "grad of grad": lambda f: vfn.grad(lambda w, d: vfn.grad(f)(w, d).sin().sum()),
    "func.grad of func.grad": lambda f: torch.func.grad(lambda w, d: torch.func.grad(f)(w, d).sin().sum()),
    "func.grad of vfn.grad": lambda f: torch.func.grad(lambda w, d: vfn.grad(f)(w, d).sin().sum()),
    "func.jvp": directional(torch.func.jvp),
    "vfn.jvp": directional(vfn.jvp),
    "grad of jvp": lambda f: vfn.grad(lambda w, d: directional(torch.func.jvp)(f)(w, d).sum()),
    "vjp": lambda f: lambda w, d: vfn.vjp(lambda w: f(w, d), w)[1](torch.tensor(2.0, dtype=w.dtype))[0],
    "remat": lambda f: vfn.grad(vfn.remat(f)),
    "vmap": lambda f: lambda w, d: torch.func.vmap(f, in_dims=(0, None))(torch.stack([w, w.sin()]), d),
    "vmap of grad": lambda f: lambda w, d: torch.func.vmap(torch.func.grad(f), (0, None))(torch.stack([w, w.sin()]), d),
    "vmap of vfn.grad": lambda f: lambda w, d: vfn.vmap(vfn.grad(f), (0, None))(torch.stack([w, w.sin()]), d),
}


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, where):
    transform, w, d = TRANSFORMS[name], draw(2), draw(8)
    with vfn.simulate(4):
        specs = dict(mesh=vfn.make_mesh((2, 2), ("i", "j")), in_specs=(P(), P("i")), out_specs=P())
        if where == "outside":
            f = vfn.shard_map(coupled, **specs)
            found = transform(lambda w, d: vfn.unshard(f(w, d)))(w, d)
        else:
            found = vfn.unshard(vfn.shard_map(transform(coupled), **specs)(w, d))
    torch.testing.assert_close(found, transform(coupled_on_one)(w, d), rtol=1e-11, atol=1e-12)


def transforms_on_real_ranks():
    w, d = draw(2), draw(8)
    specs = dict(mesh=vfn.make_mesh((2, 2), ("i", "j")), in_specs=(P(), P("i")), out_specs=P())
    f = vfn.shard_map(coupled, **specs)
    outside = {k: transform(lambda w, d: vfn.unshard(f(w, d)))(w, d) for k, transform in TRANSFORMS.items()}
    inside = {k: vfn.unshard(vfn.shard_map(transform(coupled), **specs)(w, d)) for k, transform in TRANSFORMS.items()}
    return outside, inside


def test_transforms_on_real_ranks(gloo):
    wanted = {name: transform(coupled_on_one)(draw(2), draw(8)) for name, transform in TRANSFORMS.items()}
    for found in gloo(4, transforms_on_real_ranks):
        for side in found:
            torch.testing.assert_close(side, wanted, rtol=1e-11, atol=1e-12)


def test_gradient_of_a_gradient_inside():
    w, d = draw(2), draw(8)
    with vfn.simulate(4):
        g = vfn.shard_map(
            vfn.grad(coupled), mesh=vfn.make_mesh((2, 2), ("i", "j")), in_specs=(P(), P("i")), out_specs=P()
        )
        for grad in (vfn.grad, torch.func.grad):
            found = grad(lambda w: vfn.unshard(g(w, d)).sin().sum())(w)
            wanted = vfn.grad(lambda w: vfn.grad(coupled_on_one)(w, d).sin().sum())(w)
            torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    with vfn.simulate(4):
        yield vfn.make_mesh((4,), ("i",))


def run(body, mesh, *args, ins=P("i"), outs=P("i"), **options):
    return vfn.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, **options)(*args)


D = torch.arange(1.0, 5.0)


def type_in_body(body, mesh, *args, ins=P("i")):
    """The letter over `i` of what a body computes."""
    found = []

    def spy(*args):
        found.append(tensor_types.typeof(body(*args), ("i",)).letter("i"))
        return torch.zeros(())

    run(spy, mesh, *args, ins=ins, outs=P())
    return found[0]


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, x):
        ctx.save_for_backward(w, x)
        return w * x

    @staticmethod
    def backward(ctx, g):
        w, x = ctx.saved_tensors
        return (g * x).sum(), g * w


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand(1)

    @staticmethod
    def backward(ctx, g):
        return g


@torch.library.custom_op("vfn_tests::half_of", mutates_args=())
def half_of(x: torch.Tensor) -> torch.Tensor:
    return x / 2


half_of.register_autograd(lambda ctx, g: g / 2)


@torch.library.custom_op("vfn_tests::noise_like", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise_like(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(x.shape)


@torch.library.custom_op("vfn_tests::some", mutates_args=())
def some(n: int) -> torch.Tensor:
    return torch.rand(n)


TYPES = {
    "argument": (lambda x: x, "V"),
    "psum": (lambda x: vfn.psum(x, "i"), "I"),
    "zeros": (lambda x: torch.zeros(3), "I"),
    "arange, tensor, eye": (lambda x: torch.arange(3)[:, None] + torch.tensor([1, 2, 3]) + torch.eye(3), "I"),
    "zeros_like": (lambda x: torch.zeros_like(x), "V"),
    "empty": (lambda x: torch.empty(3), "V"),
    "rand": (lambda x: torch.rand(3), "V"),
    "drawn in place": (lambda x: torch.zeros(3).normal_(), "V"),
    "dropout": (lambda x: F.dropout(vfn.psum(x, "i")), "V"),
    "no dropout": (lambda x: F.dropout(vfn.psum(x, "i"), 0.5, False), "I"),
    "mixed": (lambda x: vfn.psum(x, "i") + x, "V"),
    "list of mixed": (lambda x: torch.cat([vfn.psum(x, "i"), x]), "V"),
    "index": (lambda x: torch.arange(4)[vfn.axis_index("i")[None]], "V"),
    "keyword": (lambda x: torch.add(torch.zeros(1), other=x), "V"),
    "tuple of results": (lambda x: torch.max(x[None], dim=0)[1], "V"),
    "attribute": (lambda x: x[None].mT, "V"),
    "iteration": (lambda x: next(iter(x)), "V"),
    "setitem": (lambda x: _set(torch.zeros(3), x), "V"),
    "old view of what is written": (lambda x: _set_after_view(torch.zeros(3), x), "V"),
    "old row of what is written": (lambda x: _alias_then_write(torch.zeros(2), x, lambda b: b.unbind()[1]), "V"),
    "old detached name of what is written": (lambda x: _alias_then_write(torch.zeros(2), x, torch.Tensor.detach), "V"),
    "old data of what is written": (lambda x: _alias_then_write(torch.zeros(2), x, lambda b: b.data), "V"),
    "written through data": (lambda x: _write_alias(torch.zeros(2), x, lambda b: b.data), "V"),
    "written through a chunk": (lambda x: _write_alias(torch.zeros(2), x, lambda b: b.chunk(2)[0]), "V"),
    "written through view_as": (lambda x: _write_alias(torch.zeros(1), x, lambda b: b.view_as(x)), "V"),
    "sibling view of what is written": (lambda x: _write_sibling(torch.zeros(4), x), "V"),
    "another buffer than what is written": (lambda x: _alias_then_write(torch.zeros(2), x, torch.Tensor.clone), "I"),
    "base of what is written": (lambda x: _set_view(torch.zeros(3), x), "V"),
    "out=": (lambda x: torch.add(x, 1, out=torch.zeros(1)), "V"),
    "vmap, unseen view": (lambda x: torch.func.vmap(lambda x: x * 2, out_dims=-1)(x[:, None]), "V"),
    "vmap of a captured value": (lambda x: torch.func.vmap(lambda y: x * 1)(torch.zeros(3)), "V"),
    "autograd.Function": (lambda x: Scale.apply(torch.ones(()), vfn.psum(x, "i")), "I"),
    "autograd.Function of varying": (lambda x: Scale.apply(torch.ones(()), x), "V"),
    "autograd.Function that draws": (lambda x: Noisy.apply(vfn.psum(x, "i")), "V"),
    "custom op": (lambda x: half_of(vfn.psum(x, "i")), "I"),
    "custom op of varying": (lambda x: half_of(x), "V"),
    "custom op that draws": (lambda x: noise_like(vfn.psum(x, "i")), "V"),
    "custom op of no tensor": (lambda x: some(3), "V"),
    "written over uninitialised memory": (lambda x: torch.mul(vfn.psum(x, "i"), 2, out=torch.empty(1)), "I"),
    "copied over uninitialised memory": (lambda x: torch.empty(1).copy_(vfn.psum(x, "i")), "I"),
    "filled uninitialised memory": (lambda x: torch.empty_like(x).fill_(2), "I"),
    "a part of uninitialised memory": (lambda x: _write_alias(torch.empty(2), vfn.psum(x, "i"), lambda b: b[:1]), "V"),
    "gradient of varying": (lambda x: torch.func.grad(lambda x: x.sum())(x), "V"),
    "gradient of invariant": (lambda x: torch.func.grad(lambda w: (w * x).sum())(torch.ones(())), "I"),
    "gathered": (lambda x: vfn.all_gather(x, "i"), "V"),
    "gathered invarying": (lambda x: vfn.all_gather(x, "i", to="invarying"), "I"),
    "gathered reduced": (lambda x: vfn.all_gather(x, "i", to="reduced"), "R"),
    "reduced times reduced": (lambda x: vfn.all_gather(x, "i", to="reduced") ** 2, "R"),
    "reduced times varying": (lambda x: vfn.all_gather(x, "i", to="reduced") * x, "V"),
    "unreduced": (lambda x: 3 * -vfn.pcast(x, "i", to="unreduced")[None] / 2, "U"),
    "unreduced plus unreduced": (lambda x: vfn.pcast(x, "i", to="unreduced") + vfn.pcast(x, "i", to="unreduced"), "U"),
    "unreduced times reduced": (
        lambda x: vfn.pcast(x, "i", to="unreduced") * vfn.pcast(torch.ones(1), "i", to="reduced"),
        "U",
    ),
    "unreduced scattered": (lambda x: vfn.psum_scatter(vfn.pcast(x.repeat(4), "i", to="unreduced"), "i"), "V"),
    "unreduced summed": (lambda x: vfn.psum(vfn.pcast(x, "i", to="unreduced"), "i"), "I"),
    "gradient of reduced": (
        lambda x: torch.func.grad(lambda w: (w * x).sum())(vfn.pcast(torch.ones(()), "i", to="reduced")),
        "U",
    ),
    "gradient of unreduced": (
        lambda x: torch.func.grad(lambda u: vfn.psum(u, "i").sum())(vfn.pcast(x, "i", to="unreduced")),
        "R",
    ),
}


@pytest.mark.parametrize("f", [lambda w, x: Scale.apply(w, x), lambda w, x: half_of(w * x) * 2], ids=["Function", "op"])
def test_what_a_body_cannot_see_into_varies_as_its_operands(f):
    """Over two axes, of which the operands vary over one: neither the value nor a gradient is a multiple."""
    w, x = torch.tensor(2.0), torch.arange(1.0, 5)
    local = lambda w, x: vfn.psum(f(w, x).sum(), "d")
    loss = lambda w, x: vfn.shard_map(local, in_specs=(P(), P("d")), out_specs=P())(w, x)
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((2, 2), ("d", "t"))):
        value, found = vfn.value_and_grad(loss, (0, 1))(w, x)
        inside = lambda w, x: vfn.grad(local)(w, x)
        here = vfn.shard_map(inside, in_specs=(P(), P("d")), out_specs=P())(w, x)
        noisy = lambda x: vfn.shard_map(lambda x: vfn.psum(Noisy.apply(x), ("d", "t")), in_specs=P(), out_specs=P())(x)
        with pytest.raises(VaryingTypeError, match="differs by rank of operands that do not") as caught:
            vfn.grad(lambda x: noisy(x).sum())(x)
        assert "vfn.pvary(x, 'd') for the operands" in str(caught.value)
    assert (value.item(), found[0].item(), vfn.unshard(found[1]).tolist(), here.item()) == (20, 10, [2, 2, 2, 2], 10)


INDICES = {
    "i": lambda x, i: x[i],
    "i, slice": lambda x, i: x[i, 1:],
    "ellipsis": lambda x, i: x[..., i],
    "new dim": lambda x, i: x[:, None, i],
    "twice": lambda x, i: x[i, i],
    "negative": lambda x, i: x[1, i - 2],
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_that_are_numbers_which_differ_by_rank(name):
    f, x = INDICES[name], torch.arange(12.0).view(3, 4)
    loss = lambda x: vfn.shard_map(
        lambda x: vfn.psum((f(x, vfn.axis_index("d")) ** 2).sum(), "d"), in_specs=P(), out_specs=P()
    )(x)
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((2, 2), ("d", "t"))):
        out = vfn.shard_map(lambda x: f(x, vfn.axis_index("d"))[None], in_specs=P(), out_specs=P("d"))(x)
        found = vfn.grad(loss)(x)
    assert torch.equal(vfn.unshard(out), torch.stack([f(x, i) for i in range(2)]))
    assert torch.equal(found, vfn.grad(lambda x: sum((f(x, i) ** 2).sum() for i in range(2)))(x))


def _set(buffer, x):
    buffer[0] = x[0]
    return buffer * 1


def _set_view(buffer, x):
    buffer[1:].add_(x)
    return buffer * 1


def _set_after_view(buffer, x):
    row = buffer[:1]
    buffer += x
    return row * 1


def _alias_then_write(buffer, x, alias):
    other = alias(buffer)
    buffer += x
    return other


def _write_alias(buffer, x, alias):
    alias(buffer).copy_(x)
    return buffer


def _write_sibling(buffer, x):
    first, second = buffer.view(2, 2)[0], buffer[:2]
    first.copy_(x)
    return second


@pytest.mark.parametrize("name", TYPES)
def test_types(name, mesh):
    body, letter = TYPES[name]
    assert type_in_body(body, mesh, D) == letter


def types_on_real_ranks():
    mesh = vfn.make_mesh((2,), ("i",))
    return {name: type_in_body(body, mesh, D[:2]) for name, (body, _) in TYPES.items() if name not in FOUR_RANKS}


FOUR_RANKS = ("unreduced scattered",)


def test_types_on_real_ranks(gloo):
    wanted = {name: letter for name, (_, letter) in TYPES.items() if name not in FOUR_RANKS}
    assert gloo(2, types_on_real_ranks) == [wanted] * 2


def test_names_of_one_memory(mesh):
    """A write through one name of a memory is seen by collectives and out_specs through every other."""

    def total(x):
        buffer = torch.zeros(2)
        rows, detached = buffer.unbind(), buffer.detach()
        buffer += x
        return vfn.psum((rows[1], detached), "i")

    one, both = run(total, mesh, D, outs=P())
    assert (vfn.unshard(one).item(), vfn.unshard(both).tolist()) == (10, [10, 10])
    text, moved = refused(
        lambda x: _alias_then_write(torch.zeros(1), x, torch.Tensor.detach), mesh, outs=P(), error=SpecError
    )
    assert "out is f32[1]{V:i}, for out_specs P()" in text
    assert moved == 0
    array = vfn.shard(D, mesh, P("i"))
    for body in (lambda x: x.detach().mul_(2), lambda x: x.data.mul_(2), _write_through_data):
        assert "belongs to the caller" in refused(body, mesh, array, error=InPlaceError)[0]
    assert vfn.unshard(array).tolist() == D.tolist()
    text, _ = refused(lambda x: torch.zeros(0).set_(torch.zeros(1)), mesh, error=InPlaceError)
    assert text.startswith("set_: this makes a tensor another name for memory")


def write_what_arrived(check_vma):
    """Each collective of a value, its result written in place: the result, the value, and the collective once more."""
    mesh, pairs = vfn.make_mesh((2, 1), ("i", "one")), [(0, 0), (1, 1)]
    collectives = [
        lambda x: vfn.psum(x, "i"),
        lambda x: vfn.psum(x, "one"),
        lambda x: vfn.pmax(x, ("one", "i")),
        lambda x: vfn.all_gather(x, "i", tiled=True),
        lambda x: vfn.all_gather(x, "one", to="invarying"),
        lambda x: vfn.psum_scatter(x, "i", tiled=True),
        lambda x: vfn.all_to_all(x, "i", 0, 0),
        lambda x: vfn.all_to_all(x, "one", 0, 0, tiled=True),
        lambda x: vfn.ppermute(x, "i", [(0, 1), (1, 0)]),
        lambda x: vfn.ppermute(x, "i", pairs),
        lambda x: vfn.pbroadcast(x, "i", 1),
        lambda x: vfn.axis_index("i"),
        lambda x: vfn.axis_index("one"),
    ]

    def body(x):
        out = []
        for collective in collectives:
            mine = x + 1
            arrived = collective(mine)
            arrived += x[1].to(arrived.dtype)
            out.append(torch.cat([arrived.flatten(), mine, collective(mine).flatten()]))
        return torch.cat(out)

    f = vfn.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P(("i", "one")), check_vma=check_vma)
    return vfn.unshard(f(torch.tensor([1.0, 10.0, 100.0, 1000.0]))).tolist()


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_arrives_is_the_ranks_own_memory(gloo, check_vma):
    """Simulated ranks play in one memory; a write of one must not be seen by another, as on real ranks."""
    with vfn.simulate(2):
        got = write_what_arrived(check_vma)
    assert gloo(2, write_what_arrived, check_vma) == [got] * 2
    assert got[:6] == [113.0, 1022.0, 2.0, 11.0, 103.0, 1012.0]  # psum, written; the value; psum


def aside_writes(mesh):
    """What functions do that write an argument without saying so in their name; on any mesh of 2 ranks."""
    x, mean, var, table = torch.arange(1.0, 5.0), torch.zeros(1), torch.ones(1), torch.ones(4, 2)
    norm = lambda x, mean, var: F.batch_norm(x[:, None], mean, var, training=True)[:, 0]
    positional = lambda x, mean, var: torch.batch_norm(x[:, None], None, None, mean, var, True, 0.1, 1e-5, False)[:, 0]
    look_up = lambda x, table: F.embedding(x.long() - 1, table, max_norm=1.0)[:, 0]
    said = []

    def attempt(body, *args, ins=P("i"), outs=P("i")):
        try:
            said.append(vfn.unshard(run(body, mesh, *args, ins=ins, outs=outs)).tolist())
        except (InPlaceError, SpecError, VaryingTypeError) as error:
            said.append(str(error).split("\n")[0])

    for f in (norm, positional):
        attempt(f, x, mean, var, ins=(P("i"), P(), P()))
        attempt(lambda x, f=f: f(x, mean, var), x)
        attempt(lambda x, f=f: _own_buffer(x, lambda x, own: f(x, own, torch.ones(1))), x)
        attempt(lambda x, f=f: _own_buffer(x, lambda x, own: f(x, own, torch.ones(1))), x, outs=P())
    attempt(lambda x: F.batch_norm(x[:, None], mean, var, eps=1e-30)[:, 0], x)
    attempt(torch.nn.BatchNorm1d(2), torch.ones(4, 2))
    attempt(look_up, x, table, ins=(P("i"), P()))
    attempt(lambda x: look_up(x, table), x)
    attempt(lambda x: F.embedding(x.long() - 1, table)[:, 0], x)
    attempt(lambda x: torch.from_numpy(x.numpy().copy()), x)
    attempt(lambda x: torch.as_tensor(np.asarray(x)), x)
    attempt(lambda x: torch.tensor(x.tolist()), x)
    attempt(lambda x: torch.from_dlpack(x), x)
    attempt(lambda x: torch.from_numpy(vfn.psum(x, "i").numpy() * 1), x, outs=P())
    attempt(lambda x: torch.tensor(vfn.psum(x, "i").tolist()), x, outs=P())
    return said, mean.tolist(), var.tolist(), table.tolist()


def _own_buffer(x, f):
    own = torch.zeros(1)
    f(x, own)
    return own


def aside_writes_on_real_ranks():
    return aside_writes(vfn.make_mesh((2,), ("i",)))


def test_writes_and_reads_that_no_name_tells(gloo):
    with vfn.simulate(2):
        said, mean, var, table = aside_writes(vfn.make_mesh((2,), ("i",)))
    assert gloo(2, aside_writes_on_real_ranks) == [(said, mean, var, table)] * 2
    assert (mean, var, table) == ([0], [1], [[1, 1]] * 4)
    foreign, outside = (
        "this writes into memory that belongs to the caller",
        "writes into a tensor from outside the body",
    )
    for first in (0, 4):
        assert foreign in said[first]
        assert outside in said[first + 1]
        assert said[first + 2] == pytest.approx([0.15, 0.35])
        assert "do not fit out_specs" in said[first + 3]
    assert said[8] == [1, 2, 3, 4]
    assert [foreign in said[10], outside in said[9], outside in said[11]] == [True] * 3
    assert said[12] == [1, 1, 1, 1]
    for text, name in zip(said[13:17], ("numpy", "__array__", "tolist", "__dlpack__")):
        assert text.startswith(f"{name}: this takes the numbers out of a value that differs by rank")
    assert said[17:] == [[4, 6], [4, 6]]


@torch.library.custom_op("vfn_tests::add_total", mutates_args=("buffer",))
def add_total(x: torch.Tensor, buffer: torch.Tensor) -> None:
    buffer += x.sum()


def test_what_a_custom_op_writes(mesh):
    grown = run(lambda x: _own_buffer(x, add_total), mesh, D)
    assert vfn.unshard(grown).tolist() == [1, 2, 3, 4]
    assert "do not fit out_specs" in refused(lambda x: _own_buffer(x, add_total), mesh, outs=P(), error=SpecError)[0]
    assert "belongs to the caller" in refused(lambda x: add_total(x, x), mesh, error=InPlaceError)[0]


def _write_through_data(x):
    mine = torch.zeros(1)
    mine.data = x
    mine += 1
    return mine


def refused(body, mesh, *args, error=VaryingTypeError, **options):
    with vfn.comm_log() as log, pytest.raises(error) as caught:
        run(body, mesh, *(args or (D,)), **options)
    return str(caught.value), len(log)


def _plus_in_place(u, number):
    u = u.clone()
    u += number
    return u


ONCE_A_RANK, ROUNDS = "the number would be added once a rank of 'i'", "rounds each rank's part"
NOT_LINEAR = {
    "padding": (lambda u: F.pad(u, (1, 1), value=5.0), "the padding would be added once a rank"),
    "padding by position": (lambda u: F.pad(u, (1, 1), "constant", 5.0), "the padding would be added once a rank"),
    "number by keyword": (lambda u: torch.add(u, other=5.0), ONCE_A_RANK),
    "subtracted by keyword": (lambda u: torch.sub(u, other=1.0), ONCE_A_RANK),
    "number of numpy": (lambda u: u + np.float64(5), ONCE_A_RANK),
    "in place": (lambda u: _plus_in_place(u, np.float32(1)), ONCE_A_RANK),
    "bool": (lambda u: u + True, ONCE_A_RANK),
    "floor": (lambda u: torch.div(u, 2, rounding_mode="floor"), ROUNDS),
    "trunc": (lambda u: u.div(2, rounding_mode="trunc"), ROUNDS),
    "to": (lambda u: u.to(torch.int32), ROUNDS),
    "to, by keyword": (lambda u: u.to(dtype=torch.int32), ROUNDS),
    "to bool": (lambda u: u.to(torch.bool), ROUNDS),
    "to another's": (lambda u: u.to(torch.arange(1)), ROUNDS),
    "type": (lambda u: u.type(torch.int64), ROUNDS),
    "type by name": (lambda u: u.type("torch.LongTensor"), ROUNDS),
    "type_as": (lambda u: u.type_as(torch.arange(1)), ROUNDS),
    "sum to an integer": (lambda u: u.sum(dtype=torch.int64), ROUNDS),
    "nansum": (lambda u: u.nansum(), "is not linear"),
    "as an index": (lambda u: torch.arange(9)[u.double().sum().expand(1)], "is not linear"),
    "as a shape": (lambda u: torch.ones(1).expand_as(u), "is not linear in its other operands"),
}
LINEAR = {
    "zero padding": lambda u: F.pad(u, (1, 1)),
    "circular padding": lambda u: F.pad(u[None, None].expand(1, 1, 2), (1, 1), mode="circular"),
    "scaled": lambda u: torch.add(u, u, alpha=3) * np.float32(2) / 4,
    "cast": lambda u: u.to(torch.float64).type(torch.float32).sum(dtype=torch.float64),
    "moved": lambda u: u.to("cpu", torch.float64).index_select(0, torch.tensor([0, 0])).expand_as(torch.ones(2)),
    "integers": lambda u: u.to(torch.float32).div(2).mean(),
    "in place": lambda u: u.clone().mul_(3).div_(2),
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear(name, mesh):
    f = LINEAR[name]
    late = run(lambda x: vfn.psum(f(vfn.pcast(x, "i", to="unreduced")), "i"), mesh, D, outs=P())
    torch.testing.assert_close(vfn.unshard(late), f(D.sum(0, keepdim=True)))


def test_messages_of_types(mesh):
    unreduced = lambda x: vfn.pcast(x, "i", to="unreduced")
    text, moved = refused(lambda x: torch.sin(unreduced(x)), mesh)
    assert moved == 0
    assert text == (
        "sin: sin is not linear, so the sum over 'i' must come before it\n"
        "  * operand 0 is f32[1]{U:i} on the mesh (i=4)\n"
        "  Instead: vfn.psum(x, 'i') first, or vfn.psum_scatter"
    )
    assert "the number would be added once a rank of 'i'" in refused(lambda x: unreduced(x) + 1, mesh)[0]
    assert "the invariant value would be added once a rank" in refused(lambda x: unreduced(x) + torch.ones(1), mesh)[0]
    assert "not linear in two unreduced values" in refused(lambda x: unreduced(x) * unreduced(x), mesh)[0]
    assert "only be scaled by a reduced one" in refused(lambda x: unreduced(x) * torch.ones(1), mesh)[0]
    assert "meets one that differs by rank" in refused(lambda x: unreduced(x) + x, mesh)[0]
    assert (
        "dividing by an unreduced value" in refused(lambda x: vfn.pcast(D, "i", to="reduced") / unreduced(x), mesh)[0]
    )
    for body, why in NOT_LINEAR.values():
        assert why in refused(lambda x, body=body: body(unreduced(x)), mesh)[0]
    text, _ = refused(lambda x: vfn.all_gather(x, "i", to="reduced") + torch.ones(1), mesh)
    assert text == (
        "add: a reduced value meets an invariant one: their cotangents differ\n"
        "  * operand 0 is f32[4,1]{R:i} on the mesh (i=4)\n"
        "  * operand 1 is f32[1] on the mesh (i=4)\n"
        "  Instead: vfn.pcast(x, 'i', to='reduced') for the invariant one"
    )
    text, _ = refused(lambda x: x if x > 0 else -x, mesh)
    assert text == (
        "`if`: this asks for the truth of a value that differs by rank, so ranks could go different ways\n"
        "  * the value is bool[1]{V:i} on the mesh (i=4)\n"
        "  Instead: torch.where(condition, a, b); or one condition for all ranks, of vfn.psum(x, 'i') or vfn.pmax(x, 'i')"
    )
    assert vfn.unshard(run(lambda x: x if vfn.psum(x, "i") > 9 else -x, mesh, D)).tolist() == [1, 2, 3, 4]


def test_messages_of_writes(mesh):
    outside, weight = torch.zeros(1), torch.ones((), requires_grad=True)
    text, _ = refused(lambda x: x.add_(1), mesh, error=InPlaceError)
    assert text == (
        "add_: this writes into memory that belongs to the caller, or to another value\n"
        "  * the target is f32[1]{V:i}\n"
        "  Instead: x = x.clone() first, or the function without the underscore"
    )
    for body in (
        lambda x: x.view(-1).mul_(2),
        lambda x: F.relu(x, inplace=True),
        lambda x: _set(vfn.pvary(torch.ones(1), "i"), x),
    ):
        refused(body, mesh, error=InPlaceError)
    text, _ = refused(lambda x: outside.add_(x), mesh)
    assert text == (
        "add_: this writes a value that differs by rank into one that is the same on all of them\n"
        "  * the target is f32[1], a value from outside the body\n"
        "  * what is written makes it f32[1]{V:i}\n"
        "  Instead: the function without the underscore, which makes a new value"
    )
    text, _ = refused(lambda x: (weight * 2).add_(x[0]), mesh)
    assert "which has a gradient" in text


def test_factories_give_each_rank_its_own_memory(mesh):
    def body(x):
        out = torch.zeros(2)
        out[0] = x[0]
        out += 1
        return out, torch.arange(3).add_(1)

    for check in (True, False):
        mine, same = run(body, mesh, D, outs=(P("i"), P()), check_vma=check)
        assert vfn.unshard(mine).tolist() == [2, 1, 3, 1, 4, 1, 5, 1]
        assert vfn.unshard(same).tolist() == [1, 2, 3]


def test_a_weight_used_ten_times_is_reduced_once(mesh):
    def body(w, x):
        return vfn.psum(sum((w * x * i).sum() for i in range(10)), "i")

    f = vfn.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    for grad in (vfn.grad, lambda f: torch.func.grad(lambda w, d: vfn.unshard(f(w, d)))):
        with vfn.comm_log() as log:
            assert grad(f)(torch.tensor(2.0), D).item() == 450
        assert log.count("all_reduce") == 2


def test_a_weight_is_promoted_anew_after_it_was_written(mesh):
    def body(w, x):
        w = w * 1
        before = (w + x).sum()
        w *= 3
        return vfn.psum(before + (w + x).sum(), "i")

    f = vfn.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    assert vfn.grad(f)(torch.tensor(2.0), D).item() == 4 * (1 + 3)


def test_promoted_values_are_not_kept_alive(mesh):
    alive = []

    def body(w, x):
        h = w * 2  # the same on all ranks, with a gradient
        ref = weakref.ref(h)
        h = (h * x).sum()
        gc.collect()
        alive.append(ref() is not None)
        return vfn.psum(h.detach(), "i")

    w = torch.tensor(2.0, requires_grad=True)
    with torch.no_grad():
        run(body, mesh, w, D, ins=(P(), P("i")), outs=P())
    assert alive == [False]


def test_users_functions_and_modules(mesh):
    functions = torch.autograd.function
    places = functions, functions.FunctionMeta, functions._SingleLevelFunction, functions.Function
    f = vfn.shard_map(
        lambda w, x: vfn.psum(Scale.apply(w, x).sum(), "i"), mesh=mesh, in_specs=(P(), P("i")), out_specs=P()
    )
    f(torch.tensor(2.0), D)
    before = [dict(vars(place)) for place in places]
    assert vfn.grad(f)(torch.tensor(2.0), D).item() == 10
    linear = torch.nn.Linear(1, 1)
    for check in (True, False):
        linear.zero_grad()
        g = vfn.shard_map(
            lambda x: vfn.psum(linear(x[:, None]).sum(), "i"),
            mesh=mesh,
            in_specs=P("i"),
            out_specs=P(),
            check_vma=check,
        )
        vfn.unshard(g(D)).backward()
        assert type(linear.weight.grad) is torch.Tensor
        assert linear.weight.grad.item() == 10
        assert linear.bias.grad.item() == 4
    assert [dict(vars(place)) for place in places] == before  # what the first body has exchanged is all


def closures_on_real_ranks():
    mesh = vfn.make_mesh((2,), ("i",))
    found = []
    for check in (True, False):
        w = torch.tensor(2.0)
        f = lambda w, check=check: run(
            lambda x: vfn.psum((w.exp() * x).sum(), "i"), mesh, D[:2], outs=P(), check_vma=check
        )
        found.append(vfn.grad(f)(w).item())
        found.append(torch.func.grad(lambda w: vfn.unshard(f(w)))(w).item())
        leaf = torch.tensor(2.0, requires_grad=True)
        try:
            out = vfn.unshard(
                run(lambda x: vfn.psum((leaf.exp() * x).sum(), "i"), mesh, D[:2], outs=P(), check_vma=check)
            )
            out.backward()
            found.append(leaf.grad.item())
        except VaryingTypeError as error:
            found.append(str(error).splitlines()[1])
        w = vfn.shard(torch.tensor(2.0), mesh, P())
        by = lambda x, w=w: vfn.grad(lambda w: (w * x).sum())(w)[None]
        found.append(vfn.unshard(run(by, mesh, D[:2], check_vma=check)).tolist())
    return found


def test_gradients_of_closures_on_real_ranks(gloo):
    wanted = 3 * torch.tensor(2.0).exp().item()
    for found in gloo(2, closures_on_real_ranks):
        assert found[:3] + found[4:6] == pytest.approx([wanted] * 5)
        assert found[6] == "  * the result f32[] has a gradient, but no argument has"
        assert (found[3], found[7]) == (
            [3, 3],
            [1, 2],
        )  # by an array, in the body: the ranks' sum; without types its own


def test_closures_over_arrays(mesh):
    whole, sharded = vfn.shard(torch.tensor(2.0), mesh, P()), vfn.shard(D, mesh, P("i"))
    f = lambda w: run(lambda x: vfn.psum((w * x).sum(), "i"), mesh, D, outs=P())
    assert f(whole).item() == 20
    assert vfn.grad(f)(whole).item() == 10
    for check in (True, False):
        text, _ = refused(lambda x: x * sharded, mesh, check_vma=check)
        assert text == (
            "shard_map(<lambda>): the body uses an array from outside, of which each rank holds a part\n"
            "  * it is f32[4@i] on the mesh (i=4)\n"
            "  Instead: pass it as an argument, with in_specs=P('i') for its block or P() for the whole"
        )


CLOSING = {  # bodies that close over an array of which every rank holds the whole
    "an op with a block": lambda b, w: w + b,
    "an op of its own": lambda b, w: b + (w * 2).sum(),
    "a view of it": lambda b, w: b @ w.t()[1],
    "in a list": lambda b, w: torch.cat([b, w]),
    "made like it": lambda b, w: w.new_full((2, 2), 3.0) + b,
    "in place into a copy": lambda b, w: w.clone().add_(b),
    "a collective of such": lambda b, w: vfn.psum(b + w, "i") + b,
    "given back": lambda b, w: w,
    "torch.func": lambda b, w: torch.func.grad(lambda w: (b * w).sum())(w),
    "vmap": lambda b, w: torch.func.vmap(lambda row: row + w[0])(b),
    "a plan in it": lambda b, w: vfn.jit(lambda b: b * w)(b),
}


def closing_over_an_array():
    mesh = vfn.make_mesh((2,), ("i",))
    w = vfn.shard(torch.tensor([[2.0, 3.0], [5.0, 7.0]]), mesh, P())
    x = vfn.shard(torch.arange(8.0).view(4, 2), mesh, P("i"))
    found = {}
    for name, f in CLOSING.items():
        mapped = vfn.shard_map(lambda b, f=f: f(b, w), mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
        found[name] = [vfn.unshard(g(x)).tolist() for g in (mapped, vfn.jit(mapped))]
    return found


def test_arrays_in_a_body_that_nothing_watches(gloo):
    """Without types and gradients real ranks run a body without a mode: what it closes over is taken in all the same."""
    with vfn.simulate(2):
        wanted = closing_over_an_array()
    assert wanted["an op with a block"] == [[[2, 4], [7, 10], [6, 8], [11, 14]]] * 2
    assert gloo(2, closing_over_an_array) == [wanted] * 2


def test_transforms_in_a_body_by_an_array_from_outside(mesh):
    """A replicated array that the body closes over is what `in_specs=P()` makes of it, for a transform as well."""
    w, whole = vfn.shard(torch.tensor([2.0, 3.0]), mesh, P()), torch.tensor([2.0, 3.0])
    one = vfn.shard(torch.tensor(1.0), mesh, P())
    transforms = {
        "grad": lambda f, w: vfn.grad(f)(w),
        "value_and_grad": lambda f, w: vfn.value_and_grad(lambda p: f(p["w"]))({"w": w})[1]["w"],
        "vjp": lambda f, w: vfn.vjp(f, w)[1](one)[0],
        "jvp": lambda f, w: vfn.jvp(f, (w,), (w,))[1],
        "linearize": lambda f, w: vfn.linearize(f, w)[1](w),
        "torch.func.grad": lambda f, w: torch.func.grad(f)(w),
    }
    for check in (True, False):
        for name, of in transforms.items():
            summed = check and "grad" in name  # of a value that is the same on all ranks: over the ranks
            outs = P() if summed else P("i")
            body = lambda x, w, of=of: of(lambda w: (w * w * x).sum(), w)[None]
            given = vfn.unshard(run(body, mesh, D, whole, ins=(P("i"), P()), outs=outs, check_vma=check))
            closed = vfn.unshard(run(lambda x, body=body: body(x, w), mesh, D, outs=outs, check_vma=check))
            assert torch.equal(closed, given), (name, check)
            if summed:
                assert torch.equal(closed, 20 * whole[None]), name
    sharded = vfn.shard(D, mesh, P("i"))
    text, _ = refused(lambda x: vfn.grad(lambda w: (w * x).sum())(sharded), mesh)
    assert text.endswith("Instead: pass it as an argument, with in_specs=P('i') for its block or P() for the whole")


# --- specs, arguments, results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")])
def test_identity_between_all_specs(axes):
    a, b = axes
    specs = [P(), P(a), P(None, a), P(a, b), P((a, b)), P((b, a)), P(None, (a, b))]
    x = torch.arange(72.0).view(6, 12)
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("x", "y"))
        for spec in specs:
            f = vfn.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)
            for source in (None, *specs):
                given = x if source is None else vfn.shard(x, mesh, source)
                out = f(given)
                assert vfn.spec_of(out) == spec
                assert torch.equal(vfn.unshard(out), x)
                g = vfn.grad(lambda x: (f(x) * x).sum())(given)
                assert torch.equal(vfn.unshard(g), 2 * x)
                assert vfn.spec_of(g) == vfn.spec_of(given)


def test_trees_static_arguments_and_none(mesh):
    @vfn.shard_map(
        mesh=mesh, in_specs=[P("i"), None, P(), P(), {"a": P("i"), "b": P()}], out_specs=(P("i"), None, P(), P())
    )
    def f(x, nothing, times, name, tree):
        assert (nothing, times, name) == (None, 3, "hi")
        assert tree["b"] == [1, "static"]
        return {"y": x * times + tree["a"]}, nothing, name, times

    out, nothing, name, times = f(D, None, 3, "hi", {"a": D, "b": [1, "static"]})
    assert f.__name__ == "f"
    assert vfn.unshard(out["y"]).tolist() == [4, 8, 12, 16]
    assert (nothing, name, times) == (None, "hi", 3)
    doubled = run(lambda x: copy.deepcopy(x) * 2, mesh, D.numpy())  # a numpy array is cut like a tensor
    assert vfn.unshard(doubled).tolist() == [2, 4, 6, 8]
    with pytest.raises(VaryingTypeError, match=r"takes positional arguments, but \['tree'\] came by keyword"):
        f(D, None, 3, "hi", tree={})


def test_keys(mesh):
    key = vfn.random.key(0)
    whole = vfn.random.normal(key, (8,))
    same = run(lambda k: vfn.random.normal(k, (8,)), mesh, key, ins=P(), outs=P())
    assert torch.equal(vfn.unshard(same), whole)
    mine = run(lambda k: vfn.random.normal(k, (8,), spec=P("i")), mesh, key, ins=P(), outs=P("i"))
    assert torch.equal(vfn.unshard(mine), whole)
    split = run(lambda k: vfn.random.normal(k[0], (1,)), mesh, vfn.random.split(key, 4))
    folded = run(lambda k: vfn.random.normal(vfn.random.fold_in(k, vfn.axis_index("i")), (1,)), mesh, key, ins=P())
    assert torch.equal(vfn.unshard(split), vfn.unshard(folded))
    text, _ = refused(lambda k: vfn.random.normal(k, (8,), spec=P("i")), mesh, key, ins=P(), outs=P(), error=SpecError)
    assert "out is f32[2]{V:i}, for out_specs P(): it varies over 'i'" in text


def test_which_mesh(mesh):
    identity = vfn.shard_map(lambda x: x, in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(MeshError) as error:
        identity(D)
    assert str(error.value) == (
        "shard_map(<lambda>): there is no mesh: none was given, none is current, and no argument is an array on one\n"
        "  Instead: shard_map(f, mesh=mesh, ...) or `with vfn.use_mesh(mesh):`"
    )
    assert torch.equal(vfn.unshard(identity(vfn.shard(D, mesh, P()))), D)
    with vfn.use_mesh(mesh):
        assert torch.equal(vfn.unshard(identity(D)), D)
    other = vfn.make_mesh((2, 2), ("i", "j"))
    with vfn.use_mesh(other):  # the same function, planned anew
        assert identity(D).to_local().shape == (2,)
    text, _ = refused(lambda x: x, mesh, vfn.shard(D, other, P("i")), error=SpecError)
    assert (
        "it lies on another mesh, mesh (i=2, j=2)\n  Instead: vfn.shard(x, mesh, P('i')), which brings it over" in text
    )
    text, _ = refused(lambda x: run(lambda y: y, mesh, x), mesh, error=MeshError)
    assert "inside the body of another shard_map, where all axes are manual already" in text


def test_unreduced_and_reduced_arrays(mesh):
    out = run(lambda x: vfn.pcast(x * 2, "i", to="unreduced"), mesh, D, outs=P(unreduced={"i"}))
    assert vfn.spec_of(out) == P(unreduced={"i"})
    assert vfn.unshard(out).tolist() == [20]
    again = run(lambda u: vfn.psum(u, "i"), mesh, out, ins=P(unreduced={"i"}), outs=P())
    assert vfn.unshard(again).tolist() == [20]
    w = vfn.shard(torch.tensor(2.0), mesh, P(reduced={"i"}))
    f = lambda w: run(lambda w, x: vfn.psum((w * x).sum(), "i"), mesh, w, D, ins=(P(reduced={"i"}), P("i")), outs=P())
    with vfn.comm_log() as log:
        g = vfn.grad(f)(w)
    assert vfn.spec_of(g) == P(unreduced={"i"})  # its sum is left to the user, who asked for that
    assert log.count("all_reduce") == 1
    assert vfn.unshard(g).item() == 10
    text, _ = refused(lambda x: vfn.pcast(x, "i", to="unreduced"), mesh, outs=P(), error=SpecError)
    assert "it is unreduced over 'i', but out_specs says the same on all ranks" in text
    assert "vfn.psum(x, 'i'), or out_specs with unreduced={'i'}" in text


def test_strict(mesh):
    x = vfn.shard(D, mesh, P("i"))
    with vfn.strict():
        run(lambda x: x, mesh, x)
        run(lambda x: x, mesh, vfn.shard(D, mesh, P()))  # a slice: nothing moves
        text, moved = refused(lambda p: p, mesh, x, ins=P(), outs=P(), error=ReshardError)
        assert moved == 0
        assert text == (
            "shard_map(<lambda>): strict: arguments lie otherwise than in_specs says\n"
            "  * args[0] of shape f32[4@i], where args[0] is bound to <lambda>'s parameter 'p', corresponds to "
            "in_specs = P(), but it lies as P('i'): vfn.with_sharding(x, P())\n"
            "  Instead: write the vfn.with_sharding, so that the program asks for the move"
        )
        body = lambda w, x: torch.func.grad(lambda w: (w * x).sum())(w)
        text, _ = refused(body, mesh, torch.ones(()), D, ins=(P(), P("i")), outs=P())
        assert "strict: this differentiates a value that differs by rank" in text
    with vfn.comm_log() as log:
        assert torch.equal(vfn.unshard(run(lambda x: x, mesh, x, ins=P(), outs=P())), D)
    assert [(r.op, r.why) for r in log] == [("all_gather", "shard_map argument")]


def test_messages_of_arguments(mesh):
    def f(p, x):
        return x

    with pytest.raises(SpecError) as error:
        run(
            f,
            mesh,
            {"w": torch.ones(5, 3), "b": torch.ones(6)},
            torch.ones(4),
            ins=({"w": P("i"), "b": P("i")}, P(None, "i")),
        )
    assert str(error.value) == (
        "shard_map(f): the arguments do not fit in_specs on the mesh (i=4)\n"
        "  * args[0]['b'] of shape f32[6], where args[0] is bound to f's parameter 'p', corresponds to "
        "in_specs[0]['b'] = P('i'): dim 0: 6 is not divisible by 4 (axis 'i')\n"
        "  * args[0]['w'] of shape f32[5,3], where args[0] is bound to f's parameter 'p', corresponds to "
        "in_specs[0]['w'] = P('i'): dim 0: 5 is not divisible by 4 (axis 'i')\n"
        "  * args[1] of shape f32[4], where args[1] is bound to f's parameter 'x', corresponds to in_specs[1] = "
        "P(None, 'i'): it has 2 entries, but the value has 1 dim\n"
        "  Instead: a spec of axes that divide the dims, None for a dim that every rank needs whole, or pad the "
        "argument; axes of the mesh (i=4), each at most once, and at most 1 entry for 1 dim"
    )
    assert "axis 'j' (dim 0) is not an axis of the mesh (i=4)" in refused(f, mesh, D, D, ins=P("j"), error=SpecError)[0]
    text, _ = refused(f, mesh, D, D, ins=(P("i"),), error=SpecError)
    assert "is not a prefix of args" in text
    with vfn.simulate(6):
        two = vfn.make_mesh((2, 3), ("x", "y"))
        text, _ = refused(f, two, D, torch.ones(10), ins=(P(), P(("x", "y"))), error=SpecError)
        assert "dim 0: 10 is not divisible by 2*3 = 6 (axes 'x', 'y')" in text


def test_messages_of_results(mesh):
    text, moved = refused(
        lambda x: {"a": vfn.psum(1, "i") * x, "b": x.sum()}, mesh, outs={"a": P(), "b": P("i")}, error=SpecError
    )
    assert moved == 0
    assert text == (
        "shard_map(<lambda>): the results do not fit out_specs on the mesh (i=4)\n"
        "  * out['a'] is f32[1]{V:i}, for out_specs P(): it varies over 'i', which out_specs does not mention, so it "
        "would have to be the same on all ranks\n"
        "  * out['b'] is f32[]{V:i}, for out_specs P('i'): it has 1 entry, but the value has 0 dims\n"
        "  Instead: vfn.psum(x, 'i') or vfn.pmean(x, 'i'), where the ranks' values are to be combined; or "
        "vfn.all_gather(x, 'i', to='invarying'), where all ranks are to have all of them; or out_specs with 'i' for the "
        "dim along which they are to be concatenated; or x[None], which adds a dim to concatenate along: "
        "out_specs=P('i') needs 1 dim"
    )
    text, _ = refused(lambda x: (x, x), mesh, outs=(P("i"),), error=SpecError)
    assert "is not a prefix of the result" in text
    text, _ = refused(lambda x: 3, mesh, outs=P("i"), error=SpecError)
    assert "out is the int 3, not a tensor, for out_specs P('i')" in text


def refused_on_real_ranks():
    mesh = vfn.make_mesh((2,), ("i",))
    texts = []
    for body, args, outs in [(lambda x: x, (torch.ones(3),), P("i")), (lambda x: x, (torch.ones(4),), P())]:
        with vfn.comm_log() as log:
            try:
                run(body, mesh, *args, outs=outs)
            except SpecError as error:
                texts.append((str(error).splitlines()[1], len(log)))
    return texts


def test_what_is_refused_is_refused_on_every_real_rank(gloo):
    first, second = gloo(2, refused_on_real_ranks)
    assert first == second
    assert len(first) == 2
    assert all(moved == 0 for _, moved in first)


SIZED = {  # bodies whose values decide the shapes of their results
    "nonzero": lambda x: x.nonzero()[:, 0],
    "a mask": lambda x: x[x > 2],
    "unique": lambda x: torch.unique(x.clamp(max=4), return_counts=True)[1],
    "where": lambda x: (x, {"at": torch.where(x > 2)[0]}),
    "equal sizes": lambda x: x[x >= x.sort()[0][2]],
    "a sum of such": lambda x: x[x > 2].sum()[None],
}


def sized_by_values(check=True):
    mesh = vfn.make_mesh((2,), ("i",))
    found = {}
    for name, body in SIZED.items():
        try:
            found[name] = vfn.unshard(run(body, mesh, torch.arange(8), check_vma=check))
        except VaryingTypeError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("check", [True, False])
def test_shapes_that_values_decide_are_compared(gloo, check):
    """A body without types is not watched: there it is at the first call with arguments of these forms."""
    with vfn.simulate(2):
        simulated = sized_by_values(check)
    for found in gloo(2, sized_by_values, check):
        for name in ("equal sizes", "a sum of such"):
            assert torch.equal(found.pop(name), simulated[name])
        assert {name: text.splitlines()[1] for name, text in found.items()} == {
            "nonzero": "  * out is i64[3] on rank 0, i64[4] on rank 1",
            "a mask": "  * out is i64[1] on rank 0, i64[4] on rank 1",
            "unique": "  * out is i64[4] on rank 0, i64[1] on rank 1",
            "where": "  * out[1]['at'] is i64[1] on rank 0, i64[4] on rank 1",
        }
        assert found["a mask"] == (
            "shard_map(<lambda>): the results are blocks of one shape, but here values decide their shapes, which differ by "
            "rank on the mesh (i=2)\n"
            "  * out is i64[1] on rank 0, i64[4] on rank 1\n"
            "  Instead: one shape on all ranks: torch.where(mask, x, 0) for x[mask], or pad it"
        )
    assert all("shape differs by rank" in simulated[name] for name in found)


def test_plans_are_remembered_and_follow_shapes(mesh):
    f = vfn.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    for shape in ((4,), (8,), (4, 3), (4,)):
        x = torch.arange(float(math.prod(shape))).view(shape)
        for given in (x, vfn.shard(x, mesh, P("i")), vfn.shard(x, mesh, P())):
            assert torch.equal(vfn.unshard(f(given)), x * 2)
    assert vfn.unshard(f(torch.arange(4))).dtype == torch.int64


def test_arguments_without_in_specs_are_taken_as_they_lie(mesh):
    body = lambda x, t: x * t["w"].sum()
    x, w = torch.arange(8.0), torch.arange(8.0) + 1
    given = vfn.shard(x, mesh, P("i"))
    for f in (vfn.shard_map(body, mesh, None, P("i")), vfn.shard_map(body, mesh=mesh, out_specs=P("i"))):
        assert torch.equal(vfn.unshard(f(given, {"w": w, "n": 3})), x * w.sum())
        found = f(given, {"w": vfn.shard(w, mesh, P("i")), "n": 3})  # each rank's own part of it
        assert torch.equal(vfn.unshard(found), x * w.view(4, 2).sum(1).repeat_interleave(2))
        assert torch.equal(vfn.unshard(f(given, {"w": vfn.shard(w, mesh, P()), "n": 3})), x * w.sum())
    with pytest.raises(SpecError) as error:
        vfn.shard_map(body, mesh, P())
    assert str(error.value) == (
        "shard_map: out_specs is missing\n  Instead: out_specs=P(...): how the ranks' results are put together"
    )


@pytest.mark.parametrize("first", [True, False])
def test_views_of_a_captured_tensor_leave_nothing_on_it(first):
    """A view of a view of it was marked at their base, which is the caller's: the next body took that for a value of its own."""
    w, b = torch.arange(6.0).view(3, 2) / 5, torch.arange(4.0)
    body = lambda b, w: w.select(0, 0)[..., None] * torch.tensor([0.5, 1.5])

    def program(w, check):
        return vfn.shard_map(lambda b: body(b, w), in_specs=P("y"), out_specs=P("y"), check_vma=check)(b)

    slopes = lambda f: vfn.jvp(vfn.grad(lambda w: f(w).square().sum()), (w,), (torch.ones_like(w),))[1]
    want = slopes(lambda w: torch.cat([body(b, w)] * 4))
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((4,), ("y",))):
        program(w, first)
        assert not vars(w)
        for check in (True, False):
            torch.testing.assert_close(slopes(lambda w, check=check: program(w, check)), want)


# --- writes into what a body closes over ------------------------------------------------------------------------------

INTO_CLOSED_OVER = {
    "a view": lambda b, x: b[:3].add_(x),
    "a view of a view": lambda b, x: b.view(2, 2).t()[0].add_(x[:2]),
    "detached": lambda b, x: b.detach()[:3].add_(x),
    "data": lambda b, x: b.data[:3].copy_(x),
    "out": lambda b, x: torch.add(x, 1, out=b[:3]),
    "a slice": lambda b, x: b.__setitem__(slice(0, 3), x),
    "whole": lambda b, x: b.copy_(torch.cat([x, x[:1]])),
    "itself": lambda b, x: b.contiguous()[:3].add_(x),
    "lists": lambda b, x: torch._foreach_add_([b[:3]], [x]),
}


def _written_into_closed_over():
    """What of these is not refused, and what a number, or the body's own memory, does not take."""
    mesh, wrong = vfn.make_mesh((2,), ("a",)), []
    a = vfn.shard(torch.arange(6.0), mesh, P("a"))

    def run(write, b):
        vfn.shard_map(lambda x: (write(b, x), x * 1)[1], mesh=mesh, in_specs=P("a"), out_specs=P("a"))(a)
        return vfn.unshard(b).tolist()

    for make in (lambda: torch.zeros(4), lambda: vfn.shard(torch.zeros(4), mesh, P())):
        for name, write in INTO_CLOSED_OVER.items():
            try:
                wrong.append((name, run(write, make())))
            except (VaryingTypeError, InPlaceError):
                pass
        b = make()
        if run(lambda b, x: b[1:].add_(2), b) != [0, 2, 2, 2] or run(lambda b, x: b.fill_(3), b) != [3, 3, 3, 3]:
            wrong.append("a number")
        if run(lambda b, x: torch.zeros(4)[:3].add_(x), b) != [3, 3, 3, 3]:
            wrong.append("its own")
    return wrong


def test_what_differs_by_rank_is_not_written_into_what_a_body_closes_over(gloo) -> None:
    """Through a view of it each real rank wrote its own values, and the same array was another one on each."""
    with vfn.simulate(2):
        assert _written_into_closed_over() == []
    assert gloo(2, _written_into_closed_over) == [[], []]
