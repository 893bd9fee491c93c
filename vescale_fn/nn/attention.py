"""Attention whose sequence may be split over ranks: context parallelism."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .. import context
from ..array import is_array, mesh_of, spec_of
from ..errors import CollectiveError, count_text, described, meant, mesh_text, report, short
from ..marks import text
from ..mesh import axes_of, axis_names
from ..ops import all_gather, all_to_all, axis_index, axis_size
from ..ops.sending import taking_part
from ..placement import with_sharding
from ..shard_map import shard_map
from ..spec import P, from_split_axes, split_axes
from .padding import cut, padded, part_sizes
from .ring import ring_attention
from .visible import positions, without_padding
from .zigzag import chunks

Axes = tuple[str, ...]
Counts = tuple[int, ...] | None  # how many of each rank's keys are no padding, if there is any


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
              axis: str | Sequence[str] | None = None, method: str = "ring", zigzag: int = 0) -> torch.Tensor:  # fmt: skip
    """Scaled dot product attention, of a sequence that may be split over ranks.

    On plain tensors and on arrays whose sequence is whole this is ``F.scaled_dot_product_attention``. On arrays whose
    sequence is split, evenly or not, each rank works on its own queries, and `method` says how it meets the keys and
    values of all others. Batch and heads may be split over other axes at the same time. Inside a `shard_map` body, q, k
    and v are one rank's part of the sequence.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, G, S, D], where G divides H: ``H / G`` query heads share a key head. Where heads are split over more
            than G ranks, each key head is repeated for several of these.
        v: values [B, G, S, E]. All three lie alike: ``P(batch axes, head axes, sequence axes)``.
        causal: query i looks at the keys up to i alone; T and S are then the same.
        scale: what scores are multiplied by; by default ``1 / sqrt(D)``.
        axis: the mesh axis or axes that the sequence is split over; by default as q lies. In a `shard_map` body it must
            be said.
        method: "ring": keys and values go round, and neither scores nor the other ranks' keys are kept: a rank's memory
            is that of its part of the sequence. "all_gather": keys and values are gathered, which is one collective
            there and one back, and are kept whole. "all_to_all": each rank gets the
            whole sequence of some of the heads, which the number of ranks must divide; what travels does not grow with
            the number of ranks.
        zigzag: n, if the tokens lie in the order ``zigzag_order(T, n)``. With `causal` and n ranks, all ranks have the
            same work, and the ring has half of it; without, ranks compute also what the mask then takes away.

    Returns:
        [B, H, T, E], lying as q does. "ring" has derivatives of every order in both modes, the others those that
        ``F.scaled_dot_product_attention`` has.

    Raises:
        CollectiveError: shapes that do not fit each other or, where the sequence is split, the ranks; on all ranks,
            before anything moves. There is no dropout: it would be keyed, so it belongs after (`vfn.random.dropout`).

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
    """
    _check(q, k, v, causal, method, zigzag)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    arrays = [x for x in (q, k, v) if is_array(x)]
    body = context.body()
    if body is not None and not arrays:
        if axis is None:
            raise CollectiveError(report(
                "nn.attention", "in a shard_map body a value does not say over which axis its sequence is split",
                fix=f"axis=..., one of the {mesh_text(axes_of(body.mesh))}; or F.scaled_dot_product_attention, if each "
                "rank has the whole sequence"))  # fmt: skip
        names = taking_part("nn.attention", axis, "axis")[1]
        n = axis_size(names)
        _check_parts(q, k, method, causal, zigzag, names, (q.shape[2],) * n)
        return _METHODS[method](q, k, v, names, scale, causal, zigzag, None)
    if not arrays:
        return _whole(q, k, v, scale, causal, zigzag)
    mesh = mesh_of(arrays[0])
    sizes = axes_of(mesh)
    rows = split_axes(spec_of(q if is_array(q) else arrays[0]), 4)
    names = rows[2] if axis is None else axis_names(axis, sizes, "nn.attention", "axis")
    if not names:
        return _whole(q, k, v, scale, causal, zigzag)
    n = math.prod(sizes[a] for a in names)
    batch, heads = (tuple(a for a in row if a not in names) for row in rows[:2])
    ranks = math.prod(sizes[a] for a in heads)
    if k.shape[1] % ranks and ranks % k.shape[1] == 0:  # several ranks need the same key head
        k, v = (x.repeat_interleave(ranks // k.shape[1], 1) for x in (k, v))
    if method == "all_gather" and not zigzag and (q.shape[2] % n or k.shape[2] % n):
        apart, whole = from_split_axes([batch, heads, names]), from_split_axes([batch, heads], reduced=names)
        q, k, v = with_sharding((q, k, v), (apart, whole, whole), mesh=mesh)
        return _whole(q, k, v, scale, causal, zigzag)
    wanted, length = from_split_axes([batch, heads, names]), q.shape[2]
    if length % n or k.shape[2] % n:  # in another order a part need not be contiguous
        names = tuple(a for a in sizes if a in names)
    here, there = (part_sizes(x.shape[2], names, mesh) for x in (q, k))
    _check_parts(q, k, method, causal, zigzag, names, here, batch, heads, sizes)
    spec, multiple = from_split_axes([batch, heads, names]), 2 if _halved(method, causal, zigzag) else 1
    if not (length % (n * multiple) or k.shape[2] % (n * multiple)):
        return _mapped(mesh, spec, names, method, scale, causal, zigzag, None)(q, k, v)
    if spec != wanted or not all(map(is_array, (q, k, v))):
        q, k, v = with_sharding((q, k, v), (spec, spec, spec), mesh=mesh)
    q, k, v = (padded(x, mesh, spec, 2, "nn.attention", multiple) for x in (q, k, v))
    out = _mapped(mesh, spec, names, method, scale, causal, zigzag, there)(q, k, v)
    out = cut(out, mesh, spec, 2, length, "nn.attention", multiple)
    return out if spec == wanted else with_sharding(out, wanted, mesh=mesh)


@functools.lru_cache(maxsize=256)
def _mapped(mesh: Any, spec: P, names: Axes, method: str, scale: float, causal: bool, zigzag: int,
            counts: Counts) -> Any:  # fmt: skip
    def attention(q: Any, k: Any, v: Any) -> Any:
        if counts is None:
            return _METHODS[method](q, k, v, names, scale, causal, zigzag, None)
        *given, its = without_padding(q, k, v, names, counts, scale)
        return _METHODS[method](*given, names, its, causal, zigzag, counts)[..., :-1]

    return shard_map(attention, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)


def _whole(q: Any, k: Any, v: Any, scale: float, causal: bool, zigzag: int, counts: Counts = None) -> Any:
    """On one device. In zigzag order the mask is by position."""
    mask = None
    if causal and zigzag:
        order = positions(q.shape[2], zigzag, counts, q.device)
        mask = order.unsqueeze(1) >= order
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None, scale=scale,
                                          enable_gqa=q.shape[1] != k.shape[1])  # fmt: skip


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
    n = axis_size(names)
    if k.shape[1] % n:  # several ranks need the same key head
        k, v = (x.repeat_interleave(n // k.shape[1], 1) for x in (k, v))
    q, k, v = all_to_all((q, k, v), names, 1, 2, tiled=True)
    return all_to_all(_whole(q, k, v, scale, causal, zigzag, counts), names, 2, 1, tiled=True)


_METHODS: dict[str, Callable[..., Any]] = {"ring": _ring, "all_gather": _gather, "all_to_all": _exchange}


# --- what does not fit ------------------------------------------------------------------------------------------------


def _check(q: Any, k: Any, v: Any, causal: Any, method: Any, zigzag: Any) -> None:
    """Whether the arguments fit each other, on any mesh."""
    given = {"q": q, "k": k, "v": v}
    failures = [f"{name} must be a floating-point tensor of 4 dims (batch, heads, sequence, width), but it is {described(x)}"
                for name, x in given.items()
                if not isinstance(x, torch.Tensor) or x.ndim != 4 or not x.is_floating_point()]  # fmt: skip
    if not failures:

        def same(word: str, dim: int, a: str, b: str) -> list[str]:
            one, other = given[a], given[b]
            if one.shape[dim] == other.shape[dim]:
                return []
            return [f"{a} and {b} have {word} {one.shape[dim]} and {other.shape[dim]}: {text(one)}, {text(other)}"]

        failures += same("batch", 0, "q", "k") + same("batch", 0, "k", "v") + same("width", 3, "q", "k")
        failures += same("heads", 1, "k", "v") + same("length", 2, "k", "v")
        if not k.shape[1] or q.shape[1] % k.shape[1]:
            failures.append(
                f"the heads of k must divide those of q, but {count_text(q.shape[1], 'head')} of q are to "
                f"share {count_text(k.shape[1], 'head')} of k"
            )
        if causal and q.shape[2] != k.shape[2]:
            failures.append(
                f"causal: query i looks at keys up to i, but there are {q.shape[2]} queries and {k.shape[2]} keys"
            )
        if len({x.dtype for x in given.values()}) > 1:
            failures.append(f"q, k and v must be of one dtype, but they are {', '.join(map(text, given.values()))}")
    if method not in _METHODS:
        failures.append(f"method={short(method)} is not one of {tuple(_METHODS)}{meant(method, _METHODS)}")
    if isinstance(zigzag, bool) or not isinstance(zigzag, int) or zigzag < 0:
        failures.append(f"zigzag must be a number of ranks, or 0 for the usual order, but it is {described(zigzag)}")
    if failures:
        raise CollectiveError(report("nn.attention", "the arguments do not fit", failures))


def _halved(method: str, causal: bool, zigzag: int) -> bool:
    """Whether a rank works on the two halves of its tokens."""
    return method == "ring" and causal and zigzag > 0


def _check_parts(q: Any, k: Any, method: str, causal: bool, zigzag: int, names: Axes, counts: tuple[int, ...],
                 batch: Axes = (), heads: Axes = (), sizes: Any = None) -> None:  # fmt: skip
    """Whether the sequence may be split into parts of `counts`, and heads and batch over others."""
    n, failures, fix = len(counts), [], ""
    along = f"{n} ranks along {', '.join(map(repr, names))}"
    if sizes is not None:
        for word, dim, axes in (("batch", 0, batch), ("heads", 1, heads)):
            ranks = math.prod(sizes[a] for a in axes)
            failures += [f"the {word} of {name} {'do' if dim else 'does'} not divide by the {ranks} ranks along "
                         f"{', '.join(map(repr, axes))}: {x.shape[dim]} % {ranks} = {x.shape[dim] % ranks}"
                         for name, x in (("q", q), ("k", k)) if x.shape[dim] % ranks]  # fmt: skip
    if zigzag and zigzag != n and method == "ring":
        failures.append(f"tokens in the zigzag order of {zigzag} ranks go round a ring of {n}")
        fix = f"zigzag={n}, with the tokens in the order zigzag_order({sum(counts)}, {n}); or method='all_gather'"
    elif _halved(method, causal, zigzag):
        if sizes is None and counts[0] % 2:
            failures.append(f"in zigzag order a rank has an early and a late half, but {counts[0]} tokens")
            fix = "pad the tokens at the end; or nn.attention on arrays, which does"
        if counts != chunks(sum(counts), n):
            failures.append(f"zigzag_order gives the ranks {list(chunks(sum(counts), n))} tokens, but they have "
                            f"{list(counts)}")  # fmt: skip
            fix = "split the sequence over one axis; or pad the tokens at the end; or method='all_gather'"
    if method == "all_to_all":
        ranks = math.prod(sizes[a] for a in heads) if sizes is not None else 1
        mine, shared = q.shape[1] // ranks, k.shape[1] // ranks
        if mine % n or (shared % n and (not shared or n % shared)):
            failures.append(f"all_to_all gives each rank some of the heads, but a rank has {mine} of q and {shared} of k, "
                            f"for {n} ranks")  # fmt: skip
            fix = fix or "method='ring'"
    if failures:
        raise CollectiveError(report("nn.attention", f"the sequence cannot be split over {along}", failures, fix))
