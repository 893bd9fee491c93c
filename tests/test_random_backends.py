"""Draws have the same bits whatever carries them out: torch, and the C library in each instruction set and any threads."""

import re
import resource
import shutil

import pytest
import torch
from distributions import draw_local

from vescale_fn import launch, random
from vescale_fn.errors import RandomError
from vescale_fn.random.backends import c_library, choice
from vescale_fn.random.generators import elementwise_draws
from vescale_fn.random.sharded import Draw

KEY = random.key(42)
PARAMS = {
    "uniform": (-1.25, 3.7),
    "bernoulli": (0.3,),
    "randint": elementwise_draws.integer_range(-5, 1000, torch.int32),
}
ENTRIES = sorted(c_library.CODES, key=str)
BIG = (1 << 20, 1 << 20)

RECTANGLES = {  # shape, indices in each dim
    "scalar": ((), ()),
    "empty": ((4, 6), (range(4), range(3, 3))),
    "whole": ((37, 111), (range(37), range(111))),
    "rows": ((64, 5, 7), (range(16, 33), range(5), range(7))),
    "columns": ((50, 130), (range(50), range(64, 128))),
    "one column": ((50, 13), (range(50), range(7, 8))),
    "a box": ((9, 8, 7, 6), (range(2, 5), range(8), range(1, 6), range(2, 4))),
    "pieces of rows": ((30, 11), ([0, 1, 2, 10, 11, 12, 29], range(11))),
    "pieces of columns": ((30, 40), (range(3, 30), [0, 1, 5, 6, 7, 39])),
    "pieces of both": ((30, 40), ([1, 4], [0, 1, 5, 6, 7, 39])),
    "far away": (BIG, (range(BIG[0] - 2, BIG[0]), range(5, 400))),
    "across 2**32": ((1 << 33,), (range((1 << 32) - 700, (1 << 32) + 900),)),
    "rows across 2**32": ((3, (1 << 32) - 100), (range(3), range(0, 300))),
}


@pytest.fixture(autouse=True)
def restored():
    before, threads = random.backend(), torch.get_num_threads()
    yield
    random.backend(before)
    torch.set_num_threads(threads)


def test_the_c_library_is_built_where_there_is_a_compiler() -> None:
    assert c_library.library is not None or not shutil.which("cc"), (
        "there is a C compiler, but vescale_fn.random has no C library: was the project installed with `pip install`?"
    )


def drawn(name: str, kind: str, dtype: torch.dtype, shape, indices, key=KEY) -> torch.Tensor:
    random.backend(name)
    out = draw_local(key, Draw(kind, shape, dtype, PARAMS.get(kind, ())), indices)
    return out.contiguous().view(torch.uint8) if out.ndim else out.reshape(1).view(torch.uint8)


@pytest.mark.parametrize("where", RECTANGLES)
@pytest.mark.parametrize("name", c_library.available())
def test_every_rectangle_of_every_kind(name: str, where: str) -> None:
    shape, indices = RECTANGLES[where]
    for kind, dtype in ENTRIES:
        assert torch.equal(drawn(name, kind, dtype, shape, indices), drawn("torch", kind, dtype, shape, indices)), (
            kind,
            dtype,
        )


@pytest.mark.parametrize("name", c_library.available())
def test_many_keys_in_one_call(name: str) -> None:
    keys = random.split(KEY, (3, 50))
    for kind, dtype in ENTRIES:
        for shape, indices in (RECTANGLES["columns"], RECTANGLES["scalar"]):
            got, want = (drawn(b, kind, dtype, shape, indices, keys) for b in (name, "torch"))
            assert torch.equal(got, want), (kind, dtype)


@pytest.mark.parametrize("name", c_library.available())
def test_threads_do_not_matter(name: str) -> None:
    n = 5 * (1 << 16) + 321  # enough for several threads
    random.backend("torch")
    want = random.normal(KEY, (n,)), random.bits(KEY, (n,)), random.bernoulli(KEY, 0.25, (3, n // 3))
    for threads in (1, 2, 8):
        torch.set_num_threads(threads)
        random.backend(name)
        got = random.normal(KEY, (n,)), random.bits(KEY, (n,)), random.bernoulli(KEY, 0.25, (3, n // 3))
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("name", c_library.available())
def test_special_parameters(name: str) -> None:
    cases = [
        lambda: random.uniform(KEY, (999,), minval=3.0, maxval=-1.0),
        lambda: random.uniform(KEY, (999,), torch.float64, 3.0, -1.0),
        lambda: random.uniform(KEY, (999,), minval=-1e38, maxval=1e38),
        lambda: random.bernoulli(KEY, 0.0, (999,)),
        lambda: random.bernoulli(KEY, 1.0, (999,)),
        lambda: random.randint(KEY, (999,), -(1 << 31), 1 << 31),
        lambda: random.randint(KEY, (999,), 5, 5),
        lambda: random.randint(KEY, (999,), 0, 1 << 32, torch.uint32),
        lambda: random.randint(KEY, (999,), 0, (1 << 31) + 7, torch.uint32),
        lambda: random.randint(KEY, (999,), -300, 300, torch.int8),
    ]
    for case in cases:
        random.backend("torch")
        want = case()
        random.backend(name)
        assert torch.equal(case().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("name", c_library.available())
def test_keys(name: str) -> None:
    for make in (
        lambda: random.split(KEY, 5),
        lambda: random.split(KEY, (2, 1000)),
        lambda: random.split(KEY, 0),
        lambda: random.split(KEY, 70_000),
        lambda: random.fold_in(KEY, 2**32 - 1),
        lambda: random.fold_in(KEY, 0),
    ):
        random.backend("torch")
        want = make()
        random.backend(name)
        assert torch.equal(random.key_data(make()), random.key_data(want))


@pytest.mark.parametrize("name", c_library.available())
def test_the_self_test_finds_a_wrong_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = c_library.VARIANTS.index(name)
    assert choice.differing(variant) == []
    swapped = {**c_library.CODES, ("normal", torch.float32): c_library.CODES["exponential", torch.float32]}
    monkeypatch.setattr(c_library, "CODES", swapped)
    assert choice.differing(variant) == ["normal of float32"]


def test_a_library_that_is_wrong_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if not c_library.available():
        pytest.skip("no C library here, and no compiler to build it")
    monkeypatch.delenv("VESCALE_FN_RANDOM", raising=False)
    monkeypatch.setitem(c_library.CODES, ("normal", torch.float32), c_library.CODES["exponential", torch.float32])
    best = c_library.available()[-1]
    message = f"vescale_fn.random: {best} differs from the torch definition in normal of float32, so draws run on torch"
    with pytest.warns(RuntimeWarning, match=f"^{re.escape(message)}$"):
        choice._start()  # as at import
    assert random.backend() == "torch"


def test_the_backend_is_told_and_set() -> None:
    there = ["torch", *c_library.available()]
    assert random.backend("auto") == there[-1]
    for name in there:
        assert random.backend(name) == random.backend() == name
    with pytest.raises(RandomError) as raised:
        random.backend("numpy")
    listed = ", ".join(map(repr, [*there, "auto"]))
    assert str(raised.value) == f"random.backend: 'numpy' is not a backend\n  Instead: one of {listed}"
    assert random.backend() == there[-1]  # what was there stays


def test_what_is_not_available_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_library, "available", lambda: ["c-baseline"])
    monkeypatch.setattr(c_library, "library", object())
    with pytest.raises(RandomError) as raised:
        random.backend("c-avx512")
    assert str(raised.value) == (
        "random.backend: the backend 'c-avx512' is not available: this processor lacks its instructions\n"
        "  Instead: one of 'torch', 'c-baseline', 'auto'"
    )
    monkeypatch.setattr(c_library, "available", lambda: [])
    monkeypatch.setattr(c_library, "library", None)
    with pytest.raises(RandomError) as raised:
        random.backend("c-avx2")
    assert str(raised.value) == (
        "random.backend: the backend 'c-avx2' is not available: the C library was not built\n"
        "  Instead: one of 'torch', 'auto'"
    )


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["torch", *c_library.available()]:
        monkeypatch.setenv("VESCALE_FN_RANDOM", name)
        choice._start()  # as at import
        assert random.backend() == name


def peak_of_a_draw(name: str) -> int:
    random.backend(name)
    random.normal(KEY, (1 << 17,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    random.normal(KEY, (1 << 24,))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.parametrize("name", ["torch", *c_library.available()[-1:]])
def test_nothing_of_the_draws_size_is_held_besides_it(name: str) -> None:
    """Peak memory of a draw of 64 MiB, in a process of its own: the draw and little else."""
    (peak,) = launch(peak_of_a_draw, 1, name, device="cpu")
    assert 64 * 1024 * 0.9 < peak < 64 * 1024 * 1.25
