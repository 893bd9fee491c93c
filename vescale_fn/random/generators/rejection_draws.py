"""Distributions that are drawn by trial: gamma, poisson, binomial. Each element has a loop of its own.

A sampler gets the words of the key (ints, or int32 [keys, 1]), the counters of the elements, the parameters of each
element, and gives its value: a function of key, counter and parameters alone. Elements that are done leave the loop.

JAX runs the trials of `poisson` (from 10 on) and of `binomial` (where n * p > 10) for all elements of a draw until each
has been accepted once, and keeps the *last* acceptance of each. So there a value depends on how many rounds the whole
draw takes. Here that number is a parameter: the samplers "poisson_rounds" and "binomial_rounds" count up to the first
acceptance of an element, and the others look for its last one at or before the given round, from there down.

Sources: Marsaglia and Tsang, "A simple method for generating gamma variables" (2000); Knuth, The Art of Computer
Programming, volume 2; Hoermann, "The transformed rejection method for generating Poisson random variables" (1993) and
"The generation of binomial random variates" (1993).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import elementwise_draws, floats, more_floats
from .threefry import MASK, Word, hash_ints, hash_words, signed

Words = tuple[Any, Any]  # ints or int32 tensors
Params = Sequence[torch.Tensor]

STIRLING = (  # log(k!) less Stirling's formula, for k = 0, ..., 9
    0.0810614667953272,
    0.0413406959554092,
    0.0276779256849983,
    0.02079067210376509,
    0.0166446911898211,
    0.0138761288230707,
    0.0118967099458917,
    0.0104112652619720,
    0.00925546218271273,
    0.00833056343336287,
)


def child(key: Words, i: int) -> Words:
    """The i-th of the keys that one key, or each of many, is split into."""
    k0, k1 = key
    if isinstance(k0, int):
        return hash_ints(k0 & MASK, k1 & MASK, 0, i)
    return hash_words(k0, k1, 0, (k0 * 0).add_(signed(i)))


class Elements:
    """The elements that are still in the loop: flat, with the key of the draw that each belongs to."""

    def __init__(self, k0: Any, k1: Any, high: Any, low: torch.Tensor, shape: torch.Size) -> None:
        self.batched = isinstance(k0, torch.Tensor) and k0.numel() > 1
        if isinstance(k0, torch.Tensor) and not self.batched:
            k0, k1 = k0.reshape(1), torch.as_tensor(k1).reshape(1)
        self.key: Words = (k0.reshape(-1), torch.as_tensor(k1).reshape(-1)) if self.batched else (k0, k1)
        n = shape.numel()
        self.low = low.expand(shape).reshape(-1)
        self.high = high.expand(shape).reshape(-1) if isinstance(high, torch.Tensor) and high.numel() > 1 else high
        self.row = torch.arange(n, device=low.device) // max(1, shape[-1]) if self.batched else None
        self.at = torch.arange(n, device=low.device)

    def keep(self, which: torch.Tensor) -> torch.Tensor:
        """Leave in the loop only the elements of a mask; their places among those that were in it."""
        left = which.nonzero()[:, 0]
        self.at, self.low = self.at[left], self.low[left]
        if isinstance(self.high, torch.Tensor) and self.high.numel() > 1:
            self.high = self.high[left]
        if self.row is not None:
            self.row = self.row[left]
        return left

    def hashed(self, key: Words) -> tuple[torch.Tensor, torch.Tensor]:
        """The hash words of these elements under a key, or under the keys of their draws."""
        k0, k1 = key
        if self.row is not None:
            k0, k1 = k0[self.row], k1[self.row]
        return hash_words(k0, k1, self.high, self.low)

    def uniform(self, key: Words, dtype: torch.dtype) -> torch.Tensor:
        """A number on [0, 1) for each of these elements."""
        return elementwise_draws.unit(self.hashed(key), dtype)


def _times(a: torch.Tensor, b: Any, c: Any) -> torch.Tensor:
    """a * b + c, fused as in `elementwise_draws.uniform`."""
    return floats.fma(a, b, c) if elementwise_draws.is_wide(a.dtype) else a * b + c


def _f(name: str, x: torch.Tensor) -> torch.Tensor:
    return more_floats.extended(x, name)


def _gamma(
    k0: Word, k1: Word, high: Word, low: torch.Tensor, params: Params, dtype: torch.dtype, logarithm: bool
) -> torch.Tensor:
    """Each element has its own chain of keys, split off the draw's key; below 1, a + 1 is drawn and scaled down."""
    shape, alpha = params[0].shape, params[0].reshape(-1)
    elements = Elements(k0, k1, high, low, shape)
    own = elements.hashed(elements.key)
    key, boosting = child(own, 0), child(own, 1)
    large = alpha >= 1
    d = torch.where(large, alpha, alpha + 1) - torch.tensor(1 / 3, dtype=dtype, device=alpha.device)
    c = torch.tensor(1 / 3, dtype=dtype, device=alpha.device) / _f("sqrt", d)
    out = torch.full_like(d, torch.nan)
    at, d_left, c_left = torch.arange(len(alpha), device=alpha.device), d, c
    at = at[~alpha.isnan()]  # not a number stays what it is
    key, d_left, c_left = (key[0][at], key[1][at]), d_left[at], c_left[at]
    while len(at):
        x, v = _positive_cube_root(child(key, 1), c_left, dtype)
        square, cube = x * x, v * v * v
        u = elementwise_draws.unit(child(child(key, 2), 0), dtype)
        outside = u >= _times(square * square, torch.full_like(u, -0.0331), torch.ones_like(u))
        bound = _times(d_left, 1 - cube + _f("log", cube), square * 0.5)
        again = outside & (_f("log", u) >= bound)
        out[at] = torch.where(again, out[at], cube)
        left = again.nonzero()[:, 0]
        at, d_left, c_left = at[left], d_left[left], c_left[left]
        key = tuple(word[left] for word in child(key, 0))
    u = elementwise_draws.unit(child(boosting, 0), dtype)
    if logarithm:
        small = _f("log1p", -u)
        boost = torch.where(large | (small == 0), 0, small * (1 / alpha))
        return (_f("log", d) + _f("log", out) + boost).view(shape)
    wide = (1 - u).double()
    raised = _f("exp", _f("log", wide) * (1 / alpha).double()).to(dtype)
    return (d * out * torch.where(large, 1, raised)).view(shape)


def _positive_cube_root(key: Words, c: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A normal number x, drawn again until 1 + c * x is positive, and that."""
    x, v = torch.zeros_like(c), torch.zeros_like(c)
    at = torch.arange(len(c), device=c.device)
    while len(at):
        x[at] = elementwise_draws.normal(child(child(key, 1), 0), dtype, ())
        v[at] = _times(x[at], c[at], torch.ones_like(c[at]))
        left = (v[at] <= 0).nonzero()[:, 0]
        at, key = at[left], tuple(word[left] for word in child(key, 0))
    return x, v


def gamma(k0: Word, k1: Word, high: Word, low: torch.Tensor, params: Params, dtype: torch.dtype) -> torch.Tensor:
    """Gamma numbers of scale 1; params: the concentration."""
    return _gamma(k0, k1, high, low, params, dtype, logarithm=False)


def loggamma(k0: Word, k1: Word, high: Word, low: torch.Tensor, params: Params, dtype: torch.dtype) -> torch.Tensor:
    """Their logarithms, which are numbers also where a gamma number is too small for one."""
    return _gamma(k0, k1, high, low, params, dtype, logarithm=True)


Trial = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # (at, u, v)


def _first_round(elements: Elements, trial: Trial, dtype: torch.dtype) -> torch.Tensor:
    """The round in which each element is accepted for the first time, from 1 on."""
    found = torch.zeros(len(elements.at), dtype=torch.int32, device=elements.at.device)
    key, i = elements.key, 0
    while len(elements.at):
        i += 1
        accepted, _ = trial(elements.at, elements.uniform(child(key, 1), dtype), elements.uniform(child(key, 2), dtype))
        found[elements.at[accepted]] = i
        elements.keep(~accepted)
        key = child(key, 0)
    return found


def _last_value(elements: Elements, trial: Trial, rounds: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """What each element's last acceptance gave, at or before its entry of `rounds`, or its first one if that is later."""
    value, dtype = torch.full_like(out, -1), out.dtype
    most = int(rounds.max()) if rounds.numel() else 0
    keys = [elements.key]
    for _ in range(most):
        keys.append(child(keys[-1], 0))
    for i in range(most, 0, -1):
        if not len(elements.at):
            break
        key = keys[i - 1]
        accepted, k = trial(elements.at, elements.uniform(child(key, 1), dtype), elements.uniform(child(key, 2), dtype))
        accepted &= rounds[elements.at] >= i
        value[elements.at[accepted]] = k[accepted]
        elements.keep(~accepted)
    key = keys[most]
    while len(elements.at):
        accepted, k = trial(elements.at, elements.uniform(child(key, 1), dtype), elements.uniform(child(key, 2), dtype))
        value[elements.at[accepted]] = k[accepted]
        elements.keep(~accepted)
        key = child(key, 0)
    return value


def _poisson_trial(lam: torch.Tensor) -> Trial:
    """Transformed rejection with a squeeze, for rates from 10 on."""
    log_lam = _f("log", lam)
    b = 0.931 + 2.53 * _f("sqrt", lam)
    a = -0.059 + 0.02483 * b
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)
    v_r = 0.9277 - 3.6224 / (b - 2)

    def trial(at: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u = u - 0.5
        apart = 0.5 - u.abs()
        a_, b_, lam_ = a[at], b[at], lam[at]
        k = floats.fma(2 * a_ / apart + b_, u, lam_).add_(0.43).floor_()
        s = _f("log", v * inverse_alpha[at] / (a_ / (apart * apart) + b_))
        t = floats.fma(k, log_lam[at], -lam_) - more_floats.lgamma(k.clamp(min=0) + 1)
        quick = (apart >= 0.07) & (v <= v_r[at])
        reject = (k < 0) | ((apart < 0.013) & (v > apart))
        return quick | (~reject & (s <= t)), k

    return trial


def _few(lam: torch.Tensor) -> torch.Tensor:
    return lam.isnan() | (lam < 10)


def poisson_rounds(k0: Word, k1: Word, high: Word, low: torch.Tensor, params: Params, dtype: Any) -> torch.Tensor:
    """How many rounds an element takes part in; params: the rate. Below 10, JAX plays those of a rate of 100,000."""
    lam = params[0].float()
    flat = torch.where(_few(lam), 1e5, lam).reshape(-1)
    return _first_round(Elements(k0, k1, high, low, lam.shape), _poisson_trial(flat), torch.float32).view(lam.shape)


def poisson(k0: Word, k1: Word, high: Word, low: torch.Tensor, params: Params, dtype: torch.dtype) -> torch.Tensor:
    """Poisson numbers, of the integer `dtype`; params: the rate, the rounds of the draw."""
    lam, rounds = params[0].float(), params[1].expand(params[0].shape).reshape(-1)
    shape, lam = lam.shape, lam.reshape(-1)
    few = _few(lam)
    out = torch.zeros_like(lam)
    elements = Elements(k0, k1, high, low, shape)
    elements.keep(few)
    key, product = elements.key, torch.zeros_like(lam)
    out[elements.at] = -1
    while len(elements.at):  # how many uniform numbers, multiplied, stay above exp(-lam)
        goes_on = product[elements.at] > -lam[elements.at]
        elements.keep(goes_on)
        out[elements.at] += 1
        product[elements.at] += _f("log", elements.uniform(child(key, 1), torch.float32))
        key = child(key, 0)
    elements = Elements(k0, k1, high, low, shape)
    elements.keep(~few)
    if len(elements.at):
        many = _last_value(elements, _poisson_trial(torch.where(few, 1e5, lam)), rounds, out)
        out = torch.where(few, out, many)
    return elementwise_draws.as_integers(torch.where(lam == 0, 0, out), dtype).view(shape)


def _stirling(k: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(STIRLING, dtype=k.dtype, device=k.device)
    square = (k + 1) * (k + 1)
    series = (1 / 12 - (1 / 360 - 1 / 1260 / square) / square) / (k + 1)
    return torch.where(k <= 9, table[k.nan_to_num(0).clamp(0, 9).long()], series)


def _binomial_trial(count: torch.Tensor, p: torch.Tensor) -> Trial:
    """Transformed rejection (BTRS), where count * p is at least 10."""
    spread = _f("sqrt", count * p * (1 - p))
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    c = count * p + 0.5
    v_r = 0.92 - 4.2 / b
    odds = p / (1 - p)
    alpha = (2.83 + 5.1 / b) * spread
    m = ((count + 1) * p).floor()
    centre = (m + 0.5) * _f("log", (m + 1) / (odds * (count - m + 1))) + _stirling(m) + _stirling(count - m)

    def trial(at: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n, a_, b_, m_, odds_ = count[at], a[at], b[at], m[at], odds[at]
        u = u - 0.5
        apart = 0.5 - u.abs()
        quick = (apart >= 0.07) & (v <= v_r[at])
        k = ((2 * a_ / apart + b_) * u + c[at]).floor()
        reject = (k < 0) | (k > n)
        inside = torch.where(reject, 0, k)
        v = _f("log", v * alpha[at] / (a_ / (apart * apart) + b_))
        bound = (
            centre[at]
            + (n + 1) * _f("log", (n - m_ + 1) / (n - inside + 1))
            + (inside + 0.5) * _f("log", odds_ * (n - inside + 1) / (inside + 1))
            - _stirling(inside)
            - _stirling(n - inside)
        )
        return quick | (~reject & (v <= bound)), k

    return trial


def _binomial_cases(params: Params) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(n, the smaller of p and 1 - p, where by geometric gaps, where there is no answer), flat."""
    n, p = params[0].reshape(-1), params[1].reshape(-1)
    q = torch.where(p < 0.5, p, 1 - p)
    wrong_n = n.isnan() | (n < 0)
    wrong_q = q.isnan() | (q < 0)
    q = torch.where(wrong_q, 0.01, q)
    return n.floor(), q, wrong_n | (n * q <= 10), wrong_n | wrong_q


def _many(n: torch.Tensor, q: torch.Tensor, gaps: torch.Tensor) -> Trial:
    return _binomial_trial(torch.where(gaps, 1e4, n), torch.where(gaps, 0.5, q))


def binomial_rounds(k0: Word, k1: Word, high: Word, low: torch.Tensor, params: Params, dtype: Any) -> torch.Tensor:
    """How many rounds an element takes part in; params: n, p."""
    n, q, gaps, _ = _binomial_cases(params)
    shape = params[0].shape
    finite = torch.where(n.isinf(), 1e4, n)
    return _first_round(Elements(k0, k1, high, low, shape), _many(finite, q, gaps), params[0].dtype).view(shape)


def binomial(k0: Word, k1: Word, high: Word, low: torch.Tensor, params: Params, dtype: torch.dtype) -> torch.Tensor:
    """Binomial numbers, as floats; params: n, p, the rounds of the draw."""
    n, q, gaps, wrong = _binomial_cases(params)
    shape, p, rounds = params[0].shape, params[1].reshape(-1), params[2].expand(params[0].shape).reshape(-1)
    infinite = n.isinf()
    elements = Elements(k0, k1, high, low, shape)
    elements.keep(gaps & ~wrong)
    log_rest = _f("log1p", -q)
    key, at_ = elements.key, torch.zeros_like(n)
    out = torch.full_like(n, -1)
    while len(elements.at):  # how many geometric gaps fit into n
        elements.keep(at_[elements.at] <= n[elements.at])
        out[elements.at] += 1
        at_[elements.at] += (_f("log", elements.uniform(child(key, 0), n.dtype)) / log_rest[elements.at]).ceil()
        key = child(key, 1)
    if not gaps.all():
        elements = Elements(k0, k1, high, low, shape)
        elements.keep(~gaps & ~wrong & ~infinite)
        many = _last_value(elements, _many(torch.where(infinite, 1e4, n), q, gaps), rounds, out)
        out = torch.where(gaps, out, many)
    out = torch.where(wrong, torch.nan, torch.where(infinite, torch.inf, out))
    return torch.where((p < 0.5) | wrong | infinite, out, n - out).to(dtype).view(shape)


SAMPLERS: dict[str, Callable[..., torch.Tensor]] = {
    "gamma": gamma,
    "loggamma": loggamma,
    "poisson_rounds": poisson_rounds,
    "poisson": poisson,
    "binomial_rounds": binomial_rounds,
    "binomial": binomial,
}
