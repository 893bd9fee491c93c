"""More float functions with the same bits on every machine: exp, powers, erf, tan, lgamma.

Where `floats` has what the most used draws need, these serve the others. Powers and tangents of float32 are computed
in float64 and rounded once. `extended` gives each function its values at 0, infinity and beyond its domain, and
the 16-bit dtypes, which pass through float32.

Sources: Moshier's Cephes library (`expf`, `exp`, `tan`, `erf`); Lanczos, "A precision approximation of the gamma
function" (SIAM 1964), with g = 7; the rational erf of float32 is Eigen's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from . import floats
from .floats import fma, polynomial

EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
EXP64_TOP = (1.26177193074810590878e-4, 3.02994407707441961300e-2, 1.0)
EXP64_BOTTOM = (3.00198505138664455042e-6, 2.52448340349684104192e-3, 2.27265548208155028766e-1, 2.0)
LN2_HIGH64, LN2_LOW64 = 6.93145751953125e-1, 1.42860682030941723212e-6

ERF_TOP = (0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861, 0.18520832239976145, 1.128379143519084)
ERF_BOTTOM = (
    -1.1791602954361697e-7,
    0.000023547966471313185,
    0.0010179625278914885,
    0.014070470171167667,
    0.11098505178285362,
    0.49746925110067538,
    1.0,
)
ERF_LARGEST = 3.832506856900711
ERF64_TOP = (
    9.60497373987051638749,
    9.00260197203842689217e1,
    2.23200534594684319226e3,
    7.00332514112805075473e3,
    5.55923013010394962768e4,
)
ERF64_BOTTOM = (
    1.0,
    3.35617141647503099647e1,
    5.21357949780152679795e2,
    4.59432382970980127987e3,
    2.26290000613890934246e4,
    4.92673942608635921086e4,
)
ERFC64_TOP = (
    2.46196981473530512524e-10,
    5.64189564831068821977e-1,
    7.46321056442269912687,
    4.86371970985681366614e1,
    1.96520832956077098242e2,
    5.26445194995477358631e2,
    9.34528527171957607540e2,
    1.02755188689515710272e3,
    5.57535335369399327526e2,
)
ERFC64_BOTTOM = (
    1.0,
    1.32281951154744992508e1,
    8.67072140885989742329e1,
    3.54937778887819891062e2,
    9.75708501743205489753e2,
    1.82390916687909736289e3,
    2.24633760818710981792e3,
    1.65666309194161350182e3,
    5.57535340817727675546e2,
)

TAN_TOP = (-1.30936939181383734205e4, 1.15351664838587416140e6, -1.79565251976484877988e7)
TAN_BOTTOM = (
    1.0,
    1.36812963470692954678e4,
    -1.32089234440210967447e6,
    2.50083801823357915839e7,
    -5.38695755929454629881e7,
)
QUARTER_PI = (7.853981554508209228515625e-1, 7.94662735614792836714e-9, 3.06161699786838294307e-17)  # their sum

LANCZOS = (
    676.520368121885098567009190444019,
    -1259.13921672240287047156078755283,
    771.3234287776530788486528258894,
    -176.61502916214059906584551354,
    12.507343278686904814458936853,
    -0.13857109526572011689554707,
    9.984369578019570859563e-6,
    1.50563273514931155834e-7,
)


def exp(x: torch.Tensor) -> torch.Tensor:
    """exp of numbers whose exp is neither tiny nor huge, float32 or float64."""
    n = fma(x, math.log2(math.e), floats.constant(0.5, x).expand_as(x)).floor_()
    if x.dtype == torch.float64:
        r = fma(n, -LN2_LOW64, fma(n, -LN2_HIGH64, x))
        square = r * r
        top = polynomial(square, EXP64_TOP).mul_(r)
        y = top.div_(polynomial(square, EXP64_BOTTOM) - top).mul_(2).add_(1)
        return _scaled(y, n)
    r = fma(n, -floats.LN2_LOW, fma(n, -floats.LN2_HIGH, x))
    return _scaled(fma(polynomial(r, EXP), r * r, r).add_(1), n)


def _scaled(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """y * 2**n, in two steps, because 2**n alone may be beyond the normal numbers."""
    half = (n * 0.5).floor_()
    return y.mul_(_power_of_two(half)).mul_(_power_of_two(n - half))


def _power_of_two(n: torch.Tensor) -> torch.Tensor:
    if n.dtype == torch.float64:
        return (n.to(torch.int64).add_(1023) << 52).view(torch.float64)
    return (n.to(torch.int32).add_(127) << 23).view(torch.float32)


def erf(x: torch.Tensor) -> torch.Tensor:
    """The error function, float32 or float64."""
    if x.dtype == torch.float32:
        x = x.clamp(-ERF_LARGEST, ERF_LARGEST)
        square = x * x
        return (x * polynomial(square, ERF_TOP)).div_(polynomial(square, ERF_BOTTOM)).clamp_(-1, 1)
    size = x.abs().clamp_(max=8)
    square = size.clamp(max=1).square()
    near = x * (polynomial(square, ERF64_TOP) / polynomial(square, ERF64_BOTTOM))
    tail = exp(-(size * size)) * (polynomial(size, ERFC64_TOP) / polynomial(size, ERFC64_BOTTOM))
    return torch.where(size <= 1, near, (1 - tail) * x.sign())


def tan(x: torch.Tensor) -> torch.Tensor:
    """The tangent of moderate numbers (|x| below a million), float32 or float64."""
    if x.dtype == torch.float32:
        return tan(x.double()).float()
    size = x.abs()
    octant = size.mul(4 / math.pi).floor_()  # a division by a number is not one on every device
    octant = octant + octant.remainder(2)
    z = size
    for part in QUARTER_PI:
        z = fma(octant, -part, z)
    square = z * z
    y = fma(z, square * (polynomial(square, TAN_TOP) / polynomial(square, TAN_BOTTOM)), z)
    return torch.where(octant.remainder(4) == 2, -1 / y, y) * x.sign()


def lgamma(x: torch.Tensor) -> torch.Tensor:
    """log gamma(x) for x >= 1/2, float32 or float64."""
    z = x - 1
    total = torch.full_like(x, 0.99999999999980993227684700473478)
    for i, c in enumerate(LANCZOS):
        total = total + floats.constant(c, x) / (z + (i + 1))
    t, log_t = z + 7.5, floats.log1p(z / floats.constant(7.5, x)) + floats.constant(math.log(7.5), x)
    y = (z + 0.5 - t / log_t) * log_t
    return y + (floats.log(total) + floats.constant(math.log(2 * math.pi) / 2, x))


def _exp(x: torch.Tensor) -> torch.Tensor:
    low, high = (-104.0, 89.0) if x.dtype == torch.float32 else (-746.0, 710.0)
    y = exp(torch.where(x.isnan(), 0, x).clamp(low, high))
    return torch.where(x.isnan(), x, torch.where(x >= high, math.inf, torch.where(x <= low, 0, y)))


def _log(x: torch.Tensor) -> torch.Tensor:
    smallest = torch.finfo(x.dtype).smallest_normal
    scale = 2.0 ** (24 if x.dtype == torch.float32 else 53)
    tiny, inside = (x > 0) & (x < smallest), (x > 0) & (x < math.inf)
    y = floats.log(torch.where(inside, torch.where(tiny, x * scale, x), 1))
    y = torch.where(tiny, y - math.log(scale), y)
    beyond = torch.where(x == 0, -math.inf, torch.where(x > 0, x, math.nan))
    return torch.where(inside, y, beyond)


def _log1p(x: torch.Tensor) -> torch.Tensor:
    inside = (x > -1) & (x < math.inf)
    y = floats.log1p(torch.where(inside, x, 0))
    return torch.where(inside, y, torch.where(x == -1, -math.inf, torch.where(x > 0, x, math.nan)))


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < 0, math.nan, floats.sqrt(torch.where(x < 0, 0, x)))


def erfinv(x: torch.Tensor) -> torch.Tensor:
    """The inverse of the error function on [-1, 1], infinite at the ends."""
    inside = x.abs() < 1
    y = floats.erfinv(torch.where(inside, x, 0))
    return torch.where(inside, y, torch.where(x.abs() == 1, x * math.inf, math.nan))


def above(x: torch.Tensor, direction: int = 1) -> torch.Tensor:
    """The next number of x's own dtype; with direction -1, the one before. Infinity stays."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    bits = x.contiguous().view(integer)
    step = torch.where(x > 0, direction, -direction).to(integer)
    smallest = torch.ones_like(bits).view(x.dtype) * direction
    moved = torch.where(x == 0, smallest, (bits + step).view(x.dtype))
    return torch.where(x == direction * math.inf, x, moved)


def below(x: torch.Tensor) -> torch.Tensor:
    """The number of x's own dtype before it."""
    return above(x, -1)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": _exp,
    "log": _log,
    "log1p": _log1p,
    "sqrt": _sqrt,
    "erf": erf,
    "erfinv": erfinv,
    "tan": tan,
    "lgamma": lgamma,
}


IN_THEIR_DTYPE = {"above": above, "below": below}


def extended(x: torch.Tensor, name: str) -> torch.Tensor:
    """A function of all numbers, in any float dtype; of the 16-bit ones through float32."""
    if name in IN_THEIR_DTYPE:
        return IN_THEIR_DTYPE[name](x)
    wide = x.contiguous() if x.dtype in (torch.float32, torch.float64) else x.float().contiguous()
    flat = wide.reshape(-1)  # where even one number is a vector: the functions above write into views
    return FUNCTIONS[name](flat).reshape(x.shape).to(x.dtype)
