"""The float functions that draws need, with the same bits on every machine: own polynomials, fused in fixed places.

torch's `erfinv`, `log1p` and `sqrt` give other last bits on other builds and devices, and a draw must not. Each product
that is added to something is *fused* (rounded once) exactly where it is written `fma`, and nowhere else; with these
places float32 results equal those of `jax` on a CPU.

Sources: Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011); Moshier's Cephes library (`logf`,
`log` and `log1p`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..._core import torch_internals

LOG_HIGH = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1)
LOG_MIDDLE = (-1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1)
LOG_LOW = (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4

LOG64_TOP = (
    1.01875663804580931796e-4,
    4.97494994976747001425e-1,
    4.70579119878881725854,
    1.44989225341610930846e1,
    1.79368678507819816313e1,
    7.70838733755885391666,
)
LOG64_BOTTOM = (
    1.0,
    1.12873587189167450590e1,
    4.52279145837532221105e1,
    8.29875266912776603211e1,
    7.11544750618563894466e1,
    2.31251620126765340583e1,
)
LN2_LOW64 = -2.121944400546905827679e-4

LOG1P_TOP = (
    4.5270000862445199635215e-5,
    4.9854102823193375972212e-1,
    6.5787325942061044846969,
    2.9911919328553073277375e1,
    6.0949667980987787057556e1,
    5.7112963590585538103336e1,
    2.0039553499201281259648e1,
)
LOG1P_BOTTOM = (
    1.0,
    1.5062909083469192043167e1,
    8.3047565967967209469434e1,
    2.2176239823732856465394e2,
    3.0909872225312059774938e2,
    2.1642788614495947685003e2,
    6.0118660497603843919306e1,
)

ERFINV_CENTRE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
ERFINV_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)

# In float64 the three pieces are w < 6.25, w < 16 and the rest.
ERFINV64 = (
    (
        3.125,
        (
            -3.6444120640178196996e-21,
            -1.685059138182016589e-19,
            1.2858480715256400167e-18,
            1.115787767802518096e-17,
            -1.333171662854620906e-16,
            2.0972767875968561637e-17,
            6.6376381343583238325e-15,
            -4.0545662729752068639e-14,
            -8.1519341976054721522e-14,
            2.6335093153082322977e-12,
            -1.2975133253453532498e-11,
            -5.4154120542946279317e-11,
            1.051212273321532285e-09,
            -4.1126339803469836976e-09,
            -2.9070369957882005086e-08,
            4.2347877827932403518e-07,
            -1.3654692000834678645e-06,
            -1.3882523362786468719e-05,
            0.0001867342080340571352,
            -0.00074070253416626697512,
            -0.0060336708714301490533,
            0.24015818242558961693,
            1.6536545626831027356,
        ),
    ),
    (
        3.25,
        (
            2.2137376921775787049e-09,
            9.0756561938885390979e-08,
            -2.7517406297064545428e-07,
            1.8239629214389227755e-08,
            1.5027403968909827627e-06,
            -4.013867526981545969e-06,
            2.9234449089955446044e-06,
            1.2475304481671778723e-05,
            -4.7318229009055733981e-05,
            6.8284851459573175448e-05,
            2.4031110387097893999e-05,
            -0.0003550375203628474796,
            0.00095328937973738049703,
            -0.0016882755560235047313,
            0.0024914420961078508066,
            -0.0037512085075692412107,
            0.005370914553590063617,
            1.0052589676941592334,
            3.0838856104922207635,
        ),
    ),
    (
        5.0,
        (
            -2.7109920616438573243e-11,
            -2.5556418169965252055e-10,
            1.5076572693500548083e-09,
            -3.7894654401267369937e-09,
            7.6157012080783393804e-09,
            -1.4960026627149240478e-08,
            2.9147953450901080826e-08,
            -6.7711997758452339498e-08,
            2.2900482228026654717e-07,
            -9.9298272942317002539e-07,
            4.5260625972231537039e-06,
            -1.9681778105531670567e-05,
            7.5995277030017761139e-05,
            -0.00021503011930044477347,
            -0.00013871931833623122026,
            1.0103004648645343977,
            4.8499064014085844221,
        ),
    ),
)


def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float, out: Any = None) -> torch.Tensor:
    """``a * b + c``, rounded once (float32 always; float64 wherever the machine can); perhaps written into `out`."""
    b, c = constant(b, a), constant(c, a)
    if addcmul_is_fused(a.device, a.dtype):
        return torch.addcmul(c, a, b, out=out)
    return fma_float32(a, b, c) if a.dtype == torch.float32 else fma_compensated(a, b, c)


def fma_with_gradients(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """`fma` outside of operators, where gradients, transforms and arrays pass through."""
    if addcmul_is_fused(a.device, a.dtype):
        return torch.addcmul(c, a, b)
    rounded_twice = a * b + c  # its gradient is right, and its value is taken away again
    return fma(a.detach(), b.detach(), c.detach()) + (rounded_twice - rounded_twice.detach())


def fma_float32(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The exact `fma` of float32, in float64: the product is exact there, and the sum is rounded to odd.

    Rounding to odd (an inexact sum gets an odd last bit) keeps enough to make the second rounding, to float32, right.
    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums" (2008).
    """
    product, c = a.double() * b.double(), c.double()
    total, lost = _two_sum(product, c)
    bits = total.view(torch.int64)
    step = torch.where((lost > 0) == (total > 0), 1, -1)
    nudge = (lost != 0) & (bits & 1 == 0) & total.isfinite()
    return (bits + torch.where(nudge, step, 0)).view(torch.float64).float()


def fma_compensated(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` with the rounding errors of both steps added back: float64's `fma`, up to rare last bits."""
    split = 134217729.0  # 2**27 + 1, of Dekker's product
    product = a * b
    t, s = a * split, b * split
    a_high, b_high = t - (t - a), s - (s - b)
    a_low, b_low = a - a_high, b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    total, lost = _two_sum(product, c)
    return total + (lost + error)


def _two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded sum, and exactly what the rounding lost. Source: Knuth, The Art of Computer Programming, volume 2."""
    total = a + b
    bb = total - a
    return total, (a - (total - bb)) + (b - bb)


@functools.lru_cache(maxsize=64)
def addcmul_is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `torch.addcmul` rounds once on this device: seen on lengths with a tail, scalars, and strides."""
    if device.type == "meta":
        return True
    e = 2.0 ** (-12 if dtype == torch.float32 else -27)  # (1 + e)**2 = 1 + 2e + e**2, and e**2 is the bit in question
    a = torch.full((2 * 67,), 1 + e, dtype=dtype, device=device)
    c = torch.full_like(a, -(1 + 2 * e))
    forms = [(c, a, a), (c[0], a, a), (c, a, a[0]), (c[::2], a[::2], a[1::2]), (c[0], a[0], a[0])]
    return all(bool((torch.addcmul(*form) == e * e).all()) for form in forms)


for _dtype in (torch.float32, torch.float64):
    addcmul_is_fused(torch.device("cpu"), _dtype)  # now, where no mode watches


@functools.lru_cache(maxsize=1024)
@torch_internals.never_recorded
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def constant(value: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """`value` as a 0-d tensor like `like` (made once)."""
    return value if isinstance(value, torch.Tensor) else _constant(value, like.dtype, like.device)


def polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """Horner's rule, highest power first, fused at each step."""
    y = fma(torch.full_like(x, coefficients[0]), x, coefficients[1])
    for c in coefficients[2:]:
        y = fma(y, x, c, out=y)
    return y


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded root: by numpy on a CPU, where torch's is off by one bit here and there."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def below(x: torch.Tensor, bound: float) -> torch.Tensor:
    """Where float32 numbers, none negative, are below `bound`: int32 of all ones, or zero.

    The bits of such numbers are in the order of the numbers. Masks of bits are many times faster than torch's booleans.
    """
    return (x.view(torch.int32) - constant(bound, x).view(torch.int32)).bitwise_right_shift_(31)


def select(mask: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x where the mask has ones, y where it has zeros; float32."""
    x, y = x.view(torch.int32), y.view(torch.int32)
    return x.bitwise_xor(y).bitwise_and_(mask).bitwise_xor_(y).view(torch.float32)


def log(x: torch.Tensor) -> torch.Tensor:
    """log of positive, normal numbers: the mantissa in [sqrt(1/2), sqrt(2)), then a polynomial of it less one."""
    if x.dtype == torch.float64:
        return _log64(x)
    lowest = 0x3F3504F3  # sqrt(1/2) as bits: subtracting it makes the exponent change there
    bits = x.view(torch.int32) - lowest
    exponent = (bits >> 23).to(torch.float32)
    m = bits.bitwise_and_(0x007FFFFF).add_(lowest).view(torch.float32).sub_(1)
    square = m * m
    cube = square * m
    y = fma(polynomial(m, LOG_HIGH), cube, polynomial(m, LOG_MIDDLE))
    y = fma(y, cube, polynomial(m, LOG_LOW), out=y)
    y = fma(y, cube, exponent * LN2_LOW, out=y)
    y.add_(square.mul_(-0.5).add_(m))  # half the square is exact
    return fma(exponent, LN2_HIGH, y, out=y)


def _log64(x: torch.Tensor) -> torch.Tensor:
    lowest = 0x3FE6A09E667F3BCD  # sqrt(1/2)
    bits = x.view(torch.int64) - lowest
    exponent = (bits >> 52).to(torch.float64)
    m = bits.bitwise_and_(0x000FFFFFFFFFFFFF).add_(lowest).view(torch.float64).sub_(1)
    square = m * m
    ratio = polynomial(m, LOG64_TOP).div_(polynomial(m, LOG64_BOTTOM))
    y = ratio.mul_(m * square)
    y = fma(exponent, LN2_LOW64, y)
    y = fma(square, -0.5, y)
    return fma(exponent, LN2_HIGH, y.add_(m))


def log1p(x: torch.Tensor) -> torch.Tensor:
    """log(1 + x) for x > -1, float32 or float64: a rational function near zero, `log` elsewhere."""
    square = x * x
    ratio = polynomial(x, LOG1P_TOP).div_(polynomial(x, LOG1P_BOTTOM))
    near = fma(square, -0.5, ratio.mul_(x * square)).add_(x)
    if x.dtype == torch.float32:
        return select(below(x.abs(), math.sqrt(2) - 1), near, log(x + 1))
    return torch.where(x.abs() < math.sqrt(2) - 1, near, log(x + 1))


def erfinv(x: torch.Tensor) -> torch.Tensor:
    """The inverse of the error function on (-1, 1), float32 or float64."""
    w = log1p((x * x).neg_()).neg_()
    if x.dtype == torch.float64:
        (s0, p0), (s1, p1), (s2, p2) = ERFINV64
        root = sqrt(w)
        outer = torch.where(w < 16, polynomial(root - s1, p1), polynomial(root - s2, p2))
        return torch.where(w < 6.25, polynomial(w - s0, p0), outer).mul_(x)
    y = polynomial(w - 2.5, ERFINV_CENTRE)
    tail = lambda w: polynomial(sqrt(w) - 3, ERFINV_TAIL)
    if w.device.type == "cpu":  # one element in 300 is in the tail
        at = torch.from_numpy(np.flatnonzero(w.numpy() >= 5))
        y.view(-1)[at] = tail(w.view(-1)[at])
        return y.mul_(x)
    return select(below(w, 5.0), y, tail(w)).mul_(x)
