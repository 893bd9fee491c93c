"""The draws as Triton kernels: what one program on a GPU computes, with the bits of the torch definition.

These are plain functions until `load` has imported Triton and compiled each of them: importing Triton takes a second,
and only who draws on a GPU pays it. `load` also wraps the constants, which Triton reads only as `tl.constexpr`.

The bits are those of the torch definition, so the same steps are here under the same names. A product is fused with a sum
where `tl.fma` says so and nowhere else (the caller compiles with ``enable_fp_fusion=False``); quotients and roots are
rounded correctly (`div_rn`, `sqrt_rn`). Words are uint32, which Triton shifts and compares without their sign.
"""

# pyright: reportInvalidTypeForm=false
# (Triton reads the annotation `tl.constexpr` as text; to pyright `tl` is a variable)

from __future__ import annotations

import importlib
import math
from typing import Any

from ..generators.floats import (
    ERFINV_CENTRE,
    ERFINV_TAIL,
    LN2_HIGH,
    LN2_LOW,
    LOG1P_BOTTOM,
    LOG1P_TOP,
    LOG_HIGH,
    LOG_LOW,
    LOG_MIDDLE,
)
from ..generators.threefry import PARITY, ROTATIONS

SQRT_HALF = 0x3F3504F3  # as bits of float32
NEAR = math.sqrt(2) - 1
SQRT2 = math.sqrt(2)
SMALLEST = 2.0**-126  # normal number
ABOVE_MINUS_ONE = -1 + 2.0**-24

tl: Any = None  # triton.language


def rotated(x, r: tl.constexpr):
    return (x << r) | (x >> (32 - r))


def hashed(k0, k1, x0, x1):
    """Threefry-2x32 with 20 rounds: both words."""
    schedule = (k0, k1, k0 ^ k1 ^ PARITY)
    x0 += k0
    x1 += k1
    for i in tl.static_range(5):
        for j in tl.static_range(4):
            x0 += x1
            x1 = rotated(x1, ROTATIONS[i % 2][j]) ^ x0
        x0 += schedule[(i + 1) % 3]
        x1 += schedule[(i + 2) % 3] + (i + 1)
    return x0, x1


def word(first, second, width: tl.constexpr):
    if width == 64:
        return (first.to(tl.uint64) << 32) | second.to(tl.uint64)
    else:
        return first ^ second


def minus(x):
    return x * -1.0  # -x is 0 - x to Triton, which is another zero than the negative of 0


def polynomial(x, table: tl.constexpr, n: tl.constexpr):
    """Horner's rule, highest power first, fused at each step."""
    y = tl.full(x.shape, table[0], tl.float32)
    for i in tl.static_range(1, n):
        y = tl.fma(y, x, table[i])
    return y


def log(x):
    bits = x.to(tl.int32, bitcast=True) - SQRT_HALF
    exponent = (bits >> 23).to(tl.float32)
    m = ((bits & 0x007FFFFF) + SQRT_HALF).to(tl.float32, bitcast=True) - 1.0
    square = m * m
    cube = square * m
    y = tl.fma(polynomial(m, LOG_HIGH, 3), cube, polynomial(m, LOG_MIDDLE, 3))
    y = tl.fma(y, cube, polynomial(m, LOG_LOW, 3))
    y = tl.fma(y, cube, exponent * LN2_LOW)
    y += square * -0.5 + m
    return tl.fma(exponent, LN2_HIGH, y)


def log1p(x):
    square = x * x
    ratio = tl.div_rn(polynomial(x, LOG1P_TOP, 7), polynomial(x, LOG1P_BOTTOM, 7))
    near = tl.fma(square, -0.5, ratio * (x * square)) + x
    return tl.where(tl.abs(x) < NEAR, near, log(x + 1.0))


def erfinv(x):
    w = minus(log1p(minus(x * x)))
    tail = polynomial(tl.sqrt_rn(w) - 3.0, ERFINV_TAIL, 9)
    return tl.where(w < 5.0, polynomial(w - 2.5, ERFINV_CENTRE, 9), tail) * x


def unit(first, second):
    """Uniform on [0, 1): 23 random bits under the exponent of [1, 2), less one."""
    return (((first ^ second) >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0


def remainder(x, span):
    return tl.where(span == 0, x, x % tl.where(span == 0, 1, span))


def modulo_offset(higher, lower, low, span, factor):
    return remainder(remainder(higher, span) * factor + remainder(lower, span), span) + low


def value(first, second, third, fourth, x, a, b, c, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """One element from its hash words: a draw, or what a dropout makes of `x`; a, b and c are the parameters."""
    if KIND == "bits":
        return word(first, second, WIDTH)
    elif KIND == "rademacher":
        return ((first ^ second) >> 31).to(tl.int32) * -2 + 1
    elif KIND == "randint":
        # a to c hold the bits of (low, span, factor), which a wider word extends by their sign
        higher, lower = word(first, second, WIDTH), word(third, fourth, WIDTH)
        return modulo_offset(higher, lower, a.to(higher.dtype), b.to(higher.dtype), c.to(higher.dtype))
    else:
        u = unit(first, second)
        if KIND == "unit":
            return u
        elif KIND == "uniform":
            return tl.fma(u, b, a)
        elif KIND == "normal":
            return erfinv(tl.fma(u, 2.0, ABOVE_MINUS_ONE)) * SQRT2
        elif KIND == "bernoulli":
            return u < a
        elif KIND == "dropout":
            return tl.where(u < a, x * b, 0.0)
        elif KIND == "exponential":
            return minus(log1p(minus(u)))
        elif KIND == "gumbel":
            return minus(log(minus(log(tl.maximum(u, SMALLEST)))))
        elif KIND == "laplace":
            u = tl.fma(u, 2.0, ABOVE_MINUS_ONE)
            return log1p(minus(tl.abs(u))) * tl.where(u < 0, -1.0, 1.0)
        else:
            tl.static_assert(KIND == "logistic")
            u = tl.maximum(u, SMALLEST)
            return log(u) - log1p(minus(u))


def kernel(
    out,
    x,
    keys,
    k0,
    k1,
    bases,
    inner,
    first,
    rows,
    n,
    total,
    a,
    b,
    c,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    STREAMS: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """A tile of the result, which is [keys * rows, n]: DOWN of its rows, ACROSS columns.

    The counter of an element is ``bases[row] + first + column``, or ``bases[row] + inner[column]``. Pointers may be
    None: `keys` where k0 and k1 are the key, `bases` where there is one row, `inner` where columns are neighbours.
    """
    across = tl.cdiv(n, ACROSS)
    tile = tl.program_id(0).to(tl.int64)
    row = (tile // across * DOWN + tl.arange(0, DOWN))[:, None]
    column = (tile % across * ACROSS + tl.arange(0, ACROSS))[None, :]
    inside = (row < total) & (column < n)
    at = row * n + column
    if inner is None:
        counter = column + first
    else:
        counter = tl.load(inner + column, mask=column < n, other=0)
    if bases is not None:
        counter += tl.load(bases + (row if keys is None else row % rows), mask=row < total, other=0)
    high = tl.broadcast_to((counter >> 32).to(tl.uint32), (DOWN, ACROSS))
    low = tl.broadcast_to(counter.to(tl.uint32), (DOWN, ACROSS))
    if keys is None:
        y0, y1 = hashed(k0.to(tl.uint32), k1.to(tl.uint32), high, low)
        z0, z1 = y0, y1
    else:
        key = keys + row // rows * (2 * STREAMS)
        y0, y1 = hashed(key_word(key, 0, row < total), key_word(key, 1, row < total), high, low)
        z0, z1 = y0, y1
        if STREAMS == 2:
            z0, z1 = hashed(key_word(key, 2, row < total), key_word(key, 3, row < total), high, low)
    given = 0.0
    if x is not None:
        given = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    y = value(y0, y1, z0, z1, given, a, b, c, KIND, WIDTH)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def key_word(key, i: tl.constexpr, there):
    return tl.load(key + i, mask=there, other=0).to(tl.uint32)


FUNCTIONS = (
    rotated,
    hashed,
    word,
    minus,
    polynomial,
    log,
    log1p,
    erfinv,
    unit,
    remainder,
    modulo_offset,
    value,
    key_word,
)
CONSTANTS = (
    "PARITY",
    "ROTATIONS",
    "LOG_HIGH",
    "LOG_MIDDLE",
    "LOG_LOW",
    "LN2_HIGH",
    "LN2_LOW",
    "LOG1P_TOP",
    "LOG1P_BOTTOM",
    "ERFINV_CENTRE",
    "ERFINV_TAIL",
    "SQRT_HALF",
    "NEAR",
    "SQRT2",
    "SMALLEST",
    "ABOVE_MINUS_ONE",
)
VARYING = ("k0", "k1", "first", "a", "b", "c")  # of any value, without a kernel of its own


def load() -> Any:
    """The kernel. At the first call: import Triton, and hand it the functions above (it compiles them when launched)."""
    here = globals()
    if tl is None:
        triton, here["tl"] = importlib.import_module("triton"), importlib.import_module("triton.language")
        here |= {name: here["tl"].constexpr(here[name]) for name in CONSTANTS}
        here |= {function.__name__: triton.jit(function) for function in FUNCTIONS}
        here["kernel"] = triton.jit(kernel, do_not_specialize=VARYING)
    return kernel
