"""From hashed counters to values: one small function for each kind of draw that is made element by element.

A kind gets the two hash words of each element (int32, its own to overwrite), the dtype and the parameters, which are
plain numbers. The recipes are those of `jax.random`, so that the same key gives the same numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..._core import torch_internals
from ..._core.base.dtypes import FLOATS, INTEGERS
from . import floats, more_floats

Words = tuple[torch.Tensor, torch.Tensor]
Number = int | float


class Draw(NamedTuple):
    """What is drawn, before it is said where: an entry of `KINDS`, the whole shape, the dtype, the kind's parameters."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    params: tuple[Number, ...] = ()


# the width, and the dtype of the same width that torch computes with
BITS = {
    torch.uint8: (8, torch.uint8),
    torch.uint16: (16, torch.int16),
    torch.uint32: (32, torch.int32),
    torch.uint64: (64, torch.int64),
    torch.int32: (32, torch.int32),
    torch.int64: (64, torch.int64),
}


def as_integers(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Floats as integers, as XLA converts them: what does not fit becomes the nearest that does, and NaN becomes 0."""
    info = torch.iinfo(dtype)
    above, below = x >= float(info.max + 1), x < float(info.min)
    inside = torch.where(above | below | x.isnan(), 0, x).to(dtype)
    return torch.where(above, info.max, torch.where(below, info.min, inside))


def word(words: Words, width: int) -> torch.Tensor:
    """`width` random bits an element: both hash words one after the other, or the low bits of their exclusive or."""
    first, second = words
    if width == 64:
        return (first.to(torch.int64) << 32).bitwise_or_(second.to(torch.int64).bitwise_and_(0xFFFFFFFF))
    return first.bitwise_xor_(second)


def bits(words: Words, dtype: torch.dtype, params: Sequence[Number]) -> torch.Tensor:
    """Integers of all their bits."""
    width, computed = BITS[dtype]
    return word(words, width).to(computed).view(dtype)


def unit(words: Words, dtype: torch.dtype) -> torch.Tensor:
    """Uniform on [0, 1): random mantissa bits under the exponent of [1, 2), less one."""
    mantissa, width, computed, one, *_ = FLOATS[dtype]
    drawn = (word(words, width) >> (width - mantissa)).bitwise_and_((1 << mantissa) - 1).bitwise_or_(one)
    return drawn.to(computed).view(dtype).sub_(1)


def uniform(words: Words, dtype: torch.dtype, params: Sequence[Number]) -> torch.Tensor:
    """Uniform on [low, high)."""
    low, high = params
    u = unit(words, dtype)
    if (low, high) == (0, 1):
        return u
    low, high = floats.constant(low, u), floats.constant(high, u)
    scaled = floats.fma(u, high - low, low) if is_wide(dtype) else u * (high - low) + low
    return torch.maximum(scaled, low) if params[1] < params[0] else scaled


def is_wide(dtype: torch.dtype) -> bool:
    """Whether `uniform` scales with a fused multiply-add: as `jax` compiles it on a CPU."""
    return dtype in (torch.float32, torch.float64)


def between(u: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """What `uniform` makes of a draw on [0, 1), for bounds that are tensors; differentiable in them."""
    scaled = floats.fma_with_gradients(u, high - low, low) if is_wide(u.dtype) else u * (high - low) + low
    return torch.maximum(scaled, low)


def normal(words: Words, dtype: torch.dtype, params: Sequence[Number]) -> torch.Tensor:
    """The standard normal: sqrt(2) erfinv(u) for u uniform on (-1, 1). 16-bit dtypes pass through float32."""
    just_above_minus_one = math.nextafter(-1.0, 0.0) if dtype == torch.float64 else -1 + torch.finfo(dtype).eps / 2
    u = uniform(words, dtype, (just_above_minus_one, 1.0))
    wide = u if dtype == torch.float64 else u.float()
    return floats.erfinv(wide).to(dtype).mul_(floats.constant(math.sqrt(2), u))


def bernoulli(words: Words, dtype: torch.dtype, params: Sequence[Number]) -> torch.Tensor:
    """True with probability p: where a uniform draw of `dtype` is below p."""
    u = unit(words, dtype)
    return u < floats.constant(params[0], u)


def rademacher(words: Words, dtype: torch.dtype, params: Sequence[Number]) -> torch.Tensor:
    """1 or -1: by the top bit, as a fair `bernoulli` of float32; of float64 for the dtypes that JAX needs x64 for."""
    width = 64 if dtype in (torch.float64, torch.int64) else 32
    return (word(words, width) >> (width - 1)).bitwise_or_(1).to(dtype)


def through(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A function of `floats`; of 16-bit numbers through float32."""
    return function(x) if is_wide(x.dtype) else function(x.float()).to(x.dtype)


def exponential(words: Words, dtype: torch.dtype, params: Sequence[Number]) -> torch.Tensor:
    """-log(1 - u)."""
    return through(floats.log1p, unit(words, dtype).neg_()).neg_()


def open_unit(words: Words, dtype: torch.dtype) -> torch.Tensor:
    """Uniform on (0, 1): the smallest normal number instead of 0."""
    return unit(words, dtype).clamp_(min=torch.finfo(dtype).smallest_normal)


def gumbel(words: Words, dtype: torch.dtype, params: Sequence[Number]) -> torch.Tensor:
    """-log(-log(u))."""
    return through(floats.log, through(floats.log, open_unit(words, dtype)).neg_()).neg_()


def laplace(words: Words, dtype: torch.dtype, params: Sequence[Number]) -> torch.Tensor:
    """The logarithm of the distance of u, uniform on (-1, 1), from the end on its side; with the sign of u."""
    u = uniform(words, dtype, (-1 + torch.finfo(dtype).eps / 2, 1.0))
    return through(floats.log1p, u.abs().neg_()).mul_(u.sign())


def logistic(words: Words, dtype: torch.dtype, params: Sequence[Number]) -> torch.Tensor:
    """log(u) - log(1 - u)."""
    u = open_unit(words, dtype)
    return through(floats.log, u).sub_(through(floats.log1p, -u))


def cauchy(words: Words, dtype: torch.dtype, params: Sequence[Number]) -> torch.Tensor:
    """tan(pi * (u - 1/2))."""
    u = uniform(words, dtype, (torch.finfo(dtype).eps, 1.0)).sub_(0.5)
    return through(more_floats.tan, u.mul_(floats.constant(math.pi, u)))


def truncated_normal(words: Words, dtype: torch.dtype, params: Sequence[Number]) -> torch.Tensor:
    """The standard normal between two numbers: sqrt(2) erfinv(u) for u uniform between their values of erf."""
    low, high, least, most = truncation(*params, dtype)
    x = through(more_floats.erfinv, uniform(words, dtype, (low, high)))
    return x.mul_(floats.constant(math.sqrt(2), x)).clamp_(least, most)


@functools.lru_cache(maxsize=1024)
@torch_internals.never_recorded
def truncation(lower: float, upper: float, dtype: torch.dtype) -> tuple[float, ...]:
    """Between which uniform numbers to draw, and the least and the largest result, for a truncated normal."""
    bounds = torch.tensor([lower, upper], dtype=dtype, device="cpu")
    u = through(more_floats.erf, bounds / torch.tensor(math.sqrt(2), dtype=dtype, device="cpu"))
    return *u.tolist(), more_floats.above(bounds[:1]).item(), more_floats.below(bounds[1:]).item()


def randint(higher: Words, lower: Words, dtype: torch.dtype, params: Sequence[Number]) -> torch.Tensor:
    """Integers from `low` on, out of `span` (0 stands for all of them), from twice the bits of one."""
    width = max(32, INTEGERS[dtype])
    low, span, factor = (int(p) for p in params)
    return modulo_offset(word(higher, width), word(lower, width), low, span, factor, width).to(dtype)


def integer_range(low: int, high: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(low, span, factor) of `randint`, as int64s that hold the bits, for bounds of any size."""
    info, width = torch.iinfo(dtype), max(32, INTEGERS[dtype])
    beyond = high > info.max
    low, high = (min(max(bound, info.min), info.max) for bound in (low, high))
    span = (high - low + beyond) % (1 << width) if high > low else 1
    factor = _power(1 << width // 2, span, width)
    return _int64(low), _int64(span), _int64(factor)


def _power(half: int, span: int, width: int) -> int:
    """2**width % span as `jax` has it: the square of 2**(width/2) % span wraps before its remainder is taken."""
    rest = half if span == 0 else half % span
    square = rest * rest % (1 << width)
    return square if span == 0 else square % span


def _int64(bits: int) -> int:
    bits %= 1 << 64
    return bits - (1 << 64) if bits >> 63 else bits


def integer_ranges(low: torch.Tensor, high: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Any, Any]:
    """`integer_range` for tensors of bounds."""
    info, width = torch.iinfo(dtype), max(32, INTEGERS[dtype])
    rest = remainder if width == 32 else unsigned_remainder
    low, high = low.to(torch.int64), high.to(torch.int64)
    largest = min(info.max, torch.iinfo(torch.int64).max)
    beyond = high > largest
    low, high = low.clamp(info.min, largest), high.clamp(info.min, largest)
    span = torch.where(high > low, high - low + beyond.to(torch.int64), 1)
    span = span & 0xFFFFFFFF if width == 32 else span
    half = rest(torch.full_like(span, 1 << width // 2), span)
    square = half * half
    return low, span, rest(square & 0xFFFFFFFF if width == 32 else square, span)


def modulo_offset(higher: torch.Tensor, lower: torch.Tensor, low: Any, span: Any, factor: Any, width: int) -> Any:
    """``low + (higher * 2**width + lower) % span`` in wrapping unsigned arithmetic of `width` bits; as int64.

    `factor` is ``2**width % span``. `low`, `span` and `factor` are ints or int64 tensors; 64-bit ones hold the bits.
    """
    if width == 32:
        higher, lower = (x.to(torch.int64) & 0xFFFFFFFF for x in (higher, lower))
        rest = lambda x: remainder(x & 0xFFFFFFFF, span)
    else:
        rest = lambda x: unsigned_remainder(x, span)
    return rest(rest(higher) * factor + rest(lower)) + low


def remainder(x: torch.Tensor, span: Any) -> torch.Tensor:
    """x % span for 0 <= x, span; x itself where span is 0."""
    if not isinstance(span, torch.Tensor):
        return x if span == 0 else x % span
    return torch.where(span == 0, x, x % torch.where(span == 0, 1, span))


def unsigned_remainder(x: torch.Tensor, span: Any) -> torch.Tensor:
    """x % span where the bits of both int64s are read as unsigned.

    A span with its top bit set goes into x once or not at all. Else half of x is not negative, so its remainder is
    right; twice that, and the last bit, is below 2 * span. Source: Warren, Hacker's Delight (unsigned division).
    """
    least = torch.iinfo(torch.int64).min
    not_below = lambda a, b: (a ^ least) >= (b ^ least)
    if not isinstance(span, torch.Tensor):
        span = torch.tensor(span, device=x.device)
    big = torch.where(not_below(x, span), x - span, x)
    halved = (x >> 1) & torch.iinfo(torch.int64).max
    small = (halved % torch.where(span <= 0, 1, span) << 1) + (x & 1)
    small = torch.where(not_below(small, span), small - span, small)
    return torch.where(span == 0, x, torch.where(span < 0, big, small))


KINDS: dict[str, tuple[int, Callable[..., torch.Tensor]]] = {  # how many streams of words the function takes
    "bits": (1, bits),
    "uniform": (1, uniform),
    "normal": (1, normal),
    "bernoulli": (1, bernoulli),
    "randint": (2, randint),
    "rademacher": (1, rademacher),
    "exponential": (1, exponential),
    "gumbel": (1, gumbel),
    "laplace": (1, laplace),
    "logistic": (1, logistic),
    "cauchy": (1, cauchy),
    "truncated_normal": (1, truncated_normal),
}


def result_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of what a kind draws with `dtype`."""
    return torch.bool if kind == "bernoulli" else dtype
