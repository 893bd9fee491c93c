"""How the ops of layers and losses shard: normalisation, attention, convolution, losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .arithmetic import elementwise
from .rule import Call, Row, Rule, T, broadcast, none, same

aten = torch.ops.aten
PLAIN, MEAN, SUM = 0, 1, 2  # torch's numbers for how a loss is reduced

# Some of these kernels crash on no elements, so what they split is split evenly.

# --- layers -----------------------------------------------------------------------------------------------------------


def norm(call: Call) -> Rule:
    """layer_norm and rms_norm: the leading dims may be split; gradients of the weights sum over them."""
    x = call["input"]
    lead = x.ndim - len(call["normalized_shape"])

    def row(shape: Any) -> Row:
        shape = shape or ()
        leads = len(shape) == x.ndim and shape[:lead] == x.shape[:lead]
        return tuple(d if leads and d < lead else None for d in range(len(shape)))

    return Rule(tuple(row(t.shape) for t in call.tensors), tuple(map(row, call.outs)), sums=frozenset(range(lead)))


def attention(call: Call) -> Rule:
    """scaled_dot_product_attention: batch and heads may be split; groups of heads that share a key, evenly."""
    q, k = call["query"], call["key"]
    heads = {q.shape[1], k.shape[1]}

    def row(shape: Any, lse: bool) -> Row:
        shape = shape or ()
        if len(shape) != 4 - lse:
            return none(shape)
        batch, head = shape[0] == q.shape[0], shape[1] in heads
        return ("batch" if batch else None, "head" if head else None, *none(shape[2:]))

    lse = call.args.get("logsumexp")
    backward = lse is not None
    return Rule(tuple(row(t.shape, t is lse) for t in call.tensors),
                tuple(row(s, i == 1 and not backward) for i, s in enumerate(call.outs)),
                sums=frozenset(("batch", "head") if backward else ()),  # of the gradient of a mask that is broadcast
                even=frozenset(("batch", "head")))  # fmt: skip


def convolution(call: Call) -> Rule:
    """Convolutions: examples may be split; gradients of the weights sum over them."""
    examples = [call["input"], call.args.get("grad_output")]
    rows = tuple(("n", *none(t.shape[1:])) if any(t is x for x in examples) else none(t.shape) for t in call.tensors)
    outs = tuple(("n", *none(s[1:])) if s and i == 0 else none(s) for i, s in enumerate(call.outs))
    return Rule(rows, outs, sums=frozenset({"n"}), even=frozenset({"n"}))


def group_norm(call: Call) -> Rule | None:
    """group_norm: examples may be split; gradients of the weights sum over them."""
    if any(t.ndim > 1 and t.shape[0] != call["N"] for t in call.tensors):
        return None
    at = list(call.args).index("N")
    overload = getattr(aten, call.name).default

    def local(*args: Any) -> Any:
        return overload(*args[:at], args[0].shape[0], *args[at + 1 :])

    rows = tuple(("n", *none(t.shape[1:])) if t.ndim > 1 else none(t.shape) for t in call.tensors)
    outs = tuple(("n", *none(s[1:])) if s and len(s) > 1 else none(s) for s in call.outs)
    return Rule(rows, outs, sums=frozenset({"n"}), even=frozenset({"n"}), op=local)


def examples(ndim: int) -> Callable[[Call], Rule | None]:
    """Pooling and the like, on values of `ndim` dims: each example for itself."""

    def rule(call: Call) -> Rule | None:
        if any(len(shape or ()) != ndim for shape in (*(t.shape for t in call.tensors), *call.outs)):
            return None
        row = ("n", *(None,) * (ndim - 1))
        return Rule((row,) * len(call.tensors), (row,) * len(call.outs), even=frozenset({"n"}))

    return rule


# --- losses -----------------------------------------------------------------------------------------------------------


def loss(call: Call) -> Rule:
    """Losses of tensors of one shape: a mean is the sum of the parts' means, each by its share of the elements."""
    if call["reduction"] == PLAIN:
        return elementwise(call)
    shape = torch.broadcast_shapes(*(t.shape for t in call.tensors))
    at = list(call.args).index("reduction")
    overload = getattr(aten, call.name)

    def part(*args: Any) -> torch.Tensor:
        n = math.prod(torch.broadcast_shapes(*(a.shape for a in args if isinstance(a, torch.Tensor))))
        if call["reduction"] == SUM or not n:
            return overload(*args[:at], SUM, *args[at + 1 :])
        return overload(*args) * (n / math.prod(shape))

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

    def part(logits: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignore: int) -> Any:
        if logits.dtype.itemsize < 4 and reduction == MEAN and target.numel():  # a sum of halves would not fit a half
            mean, weights = overload(logits, target, weight, MEAN, ignore)
            weights = weights.float()
            return torch.where(weights == 0, weights, mean * weights), weights
        return overload(logits, target, weight, SUM, ignore)

    def finish(total: torch.Tensor, weights: torch.Tensor) -> Any:
        value = total / weights if call["reduction"] == MEAN else total
        return value.to(dtype), weights.to(dtype)

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
    return Rule(tuple(named[t.index] for t in call.tensors), (rows["self"],))
