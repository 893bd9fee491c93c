"""Meshes of the ranks that hold a value which exists at some coordinates of an axis only: ``P("tp", at={"pp": 2})``.

Such a value is an array on the *placed* mesh of these ranks, along the other axes, so that each op on it, and each collective,
is theirs alone. On every other rank the same mesh stands for the ranks there, of which each is a counterpart of one that holds
the value; its communicator (`Elsewhere`) computes nothing and sends nothing, and what it holds is a stand-in that takes the
memory of one number, NaN.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import torch_internals
from ..base import no_values
from ..base.errors import MeshError, SpecError
from ..base.messages import report
from ..base.no_values import NoValues
from ..base.op_arguments import mapped
from ..base.saved_names import saved_as
from ..sharding.index_map import axes_of
from ..sharding.spec import At, P, place_text, without_place
from . import blocks
from .abstract_mesh import AbstractMesh
from .blocks import Blocks
from .communicator import Kind, coordinates
from .mesh import PlayedMesh, SimulatedMesh, communicator_of, is_part, mesh_name
from .named_mesh import Mesh
from .process_group import ProcessGroup
from .several_ranks import SeveralRanks
from .teams import shares_along


class MeshPlace(NamedTuple):
    """Where the ranks of a placed mesh are: at these coordinates of a whole mesh."""

    whole: Any
    at: At

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the value exists at some coordinates of, in the mesh's order."""
        named = dict(self.at)
        return tuple(axis for axis in axes_of(self.whole) if axis in named)

    @property
    def positions(self) -> tuple[int, ...]:
        """The coordinates as places among the ranks along `axes`, row-major."""
        sizes, found = axes_of(self.whole), [0]
        for axis in self.axes:
            found = [i * sizes[axis] + j for i in found for j in dict(self.at)[axis]]
        return tuple(found)

    def holds(self, coord: Mapping[str, int]) -> bool:
        """Whether the rank at `coord` of the whole mesh has a copy."""
        return all(coord[axis] in row for axis, row in self.at)

    def is_first(self, coord: Mapping[str, int]) -> bool:
        """Whether its copy is the first of them."""
        return all(coord[axis] == row[0] for axis, row in self.at)


def place_of(mesh: Any) -> MeshPlace | None:
    """Where a placed mesh is; None for any other."""
    return getattr(mesh, "place", None)


def whole_mesh(mesh: Any) -> Any:
    """The mesh of which a placed mesh is a part; any other mesh itself."""
    place = place_of(mesh)
    return mesh if place is None else place.whole


def at_of(mesh: Any) -> At:
    """What a spec says of a placed mesh; nothing for any other."""
    place = place_of(mesh)
    return () if place is None else place.at


def is_elsewhere(mesh: Any) -> bool:
    """Whether this is a placed mesh whose values are on other ranks than this one."""
    return getattr(mesh, "elsewhere", False)


def ranks_at(meshes: Sequence[Any]) -> Iterator[tuple[int, dict[str, int]]]:
    """A rank at each of the coordinates on those axes of a mesh without ranks along which some of these placed meshes are: its
    row-major place in the whole mesh, and the coordinates. On other axes it is where the rank that is seen is."""
    whole = whole_mesh(meshes[0])
    sizes, seen = axes_of(whole), coordinates(whole, whole.rank)
    axes = [axis for axis in sizes if any(axis in mesh.place.axes for mesh in meshes)]
    for row in itertools.product(*(range(sizes[axis]) for axis in axes)):
        at = dict(zip(axes, row))
        yield functools.reduce(lambda rank, axis: rank * sizes[axis] + {**seen, **at}[axis], sizes, 0), at


def resolved(mesh: Any, spec: P) -> tuple[Any, P]:
    """The mesh and the spec among its ranks that ``at`` of a spec means; what says nothing of that as it is."""
    if not spec.at or mesh is None:
        return mesh, spec
    return at_place(whole_mesh(mesh), spec.at), without_place(spec)


# --- meshes -----------------------------------------------------------------------------------------------------------


@saved_as("vescale_fn.mesh")
def at_place(mesh: Any, at: At) -> Any:
    """The placed mesh of these coordinates: one object for all."""
    found = _places.get((id(mesh), at))  # of the object: equal meshes may have groups of their own
    if found is None:
        if len(_places) >= 256:
            _places.clear()
        with torch_internals.unrecorded(), torch_internals.no_torch_function():
            found = _places[id(mesh), at] = _made(mesh, at)
    return found


_places: dict[tuple[int, At], Any] = {}  # each holds its whole mesh, so that its id stays


def _made(mesh: Any, at: At) -> Any:
    if is_part(mesh):
        what = f"at={{{place_text(at)}}}: a value at one place of an axis is not known in a shard_map body"
        raise MeshError(report("P", what, [f"on the {mesh_name(mesh)}"], "the value on all ranks: P() along this axis"))
    place, sizes = MeshPlace(mesh, at), axes_of(mesh)
    rest = tuple(name for name in sizes if name not in place.axes)
    names, shape = rest or place.axes[:1], tuple(sizes[name] for name in rest) or (1,)  # a mesh has an axis at least
    here = dict(zip(sizes, mesh.get_coordinate() or (0,) * len(sizes), strict=True))
    me = functools.reduce(lambda i, name: i * sizes[name] + here[name], rest, 0)
    ranks = torch.arange(math.prod(shape), device="cpu").view(shape)
    if isinstance(mesh, AbstractMesh):
        made = torch_internals.unattached_mesh(mesh.device_type, ranks, names, PlacedAbstractMesh, me)
        made.seen_from = me
    elif isinstance(mesh, PlayedMesh):
        made = _played(mesh, place, names, ranks)
    elif isinstance(mesh, SimulatedMesh):
        made = torch_internals.unattached_mesh(mesh.device_type, ranks, names, PlacedSimulatedMesh)
    else:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        alone = torch.full((1,), rank, dtype=torch.int64, device="cpu")
        made = mesh[rest] if rest else torch_internals.unattached_mesh(mesh.device_type, alone, names, Mesh, rank)
        made.__class__ = PlacedMesh
        made.elsewhere = not place.holds(here)
    made.place = place
    return made


def _played(mesh: PlayedMesh, place: MeshPlace, names: tuple[str, ...], ranks: torch.Tensor) -> PlacedPlayedMesh:
    """The placed mesh of ranks of which processes play several: each the copy at the first of its places, or a counterpart."""
    of_each, me = shares_along(mesh, place.axes), mesh.process[0]
    mine = of_each[max(me, 0)]
    held = [at for at in place.positions if at in mine.places and me >= 0]
    team = [
        q for q, share in enumerate(of_each) if (held or mine.places)[0] in share.places
    ]  # in the order of their runs
    made = torch_internals.unattached_mesh(mesh.device_type, ranks, names, PlacedPlayedMesh, mine.run[0])
    made.process = (team.index(me) if me >= 0 else -1, len(team))
    made.world = tuple(mesh.world[q] for q in team) if mesh.world else tuple(team)
    made.elsewhere = not held
    return made


class _Placed:
    """What all placed meshes have in common: two are one where they are the same place of one mesh."""

    place: Any

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Placed) and self.place == other.place)

    def __hash__(self) -> int:
        return hash(self.place)

    def __reduce__(self) -> Any:
        return at_place, tuple(self.place)

    def __repr__(self) -> str:
        return f"{self.place.whole!r} at {place_text(self.place.at)}"

    def _part(self, names: tuple[str, ...], places: dict[str, int]) -> Any:
        fix = "the same part of the whole mesh, on all ranks"
        raise MeshError(report("mesh[...]", "a mesh of the ranks of one place has no parts", [repr(self)], fix))


class PlacedMesh(_Placed, Mesh):
    """The ranks at a place of a real mesh; on other ranks their counterparts."""

    @property
    def communicator(self) -> type[ProcessGroup]:
        return Elsewhere if self.elsewhere else ProcessGroup


class PlacedSimulatedMesh(_Placed, SimulatedMesh):
    """The ranks at a place of a simulated mesh; where several have a copy, those of one of them are played."""


class PlacedPlayedMesh(_Placed, PlayedMesh):
    """The ranks at a place of a mesh of which processes play several; in processes that play none of them, counterparts."""

    @property
    def communicator(self) -> type[SeveralRanks]:  # type: ignore[override]
        return SeveralElsewhere if self.elsewhere else SeveralRanks


class PlacedAbstractMesh(_Placed, AbstractMesh):
    """The ranks at a place of a mesh without ranks."""

    @property
    def rank(self) -> int:
        return self.seen_from


# --- what is elsewhere ------------------------------------------------------------------------------------------------


def stand_in(x: Any) -> Any:
    """What a rank holds of a value like `x` that is elsewhere; what is no tensor, or has no values, as it is."""
    if not isinstance(x, torch.Tensor) or torch_internals.is_recorded():
        return x
    return nothing(x.shape, x.dtype, x.device)


def nothing(shape: Sequence[int], dtype: torch.dtype, device: torch.device, own: bool = False) -> torch.Tensor:
    """One number, shown at every place of a shape; `own`: a number alone is in memory of its own, as more cannot be written."""
    with torch_internals.unrecorded(), torch_internals.no_torch_function():
        shown = _number(dtype, device).expand(shape)
        return shown.clone() if own and shown.numel() == 1 else shown


def is_stand_in(x: torch.Tensor) -> bool:
    """Whether a plain tensor is a stand-in."""
    if not torch_internals.is_bare(x) or x.layout is not torch.strided or isinstance(x, NoValues):
        return False
    return torch_internals.memory(x)[0] == torch_internals.memory(_number(x.dtype, x.device))[0]


@functools.cache
@torch_internals.never_recorded
def _number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number that is no result of anything: NaN, the least of the signed integers, the greatest of the others; of bools,
    which have none, False."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), math.nan, device=device).to(dtype)
    limits = None if dtype is torch.bool else torch.iinfo(dtype)
    value = False if limits is None else limits.min or limits.max
    return torch.full((), value, dtype=dtype, device=device)


class Elsewhere(ProcessGroup):
    """A rank that holds nothing: what would be computed or sent has a shape. A recording on it is that of ranks that do."""

    is_elsewhere = True

    def each(self, fn: Callable[..., Any], *values: Any, key: Callable[[int], Any] | None = None) -> Any:
        if torch_internals.is_recorded():
            return super().each(fn, *values, key=key)
        return mapped(stand_in, no_values.alone(fn, self.ranks[0], *values))

    def held(self, x: Any) -> Any:
        return x if isinstance(x, NoValues) else stand_in(x)

    def joined(self, row: Sequence[torch.Tensor]) -> Any:
        return stand_in(row[0])

    def carry_out(
        self, kind: Kind, x: Any, axes: tuple[str, ...], params: Sequence[Any], later: bool = False, **how: Any
    ) -> Any:
        shape = kind.result_shape(x.shape, self.size(axes), params)
        return nothing(shape, x.dtype, x.device, own=True)  # a plan may write into it

    def everyone(self, mine: Sequence[Sequence[Any]], why: str) -> list[list[Any]]:
        return [[leaf[0] for leaf in mine]] * math.prod(axes_of(self.mesh).values())


class SeveralElsewhere(SeveralRanks):
    """The same for several counterparts that one process plays."""

    is_elsewhere = True

    def each(self, fn: Callable[..., Any], *values: Any, key: Callable[[int], Any] | None = None) -> Any:
        if torch_internals.is_recorded():
            return super().each(fn, *values, key=key)
        return super().each(lambda rank, *local: stand_in(no_values.alone(fn, rank, *local)), *values, key=key)

    def held(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            x = blocks.of_each(lambda block: block if isinstance(block, NoValues) else stand_in(block), x)
        return super().held(x)

    def joined(self, row: Sequence[torch.Tensor]) -> Any:
        return Blocks(map(stand_in, row))

    def carry_out(
        self, kind: Kind, x: Any, axes: tuple[str, ...], params: Sequence[Any], later: bool = False, **how: Any
    ) -> Any:
        n = self.size(axes)
        return Blocks(nothing(kind.result_shape(y.shape, n, params), y.dtype, y.device, own=True) for y in x.blocks)

    def everyone(self, mine: Sequence[Sequence[Any]], why: str) -> list[list[Any]]:
        return [[leaf[0] for leaf in mine]] * math.prod(axes_of(self.mesh).values())


# --- local values of a place, and of all ranks ------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _counterparts(place: MeshPlace) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each rank of a placed mesh the first rank of the whole mesh that holds the same; of each rank of the whole mesh its
    counterpart in the placed one. Row-major."""
    sizes, inner = axes_of(place.whole), 0
    first: dict[int, int] = {}
    back: list[int] = []
    rest = [name for name in sizes if name not in place.axes]
    for rank in range(math.prod(sizes.values())):
        coord, left = {}, rank
        for name in reversed(sizes):
            left, coord[name] = divmod(left, sizes[name])
        inner = functools.reduce(lambda i, name: i * sizes[name] + coord[name], rest, 0)
        back.append(inner)
        if place.is_first(coord):
            first[inner] = rank
    return tuple(first[i] for i in sorted(first)), tuple(back)


@functools.lru_cache(maxsize=256)
def _here(place: MeshPlace) -> tuple[Sequence[int], Sequence[int]]:
    """The same counterparts as the places of blocks in this process: of one that plays some of the ranks, of these."""
    first, back = _counterparts(place)
    if not isinstance(place.whole, PlayedMesh):
        return first, back
    played, own = (communicator_of(mesh).ranks for mesh in (place.whole, at_place(*place)))
    held = [rank for rank in played if place.holds(coordinates(place.whole, rank))] or played
    return [min(r for r in held if back[r] == i) - played[0] for i in own], [back[r] - own[0] for r in played]


def cut_to(place: MeshPlace, local: Any) -> Any:
    """Of a local value on the whole mesh that on the placed one."""
    return Blocks(there(place, local.blocks)) if type(local) is Blocks else local


def there(place: MeshPlace, of_all: Sequence[Any]) -> list[Any]:
    """Of what each rank of the whole mesh that is played here has what those of the placed one have."""
    return [of_all[i] for i in _here(place)[0]]


def spread_from(place: MeshPlace, local: Any) -> Any:
    """Of a local value on the placed mesh one on the whole mesh, right where the value is."""
    if type(local) is not Blocks:
        return local
    return Blocks([local.blocks[i] for i in _here(place)[1]])


def check_one_mesh(where: str, a: Any, b: Any) -> None:
    """Raise unless two meshes are places of one mesh, or the mesh itself."""
    if whole_mesh(a) != whole_mesh(b):
        raise SpecError(report(where, "a value at a place moves along its own mesh", [mesh_name(a), mesh_name(b)]))
