"""Against a live `jax`, where it is installed: bits, bounds and dtypes that the stored goldens do not have."""

import random as python_random

import numpy as np
import pytest
import torch
from distributions import DISTRIBUTIONS, Distribution

from vescale_fn import random

jax = pytest.importorskip("jax", reason="jax is an extra, the goldens stand in for it")
jnp = jax.numpy
rng = python_random.Random(0)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def bits_of(x) -> np.ndarray:
    """The raw bits of a tensor or of a jax array."""
    if isinstance(x, torch.Tensor):
        x = x.contiguous().view(torch.uint8) if x.ndim else x[None].view(torch.uint8)
        return x.numpy().ravel()
    return np.atleast_1d(np.ascontiguousarray(x)).view(np.uint8).ravel()


def same(ours: torch.Tensor, theirs) -> bool:
    return tuple(ours.shape) == theirs.shape and np.array_equal(bits_of(ours), bits_of(theirs))


def pairs(n: int):
    for _ in range(n):
        seed = rng.randrange(-(1 << 63), 1 << 63)
        yield random.key(seed), jax.random.key(seed)


def shape() -> tuple[int, ...]:
    return tuple(rng.randint(0, 9) for _ in range(rng.randint(0, 3)))


def test_chains_of_keys() -> None:
    for ours, theirs in pairs(4):
        for _ in range(4):
            n, at = rng.choice([2, 7, 50]), rng.randrange(1 << 32)
            ours, theirs = random.split(ours, n)[n - 1], jax.random.split(theirs, n)[n - 1]
            ours, theirs = random.fold_in(ours, at), jax.random.fold_in(theirs, at)
            assert random.key_data(ours).tolist() == jax.random.key_data(theirs).tolist()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_floats(dtype: str) -> None:
    ours_dtype = getattr(torch, dtype)
    for ours, theirs in pairs(2):
        size, low = shape(), rng.uniform(-3, 3)
        high = low + rng.uniform(0, 5)
        assert same(random.uniform(ours, size, ours_dtype), jax.random.uniform(theirs, size, dtype))
        assert same(
            random.uniform(ours, size, ours_dtype, low, high), jax.random.uniform(theirs, size, dtype, low, high)
        )
        bounds = np.float32([low, -high, 7]), np.float32([high, high, 1])  # the last one is empty
        assert same(
            random.uniform(ours, (5, 3), ours_dtype, *map(torch.from_numpy, bounds)),
            jax.random.uniform(theirs, (5, 3), dtype, *map(jnp.asarray, bounds)),
        )
        normal, expected = random.normal(ours, (5000,), ours_dtype), jax.random.normal(theirs, (5000,), dtype)
        if dtype == "float64":  # the logarithm is torch's
            np.testing.assert_allclose(normal.numpy(), expected, rtol=1e-13, atol=1e-14)
        else:
            assert same(normal, expected)


def test_a_million_normals() -> None:
    for ours, theirs in pairs(1):
        assert same(random.normal(ours, (1 << 20,)), jax.random.normal(theirs, (1 << 20,), "float32"))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers(dtype: str) -> None:
    info, ours_dtype = np.iinfo(dtype), getattr(torch, dtype)
    ends = [0, int(info.min), int(info.min) + 1, int(info.max), int(info.max) + (info.bits < 64)]
    for ours, theirs in pairs(8):
        low, high = (rng.choice([*ends, rng.randint(int(info.min), int(info.max))]) for _ in range(2))
        if info.bits == 8 and rng.random() < 0.5:
            low, high = sorted((low, high))
        wide = (jnp.uint64(low), jnp.uint64(high)) if dtype == "uint64" else (low, high)
        assert same(random.randint(ours, (37,), low, high, ours_dtype), jax.random.randint(theirs, (37,), *wide, dtype))
        if max(low, high) < 1 << 63:
            tensors = [torch.tensor(bound) for bound in (low, high)]
            arrays = [jnp.int64(bound) for bound in (low, high)]
            assert same(
                random.randint(ours, (37,), *tensors, ours_dtype), jax.random.randint(theirs, (37,), *arrays, dtype)
            ), (low, high)


def test_booleans() -> None:
    p = np.float32([0.1, 0.5, 0.9])
    for ours, theirs in pairs(2):
        for mode in ("low", "high"):
            assert same(
                random.bernoulli(ours, 0.3, (99,), mode), jax.random.bernoulli(theirs, np.float32(0.3), (99,), mode)
            )
            assert same(
                random.bernoulli(ours, torch.from_numpy(p), (5, 3), mode),
                jax.random.bernoulli(theirs, jnp.asarray(p), (5, 3), mode),
            )


def test_vmap() -> None:
    for ours, theirs in pairs(2):
        drawn = torch.func.vmap(lambda k: random.normal(k, (3, 2)))(random.split(ours, 4))
        assert same(drawn, jax.vmap(lambda k: jax.random.normal(k, (3, 2), "float32"))(jax.random.split(theirs, 4)))


# All distributions: tolerances stand in the table


def in_jax(d: Distribution, key, shape, **more):
    params = {name: np.float32(v) if isinstance(v, (float, list)) else v for name, v in d.params.items()}
    params = {**params, **more}
    if d.name == "ball":
        params["d"] = d.params["d"]
    if d.name == "multinomial":
        shape = (*shape, d.vector)
    return getattr(jax.random, d.name)(key, **params, shape=shape)


def agree(ours: torch.Tensor, theirs, d: Distribution) -> None:
    theirs = np.asarray(theirs)
    assert (tuple(ours.shape), str(ours.dtype)) == (theirs.shape, f"torch.{theirs.dtype}")
    if not d.rtol and not d.differ:
        assert np.array_equal(bits_of(ours), bits_of(theirs))
        return
    near = np.isclose(ours.numpy(), theirs, rtol=d.rtol, atol=d.atol)
    assert near.mean() >= 1 - d.differ


@pytest.mark.parametrize("d", DISTRIBUTIONS, ids=lambda d: d.id)
def test_distribution_over_keys(d: Distribution) -> None:
    with jax.enable_x64(False):
        ours, theirs = random.split(random.key(8), 5), jax.random.split(jax.random.key(8), 5)
        agree(
            torch.func.vmap(lambda key: d(key, (400,)))(ours), jax.vmap(lambda key: in_jax(d, key, (400,)))(theirs), d
        )


@pytest.mark.parametrize("d", [d for d in DISTRIBUTIONS if not d.local], ids=lambda d: d.id)
def test_distribution_of_one_key(d: Distribution) -> None:
    """Those whose draws take as many rounds as their slowest element."""
    with jax.enable_x64(False):
        agree(d(random.key(3), (7, 5, 30)), in_jax(d, jax.random.key(3), (7, 5, 30)), d)


BY_FORMULA = [
    d for d in DISTRIBUTIONS if d.name in ("exponential", "gumbel", "laplace", "logistic", "truncated_normal")
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", BY_FORMULA, ids=lambda d: d.id)
def test_sixteen_bits(d: Distribution, dtype: str) -> None:
    key, params = jax.random.key(11), d.params
    theirs = getattr(jax.random, d.name)(key, **params, shape=(5000,), dtype=dtype)
    assert same(d(random.key(11), (5000,), dtype=getattr(torch, dtype)), theirs)


COMPOSED = ("uniform", "normal", "chisquare", "f", "ball")  # of what is here: compiling them takes half a minute


@pytest.mark.parametrize("d", [d for d in DISTRIBUTIONS if not d.counts and d.name not in COMPOSED], ids=lambda d: d.id)
def test_float64_and_its_gradients(d: Distribution) -> None:
    """Polynomials differ by last bits. torch's derivative of the gamma distribution is good to 7e-4."""
    fixed = {n: np.asarray(v, np.float64) if isinstance(v, list) else v for n, v in d.params.items()}

    def theirs(*values):
        params = {**fixed, **dict(zip(d.smooth, values, strict=True))}
        return getattr(jax.random, d.name)(jax.random.key(4), **params, shape=(200,), dtype="float64")

    def ours(*values):
        params = {n: torch.from_numpy(v) for n, v in fixed.items() if isinstance(v, np.ndarray)}
        params |= dict(zip(d.smooth, values, strict=True))
        return d(random.key(4), (200,), dtype=torch.float64, **params)

    at = [np.asarray(d.params[name], np.float64) for name in d.smooth]
    values = [torch.from_numpy(v) for v in at]
    drawn = ours(*values)
    weight = np.random.default_rng(0).standard_normal(drawn.shape)
    wanted, pull = jax.vjp(theirs, *at)
    np.testing.assert_allclose(drawn.numpy(), wanted, rtol=1e-9, atol=1e-12)
    if not at or d.name == "triangular":  # jax's gradient there goes through a mask that is not one
        return
    got = torch.func.vjp(ours, *values)[1](torch.from_numpy(weight))
    for value, gradient, other in zip(at, got, pull(jax.numpy.asarray(weight)), strict=True):
        size = np.abs(np.asarray(drawn)).sum() / np.abs(value).max()
        np.testing.assert_allclose(gradient.numpy(), other, rtol=1e-3, atol=1e-4 * size)
