"""`vfn.linearize` and `torch.func.linearize`: against `torch.func.jvp` on one device."""

import pytest
import torch
from torch import func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import vescale_fn as vfn
from vescale_fn import P, random
from vescale_fn._core import torch_internals
from vescale_fn._core.base import tree
from vescale_fn.errors import TransformError

KEY = random.key(1)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


X, W, V = draw(7, 5), draw(5, 3), draw(7, 5).sin()


# `place` lays what a function closes over on the mesh
PROGRAMS = {
    "closure": lambda place: lambda x: torch.tanh(x @ place(W)),
    "no dependence": lambda place: lambda x: place(W) * 2,
    "trees": lambda place: lambda x: {"a": x.sum() ** 2, "b": [x * place(X), (x.exp(),)]},
    "gradient": lambda place: vfn.grad(lambda x: (x**3 * place(X)).sum()),
    "torch gradient": lambda place: func.grad(lambda x: (x**3).sum()),
    "vmap": lambda place: lambda x: func.vmap(lambda row: row.sin() * row.sum())(x),
    "remat": lambda place: vfn.remat(lambda x: (x @ place(W)).exp()),
    "checkpoint": lambda place: lambda x: checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False),
    "branch on a primal": lambda place: lambda x: x * 2 if x.sum() > 100 else x.cos(),
    "many ops": lambda place: lambda x: x.softmax(0).sort(1)[0].cumsum(0).flatten()[3:],
    "draws": lambda place: lambda x: random.dropout(KEY, x * random.normal(KEY, (7, 5), x.dtype), 0.4).sin(),
}
SPECS = [P("a"), P(None, "b"), P(("b", "a")), P("a", "b"), P()]


def close(found, wanted):
    torch.testing.assert_close(vfn.unshard(found), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own
@pytest.mark.parametrize("linearize", [vfn.linearize, func.linearize], ids=["vfn", "torch.func"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_the_derivative_and_can_be_called_again(name, linearize):
    # torch 2.11's has no forward mode, on one device neither
    if name == "checkpoint" and torch_internals.checkpoint_saver is not None:
        with pytest.raises(NotImplementedError, match="jvp"):
            func.jvp(PROGRAMS[name](lambda c: c), (X,), (V,))
        return
    out, slope = func.jvp(PROGRAMS[name](lambda c: c), (X,), (V,))
    for spec in SPECS if linearize is vfn.linearize else SPECS[:2]:
        with vfn.simulate(6):
            mesh = vfn.make_mesh((2, 3), ("a", "b"))
            f = PROGRAMS[name](lambda c: vfn.shard(c, mesh, P("a")))
            found, f_jvp = linearize(f, vfn.shard(X, mesh, spec))
            close(found, out)
            for scale, lies in ((1.0, spec), (-2.0, spec), (3.0, P())):
                tangent = vfn.shard(scale * V, mesh, lies)
                close(f_jvp(tangent), tree.map_(lambda x: scale * x, slope))
            if linearize is vfn.linearize:
                moved = [
                    vfn.spec_of(x) == vfn.spec_of(y) for x, y in zip(tree.leaves(f_jvp(tangent)), tree.leaves(found))
                ]
                assert all(moved), "it lies as the result"


def test_any_tree_and_other_leaves():
    runs = []

    def f(p, x):
        runs.append(1)
        return {"y": p["w"] * x, "n": p["n"] * 2, "flag": True, "none": None, "const": torch.ones(2)}

    p, x = {"w": draw(3), "n": torch.tensor(2), "name": "adam"}, draw(3).exp()
    out, f_jvp = vfn.linearize(f, p, x)
    assert (out["n"].item(), out["flag"], out["none"]) == (4, True, None)
    for scale in (1.0, 2.0):
        slope = f_jvp({"w": scale * x, "n": None, "name": None}, p["w"])
        torch.testing.assert_close(slope["y"], scale * x * x + p["w"] * p["w"], rtol=1e-15, atol=1e-15)
        assert (slope["n"].item(), slope["n"].dtype, slope["flag"], slope["none"]) == (0, torch.int64, True, None)
        assert torch.equal(slope["const"], torch.zeros(2))
    assert runs == [1], "f runs once"
    assert not slope["y"].requires_grad
    assert not out["y"].requires_grad


def test_derivatives_of_it():
    f = lambda x: (x**3).sum() * x
    x, v = draw(4), draw(4).cos()
    along = lambda x, v: func.jvp(f, (x,), (v,))[1].square().sum()
    mine = lambda x, v: vfn.linearize(f, x)[1](v).square().sum()
    for grad in (vfn.grad, func.grad):
        for argnums in (0, 1):
            torch.testing.assert_close(grad(mine, argnums=argnums)(x, v), func.grad(along, argnums=argnums)(x, v))
    leaf = x.clone().requires_grad_()
    mine(leaf, v).backward()
    torch.testing.assert_close(leaf.grad, func.grad(along)(x, v))
    torch.testing.assert_close(
        func.vmap(mine)(torch.stack([x, v]), torch.stack([v, x])), torch.stack([along(x, v), along(v, x)])
    )
    _, f_jvp = vfn.linearize(f, x)
    columns = func.vmap(f_jvp)(torch.eye(4, dtype=x.dtype))
    torch.testing.assert_close(columns.T, func.jacfwd(f)(x))


def test_messages():
    x = torch.ones(3)
    _, f_jvp = vfn.linearize(torch.sin, x)
    with pytest.raises(TransformError) as error:
        f_jvp(torch.ones(2))
    assert str(error.value) == (
        "linearize: the tangents do not fit the primals\n  * primals[0] is f32[3], its tangent f32[2]\n"
        "  Instead: a tensor of the same shape and dtype for each, torch.ones_like(x) say"
    )
    with pytest.raises(TransformError, match="linearize: f_jvp: it was made with 1 primal, and called with 2 tangents"):
        f_jvp(x, x)
    with pytest.raises(TransformError, match="linearize: there is no floating-point tensor to differentiate"):
        vfn.linearize(lambda n: n, 3)


def test_the_slope_of_partial_sums_is_whole():
    with vfn.simulate(2):
        x = vfn.shard(torch.arange(4.0), vfn.make_mesh((2,), ("a",)), P("a"))
        out, f_jvp = vfn.linearize(lambda x: (x * x).sum(), x)
        assert vfn.spec_of(out) == P(unreduced={"a"})
        assert vfn.spec_of(f_jvp(x)) == P()  # a tangent, no gradient: reduced would say that its own stays unreduced
        assert vfn.unshard(f_jvp(x)).item() == 28


def test_a_trace_freezes_no_number():
    with vfn.simulate(2):
        x = vfn.shard(torch.ones(4), vfn.make_mesh((2,), ("a",)), P("a"))
        with pytest.raises(TransformError, match="a number is read out of a value that torch.func.linearize"):
            make_fx(lambda t: t * torch.equal(t, x))(x + 1)


@pytest.mark.parametrize("check", [True, False])
def test_in_a_body_torchs_own_is_refused(check):
    def body(x):
        return func.linearize(lambda x: vfn.psum(x * x, "a"), x)[1](x)

    with vfn.simulate(2):
        f = vfn.shard_map(body, mesh=vfn.make_mesh((2,), ("a",)), in_specs=P("a"), out_specs=P(), check_vma=check)
        with pytest.raises(TransformError) as error:
            f(torch.arange(4.0))
    assert str(error.value) == (
        "torch.func.linearize: inside a shard_map body it would lose the types of local values, and so gradients\n"
        "  Instead: vfn.linearize(f, *primals), which gives the same pair; or torch.func.linearize outside of the shard_map"
    )
