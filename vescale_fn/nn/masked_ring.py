"""The ring under a mask, a window and dropout: keys and values visit only ranks with a query that sees them.

Parts of attention are added up by their largest score and the sum of exponentials below it, which keeps rows right whose
scores are all very negative, as those of masks are. Masks do not travel: each rank has the rows of its own queries.
Dropout's mask is drawn again, part by part, where it is needed.

Source: Liu et al., "Ring Attention" (arXiv 2310.01889); Milakov and Gimelshein (arXiv 1805.02867) for the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .._core import torch_internals
from .._core.base import context
from .._core.local_types import tensor_types
from .._core.shard_map.collective_calls import bucketed
from .._core.shard_map.collective_maps import CollectiveMap
from ..ops import axis_index
from ..random.sharded import Draw
from .blockwise import grouped, wide
from .bodies import brought
from .masked_attention import Kept, Terms, columns, dropped, indices_on_ranks, is_padded, kept, place_along, positions
from .window import ring_steps

Tensor = Any  # a tensor, or a Blocks


@dataclass(frozen=True)
class Visits:
    """The ranks along some axes, and after how many turns keys are of use to any of them."""

    mesh: Any
    axes: tuple[str, ...]
    checked: bool
    steps: tuple[int, ...]
    n: int
    part: int  # keys of a rank
    terms: Terms
    draw: Draw | None

    def moved(self, turns: int, xs: list[Tensor]) -> list[Tensor]:
        """What the rank so many places before holds."""
        if not turns % self.n:
            return xs
        turn = CollectiveMap(
            "ppermute",
            self.mesh,
            self.axes,
            "nn.attention",
            self.checked,
            perm=tuple((i, (i + turns) % self.n) for i in range(self.n)),
        )
        return bucketed(turn, xs)


@dataclass(frozen=True)
class Given:
    """What a rank has of its own: the mask's columns in the order of the visits, positions, a key and where to draw."""

    mask: Tensor | None
    here: Tensor | None
    there: Tensor | None
    key: Tensor | None
    rows: tuple[Tensor, ...]

    @staticmethod
    def of(leaves: Any) -> Given:
        """From the inputs of the Function, but for the queries, keys and values."""
        mask, here, there, key, *rows = leaves
        return Given(mask, here, there, key, tuple(rows))

    @property
    def mask_has_gradient(self) -> bool:
        """Whether it is added to the scores."""
        return self.mask is not None and self.mask.is_floating_point()

    def scores(self, ring: Visits, visit: int, q: Tensor, k: Tensor) -> Tensor:
        """The scores [B, H, T, S] of a visit's keys."""
        scores = (grouped(wide(q), k) @ wide(k).mT).reshape(*q.shape[:-1], k.shape[2]) * ring.terms.scale
        mask = part_of(self.mask, ring, visit)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if self.here is None or self.there is None:
            return scores
        there = self.there[visit]
        seen = ring.terms.window.sees(self.here, there)
        padding = there < 0
        return scores.masked_fill(padding if seen is None else padding | ~seen, -math.inf)

    def keep(self, ring: Visits, visit: int, q: Tensor) -> Tensor | None:
        """Which weights of a visit's keys are kept."""
        if ring.draw is None:
            return None
        return kept(self.key, self.rows[visit], ring.draw, (*q.shape[:3], ring.part), q.device)


def part_of(mask: Tensor | None, ring: Visits, visit: int) -> Tensor | None:
    """The columns of a visit."""
    return None if mask is None else mask.narrow(3, visit * ring.part, ring.part)


def ring_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key: Any, names: Any, terms: Terms) -> Tensor:
    """Attention in a `shard_map` body to all parts of a sequence that lies along `names`."""
    body = context.body()
    assert body is not None
    n = len(terms.here)
    steps = ring_steps(terms.window, terms.here, terms.there, terms.zigzag)
    order = torch.remainder(axis_index(names) - torch.tensor(steps, device=q.device), n)
    mask = columns(mask, terms, order)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(wide(q).dtype)
    here = there = None
    if not terms.window.is_open or is_padded(terms.there):
        mine = axis_index(names).reshape(1)
        here = positions(terms.here, terms.zigzag, q.device).index_select(0, mine).squeeze(0).clamp(min=0)
        there = positions(terms.there, terms.zigzag, q.device).index_select(0, order)
    draw, data, rows = None, None, []
    if key is not None:
        one = Kept(key.data, names, tuple(q.shape), terms)
        queries, keys = indices_on_ranks(terms.here, terms), indices_on_ranks(terms.there, terms)
        draw, data = one.whole, key.data
        rows = [
            one.rows(
                lambda rank, s=s: (
                    *Kept.own(one.shape, terms, rank),
                    queries[place_along(rank, names)],
                    keys[(place_along(rank, names) - s) % n],
                )
            )
            for s in steps
        ]
    inputs = [q, k, v, mask, here, there, data, *rows]
    leaves, have = brought("nn.attention", [x for x in inputs if x is not None], names, body)
    inputs = [None if x is None else leaves.pop(0) for x in inputs]
    with torch_internals.no_torch_function():
        ring = Visits(body.mesh, tuple(names), body.check, steps, n, k.shape[2], terms, draw)
        out, *_ = torch_internals.apply(_Attention, ring, *inputs)
        out = out.to(q.dtype)
        tensor_types.mark(out, have)
    return out


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(ring: Visits, q: Tensor, k: Tensor, v: Tensor, *own: Any) -> Any:
        """The result; the largest score of each query; the sum of the exponentials of its scores, less that one.

        The result is kept for the gradient, and unrounded for that of a mask, which may be wider than the queries.
        """
        given = Given.of(own)
        lowest = torch.finfo(wide(q).dtype).min
        top: Any = None
        total: Any = None
        out: Any = None
        for visit, keys, values in _visits(ring, k, v):
            scores = given.scores(ring, visit, q, keys)
            highest = scores.amax(-1).clamp(min=lowest)
            highest = highest if top is None else torch.maximum(top, highest)
            share = torch.exp(scores - highest.unsqueeze(-1))
            more = grouped(dropped(share, given.keep(ring, visit, q), ring.terms), keys) @ wide(values)
            more, its = more.reshape(*q.shape[:-1], v.shape[-1]), share.sum(-1)
            if top is not None:
                before = torch.exp(top - highest)
                more, its = more + out * before.unsqueeze(-1), its + total * before
            out, total, top = more, its, highest
        total = torch.where(total == 0, 1.0, total)  # of a query that sees no key
        out = out / total.unsqueeze(-1)
        return out if given.mask_has_gradient else out.to(q.dtype), total, top

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.ring, *leaves = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*leaves, *output)
        ctx.save_for_forward(*leaves, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, total_grad: Tensor | None, _: Any) -> Any:
        """The sum has a gradient where this is itself differentiated: it is used here."""
        ring: Visits = ctx.ring
        q, k, v, *own, out, total, top = ctx.saved_tensors
        given = Given.of(own)
        grad = torch.zeros_like(out) if grad is None else grad
        wide_grad = wide(grad)
        mean = (wide_grad * wide(out)).sum(-1)  # of the scores' gradient, over the keys
        if total_grad is not None:
            mean = mean - total * total_grad
        for_q: Any = 0.0
        for_mask, sums, at = [], [], 0
        for visit, step in enumerate(ring.steps):
            with context.setting(repeats=object()):  # keys that have come before: a plan is not to keep them in between
                k, v, *sums = ring.moved(step - at, [k, v, *sums])
            at = step
            keep = given.keep(ring, visit, q)
            share = torch.exp(given.scores(ring, visit, q, k) - top.unsqueeze(-1)) / total.unsqueeze(-1)
            of_weights = (grouped(wide_grad, k) @ wide(v).mT).reshape(share.shape)
            slope = share * (dropped(of_weights, keep, ring.terms) - mean.unsqueeze(-1))
            if given.mask_has_gradient:
                for_mask.append(_summed_to(slope, given.mask))
            slope, weights = grouped(slope, k), grouped(dropped(share, keep, ring.terms), k)
            for_q = for_q + (slope @ wide(k)).reshape(q.shape) * ring.terms.scale
            more = [slope.mT @ grouped(wide(q), k) * ring.terms.scale, weights.mT @ grouped(wide_grad, k)]
            sums = [a + b for a, b in zip(sums, more, strict=True)] if sums else more
        sums = ring.moved(-at, sums)
        mask_grad = torch.cat(for_mask, 3) if for_mask else None
        grads = for_q.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype), mask_grad
        return None, *grads, *[None] * (3 + len(ring.steps) * (ring.draw is not None))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        """Keys and values go round once more, and with them their tangents."""
        ring: Visits = ctx.ring
        q, k, v, *own, out, total, top = ctx.saved_tensors
        given = Given.of(own)
        tq, tk, tv = (torch.zeros_like(x) if t is None else t for x, t in zip((q, k, v), tangents, strict=False))
        change: Any = 0.0
        mixed, at = 0.0, 0
        for visit, step in enumerate(ring.steps):
            k, v, tk, tv = ring.moved(step - at, [k, v, tk, tv])
            at = step
            keep = given.keep(ring, visit, q)
            share = torch.exp(given.scores(ring, visit, q, k) - top.unsqueeze(-1)) / total.unsqueeze(-1)
            of_scores = grouped(wide(tq), k) @ wide(k).mT + grouped(wide(q), k) @ wide(tk).mT
            of_scores = of_scores.reshape(share.shape) * ring.terms.scale
            if tangents[3] is not None:
                of_scores = of_scores + part_of(tangents[3], ring, visit)
            slope = share * of_scores
            change = change + slope.sum(-1)
            there = grouped(dropped(slope, keep, ring.terms), k) @ wide(v)
            there = there + grouped(dropped(share, keep, ring.terms), k) @ wide(tv)
            mixed = mixed + there.reshape(out.shape)
        return (mixed - change.unsqueeze(-1) * wide(out)).to(out.dtype), total * change, None


def _visits(ring: Visits, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    at = 0
    for visit, step in enumerate(ring.steps):
        k, v = ring.moved(step - at, [k, v])
        at = step
        yield visit, k, v


def _summed_to(x: Tensor, mask: Tensor) -> Tensor:
    """The gradient of a part of a mask, which is broadcast in all dims but the last."""
    dims = [dim for dim in range(3) if mask.shape[dim] == 1 < x.shape[dim]]
    return x.sum(dims, keepdim=True) if dims else x
