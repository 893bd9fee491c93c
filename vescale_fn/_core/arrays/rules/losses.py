"""How losses shard: a sum over the ranks' parts, a mean by the global count."""

from __future__ import annotations

import math
from typing import Any

import torch

from .elementwise import elementwise
from .rule import Call, Row, Rule, T, broadcast, same

aten = torch.ops.aten
PLAIN, MEAN, SUM = 0, 1, 2  # torch's numbers for how a loss is reduced


def loss(call: Call) -> Rule:
    """Losses of tensors of one shape: a mean is the sum of the parts' means, each by its share of the elements."""
    if call["reduction"] == PLAIN:
        return elementwise(call)
    shape = torch.broadcast_shapes(*(t.shape for t in call.tensors))
    at = list(call.args).index("reduction")
    overload = getattr(aten, call.name)

    count = math.prod(shape)

    def part(*args: Any) -> torch.Tensor:
        n = math.prod(torch.broadcast_shapes(*(a.shape for a in args if isinstance(a, torch.Tensor))))
        if call["reduction"] == SUM or (count and not n):
            return overload(*args[:at], SUM, *args[at + 1 :])
        return overload(*args) * (n / count) if count else overload(*args)  # the mean of nothing is nan

    rows = tuple(broadcast(t.shape, shape) for t in call.tensors)
    return Rule(rows, ((),), sums=frozenset(range(len(shape))), op=part)


def loss_backward(call: Call) -> Rule | None:
    """The gradient of such a loss: of a mean, by the block's share of the elements."""
    out = call.outs[0] or ()
    if any(t.shape != out for t in call.tensors[1:] if t.shape) or call.tensors[0].shape not in ((), out):
        return None
    overload = getattr(aten, call.name)

    def part(grad: torch.Tensor, *args: Any) -> torch.Tensor:
        if call["reduction"] == MEAN and args[0].numel():
            grad = grad * (args[0].numel() / math.prod(out))
        return overload(grad, *args)

    return Rule(tuple(broadcast(t.shape, out) for t in call.tensors), (same(out),), op=part)


def nll(call: Call) -> Rule | None:
    """The negative log likelihood: a mean is the sum of the parts over the sum of their weights."""
    x, dtype = call["self"], call.dtypes[0]
    rows = _nll_rows(x)
    named = {t.index: rows.get(name, ()) for name, t in call.args.items() if isinstance(t, T)}
    ins = tuple(named[t.index] for t in call.tensors)
    overload = getattr(aten, call.name)
    if call["reduction"] == PLAIN:
        return Rule(ins, (rows["target"], ()))
    if call["reduction"] == SUM:
        return Rule(ins, ((), ()), sums=frozenset(rows["target"]))

    def part(logits: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore: int) -> Any:
        if logits.dtype.itemsize < 4 and target.numel():  # a sum of halves would not fit a half
            mean, weights = overload(logits, target, weight, MEAN, ignore)
            weights = weights.float()
            return torch.where(weights == 0, weights, mean * weights), weights
        return overload(logits, target, weight, SUM, ignore)

    def finish(total: torch.Tensor, weights: torch.Tensor) -> Any:
        return (total / weights).to(dtype), weights.to(dtype)

    return Rule(ins, ((), ()), sums=frozenset(rows["target"]), fold="total", op=part, finish=finish)


def _nll_rows(x: T) -> dict[str, Row]:
    """The rows of nll's arguments: the classes are whole."""
    target = ("n", *(("at", d) for d in range(x.ndim - 2))) if x.ndim > 1 else ()
    return {"self": (*target[:1], None, *target[1:]), "target": target, "weight": (None,)}


def nll_backward(call: Call) -> Rule:
    """The gradient of the negative log likelihood, example by example (the total weight is given)."""
    rows = _nll_rows(call["self"])
    rows["grad_output"] = rows["target"] if call["reduction"] == PLAIN else ()
    named = {t.index: rows.get(name, ()) for name, t in call.args.items() if isinstance(t, T)}
    unread = () if call["reduction"] == MEAN else (call["total_weight"].index,)
    return Rule(tuple(named[t.index] for t in call.tensors), (rows["self"],), shape_only=unread)
