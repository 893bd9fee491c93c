"""The steps of compositions: softmax, norms and losses as a few ops that keep split dims split, each a formula.

Every function takes the dtypes of the results, then the arguments of the op that it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ... import torch_internals
from ...base import dtypes
from ...base.array_notes import noted, notes_of
from .rule import dims

aten = torch.ops.aten


def wide(x: torch.Tensor) -> torch.Tensor:
    """As torch computes inside such an op: of halves in float32."""
    return x.to(dtypes.wide(x.dtype))


def total(x: torch.Tensor, over: Sequence[int]) -> torch.Tensor:
    """The sum over some dims, which stay."""
    return aten.sum.dim_IntList(x, list(over), True)


def know_total(x: Any, dim: int, its: Any) -> Any:
    """`x`, of which the sum over a split dim is known without adding it up, for as long as nothing writes into it."""
    noted(x).total = torch_internals.version(x), dim, its
    return x


def known_total(x: Any, dim: int) -> Any:
    """The sum over a dim, which stays."""
    version, where, its = notes_of(x).total
    return its if version == torch_internals.version(x) and where == dim % x.ndim else total(wide(x), [dim])


def added_up(x: torch.Tensor) -> torch.Tensor:
    """A sum of parts, added up now rather than at each of its uses; as one op that is not linear."""
    return aten.add.Scalar(x, 0.0)


# --- along dims -------------------------------------------------------------------------------------------------------


def softmax(dtypes: Any, x: Any, dim: int, *_: Any) -> Any:
    """e^x over its sum, the maximum taken out."""
    x = wide(x)
    e = aten.exp(x - aten.amax(x, [dim], True))
    return (e / total(e, [dim])).to(dtypes[0])


def log_softmax(dtypes: Any, x: Any, dim: int, *_: Any) -> Any:
    """The logarithm of the softmax."""
    x = wide(x)
    x = x - aten.amax(x, [dim], True)
    return (x - aten.log(total(aten.exp(x), [dim]))).to(dtypes[0])


def softmax_backward(dtypes: Any, grad: Any, y: Any, dim: int, *_: Any) -> Any:
    """y (g - sum of g y)."""
    grad, y = wide(grad), wide(y)
    return (y * (grad - total(grad * y, [dim]))).to(dtypes[0])


def log_softmax_backward(dtypes: Any, grad: Any, y: Any, dim: int, *_: Any) -> Any:
    """g - e^y (sum of g)."""
    return (wide(grad) - aten.exp(wide(y)) * known_total(grad, dim)).to(dtypes[0])


def logsumexp(dtypes: Any, x: Any, dim: Any, keepdim: bool) -> Any:
    """The logarithm of the sum of e^x."""
    over = dims(dim, x.ndim)
    x = wide(x if x.is_floating_point() else x.to(dtypes[0]))
    most = aten.amax(x, over, True)
    most = aten.masked_fill(most, aten.abs(most) == math.inf, 0.0)
    out = aten.log(total(aten.exp(x - most), over)) + most
    return (out if keepdim else aten.squeeze.dims(out, over)).to(dtypes[0])


def variance(
    dtypes: Any, x: Any, dim: Any, correction: Any, keepdim: bool, mean: bool = False, root: bool = False
) -> Any:
    """The mean of the squared distances from the mean, which is found first."""
    over, out = dims(dim, x.ndim), wide(x)
    n = math.prod(x.shape[d] for d in over)
    middle = total(out, over) / n
    square = aten.square(out - middle)
    found = total(square, over) / max(0, n - (1 if correction is None else correction))
    results = (aten.sqrt(found) if root else found, middle)[: 1 + mean]
    results = [
        (r if keepdim else aten.squeeze.dims(r, over)).to(dtype) for r, dtype in zip(results, dtypes, strict=True)
    ]
    return tuple(results) if mean else results[0]


# --- layers -----------------------------------------------------------------------------------------------------------


def layer_norm(dtypes: Any, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """(x - mean) / std, times a weight, plus a bias."""
    over, n = range(x.ndim - len(shape), x.ndim), math.prod(shape)
    x = wide(x)
    mean = total(x, over) / n
    x = x - mean
    rstd = aten.rsqrt(total(x * x, over) / n + eps)
    return _results(dtypes, _scaled(x * rstd, weight, bias), mean, rstd)


def layer_norm_backward(
    dtypes: Any,
    grad: Any,
    x: Any,
    shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    mask: Sequence[bool],
) -> Any:
    """Its gradients: for x, the weight and the bias."""
    return _norm_backward(dtypes, wide(grad), (wide(x) - mean) * rstd, rstd, weight, shape, mask, centred=True)


def rms_norm(dtypes: Any, x: Any, shape: Sequence[int], weight: Any, eps: Any) -> Any:
    """x over the root of the mean of its squares, times a weight."""
    over, n = range(x.ndim - len(shape), x.ndim), math.prod(shape)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    x = wide(x)
    rstd = aten.rsqrt(total(x * x, over) / n + eps)
    return _results(dtypes, _scaled(x * rstd, weight, None), rstd)


def rms_norm_backward(dtypes: Any, grad: Any, x: Any, shape: Sequence[int], rstd: Any, weight: Any, mask: Any) -> Any:
    """Its gradients: for x and the weight."""
    return _norm_backward(dtypes, wide(grad), wide(x) * rstd, rstd, weight, shape, mask, centred=False)


def _norm_backward(
    dtypes: Any,
    grad: Any,
    normal: Any,
    rstd: Any,
    weight: Any,
    shape: Sequence[int],
    mask: Sequence[bool],
    centred: bool,
) -> Any:
    lead = grad.ndim - len(shape)
    over, n = range(lead, grad.ndim), math.prod(shape)
    scaled = grad if weight is None else grad * wide(weight)
    x_grad = scaled - normal * (total(scaled * normal, over) / n)
    if centred:
        x_grad = x_grad - total(scaled, over) / n
    sums = (lambda x: aten.sum.dim_IntList(x, list(range(lead)))) if lead else (lambda x: x)
    grads = (x_grad * rstd, sums(grad * normal) if mask[1] else None, sums(grad) if mask[-1] and centred else None)
    return _results(dtypes, *(g if m else None for g, m in zip(grads, mask, strict=False)))


def batch_norm(
    dtypes: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean_kept: Any,
    var_kept: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """(x - mean) / std of each channel; what is kept of mean and variance is brought nearer to them."""
    over, shape, n = _channels(x)
    x = wide(x)
    mean = added_up(total(x, over) / n)
    x = x - mean
    var = added_up(total(x * x, over) / n)
    rstd = aten.rsqrt(var + eps)
    out = x * rstd
    for kept, found in ((mean_kept, mean), (var_kept, var * (n / max(n - 1, 1)))):
        if kept is not None:
            kept.mul_(1 - momentum).add_((aten.view(found, [-1]) * momentum).to(kept.dtype))
    w, b = (None if v is None else aten.view(wide(v), shape) for v in (weight, bias))
    reserve = aten.new_empty(mean, [0], dtype=torch.uint8)  # of cudnn's op
    return _results(dtypes, _scaled(out, w, b), aten.view(mean, [-1]), aten.view(rstd, [-1]), reserve)


def batch_norm_backward(
    dtypes: Any,
    grad: Any,
    x: Any,
    weight: Any,
    mean_kept: Any,
    var_kept: Any,
    mean: Any,
    rstd: Any,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> Any:
    """Its gradients: for x, the weight and the bias."""
    over, shape, n = _channels(x)
    grad, mean, rstd = wide(grad), aten.view(mean, shape), aten.view(rstd, shape)
    normal = (wide(x) - mean) * rstd
    bias_grad, weight_grad = added_up(total(grad, over)), added_up(total(grad * normal, over))
    scale = rstd if weight is None else rstd * aten.view(wide(weight), shape)
    x_grad = scale * (grad - bias_grad / n - normal * (weight_grad / n)) if mask[0] else None
    kept = [aten.view(g, [-1]) if m else None for g, m in zip((weight_grad, bias_grad), mask[1:], strict=True)]
    return _results(dtypes, x_grad, *kept)


def cudnn_batch_norm_backward(
    dtypes: Any,
    x: Any,
    grad: Any,
    weight: Any,
    mean_kept: Any,
    var_kept: Any,
    mean: Any,
    rstd: Any,
    eps: float,
    reserve: Any,
) -> Any:
    """As `batch_norm_backward`, with cudnn's arguments."""
    return batch_norm_backward(dtypes, grad, x, weight, mean_kept, var_kept, mean, rstd, True, eps, [True] * 3)


def group_norm(dtypes: Any, x: Any, weight: Any, bias: Any, n: int, c: int, size: int, groups: int, eps: float) -> Any:
    """(x - mean) / std of each group of channels: a sum for each channel, and of those one for each group."""
    count = c * size // groups
    x = wide(x)
    mean = added_up(_in_groups(x, groups) / count)
    x = x - _to_channels(mean, x)
    rstd = aten.rsqrt(added_up(_in_groups(x * x, groups) / count) + eps)
    w, b = (None if v is None else aten.view(wide(v), _channels(x)[1]) for v in (weight, bias))
    return _results(dtypes, _scaled(x * _to_channels(rstd, x), w, b), mean, rstd)


def group_norm_backward(
    dtypes: Any,
    grad: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    n: int,
    c: int,
    size: int,
    groups: int,
    mask: Sequence[bool],
) -> Any:
    """Its gradients: for x, the weight and the bias."""
    count = c * size // groups
    grad, scale = wide(grad), _to_channels(wide(rstd), x)
    normal = (wide(x) - _to_channels(wide(mean), x)) * scale
    scaled = grad if weight is None else grad * aten.view(wide(weight), _channels(x)[1])
    means = [added_up(_in_groups(v, groups) / count) for v in (scaled, scaled * normal)] if mask[0] else []
    x_grad = (scaled - _to_channels(means[0], x) - normal * _to_channels(means[1], x)) * scale if mask[0] else None
    sums = lambda value: aten.sum.dim_IntList(value, _channels(x)[0])
    return _results(dtypes, x_grad, sums(grad * normal) if mask[1] else None, sums(grad) if mask[2] else None)


def _in_groups(x: Any, groups: int) -> Any:
    """The sum over the channels of each group, and over the planes: of the latter first."""
    x = total(x, range(2, x.ndim)) if x.ndim > 2 else x
    return aten.sum.dim_IntList(aten.view(x, [x.shape[0], groups, -1]), [2])


def _to_channels(x: Any, like: Any) -> Any:
    """A value a group, for each channel of the group."""
    n, groups = x.shape
    repeated = aten.expand(aten.unsqueeze(x, 2), [n, groups, like.shape[1] // groups])
    return aten.view(aten.clone(repeated), [n, like.shape[1], *[1] * (like.ndim - 2)])


def _channels(x: Any) -> tuple[list[int], list[int], int]:
    """The dims that are no channels, the shape of a value a channel, how many elements a channel has."""
    over = [d for d in range(x.ndim) if d != 1]
    return over, [-1 if d == 1 else 1 for d in range(x.ndim)], math.prod(x.shape[d] for d in over)


def _scaled(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * wide(weight)
    return x if bias is None else x + wide(bias)


def _results(dtypes: Any, *results: Any) -> Any:
    return tuple(r if r is None or dtype is None else r.to(dtype) for r, dtype in zip(results, dtypes, strict=False))


# --- losses -----------------------------------------------------------------------------------------------------------


def nll(dtypes: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
    """The negative log likelihood over split classes: what is at the target, found by comparing."""
    mine, weights = _at_target(x, target, weight, ignore)
    dim = _class_dim(x)
    known = (target == ignore) | ((target >= 0) & (target < x.shape[dim]))
    other = aten.unsqueeze(aten.where(known, 0.0, math.nan), dim)  # on one device, what is no class raises
    values = aten.neg(aten.sum.dim_IntList(aten.where(mine, wide(x) * weights, other), [dim]))
    if reduction == 0:
        return values.to(dtypes[0]), aten.zeros_like(aten.sum(values), dtype=dtypes[1])
    weight_sum = aten.sum(aten.where(mine, weights, 0.0))
    value = aten.sum(values)
    return (value / weight_sum if reduction == 1 else value).to(dtypes[0]), weight_sum.to(dtypes[1])


def nll_backward(
    dtypes: Any, grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int, weight_sum: Any
) -> Any:
    """Its gradient, of which an example's sum over the classes is what is at its target."""
    dim = _class_dim(x)
    mine, weights = _at_target(x, target, weight, ignore)
    grad = aten.unsqueeze(grad, dim) if reduction == 0 else grad / weight_sum if reduction == 1 else grad
    out = aten.where(mine, aten.neg(wide(grad) * weights), 0.0).to(dtypes[0])
    if weight is not None:
        return out
    return know_total(out, dim, aten.where(aten.unsqueeze(target, dim) != ignore, aten.neg(wide(grad)), 0.0))


def _class_dim(x: Any) -> int:
    return 1 if x.ndim > 1 else 0


def _at_target(x: Any, target: Any, weight: Any, ignore: int) -> tuple[Any, Any]:
    """Which elements are at the target, and the weights of the classes."""
    dim = _class_dim(x)
    shape = [-1 if d == dim else 1 for d in range(x.ndim)]
    one_row = aten.zeros_like(
        total(x, [d for d in range(x.ndim) if d != dim]), dtype=torch.int64
    )  # split as the classes
    classes = one_row + torch.arange(x.shape[dim], device=x.device).view(shape)
    target = aten.unsqueeze(aten.masked_fill(target, target == ignore, -1), dim)
    if weight is None:  # in the dtype of the sums, for a number of no dims does not widen it
        weights = torch.ones([1] * x.ndim, dtype=dtypes.wide(x.dtype), device=x.device)
    else:
        weights = aten.view(wide(weight), shape)
    return classes == target, weights
