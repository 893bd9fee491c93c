"""Dropout: one pass, a mask that is made anew and never kept."""

import itertools

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P, random
from vescale_fn.errors import RandomError, SpecError
from vescale_fn.random import dropout_masks

KEY, RATE = random.key(3), 0.3
SPECS = (P("a", "b"), P(("b", "a")), P(("a", "b")), P(None, "a"), P())


def f(x, key=KEY):
    return random.dropout(key, x, RATE)


def loss(x):
    return (f(x) ** 2).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (27, 1301), (3, 1 << 15)])
def test_the_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = random.normal(random.key(1), shape).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mask = random.bernoulli(KEY, 1 - RATE, shape)
    expected = torch.where(mask, x.to(wide) * torch.tensor(1 / (1 - RATE), dtype=wide), 0).to(dtype)
    before = random.backend()
    try:
        for backend in ("torch", "auto"):
            random.backend(backend)
            assert torch.equal(f(x), expected)
            assert torch.equal(f(x.mT.contiguous().mT if x.ndim > 1 else x), expected)
    finally:
        random.backend(before)


def test_what_is_dropped_is_zero_whatever_it_was() -> None:
    x = torch.full((1000,), float("nan"))
    assert set(f(x).isnan().tolist()) == {True, False}
    assert torch.equal(f(x).isnan(), random.bernoulli(KEY, 1 - RATE, (1000,)))
    z = torch.complex(torch.ones(9), -torch.ones(9))
    assert torch.equal(torch.view_as_real(f(z))[..., 1], -f(torch.ones(9)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, on its first jvp
def test_all_derivatives_are_the_same_map() -> None:
    x = random.normal(random.key(1), (40,))
    kept = f(torch.ones(40))
    assert torch.autograd.gradcheck(f, x[:5].double().requires_grad_(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: f(x) ** 2, x[:5].double().requires_grad_())
    assert torch.equal(torch.func.vjp(f, x)[1](x)[0], f(x))
    assert torch.equal(torch.func.jvp(f, (x,), (x,))[1], f(x))
    assert torch.equal(torch.func.jacrev(f)(x), kept.diag())
    assert torch.equal(torch.func.jacfwd(f)(x), kept.diag())
    assert torch.equal(torch.func.hessian(loss)(x).diag(), 2 * kept * kept)


def test_the_backward_pass_keeps_the_key_alone() -> None:
    x = torch.ones(1 << 16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        f(x)
    assert sum(t.numel() * t.itemsize for t in saved) == 8


def test_batches_of_keys_and_of_values() -> None:
    keys, x = random.split(KEY, 4), random.normal(random.key(1), (4, 6))
    both = torch.stack([f(x[i], keys[i]) for i in range(4)])
    assert torch.equal(vfn.vmap(lambda k, x: f(x, k))(keys, x), both)
    assert torch.equal(torch.vmap(f)(x), torch.stack([*map(f, x)]))
    assert torch.equal(torch.vmap(f, in_dims=1, out_dims=1)(x.T), torch.stack([*map(f, x)]).T)
    of_one = torch.stack([f(x[0], key) for key in keys])
    assert torch.equal(vfn.vmap(lambda k: f(x[0], k))(keys), of_one)
    per_key = vfn.vmap(lambda k, x: torch.func.grad(lambda x: (f(x, k) ** 2).sum())(x))(keys, x)
    assert torch.equal(per_key, torch.stack([f(2 * both[i], keys[i]) for i in range(4)]))


def test_a_tracer_sees_one_node() -> None:
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: f(x))(torch.ones(8))
    assert [str(n.target) for n in graph.graph.nodes if n.op == "call_function"] == ["vescale_fn.keyed_dropout.default"]


def test_compiled_whole() -> None:
    x = random.normal(random.key(1), (50,)).requires_grad_()
    out = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(out, f(x))
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], f(torch.ones(50)))
    inner = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")
    assert torch.equal(inner(x.detach()), torch.func.grad(loss)(x.detach()))


def test_remat_makes_the_same_mask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, on_mesh = [], dropout_masks._on_mesh
    x = random.normal(random.key(1), (50,))
    expected = torch.func.grad(loss)(x)
    monkeypatch.setattr(dropout_masks, "_on_mesh", lambda *args: runs.append(1) or on_mesh(*args))
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("a",))
        xs = vfn.shard(x, mesh, P("a"))
        once = vfn.grad(loss)(xs)
        without = len(runs)
        assert torch.equal(vfn.unshard(once), expected)
        assert torch.equal(vfn.unshard(vfn.grad(vfn.remat(loss))(xs)), expected)
        assert len(runs) > 2 * without  # forward, forward again, backward
    assert torch.equal(vfn.grad(vfn.remat(loss))(x), expected)


@pytest.mark.parametrize("shape", [(13, 10), (2, 3), (1, 1), (8, 0)])
def test_on_every_mesh(shape: tuple[int, ...]) -> None:
    x = random.normal(random.key(1), shape)
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        for spec in SPECS:
            xs = vfn.shard(x, mesh, spec)
            with vfn.comm_log() as log:
                out = f(xs)
            assert (vfn.spec_of(out), len(log)) == (spec, 0)
            assert torch.equal(vfn.unshard(out), f(x))
            for grad in (vfn.grad, torch.func.grad):
                assert torch.equal(vfn.unshard(grad(loss)(xs)), torch.func.grad(loss)(x))
            assert torch.equal(vfn.unshard(vfn.jvp(f, (xs,), (xs,))[1]), f(x))
            batched = vfn.shard(torch.stack([x, 2 * x]), mesh, P(None, *spec))
            assert torch.equal(vfn.unshard(vfn.vmap(f)(batched)), torch.stack([f(x), f(2 * x)]))


def test_sums_are_made_first() -> None:
    x = random.normal(random.key(1), (6, 4))
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("a",))
        left, right = vfn.shard(x, mesh, P(None, "a")), vfn.shard(x.T.contiguous(), mesh, P("a"))
        got = vfn.unshard(f(left @ right))
        assert torch.allclose(got, f(x @ x.T), atol=1e-5)


def test_in_a_body() -> None:
    x = random.normal(random.key(1), (12, 6))
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        for spec in SPECS:
            body = lambda x, spec=spec: random.dropout(KEY, x, RATE, spec=spec)
            mapped = vfn.shard_map(body, mesh=mesh, in_specs=(spec,), out_specs=spec)
            xs = vfn.shard(x, mesh, spec)
            assert torch.equal(vfn.unshard(mapped(xs)), f(x))
            square = lambda x, mapped=mapped: (mapped(x) ** 2).sum()
            assert torch.equal(vfn.unshard(vfn.grad(square)(xs)), torch.func.grad(loss)(x))
            assert torch.equal(vfn.unshard(vfn.jvp(mapped, (xs,), (xs,))[1]), f(x))
        same = vfn.shard_map(f, mesh=mesh, in_specs=(P("a", "b"),), out_specs=P("a", "b"))
        with pytest.warns(UserWarning, match="the same numbers are drawn on all ranks along axes 'a' and 'b'"):
            blocks = vfn.unshard(same(vfn.shard(torch.ones(12, 6), mesh, P("a", "b"))))
        one = f(torch.ones(6, 2))
        for i, j in itertools.product(range(2), range(3)):
            assert torch.equal(blocks[6 * i : 6 * i + 6, 2 * j : 2 * j + 2], one)
        with pytest.raises(SpecError, match="it has 3 entries, but the value has 2 dims"):
            vfn.shard_map(
                lambda x: random.dropout(KEY, x, RATE, spec=P("a", "b", None)),
                mesh=mesh,
                in_specs=(P("a", "b"),),
                out_specs=P("a", "b"),
            )(x)


def test_a_spec_outside_of_a_body() -> None:
    with pytest.raises(RandomError) as error:
        random.dropout(KEY, torch.ones(2), RATE, spec=P("a"))
    assert str(error.value) == (
        "random.dropout: spec=P('a') outside of a shard_map body\n  Instead: no spec: the mask lies as x does"
    )


def test_no_temporary_of_the_size_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, hashed = [], dropout_masks.hash_words
    monkeypatch.setattr(
        dropout_masks, "hash_words", lambda k0, k1, high, low: sizes.append(low.numel()) or hashed(k0, k1, high, low)
    )
    f(torch.ones(1 << 20, dtype=torch.float16))  # which the C library leaves to torch ops
    assert sizes == [1 << 17] * 8
