"""The Triton backend has the bits of the torch definition: in Triton's interpreter, in compiled code, and on a GPU.

The oracle hashes the counter of every element, written out in int64, and applies the functions of `kinds`. Without a
GPU the kernel runs in the interpreter, in a process of its own because Triton reads TRITON_INTERPRET once; the
interpreter rounds a fused multiply-add twice and cuts bfloat16 off, so the tests put exact operations in their place.
"""

import json
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from distributions import DISTRIBUTIONS

import vescale_fn as vfn
from vescale_fn.random.backends import triton_kernels, triton_launch
from vescale_fn.random.generators import counters, elementwise_draws, floats
from vescale_fn.random.generators.counters import Rectangle
from vescale_fn.random.generators.elementwise_draws import Draw
from vescale_fn.random.generators.threefry import hash_words

HERE = Path(__file__).resolve().parent
needs_triton = pytest.mark.skipif(not triton_launch.AVAILABLE, reason="Triton comes with CUDA builds of torch")

KEYS = torch.tensor([[[7, -3], [11, 12]], [[-(2**31), 5], [0, 0]], [[1, 16], [2**31 - 1, -1]]], dtype=torch.int32)
PLACES = {  # the whole draw's shape, the rectangle's indices
    "whole": ((7, 130), (range(7), range(130))),
    "scalar": ((), ()),
    "rows": ((9, 40), (range(2, 7), range(40))),
    "one row": ((9, 40), (range(4, 5), range(40))),
    "columns": ((5, 300), (range(5), range(100, 230))),
    "one column": ((33, 6), (range(33), range(5, 6))),
    "inner block": ((4, 6, 20), (range(1, 3), range(2, 5), range(3, 17))),
    "listed rows": ((9, 20), ([0, 3, 4, 8], range(20))),
    "listed columns": ((5, 20), (range(1, 4), [1, 2, 9, 15, 16])),
    "listed columns of one row": ((5, 20), (range(3, 4), [1, 2, 9, 15, 16])),
    "listed both": ((9, 20), ([8, 2], [19, 0, 7])),
    "empty": ((9, 20), (range(9), range(7, 7))),
    "beyond 2**32": ((1 << 20, 1 << 20), (range(500_000, 500_003), range(7, 50))),
    "across 2**32": ((1 << 33,), (range((1 << 32) - 70, (1 << 32) + 60),)),
    "across 2**32 in a row": ((3, 3 << 31), (range(3), range((1 << 32) - 5, (1 << 32) + 9))),
    "listed across 2**32": ((1 << 34,), ([5, (1 << 32) - 1, 1 << 32, (1 << 34) - 1],)),
    "least and most": ((1 << 24,), ([11_367_249, 14_640_141],)),  # where the first key draws all zeros, all ones
    "long rows": ((3, 9000), (range(1, 3), range(100, 8900))),
}
LONG = ("whole", "long rows")  # under one key in the interpreter, which takes its time
FEW = ("whole", "listed both", "across 2**32", "least and most")
CASES = [(kind, dtype) for kind, (dtypes, _) in triton_launch.KNOWN.items() for dtype in dtypes]
DROPS = [(kind, dtype) for kind, dtype in CASES if kind == "dropout"]
CASES = [case for case in CASES if case not in DROPS]
THOROUGH = [("bits", torch.uint32), ("randint", torch.int32), ("dropout", torch.float32)]


def name(dtype):
    return str(dtype).removeprefix("torch.")


def counters_of(place):
    """Every element's counter, as int64."""
    shape, indices = PLACES[place]
    total = torch.zeros((), dtype=torch.int64)
    for size, index in zip(shape, indices):
        total = total[..., None] * size + torch.tensor(list(index), dtype=torch.int64)
    return total.flatten()


def params_of(kind):
    return triton_launch.KNOWN[kind][1]


def value_for(dtype, n):
    return torch.linspace(-3, 5, n).to(dtype)


def expected(kind, dtype, keys, place, params):
    counter = counters_of(place)
    high, low = (counter >> 32).to(torch.int32), (counter & 0xFFFFFFFF).to(torch.int32)
    streams, values = elementwise_draws.KINDS["bernoulli" if kind == "dropout" else kind]
    words = [hash_words(keys[:, s, :1], keys[:, s, 1:], high, low.expand(len(keys), -1)) for s in range(streams)]
    if kind != "dropout":
        return values(*words, dtype, params)
    x = value_for(dtype, len(keys) * len(counter)).view(len(keys), -1)
    return torch.where(values(*words, torch.float32, params[:1]), x.float() * torch.tensor(params[1]), 0.0).to(dtype)


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.cpu().reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def streams_of(kind):
    return 2 if kind == "randint" else 1


def made(kind, dtype, keys, place, params, device="cpu", keys_device="cpu"):
    shape, indices = PLACES[place]
    n = len(keys) * len(counters_of(place))
    out = torch.empty(n, dtype=elementwise_draws.result_dtype(kind, dtype), device=device)
    x = value_for(dtype, n).to(device) if kind == "dropout" else None
    triton_launch.run(Draw(kind, shape, dtype, params), keys.to(keys_device), Rectangle(shape, indices), out, x)
    return out


def every_case():
    """(kind, dtype, place, number of keys): every kind on some rectangles, some kinds on every one."""
    for kind, dtype in [*CASES, *DROPS]:
        for place in PLACES if (kind, dtype) in THOROUGH else FEW:
            for count in (1, 3) if (kind, dtype) in THOROUGH and place not in LONG else (1 if place in LONG else 3,):
                yield kind, dtype, place, count


def test_the_extremes_are_drawn():
    drawn = expected("uniform", torch.float32, KEYS[:1, :1], "least and most", (0, 1))
    assert drawn.tolist() == [[0.0, 1 - 2.0**-23]]


# In the interpreter, in a process of its own


def coarse_interpreter():
    """Give the interpreter a multiply-add that rounds twice, as those of Triton before 3.9 are."""
    from triton.runtime import interpreter

    def fma(self, x, y, z):
        return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma


def exact_interpreter():
    """Give the interpreter a fused multiply-add that rounds once, and bfloat16 that is rounded."""
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def fma(self, x, y, z):
        assert {x.data.dtype, y.data.dtype, z.data.dtype} == {np.dtype(np.float32)}
        a, b, c = torch.broadcast_tensors(*(torch.from_numpy(np.array(v.data)) for v in (x, y, z)))
        return interpreter.TensorHandle(floats.fma_float32(a, b, c).numpy(), z.dtype.scalar)

    def rounded(self, src, dst):
        if dst.scalar != tl.bfloat16 or src.dtype.scalar == tl.bfloat16:
            return cast(self, src, dst)
        bits = torch.from_numpy(np.array(src.data, dtype=np.float32)).to(torch.bfloat16).view(torch.int16)
        return interpreter.TensorHandle(bits.numpy().view(np.uint16), dst.scalar)

    builder.create_fma, builder.cast_impl = fma, rounded


def interpreted():
    """Run by the child: prints what differed, and how many cases there were."""
    torch.set_num_threads(1)
    coarse_interpreter()
    rounded_twice = {
        k: triton_launch.differing(torch.device("cpu"), k, torch.float32) for k in ("normal", "gumbel", "bernoulli")
    }
    exact_interpreter()
    bad = []
    count = 0
    for kind, dtype, place, n in every_case():
        keys, params, count = KEYS[:n, : streams_of(kind)], params_of(kind), count + 1
        if not same(made(kind, dtype, keys, place, params), expected(kind, dtype, keys, place, params)):
            bad.append(f"{kind} of {name(dtype)}, {place}, {n} keys")
    for kind, dtype, params in SPECIAL:
        keys, count = KEYS[:1, : streams_of(kind)], count + 1
        if not same(made(kind, dtype, keys, "rows", params), expected(kind, dtype, keys, "rows", params)):
            bad.append(f"{kind} of {name(dtype)} with {params}")
    own = [kind for kind, dtype in [*CASES, *DROPS] if triton_launch.differing(torch.device("cpu"), kind, dtype)]
    print(json.dumps({"bad": bad, "count": count, "rounded twice": rounded_twice, "self-test": own}))


SPECIAL = [
    ("uniform", torch.float32, (0.0, 1.0)),
    ("uniform", torch.float32, (1e-30, 3e38)),
    ("uniform", torch.float32, (2.0, 2.0)),
    ("bernoulli", torch.float32, (0.0,)),
    ("bernoulli", torch.float32, (1.0,)),
    ("randint", torch.int32, elementwise_draws.integer_range(-(2**31), 2**31, torch.int32)),
    ("randint", torch.int32, elementwise_draws.integer_range(-(2**31), 2**31 - 1, torch.int32)),
    ("randint", torch.uint8, elementwise_draws.integer_range(0, 256, torch.uint8)),
    ("randint", torch.int64, elementwise_draws.integer_range(-(2**63), 2**63, torch.int64)),
    ("randint", torch.uint64, elementwise_draws.integer_range(1, 2**64 - 1, torch.uint64)),
]


@pytest.fixture(scope="module")
def report():
    """What `interpreted` found."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    code = "import test_random_gpu; test_random_gpu.interpreted()"
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@needs_triton
def test_the_kernel_has_the_bits_of_the_definition_in_the_interpreter(report):
    assert report["bad"] == []
    assert report["count"] == len([*every_case()]) + len(SPECIAL)


@pytest.mark.slow
@needs_triton
def test_the_self_test_finds_a_multiply_add_that_is_rounded_twice(report):
    assert report["rounded twice"] == {"normal": True, "gumbel": True, "bernoulli": False}
    assert report["self-test"] == []


# Compiled for a GPU that is not here


class Compiling:
    """In place of the kernel and of Triton's driver: compiles each launch for sm_90, launches nothing."""

    def __init__(self, kernel, options):
        self.kernel, self.options, self.built = kernel, options, []

    def __getitem__(self, grid):
        return lambda *args, **kw: self.built.append(self.kernel.warmup(*args, grid=grid, **(kw | self.options)))

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return "none"  # under which Triton remembers what it compiled

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """``compiled(kind, dtype, keys, place, params)``: the PTX of what `gpu.run` launches."""
    from triton.runtime import driver

    def ptx(kind, dtype, keys, place, params, **options):
        with monkeypatch.context() as patched:
            compiling = Compiling(triton_kernels.load(), options)
            patched.setattr(driver, "_active", compiling)
            patched.setattr(triton_kernels, "load", lambda: compiling)
            made(kind, dtype, keys, place, params)
        (built,) = compiling.built
        assert len(built.asm["cubin"]) > 0
        return built.asm["ptx"]

    return ptx


EACH = triton_launch.TILE // (4 * 32)  # elements of a thread, in programs of four warps


def float_operations(ptx):
    return Counter(
        re.findall(r"^\s*(?:@%p\d+\s+)?((?:fma|mad|mul|add|sub|div|sqrt|rsqrt|rcp|ex2|lg2)\.[\w.]*f32)\b", ptx, re.M)
    )


def fused_in_definition(kind, params, monkeypatch):
    """How often the torch definition fuses; products with 1 are left out, which a compiler may."""
    calls, fma = [], floats.fma

    def counted(a, b, c, out=None):
        calls.append(not a.numel() or not bool((a == 1).all()))  # of no element where none is in erfinv's tail
        return fma(a, b, c, out=out)

    low = torch.arange(64, dtype=torch.int32)
    with monkeypatch.context() as patched:
        patched.setattr(floats, "fma", counted)
        elementwise_draws.KINDS[kind][1](hash_words(1, 2, 0, low), torch.float32, params)
    return sum(calls)


FLOATS = ["uniform", "normal", "bernoulli", "exponential", "gumbel", "laplace", "logistic"]


@needs_triton
@pytest.mark.parametrize("kind", FLOATS)
def test_compiled_code_fuses_where_the_definition_does_and_nowhere_else(kind, compiled, monkeypatch):
    ptx = compiled(kind, torch.float32, KEYS[:1, :1], "long rows", params_of(kind))
    operations = float_operations(ptx)
    assert operations["fma.rn.f32"] == fused_in_definition(kind, params_of(kind), monkeypatch) * EACH
    rounded = {"fma.rn.f32", "mul.rn.f32", "add.rn.f32", "sub.rn.f32", "div.rn.f32", "sqrt.rn.f32"}
    assert set(operations) <= rounded  # nothing flushed to zero, nothing approximate, nothing left to be contracted
    assert ".ftz" not in ptx
    assert "approx" not in ptx


@needs_triton
def test_the_count_sees_contractions_where_they_are_allowed(compiled, monkeypatch):
    ptx = compiled("normal", torch.float32, KEYS[:1, :1], "long rows", (), enable_fp_fusion=True)
    operations = float_operations(ptx)
    assert operations["fma.rn.f32"] > fused_in_definition("normal", (), monkeypatch) * EACH
    assert {"mul.f32", "add.f32"} <= set(operations)  # which the assembler may contract


@needs_triton
@pytest.mark.parametrize("place", ["scalar", "one column", "listed both", "across 2**32"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["bits", "randint", "dropout"])
def test_every_form_of_launch_compiles(kind, count, place, compiled):
    dtype = {"bits": torch.uint64, "randint": torch.int64, "dropout": torch.bfloat16}[kind]
    ptx = compiled(kind, dtype, KEYS[:count, : streams_of(kind)], place, params_of(kind))
    assert ".target sm_90" in ptx


# What falls to torch ops


def test_a_draw_that_is_not_on_cuda_is_left_to_others():
    out = torch.empty(4)
    for kind, params, x in (("normal", (), None), ("dropout", (0.5, 2.0), torch.ones(4))):
        draw = Draw(kind, (4,), torch.float32, params)
        assert not triton_launch.draw(draw, KEYS[:1, :1], counters.whole((4,)), out, x)


@pytest.mark.parametrize(
    ("kind", "dtype", "params"),
    [("normal", torch.float64, ()), ("cauchy", torch.float32, ()), ("uniform", torch.float32, (1.0, 0.0))],
)
def test_what_the_kernel_does_not_know(kind, dtype, params):
    assert not triton_launch.knows(Draw(kind, (4,), dtype, params))


def failing(*_):
    raise OSError("no compiler")


@pytest.mark.parametrize(
    ("outcome", "fact"),
    [
        (lambda *_: True, "gives other bits than the torch definition"),
        (failing, "failed (OSError: no compiler)"),
    ],
)
def test_a_kernel_that_fails_its_self_test_is_not_used(outcome, fact, monkeypatch):
    monkeypatch.setattr(triton_launch, "differing", outcome)
    triton_launch.agrees.cache_clear()
    message = f"vescale_fn.random: Triton's normal of float32 on cpu {fact}, so it runs on torch ops"
    with pytest.warns(RuntimeWarning, match=re.escape(message) + "$"):
        assert not triton_launch.agrees(torch.device("cpu"), "normal", torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not triton_launch.agrees(torch.device("cpu"), "normal", torch.float32)  # said once
    triton_launch.agrees.cache_clear()


def test_importing_the_library_imports_the_kernels_without_triton():
    if not triton_launch.AVAILABLE:  # then this process could not have imported it
        assert triton_kernels.tl is None
        return
    code = "import vescale_fn.random.backends.triton_launch, vescale_fn.random.backends.triton_kernels as k; assert k.tl is None"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parent)
    assert ran.returncode == 0, ran.stderr


# On a GPU


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("keys_device", ["cpu", "cuda"])
@pytest.mark.parametrize(("kind", "dtype"), [*CASES, *DROPS], ids=lambda v: v if isinstance(v, str) else name(v))
def test_on_a_gpu_the_kernel_has_the_bits_of_the_definition(kind, dtype, keys_device):
    assert triton_launch.agrees(torch.device("cuda", 0), kind, dtype)
    for place in PLACES:
        for count in (1, 3):
            keys, params = KEYS[:count, : streams_of(kind)], params_of(kind)
            got = made(kind, dtype, keys, place, params, "cuda", keys_device)
            assert same(got, expected(kind, dtype, keys, place, params)), (place, count)


@pytest.mark.gpu
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: d.id)
def test_on_a_gpu_distributions_have_the_bits_of_the_cpu(distribution):
    if any(isinstance(v, list) for v in distribution.params.values()):
        pytest.skip("its parameters are tensors, which lie on the CPU here")
    key = vfn.random.key(17)
    on_cpu = distribution(key, (1000,))
    with torch.device("cuda"):
        on_gpu = distribution(key, (1000,))
    assert on_gpu.device.type == "cuda"
    if distribution.vector:  # sums and products of matrices are the device's own
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-5, atol=1e-6)
    else:
        assert same(on_gpu.contiguous(), on_cpu.contiguous())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_key_on_a_gpu_does_not_synchronise():
    key = vfn.random.key(3)
    there = vfn.random.wrap_key_data(vfn.random.key_data(key).cuda())
    x = torch.ones(1000, device="cuda", dtype=torch.bfloat16)

    def drawn():
        first, second = vfn.random.split(there)
        return [
            vfn.random.normal(first, (1000,)),
            vfn.random.uniform(second, (30, 50)),
            vfn.random.randint(first, (7,), 0, 10),
            vfn.random.dropout(second, x, 0.3),
        ]

    before = drawn()  # with the self-tests, which wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        after = drawn()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(before, after))
