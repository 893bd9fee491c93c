"""How layers shard that normalise: layer, RMS, group and batch norm."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...base import dtypes
from .rule import Call, Parts, Row, Rule, T, none

aten = torch.ops.aten


def layer_norm(call: Call) -> Rule:
    """layer_norm and rms_norm: the leading dims may be split; gradients of the weights sum over them."""
    x = call["input"]
    lead = x.ndim - len(call["normalized_shape"])

    def row(shape: Any) -> Row:
        shape = shape or ()
        leads = len(shape) == x.ndim and shape[:lead] == x.shape[:lead]
        return tuple(d if leads and d < lead else None for d in range(len(shape)))

    return Rule(tuple(row(t.shape) for t in call.tensors), tuple(map(row, call.outs)), sums=frozenset(range(lead)))


def group_norm(call: Call) -> Rule | None:
    """group_norm: examples and groups may be split; gradients of the weights sum over examples."""
    if any(t.ndim > 1 and t.shape[0] != call["N"] for t in call.tensors):
        return None
    at, count = list(call.args).index("N"), list(call.args).index("group")
    overload = getattr(aten, call.name).default
    channels, groups = call["C"], call["group"]
    label = "g" if channels == groups else Parts([(groups, "g"), (channels // groups, None)])

    def local(*args: Any) -> Any:
        held = args[0].shape[1]
        return overload(
            *args[:at], args[0].shape[0], held, *args[at + 2 : count], held * groups // channels, *args[count + 1 :]
        )

    def row(shape: Any) -> Row:
        lead = ("n", label) if len(shape) > 2 or shape[1:] == (channels,) and channels != groups else ("n", "g")
        return (*lead, *none(shape[2:])) if len(shape) > 1 else (label,) * len(shape)

    rows = tuple(row(t.shape) for t in call.tensors)
    outs = tuple(row(shape or ()) for shape in call.outs)
    return Rule(rows, outs, sums=frozenset({"n"}), filled=frozenset({"n", "g"}), op=local)


def batch_norm(call: Call) -> Rule | None:
    """batch_norm in training: examples and channels may be split; the ranks' statistics are put together, by one sum.

    Each rank brings its sum, its sum of squared differences from its own mean, and n times its mean squared, in double
    precision (after Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983).
    """
    if not call["training"]:
        return _evaluated(call)
    if call["running_mean"] is not None:  # it writes them, which its schema does not say: `compositions.py`
        return None
    x = call["input"]
    over, count = _others(x), math.prod(x.shape) // max(x.shape[1], 1)
    shape = [1, -1, *[1] * (x.ndim - 2)]

    def part(x: torch.Tensor, *_: Any) -> Any:
        n = x.numel() // max(x.shape[1], 1)
        wide = x.to(dtypes.wide(x.dtype))
        mean = wide.mean(over) if n else wide.new_zeros(x.shape[1])
        spread = (wide - mean.view(shape)).square().sum(over)
        stats = torch.stack([n * mean.double(), spread.double(), n * mean.double().square()])
        return x, stats, stats.new_zeros(0)

    def finish(x: torch.Tensor, stats: torch.Tensor, _: Any, *args: Any) -> Any:
        mean = stats[0] / count
        invstd = ((stats[1] + stats[2] - count * mean.square()).clamp(min=0) / count + args[7]).rsqrt()
        mean, invstd = mean.to(dtypes.wide(x.dtype)), invstd.to(dtypes.wide(x.dtype))
        out = (x - mean.view(shape)) * invstd.view(shape)
        out = out if args[1] is None else out * args[1].view(shape)
        out = out if args[2] is None else out + args[2].view(shape)
        return out.to(x.dtype), mean.to(call.dtypes[1]), invstd.to(call.dtypes[2])

    return _of_channels(call, part, finish)


def batch_norm_backward(call: Call) -> Rule | None:
    """The gradient of `batch_norm` in training: two sums over all examples, added up as one."""
    if not call["train"]:
        return _evaluated(call)
    if call["running_mean"] is not None or call["save_mean"] is None:
        return None
    x = call["input"]
    over, count = _others(x), math.prod(x.shape) // max(x.shape[1], 1)
    shape = [1, -1, *[1] * (x.ndim - 2)]

    def part(g: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
        centred = x - args[3].view(shape)
        sums = torch.stack([g.to(centred.dtype).sum(over), (g * centred).sum(over)])
        return g, sums, sums.new_zeros(0)

    def finish(g: torch.Tensor, sums: torch.Tensor, _: Any, *args: Any) -> Any:
        x, weight, mean, invstd = args[1], args[2], args[5], args[6]
        slope = (sums[1] / count * invstd.square()).view(shape)
        grad = (g - (sums[0] / count).view(shape) - (x - mean.view(shape)) * slope) * invstd.view(shape)
        grad = grad if weight is None else grad * weight.view(shape)
        found = (
            grad.to(x.dtype),
            (sums[1] * invstd).to(call.dtypes[1] or x.dtype),
            sums[0].to(call.dtypes[2] or x.dtype),
        )
        return tuple(None if out is None else value for value, out in zip(found, call.outs, strict=True))

    return _of_channels(call, part, finish)


def _evaluated(call: Call) -> Rule:
    """By statistics that are given: each example and each channel for itself; the weights' gradients sum over examples."""
    x = call["input"]
    row = lambda shape: (
        ("n", "c", *none(shape[2:]))
        if len(shape) == x.ndim
        else ("c",) * (shape == x.shape[1:2] != (0,)) or none(shape)
    )
    return Rule(
        tuple(row(t.shape) for t in call.tensors),
        tuple(row(s or ()) for s in call.outs),
        sums=frozenset("n" if "grad_out" in call.args else ""),
        filled=frozenset("nc"),
    )


def _others(x: T) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def _of_channels(call: Call, part: Any, finish: Any) -> Rule:
    ndim = call["input"].ndim
    row = lambda shape: ("n", "c", *(None,) * (ndim - 2)) if len(shape or ()) == ndim else ("c",) * len(shape or ())
    return Rule(
        tuple(row(t.shape) for t in call.tensors),
        tuple(map(row, call.outs)),
        sums=frozenset("n"),
        fold="total",
        op=part,
        finish=finish,
        again=True,
        filled=frozenset("c"),
    )
