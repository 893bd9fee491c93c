"""Gradients kept small: all of them by one factor, or each number by itself; and their norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch, blocks, context, tree
from ..array import Array, mesh_of, spec_of, wrap
from ..mesh import axes_of, played_ranks
from ..placement import with_sharding
from ..spec import P, split_axes
from .leaves import by_leaf, looked_on
from .optimizer import Optimizer, check_numbers, is_trained


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Scale all gradients by one factor, so that their norm as one long vector is at most `max_norm`.

    On a mesh that takes one collective, however the leaves lie: see `global_norm`.

    Source: `torch.nn.utils.clip_grad_norm_` (with its 1e-6 in the divisor), `optax.clip_by_global_norm`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.optim.clip_by_global_norm(5.0).update({"a": torch.tensor([6.0]), "b": torch.tensor(8.0)}, None, None)[0]
    {'a': tensor([3.0000]), 'b': tensor(4.0000)}
    """
    check_numbers("clip_by_global_norm", max_norm=max_norm)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        factor = torch.clamp(max_norm / (global_norm(grads) + 1e-6), max=1.0)
        return by_leaf("clip_by_global_norm", lambda grad, _: (grad * factor,), grads, grads)[0], state

    return Optimizer(lambda params: None, update)


def clip_by_value(limit: float) -> Optimizer:
    """Bring each number of the gradients into the interval from ``-limit`` to `limit`.

    Source: `torch.nn.utils.clip_grad_value_`, `optax.clip`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.optim.clip_by_value(2.0).update(torch.tensor([-3.0, 1.0, 5.0]), None, None)[0]
    tensor([-2.,  1.,  2.])
    """
    check_numbers("clip_by_value", limit=limit)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return by_leaf("clip_by_value", lambda grad, _: (torch.clamp(grad, -limit, limit),), grads, grads)[0], state

    return Optimizer(lambda params: None, update)


def global_norm(grads: Any) -> Any:
    """The norm of all floating-point leaves as one long vector: a 0-d tensor, of float32 at least.

    On a mesh each rank adds up the squares of its own blocks, the first of those ranks that hold the same block alone: the
    sum of the ranks' numbers is one all-reduce over all axes that split any leaf.

    >>> import torch, vescale_fn as vfn
    >>> vfn.optim.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)})
    tensor(5.)
    """
    leaves = list(filter(is_trained, tree.leaves(grads)))
    if not leaves:
        return torch.zeros(())
    dtype = torch.float32
    for leaf in leaves:
        dtype = torch.promote_types(dtype, leaf.dtype)
    groups: dict[Any, list[Any]] = {}
    for leaf in leaves:
        axes = frozenset(axis for names in split_axes(spec_of(leaf), leaf.ndim) for axis in names)
        groups.setdefault((mesh_of(leaf), axes), []).append(leaf)
    totals: dict[Any, list[Any]] = {}
    for (mesh, _), members in groups.items():
        totals.setdefault(mesh, []).append(_squares(members, mesh, dtype))
    return torch.sqrt(sum(_total(sums, mesh) for mesh, sums in totals.items()))  # type: ignore[arg-type]


def _squares(leaves: Sequence[Any], mesh: Any, dtype: torch.dtype) -> Any:
    """The sum of the squares of leaves that the same axes split, on each rank its own part of it."""
    plain = all(type(x) is torch.Tensor or (type(x) is Array and not spec_of(x).unreduced) for x in leaves)
    if looked_on() or not plain or any(x.requires_grad and torch.is_grad_enabled() for x in leaves):
        found = [torch.sum(wide * wide) for wide in (x if x.dtype == dtype else x.to(dtype) for x in leaves)]
        return sum(found[1:], found[0])

    def of_blocks(_: int, *own: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(_torch.norms(own, dtype))).square().sum()

    if mesh is None:
        return of_blocks(0, *leaves)
    local = blocks.each(of_blocks, played_ranks(mesh), *map(_torch.local, leaves), key=lambda rank: None)
    axes = {axis for names in split_axes(spec_of(leaves[0]), leaves[0].ndim) for axis in names}
    if not isinstance(local, blocks.Blocks) and type(_torch.local(leaves[0])) is blocks.Blocks:
        local = blocks.shared(local, len(played_ranks(mesh)))
    return wrap(local, mesh, P(unreduced=axes), torch.Size(()))


def _total(sums: Sequence[Any], mesh: Any) -> Any:
    """The sum, of numbers that are partial sums over different axes: they all become partial over all of these first."""
    if mesh is None or context.on_one_device():
        return sum(sums[1:], sums[0])
    axes = frozenset[str]().union(*(spec_of(x).unreduced for x in sums))
    partial = [with_sharding(x, P(unreduced=axes & axes_of(mesh).keys())) for x in sums]
    return with_sharding(sum(partial[1:], partial[0]), P())
