"""Initialisers: jax's numbers, on any mesh."""

import importlib.util

import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P, random
from vescale_fn.errors import RandomError
from vescale_fn.random import init

KEY = random.key(7)
FANS = [
    f"{family}_{kind}" for family in ("glorot", "xavier", "he", "kaiming", "lecun") for kind in ("uniform", "normal")
]
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")

PLAIN = {
    "zeros": lambda m: m.zeros,
    "ones": lambda m: m.ones,
    "constant": lambda m: m.constant(-7.5),
    "uniform": lambda m: m.uniform(0.3),
    "normal": lambda m: m.normal(0.02),
    "truncated_normal": lambda m: m.truncated_normal(0.02),
    "truncated between": lambda m: m.truncated_normal(0.3, lower=-1.0, upper=3.0),
    **{name: lambda m, name=name: getattr(m, name)() for name in FANS},
    **{
        f"{mode} {kind}": lambda m, mode=mode, kind=kind: m.variance_scaling(1.7, mode, kind)
        for mode in init.MODES
        for kind in init.DISTRIBUTIONS
    },
    "torch's linear": lambda m: m.he_normal(in_axis=-1, out_axis=-2),
    "torch's convolution": lambda m: m.variance_scaling(2.0, "fan_out", "normal", 1, 0),
    "experts": lambda m: m.lecun_uniform(batch_axis=(0,)),
}


def whole(x):
    return vfn.unshard(x)


@needs_jax
@pytest.mark.parametrize("shape", [(33, 17), (3, 2, 8, 5)])
@pytest.mark.parametrize("name", PLAIN)
def test_float32_has_the_bits_of_jax(name: str, shape: tuple[int, ...]) -> None:
    import jax
    import numpy as np

    expected = np.array(PLAIN[name](jax.nn.initializers)(jax.random.key(7), shape, "float32"))
    got = PLAIN[name](init)(KEY, shape)
    assert got.shape == shape
    assert got.numpy().tobytes() == expected.tobytes()


@needs_jax
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (2, 3, 7)])
@pytest.mark.parametrize("column", [-1, 0])
def test_orthogonal_equals_jax_up_to_rounding(shape: tuple[int, ...], column: int) -> None:
    import jax
    import numpy as np

    expected = np.array(jax.nn.initializers.orthogonal(1.5, column)(jax.random.key(7), shape, "float32"))
    got = init.orthogonal(1.5, column)(KEY, shape)
    assert torch.allclose(got, torch.from_numpy(expected), atol=2e-6)


@needs_jax
@pytest.mark.parametrize("shape", [(3, 4, 6), (2, 3, 5, 5), (3, 1, 4, 2, 2)])
def test_delta_orthogonal_equals_jax_up_to_rounding(shape: tuple[int, ...]) -> None:
    import jax
    import numpy as np

    expected = np.array(jax.nn.initializers.delta_orthogonal(0.5)(jax.random.key(7), shape, "float32"))
    got = init.delta_orthogonal(0.5)(KEY, shape)
    assert got.shape == shape
    assert torch.allclose(got, torch.from_numpy(expected), atol=2e-6)
    assert torch.equal(got == 0, torch.from_numpy(expected == 0))


@pytest.mark.parametrize("name", [*PLAIN, "orthogonal"])
def test_the_weights_are_the_same_on_every_mesh(name: str) -> None:
    make = PLAIN[name](init) if name in PLAIN else init.orthogonal()
    expected = make(KEY, (7, 6, 4))
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        for spec in (P("a", None, "b"), P(("b", "a")), P()):
            x = make(KEY, (7, 6, 4), spec=spec, mesh=mesh)
            assert vfn.spec_of(x) == spec
            assert torch.equal(whole(x), expected)
        body = lambda: make(KEY, (4, 6, 4), spec=P("a", "b"))
        inside = vfn.shard_map(body, mesh=mesh, in_specs=(), out_specs=P("a", "b"))()
        assert torch.equal(whole(inside), make(KEY, (4, 6, 4)))


def test_the_scale_is_what_the_name_says() -> None:
    w = init.he_normal(in_axis=-1, out_axis=-2)(KEY, (300, 400))
    assert abs(w.std() * (400 / 2) ** 0.5 - 1) < 0.01
    w = init.glorot_uniform()(KEY, (300, 400))
    assert abs(w.var() * 350 - 1) < 0.01
    assert w.abs().max() <= (3 / 350) ** 0.5
    q = init.orthogonal(2.0)(KEY, (3, 4, 50), torch.float64).reshape(12, 50)
    assert torch.allclose(q @ q.T, 4 * torch.eye(12, dtype=torch.float64))


def test_dtypes_and_empty_shapes() -> None:
    for make in (init.normal(), init.he_uniform(), init.lecun_normal(dtype=torch.float64)):
        assert make(KEY, (3, 2), torch.bfloat16).dtype == torch.bfloat16
        assert make(KEY, (0, 2)).shape == (0, 2)
    assert init.lecun_normal(dtype=torch.float64)(KEY, (3, 2)).dtype == torch.float64
    assert torch.equal(init.ones(None, (2,), torch.int32), torch.ones(2, dtype=torch.int32))


def test_over_a_batch_of_keys() -> None:
    keys = random.split(KEY, 3)
    for make in (init.normal(), init.glorot_normal(), init.delta_orthogonal()):
        stacked = torch.stack([make(key, (3, 2, 4)) for key in keys])
        assert torch.allclose(vfn.vmap(lambda key, make=make: make(key, (3, 2, 4)))(keys), stacked, atol=1e-6)


REFUSED = {
    "a mode": (
        lambda: init.variance_scaling(1.0, "fan", "normal"),
        "random.init.variance_scaling: mode must be 'fan_in' or 'fan_out' or 'fan_avg' or 'fan_geo_avg', but it is 'fan'",
    ),
    "a distribution": (
        lambda: init.variance_scaling(1.0, "fan_in", "cauchy"),
        "random.init.variance_scaling: distribution must be 'truncated_normal' or 'normal' or 'uniform', but it is 'cauchy'",
    ),
    "one dim": (
        lambda: init.he_normal()(KEY, (3,)),
        "random.init.he_normal: a shape of 1 dims, (3,), has no dim of inputs\n"
        "  Instead: two dims or more, or in_axis=...",
    ),
    "a dim that is not there": (
        lambda: init.he_normal(in_axis=2)(KEY, (3, 2)),
        "random.init.he_normal: in_axis=2 is not of a shape of 2 dims",
    ),
    "a negative scale": (
        lambda: init.variance_scaling(-1.0, "fan_in", "normal")(KEY, (3, 2)),
        "random.init.variance_scaling: scale must not be negative, but it is -1.0",
    ),
    "integers": (
        lambda: init.normal()(KEY, (3, 2), torch.int32),
        "random.init.normal: dtype must be one of float64, float32, float16, bfloat16, but it is torch.int32",
    ),
    "orthogonal vectors": (
        lambda: init.orthogonal()(KEY, (3,)),
        "random.init.orthogonal: shape must have 2 dims or more, but it is (3,)",
    ),
    "a matrix for a convolution": (
        lambda: init.delta_orthogonal()(KEY, (3, 3)),
        "random.init.delta_orthogonal: shape must have 3, 4 or 5 dims, but it is (3, 3)",
    ),
    "more inputs than outputs": (
        lambda: init.delta_orthogonal()(KEY, (3, 3, 2)),
        "random.init.delta_orthogonal: shape must not have more inputs than outputs, but it is (3, 3, 2)",
    ),
    "no interval": (
        lambda: init.truncated_normal(lower=1.0, upper=1.0),
        "random.init.truncated_normal: lower must be below upper, but they are 1.0 and 1.0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(RandomError) as error:
        call()
    assert str(error.value) == text
