"""Ring attention: keys and values go round the ranks, each of which holds a part of the sequence.

At every step a rank works on its own queries and the keys that are with it, and sends these on. Kept for the backward
pass are the result and its logarithm alone: there keys and values go round once more, and with them their gradients.

Source: Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .._core import torch_internals
from .._core.base import context
from .._core.distributed import collectives
from .._core.local_types import tensor_types
from .._core.shard_map.collective_calls import bucketed, taking_part
from .._core.shard_map.collective_maps import CollectiveMap, index
from .blockwise import part, part_backward, part_tangent, together, wide
from .bodies import brought

Tensor = Any  # a tensor, or a Blocks
Grads = tuple[Tensor, Tensor | None]  # of the result, and of its logarithm


@dataclass(frozen=True)
class Ring:
    """The ranks along some axes, and what each of them has of the sequence."""

    mesh: Any
    axes: tuple[str, ...]
    checked: bool
    scale: float
    causal: bool
    zigzag: bool

    @property
    def n(self) -> int:
        """The number of ranks."""
        return collectives.group_size(self.mesh, self.axes)

    def turned(self, *xs: Tensor) -> list[Tensor]:
        """What the rank before holds."""
        n = self.n
        turn = CollectiveMap(
            "ppermute",
            self.mesh,
            self.axes,
            "nn.attention",
            self.checked,
            perm=tuple((i, (i + 1) % n) for i in range(n)),
        )
        return bucketed(turn, list(xs))

    def turned_again(self, *xs: Tensor) -> list[Tensor]:
        """The same in a backward pass, of keys that have gone round before: a plan that merged the two would keep those of all
        ranks in between."""
        with context.setting(repeats=object()):
            return self.turned(*xs)

    def earlier(self, step: int) -> Tensor:
        """Whether the keys that are here after so many turns are of a rank before this one."""
        return index(self.mesh, self.axes) >= step


def ring_attention(q: Tensor, k: Tensor, v: Tensor, axis: Any, scale: float, causal: bool, zigzag: bool) -> Tensor:
    """Attention in a `shard_map` body, of and to all parts of a sequence that lies along `axis`."""
    body, names, _ = taking_part("nn.attention", axis)
    leaves, have = brought("nn.attention", (q, k, v), names, body)
    with torch_internals.no_torch_function():
        ring = Ring(body.mesh, names, body.check, scale, causal, zigzag)
        out, _ = torch_internals.apply(_Attention, ring, *leaves)
        tensor_types.mark(out, have)
    return out


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return (_zigzag if ring.causal and ring.zigzag else _in_order)(ring, q, k, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.ring, *leaves = inputs
        ctx.save_for_backward(*leaves, *output)
        ctx.save_for_forward(*leaves, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, log_grad: Tensor | None) -> Any:
        """The logarithm has a gradient where this is itself differentiated: it is used here."""
        q, k, v, out, log = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(out)
        back = _zigzag_backward if ctx.ring.causal and ctx.ring.zigzag else _in_order_backward
        return None, *back(ctx.ring, (grad, log_grad), q, k, v, out, log)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Any:
        """Keys and values go round once more, and with them their tangents."""
        q, k, v, out, log = ctx.saved_tensors
        given = tuple(torch.zeros_like(x) if t is None else t for x, t in zip((q, k, v), tangents, strict=True))
        way = _zigzag_tangent if ctx.ring.causal and ctx.ring.zigzag else _in_order_tangent
        mixed, log_tangent = way(ctx.ring, q, k, v, given, log)
        return (mixed - log_tangent.unsqueeze(-1) * wide(out)).to(out.dtype), log_tangent


def _in_order(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Each rank has consecutive tokens."""
    out, log = part(q, k, v, ring.scale, ring.causal)
    for step in range(1, ring.n):
        k, v = ring.turned(k, v)
        more, more_log = part(q, k, v, ring.scale, False)
        if ring.causal:  # all ranks do the same work, also where it counts for nothing
            more_log = torch.where(ring.earlier(step), more_log, -math.inf)
        out, log = together(out, log, more, more_log)
    return out.to(q.dtype), log


def _in_order_backward(ring: Ring, given: Grads, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log: Tensor) -> Any:
    grads = [wide(g) for g in part_backward(*given, q, k, v, out, log, ring.scale, ring.causal)]
    for step in range(1, ring.n):
        k, v, *grads[1:] = ring.turned_again(k, v, *grads[1:])
        seen = torch.where(ring.earlier(step), log, math.inf) if ring.causal else log
        more = part_backward(*given, q, k, v, out, seen, ring.scale, False)
        grads = [a + b for a, b in zip(grads, more, strict=True)]
    return _home(ring, grads, q)


def _in_order_tangent(ring: Ring, q: Tensor, k: Tensor, v: Tensor, given: Any, log: Tensor) -> tuple[Tensor, Tensor]:
    tq, *others = given
    sums = part_tangent(q, k, v, given, log, ring.scale, ring.causal)
    for step in range(1, ring.n):
        k, v, *others = ring.turned(k, v, *others)
        seen = torch.where(ring.earlier(step), log, math.inf) if ring.causal else log
        more = part_tangent(q, k, v, (tq, *others), seen, ring.scale, False)
        sums = sums[0] + more[0], sums[1] + more[1]
    return sums


def _home(ring: Ring, grads: list[Tensor], like: Tensor) -> list[Tensor]:
    """The last turn brings the gradients of keys and values to where these lie."""
    if ring.n > 1:
        grads[1:] = ring.turned(*grads[1:])
    return [g.to(like.dtype) for g in grads]


# In zigzag order a rank has an early and a late half. After a turn, keys of a rank before this one: all queries look at
# the early half of them. Of a rank after it: the late half of the queries looks at all of them. Either way the late
# queries look at the early keys; the second pair of halves is chosen by where the keys are from.


def _zigzag(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, log = part(q, k, v, ring.scale, True)
    if ring.n == 1:
        return out, log
    (early, late), (early_log, late_log) = out.chunk(2, 2), log.chunk(2, 2)
    for step in range(1, ring.n):
        k, v = ring.turned(k, v)
        before = ring.earlier(step)
        queries, keys, values = _pairs(before, q, (k, v))
        more, more_log = part(queries, keys, values, ring.scale, False)
        (of_late, of_either), (of_late_log, of_either_log) = more.chunk(2, 0), more_log.chunk(2, 0)
        late, late_log = together(late, late_log, of_late, of_late_log)
        early, early_log = together(early, early_log, of_either, torch.where(before, of_either_log, -math.inf))
        late, late_log = together(late, late_log, of_either, torch.where(before, -math.inf, of_either_log))
    return torch.cat([early, late], 2).to(q.dtype), torch.cat([early_log, late_log], 2)


def _zigzag_backward(ring: Ring, given: Grads, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log: Tensor) -> Any:
    grads = [wide(g) for g in part_backward(*given, q, k, v, out, log, ring.scale, True)]
    for step in range(1, ring.n):
        k, v, *grads[1:] = ring.turned_again(k, v, *grads[1:])
        before = ring.earlier(step)
        queries, keys, values = _pairs(before, q, (k, v))
        grad, log_grad, out_there, log_there = (None if x is None else _pair(before, x) for x in (*given, out, log))
        more = part_backward(grad, log_grad, queries, keys, values, out_there, log_there, ring.scale, False)
        late, either = more[0].chunk(2)
        grads[0] = grads[0] + torch.cat([_if(before, either), late + _if(~before, either)], 2)
        for i in (1, 2):
            early, either = more[i].chunk(2)
            grads[i] = grads[i] + torch.cat([early + _if(before, either), _if(~before, either)], 2)
    return _home(ring, grads, q)


def _zigzag_tangent(ring: Ring, q: Tensor, k: Tensor, v: Tensor, given: Any, log: Tensor) -> tuple[Tensor, Tensor]:
    tq, *others = given
    sums = list(part_tangent(q, k, v, given, log, ring.scale, True))
    for step in range(1, ring.n):
        k, v, *others = ring.turned(k, v, *others)
        before = ring.earlier(step)
        queries, keys, values, tk, tv = _pairs(before, q, (k, v, *others))
        more = part_tangent(queries, keys, values, (_pair(before, tq), tk, tv), _pair(before, log), ring.scale, False)
        for i, x in enumerate(more):
            late, either = x.chunk(2)
            sums[i] = sums[i] + torch.cat([_if(before, either), late + _if(~before, either)], 2)
    return sums[0], sums[1]


def _pairs(before: Tensor, q: Tensor, keys: tuple[Tensor, ...]) -> list[Tensor]:
    """The two pairs of halves, one after the other along the batch."""
    return [_pair(before, q)] + [_pair(before, x, keys=True) for x in keys]


def _pair(before: Tensor, x: Tensor, keys: bool = False) -> Tensor:
    """Of what lies as the queries the late half, of the keys the early one; then either, by where the keys are from."""
    early, late = x.chunk(2, 2)
    return torch.cat([early if keys else late, torch.where(before, early, late)])


def _if(condition: Tensor, x: Tensor) -> Tensor:
    return torch.where(condition, x, 0.0)
