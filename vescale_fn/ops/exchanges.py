"""all_gather, psum_scatter, all_to_all, ppermute, pbroadcast: values that go from rank to rank.

Source: `jax.lax`'s parallel operators.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from .._core.base.errors import CollectiveError
from .._core.base.messages import described, meant, report, short
from .._core.shard_map import mixed_axes, vmap_collectives
from .._core.shard_map.collective_calls import Axis, send, span, taking_part
from .._core.shard_map.collective_operands import dim_problem, size_problem

_GATHERS = {"varying": ("all_gather", "V"), "invarying": ("all_gather_invariant", "I"), "reduced": ("all_gather", "R")}


def all_gather(x: Any, axis_name: Axis, *, axis: int = 0, tiled: bool = False, to: str = "varying") -> Any:
    """The values of all ranks along an axis, on every one of them.

    Args:
        x: a tree.
        axis_name: a mesh axis or the `axis_name` of a `vmap` around, or a tuple of them, major first.
        axis: the dim where the ranks' values go: a new one, or with `tiled` the one along which they are concatenated.
        tiled: concatenate instead of stacking.
        to: how the result is typed, which decides what the backward pass does: "varying" (a reduce-scatter),
            "invarying" (a slice, nothing moves; may be returned with ``out_specs=P()``), "reduced" (a reduce-scatter of
            a gradient that stayed unreduced: weights sharded over data-parallel ranks).

    Raises:
        CollectiveError: outside a `shard_map` body, or an `axis` that a leaf does not have.
        MeshError: an unknown axis name.

    Source: `jax.lax.all_gather`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     body = lambda x: vfn.all_gather(x, "i", tiled=True, to="invarying") * 2
    ...     f = vfn.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P())
    ...     print(vfn.unshard(f(torch.arange(4.0))))
    tensor([0., 2., 4., 6.])
    """
    parts = vmap_collectives.runs("all_gather", axis_name)
    if to not in _GATHERS:
        raise CollectiveError(
            report(
                "all_gather",
                f"to={short(to)} is not one of {tuple(_GATHERS)}{meant(to, _GATHERS)}",
                fix='to="varying", the default; "invarying" for a result that may be returned with out_specs=P()',
            )
        )

    def problem(leaf: torch.Tensor, n: int, span: str) -> str | None:
        found = dim_problem(axis, leaf.ndim + (not tiled), "axis", "x" if tiled else "the result")
        return f"{found}; tiled=False gathers scalars" if found and tiled and not leaf.ndim else found

    if parts:
        if to != "varying":
            raise CollectiveError(
                report("all_gather", f"to={to!r}, but entries of a vmap have no types", fix='to="varying", the default')
            )
        if len(parts) > 1:
            return mixed_axes.gathered(all_gather, x, parts, axis, tiled)
        return vmap_collectives.sent("all_gather", x, parts[0], "all_gather", dim=axis, tiled=tiled, problem=problem)
    body, _, _ = taking_part("all_gather", axis_name)
    row, gives = _GATHERS[to] if body.check else _GATHERS["varying"]
    return send("all_gather", x, axis_name, row, dim=axis, gives=gives, tiled=tiled, problem=problem)


def psum_scatter(x: Any, axis_name: Axis, *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """The sum of the ranks' values along an axis, of which each rank keeps its own piece: a reduce-scatter.

    Args:
        x: a tree.
        axis_name: a mesh axis or the `axis_name` of a `vmap` around, or a tuple of them, major first.
        scatter_dimension: the dim that is cut into one piece a rank.
        tiled: the dim stays, and a piece is a slice of it (its size must divide); else its size must be the number of
            ranks and it goes away.

    Raises:
        CollectiveError: outside a `shard_map` body, or a size that does not fit.
        MeshError: an unknown axis.

    Source: `jax.lax.psum_scatter`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     body = lambda x: vfn.psum_scatter(x, "i", tiled=True)
    ...     f = vfn.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    ...     print(vfn.unshard(f(torch.arange(16.0))))
    tensor([24., 28., 32., 36.])
    """

    def problem(leaf: torch.Tensor, n: int, span: str) -> str | None:
        return dim_problem(scatter_dimension, leaf.ndim, "scatter_dimension") or size_problem(
            leaf, scatter_dimension, "scatter_dimension", tiled, n, span
        )

    given = {
        "dim": scatter_dimension,
        "tiled": tiled,
        "problem": problem,
        "fix": "pad the dim, scatter along another, or vfn.psum and slice",
    }
    if parts := vmap_collectives.runs("psum_scatter", axis_name):
        if len(parts) > 1:
            return mixed_axes.scattered(psum_scatter, x, parts, **given)
        return vmap_collectives.sent("psum_scatter", x, parts[0], "psum_scatter", **given)
    return send("psum_scatter", x, axis_name, "psum_scatter", takes="VU", **given)


def all_to_all(x: Any, axis_name: Axis, split_axis: int, concat_axis: int, *, tiled: bool = False) -> Any:
    """Cut the value into one piece for each rank, send each its piece, and put together what arrives.

    Args:
        x: a tree.
        axis_name: a mesh axis or the `axis_name` of a `vmap` around, or a tuple of them, major first.
        split_axis: the dim that is cut.
        concat_axis: the dim where the arriving pieces go, in rank order. Without `tiled`, counted after `split_axis`
            has gone.
        tiled: slices of `split_axis` are concatenated along `concat_axis`; else `split_axis`, whose size must be the
            number of ranks, goes away and `concat_axis` is a new dim.

    Raises:
        CollectiveError: outside a `shard_map` body, or sizes that do not fit.
        MeshError: an unknown axis.

    Source: `jax.lax.all_to_all`; its gradient is also right where the untiled axes differ.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(2):
    ...     mesh = vfn.make_mesh((2,), ("i",))
    ...     body = lambda x: vfn.all_to_all(x, "i", 1, 0, tiled=True)
    ...     f = vfn.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P(None, "i"))
    ...     print(vfn.unshard(f(torch.arange(4).view(2, 2))))
    tensor([[0, 1],
            [2, 3]])
    """

    def problem(leaf: torch.Tensor, n: int, span: str) -> str | None:
        return (
            dim_problem(split_axis, leaf.ndim, "split_axis")
            or dim_problem(concat_axis, leaf.ndim, "concat_axis", "x" if tiled else "the result")
            or size_problem(leaf, split_axis, "split_axis", tiled, n, span)
        )

    given = {
        "dim": split_axis,
        "other": concat_axis,
        "tiled": tiled,
        "problem": problem,
        "fix": "another split_axis, or pad the dim",
    }
    if parts := vmap_collectives.runs("all_to_all", axis_name):
        mixed_axes.refuse("all_to_all", axis_name, parts)
        return vmap_collectives.sent("all_to_all", x, parts[0], "all_to_all", **given)
    return send("all_to_all", x, axis_name, "all_to_all", **given)


def ppermute(x: Any, axis_name: Axis, perm: Sequence[tuple[int, int]]) -> Any:
    """Send each rank's value to another rank.

    Args:
        x: a tree.
        axis_name: a mesh axis or the `axis_name` of a `vmap` around, or a tuple of them, major first.
        perm: (source, destination) pairs of positions along the axis. A rank that is no destination gets zeros.

    Raises:
        CollectiveError: outside a `shard_map` body; a source or a destination named twice, or out of range.
        MeshError: an unknown axis.

    Source: `jax.lax.ppermute`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     body = lambda x: vfn.ppermute(x, "i", [(0, 1), (1, 2)])
    ...     f = vfn.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    ...     print(vfn.unshard(f(torch.arange(1.0, 5.0))))
    tensor([0., 1., 2., 0.])
    """
    parts = vmap_collectives.runs("ppermute", axis_name)
    mixed_axes.refuse("ppermute", axis_name, parts)
    names, n = mixed_axes.names_and_size("ppermute", axis_name, parts)
    try:
        pairs = tuple((operator.index(source), operator.index(destination)) for source, destination in perm)
    except (TypeError, ValueError):
        raise CollectiveError(
            report(
                "ppermute",
                f"perm={_perm_text(perm)} is not a sequence of (source, destination) pairs",
                fix=f"a shift by one is [(i, (i + 1) % {n}) for i in range({n})]",
            )
        ) from None
    failures = [
        f"pair {pair}: positions go from 0 to {n - 1}, there are {span(names, n)}"
        for pair in pairs
        if not all(0 <= i < n for i in pair)
    ]
    for word, places in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        failures += [
            f"{word} {i} is in {[pair for pair in pairs if pair[word == 'destination'] == i]}"
            for i, count in sorted(Counter(places).items())
            if count > 1
        ]
    if failures:
        raise CollectiveError(
            report(
                "ppermute",
                f"perm={list(pairs)} is not a permutation of some of the ranks",
                failures,
                "each rank at most once as source and at most once as destination",
            )
        )
    if parts:
        return vmap_collectives.sent("ppermute", x, parts[0], "ppermute", perm=pairs)
    return send("ppermute", x, axis_name, "ppermute", perm=pairs)


def _perm_text(perm: Any) -> str:
    held = (
        [b for a in perm for b in (a if isinstance(a, (tuple, list)) else (a,))]
        if isinstance(perm, (tuple, list))
        else ()
    )
    return "[...] with tensors in it" if any(isinstance(a, torch.Tensor) for a in held) else repr(perm)


def pbroadcast(x: Any, axis_name: Axis, source: int) -> Any:
    """The value of one rank, on every rank along an axis.

    Args:
        x: a tree.
        axis_name: a mesh axis or the `axis_name` of a `vmap` around, or a tuple of them, major first.
        source: the position along the axis whose value is taken.

    Returns:
        The same tree, typed varying although it is equal everywhere.

    Raises:
        CollectiveError: outside a `shard_map` body, or a `source` out of range.
        MeshError: an unknown axis.

    Source: `jax.lax.pbroadcast`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(4):
    ...     mesh = vfn.make_mesh((4,), ("i",))
    ...     f = vfn.shard_map(lambda x: vfn.pbroadcast(x, "i", 2), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    ...     print(vfn.unshard(f(torch.arange(4.0))))
    tensor([2., 2., 2., 2.])
    """
    parts = vmap_collectives.runs("pbroadcast", axis_name)
    names, n = mixed_axes.names_and_size("pbroadcast", axis_name, parts)
    if isinstance(source, (bool, torch.Tensor)) or not hasattr(source, "__index__"):
        raise CollectiveError(
            report(
                "pbroadcast",
                f"source must be an int, one position for all ranks, but it is {described(source)}",
                fix="torch.where(vfn.axis_index(axis) == i, x, 0) and vfn.psum, where the source is computed",
            )
        )
    if not 0 <= operator.index(source) < n:
        raise CollectiveError(
            report("pbroadcast", f"source={source}, but positions go from 0 to {n - 1}: there are {span(names, n)}")
        )
    if len(parts) > 1:
        return mixed_axes.broadcast(pbroadcast, x, parts, operator.index(source))
    if parts:
        return vmap_collectives.sent("pbroadcast", x, parts[0], "pbroadcast", source=operator.index(source))
    return send("pbroadcast", x, axis_name, "pbroadcast", source=operator.index(source))
