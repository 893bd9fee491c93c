"""Meshes: ranks laid out on named axes, real or simulated."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch.distributed.device_mesh import init_device_mesh

from .. import torch_internals
from ..base import context
from ..base.errors import MeshError
from ..base.front_door import public
from ..base.messages import described, meant, mesh_text, report, short
from ..base.saved_names import also_saved_as, saved_as
from ..base.user_calls import either
from ..sharding.index_map import axes_of
from ..sharding.spec import place_text
from . import process_group_hints, ranks
from .communicator import Communicator, Simulated
from .deterministic import check_divides
from .named_mesh import Mesh, named
from .process_group import ProcessGroup
from .several_ranks import SeveralRanks
from .teams import playing

axes = axes_of


class SimulatedMesh(Mesh):
    """A mesh whose ranks are all played by this process; equal to a real mesh never, to its like always."""

    communicator: type[Communicator] = Simulated
    cut: tuple[Any, ...] = ()  # of a part: the axes of the mesh that it was cut out of, and at which places of them

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, SimulatedMesh) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property  # it is asked for at every op, and DeviceMesh computes its shape anew each time
    def _key(self) -> tuple[Any, ...]:
        return self.device_type, tuple(self.mesh.shape), self.mesh_dim_names, *self.cut

    def __repr__(self) -> str:
        return mesh_name(self).replace("mesh ", "SimulatedMesh")

    def __reduce__(self) -> Any:
        return rebuild_mesh, self._key

    def _part(self, names: tuple[str, ...], places: dict[str, int]) -> SimulatedMesh:
        """Ranks that are at other places, and places that are not given, have a copy of their own with the same values:
        one of them is played."""
        axes, before = self.cut or (tuple(axes_of(self).items()), ())
        shape = tuple(axes_of(self)[name] for name in names)
        return rebuild_mesh(self.device_type, shape, names, axes, tuple(sorted({**dict(before), **places}.items())))

    def get_group(self, mesh_dim: Any = None) -> Any:
        process_group_hints.refuse(self)

    def get_all_groups(self) -> Any:
        process_group_hints.refuse(self, "get_group")

    def get_rank(self) -> Any:
        process_group_hints.refuse(self)

    def get_local_rank(self, mesh_dim: Any = None) -> Any:
        process_group_hints.refuse(self)


class PlayedMesh(SimulatedMesh):
    """A mesh of `deterministic`: some of its ranks are played by this process, the others by others; or all by this one.

    Attributes:
        process: the number of this process, and how many there are; of a part, among those that play it, -1 for none of them.
        world: of a part, the processes that play it, by their ranks of the world.
    """

    communicator = SeveralRanks
    process: tuple[int, int]
    world: tuple[int, ...]

    def __repr__(self) -> str:
        return mesh_name(self).replace("mesh ", "Mesh")

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return *super()._key, self.process, self.world

    def __reduce__(self) -> Any:
        shape, names = tuple(self.mesh.shape), self.mesh_dim_names
        return played_mesh, (self.device_type, shape, names, self.process, self.world, *self.cut)

    def _part(self, names: tuple[str, ...], places: dict[str, int]) -> PlayedMesh:
        """Of the copies that ranks at other places have, a process plays the one that its first rank is in."""
        axes, before = self.cut or (tuple(axes_of(self).items()), ())
        me, count = self.process
        found = playing(tuple(axes_of(self).items()), names, tuple(places.items()), count)
        if found is None:
            what = f"{count} processes that play the {mesh_name(self)} do not play as many ranks each of ({', '.join(names)})"
            raise MeshError(report("mesh", what, fix="a number of processes whose ranks are whole rows of it"))
        team = (me >= 0 and found[me]) or next(filter(None, found))
        world = tuple(self.world[q] for q in team) if self.world else team
        shape = tuple(axes_of(self)[name] for name in names)
        process = (team.index(me) if me in team else -1, len(team))
        cut = axes, tuple(sorted({**dict(before), **places}.items()))
        return played_mesh(self.device_type, shape, names, process, world, *cut)


class SimulatedPart(SimulatedMesh):
    """Some axes of a simulated mesh. Its ranks are those of the whole mesh: along the other axes there is a copy of it
    for each place, with values of its own."""

    whole: SimulatedMesh

    @property
    def communicator(self) -> type[Communicator]:  # type: ignore[override]
        return self.whole.communicator

    def _part(self, names: tuple[str, ...], places: dict[str, int]) -> Any:
        if places:
            raise MeshError(report("mesh.at", "inside a shard_map body every rank takes each step", [repr(self)]))
        return part(self.whole, names)

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return (*self.whole._key, self.mesh_dim_names)

    def __reduce__(self) -> Any:
        return part, (self.whole, self.mesh_dim_names)


@saved_as("vescale_fn.mesh")
@functools.lru_cache(maxsize=256)
@torch_internals.never_recorded
def part(mesh: Any, names: tuple[str, ...]) -> Any:
    """The mesh of some axes of a mesh, in its order: on each rank, of the ranks that share its place on the other axes."""
    if tuple(axes_of(mesh)) == names:
        return mesh
    if context.on_one_device():
        return _unit(mesh.device_type, names)
    if isinstance(mesh, SimulatedMesh):
        sizes = [axes_of(mesh)[name] for name in names]
        here = dict(zip(axes_of(mesh), mesh.get_coordinate() or (), strict=True))
        ranks_ = torch.arange(math.prod(sizes), device="cpu").view(sizes)
        seen_from = int(ranks_[tuple(here[name] for name in names)])
        made = torch_internals.unattached_mesh(mesh.device_type, ranks_, names, SimulatedPart, seen_from)
        made.whole = root(mesh)
        return made
    return mesh[names]


def root(mesh: Any) -> Any:
    """The mesh of which this is a part, or itself."""
    return getattr(mesh, "whole", None) or torch_internals.root_mesh(mesh)


def is_part(mesh: Any) -> bool:
    """Whether this is only a part of a simulated mesh, so that what it holds whole may still differ between ranks."""
    return isinstance(mesh, SimulatedPart)


@saved_as("vescale_fn.mesh")
@functools.lru_cache(maxsize=64)
@torch_internals.never_recorded
def rebuild_mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...], *cut: Any) -> SimulatedMesh:
    """The simulated mesh of these axes, or the part (`SimulatedMesh.cut`) of another that has them, one object for all."""
    made = torch_internals.unattached_mesh(
        device, torch.arange(math.prod(shape), device="cpu").view(shape), names, SimulatedMesh
    )
    made.cut = cut
    return made


@functools.lru_cache(maxsize=64)
@torch_internals.never_recorded
def played_mesh(
    device: str,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    process: tuple[int, int],
    world: tuple[int, ...] = (),
    *cut: Any,
) -> PlayedMesh:
    """The mesh of these axes whose ranks are played by so many processes, one object for all."""
    every = torch.arange(math.prod(shape), device="cpu").view(shape)
    first = process[0] * (math.prod(shape) // process[1])
    made = torch_internals.unattached_mesh(device, every, names, PlayedMesh, first)
    made.process, made.world, made.cut = process, world, cut
    return made


def mesh_name(mesh: Any) -> str:
    """A mesh, and what it is a part of, on one short line: ``mesh (dp=4) at pp=1 of (pp=2, dp=4)``."""
    if (place := getattr(mesh, "place", None)) is not None:
        return f"{mesh_name(place.whole)} at {place_text(place.at)}"
    whole, places = getattr(mesh, "cut", ()) or (axes_of(torch_internals.root_mesh(mesh)).items(), ())
    at = " at " + ", ".join(f"{name}={i}" for name, i in places) if places else ""
    of = " of " + mesh_text(dict(whole)).removeprefix("mesh ") if dict(whole) != axes_of(mesh) else ""
    return mesh_text(axes_of(mesh)) + at + of


def check_reaches(source: Any, target: Any, where: str) -> None:
    """Raise unless every rank of `target` has a part in `source`, whose values are to be brought to it."""
    axes, places = getattr(source, "cut", ()) or ((), ())
    theirs, there = getattr(target, "cut", ()) or ((), ())
    if places and (axes != theirs or not set(places) <= set(there)):
        raise MeshError(
            report(
                where,
                "an array of some ranks does not reach others",
                [
                    f"it is on the {mesh_name(source)}",
                    f"it is to be on the {mesh_name(target)}",
                ],
                "vfn.ppermute or vfn.pbroadcast in a shard_map over a mesh with all these ranks",
            )
        )


@overload
def make_mesh(
    shape: int | Sequence[int], names: str | Sequence[str], *, device: str | None = None, timeout: float | None = None
) -> Mesh: ...
@overload
def make_mesh(
    *,
    axis_shapes: int | Sequence[int],
    axis_names: str | Sequence[str],
    device: str | None = None,
    timeout: float | None = None,
) -> Mesh: ...
@torch_internals.never_recorded
@public("make_mesh")
def make_mesh(
    shape: Any = None,
    names: Any = None,
    *,
    axis_shapes: Any = None,
    axis_names: Any = None,
    device: str | None = None,
    timeout: float | None = None,
) -> Mesh:
    """Lay all ranks that there are out on a mesh with named axes.

    Works under `simulate`, in a process started by `launch`, or by ``torchrun``, ``srun`` or ``mpirun`` (the process
    group is initialised from the environment), on a process group that is already initialised, and in a bare process for
    a mesh of size 1.

    Args:
        shape: the size of each axis; one of them may be -1, "the rest".
        names: the axes' names, all different.
        axis_shapes, axis_names: these two by JAX's names.
        device: "cpu" or "cuda"; by default that of the process group's backend, without a group torch's default device.
        timeout: of one collective on the mesh, in seconds, `math.inf` for none: a rank that waits longer fails. By default
            that of the process group, which `launch` was told; elsewhere torch's own (half an hour on CPUs, ten minutes
            on GPUs). Meshes of one kind share their groups, and an axis of all ranks shares the process group:
            the timeout that was given last holds.

    Returns:
        A DeviceMesh; ``mesh.shape["dp"]``, ``mesh.axis_names`` and ``mesh.size`` are there too, as in JAX.

    Raises:
        MeshError: sizes and names that do not fit, or not the number of ranks that there are.

    Source: `jax.make_mesh`, `torch.distributed.device_mesh.init_device_mesh`.

    >>> import vescale_fn as vfn
    >>> with vfn.simulate(8):
    ...     vfn.make_mesh((2, -1), ("dp", "tp"))
    SimulatedMesh(dp=2, tp=4)
    """
    shape = either("make_mesh", "shape", shape, "axis_shapes", axis_shapes, MeshError)
    names = either("make_mesh", "names", names, "axis_names", axis_names, MeshError)
    sizes, names = checked_axes(shape, names, "make_mesh")
    if device is not None:
        ranks.check_device(device, "make_mesh")
    if timeout is not None:
        timeout = ranks.seconds("make_mesh", "timeout", timeout)
    simulated, virtual = context.simulated(), context.virtual()
    process = (0, 1) if simulated is not None else ranks.ensure_process_group(device, timeout)
    check_divides("make_mesh", process[1])
    sizes = _fill(sizes, names, virtual or simulated or process[1])
    if context.on_one_device():
        return _unit(device or ranks.device_type(), names)
    if virtual is not None:
        if timeout is not None and process[1] > 1:
            torch_internals.set_group_timeout(ranks.world(), ranks.time_of(timeout))
        alone = simulated is not None or process[1] == 1
        return played_mesh(
            device or (torch.get_default_device().type if alone else ranks.device_type()), sizes, names, process
        )
    if simulated is not None:
        return rebuild_mesh(device or torch.get_default_device().type, sizes, names)
    device = device or ranks.device_type()
    if not ranks.has_process_group():
        return torch_internals.unattached_mesh(device, torch.zeros(sizes, dtype=torch.int64, device="cpu"), names, Mesh)
    made = _of_group(ranks.world(), device, sizes, names)
    if timeout is not None and not _limited(made, timeout):
        raise MeshError(
            report(
                "make_mesh",
                f"timeout={timeout:g}, but the backend of the process group has no timeouts",
                fix="no timeout here",
            )
        )
    return made


@functools.lru_cache(maxsize=64)  # the groups of a mesh are sockets and threads, and serve all meshes of its kind
def _of_group(world: Any, device: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    made = named(init_device_mesh(device, sizes, mesh_dim_names=names))
    _limited(
        made, torch_internals.group_timeout(world)
    )  # torch gives a new group its default, not that of the default group
    return made


def _limited(mesh: Mesh, timeout: float) -> bool:
    """Set how long a collective along one of its axes may take; False where the backend does not take that."""
    return all(torch_internals.set_group_timeout(group, ranks.time_of(timeout)) for group in mesh.get_all_groups())


def checked_axes(shape: Any, names: Any, where: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The sizes and the names of a mesh's axes as tuples, or an error that says all that is wrong with them."""
    failures = [
        f"{word} must be a tuple, but it is {described(value)}"
        for word, value in (("shape", shape), ("names", names))
        if not isinstance(value, (tuple, list, int if word == "shape" else str))
    ]
    if failures:
        raise _no_mesh(failures, where)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    names = (names,) if isinstance(names, str) else tuple(names)
    if len(shape) != len(names):
        failures.append(f"shape {shape} has {len(shape)} sizes, but names {names} has {len(names)}")
    failures += [f"name {name!r} is not a string" for name in names if not isinstance(name, str)]
    failures += [f"axis {name!r} is named twice" for name in sorted({n for n in names if names.count(n) > 1}, key=str)]
    failures += [
        f"size {size!r} is not a positive integer (or one -1)"
        for size in shape
        if not isinstance(size, int) or (size < 1 and size != -1)
    ]
    if shape.count(-1) > 1:
        failures.append(f"shape {shape} leaves more than one axis open with -1")
    if failures or not shape:
        raise _no_mesh(failures or ["it has no axes"], where)
    return shape, names


def _no_mesh(failures: Sequence[str], where: str) -> MeshError:
    fix = f'for instance {where}((2, 4), ("dp", "tp"))'
    return MeshError(report(where, "the shape and the names do not make a mesh", failures, fix))


def _fill(sizes: tuple[int, ...], names: tuple[str, ...], world: int) -> tuple[int, ...]:
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and world % known == 0:
        return tuple(world // known if size == -1 else size for size in sizes)
    if -1 not in sizes and known == world:
        return sizes
    wanted = " x ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    have = f"there {'is' if world == 1 else 'are'} {world} rank{'s' * (world != 1)}"
    if -1 in sizes:
        what = f"{wanted}: {have}, which {known} does not divide"
        raise MeshError(
            report("make_mesh", what, fix=f"{_fitting(sizes, names, world)}, or {_ranks(known, multiple=True)}")
        )
    if known < world:
        what = f"{wanted} has {known} ranks, but {have}; a mesh uses all of them"
        raise MeshError(report("make_mesh", what, fix=f"{_fitting(sizes, names, world)}, or {_ranks(known)}"))
    raise MeshError(
        report(
            "make_mesh",
            f"{wanted} = {known} ranks, but {have}. Three ways to get them",
            [
                f"{way:<{31 + len(str(known))}} {what}"
                for way, what in (
                    (f"vfn.simulate({known})", "this process plays all ranks (notebooks, tests)"),
                    (f"vfn.launch(fn, {known})", f"{known} processes started from here, each running fn"),
                    (f"torchrun --nproc-per-node {known} your.py", f"{known} processes started from the shell"),
                )
            ],
        )
    )


def _fitting(sizes: tuple[int, ...], names: tuple[str, ...], world: int) -> str:
    """A mesh of these axes and all ranks: one axis open, the last one that leaves sizes which divide."""
    for i in reversed(range(len(sizes))):
        rest = math.prod(size for k, size in enumerate(sizes) if k != i and size != -1)
        if world % rest == 0:
            held = tuple(-1 if k == i else 1 if size == -1 else size for k, size in enumerate(sizes))
            return f"make_mesh({held}, {names})"
    return f"make_mesh({(*[1] * (len(sizes) - 1), -1)}, {names})"


def _ranks(count: int, multiple: bool = False) -> str:
    ranks_ = f"a multiple of {count} ranks" if multiple else f"{count} rank{'s' * (count != 1)}"
    return f"start {ranks_}: vfn.simulate({count}), vfn.launch(fn, {count}) or torchrun --nproc-per-node {count}"


def unit(mesh: Any) -> Any:
    """The mesh with the same axes, each of size 1: that of a program which runs on one device."""
    return _unit(mesh.device_type, tuple(axes_of(mesh)))


@functools.lru_cache(maxsize=256)
@torch_internals.never_recorded
def _unit(device: str, names: tuple[str, ...]) -> Mesh:
    with torch_internals.no_torch_function():  # where the program is in a body, a factory would mean something else
        return torch_internals.unattached_mesh(
            device, torch.zeros((1,) * len(names), dtype=torch.int64, device="cpu"), names, Mesh
        )


def communicator_of(mesh: Any) -> Communicator:
    """How this process takes part in a mesh: a class of meshes names its kind, those of torch's are process groups."""
    found = _communicators.get(id(mesh))  # of the object: equal meshes may have groups of their own
    if found is None:
        if len(_communicators) >= 256:
            _communicators.clear()
        found = _communicators[id(mesh)] = getattr(mesh, "communicator", ProcessGroup)(mesh)
    return found


_communicators: dict[int, Communicator] = {}  # each holds its mesh, so that its id stays


def axis_names(axis_name: Any, mesh_axes: Mapping[str, int], where: str, called: str = "axis_name") -> tuple[str, ...]:
    """A name or a tuple of names as a tuple, each checked to be an axis, none twice. `called`: the parameter's name."""
    several = isinstance(axis_name, Iterable) and not isinstance(axis_name, str) and not hasattr(axis_name, "dtype")
    names: tuple[Any, ...] = tuple(axis_name) if several else (axis_name,)
    failures = [
        f"{short(name)} {_no_axis(name, mesh_axes)}"
        for name in names
        if not isinstance(name, str) or name not in mesh_axes
    ]
    failures += [f"axis {name!r} is named twice" for name in mesh_axes if names.count(name) > 1]
    if failures or not names:
        raise MeshError(
            report(
                where,
                f"{called}={short(axis_name)} does not name axes of the {mesh_text(mesh_axes)}",
                failures or ["it names none"],
                _axis_like(names, tuple(mesh_axes), where, called),
            )
        )
    return names


def _axis_like(given: Sequence[Any], names: tuple[str, ...], where: str, called: str) -> str:
    """What to write in place of these."""
    if (
        any(hasattr(name, "dtype") for name in given)
        and where not in ("axis_index", "axis_size")
        and called == "axis_name"
    ):
        return f"vfn.{where}(x, {names[0]!r}, ...): the value first, then the axis"
    return f"{called}={names[0]!r}" + (f", or a tuple of different axes out of {names}" if len(names) > 1 else "")


def _no_axis(name: Any, mesh_axes: Mapping[str, int]) -> str:
    if isinstance(name, str):
        return f"is not one of the axes {tuple(mesh_axes)}{meant(name, mesh_axes)}"
    return "is no name" + ": axes of a mesh have names, dims of a tensor have numbers" * isinstance(name, int)


def same(a: Any, b: Any) -> bool:
    """Whether two meshes are the same."""
    return a is b or a == b


also_saved_as("vescale_fn.mesh", SimulatedMesh)
