"""Against a live `jax`, where it is installed: bits, bounds and dtypes that the stored goldens do not have."""

import random as python_random

import numpy as np
import pytest
import torch

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
        assert same(random.uniform(ours, (5, 3), ours_dtype, *map(torch.from_numpy, bounds)),
                    jax.random.uniform(theirs, (5, 3), dtype, *map(jnp.asarray, bounds)))  # fmt: skip
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
            assert same(random.randint(ours, (37,), *tensors, ours_dtype),
                        jax.random.randint(theirs, (37,), *arrays, dtype)), (low, high)  # fmt: skip


def test_booleans() -> None:
    p = np.float32([0.1, 0.5, 0.9])
    for ours, theirs in pairs(2):
        for mode in ("low", "high"):
            assert same(
                random.bernoulli(ours, 0.3, (99,), mode), jax.random.bernoulli(theirs, np.float32(0.3), (99,), mode)
            )
            assert same(random.bernoulli(ours, torch.from_numpy(p), (5, 3), mode),
                        jax.random.bernoulli(theirs, jnp.asarray(p), (5, 3), mode))  # fmt: skip


def test_vmap() -> None:
    for ours, theirs in pairs(2):
        drawn = torch.func.vmap(lambda k: random.normal(k, (3, 2)))(random.split(ours, 4))
        assert same(drawn, jax.vmap(lambda k: jax.random.normal(k, (3, 2), "float32"))(jax.random.split(theirs, 4)))
