"""`in_specs` of a jitted function: plain arguments are laid out as they come in, arrays must lie so already."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from .._core.arrays.array import is_array, mesh_of
from .._core.arrays.placement import spec_of, with_sharding
from .._core.base import context, tree
from .._core.base.containers import SPLIT_NUMBERS, split_numbers
from .._core.base.errors import SpecError
from .._core.base.messages import described, mesh_text, report
from .._core.distributed.mesh import same
from .._core.distributed.places import whole_mesh
from .._core.sharding.index_map import axes_of
from .._core.sharding.layout import type_text
from .._core.sharding.named_sharding import Sharding, without_mesh
from .._core.sharding.spec import P, as_spec, axes_named, from_split_axes, problems, split_axes, too_long, with_place


class _AsItIs:
    """Stands for None in a tree of specs: a leaf, which says nothing of what is under it."""


def arrived(
    args: Sequence[Any],
    static: Collection[int],
    named: Collection[str],
    names: Callable[[], Sequence[str]],
    in_specs: Any,
    where: str,
) -> list[Any]:
    """The arguments, plain tensors laid out as `in_specs` says; a SpecError for all that cannot be so, or lie otherwise.

    Args:
        args: those by position; of the places `static` nothing is said.
        named: the arguments by name that are not static, of which there must be none.
        names: of the leaves of those that are not static.
        in_specs: one spec for all, or a tuple with one for each, each a prefix tree; None leaves what is under it as it is.
    """
    given = tuple(x for n, x in enumerate(args) if n not in static)
    several = tuple(in_specs) if isinstance(in_specs, (tuple, list)) and not isinstance(in_specs, P) else None
    fits = isinstance(in_specs, (P, Sharding)) if several is None else len(several) == len(given)
    if named or not fits:
        raise _not_one_each(given, static, named, in_specs, where)
    prefix: Any = in_specs if several is None else several
    prefix = tree.map_(lambda spec: _AsItIs if spec is None else spec, prefix, none_is_leaf=True)
    prefix, mesh = without_mesh(prefix, None, where)
    leaves, treedef = tree.flatten(given)
    specs = tree.broadcast(prefix, given, where, "in_specs", "args")
    mesh = mesh or context.current_mesh() or next(filter(None, map(_mesh_of, leaves)), None)
    alone = split_numbers(prefix, given, leaves, lambda spec: isinstance(spec, P) and axes_named(spec))
    wrong = {i: (f"it is {described(leaves[i])}, which has no dims", SPLIT_NUMBERS) for i in alone}
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and specs[i] is not _AsItIs]
    wrong |= {i: found for i in tensors if (found := _wrong(leaves[i], specs[i], mesh)) is not None}
    if wrong:
        raise _not_so(wrong, names(), specs, mesh, where)
    for i in tensors:
        leaves[i] = with_sharding(leaves[i], specs[i], mesh=mesh)
    moved = iter(tree.unflatten(treedef, leaves))
    return [x if n in static else next(moved) for n, x in enumerate(args)]


def _mesh_of(x: Any) -> Any:
    return whole_mesh(mesh_of(x)) if isinstance(x, torch.Tensor) else None


def _not_so(wrong: dict[int, tuple[str, str]], names: Sequence[str], specs: Any, mesh: Any, where: str) -> SpecError:
    rows = [f"{names[i]}, of which in_specs says {specs[i]!r}: {problem}" for i, (problem, _) in sorted(wrong.items())]
    of = f" on the {mesh_text(axes_of(mesh))}" if mesh is not None else ""
    ways = dict.fromkeys(way for _, (_, way) in sorted(wrong.items()))
    return SpecError(report(where, f"the arguments do not fit in_specs{of}", rows, "; ".join(ways)))


def _not_one_each(given: Any, static: Any, named: Any, in_specs: Any, where: str) -> SpecError:
    if named:
        what = (
            f"in_specs says how arguments by position lie, but {', '.join(map(repr, sorted(named)))} is given by name"
        )
        return SpecError(report(where, what, fix="all arguments that are not static by position"))
    which = " that is not static" if static else ""
    what = f"in_specs must be one spec, or a tuple with one for each argument{which}, which are {len(given)}"
    fix = "a tuple in the order of the arguments: in_specs=(P(...), None), None for one that stays as it is"
    return SpecError(report(where, what, [f"it is {described(in_specs)}"], fix))


def _wrong(x: torch.Tensor, spec: Any, mesh: Any) -> tuple[str, str] | None:
    """What is wrong with the spec of a tensor, and what to do."""
    if not isinstance(spec, P):
        return f"it is {described(spec)}, not a vfn.P", as_spec(spec)
    found = too_long(spec, x.ndim) if mesh is None else problems(spec, axes_of(mesh), x.ndim, at=True)
    if found:
        return "; ".join(found), "each axis of the mesh at most once, and at most one entry a dim"
    spec = with_place(from_split_axes(split_axes(spec, x.ndim), spec.unreduced, spec.reduced), spec.at)
    if not is_array(x) or (same(whole_mesh(mesh_of(x)), mesh) and spec_of(x) == spec):
        return None
    own = f"{type_text(x.shape, x.dtype, spec_of(x))} on the {mesh_text(axes_of(whole_mesh(mesh_of(x))))}"
    return f"it lies otherwise, {own}", "vfn.with_sharding(x, spec), which moves it, before the call or in the function"
