"""How scaled_dot_product_attention shards."""

from __future__ import annotations

from typing import Any

from .rule import Call, Row, Rule, none


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
