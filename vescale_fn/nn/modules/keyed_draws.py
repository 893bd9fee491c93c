"""torch's draws by a key: for each function of torch's that draws, the same distribution from a key.

Each entry of `DRAWS` looks at one call, and returns a function of a key that carries it out, or None where the call draws
nothing: dropout in evaluation, with a rate of 0, or on a tensor without values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ..._core.arrays.array import is_array, mesh_of, spec_of
from ..._core.base import dtypes
from ..._core.base.errors import RandomError
from ..._core.base.messages import report
from ..._core.sharding.spec import P, from_split_axes, split_axes
from ...random import basic, continuous, discrete, dropout_masks, gammas, permutations, streams
from ...random.keys import Key

Tensor = torch.Tensor
Keyed = Callable[[Key], Any]


class DrawCall:
    """A call of a function that may draw: its arguments by the names that torch's documentation gives them."""

    def __init__(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        self.func, self.name, self.args, self.kwargs = func, name, args, kwargs
        if kwargs.get("generator") is not None:
            raise RandomError(
                report(
                    f"torch's {name}",
                    "the numbers of a generator depend on all that was drawn before",
                    fix="no generator=: the draw then comes from the key of the call",
                )
            )

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its place or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def run(self) -> Any:
        """The call as it is."""
        return self.func(*self.args, **self.kwargs)


# --- where a draw lies ------------------------------------------------------------------------------------------------


def _lying_as(x: Tensor, dims: int | None = None) -> dict[str, Any]:
    """``spec=`` and ``mesh=`` of a draw that lies as `x`, or as its first dims do."""
    if not is_array(x):
        return {}
    rows = split_axes(spec_of(x), x.ndim)[:dims]
    return {"spec": P(*from_split_axes(rows)), "mesh": mesh_of(x)}


def _numbers(key: Key, draw: Callable[..., Tensor], shape: Any, dtype: torch.dtype, device: Any, lying: Any) -> Tensor:
    """Numbers of a continuous distribution, in `dtype`."""
    # a draw in 16 bits has few different values
    return draw(key, tuple(shape), dtypes.wide(dtype), **lying).to(device=device, dtype=dtype)


def _written(x: Tensor, value: Tensor) -> Tensor:
    return x.copy_(value.to(x.dtype))


# --- dropout ----------------------------------------------------------------------------------------------------------


def _dropout(call: DrawCall) -> Keyed | None:
    x, rate, train = call.get(0, "input"), call.get(1, "p", 0.5), call.get(2, "train", True)
    if not train or not rate:
        return None
    kind = call.name.removesuffix("_")
    if kind == "dropout":
        dropped = lambda key: dropout_masks.dropout(key, x, rate)
    else:
        alpha, feature = "alpha" in kind, kind.startswith("feature")
        dropped = lambda key: (_alpha if alpha else _scaled)(x, _mask(key, x, rate, feature), rate)
    return (lambda key: _written(x, dropped(key))) if call.name.endswith("_") else dropped


def _mask(key: Key, x: Tensor, rate: float, feature: bool) -> Tensor:
    """Where elements are kept; with `feature` whole channels, of which each sample has its own."""
    shape = (*x.shape[:2], *(1,) * (x.ndim - 2)) if feature else x.shape
    return basic.bernoulli(key, 1 - rate, tuple(shape), **_lying_as(x, 2 if feature else None))


def _scaled(x: Tensor, mask: Tensor, rate: float) -> Tensor:
    return torch.where(mask, x * dropout_masks.scale(1 - rate), 0.0)


def _alpha(x: Tensor, mask: Tensor, rate: float) -> Tensor:
    """Alpha dropout (Klambauer et al., NeurIPS 2017): what is dropped becomes SELU's limit, and mean and variance stay."""
    limit = -1.7580993408473766
    a = ((limit**2 * rate + 1) * (1 - rate)) ** -0.5 if rate < 1 else 0.0
    return torch.where(mask, x, limit) * a - limit * a * rate


def _rrelu(call: DrawCall) -> Keyed | None:
    x, low, high, train = (
        call.get(i, n, d)
        for i, (n, d) in enumerate((("input", None), ("lower", 1 / 8), ("upper", 1 / 3), ("training", False)))
    )
    if not train:
        return None

    def run(key: Key) -> Tensor:
        slope = low + (high - low) * _numbers(key, basic.uniform, x.shape, x.dtype, x.device, _lying_as(x))
        out = torch.where(x < 0, x * slope, x)
        return _written(x, out) if call.name.endswith("_") or call.kwargs.get("inplace") else out

    return run


# --- attention, recurrent networks ------------------------------------------------------------------------------------


def _attention(call: DrawCall) -> Keyed | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    q, k, v, mask, rate, causal = (call.get(i, name, 0.0 if i == 4 else None) for i, name in enumerate(names))
    scale, grouped = call.kwargs.get("scale"), call.kwargs.get("enable_gqa", False)
    if not rate:
        return None

    def run(key: Key) -> Tensor:
        k_, v_ = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) if grouped else x for x in (k, v))
        scores = q @ k_.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        allowed = mask if mask is not None and mask.dtype == torch.bool else None
        if causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        elif mask is not None:
            scores = scores + mask
        if allowed is None and mask is None:
            weights = torch.softmax(scores, -1)
        else:  # a row that may look at nothing gets zeros, not the softmax of nothing
            none = (scores == -math.inf).all(-1, keepdim=True)
            weights = torch.softmax(scores.masked_fill(none, 0.0), -1).masked_fill(none, 0.0)
        return dropout_masks.dropout(key, weights, rate) @ v_

    return run


def _recurrent(call: DrawCall) -> Keyed | None:
    """RNN, LSTM, GRU of several layers, whose outputs are dropped between them: layer by layer."""
    packed = isinstance(call.args[3], (list, tuple))  # (data, batch_sizes, hx, ...), not (input, hx, ...)
    lead = call.args[1 : 1 + packed]
    state, weights, biased, layers, rate, train, both, *rest = call.args[1 + packed :]
    if not train or not rate or layers < 2:
        return None
    states = tuple(state) if isinstance(state, (list, tuple)) else (state,)
    each, ways = len(weights) // layers, 1 + bool(both)

    def run(key: Key) -> Any:
        x, ends = call.args[0], []
        for i, own in enumerate(streams.split(key, layers)):
            first = tuple(s[i * ways : (i + 1) * ways] for s in states)
            here = weights[i * each : (i + 1) * each]
            start = first if isinstance(state, (list, tuple)) else first[0]
            x, *end = call.func(x, *lead, start, here, biased, 1, 0.0, train, both, *rest)
            ends.append(end)
            if i < layers - 1:
                x = dropout_masks.dropout(own, x, rate)
        return (x, *(torch.cat(parts) for parts in zip(*ends)))

    return run


# --- distributions ----------------------------------------------------------------------------------------------------


def _shape_of(call: DrawCall, first: int) -> tuple[int, ...]:
    size = call.kwargs.get("size", call.args[first:])
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], (list, tuple)) else tuple(size)


def _factory(draw: Callable[..., Tensor]) -> Callable[[DrawCall], Keyed | None]:
    """``torch.rand(2, 3)`` and its like."""

    def look(call: DrawCall) -> Keyed | None:
        device = torch.device(call.kwargs.get("device") or torch.get_default_device())
        if device.type == "meta":
            return None
        dtype = call.kwargs.get("dtype") or torch.get_default_dtype()
        return lambda key: _asked(_numbers(key, draw, _shape_of(call, 0), dtype, device, {}), call)

    return look


def _like(draw: Callable[..., Tensor]) -> Callable[[DrawCall], Keyed | None]:
    """``torch.rand_like(x)`` and its like."""

    def look(call: DrawCall) -> Keyed | None:
        x = call.get(0, "input")
        dtype, device = call.kwargs.get("dtype") or x.dtype, call.kwargs.get("device") or x.device
        if torch.device(device).type == "meta":
            return None
        return lambda key: _asked(_numbers(key, draw, x.shape, dtype, device, _lying_as(x)), call)

    return look


def _asked(x: Tensor, call: DrawCall) -> Tensor:
    return x.requires_grad_() if call.kwargs.get("requires_grad") else x


def _filling(value: Callable[..., Tensor], *names: tuple[str, Any]) -> Callable[[DrawCall], Keyed | None]:
    """``x.uniform_(low, high)`` and its like: ``value(numbers, low, high)``, where ``numbers(draw)`` are like `x`."""

    def look(call: DrawCall) -> Keyed | None:
        x = call.args[0]
        given = [call.get(i, name, default) for i, (name, default) in enumerate(names, 1)]
        if x.device.type == "meta":
            return None

        def run(key: Key) -> Tensor:
            dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.float32
            numbers = lambda draw: draw(key, tuple(x.shape), dtypes.wide(dtype), **_lying_as(x))
            return _written(x, value(numbers, *given))

        return run

    return look


def _integers(call: DrawCall) -> Keyed | None:
    """``randint``, ``randint_like``, ``randperm`` and ``random_``."""
    like = call.args[0] if call.name in ("randint_like", "random_") else None
    given = call.kwargs.get("device") or (torch.get_default_device() if like is None else like.device)
    device = torch.device(given)
    if device.type == "meta":
        return None
    if call.name == "randperm":
        n, dtype = call.get(0, "n"), call.kwargs.get("dtype") or torch.int64
        return lambda key: permutations.permutation(key, n).to(device=device, dtype=dtype)
    low, high = _bounds(call, [a for a in call.args[like is not None :] if isinstance(a, int)])
    dtype = call.kwargs.get("dtype") or (torch.int64 if like is None else like.dtype)
    if high is None:  # random_(): all that the dtype holds exactly
        high = dtypes.exact_below(dtype)
    wide = torch.int64 if dtype.is_floating_point or dtype == torch.bool else dtype

    def run(key: Key) -> Tensor:
        if like is None:
            size = call.kwargs.get("size") or next(a for a in call.args if isinstance(a, (list, tuple)))
            return basic.randint(key, tuple(size), low, high, wide).to(device=device, dtype=dtype)
        value = basic.randint(key, tuple(like.shape), low, high, wide, **_lying_as(like)).to(device=device, dtype=dtype)
        return _written(like, value) if call.name == "random_" else value

    return run


def _bounds(call: DrawCall, given: list[int]) -> tuple[int, int | None]:
    """The bounds by keyword or, `given`, by place; None where there is no upper one."""
    low, high = call.kwargs.get("low", call.kwargs.get("from")), call.kwargs.get("high", call.kwargs.get("to"))
    if low is None:
        low = given.pop(0) if len(given) + (high is not None) == 2 else 0
    return low, high if high is not None or not given else given[0]


def _bernoulli(call: DrawCall) -> Keyed | None:
    """``torch.bernoulli(p)``, ``torch.bernoulli(x, 0.5)`` and ``x.bernoulli_(p)``."""
    x, written = call.args[0] if call.args else call.kwargs["input"], call.name.endswith("_")
    p = call.get(1, "p", 0.5 if written else None)
    if x.device.type == "meta":
        return None

    def run(key: Key) -> Tensor:
        chance = x if p is None else p
        kept = basic.bernoulli(key, chance, tuple(x.shape), **_lying_as(x)).to(x.dtype)
        return _written(x, kept) if written else kept

    return run


def _normal(call: DrawCall) -> Keyed | None:
    """``torch.normal(mean, std)``, of tensors or numbers, and ``x.normal_(mean, std)``."""
    if call.name == "normal_":
        return _filling(lambda n, mean, std: mean + std * n(basic.normal), ("mean", 0.0), ("std", 1.0))(call)
    mean, std, size = call.get(0, "mean", 0.0), call.get(1, "std", 1.0), call.get(2, "size")
    x = next((t for t in (mean, std) if isinstance(t, Tensor)), None)
    if x is not None and x.device.type == "meta":
        return None
    if x is None:
        dtype = call.kwargs.get("dtype") or torch.get_default_dtype()
        device = call.kwargs.get("device") or torch.get_default_device()
        return lambda key: mean + std * _numbers(key, basic.normal, size, dtype, device, {})
    both = [t for t in (mean, std) if isinstance(t, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in both))
    like = next((t for t in both if t.shape == shape), None)
    lying = {} if like is None else _lying_as(like)
    return lambda key: mean + std * _numbers(key, basic.normal, shape, x.dtype, x.device, lying)


def _multinomial(call: DrawCall) -> Keyed | None:
    p, n, again = call.get(0, "input"), call.get(1, "num_samples"), call.get(2, "replacement", False)

    def run(key: Key) -> Tensor:
        shape = (n, *p.shape[:-1])
        drawn = permutations.categorical(key, p.log(), -1, shape, replace=bool(again))
        return drawn.movedim(0, -1).long()

    return run


def _of_tensors(draw: Callable[..., Tensor], count: int) -> Callable[[DrawCall], Keyed | None]:
    """``torch.poisson(rate)`` and its like, of tensors."""

    def look(call: DrawCall) -> Keyed | None:
        given = call.args[:count]
        return lambda key: draw(key, *given).to(given[-1].dtype)

    return look


def _truncated(numbers: Callable[..., Tensor], mean: float, std: float, low: float, high: float) -> Tensor:
    """Normal numbers in [low, high]; torch draws again what lies outside, and so reads values."""
    if not std:
        return torch.tensor(min(max(mean, low), high))
    ends = (low - mean) / std, (high - mean) / std
    draw = lambda key, shape, dtype, **lying: continuous.truncated_normal(key, *ends, shape, dtype, **lying)
    return (mean + std * numbers(draw)).clamp(low, high)


def _geometric(p: float, key: Key, shape: tuple[int, ...], _: torch.dtype, **lying: Any) -> Tensor:
    return discrete.geometric(key, p, shape, **lying)


DRAWS: dict[str, Callable[[DrawCall], Keyed | None]] = {
    **dict.fromkeys(("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"), _dropout),
    **dict.fromkeys(("dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"), _dropout),
    **dict.fromkeys(("rrelu", "rrelu_"), _rrelu),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "rand": _factory(basic.uniform),
    "randn": _factory(basic.normal),
    "rand_like": _like(basic.uniform),
    "randn_like": _like(basic.normal),
    **dict.fromkeys(("randint", "randint_like", "randperm", "random_"), _integers),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _bernoulli),
    **dict.fromkeys(("normal", "normal_"), _normal),
    "uniform_": _filling(lambda n, low, high: low + (high - low) * n(basic.uniform), ("from", 0.0), ("to", 1.0)),
    "trunc_normal_": _filling(_truncated, ("mean", 0.0), ("std", 1.0), ("a", -2.0), ("b", 2.0)),
    "exponential_": _filling(lambda n, rate: n(continuous.exponential) / rate, ("lambd", 1.0)),
    "cauchy_": _filling(lambda n, at, scale: at + scale * n(continuous.cauchy), ("median", 0.0), ("sigma", 1.0)),
    "log_normal_": _filling(lambda n, mean, std: (mean + std * n(basic.normal)).exp(), ("mean", 1.0), ("std", 2.0)),
    "geometric_": _filling(lambda n, p: n(functools.partial(_geometric, p)), ("p", 0.5)),
    "multinomial": _multinomial,
    "poisson": _of_tensors(discrete.poisson, 1),
    "binomial": _of_tensors(discrete.binomial, 2),
    "_standard_gamma": _of_tensors(gammas.gamma, 1),
}
