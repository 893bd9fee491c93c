"""A mixture of experts: tokens brought to their experts and back, in buffers of a fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core.arrays.array import is_array, mesh_of, moved, spec_of
from .._core.base import context, tree
from .._core.base.errors import CollectiveError
from .._core.base.messages import described, report
from .._core.base.user_calls import called, checked_function
from .._core.shard_map.collective_calls import taking_part
from .._core.sharding.spec import from_split_axes, split_axes
from ..ops import all_to_all
from .routing import Routes, route_problems


def experts(
    f: Callable[..., Any],
    params: Any,
    x: torch.Tensor,
    routes: Routes,
    *,
    capacity: int | None = None,
    axis: Any = None,
) -> torch.Tensor:
    """Each token's experts, applied to it and weighed: ``sum over j of weights[j] * f(params[experts[j]], token)``.

    Tokens come in groups, such as the sequences of a batch, and each expert has a buffer of `capacity` rows for each
    group. Within a group, first choices are taken in before second choices, in the order of the tokens. So it is the
    same tokens that find no room, whatever the mesh. They get zeros from that expert, and pass by in the residual stream.

    On arrays, tokens are sent to where their experts are, as the parameters lie: if tokens and experts are split over
    the same axis, that is one all-to-all there and one back, and as many for the gradient. Experts may be split over
    several axes, groups over these and others, hidden dims over yet others.

    Args:
        f: ``f(params, rows)``, all experts at once: rows [E, M, D] to [E, M, D'], row by row. Rows that no token has
            are zeros, and their results go nowhere.
        params: a tree of tensors [E, ...].
        x: tokens [..., T, D]: groups of T tokens. To split a sequence over ranks as well, make groups of its parts:
            ``x.unflatten(1, (parts, -1))``.
        routes: of `route`, for these tokens.
        capacity: rows of each expert for each group. By default T, the most that a group can need, so that no token is
            dropped, wherever they all go. Shapes may not depend on routes, so this is paid for always: buffers of E T
            rows a group, of which k T are used, which is E / k times as much as an even load needs, in memory and in what
            `f` computes. With 8 experts, k = 2, T = 4096, D = 4096 and hidden rows of 14336, in bf16, that is for one
            group 8 * 4096 * 4096 * 2 = 268 MB of rows, as much of results, and 940 MB of each hidden value, four times
            what is used. ``math.ceil(1.25 * k * T / E)`` makes it 1.25 times, and drops what exceeds that; shorter groups
            (``x.unflatten(1, (parts, -1))``) do not change the sum, but even out less.
        axis: in a `shard_map` body, where x and params are one rank's: the axis or axes that the experts are split over.

    Returns:
        [..., T, D'], lying as x does; where the experts' hidden dims are split, a sum that ranks have yet to add up.

    Raises:
        CollectiveError: routes, parameters and tokens that do not fit each other; before anything moves.

    Source: Lepikhin et al., "GShard" (arXiv 2006.16668), whose groups and order of choices these are; Fedus et al.,
        "Switch Transformers" (arXiv 2101.03961).

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> x, gate, w = torch.randn(2, 6, 4), torch.randn(4, 8), torch.randn(8, 4, 4)
    >>> moe = lambda w, x: vfn.nn.experts(lambda w, rows: rows @ w, w, x, vfn.nn.route(x @ gate, 2))
    >>> with vfn.simulate(2):
    ...     mesh = vfn.make_mesh((2,), ("ep",))
    ...     w_, x_ = vfn.shard((w, x), mesh, P("ep"))
    ...     with vfn.comm_log() as log:
    ...         y = moe(w_, x_)
    ...     print(log.count("all_to_all"), log.count(), torch.allclose(vfn.unshard(y), moe(w, x), atol=1e-6))
    2 2 True
    """
    checked_function(f, "nn.experts")
    parts = taking_part("nn.experts", axis, "axis")[2] if axis is not None and context.body() is not None else 1
    leaves = _check(params, x, routes, capacity, parts)
    tokens, count = x.shape[-2], routes.count
    capacity = tokens if capacity is None else min(capacity, tokens)
    places = _places(routes.experts, count, capacity)
    rows = _taken_in(x, places, count, capacity)
    out = _applied(f, params, leaves[0], rows, parts, axis)
    return _given_back(out, places, routes.weights)


def _places(chosen: torch.Tensor, count: int, capacity: int) -> torch.Tensor:
    """For each choice of each token [..., k * T], first choices first: its row among all experts' rows, or their number
    where there is no room."""
    chosen = chosen.transpose(-1, -2).flatten(-2)
    before = (chosen.unsqueeze(-1) == torch.arange(count, device=chosen.device)).cumsum(-2)
    at = before.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - 1
    return torch.where(at < capacity, chosen * capacity + at, count * capacity)


def _taken_in(x: torch.Tensor, places: torch.Tensor, count: int, capacity: int) -> torch.Tensor:
    """The experts' rows [..., E, C, D]."""
    tokens = x.shape[-2]
    token = torch.arange(places.shape[-1], device=x.device) % max(tokens, 1)
    nobody = torch.full_like(places.sum(-1, keepdim=True), tokens).expand(*places.shape[:-1], count * capacity + 1)
    source = nobody.scatter(-1, places, token.expand(places.shape))[..., :-1].unsqueeze(-1)
    rows = x.gather(-2, source.clamp(max=max(tokens - 1, 0)).expand(*source.shape[:-1], x.shape[-1]))
    return rows.masked_fill(source >= tokens, 0.0).unflatten(-2, (count, capacity))


def _applied(f: Any, params: Any, first: torch.Tensor, rows: torch.Tensor, parts: int, axis: Any) -> torch.Tensor:
    """f on the rows [..., E, C, D], where the experts are."""
    groups = rows.shape[:-3]
    there = _layouts(first, rows)
    if there is not None:
        mesh, here, there = there
        rows = moved(rows, mesh, there, "nn.experts", keeps_sums=True)
    rows = rows.movedim(-3, 0).flatten(1, -2)
    if parts > 1:
        rows = all_to_all(rows, axis, 0, 1, tiled=True)
    out = called(f, (params, rows), {}, "nn.experts")
    if not isinstance(out, torch.Tensor) or out.shape[:-1] != rows.shape[:-1]:
        raise CollectiveError(
            report("nn.experts", f"f must give one row for each of {described(rows)}, but it gave {described(out)}")
        )
    if parts > 1:
        out = all_to_all(out, axis, 1, 0, tiled=True)
    out = out.unflatten(1, (*groups, -1)).movedim(0, -3)
    return out if there is None else moved(out, mesh, here, "nn.experts", keeps_sums=True)


def _layouts(first: torch.Tensor, rows: torch.Tensor) -> Any:
    """The mesh, and how rows lie where the tokens are and where the experts are; None where these are one place."""
    if not is_array(first) or context.on_one_device():
        return None
    names, rest = split_axes(spec_of(first), first.ndim)[0], split_axes(spec_of(rows), rows.ndim)[:-3]
    if not names:
        return None
    away = [tuple(a for a in row if a not in names) for row in rest]
    return mesh_of(first), from_split_axes(rest), from_split_axes([*away, names])


def _given_back(out: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the experts made of each token, weighed and added up."""
    tokens, k = weights.shape[-2:]
    out, places = out.flatten(-3, -2), places.unflatten(-1, (k, tokens)).transpose(-1, -2)
    last = out.shape[-2]
    index = places.clamp(max=max(last - 1, 0)).flatten(-2).unsqueeze(-1)
    each = out.gather(-2, index.expand(*index.shape[:-1], out.shape[-1])).unflatten(-2, (tokens, k))
    # a product of matrices, which leaves partial sums partial: what is added up between ranks is a row for each token
    return (torch.where(places < last, weights, 0.0).unsqueeze(-2) @ each).squeeze(-2)


def _check(params: Any, x: Any, routes: Any, capacity: Any, parts: int) -> list[torch.Tensor]:
    """The tensors of the parameters; or an error that says all that does not fit."""
    failures = []
    if not isinstance(x, torch.Tensor) or x.ndim < 2 or not x.is_floating_point():
        failures.append(f"x must be a float tensor [..., tokens, width], but it is {described(x)}")
    else:
        failures += route_problems(routes, x)
    leaves = [
        (path, leaf)
        for path, leaf in zip(tree.paths(params, "params"), tree.leaves(params), strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    if not leaves:
        failures.append(f"params must hold tensors [experts, ...], but it is {described(params)}")
    elif isinstance(routes, Routes):
        mine = f" on each of {parts} ranks" * (parts > 1)
        failures += [
            f"{path} is {described(leaf)}, but the routes are to {routes.count} experts, so its first dim must "
            f"be {routes.count / parts:g}{mine}"
            for path, leaf in leaves
            if not leaf.ndim or leaf.shape[0] * parts != routes.count
        ]
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1):
        failures.append(
            f"capacity must be a positive int, rows of an expert for a group, but it is {described(capacity)}"
        )
    if failures:
        raise CollectiveError(report("nn.experts", "the arguments do not fit", failures))
    return [leaf for _, leaf in leaves]
