"""Draws under every transform, keys in every tree: what comes out is what the same calls give one by one."""

import copy
import importlib.util
import io
import pickle

import optree
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree

import vescale_fn as vfn
from vescale_fn import P, random

KEY = random.key(11)
X = torch.linspace(0.5, 2, 12)
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")

# of a key alone, of shape (12,), by the names and arguments of both libraries
DRAWS = {
    "bits": lambda r, k: r.bits(k, (12,)),
    "uniform": lambda r, k: r.uniform(k, (12,), minval=-1.5, maxval=2.5),
    "normal": lambda r, k: r.normal(k, (12,)),
    "bernoulli": lambda r, k: r.bernoulli(k, 0.3, (12,)),
    "randint": lambda r, k: r.randint(k, (12,), -5, 100),
    "exponential": lambda r, k: r.exponential(k, (12,)),
    "gumbel": lambda r, k: r.gumbel(k, (12,)),
    "laplace": lambda r, k: r.laplace(k, (12,)),
    "logistic": lambda r, k: r.logistic(k, (12,)),
    "cauchy": lambda r, k: r.cauchy(k, (12,)),
    "rademacher": lambda r, k: r.rademacher(k, (12,)),
    "truncated_normal": lambda r, k: r.truncated_normal(k, -1.0, 2.0, (12,)),
    "gamma": lambda r, k: r.gamma(k, 1.7, (12,)),
    "beta": lambda r, k: r.beta(k, 1.7, 0.8, (12,)),
    "poisson": lambda r, k: r.poisson(k, 3.5, (12,)),
    "binomial": lambda r, k: r.binomial(k, 9, 0.3, (12,)),
    "t": lambda r, k: r.t(k, 4.0, (12,)),
    "maxwell": lambda r, k: r.maxwell(k, (12,)),
    "rayleigh": lambda r, k: r.rayleigh(k, 1.5, (12,)),
    "pareto": lambda r, k: r.pareto(k, 2.0, (12,)),
}
DRAWS = {name: f for name, f in DRAWS.items() if name in random.__all__}
OWN = {**DRAWS, "dropout": lambda r, k: r.dropout(k, X, 0.3)}
OPERATORS = ("vescale_fn.draw.default", "vescale_fn.sample.default", "vescale_fn.keyed_dropout.default")

# of a number s, differentiable in it
SMOOTH = {
    "uniform": lambda s, k: random.uniform(k, (12,), minval=-s, maxval=2 * s),
    "normal": lambda s, k: s * random.normal(k, (12,)),
    "dropout": lambda s, k: random.dropout(k, s * X, 0.3),
    "bernoulli": lambda s, k: torch.where(random.bernoulli(k, 0.3, (12,)), s * X, X),
    "randint": lambda s, k: s * random.randint(k, (12,), 0, 9),
}


@pytest.mark.parametrize("name", OWN)
def test_vmap_over_keys_is_a_loop_over_keys(name: str) -> None:
    draw, keys = OWN[name], random.split(KEY, (2, 3))
    loop = torch.stack([torch.stack([draw(random, keys[i, j]) for j in range(3)]) for i in range(2)])
    once = vfn.vmap(lambda k: draw(random, k))
    assert torch.equal(vfn.vmap(once)(keys), loop)
    assert torch.equal(once(keys[1]), loop[1])
    unbatched = torch.vmap(lambda x: draw(random, KEY) + x)(torch.zeros(3))
    assert torch.equal(unbatched, torch.stack([draw(random, KEY) + torch.zeros(())] * 3))


@needs_jax
@pytest.mark.parametrize("name", DRAWS)
def test_vmap_over_split_keys_equals_jax(name: str) -> None:
    import jax
    import numpy as np

    draw = DRAWS[name]
    expected = np.array(jax.vmap(lambda k: draw(jax.random, k))(jax.random.split(jax.random.key(11), 5)))
    got = vfn.vmap(lambda k: draw(random, k))(random.split(KEY, 5))
    if name in ("bits", "uniform", "normal", "bernoulli", "randint", "rademacher", "truncated_normal", "poisson"):
        assert got.numpy().tobytes() == expected.astype(got.numpy().dtype).tobytes()
    else:
        np.testing.assert_allclose(got.numpy(), expected, rtol=3e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, on its first jvp
@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives(name: str) -> None:
    f, s = lambda s: SMOOTH[name](s, KEY), torch.tensor(1.25)
    slope = f(s + 1) - f(s)  # all are linear in s
    close = lambda a, b: torch.allclose(a, b, atol=1e-5)
    assert close(torch.func.jvp(f, (s,), (torch.ones(()),))[1], slope)
    assert close(vfn.jvp(f, (s,), (torch.ones(()),))[1], slope)
    assert close(torch.func.jacfwd(f)(s), slope)
    assert close(torch.func.jacrev(f)(s), slope)
    assert close(torch.func.vjp(f, s)[1](X)[0], slope @ X)
    for grad in (vfn.grad, torch.func.grad):
        assert close(grad(lambda s: f(s) @ X)(s), slope @ X)
    drawn = []
    count = lambda s: drawn.append(1) or f(s) @ X
    assert close(vfn.grad(vfn.remat(count))(s), slope @ X)
    assert len(drawn) == 2  # once forward, and the same numbers once more for the backward pass
    keys = random.split(KEY, 3)
    per_key = vfn.vmap(lambda k: torch.func.grad(lambda s: SMOOTH[name](s, k) @ X)(s))(keys)
    loop = [torch.func.grad(lambda s, k=k: SMOOTH[name](s, k) @ X)(s) for k in keys]
    assert torch.equal(per_key, torch.stack(loop))


@pytest.mark.parametrize("name", ["bits", "uniform", "normal", "bernoulli", "randint", "gumbel", "gamma", "dropout"])
def test_a_tracer_sees_one_node_a_draw(name: str) -> None:
    graph = make_fx(lambda x: OWN[name](random, KEY).to(torch.float32) + x)(torch.zeros(()))
    nodes = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum(node in OPERATORS for node in nodes) == 1
    assert torch.equal(graph(torch.zeros(())), OWN[name](random, KEY).to(torch.float32))


@pytest.mark.parametrize("name", ["uniform", "normal", "bernoulli", "randint", "exponential", "dropout"])
def test_compiled_whole(name: str) -> None:
    compiled = torch.compile(lambda k: OWN[name](random, k), fullgraph=True, backend="aot_eager")
    for key in random.split(KEY):
        assert torch.equal(compiled(key), OWN[name](random, key))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_compiled_by_inductor() -> None:
    f = lambda k, x: random.dropout(k, x * random.normal(k, (12,)), 0.3).sum()
    assert torch.allclose(torch.compile(f, fullgraph=True)(KEY, X), f(KEY, X))


@pytest.mark.parametrize("name", ["uniform", "normal", "bernoulli", "randint", "exponential"])
def test_on_a_mesh_under_transforms(name: str) -> None:
    kinds = {
        "uniform": lambda k, **at: random.uniform(k, (5, 4), **at),
        "normal": lambda k, **at: random.normal(k, (5, 4), **at),
        "bernoulli": lambda k, **at: random.bernoulli(k, 0.3, (5, 4), **at),
        "randint": lambda k, **at: random.randint(k, (5, 4), 0, 9, **at),
        "exponential": lambda k, **at: random.exponential(k, (5, 4), **at),
    }
    draw, w, keys = kinds[name], torch.linspace(-1, 1, 20).view(5, 4), random.split(KEY, 3)
    plain = lambda w: (w * w * draw(KEY)).sum()
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        at = {"spec": P("a", "b"), "mesh": mesh}
        loss = lambda w: (w * w * draw(KEY, **at)).sum()
        ws = vfn.shard(w, mesh, P("a", "b"))
        expected = torch.func.grad(plain)(w)
        assert torch.equal(vfn.unshard(vfn.grad(loss)(ws)), expected)
        assert torch.equal(vfn.unshard(vfn.grad(vfn.remat(loss))(ws)), expected)
        batch = vfn.vmap(lambda k: draw(k, **at))(keys)
        assert torch.equal(vfn.unshard(batch), torch.stack([draw(k) for k in keys]))


def same(a, b) -> bool:
    return torch.equal(random.key_data(a), random.key_data(b)) and random.key_impl(a) == random.key_impl(b)


def test_keys_go_through_trees_and_files() -> None:
    for key in (KEY, random.split(KEY, (2, 3))):
        values = {"a": [key, X], "b": (key,)}
        assert same(optree.tree_map(lambda x: x, values, namespace="")["b"][0], key)
        assert same(_pytree.tree_map(lambda x: x, values)["a"][0], key)
        for again in (pickle.loads(pickle.dumps(key)), copy.copy(key), copy.deepcopy(values)["a"][0]):
            assert same(again, key)
        file = io.BytesIO()
        torch.save(random.key_data(key), file)
        file.seek(0)
        assert same(random.wrap_key_data(torch.load(file)), key)
        assert torch.equal(_pytree.tree_leaves(values)[0], key.data)


def test_a_tree_with_keys_is_sharded() -> None:
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("a",))
        placed = vfn.shard({"key": KEY, "x": X}, mesh, {"key": P(), "x": P("a")})
        assert same(vfn.unshard(placed)["key"], KEY)
        assert torch.equal(vfn.unshard(random.normal(vfn.unshard(placed["key"]), (12,))), random.normal(KEY, (12,)))


@pytest.mark.filterwarnings("ignore")  # of a checkpoint by one process
def test_a_distributed_checkpoint_keeps_keys(tmp_path) -> None:
    import torch.distributed.checkpoint as checkpoint

    leaves, treedef = _pytree.tree_flatten({"key": random.split(KEY, 3), "x": X})
    checkpoint.save({str(i): leaf for i, leaf in enumerate(leaves)}, checkpoint_id=tmp_path / "c", no_dist=True)
    into = {str(i): torch.zeros_like(leaf) for i, leaf in enumerate(leaves)}
    checkpoint.load(into, checkpoint_id=tmp_path / "c", no_dist=True)
    read = _pytree.tree_unflatten([into[str(i)] for i in range(len(leaves))], treedef)
    assert same(read["key"], random.split(KEY, 3))


def test_a_negative_dim_of_keys_is_one_of_theirs_not_of_their_bits() -> None:
    keys = random.split(random.key(5), (2, 3))
    assert same(vfn.vmap(lambda key: key, in_axes=-1, out_axes=-1)(keys), keys)
    rows = vfn.vmap(lambda key: key, in_axes=-1)(keys)
    assert all(same(row, keys[:, i]) for i, row in enumerate(rows))
    split = vfn.vmap(lambda key: random.split(key, 4), out_axes=-1)(keys[0])
    assert all(same(split[:, i], random.split(keys[0, i], 4)) for i in range(3))
