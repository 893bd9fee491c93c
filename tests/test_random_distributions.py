"""Every distribution under one contract: the goldens, any mesh, `vmap`, tracers, gradients; and what is refused."""

import functools
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from distributions import COV, DISTRIBUTIONS, Distribution
from torch.fx.experimental.proxy_tensor import make_fx

import vescale_fn as vfn
from vescale_fn import P, random
from vescale_fn.errors import RandomError
from vescale_fn.random.generators import float_ops, floats, more_floats

KEY = random.key(42)
GOLDENS = json.loads((Path(__file__).parent / "goldens" / "random.json").read_text())["cases"]
NAMES = {d.name for d in DISTRIBUTIONS}
GAMMAS = {"gamma", "loggamma", "beta", "chisquare", "t", "f", "generalized_normal", "dirichlet", "ball"}
every = pytest.mark.parametrize("d", DISTRIBUTIONS, ids=lambda d: d.id)

# JAX's numbers

NOT_THE_SAME_BITS = {  # golden: relative and absolute tolerance
    "normal_f64": (1e-14, 1e-15),
    "cauchy": (2e-7, 0),
    "maxwell": (5e-7, 0),
    "gamma_0.1": (1e-4, 1e-6),
    "gamma_0.7": (1e-5, 0),
    "gamma_2.5": (1e-6, 0),
    "loggamma_0.1": (1e-5, 1e-6),
    "dirichlet": (1e-5, 1e-6),
    "t_5": (1e-6, 0),
    "wald_1.5": (1e-3, 1e-5),
    "generalized_normal_1.5": (1e-6, 0),
    "ball_3_2": (1e-6, 0),
    "multivariate_normal": (2e-6, 1e-6),
}


def in_scope(case: dict) -> bool:
    ours = case["fn"] in NAMES and not case["name"].startswith(("philox", "threefry4x32"))
    return ours and "mesh" not in case["args"] and "method" not in case["args"]  # another method is not in JAX 0.10


@pytest.mark.parametrize("case", list(filter(in_scope, GOLDENS)), ids=lambda case: case["name"])
def test_golden(case: dict) -> None:
    args, expected = dict(case["args"]), case["out"]
    if "dtype" in args:
        args["dtype"] = getattr(torch, args["dtype"])
    for name, value in args.items():
        if isinstance(value, str) and value.startswith("["):
            value = json.loads(value)
        if name in ("a", "alpha", "mean", "cov") and isinstance(value, list):
            args[name] = torch.tensor(value)
    drawn = getattr(random, case["fn"])(random.wrap_key_data(case["key_data"]), **args)
    assert list(drawn.shape) == expected["shape"]
    assert str(drawn.dtype) == f"torch.{expected['dtype']}"
    if case["name"] in NOT_THE_SAME_BITS:
        rtol, atol = NOT_THE_SAME_BITS[case["name"]]
        first = drawn.flatten()[: len(expected["first"])].double()
        torch.testing.assert_close(first, torch.tensor(expected["first"], dtype=torch.float64), rtol=rtol, atol=atol)
        total = drawn.double().sum().item()
        assert math.isclose(total, expected["sum_f64"], rel_tol=max(rtol, 1e-6), abs_tol=drawn.numel() * (atol + 1e-7))
    else:
        bits = drawn.view(torch.int16) if drawn.dtype == torch.bfloat16 else drawn
        assert hashlib.sha256(bits.contiguous().numpy().tobytes()).hexdigest() == expected["sha256"]


def test_no_golden_of_a_distribution_is_left_out() -> None:
    whole_axis = {"permutation", "choice", "categorical", "orthogonal"}
    keys = {"key", "split", "fold_in", "chain", "bits", "bits_at", "vmap(uniform)", "vmap(split(5)->vmap(uniform))"}
    assert {case["fn"] for case in GOLDENS} - NAMES == whole_axis | keys
    assert len(list(filter(in_scope, GOLDENS))) >= 60


# One contract

MESHES = [
    ({"a": 4}, [P("a"), P(None, "a")]),
    ({"a": 2, "b": 3}, [P("a", "b"), P(("b", "a")), P(("a", "b")), P(None, ("b", "a"))]),
    ({"a": 2, "b": 2, "c": 2}, [P(("a", "c"), "b"), P("c", ("b", "a"))]),
]


@every
def test_a_sharded_draw_is_the_whole_draw(d: Distribution) -> None:
    shape = (3, 10)  # uneven on all meshes, and on some a rank has nothing
    whole = d(KEY, shape)
    for axes, specs in MESHES:
        with vfn.simulate(math.prod(axes.values())):
            mesh = vfn.make_mesh(tuple(axes.values()), tuple(axes))
            for spec in specs:
                with vfn.comm_log() as log:
                    drawn = d(KEY, shape, spec=spec, mesh=mesh)
                assert vfn.spec_of(drawn) == spec
                assert len(log) == 0 or not d.local
                assert torch.equal(vfn.unshard(drawn), whole), spec


@pytest.mark.parametrize("d", [d for d in DISTRIBUTIONS if d.vector and not d.counts], ids=lambda d: d.id)
def test_the_entries_of_vectors_can_be_split(d: Distribution) -> None:
    whole = d(KEY, (6,))
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        for spec in (P(None, "b"), P("b", "a"), P("a", "b")):
            drawn = d(KEY, (6,), spec=spec, mesh=mesh)
            assert vfn.spec_of(drawn) == spec
            assert torch.equal(vfn.unshard(drawn), whole)


@every
def test_in_a_body_a_spec_gives_the_block(d: Distribution) -> None:
    whole = d(KEY, (4, 6))
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        last = (None,) if d.vector else ()
        for spec in (P("a", "b"), P(None, ("b", "a")), P("a")):
            body = lambda: d(KEY, (4, 6), spec=spec)
            full = P(*spec, *(None,) * (2 - len(spec)), *last)
            drawn = vfn.shard_map(body, mesh=mesh, in_specs=(), out_specs=full)()
            assert torch.equal(vfn.unshard(drawn), whole), spec
        same = vfn.shard_map(lambda: d(KEY, (4, 6)), mesh=mesh, in_specs=(), out_specs=P())()
        assert torch.equal(vfn.unshard(same), whole)


@every
def test_vmap_over_keys_is_a_loop(d: Distribution) -> None:
    keys = random.split(KEY, 3)
    assert torch.equal(torch.func.vmap(lambda key: d(key, (4,)))(keys), torch.stack([d(key, (4,)) for key in keys]))


@every
def test_traced(d: Distribution) -> None:
    graph = make_fx(lambda data: d(random.Key(data), (4,)))(KEY.data)
    other = random.key(7)
    assert torch.equal(graph(other.data), d(other, (4,)))


@pytest.mark.parametrize(
    "d", [d for d in DISTRIBUTIONS if d.local and not d.vector and d.params.get("mode") != "high"], ids=lambda d: d.id
)
def test_a_draw_is_a_sequence(d: Distribution) -> None:
    whole = d(KEY, (70,))
    assert torch.equal(d(KEY, (7, 10)).view(-1), whole)
    if d.name not in GAMMAS | {"double_sided_maxwell"}:
        assert torch.equal(d(KEY, (33,)), whole[:33])


@every
def test_no_bit_depends_on_fused_hardware(d: Distribution, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = d(KEY, (300,))
    monkeypatch.setattr(floats, "addcmul_is_fused", lambda device, dtype: False)
    assert torch.equal(d(KEY, (300,)), expected)


@every
def test_dtypes(d: Distribution) -> None:
    counts = d.counts and d.name not in ("binomial", "multinomial")
    dtypes = (
        (torch.int8, torch.int16, torch.int32, torch.int64)
        if counts
        else (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    )
    if d.name == "bernoulli":
        return
    for dtype in dtypes:
        drawn = d(KEY, (200,), dtype=dtype)
        assert drawn.dtype == dtype
        assert drawn.isfinite().all() or dtype in (torch.float16, torch.bfloat16)
        assert len(drawn.unique()) > 1


# Parameters that are tensors


def tensors(d: Distribution, dtype: torch.dtype = torch.float32) -> dict:
    return {name: torch.tensor(d.params[name], dtype=dtype) for name in d.smooth}


@pytest.mark.parametrize("d", [d for d in DISTRIBUTIONS if d.smooth], ids=lambda d: d.id)
def test_numbers_and_tensors_give_the_same_draw(d: Distribution) -> None:
    torch.testing.assert_close(d(KEY, (60,), **tensors(d)), d(KEY, (60,)), rtol=1e-6, atol=1e-6)


BATCHED = [d for d in DISTRIBUTIONS if d.smooth and not d.event and not d.vector and d.name != "double_sided_maxwell"]


@pytest.mark.parametrize("d", BATCHED, ids=lambda d: d.id)
def test_a_draw_lies_as_its_parameters_do(d: Distribution) -> None:
    vary = lambda v: v * (1 + torch.arange(10) / 20)
    params = {name: vary(v) for name, v in tensors(d).items()}
    whole = getattr(random, d.name)(KEY, **params, shape=(10,))
    f = lambda params: (getattr(random, d.name)(KEY, **params, shape=(10,)) * torch.arange(10)).sum()
    wanted = torch.func.grad(f)(params)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        lying = {name: vfn.shard(v, mesh, P("a")) for name, v in params.items()}
        with vfn.comm_log() as log:
            drawn = getattr(random, d.name)(KEY, **lying, shape=(10,))
        assert (vfn.spec_of(drawn), len(log)) == (P("a"), 0)
        assert torch.equal(vfn.unshard(drawn), whole)
        got = vfn.grad(f)(lying)
        for name in params:
            assert vfn.spec_of(got[name]) == P("a")
            torch.testing.assert_close(vfn.unshard(got[name]), wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d", [d for d in DISTRIBUTIONS if d.smooth], ids=lambda d: d.id)
def test_gradients(d: Distribution) -> None:
    """Against central differences; of draws by trial those are of another path, so there of both modes alone."""
    fixed = {n: torch.tensor(v, dtype=torch.float64) for n, v in d.params.items() if n in ("mean", "cov", "alpha")}
    generator = torch.Generator().manual_seed(0)
    for name in d.smooth:
        at = torch.tensor(d.params[name], dtype=torch.float64)
        direction = torch.ones_like(at) if not at.ndim else torch.eye(len(at), dtype=torch.float64)[: at.ndim].sum(0)
        direction = direction if at.ndim < 2 else torch.ones_like(at)

        def draw(value: torch.Tensor, name: str = name) -> torch.Tensor:
            return d(KEY, (40,), dtype=torch.float64, **{**fixed, name: value})

        drawn, tangent = torch.func.jvp(draw, (at,), (direction,))
        weight = torch.randn(drawn.shape, dtype=torch.float64, generator=generator)
        gradient = torch.func.grad(lambda value: (draw(value) * weight).sum())(at)
        torch.testing.assert_close((gradient * direction).sum(), (tangent * weight).sum(), rtol=1e-9, atol=1e-9)
        batch = torch.func.vmap(torch.func.grad(lambda value: (draw(value) * weight).sum()))
        torch.testing.assert_close(batch(torch.stack([at, at]))[1], gradient, rtol=1e-9, atol=1e-9)
        assert gradient.abs().max() > 1e-3
        if d.name not in GAMMAS:
            h = 1e-6
            difference = (draw(at + h * direction) - draw(at - h * direction)) / (2 * h)
            near = torch.isclose(tangent, difference, rtol=1e-4, atol=1e-6).double().mean()
            assert near > 0.97, name  # some draws are at an edge


@pytest.mark.parametrize("a", [0.05, 0.7, 2.5, 30.0])
def test_the_gradient_of_gamma_is_implicit(a: float) -> None:
    """The draw at which the distribution function stays the same. torch's derivative of it is good to 7e-4."""
    special = pytest.importorskip("scipy.special", reason="scipy is an extra")
    at = torch.tensor(a, dtype=torch.float64)
    for name in ("gamma", "loggamma"):
        draw = lambda value: getattr(random, name)(KEY, value, (300,), dtype=torch.float64)
        drawn, slope = torch.func.jvp(draw, (at,), (torch.ones_like(at),))
        x = (drawn if name == "gamma" else drawn.exp()).numpy()
        h = a * 1e-4
        below, above = special.gammainc(a, x), special.gammaincc(a, x)
        moved = [
            torch.from_numpy(
                special.gammaincinv(b, below) * (below < 0.5) + special.gammainccinv(b, above) * (below >= 0.5)
            )
            for b in (a + h, a - h)
        ]
        moved = moved if name == "gamma" else [m.log() for m in moved]
        torch.testing.assert_close(slope, (moved[0] - moved[1]) / (2 * h), rtol=1e-3, atol=1e-9)


# What is refused

F = random.key(0)
FLOAT_NAMES = "float64, float32, float16, bfloat16"
REFUSED = {
    "random.exponential: dtype must be one of float64, float32, float16, bfloat16, but it is torch.int32": lambda: (
        random.exponential(F, (2,), torch.int32)
    ),
    "random.gumbel: mode must be None or 'low' or 'high', but it is 'best'": lambda: random.gumbel(F, mode="best"),
    "random.truncated_normal: lower must be below upper, but they are 2.0 and 1.0": lambda: random.truncated_normal(
        F, 2, 1
    ),
    "random.truncated_normal: lower must be a number, but it is nan": lambda: random.truncated_normal(F, math.nan, 1),
    "random.pareto: b must be positive, but it is 0.0": lambda: random.pareto(F, 0),
    "random.gamma: a must be zero or more, but it is nan": lambda: random.gamma(F, math.nan),
    "random.rayleigh: scale must be zero or more, but it is -1.0": lambda: random.rayleigh(F, -1),
    "random.poisson: lam must be zero or more, but it is -1.0": lambda: random.poisson(F, -1),
    "random.geometric: p must be in [0, 1], but it is 1.5": lambda: random.geometric(F, 1.5),
    "random.binomial: n must be a number, but it is nan": lambda: random.binomial(F, math.nan, 0.5),
    "random.bits: dtype must be one of uint8, uint16, uint32, uint64, but it is 'uint8'\n  Instead: dtype=torch.uint8": lambda: (
        random.bits(F, (2,), "uint8")
    ),
    "random.binomial: p must be in [0, 1], but it is nan": lambda: random.binomial(F, 2, math.nan),
    "random.binomial: p's dtype must be one of float64, float32, float16, bfloat16, but it is torch.int64": lambda: (
        random.binomial(F, 2, torch.tensor(1))
    ),
    "random.beta: the shapes of its parameters do not broadcast: a (2,), b (3,)": lambda: random.beta(
        F, torch.ones(2), torch.ones(3)
    ),
    "random.gamma: a of shape (3,) does not broadcast to the shape (3, 2) of the draw\n"
    "  Instead: shape=(3,), or one that ends so": lambda: random.gamma(F, torch.ones(3), (3, 2)),
    "random.pareto: b must be a number or a tensor, but it is the str 'x'": lambda: random.pareto(F, "x"),
    "random.rademacher: dtype must be one of int8, int16, int32, int64, float64, float32, float16, bfloat16, but it is "
    "torch.uint8": lambda: random.rademacher(F, (2,), torch.uint8),
    "random.dirichlet: alpha must be [..., n], but it is the tensor f32[]": lambda: random.dirichlet(
        F, torch.tensor(1.0)
    ),
    "random.ball: d must be positive, but it is 0": lambda: random.ball(F, 0),
    "random.multinomial: p must have a dim of outcomes, but its shape is ()": lambda: random.multinomial(
        F, 3, torch.tensor(0.5)
    ),
    "random.multivariate_normal: method must be 'cholesky' or 'eigh' or 'svd', but it is 'lu'": lambda: (
        random.multivariate_normal(F, torch.zeros(3), torch.tensor(COV), method="lu")
    ),
    "random.multivariate_normal: mean must be [..., n] and cov [..., n, n], but they are the tensor f32[2] and the "
    "tensor f32[3,3]": lambda: random.multivariate_normal(F, torch.zeros(2), torch.tensor(COV)),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(RandomError) as caught:
        REFUSED[text]()
    assert str(caught.value) == text


@every
def test_each_needs_one_key(d: Distribution) -> None:
    keys = random.split(KEY, 2)
    with pytest.raises(RandomError) as caught:
        d(keys, (2,))
    assert str(caught.value) == (
        f"random.{d.name}: it takes one key, but was given an array of keys of shape (2,)\n"
        f"  Instead: key[0], or vfn.vmap(lambda key: vfn.random.{d.name}(key, ...))(keys)"
    )


def test_methods_of_multivariate_normal() -> None:
    drawn = {
        m: random.multivariate_normal(KEY, torch.zeros(3), torch.tensor(COV), (20000,), method=m)
        for m in ("cholesky", "eigh", "svd")
    }
    for x in drawn.values():
        torch.testing.assert_close(x.T.cov(), torch.tensor(COV), rtol=0.1, atol=0.03)  # of 20,000 vectors


def _on_real_ranks() -> list[bool]:
    mesh = vfn.make_mesh((2, 2), ("a", "b"))
    found = []
    for d in DISTRIBUTIONS[::3]:
        for spec in (P("a", "b"), P(("b", "a"))):
            drawn = d(KEY, (3, 10), spec=spec, mesh=mesh)
            found.append(torch.equal(vfn.unshard(drawn), d(KEY, (3, 10))))
    return found


def test_on_real_ranks(gloo) -> None:
    for found in gloo(4, _on_real_ranks):
        assert len(found) > 20
        assert all(found)


def test_each_rank_of_a_trial_stops_with_the_slowest() -> None:
    """The rounds of a poisson draw are those of the whole draw: one number moves, and no block."""
    whole = random.poisson(KEY, 50.0, (64,))
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("a",))
        with vfn.comm_log() as log:
            drawn = random.poisson(KEY, 50.0, (64,), spec=P("a"), mesh=mesh)
        assert torch.equal(vfn.unshard(drawn), whole)
        assert len(log) == 1
        with vfn.comm_log() as log:
            random.poisson(KEY, 5.0, (64,), spec=P("a"), mesh=mesh)
        assert len(log) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_truncated_normal_stays_inside(dtype: torch.dtype) -> None:
    """By number and by tensor, also where rounding would reach a bound."""
    for low, high in ((-0.01, 0.01), (0.0, 3.0), (-3.0, 0.0), (-math.inf, 1.0), (2.0, math.inf)):
        by_number = random.truncated_normal(KEY, low, high, (3000,), dtype)
        assert by_number.isfinite().all()
        assert low < by_number.min()
        assert by_number.max() < high
        by_tensor = random.truncated_normal(KEY, *torch.tensor([low, high], dtype=dtype), (3000,), dtype)
        assert torch.equal(by_tensor, by_number)


def test_next_numbers() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, -1e-30, math.inf, -math.inf], dtype=dtype)
        assert torch.equal(more_floats.above(x), torch.nextafter(x, torch.full_like(x, math.inf)))
        assert torch.equal(more_floats.below(x), torch.nextafter(x, torch.full_like(x, -math.inf)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "ulps"), [("exp", 2), ("log", 2), ("log1p", 200), ("sqrt", 0.5), ("erf", 8), ("tan", 3)]
)
def test_functions_are_near_the_truth(name: str, ulps: float, dtype: torch.dtype) -> None:
    """In units of the last place: against numpy's in float128 where there is one, and math.erf."""
    generator = np.random.default_rng(0)
    low, high = {"exp": (-80, 80), "log1p": (-0.999, 3), "erf": (-3, 3), "tan": (-1.5, 1.5)}.get(name, (0, 1000))
    x = generator.uniform(low, high, 5000).astype(str(dtype).removeprefix("torch."))
    exact = np.vectorize(math.erf)(x.astype(float)) if name == "erf" else getattr(np, name)(x.astype(np.longdouble))
    got = more_floats.extended(torch.from_numpy(x), name).numpy()
    error = np.abs(got.astype(np.longdouble) - exact) / np.spacing(np.abs(got)).astype(np.longdouble)
    assert error.max() <= ulps + 0.01


@pytest.mark.parametrize("name", ["exp", "log", "log1p", "sqrt", "erf", "erfinv"])
def test_functions_differentiate_twice_and_batch(name: str) -> None:
    f, x = getattr(float_ops, name), torch.linspace(0.1, 0.8, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x)
    slope = torch.func.vmap(torch.func.grad(f))(x.detach())
    torch.testing.assert_close(slope, torch.func.jvp(f, (x.detach(),), (torch.ones(5, dtype=torch.float64),))[1])
    forward = torch.func.jacfwd(torch.func.grad(lambda x: f(x).sum()))(x.detach())
    torch.testing.assert_close(forward, torch.func.hessian(lambda x: f(x).sum())(x.detach()))


def test_a_sum_in_an_order_of_its_own() -> None:
    for n in (0, 1, 2, 7, 64, 100):
        x = torch.randn(3, n, dtype=torch.float64)
        torch.testing.assert_close(float_ops.tree_sum(x), x.sum(-1))


@pytest.mark.parametrize("d", BATCHED, ids=lambda d: d.id)
def test_a_spec_wins_over_how_parameters_lie(d: Distribution) -> None:
    params = {name: v * (1 + torch.arange(10) / 20) for name, v in tensors(d).items()}
    whole = getattr(random, d.name)(KEY, **params, shape=(4, 10))
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        lying = {name: vfn.shard(v, mesh, P("a")) for name, v in params.items()}
        for spec in (P("a", "b"), P(None, ("b", "a"))):
            drawn = getattr(random, d.name)(KEY, **lying, shape=(4, 10), spec=spec, mesh=mesh)
            assert vfn.spec_of(drawn) == spec
            assert torch.equal(vfn.unshard(drawn), whole)


@pytest.mark.parametrize("name", ["dirichlet", "ball", "multivariate_normal"])
def test_the_entries_of_vectors_can_be_split_in_a_body(name: str) -> None:
    call = {
        "dirichlet": lambda **more: random.dirichlet(KEY, torch.arange(1.0, 7.0), (4,), **more),
        "ball": lambda **more: random.ball(KEY, 6, 1.5, (4,), **more),
        "multivariate_normal": lambda **more: random.multivariate_normal(
            KEY, torch.arange(6.0), torch.diag(torch.arange(1.0, 7.0)), (4,), **more
        ),
    }[name]
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        for spec in (P("a", "b"), P(None, ("b", "a"))):
            drawn = vfn.shard_map(lambda: call(spec=spec), mesh=mesh, in_specs=(), out_specs=spec)()
            assert torch.equal(vfn.unshard(drawn), call())


# What jax 0.7 gives for the key 0 and the shape (4,): where a number does not fit, the nearest that does.
BIG = 2**31 - 1
AT_THE_EDGE = {
    "geometric 1e-10": (lambda k: random.geometric(k, 1e-10, (4,)), [537521024, 216528624, BIG, BIG]),
    "geometric 0": (lambda k: random.geometric(k, 0, (4,)), [BIG] * 4),
    "geometric 1": (lambda k: random.geometric(k, 1, (4,)), [1] * 4),
    "geometric nan": (lambda k: random.geometric(k, torch.full((4,), math.nan)), [0] * 4),
    "geometric int8": (lambda k: random.geometric(k, 1e-3, (4,), torch.int8), [54, 22, 127, 127]),
    "geometric uint8": (lambda k: random.geometric(k, 1e-10, (4,), torch.uint8), [255] * 4),
    "geometric int64": (lambda k: random.geometric(k, 1e-38, (4,), torch.int64), [2**63 - 1] * 4),
    "geometric uint64": (lambda k: random.geometric(k, 1e-38, (4,), torch.uint64), [2**64 - 1] * 4),
    "geometric bfloat16": (lambda k: random.geometric(k, torch.full((4,), 1e-30, dtype=torch.bfloat16)), [BIG] * 4),
    "poisson 1e10": (lambda k: random.poisson(k, 1e10, (4,)), [BIG] * 4),
    "poisson 1e30": (lambda k: random.poisson(k, 1e30, (4,)), [BIG] * 4),
    "poisson int8": (lambda k: random.poisson(k, 1000, (4,), torch.int8), [127] * 4),
    "poisson uint8": (lambda k: random.poisson(k, 1000, (4,), torch.uint8), [255] * 4),
    "poisson below 0": (lambda k: random.poisson(k, -torch.ones(4)), [-1] * 4),
    "binomial below 0": (lambda k: random.binomial(k, -1, 0.5, (4,)), [math.nan] * 4),
    "multinomial below 0": (lambda k: random.multinomial(k, -1, torch.tensor([0.5, 0.5])), [math.nan] * 2),
    "loggamma 0": (lambda k: random.loggamma(k, 0, (4,)), [-math.inf] * 4),
    "gamma 0": (lambda k: random.gamma(k, 0, (4,)), [0.0] * 4),
    "beta 0": (lambda k: random.beta(k, 0, 1, (4,)), [0.0] * 4),
    "chisquare 0": (lambda k: random.chisquare(k, 0, (4,)), [0.0] * 4),
    "choice of bools": (lambda k: random.choice(k, 4, (3,), p=torch.tensor([True, False, True, True])), [0, 0, 3]),
    "choice of counts": (lambda k: random.choice(k, 4, (3,), p=torch.tensor([1, 0, 1, 1])), [0, 0, 3]),
    "randint int8": (lambda k: random.randint(k, (4,), 0, 300, torch.int8), [101, 80, 72, 61]),
}


@pytest.mark.parametrize("name", AT_THE_EDGE)
def test_what_does_not_fit_is_as_in_jax(name):
    draw, want = AT_THE_EDGE[name]
    found = draw(random.key(0))
    torch.testing.assert_close(found, torch.tensor(want, dtype=found.dtype), rtol=0, atol=0, equal_nan=True)


def test_counts_that_do_not_fit_on_a_mesh():
    """Each rank's block of the whole draw, and under vmap and jit."""
    with vfn.simulate(2), vfn.use_mesh(vfn.make_mesh((2,), ("dp",))):
        for name in ("geometric", "poisson"):
            draw = functools.partial(getattr(random, name), F, 1e-9 if name == "geometric" else 3e9, (5,))
            assert torch.equal(vfn.unshard(draw(spec=P("dp"))), draw())
            assert torch.equal(vfn.jit(draw)(), draw())
