"""Attention under a mask, a window and dropout: on one device, and in a body by a gather or by an all-to-all.

Dropout's mask is that of `vfn.random.dropout` on the weights [B, H, T, S] of the whole sequence in its usual order. Each
rank draws the rectangle that its queries and keys have in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .._core.arrays.array import is_array, mesh_of, spec_of
from .._core.base import context
from .._core.distributed.communicator import coordinates
from .._core.distributed.mesh import communicator_of
from .._core.local_types import tensor_types, types
from .._core.sharding.index_map import axes_of, dim_indices
from .._core.sharding.spec import from_split_axes, split_axes
from ..ops import all_gather, all_to_all, axis_index, axis_size
from ..random.backends import draw_op
from ..random.dropout_masks import scale as kept_scale
from ..random.generators.counters import Rectangle
from ..random.sharded import Draw, drawn
from .blockwise import wide
from .heads import divided, with_heads
from .window import Window, filled, positions_on_ranks, tensor_of

Tensor = Any  # a tensor, or a Blocks
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Terms:
    """What is known of masked attention before its tensors are.

    Args:
        scale: what scores are multiplied by.
        window: which keys a query sees, by position.
        zigzag: the number of ranks of the order of the tokens, or 0.
        rate: with which probability a weight is dropped.
        here, there: how many queries and keys each rank has; none where the sequence is whole.
        sizes: the batch and the heads of all ranks, in a body.
        batch, heads: the axes that these are split over, in a body.
    """

    scale: float
    window: Window
    zigzag: int
    rate: float
    here: tuple[int, ...] = ()
    there: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    batch: Axes = ()
    heads: Axes = ()

    @property
    def keep(self) -> float:
        """With which probability a weight is kept."""
        return 1 - self.rate


def dropped(weights: Tensor, keep: Tensor | None, terms: Terms) -> Tensor:
    """Weights, or their gradient, where they are kept; the others are zero."""
    return weights if keep is None else torch.where(keep, weights * kept_scale(terms.keep), 0.0)


def attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, seen: Tensor | None, keep: Tensor | None, terms: Terms
) -> Tensor:
    """Attention where `mask` (bool or additive) and `seen` (bool) both allow it; zeros where no key is left."""
    some: Any = None
    if mask is None or mask.dtype == torch.bool:
        mask = mask if seen is None else seen if mask is None else mask & seen
        if mask is not None:
            some = mask.any(-1, keepdim=True)
            mask = mask | ~some
    else:
        mask = mask if seen is None else torch.where(seen, mask, -math.inf)
        some = (mask > -math.inf).any(-1, keepdim=True)
        mask = torch.where(some, mask, 0.0)
    if keep is None:
        if mask is not None and mask.dtype not in (torch.bool, q.dtype):  # what is finite remains so
            mask = torch.where(mask > -math.inf, mask.clamp(min=torch.finfo(q.dtype).min), mask).to(q.dtype)
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=terms.scale, enable_gqa=gqa)
    else:
        shared = q.shape[1] // k.shape[1]
        keys, values = (wide(x if shared == 1 else x.repeat_interleave(shared, 1)) for x in (k, v))
        scores = wide(q) @ keys.mT * terms.scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        out = (dropped(scores.softmax(-1), keep, terms) @ values).to(q.dtype)
    return out if some is None else torch.where(some, out, 0.0)


def whole_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key: Any, terms: Terms) -> Tensor:
    """On one device, or on arrays whose sequence is whole."""
    here, there = (tensor_of(positions_on_ranks((x.shape[2],), terms.zigzag)[0], q.device) for x in (q, k))
    keep = None
    if key is not None:
        array = next((x for x in (q, k, v) if is_array(x)), None)
        draw = _draw((q.shape[0], q.shape[1], q.shape[2], k.shape[2]), terms)
        if array is None:
            keep = drawn("nn.attention", key, draw, device=None if context.body() else q.device)
        else:
            spec = from_split_axes(split_axes(spec_of(array), 4)[:2])
            keep = drawn("nn.attention", key, draw, spec, mesh_of(array))
        if terms.zigzag:
            keep = keep.index_select(2, here).index_select(3, there)
    return attended(q, k, v, mask, terms.window.sees(here, there), keep, terms)


# --- in a body --------------------------------------------------------------------------------------------------------


def gather_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key: Any, names: Axes, terms: Terms) -> Tensor:
    """All keys and values come to each rank, where the rows of the mask are that belong to its queries."""
    k, v = all_gather((k, v), names, axis=2, tiled=True)
    here, there = positions(terms.here, terms.zigzag, q.device), positions(terms.there, terms.zigzag, q.device)
    mine = here.index_select(0, axis_index(names).reshape(1)).squeeze(0).clamp(min=0)
    keep = None
    if key is not None:
        queries, keys = indices_on_ranks(terms.here, terms), _all(terms.there, terms)

        def rectangle(rank: int) -> tuple[Any, ...]:
            return *Kept.own(q.shape, terms, rank), queries[place_along(rank, names)], keys

        keep = Kept(key.data, names, q.shape, terms).drawn((q.shape[2], k.shape[2]), rectangle)
    seen = _seen(terms, mine, there.flatten())
    return attended(q, k, v, columns(mask, terms), seen, keep, terms)


def exchange_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key: Any, names: Axes, terms: Terms
) -> Tensor:
    """The whole sequence of some of the heads comes to each rank, and the part of the mask that belongs to it."""
    n, given = axis_size(names), q.shape
    q, k, v = divided(q, k, v, n)
    if mask is not None:
        mask = mask if mask.shape[1] == 1 else with_heads(mask, q.shape[1])
        mask = columns(_exchanged(mask, given[2], names, n), terms)
    q, k, v = all_to_all((q, k, v), names, 1, 2, tiled=True)
    here, there = (positions(x, terms.zigzag, q.device).flatten() for x in (terms.here, terms.there))
    keep = None
    if key is not None:

        def rectangle(rank: int) -> tuple[Any, ...]:
            batch, heads = Kept.own((given[0], q.shape[1] * n), terms, rank)
            first = place_along(rank, names) * q.shape[1]
            return batch, heads[first : first + q.shape[1]], _all(terms.here, terms), _all(terms.there, terms)

        keep = Kept(key.data, names, given, terms).drawn((q.shape[2], k.shape[2]), rectangle, q.shape[1])
    out = attended(q, k, v, mask, _seen(terms, here.clamp(min=0), there), keep, terms)
    return all_to_all(out, names, 2, 1, tiled=True).narrow(1, 0, given[1])


def _exchanged(mask: Tensor, queries: int, names: Axes, n: int) -> Tensor:
    """The rows of all queries, for this rank's heads."""
    rows, heads = mask.shape[2] == queries, mask.shape[1] > 1
    if rows and heads:
        return all_to_all(mask, names, 1, 2, tiled=True)
    if heads:
        mask = mask.unflatten(1, (n, -1)).index_select(1, axis_index(names).reshape(1)).squeeze(1)
    return all_gather(mask, names, axis=2, tiled=True) if rows else mask


def positions(counts: tuple[int, ...], zigzag: int, device: Any) -> Tensor:
    """i64 [ranks, part]: where each rank's tokens are in the sequence; -1 is padding."""
    return tensor_of(filled(positions_on_ranks(counts, zigzag), -1), device)


def is_padded(counts: tuple[int, ...]) -> bool:
    """Whether some ranks have padding after their tokens."""
    return len(set(counts)) > 1


def columns(mask: Tensor | None, terms: Terms, order: Tensor | None = None) -> Tensor | None:
    """A mask whose last dim is that of all keys, with the padding of each rank's keys, the ranks in this order."""
    if mask is None or mask.shape[3] == 1 < sum(terms.there):
        mask = None if mask is None else mask.expand(*mask.shape[:3], sum(terms.there))
    if mask is None or (order is None and not is_padded(terms.there)):
        return mask
    table = tensor_of(filled(positions_on_ranks(terms.there, 0), 0), mask.device)
    return mask.index_select(3, (table if order is None else table.index_select(0, order)).flatten())


def _seen(terms: Terms, here: Tensor, there: Tensor) -> Tensor | None:
    """What the window leaves of these keys, without padding."""
    seen = terms.window.sees(here, there)
    if not is_padded(terms.there):
        return seen
    return (there >= 0).expand(len(here), -1) if seen is None else seen & (there >= 0)


# --- dropout's mask ---------------------------------------------------------------------------------------------------


def _draw(shape: tuple[int, ...], terms: Terms) -> Draw:
    return Draw("bernoulli", tuple(shape), torch.float32, (terms.keep,))


@dataclass(frozen=True)
class Kept:
    """Which weights a rank keeps, of those of the whole array of which q is a part of this shape."""

    key: Tensor
    names: Axes
    shape: tuple[int, ...]
    terms: Terms

    @property
    def whole(self) -> Draw:
        """The draw for all ranks."""
        return _draw((*self.terms.sizes, sum(self.terms.here), sum(self.terms.there)), self.terms)

    @staticmethod
    def own(shape: Sequence[int], terms: Terms, rank: int) -> list[Any]:
        """A rank's part of batch and heads, filled up to its shape with 0, where any number will do."""
        axes, coord = axes_of(_mesh()), coordinates(_mesh(), rank)
        parts = [dim_indices(n, names, axes, coord) for n, names in zip(terms.sizes, (terms.batch, terms.heads))]
        return [one if len(one) == n else [*one, *[0] * (n - len(one))] for one, n in zip(parts, shape)]

    def rows(self, rectangle: Any) -> Tensor:
        """The rectangle of each rank, as an operator reads it."""
        draw = self.whole
        mine = communicator_of(_mesh()).each(lambda rank: Rectangle(draw.shape, rectangle(rank)).encoded())
        tensor_types.mark(mine, types.of(varying={*self.names, *self.terms.batch, *self.terms.heads}))
        return mine

    def drawn(self, size: tuple[int, int], rectangle: Any, heads: int | None = None) -> Tensor:
        """bool [B, H, *size], on the device of the body."""
        local = (self.shape[0], heads or self.shape[1], *size)
        return kept(self.key, self.rows(rectangle), self.whole, local, _mesh().device_type)


def kept(key: Tensor, rows: Tensor, draw: Draw, local: tuple[int, ...], device: Any) -> Tensor:
    """A rectangle of the draw."""
    return draw_op.draw_encoded(key, draw, rows, local, torch.device(device))


def _mesh() -> Any:
    body = context.body()
    assert body is not None
    return body.mesh


def place_along(rank: int, names: Axes) -> int:
    """The place of a rank along axes, major first."""
    mesh, at = _mesh(), 0
    sizes, coord = axes_of(mesh), coordinates(mesh, rank)
    for name in names:
        at = at * sizes[name] + coord[name]
    return at


def indices_on_ranks(counts: tuple[int, ...], terms: Terms) -> list[list[int]]:
    """Each rank's positions, with 0 for padding, where any number will do."""
    return filled(positions_on_ranks(counts, terms.zigzag), 0).tolist()


def _all(counts: tuple[int, ...], terms: Terms) -> Any:
    if not terms.zigzag and not is_padded(counts):
        return range(sum(counts))
    return list(itertools.chain.from_iterable(indices_on_ranks(counts, terms)))
