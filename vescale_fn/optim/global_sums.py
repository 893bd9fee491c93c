"""Numbers that each leaf adds to a total: on a mesh every rank has parts of them, and one collective adds all of them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._core import torch_internals
from .._core.arrays.array import Array, mesh_of, spec_of, wrap
from .._core.arrays.placement import with_sharding
from .._core.base import context
from .._core.distributed.mesh import communicator_of
from .._core.distributed.places import place_of, whole_mesh
from .._core.sharding.index_map import axes_of
from .._core.sharding.spec import P, split_axes
from .per_leaf import looked_on


def parts_of_numbers(
    leaves: Sequence[Any], one: Callable[[Any], Any], many: Callable[..., Any]
) -> dict[Any, list[tuple[list[int], Any]]]:
    """A number of each leaf, that sums over its elements: this rank's part.

    Args:
        leaves: tensors and arrays.
        one: a leaf's number, by torch functions that leave it a partial sum where the leaf is split.
        many: the vector of the numbers of several plain tensors.

    Returns:
        For each mesh (None for plain tensors; for places the whole one) pairs of the places of leaves that the same axes
        split, and the vector of their numbers, partial over those axes.
    """
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((mesh_of(leaf), split_by(leaf)), []).append(i)
    found: dict[Any, list[tuple[list[int], Any]]] = {}
    for (mesh, axes), members in groups.items():
        own = [leaves[i] for i in members]
        if is_seen(own):
            vector = torch.stack([one(x) for x in own])
        elif mesh is None:
            vector = many(*own)
        else:
            local = communicator_of(mesh).each(
                lambda _, *x: many(*x), *map(torch_internals.local, own), key=lambda rank: None
            )
            vector = wrap(local, mesh, P(unreduced=axes), torch.Size((len(own),)))
        found.setdefault(whole_mesh(mesh), []).append((members, vector))
    return found


def added_up(sums: Sequence[Any], mesh: Any, join: Callable[[list[Any]], Any]) -> Any:
    """What `join` makes of values that are partial sums over different axes, whole: in one collective over all of these."""
    if mesh is None or context.on_one_device():
        return join(list(sums))
    places = [place.axes for x in sums if (place := place_of(mesh_of(x))) is not None]
    axes = frozenset[str]().union(*(spec_of(x).unreduced for x in sums), *places) & axes_of(mesh).keys()
    # A value that all ranks of an axis have counts on the first of them alone, one at a place there: nothing moves.
    parts = [with_sharding(x, P(unreduced=axes), mesh=mesh) for x in sums]
    return with_sharding(join(parts), P(), mesh=mesh)


def split_by(leaf: Any) -> frozenset[str]:
    """The axes that split a leaf."""
    return frozenset(axis for names in split_axes(spec_of(leaf), leaf.ndim) for axis in names)


def is_seen(leaves: Sequence[Any]) -> bool:
    """Whether something must see what is done to the leaves, or they are more than blocks and plain tensors."""
    plain = all(torch_internals.is_bare(x) or (type(x) is Array and not spec_of(x).unreduced) for x in leaves)
    seen = not plain or (torch.is_grad_enabled() and any(x.requires_grad for x in leaves))
    return seen or (looked_on() and not _only_recorded())


def _only_recorded() -> bool:
    """Whether a plan is recorded, and nothing else looks on: it is to hold the calls that run without it."""
    alone = not (context.examined() or torch_internals.transforming() or torch_internals.forward_ad_active())
    return alone and torch_internals.recorder() is not None and not torch_internals.watched_by_other_modes()
