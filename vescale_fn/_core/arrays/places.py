"""Values that exist at some coordinates of an axis only (``P(..., at={"pp": 2})``): how they meet in an op, and how they move.

They are arrays on a placed mesh (`distributed/places`). Here an op whose arguments are at one place, or whole, is brought to
that place; a rank elsewhere is given the stand-ins of its results; and a value is sent from place to place, differentiably.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context
from ..base.errors import InPlaceError, ReshardError, SpecError
from ..base.messages import op_text, report
from ..base.no_values import NoValues
from ..base.op_arguments import tensors_in, with_tensors
from ..distributed import blocks, collectives
from ..distributed.communicator import coordinates
from ..distributed.mesh import communicator_of, same
from ..distributed.places import (
    MeshPlace,
    at_of,
    at_place,
    cut_to,
    is_elsewhere,
    nothing,
    place_of,
    spread_from,
    whole_mesh,
)
from ..sharding.index_map import axes_of, local_shape
from ..sharding.layout import WHOLE, layout, spec_for, text
from ..sharding.spec import At, P, axes_named, place_entry, place_text
from . import reshard
from .array_values import brought
from .decision import Decision
from .strict import refuse_moves

# --- ops --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Meets(Decision):
    """Arguments at one place, and others that every rank holds: the op is that place's."""

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(args, kwargs)
        moved = iter([self._here(x) if isinstance(x, DTensor) else x for x in tensors])
        return cls.redispatch(self.func, *with_tensors((args, kwargs), moved))

    def _here(self, x: Any) -> Any:
        return x if same(torch_internals.mesh(x), self.mesh) else dropped(x, self.mesh)


@dataclass(frozen=True, eq=False)
class Added(Decision):
    """Autograd adds cotangents of a value that all ranks hold and several places use: each is a part of the sum."""

    axes: tuple[str, ...]

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(args, kwargs)
        if not torch_internals.in_backward_pass():
            meeting(self.func, tensors, [torch_internals.mesh(x) for x in tensors])  # raises
        return cls.redispatch(self.func, *with_tensors((args, kwargs), map(self._part, tensors)))

    def _part(self, x: Any) -> Any:
        lies = layout(torch_internals.spec(x))
        return relocated(x, self.mesh, P(*lies, unreduced=lies.unreduced.union(self.axes)), "a cotangent of one place")


@dataclass(frozen=True, eq=False)
class Copied(Decision):
    """The op's result depends on values, as a number that Python reads does: every rank gets the arguments first."""

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        place: MeshPlace = place_of(self.mesh)  # type: ignore[assignment]
        if context.is_strict():
            what = f"strict: it reads values at {place_text(place.at)}, which would be sent to all ranks"
            found = [text(x) for x in tensors_in(args, kwargs)]
            raise ReshardError(report(op_text(self.func), what, found, "vfn.with_sharding(x, P()) before it"))
        why = f"{op_text(self.func)} needs the value"
        whole = [
            relocated(x, place.whole, WHOLE, why) if isinstance(x, DTensor) else x for x in tensors_in(args, kwargs)
        ]
        return cls.redispatch(self.func, *with_tensors((args, kwargs), iter(whole)))


@dataclass(frozen=True, eq=False)
class NotHere(Decision):
    """The op as a whole, on a rank that holds none of its arguments. Recorded, it is as where they are."""

    then: Decision
    outs: tuple[Any, ...]  # of each result its DTensorSpec, or what it is where it is no tensor
    many: Any  # tuple or list, where there are several

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(args, kwargs)
        if not not_here(self.mesh, tensors):
            return self.then.run(cls, args, kwargs)
        if context.is_strict():  # on all ranks alike
            refuse_moves(self.func, args, kwargs, self.then.moves_of(args, kwargs))
        found = stand_ins(self.mesh, self.outs, tensors, kwargs)
        out = [
            torch_internals.new_dtensor(cls, x, spec) if isinstance(x, torch.Tensor) else x
            for x, spec in zip(found, self.outs, strict=True)
        ]
        return self.many(out) if self.many else out[0]


def not_here(mesh: Any, tensors: Sequence[Any]) -> bool:
    """Whether an op is other ranks': nothing is computed, unless it is recorded, or only asked for shapes."""
    if not is_elsewhere(mesh) or torch_internals.is_recorded():
        return False
    return not any(isinstance(x, DTensor) and type(torch_internals.held_local(x)) is NoValues for x in tensors)


def stand_ins(mesh: Any, outs: Sequence[Any], tensors: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """What a rank elsewhere holds of results that have these DTensorSpecs; what is no tensor as it is."""
    there = next((x.device for x in tensors if x.device.type == "meta"), mesh.device_type)
    wanted = kwargs.get("device")
    device = torch.device(there if wanted is None else wanted)  # torch asks for shapes on its meta device
    communicator, found = communicator_of(mesh), list[Any]()
    for spec in outs:
        meta = getattr(spec, "tensor_meta", None)
        if meta is not None:
            sizes = [
                local_shape(tuple(meta.shape), axes_of(mesh), layout(spec), coordinates(mesh, rank))
                for rank in communicator.ranks
            ]
            spec = communicator.joined([nothing(size, meta.dtype, device) for size in sizes])
        found.append(spec)
    return found


def check_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], mesh: Any) -> None:
    """Raise where an op at a place would write what other ranks hold too: a plain tensor, or an array of all ranks."""
    written = tensors_in(blocks.written_arguments(func, args, kwargs))
    at = at_of(mesh)
    for x in written:
        if not isinstance(x, DTensor) or not same(torch_internals.mesh(x), mesh):
            others = [y for y in tensors_in(args, kwargs) if isinstance(y, DTensor) and y is not x]
            what = f"{text(x)}, which other ranks hold too, would be written at {place_text(at)} alone"
            fix = f"x = vfn.with_sharding(x, P(..., at={place_entry(at)})), and write that"
            raise InPlaceError(report(op_text(func), what, [f"{text(y)} is an argument" for y in others], fix))


def meeting(func: Any, tensors: Sequence[Any], meshes: Sequence[Any]) -> Any:
    """The placed mesh on which an op runs whose arguments are on these meshes; None where they are no places of one mesh.

    Raises:
        SpecError: two of them are at different places, or one is split over an axis of which another is at one coordinate.
    """
    whole = whole_mesh(meshes[0])
    if not any(map(place_of, meshes)) or any(not same(whole_mesh(mesh), whole) for mesh in meshes):
        return None
    arrays = [x for x in tensors if isinstance(x, DTensor)]
    placed = [x for x in arrays if place_of(torch_internals.mesh(x)) is not None]
    others = [x for x in arrays if place_of(torch_internals.mesh(x)) is None]
    first, at = placed[0], at_of(torch_internals.mesh(placed[0]))
    for x in placed[1:]:
        met = _both(at, at_of(torch_internals.mesh(x)))
        if met is None:
            where = [f"{text(first)}", f"{text(x)}"]
            one, other = (place_text(at_of(torch_internals.mesh(y))) for y in (first, x))
            raise SpecError(
                report(
                    op_text(func),
                    f"{_name(func, arrays, first)} is at {one}, {_name(func, arrays, x)} at {other}",
                    where,
                    "vfn.pipeline moves values between stages, vfn.with_sharding(x, P()) copies",
                )
            )
        at = met
    for x in others:
        used = axes_named(layout(torch_internals.spec(x))) & dict(at).keys()
        if used:
            fix = f"vfn.with_sharding(x, P(..., at={place_entry(at)})) of the one that is split"
            what = f"an array at {place_text(at)} meets one that is split or summed over {', '.join(map(repr, sorted(used)))}"
            raise SpecError(report(op_text(func), what, [text(first), text(x)], fix))
    return at_place(whole, at)


def added(func: Any, tensors: Sequence[Any]) -> Added | None:
    """How two cotangents are added up that are at different places of an axis, or sums over it; None for anything else."""
    if not torch_internals.in_backward_pass() or not all(isinstance(x, DTensor) for x in tensors):
        return None
    meshes = [torch_internals.mesh(x) for x in tensors]
    placed = [place for mesh in meshes if (place := place_of(mesh)) is not None]
    if not placed or not same(*map(whole_mesh, meshes)):
        return None
    axes = placed[0].axes
    sums = [x for x in tensors if layout(torch_internals.spec(x)).unreduced.issuperset(axes)]
    apart = len(placed) == 2 and axes == placed[1].axes and _both(placed[0].at, placed[1].at) is None
    return Added(func, placed[0].whole, axes) if apart or (len(placed) == 1 and sums) else None


def _name(func: Any, arrays: Sequence[Any], x: Any) -> str:
    """What an argument of an op is called."""
    return "xy"[i] if len(arrays) == 2 and (i := [y is x for y in arrays].index(True)) < 2 else text(x)


def _both(a: At, b: At) -> At | None:
    """The place at which values of two places both exist, on the same axes."""
    if [axis for axis, _ in a] != [axis for axis, _ in b]:
        return None
    found = tuple((axis, tuple(i for i in row if i in other)) for (axis, row), (_, other) in zip(a, b, strict=True))
    return found if all(row for _, row in found) else None


def dropped(x: Any, mesh: Any) -> Any:
    """An array that every rank holds, or one at several places, where one of these is: nothing is sent."""
    local, source = torch_internals.local(x), torch_internals.mesh(x)
    if place_of(source) is None:
        local = cut_to(place_of(mesh), local)  # type: ignore[arg-type]
    return _around(type(x), communicator_of(mesh).held(local), mesh, layout(torch_internals.spec(x)), x)


def _around(cls: Any, local: Any, mesh: Any, spec: P, x: Any) -> Any:
    return torch_internals.new_dtensor(cls, local, spec_for(mesh, spec, x.shape, tuple(x.stride()), x.dtype))


# --- moves ------------------------------------------------------------------------------------------------------------


def relocated(x: Any, mesh: Any, spec: P, why: str) -> Any:
    """An array that lies as `spec` among the ranks of another place of its mesh, or of the whole of it."""
    source, target = place_of(torch_internals.mesh(x)), place_of(mesh)
    if source is None and target is not None:
        if axes_named(layout(torch_internals.spec(x))) & {*target.axes}:
            x = _resharded(x, spec, why)
        x = dropped(x, mesh)
    elif source is not None and target is None:
        x = _spread(x, source, spec, why)
    elif source is not None and target is not None and source.axes != target.axes:
        return relocated(relocated(x, source.whole, WHOLE, why), mesh, spec, why)
    elif source is not None and target is not None and source != target:
        x = _sent(x, source, target, mesh, why)
    return _resharded(x, spec, why)


def _resharded(x: Any, spec: P, why: str) -> Any:
    bare = P(*spec, unreduced=spec.unreduced)
    if layout(torch_internals.spec(x)) == bare:
        return x
    return _around(type(x), brought(x, bare, why, owned=True), torch_internals.mesh(x), bare, x)


def _spread(x: Any, place: MeshPlace, spec: P, why: str) -> Any:
    """A value at a place on all ranks: sent to them, or, for a sum that is still to be made, as a part of it beside zeros."""
    lies = layout(torch_internals.spec(x))
    local = spread_from(place, torch_internals.local(x))
    if spec.unreduced.issuperset(place.axes):

        def part(rank: int, block: torch.Tensor) -> torch.Tensor:
            return block.masked_fill(reshard.is_other(not first(rank), block.device), 0)

        def first(rank: int) -> bool:
            return place.is_first(coordinates(place.whole, rank))

        local = communicator_of(place.whole).each(part, local, key=first)
        lies = P(*lies, unreduced=lies.unreduced.union(place.axes))
    else:
        local = collectives.broadcast(local, place.whole, place.axes, place.positions[0], why)
    return _around(type(x), local, place.whole, lies, x)


def _sent(x: Any, source: MeshPlace, target: MeshPlace, mesh: Any, why: str) -> Any:
    """A value at a place at other coordinates of the same axes, laid out as before."""
    if _both(source.at, target.at) == target.at:
        return dropped(x, mesh)
    local, whole = spread_from(source, torch_internals.local(x)), source.whole
    if len(target.positions) == 1:
        pairs = ((source.positions[0], target.positions[0]),)
        local = collectives.permute(local, whole, source.axes, pairs, why)
    else:
        local = collectives.broadcast(local, whole, source.axes, source.positions[0], why)
    local = communicator_of(mesh).held(cut_to(target, local))
    return _around(type(x), local, mesh, layout(torch_internals.spec(x)), x)
