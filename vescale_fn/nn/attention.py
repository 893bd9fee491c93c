"""Attention whose sequence may be split over ranks: context parallelism."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from .._core.arrays.array import is_array, mesh_of, spec_of
from .._core.arrays.placement import with_sharding
from .._core.base import context
from .._core.base.errors import CollectiveError
from .._core.base.front_door import public
from .._core.base.messages import mesh_text, report, short
from .._core.distributed.mesh import axis_names
from .._core.shard_map.collective_calls import taking_part
from .._core.shard_map.shard_map import shard_map
from .._core.sharding.index_map import axes_of
from .._core.sharding.spec import P, from_split_axes, split_axes
from ..ops import all_gather, all_to_all, axis_index, axis_size
from ..random import Key, shared_keys
from ..random.keys import checked
from .attention_arguments import METHODS, check, check_parts, dropout_rate, halved, mask_of_4_dims
from .attention_mask import positions, without_padding
from .heads import divided, own_heads, repeats
from .masked_attention import Terms, exchange_masked, gather_masked, whole_masked
from .masked_ring import ring_masked
from .padding import cut, padded, part_sizes, parts
from .ring import ring_attention
from .window import window_of

Axes = tuple[str, ...]
Counts = tuple[int, ...] | None  # how many of each rank's keys are no padding, if there is any


@public("nn.attention")
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    dropout: float = 0.0,
    key: Key | None = None,
    scale: float | None = None,
    axis: str | Sequence[str] | None = None,
    method: str = "ring",
    zigzag: int = 0,
    spec: P | None = None,
) -> torch.Tensor:
    """Scaled dot product attention, of a sequence that may be split over ranks.

    On plain tensors and on arrays whose sequence is whole this is ``F.scaled_dot_product_attention``. On arrays whose
    sequence is split, evenly or not, each rank works on its own queries, and `method` says how it meets the keys and
    values of all others. Batch and heads may be split over other axes at the same time. Inside a `shard_map` body, q, k
    and v are one rank's part of the sequence.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, G, S, D], where G divides H: ``H / G`` query heads share a key head. Where ranks have heads that share
            a key head with another rank's, it is repeated for these.
        v: values [B, G, S, E]. All three lie alike: ``P(batch axes, head axes, sequence axes)``.
        mask: broadcasts to [B, H, T, S], its rows and columns in the order of q and k: bool, True where a query may look
            at a key, or of the dtype of q or float32, added to the scores. It may be an array of any layout or a plain
            tensor, and has a gradient where it is floating point. Best split as q is, along batch, heads and queries,
            with all keys; it does not travel then. In a `shard_map` body: the rows of this rank's queries, with all keys.
        causal: query i looks at the keys up to i alone; T and S are then the same.
        window: (left, right): query i looks at the keys from ``i - left`` to ``i + right``, both included, where None or
            -1 is no limit; n is ``(n, n)``, and with `causal` n keys before its own. T and S are then the same. Mistral's
            ``sliding_window=n`` counts the query's own key: ``window=(n - 1, 0)``. A ring then passes over ranks whose
            keys no query sees, in both directions.
        dropout: with which probability each weight is set to zero; the others are multiplied by ``1 / (1 - dropout)``.
        key: one key, where there is dropout. The mask is that of ``vfn.random.dropout(key, weights, dropout)`` on the
            weights [B, H, T, S] of all tokens in their usual order, so with each method, on any mesh and in zigzag order
            the same.
        scale: what scores are multiplied by; by default ``1 / sqrt(D)``.
        axis: the mesh axis or axes that the sequence is split over; by default as q lies. In a `shard_map` body it must
            be said.
        method: "ring": keys and values go round, and neither scores nor the other ranks' keys are kept: a rank's memory
            is that of its part of the sequence. "all_gather": keys and values are gathered, which is one collective
            there and one back, and are kept whole; ranks add up their parts of these gradients in the dtype of k, so that
            in bfloat16 they err by 1.2 times as much as on one device (the ring adds up in float32). "all_to_all": each rank
            gets the whole sequence of some of the heads, with zeros for heads where the ranks do not divide them; what travels
            does not grow with the number of ranks.
        zigzag: n, if the tokens lie in the order ``zigzag_order(T, n)``. With `causal` and n ranks, all ranks have the
            same work, and the ring has half of it; without, and with a mask, a window or dropout, ranks compute also what
            is then taken away. The mask, like q and k, is in this order; causal and window go by positions.
        spec: in a `shard_map` body alone: the layout of the whole q. It stands for `axis`, and says which part of
            dropout's mask is this rank's where batch or heads are split too; without it, ranks along other axes than
            `axis` have the same one, unless their keys differ.

    Returns:
        [B, H, T, E], lying as q does; zeros for a query that may look at no key. "ring" has derivatives of every order in
        both modes, the others those that ``F.scaled_dot_product_attention`` has. With a mask, a window or dropout the ring
        computes the scores of one rank's queries and keys at a time and keeps none; dropout by the other methods keeps
        the weights.

    Raises:
        CollectiveError: shapes that do not fit each other or, where the sequence is split, the ranks; on all ranks,
            before anything moves.
        RandomError: dropout outside [0, 1], or without one key.

    Source: Liu et al., "Ring Attention" (arXiv 2310.01889) for the ring; Llama 3 (arXiv 2407.21783) for the gather and
        for the zigzag order; Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509) for the all-to-all.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> q, k, v = torch.randn(3, 2, 4, 8, 16).unbind()
    >>> whole = vfn.nn.attention(q, k, v, causal=True)
    >>> with vfn.simulate(4):
    ...     parts = vfn.shard((q, k, v), vfn.make_mesh((2, 2), ("dp", "cp")), P("dp", None, "cp"))
    ...     y = vfn.nn.attention(*parts, causal=True)
    ...     print(vfn.spec_of(y), torch.allclose(vfn.unshard(y), whole, atol=1e-6))
    P('dp', None, 'cp') True

    A sliding window, a mask of padding and dropout:

    >>> terms = dict(window=(3, 0), mask=torch.arange(8) < torch.tensor([8, 5])[:, None, None, None],
    ...              dropout=0.1, key=vfn.random.key(0))
    >>> whole = vfn.nn.attention(q, k, v, **terms)
    >>> with vfn.simulate(4):
    ...     parts = vfn.shard((q, k, v), vfn.make_mesh((2, 2), ("dp", "cp")), P("dp", None, "cp"))
    ...     torch.allclose(vfn.unshard(vfn.nn.attention(*parts, **terms)), whole, atol=1e-6)
    True
    """
    check(q, k, v, causal, method, zigzag, mask, window, spec)
    rate = dropout_rate(dropout, key)
    key = checked(key, "nn.attention") if rate else None
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    masked = mask is not None or window is not None or key is not None
    way = _Way(method, causal, masked, Terms(scale, window_of(window, causal), zigzag, rate))
    arrays = [x for x in (q, k, v) if is_array(x)]
    body = context.body()
    if body is not None and not arrays:
        return _in_body(q, k, v, mask, key, way, axis, spec, body)
    if spec is not None:
        raise CollectiveError(
            report("nn.attention", f"spec={short(spec)} outside of a shard_map body", fix="no spec: arrays have theirs")
        )
    rows = split_axes(spec_of(q if is_array(q) else arrays[0]), 4) if arrays else ((),) * 4
    if arrays and axis is not None:
        rows = (*rows[:2], axis_names(axis, axes_of(mesh_of(arrays[0])), "nn.attention", "axis"), ())
    mask = mask_of_4_dims(mask, (*q.shape[:3], k.shape[2]))
    if not rows[2]:
        if rows[1] and q.shape[1] % math.prod(axes_of(mesh_of(arrays[0]))[a] for a in rows[1]) == 0:
            k, v = _unshared(q, k, v, mesh_of(arrays[0]), rows[:3])
        return whole_masked(q, k, v, mask, key, way.terms) if masked else _whole(q, k, v, scale, causal, zigzag)
    over = (*(tuple(a for a in row if a not in rows[2]) for row in rows[:2]), rows[2])
    return _over_ranks(q, k, v, mask, key, way, mesh_of(arrays[0]), over)


@dataclass(frozen=True)
class _Way:
    """How queries meet the keys of other ranks. `masked`: whether there is a mask, a window or dropout."""

    method: str
    causal: bool
    masked: bool
    terms: Terms

    @property
    def halves(self) -> int:
        """Into how many parts a rank's tokens must divide. A mask goes by position, so that any order will do."""
        return 2 if halved(self.method, self.causal, self.terms.zigzag) and not self.masked else 1


def _over_ranks(q: Any, k: Any, v: Any, mask: Any, key: Any, way: _Way, mesh: Any, over: tuple[Axes, ...]) -> Any:
    """On arrays whose batch, heads and sequence are split over these axes."""
    sizes, wanted, given = axes_of(mesh), from_split_axes(over), q.shape[:3]
    terms, method = way.terms, way.method
    fits = _fits(q, k, over, sizes)
    in_parts = fits[2] and _fits(q, k, over, sizes, way.halves)[2]
    even = in_parts and all(fits)
    # in another order than the mesh's a part need not be contiguous
    over = tuple(row if fit else tuple(a for a in sizes if a in row) for row, fit in zip(over, fits, strict=True))
    batch, heads, names = over
    k, v = _unshared(q, k, v, mesh, over)
    if method == "all_gather" and not (terms.zigzag or way.masked) and fits == (True, True, False):
        apart, whole = from_split_axes([batch, heads, names]), from_split_axes([batch, heads], reduced=names)
        q, k, v = with_sharding((q, k, v), (apart, whole, whole), mesh=mesh)
        return _whole(q, k, v, terms.scale, way.causal, terms.zigzag)
    here, there = (part_sizes(x.shape[2], names, mesh) for x in (q, k))
    if not way.masked:
        check_parts(method, way.causal, terms.zigzag, names, here, in_body=False)
    rows, multiples = from_split_axes(over), (1, 1, way.halves)
    if not even:
        q, k, v = (
            _filled_up(x, rows, mesh, multiples) for x in with_sharding((q, k, v), (rows, rows, rows), mesh=mesh)
        )
    if way.masked:
        mask, mask_spec = _placed_mask(mask, over, mesh, () if even else multiples)
        terms = replace(terms, here=here, there=there, sizes=tuple(given[:2]), batch=batch, heads=heads)
        more = tuple(x for x in (mask, key) if x is not None)
        out = _mapped_masked(mesh, rows, mask_spec, key is not None, names, method, terms)(q, k, v, *more)
    else:
        counts = None if in_parts else there
        out = _mapped(mesh, rows, names, method, terms.scale, way.causal, terms.zigzag, counts)(q, k, v)
    for dim, multiple in enumerate(multiples):
        out = cut(out, mesh, rows, dim, given[dim], "nn.attention", multiple)
    return out if rows == wanted else with_sharding(out, wanted, mesh=mesh)


def _fits(q: Any, k: Any, over: tuple[Axes, ...], sizes: dict[str, int], times: int = 1) -> tuple[bool, bool, bool]:
    """Whether the ranks divide batch, heads and sequence, that of q in so many parts each."""
    ways = [math.prod(sizes[a] for a in row) for row in over]
    batch, heads, length = (q.shape[dim] % (n * (times if dim == 2 else 1)) == 0 for dim, n in enumerate(ways))
    return batch, heads, length and k.shape[2] % ways[2] == 0


def _unshared(q: Any, k: Any, v: Any, mesh: Any, over: tuple[Axes, ...]) -> tuple[Any, Any]:
    """Keys and values whose heads are repeated where queries of several ranks would share one."""
    batch, heads, names = over
    times = repeats(q, k, (part[0] for part in parts(q.shape[1], heads, mesh) if len(part)))
    if times > 1:
        k, v = with_sharding((k, v), from_split_axes([batch, (), names]), mesh=mesh)
        if q.shape[1] % math.prod(axes_of(mesh)[a] for a in heads) == 0:
            k, v = own_heads((k, v), mesh, over, times)
        else:
            k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    return k, v


def _placed_mask(mask: Any, over: tuple[Axes, ...], mesh: Any, multiples: Sequence[int]) -> tuple[Any, P | None]:
    """A mask split as the scores are, where it has more than one row, and how."""
    if mask is None:
        return None, None
    spec = from_split_axes([row if size > 1 else () for size, row in zip(mask.shape, over)])
    return _filled_up(with_sharding(mask, spec, mesh=mesh), spec, mesh, multiples), spec


def _filled_up(x: Any, spec: P, mesh: Any, multiples: Sequence[int]) -> Any:
    """With zeros at the end of dims that ranks do not divide."""
    for dim, multiple in enumerate(multiples):
        x = padded(x, mesh, spec, dim, "nn.attention", multiple)
    return x


def _in_body(q: Any, k: Any, v: Any, mask: Any, key: Any, way: _Way, axis: Any, spec: Any, body: Any) -> Any:
    """On one rank's part of the sequence."""
    rows = split_axes(spec, 4) if spec is not None else ((),) * 4
    if axis is None and not rows[2]:
        raise CollectiveError(
            report(
                "nn.attention",
                "in a shard_map body a value does not say over which axis its sequence is split",
                fix=f"axis=..., one of the {mesh_text(axes_of(body.mesh))}; or F.scaled_dot_product_attention, if each "
                "rank has the whole sequence",
            )
        )
    terms, method = way.terms, way.method
    names = taking_part("nn.attention", rows[2] if axis is None else axis, "axis")[1]
    n = axis_size(names)
    here, there = (q.shape[2],) * n, (k.shape[2],) * n
    if not way.masked:
        check_parts(method, way.causal, terms.zigzag, names, here, in_body=True)
        return _METHODS[method](q, k, v, names, terms.scale, way.causal, terms.zigzag, None)
    mask = mask_of_4_dims(mask, (*q.shape[:3], sum(there)), ", of this rank's queries and all keys")
    if key is not None:
        shared_keys.warn("nn.attention", key, {"q": q}, from_split_axes([*rows[:2], names]))
    batch, heads = (tuple(a for a in row if a not in names) for row in rows[:2])
    ways = (axis_size(axes) if axes else 1 for axes in (batch, heads))
    held = tuple(x * y for x, y in zip(q.shape[:2], ways))
    terms = replace(terms, here=here, there=there, sizes=held, batch=batch, heads=heads)
    return _MASKED[method](q, k, v, mask, key, names, terms)


@functools.lru_cache(maxsize=256)
def _mapped(
    mesh: Any, spec: P, names: Axes, method: str, scale: float, causal: bool, zigzag: int, counts: Counts
) -> Any:
    def attention(q: Any, k: Any, v: Any) -> Any:
        if counts is None:
            return _METHODS[method](q, k, v, names, scale, causal, zigzag, None)
        *given, its = without_padding(q, k, v, names, counts, scale)
        return _METHODS[method](*given, names, its, causal, zigzag, counts)[..., :-1]

    return shard_map(attention, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)


@functools.lru_cache(maxsize=256)
def _mapped_masked(mesh: Any, spec: P, mask_spec: P | None, keyed: bool, names: Axes, method: str, terms: Terms) -> Any:
    def attention(q: Any, k: Any, v: Any, *more: Any) -> Any:
        mask, key = more[0] if mask_spec is not None else None, more[-1] if keyed else None
        return _MASKED[method](q, k, v, mask, key, names, terms)

    more = ((mask_spec,) if mask_spec is not None else ()) + ((P(),) if keyed else ())
    return shard_map(attention, mesh=mesh, in_specs=(spec, spec, spec, *more), out_specs=spec)


def _whole(q: Any, k: Any, v: Any, scale: float, causal: bool, zigzag: int, counts: Counts = None) -> Any:
    """On one device. In zigzag order the mask is by position."""
    mask = None
    if causal and zigzag:
        order = positions(q.shape[2], zigzag, counts, q.device)
        mask = order.unsqueeze(1) >= order
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal and mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


# --- the three ways, in a body ----------------------------------------------------------------------------------------


def _ring(q: Any, k: Any, v: Any, names: Axes, scale: float, causal: bool, zigzag: int, counts: Counts) -> Any:
    return ring_attention(q, k, v, names, scale, causal, bool(zigzag))


def _gather(q: Any, k: Any, v: Any, names: Axes, scale: float, causal: bool, zigzag: int, counts: Counts) -> Any:
    """All keys and values come to each rank."""
    length, mask = q.shape[2], None
    k, v = all_gather((k, v), names, axis=2, tiled=True)
    if causal:
        there = positions(k.shape[2], zigzag, counts, q.device)
        here = there.index_select(0, torch.arange(length, device=q.device) + axis_index(names) * length)
        mask = here.unsqueeze(1) >= there
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _exchange(q: Any, k: Any, v: Any, names: Axes, scale: float, causal: bool, zigzag: int, counts: Counts) -> Any:
    """The whole sequence of some of the heads comes to each rank."""
    heads = q.shape[1]
    q, k, v = all_to_all(divided(q, k, v, axis_size(names)), names, 1, 2, tiled=True)
    out = all_to_all(_whole(q, k, v, scale, causal, zigzag, counts), names, 2, 1, tiled=True)
    return out.narrow(1, 0, heads)


_METHODS: dict[str, Callable[..., Any]] = dict(zip(METHODS, (_ring, _gather, _exchange), strict=True))
_MASKED: dict[str, Callable[..., Any]] = dict(zip(METHODS, (ring_masked, gather_masked, exchange_masked), strict=True))
