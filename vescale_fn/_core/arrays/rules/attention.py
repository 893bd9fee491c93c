"""How scaled_dot_product_attention shards."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...base import dtypes
from .rule import Call, Row, Rule, none

aten = torch.ops.aten


def attention(call: Call) -> Rule:
    """scaled_dot_product_attention: batch and heads may be split, heads that share keys evenly. With the
    kernels of the CPU, which take any mask, so may the queries, each of which looks at all keys."""
    q, k = call["query"], call["key"]
    heads = {q.shape[1], k.shape[1]}
    own = _OWN_QUERIES.get(call.name)
    named = {t.index: name for name, t in call.args.items() if t in call.tensors}

    def row(shape: Any, lse: bool, queries: bool) -> Row:
        shape = shape or ()
        if len(shape) == 2:  # a mask for all batches and heads
            return ("query" if own is not None and shape[0] == q.shape[2] else None, None)
        if len(shape) != 4 - lse:
            return none(shape)
        batch, head = shape[0] == q.shape[0], shape[1] in heads
        queries = queries and own is not None and shape[2] == q.shape[2]
        return ("batch" if batch else None, "head" if head else None, "query" if queries else None, *none(shape[3:]))

    lse = call.args.get("logsumexp")
    backward = lse is not None
    return Rule(
        tuple(row(t.shape, t is lse, named[t.index] not in ("key", "value")) for t in call.tensors),
        tuple(row(s, i == 1 and not backward, i == 0 or not backward) for i, s in enumerate(call.outs)),
        # of the gradients of keys and values, and of that of a mask that is broadcast
        sums=frozenset(("batch", "head", "query") if backward else ()),
        filled=frozenset(("head",) if own else ("batch", "head")),  # the CPU's kernels take no examples
        op=own,
        only="blocks" if own else "",
        blocks=("query",) if own else (),
    )


def _forward(q: Any, k: Any, v: Any, rate: float, causal: bool, mine: range, *, attn_mask: Any, scale: Any) -> Any:
    """Attention of the queries that `mine` covers."""
    if not mine:
        return q.new_zeros((*q.shape[:3], v.shape[3])), q.new_zeros(q.shape[:3], dtype=dtypes.wide(q.dtype))
    k, v, mask = _seen(q, k, v, causal, mine, attn_mask)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, rate, False, attn_mask=mask, scale=scale)


def _backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    rate: float,
    causal: bool,
    mine: range,
    *,
    attn_mask: Any,
    scale: Any,
) -> Any:
    """Its gradients: for its own queries, and what these add to those for keys and values."""
    if not mine:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    seen_k, seen_v, mask = _seen(q, k, v, causal, mine, attn_mask)
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = op(grad, q, seen_k, seen_v, out, lse, rate, False, attn_mask=mask, scale=scale)
    unseen = k.shape[2] - seen_k.shape[2]
    return grads if not unseen else (grads[0], *(aten.constant_pad_nd(g, [0, 0, 0, unseen]) for g in grads[1:]))


def _seen(q: Any, k: Any, v: Any, causal: bool, mine: range, mask: Any) -> tuple[Any, Any, Any]:
    """The keys and values that these queries look at, and a mask of them: by place in the whole sequence where causal."""
    if not causal:
        return k, v, mask
    k, v = (x[:, :, : mine.stop] for x in (k, v))
    places = (torch.arange(n, device=q.device) for n in (mine.stop, k.shape[2]))
    after = next(places)[mine.start :].unsqueeze(1) < next(places)
    return k, v, torch.zeros_like(after, dtype=q.dtype).masked_fill(after, -math.inf)


_OWN_QUERIES = {
    "_scaled_dot_product_flash_attention_for_cpu": _forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _backward,
}


# --- as other ops -----------------------------------------------------------------------------------------------------
# Heads over more ranks than divide those of keys: each rank has the key heads that its own share, as in Megatron-LM.


def with_own_keys(_: Any, q: Any, k: Any, v: Any, rate: float, causal: bool, attn_mask: Any, scale: Any) -> Any:
    """With keys and values repeated for each head of the queries."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, rate, causal, attn_mask=attn_mask, scale=scale)


def with_own_keys_backward(_: Any, grad: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    """Its gradients: those of a key head are added up, on each rank and then over the ranks, as a product with 0 and 1."""
    out, lse, rate, causal, attn_mask, scale = rest
    groups, shared = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    for_q, *others = op(grad, q, k, v, out, lse, rate, causal, attn_mask=attn_mask, scale=scale)
    member = torch.eye(groups, dtype=q.dtype, device=q.device).repeat_interleave(shared, 0)
    return for_q, *((x.movedim(1, 3) @ member).movedim(3, 1) for x in others)


def shares_keys_evenly(args: dict[str, Any], row: Any, axes: dict[str, int]) -> bool:
    """Whether each rank has as many whole groups of heads, or no rank has as many heads as another."""
    ways = math.prod(axes[axis] for axis in row[1])
    return args["key"].shape[1] % ways == 0 or args["query"].shape[1] % ways != 0
