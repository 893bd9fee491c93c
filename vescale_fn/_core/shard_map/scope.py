"""Where a function is mapped: over which axes of which mesh, around or inside another map; what its specs may say there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import torch_internals
from ..arrays.array import Boundary, bring_in, entries_over, is_array, mesh_of, only_along, spec_of
from ..base import context, state, tree
from ..base.errors import MeshError, VaryingTypeError
from ..base.messages import count_text, described, meant, mesh_text, report
from ..base.source_lines import user_line
from ..distributed.mesh import communicator_of, is_part, mesh_name, part, same
from ..local_types import tensor_types
from ..sharding.index_map import axes_of
from ..sharding.spec import P, axes_named, from_split_axes, problems, split_axes
from .collective_maps import enter


class Map:
    """What `shard_map` was given: a function, its specs, where to map it."""

    def __init__(
        self, f: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any, axis_names: Any, check: bool
    ) -> None:
        self.f, self.mesh, self.check = f, mesh, check
        self.in_specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs
        self.out_specs, self.axis_names = out_specs, _names(axis_names)
        self.name, self.line = getattr(f, "__name__", type(f).__name__), user_line()
        self.named = frozenset().union(
            *(axes_named(s) for s in tree.leaves((self.in_specs, out_specs)) if isinstance(s, P))
        )
        self.where = f"shard_map({self.name})"


def _names(axis_names: Any) -> tuple[Any, ...]:
    if isinstance(axis_names, str):
        return (axis_names,)
    if axis_names is not None and not isinstance(axis_names, Iterable):
        raise MeshError(
            report(
                "shard_map",
                f"axis_names must be a set of axis names, but it is {described(axis_names)}",
                fix='for instance axis_names={"dp"}; without it all axes are mapped',
            )
        )
    return tuple(sorted(axis_names, key=str)) if axis_names is not None else ()


class Site:
    """Where a function is mapped: over which axes of which mesh, and what its body is.

    Called in the body of another map, the mesh is the part of it that the other left alone.
    """

    def __init__(
        self,
        name: str,
        mesh: Any,
        manual: tuple[str, ...],
        outer: context.Body | None,
        check: bool,
        free: tuple[str, ...] = (),
    ) -> None:
        sizes = axes_of(mesh)
        rest = tuple(axis for axis in sizes if axis not in manual)
        around = outer.sizes if outer is not None else {}
        self.mesh, self.manual, self.outer = mesh, manual, outer
        self.given = mesh  # kept, for sites are remembered by its id
        self.sizes = {axis: sizes[axis] for axis in sizes if axis in manual}
        self.communicator = communicator_of(mesh)
        self.communicator.check_takes_part()
        self.auto = part(mesh, rest) if rest else None
        now = {**around, **self.sizes}
        self.body = context.Body(
            outer.mesh if outer else mesh,
            tuple(now),
            now,
            check,
            self.auto,
            (*free, *(outer.free if outer else ())),
            () if outer is None else outer.unchecked if outer.check else outer.axes,
        )
        self.adopt = functools.partial(adopt, self, name)

    def unmentioned(self, spec: P) -> tuple[str, ...]:
        """The manual axes that a spec does not name."""
        return tuple(axis for axis in self.sizes if axis not in axes_named(spec))

    def lies(self, spec: P, x: Any) -> P:
        """How the whole array lies of which `spec` speaks of the manual axes, and the others are as `x` has them; but for
        those over which a `vmap` around asks for its entries."""
        if self.auto is None or not is_array(x):
            return spec
        entries = context.entries_over() if torch_internals.is_batched(x) else ()
        own = only_along(bare(spec_of(x)), axes_of(self.auto).keys() - frozenset(entries))
        rows = [(*a, *b) if a else b for a, b in zip(split_axes(spec, x.ndim), split_axes(own, x.ndim))]
        return from_split_axes(rows, spec.unreduced | own.unreduced, spec.reduced)


def bare(spec: P) -> P:
    """A spec without what it says of gradients: how the values themselves lie."""
    return P(*spec, unreduced=spec.unreduced)


def misfits(spec: P, site: Site, ndim: int) -> list[tuple[str, str]]:
    """What is wrong with a spec, which may speak of the manual axes only, and what to write instead."""
    axes = axes_of(site.mesh)
    wrong = problems(spec, axes, ndim)
    if wrong:
        at_most = f"at most {count_text(ndim, 'entry')}" if ndim else "no entry"
        return [
            (problem, f"axes of the {mesh_text(axes)}, each at most once, and {at_most} for {count_text(ndim, 'dim')}")
            for problem in wrong
        ]
    return [
        (
            f"axis {axis!r} is not in axis_names={set(site.manual)!r}: along it a value lies in the body as it does "
            "outside",
            f"a spec without {axis!r}, or axis_names with it",
        )
        for axis in axes
        if axis in axes_named(spec) and axis not in site.manual
    ]


def adopt(site: Site, name: str, x: torch.Tensor) -> torch.Tensor:
    """A value that a body closes over, as by ``in_specs=P()``: a plain tensor, or an array of which along the manual axes
    every rank holds the whole. A value of a body around this one lies as its op left it, so it may have to be gathered."""
    mesh = site.mesh
    if not is_array(x):
        x = enter(x, site.body.mesh) if is_part(mesh) else x
        return bring_in(x, Boundary(mesh, P(), site.auto), "closure")
    spec, here = spec_of(x), same(mesh_of(x), mesh)
    mine = only_along(spec, site.sizes)
    parted = any(mine) or bool(mine.unreduced) or (context.is_strict() and not entries_over(x).isdisjoint(site.sizes))
    if not here or (parted and (site.outer is None or context.is_strict())):
        raise VaryingTypeError(
            report(
                f"shard_map({name})",
                "the body uses an array from outside, of which each rank holds a part",
                [f"it is {tensor_types.text(torch_internals.peel(x))} on the {mesh_name(mesh_of(x))}"],
                f"pass it as an argument, with in_specs={mine!r} for its block or P() for the whole",
            )
        )
    run = state.now().run
    if run is not None and not site.communicator.holds_blocks:
        run.meet(x)
    return bring_in(x, Boundary(mesh, site.lies(P(), x), site.auto), "closure")


def _without(axes: tuple[str, ...], free: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis not in free)


def found_site(mapped: Map, mesh: Any, outer: context.Body | None, free: tuple[str, ...] = ()) -> Site:
    """Where `mapped` runs when it is called on `mesh`, in the body `outer` or in none; or an error.

    Over the axes `free` entries of a `vmap` are split, and no spec names them: there the body's values stay whole.
    """
    where, asked = mapped.where, mapped.axis_names
    axes = axes_of(mesh)
    unknown = [
        f"{name!r} is not one of the axes {tuple(axes)}{meant(name, axes)}" for name in asked if name not in axes
    ]
    if unknown:
        raise MeshError(
            report(
                where,
                f"axis_names={set(asked)!r} does not fit the {mesh_text(axes)}",
                unknown,
                "the axes along which the body sees one rank's blocks; none: all of them",
            )
        )
    if outer is None:
        return Site(mapped.name, mesh, _without(asked or tuple(axes), free), None, mapped.check, free)
    taken = [name for name in asked if name in outer.axes]
    if outer.auto is None or taken:
        raise MeshError(
            report(
                where,
                "it was called inside the body of another shard_map, where "
                + (f"{', '.join(map(repr, taken))} is manual already" if outer.auto else "all axes are manual already"),
                fix=f"axis_names among the others, {tuple(axes_of(outer.auto))}"
                if outer.auto is not None
                else "call the function itself: its values are local too",
            )
        )
    if not (same(mesh, outer.mesh) or same(mesh, outer.auto)):
        raise MeshError(
            report(
                where,
                "a map inside the body of another is on the same mesh",
                [f"it was given the {mesh_text(axes)}, the other is on the {mesh_text(axes_of(outer.mesh))}"],
                "no mesh= for the inner one",
            )
        )
    if not mapped.check:
        raise VaryingTypeError(
            report(
                where,
                "of a map inside the body of another, gradients are right only where it is checked",
                [f"check_vma={outer.check} for the outer one, check_vma={mapped.check} for this one"],
                "check_vma=True, which is the default, for this one; or one shard_map over all axes",
            )
        )
    site = Site(mapped.name, outer.auto, _without(asked or tuple(axes_of(outer.auto)), free), outer, mapped.check, free)
    site.given = mesh
    return site
