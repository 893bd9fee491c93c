"""`torch.compile` of functions that hold ours, or are given arrays: they run, ours as written; or one sentence of ours."""

import functools

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.errors import TransformError

compile_ = functools.partial(torch.compile, backend="eager")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((2, 2), ("a", "b"))):
        yield


def values(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).sin().view(shape)


W, X = values(3, 4) + 0.5, values(8, 3)


def stated(w, x):
    h = torch.tanh(x @ w) * 2
    h = vfn.with_sharding(h, P("a", ("b",)))
    return (h * h.sum(0)).sum()


def mapped(w, x):
    body = vfn.shard_map(
        lambda w, x: vfn.psum((x @ w).sin().sum(0), ("a", "b")), in_specs=(P(), P(("a", "b"))), out_specs=P()
    )
    return (body(w * 1.5, x.cos()) ** 2).sum()


@vfn.shard_map(in_specs=(P(), P(("b", "a"))), out_specs=P(("b", "a")))
def rows(w, x):
    return torch.tanh(x @ w)


def made_before(w, x):
    return (rows(w, x * 2) * 3).sum()


def transformed(w, x):
    grads = vfn.grad(lambda w: (vfn.remat(torch.tanh)(x @ w) ** 2).sum())(w)
    return (vfn.vmap(torch.dot)(grads, w * 2) + vfn.jvp(torch.sin, (w,), (w,))[1].sum(1)).sum()


def recorded(w, x):
    return (vfn.jit(lambda w, x: (x @ w).sin().sum())(w.detach(), x.detach()) * w.sum() + x.sum()).cos()


def placed(w, x):
    x = vfn.shard(x, vfn.current_mesh(), P("a"))
    return vfn.unshard(torch.tanh(x @ w)).square().sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler asks for it of each tensor
@pytest.mark.parametrize("f", [stated, mapped, made_before, transformed, recorded, placed], ids=lambda f: f.__name__)
def test_a_compiled_function_that_holds_ours_runs(f):
    want, compiled = vfn.value_and_grad(f, argnums=(0, 1))(W, X), compile_(f)
    for _ in range(2):
        w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
        out = compiled(w, x)
        out.backward()
        got = vfn.unshard((out.detach(), (w.grad, x.grad)))
        torch.testing.assert_close(got, vfn.unshard(want))


def block(w, x):
    h = torch.tanh(x @ w)
    return (h * h.sum(0, keepdim=True) + w.sum()).square().mean()


def test_a_compiled_function_takes_arrays_and_is_compiled_for_plain_tensors():
    mesh, counter = vfn.current_mesh(), torch._dynamo.testing.CompileCounter()
    want, compiled = vfn.value_and_grad(block)(W, X), torch.compile(block, backend=counter)
    w, x = vfn.shard(W, mesh, P(None, "b")), vfn.shard(X, mesh, P("a"))
    torch.testing.assert_close(compiled(W, X), want[0])
    assert counter.frame_count == 1
    for f in (vfn.value_and_grad(compiled), vfn.jit(vfn.value_and_grad(compiled))):
        torch.testing.assert_close(vfn.unshard(f(w, x)), want)
    assert counter.frame_count == 1  # nothing of an array is in a graph


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_submodule_on_a_mesh():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    module[2] = compile_(module[2])
    f, params = vfn.module_function(module)
    mesh, loss = vfn.current_mesh(), lambda p, x: f(p, x).square().sum()
    want = vfn.grad(loss)(params, X)
    got = vfn.grad(loss)(vfn.shard(params, mesh, [("0.weight", P("b")), ("", P())]), vfn.shard(X, mesh, P("a")))
    torch.testing.assert_close(vfn.unshard(got), want)


def test_one_whole_graph_is_refused_in_one_sentence():
    with pytest.raises(Exception, match="vescale_fn's P runs as it is written: leave out fullgraph=True"):
        compile_(stated, fullgraph=True)(W, X)
    array = vfn.shard(X, vfn.current_mesh(), P("a"))
    with pytest.raises(TransformError) as caught:
        compile_(torch.tanh, fullgraph=True)(array)
    said = "torch.compile: it cannot compile what is done with an array\n  * it is f64[8@a,3]\n  Instead: vfn.jit(step"
    assert str(caught.value).startswith(said)


def test_a_compiled_function_is_mapped_as_itself():
    """What `functools.wraps` copies of a compiled function does not have the compiler take it for what is made of it."""
    doubled = vfn.shard_map(compile_(lambda x: vfn.psum(x.sum(0), "a")), in_specs=P("a"), out_specs=P())
    torch.testing.assert_close(vfn.unshard(compile_(lambda x: doubled(x * 2) + 1)(X)), (X * 2).sum(0) + 1)
