"""Keys and draws on one device: the bits of `jax.random`, keys as values, and what is refused."""

import copy
import hashlib
import io
import json
import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from distributions import draw_local, same_keys

from vescale_fn import random
from vescale_fn._core.sharding.spec import P
from vescale_fn.errors import RandomError, SpecError
from vescale_fn.random.backends import draw_op
from vescale_fn.random.generators import counters, elementwise_draws, floats, threefry
from vescale_fn.random.sharded import Draw

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "random.json").read_text())["cases"]
DRAWS = ("bits", "uniform", "normal", "bernoulli", "randint")
KEY = random.key(42)


def sha(x: torch.Tensor) -> str:
    x = x.view(torch.int16) if x.dtype == torch.bfloat16 else x
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()


# JAX's numbers


def in_scope(case: dict) -> bool:
    ours = case["key_data"] is None or len(case["key_data"]) == 2
    ours &= not case["name"].startswith(("philox", "threefry4x32"))
    cut_seed = case["fn"] == "key" and case["name"].endswith("_x32")  # JAX without x64 drops a seed's high bits
    return ours and not cut_seed and "mesh" not in case["args"] and case["fn"] in ("key", "split", "fold_in", *DRAWS)


def result(case: dict) -> torch.Tensor:
    args = dict(case["args"])
    if case["fn"] == "key":
        return random.key_data(random.key(args["seed"]))
    key = random.wrap_key_data(case["key_data"])
    if case["fn"] in ("split", "fold_in"):
        return random.key_data(getattr(random, case["fn"])(key, *args.values()))
    if "dtype" in args:
        args["dtype"] = getattr(torch, args["dtype"])
    return getattr(random, case["fn"])(key, **args)


@pytest.mark.parametrize("case", list(filter(in_scope, GOLDENS)), ids=lambda case: case["name"])
def test_golden(case: dict) -> None:
    drawn, expected = result(case), case["out"]
    assert list(drawn.shape) == expected["shape"]
    assert str(drawn.dtype) == f"torch.{expected['dtype']}"
    if case["name"] == "normal_f64":  # through torch's own float64 log, whose last bits no one promises
        torch.testing.assert_close(drawn.flatten()[:8].tolist(), expected["first"][:8], rtol=1e-14, atol=1e-15)
    else:
        assert sha(drawn) == expected["sha256"]


def test_the_goldens_are_many() -> None:
    assert len(list(filter(in_scope, GOLDENS))) >= 64


def golden(name: str) -> dict:
    return next(case for case in GOLDENS if case["name"] == name)


def test_counters_beyond_32_bits() -> None:
    case = golden("bits32_at_linear_index")
    shape = (1 << 31, 1 << 22)
    for i, at in enumerate(case["args"]["linear_index"]):
        row, column = divmod(at, shape[1])
        block = draw_local(KEY, Draw("bits", shape, torch.uint32), (range(row, row + 1), range(column, column + 1)))
        assert block.item() == case["out"]["first"][i]


def test_vmap_goldens() -> None:
    keys = random.split(KEY, 4)
    one = torch.func.vmap(lambda key: random.uniform(key, (7,)))(keys)
    assert sha(one) == golden("vmap_uniform_over_keys")["out"]["sha256"]
    two = torch.func.vmap(lambda key: torch.func.vmap(lambda k: random.uniform(k, (3,)))(random.split(key, 5)))(keys)
    assert sha(two) == golden("vmap_vmap")["out"]["sha256"]


def test_published_threefry_vectors() -> None:
    """The known answers of the Random123 distribution."""
    assert threefry.hash_ints(0, 0, 0, 0) == (0x6B200159, 0x99BA4EFE)
    ones = 0xFFFFFFFF
    assert threefry.hash_ints(ones, ones, ones, ones) == (0x1CB996FC, 0xBB002BE7)
    assert threefry.hash_ints(0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3) == (0xC4923A9C, 0x483DF7A0)


def test_the_three_forms_of_the_hash_agree() -> None:
    low = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 12345], dtype=torch.int32)
    arrays = threefry.hash_words(42, 7, 3, low)
    keys = [torch.tensor([k], dtype=torch.int32) for k in (42, 7)]
    tensors = threefry.rounds(*keys, 3, low, threefry.as_tensor, threefry.rotate_tensor)
    for i, word in enumerate(low.tolist()):
        expected = tuple(map(threefry.signed, threefry.hash_ints(42, 7, 3, word & threefry.MASK)))
        assert (arrays[0][i].item(), arrays[1][i].item()) == expected
        assert (tensors[0][i].item(), tensors[1][i].item()) == expected


# Floats


def test_the_substitute_of_the_fused_multiply_add_is_exact() -> None:
    """In exact fractions, no neighbour of the result is nearer to the truth; sums that cancel are among them."""
    generator = np.random.default_rng(0)
    a, b, c = (generator.standard_normal(1000).astype(np.float32) for _ in range(3))
    c[:500] = -(a * b)[:500] * generator.choice([1, 1 + 2**-23, 1 - 2**-20], 500).astype(np.float32)
    got = floats.fma_float32(*map(torch.from_numpy, (a, b, c))).numpy()
    twice = a * b + c
    assert (got != twice).any()
    for x, *row in zip(got, np.nextafter(got, -np.inf), np.nextafter(got, np.inf), a, b, c, strict=True):
        below, above, a_, b_, c_ = (Fraction(float(v)) for v in row)
        exact = a_ * b_ + c_
        distance = abs(Fraction(float(x)) - exact)
        assert distance <= abs(below - exact)
        assert distance <= abs(above - exact)


def test_normals_are_the_same_without_fused_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = random.normal(KEY, (3000,))
    assert floats.addcmul_is_fused(torch.device("cpu"), torch.float32) in (True, False)
    monkeypatch.setattr(floats, "addcmul_is_fused", lambda device, dtype: False)
    assert torch.equal(random.normal(KEY, (3000,)), expected)
    assert torch.equal(random.uniform(KEY, (99,), minval=0.1, maxval=0.7), result(golden_like(0.1, 0.7)))


def golden_like(low: float, high: float) -> dict:
    return {"fn": "uniform", "key_data": [0, 42], "args": {"shape": [99], "minval": low, "maxval": high}}


def test_compensated_float64() -> None:
    a = torch.full((3,), 1 + 2.0**-27, dtype=torch.float64)
    assert (floats.fma_compensated(a, a, -(1 + 2.0**-26) * torch.ones_like(a)) == 2.0**-54).all()


def test_selection_by_bits() -> None:
    w = torch.tensor([0.0, 1e-30, 4.9999995, 5.0, 5.0000005, 40.0, float("inf")])
    yes, no = torch.linspace(-1, 1, 7), torch.linspace(3, -3, 7)
    assert torch.equal(floats.select(floats.below(w, 5.0), yes, no), torch.where(w < 5, yes, no))


def test_erfinv_inverts_erf() -> None:
    x = torch.linspace(-0.9999, 0.9999, 5001, dtype=torch.float64)
    torch.testing.assert_close(torch.special.erf(floats.erfinv(x)), x, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.special.erf(floats.erfinv(x.float())), x.float(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "draw",
    [
        lambda shape: random.normal(KEY, shape),
        lambda shape: random.uniform(KEY, shape, torch.bfloat16, -1.0, 3.0),
        lambda shape: random.randint(KEY, shape, -3, 1000),
        lambda shape: random.bernoulli(KEY, 0.3, shape),
    ],
    ids=["normal", "uniform", "randint", "bernoulli"],
)
def test_prefix_and_reshape(draw) -> None:
    whole = draw((draw_op.BLOCK["cpu"] * 2 + 77,))
    assert torch.equal(draw((1001,)), whole[:1001])
    assert torch.equal(draw((7, 11, 13)), whole[:1001].view(7, 11, 13))
    assert draw((0, 3)).shape == (0, 3)


def test_blocks_of_any_size_are_the_same_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = random.normal(KEY, (5, 7, 11))
    for size in (1, 2, 10, 64, 384):
        monkeypatch.setitem(draw_op.BLOCK, "cpu", size)
        assert torch.equal(random.normal(KEY, (5, 7, 11)), expected)


def test_unsigned_remainders() -> None:
    values = [0, 1, 5, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**63 + 12345, 2**64 - 1]
    signed = lambda u: u - 2**64 if u >> 63 else u
    for span in values:
        got = elementwise_draws.unsigned_remainder(torch.tensor([signed(v) for v in values]), signed(span))
        assert [g % 2**64 for g in got.tolist()] == [v % span if span else v for v in values]


# Keys as values


def test_a_key_is_like_an_array_of_keys() -> None:
    keys = random.split(KEY, (2, 3))
    assert (keys.shape, keys.ndim, keys.size, len(keys)) == ((2, 3), 2, 6, 2)
    assert keys[1, 2] == random.split(KEY, 6)[5]
    assert keys[..., 0].shape == (2,)
    assert keys[1:].shape == (1, 3)
    assert same_keys(keys[torch.tensor([1, 0])][0], keys[1])
    assert keys[torch.tensor([[True, False, True], [False, True, False]])].shape == (3,)
    assert keys[None].shape == (1, 2, 3)
    assert keys.reshape(6)[4] == keys.reshape((3, 2))[2, 0] == keys[1, 1]
    assert [key.shape for key in keys] == [(3,), (3,)]
    assert KEY == random.key(42) != random.key(43)
    assert KEY != "key"
    assert same_keys(random.split(KEY, 3)[:2], random.split(KEY))
    assert random.fold_in(KEY, 5) == random.split(KEY, 6)[5]
    assert random.split(KEY, 500)[499] == random.fold_in(KEY, 499)
    assert random.split(KEY, 0).shape == (0,)
    with pytest.raises(IndexError, match="2 indices for an array of keys of shape"):
        random.split(KEY)[0, 1]


def test_keys_are_compared_key_by_key() -> None:
    """As in JAX: broadcast, with what is no array never equal, and with an array of anything else refused."""
    keys = random.split(KEY, 3)
    for found, expected in (
        (KEY == random.key(42), True),
        (KEY != random.key(43), True),
        (keys == keys[1], [False, True, False]),
        (keys != keys[1], [True, False, True]),
        (keys[:, None] == keys, torch.eye(3).tolist()),
        (random.split(KEY, 0) == KEY, []),
        (torch.func.vmap(lambda key: key == keys[2])(keys), [False, False, True]),
    ):
        assert torch.equal(found, torch.tensor(expected, dtype=torch.bool))
    assert (KEY == None, KEY != None, KEY == "key", KEY != object()) == (False, True, False, True)  # noqa: E711
    assert (keys[1] in [keys[0], keys[1]], keys[1] in [None]) == (True, False)
    for refused, why in (
        (lambda: KEY == 0, "Key: `==` compares keys with keys, and this is the int 0\n"),
        (lambda: 0 != KEY, "Key: `!=` compares keys with keys, and this is the int 0\n"),
        (lambda: KEY == KEY.data, "Key: `==` compares keys with keys, and this is the tensor i32[2]\n"),
        (lambda: np.ones(2) == KEY, "Key: `==` compares keys with keys, and this is the numpy array f64[2]\n"),
        (lambda: KEY == [KEY], "Key: `==` compares keys with keys, and this is a list of the Key of shape ()\n"),
        (lambda: keys == keys[:2], "Key: `==` of arrays of keys: the shapes (3,) and (2,) do not broadcast"),
    ):
        with pytest.raises(RandomError) as error:
            refused()
        assert str(error.value).startswith(why)


def test_a_key_goes_through_trees_and_copies() -> None:
    tree = {"k": random.split(KEY, 3), "x": torch.ones(2), "n": 3}
    assert optree.tree_paths(tree) == [("k", "data"), ("n",), ("x",)]
    assert optree.tree_accessors(tree)[0].codify("tree") == "tree['k'].data"
    assert same_keys(optree.tree_map(lambda leaf: leaf, tree)["k"], tree["k"])
    assert optree.tree_map(lambda leaf: None, tree)["k"].data is None
    assert same_keys(torch_pytree.tree_map(lambda leaf: leaf, tree)["k"], tree["k"])
    (path, _), *_ = torch_pytree.tree_flatten_with_path(tree)[0]
    assert torch_pytree.keystr(path) == "['k'].data"
    assert pickle.loads(pickle.dumps(KEY)) == copy.deepcopy(KEY) == copy.copy(KEY) == random.clone(KEY) == KEY
    assert random.clone(KEY).data.data_ptr() != KEY.data.data_ptr()
    file = io.BytesIO()
    torch.save(tree["k"].data, file)
    file.seek(0)
    assert same_keys(random.Key(torch.load(file)), tree["k"])
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    assert same_keys(torch.load(file, weights_only=True)["k"], tree["k"])


def test_raw_bits() -> None:
    keys = random.split(KEY, 3)
    data = random.key_data(keys)
    assert (data.dtype, data.shape) == (torch.uint32, (3, 2))
    for form in (
        data,
        data.view(torch.int32),
        data.to(torch.int64),
        data.numpy(),
        data.numpy().astype(np.int64),
        data.tolist(),
    ):
        assert same_keys(random.wrap_key_data(form), keys)
    assert random.key_impl(keys) == "threefry2x32"
    assert random.key(torch.tensor(42)) == random.key(np.int64(42)) == KEY
    assert random.key(torch.tensor(-1)) == random.key(-1) == random.key(2**64 - 1)
    assert random.fold_in(KEY, torch.tensor(7)) == random.fold_in(KEY, np.uint8(7)) == random.fold_in(KEY, 7)
    assert repr(KEY) == "Key([0, 42], threefry2x32)"
    assert repr(keys) == "Key(shape=(3,), threefry2x32)"


def test_torchs_functions_on_arrays_of_keys():
    """As in jax.numpy they see the array of keys, and not the dim of their bits; others are refused."""
    keys = random.split(KEY, 6).reshape(2, 3)
    one, other = keys[0, 0], keys[0, 1]
    assert same_keys(torch.cat([keys, keys[:1]]), keys[torch.tensor([0, 1, 0])])
    assert same_keys(torch.cat([keys, keys[:, :1]], dim=-1), keys[:, torch.tensor([0, 1, 2, 0])])
    assert same_keys(torch.stack([one, other]), keys[0, :2])
    assert torch.stack([keys[0], keys[1]], -1).shape == (3, 2)
    assert same_keys(torch.stack([keys[0], keys[1]], -1)[2], keys[:, 2])
    assert torch.where(torch.tensor(False), one, other) == other
    assert torch.where(torch.tensor([True, False, True]), keys, one)[1, 1] == one
    assert same_keys(torch.broadcast_to(keys[0], (4, 3))[3], keys[0])
    for refused, why in (
        (lambda: np.asarray(KEY), r"vfn.random.key_data\(key\), its bits"),
        (lambda: np.array(keys), r"vfn.random.key_data\(key\), its bits"),
        (lambda: torch.exp(KEY), r"exp: torch's functions are not for keys"),
        (lambda: torch.cat([one, other]), r"torch.stack\(keys\)"),
        (lambda: torch.stack([one, torch.zeros(2)]), r"stack: keys go with keys alone"),
        (lambda: torch.where(torch.tensor(True), one, torch.zeros(2)), r"where: keys go with keys alone"),
    ):
        with pytest.raises(RandomError, match=why):
            refused()


def test_keys_and_draws_are_the_same_where_something_watches() -> None:
    """Python's integers where nothing does, operators under a mode."""
    program = lambda: (
        random.split(KEY, 3),
        random.fold_in(KEY, 7),
        random.normal(KEY, (5,)),
        random.split(KEY, (2, 50)),
    )
    alone = program()
    with torch.device("cpu"):  # a mode for torch functions
        watched = program()
    assert same_keys(watched[0], alone[0])
    assert watched[1] == alone[1]
    assert torch.equal(watched[2], alone[2])
    assert same_keys(watched[3], alone[3])


def test_draws_follow_the_default_device_and_keys_do_not() -> None:
    with torch.device("meta"):
        key = random.split(random.fold_in(random.key(1), 2))[0]
        assert key.data.device.type == "cpu"
        assert random.normal(key, (3,)).device.type == "meta"


# Dropout


def test_dropout_is_a_scaled_bernoulli_mask() -> None:
    x = torch.linspace(-1, 1, 999).view(27, 37)
    mask = random.bernoulli(KEY, 1 - 0.3, x.shape)
    expected = torch.where(mask, x * (1 / (1 - 0.3)), 0)
    assert torch.equal(random.dropout(KEY, x, 0.3), expected)
    assert torch.equal(random.dropout(KEY, x.t().contiguous().t(), 0.3), expected)
    assert torch.equal(random.dropout(KEY, x.bfloat16(), 0.3) != 0, mask & (x != 0))
    assert random.dropout(KEY, x, 0) is x
    assert torch.equal(random.dropout(KEY, x, 1), torch.zeros_like(x))
    assert abs(mask.float().mean() - 0.7) < 0.04


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, on its first jvp
def test_dropout_differentiates() -> None:
    x = torch.linspace(-1, 1, 9, requires_grad=True)
    for rate in (0.5, 1):
        kept = random.dropout(KEY, torch.ones(9), rate)
        assert torch.equal(torch.autograd.grad(random.dropout(KEY, x, rate).sum(), x)[0], kept)
        f = lambda x, rate=rate: random.dropout(KEY, x, rate)
        assert torch.equal(torch.func.grad(lambda x, f=f: f(x).sum())(x.detach()), kept)
        assert torch.equal(torch.func.jvp(f, (x,), (x,))[1], kept * x)


# What is refused, as text


REFUSED = {
    "an int for a key": (
        lambda: random.normal(42, (2,)),
        "random.normal: the first argument must be a key, but it is the int 42\n  Instead: vfn.random.key(42)",
    ),
    "raw bits for a key": (
        lambda: random.uniform(torch.zeros(2, dtype=torch.uint32)),
        "random.uniform: the first argument must be a key, but it is the tensor u32[2]\n"
        "  Instead: vfn.random.wrap_key_data(...) around the raw bits",
    ),
    "several keys": (
        lambda: random.bits(random.split(KEY)),
        "random.bits: it takes one key, but was given an array of keys of shape (2,)\n"
        "  Instead: key[0], or vfn.vmap(lambda key: vfn.random.bits(key, ...))(keys)",
    ),
    "a negative shape": (
        lambda: random.normal(KEY, (3, -1)),
        "random.normal: shape must not be negative, but shape=(3, -1)",
    ),
    "a float shape": (
        lambda: random.normal(KEY, (3.0,)),
        "random.normal: shape must be integers, but shape=(3.0,) has the float 3.0",
    ),
    "a string for a shape": (
        lambda: random.uniform(KEY, "ab"),
        "random.uniform: shape must be integers, but shape='ab' has the str 'ab'",
    ),
    "num": (lambda: random.split(KEY, -2), "random.split: num must not be negative, but num=-2"),
    "an integer dtype": (
        lambda: random.normal(KEY, (3,), torch.int32),
        "random.normal: dtype must be one of float64, float32, float16, bfloat16, complex64, complex128, but it is "
        "torch.int32",
    ),
    "a signed dtype of bits": (
        lambda: random.bits(KEY, (3,), torch.int32),
        "random.bits: dtype must be one of uint8, uint16, uint32, uint64, but it is torch.int32",
    ),
    "p above one": (lambda: random.bernoulli(KEY, 1.5), "random.bernoulli: p must be in [0, 1], but it is 1.5"),
    "p not a number": (
        lambda: random.bernoulli(KEY, float("nan")),
        "random.bernoulli: p must be in [0, 1], but it is nan",
    ),
    "integer p": (
        lambda: random.bernoulli(KEY, torch.tensor([0, 1])),
        "random.bernoulli: p's dtype must be one of float64, float32, float16, bfloat16, but it is torch.int64",
    ),
    "a mode": (
        lambda: random.bernoulli(KEY, 0.5, mode="middle"),
        "random.bernoulli: mode must be 'low' or 'high', but it is 'middle'",
    ),
    "a rate": (
        lambda: random.dropout(KEY, torch.ones(2), -0.1),
        "random.dropout: rate must be in [0, 1], but it is -0.1",
    ),
    "a rate that is a bool": (
        lambda: random.dropout(KEY, torch.ones(2), True),
        "random.dropout: rate must be a number, but it is the bool True",
    ),
    "dropout of integers": (
        lambda: random.dropout(KEY, torch.ones(2, dtype=torch.int32), 0.5),
        "random.dropout: x must be a float tensor, but it is the tensor i32[2]",
    ),
    "float bounds of integers": (
        lambda: random.randint(KEY, (2,), 0, 2.5),
        "random.randint: maxval must be an integer, but it is the float 2.5",
    ),
    "bounds that do not broadcast": (
        lambda: random.uniform(KEY, (2,), minval=torch.zeros(3)),
        "random.uniform: minval of shape (3,) does not broadcast to the shape (2,) of the draw\n"
        "  Instead: shape=(3,), or one that ends so",
    ),
    "a seed": (
        lambda: random.key(1.5),
        "random.key: seed must be an integer, but it is the float 1.5\n  Instead: any int: vfn.random.key(0)",
    ),
    "a large seed": (
        lambda: random.key(2**64),
        "random.key: seed must be in [-9223372036854775808, 18446744073709551616), but it is 18446744073709551616",
    ),
    "an impl": (
        lambda: random.key(0, impl="rbg"),
        "random.key: impl='rbg' is not a generator\n  Instead: one of ('threefry2x32',)",
    ),
    "a negative fold": (
        lambda: random.fold_in(KEY, -1),
        "random.fold_in: data must be in [0, 4294967296), but it is -1",
    ),
    "raw bits of another shape": (
        lambda: random.wrap_key_data(torch.zeros(3, dtype=torch.int32)),
        "random.wrap_key_data: data must be uint32 [..., 2], but it is the tensor i32[3]",
    ),
    "key + 1": (
        lambda: KEY + 1,
        "Key: `+` is not for keys: arithmetic would make keys whose streams overlap\n"
        "  Instead: vfn.random.split(key) for several keys, vfn.random.fold_in(key, i) for the i-th",
    ),
    "tensor + key": (
        lambda: torch.ones(2) + KEY,
        "Key: `+` is not for keys: arithmetic would make keys whose streams overlap\n"
        "  Instead: vfn.random.split(key) for several keys, vfn.random.fold_in(key, i) for the i-th",
    ),
    "if key": (lambda: bool(KEY), "Key: a key is not true or false\n  Instead: `if key is not None:`"),
    "unpacking one key": (
        lambda: list(KEY),
        "Key: iterating needs an array of keys, but this is one key, of shape ()\n"
        "  Instead: k1, k2 = vfn.random.split(key)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(RandomError) as error:
        call()
    assert str(error.value) == message


def test_arithmetic_of_all_kinds_is_refused() -> None:
    for name in ("sub", "mul", "xor", "neg", "lshift", "lt", "radd", "rxor"):
        with pytest.raises(RandomError, match="is not for keys"):
            getattr(KEY, f"__{name}__")(*() if name == "neg" else (1,))
    with pytest.raises(TypeError, match="unhashable"):
        hash(KEY)


def test_a_spec_is_checked_on_one_device_too() -> None:
    assert torch.equal(random.normal(KEY, (4, 2), spec=P("dp", None)), random.normal(KEY, (4, 2)))
    with pytest.raises(SpecError) as error:
        random.normal(KEY, (4,), spec=P("dp", None))
    assert str(error.value) == (
        "random.normal: the spec P('dp', None) has 2 entries, but the draw has shape (4,)\n"
        "  Instead: at most one entry a dim"
    )
    with pytest.raises(SpecError, match="speaks of sums between ranks"):
        random.normal(KEY, (4,), spec=P(unreduced={"tp"}))
    with pytest.raises(SpecError, match="spec must be a P, but it is the tuple"):
        random.normal(KEY, (4,), spec=("dp",))


# Rectangles


def test_a_rectangle_is_written_and_read_back() -> None:
    shape = (6, 5, 4)
    assert counters.whole(shape).is_whole
    assert counters.decoded(shape, counters.whole(shape).where()) is counters.whole(shape)
    indices = (range(2, 4), [0, 1, 4], range(0))
    rectangle = counters.Rectangle(shape, indices)
    assert not rectangle.is_whole
    assert rectangle.encoded().tolist() == [[0, 2, 2], [1, 0, 2], [1, 4, 1], [2, 0, 0]]
    assert counters.decoded(shape, rectangle.where()).indices == indices
