"""How layers shard that normalise: layer, RMS and group norm."""

from __future__ import annotations

from typing import Any

import torch

from .rule import Call, Row, Rule, none

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
