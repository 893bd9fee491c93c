"""`Mesh`: a DeviceMesh of torch's that can also be asked as JAX's meshes are: ``mesh.shape["dp"]``, ``mesh.axis_names``."""

from __future__ import annotations

import functools
from collections.abc import ItemsView, KeysView, ValuesView
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import torch_internals
from ..base.errors import MeshError
from ..base.front_door import no_attribute
from ..base.messages import meant, mesh_text, report, short
from ..base.saved_names import saved_as
from .process_group import ProcessGroup


class AxisSizes(tuple[int, ...]):
    """The sizes of a mesh's axes: torch's tuple, which it equals and iterates as, and to names JAX's mapping.

    >>> import vescale_fn as vfn
    >>> with vfn.simulate(8):
    ...     sizes = vfn.make_mesh((2, 4), ("dp", "tp")).shape
    >>> sizes, sizes["tp"], dict(sizes), sizes == (2, 4), "dp" in sizes
    ((2, 4), 4, {'dp': 2, 'tp': 4}, True, True)
    """

    _axes: dict[str, int]

    def __new__(cls, axes: dict[str, int]) -> AxisSizes:
        self = super().__new__(cls, axes.values())
        self._axes = axes
        return self

    @overload
    def __getitem__(self, key: str | SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[int, ...]: ...
    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self._axes:
            what = f"there is no axis {key!r}{meant(key, self._axes)}"
            raise MeshError(report("mesh.shape", what, [f"this is the {mesh_text(self._axes)}"]))
        return self._axes[key]

    def __contains__(self, key: object) -> bool:
        return key in self._axes if isinstance(key, str) else super().__contains__(key)

    def keys(self) -> KeysView[str]:
        """The axes' names."""
        return self._axes.keys()

    def values(self) -> ValuesView[int]:
        """The axes' sizes."""
        return self._axes.values()

    def items(self) -> ItemsView[str, int]:
        """The axes' names and sizes."""
        return self._axes.items()

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)  # a file holds nothing of ours


class RankCount(int):
    """How many ranks a mesh has: JAX's number, which torch's programs call."""

    _mesh: DeviceMesh

    def __new__(cls, mesh: DeviceMesh) -> RankCount:
        self = super().__new__(cls, DeviceMesh.size(mesh))
        self._mesh = mesh
        return self

    def __call__(self, mesh_dim: int | None = None) -> int:
        """The number of ranks, or of those along an axis, by its place."""
        return DeviceMesh.size(self._mesh, mesh_dim)

    def __reduce__(self) -> Any:
        return int, (int(self),)


@saved_as("vescale_fn.mesh")
class Mesh(DeviceMesh):
    """Ranks on named axes; made by `make_mesh`. A DeviceMesh, of which ``shape`` and ``size`` also say what JAX's say.

    Attributes:
        shape: the axes' sizes: a tuple that can also be indexed by name, and that `dict` makes a dict of.
        axis_names: the axes' names, major first.
        size: how many ranks there are: an int, which can also be called, as torch's programs do.
        played_ranks: the ranks that this process plays: all of a simulated mesh, its own of a real one, some under
            `deterministic`.
    """

    place: Any = None  # of the ranks that hold a value which exists at some coordinates only: see `places`
    elsewhere = False

    if not TYPE_CHECKING:  # or type checkers would believe that every name is there

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("Mesh", self, name)

    @property
    def shape(self) -> AxisSizes:  # type: ignore[override]
        return _sizes(self)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.mesh_dim_names or ()

    @property
    def size(self) -> RankCount:  # type: ignore[override]
        return _count(self)

    @property
    def played_ranks(self) -> range:
        return getattr(self, "communicator", ProcessGroup)(self).ranks

    def __getitem__(self, names: Any) -> Any:
        """The mesh of some axes, in the mesh's order: for each rank that of the ranks at its place on the other axes."""
        names = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, (tuple, list)) else (names,)
        if not names or names != tuple(name for name in self.axis_names if name in names):
            what = f"{short(names if len(names) != 1 else names[0])} does not name axes of the {mesh_text(self.shape)}"
            near = [
                f"{short(name)} is no axis{meant(name, self.axis_names)}"
                for name in names
                if name not in self.axis_names
            ]
            fix = f"names among {self.axis_names}, in this order, each once"
            raise MeshError(report("mesh[...]", what, near, fix))
        return self if names == self.axis_names else self._part(names, {})

    def at(self, **places: int) -> Mesh:
        """The mesh of the ranks at these places of some axes, along the others: ``mesh.at(pp=1)``, a stage of a pipeline.

        Every rank may ask for it; only ranks that are in it may put arrays on it.

        >>> import vescale_fn as vfn
        >>> with vfn.simulate(8):
        ...     vfn.make_mesh((2, 4), ("pp", "dp")).at(pp=1)
        SimulatedMesh(dp=4) at pp=1 of (pp=2, dp=4)
        """
        failures = [
            f"{name}={short(i)}: "
            + (f"its places are 0 to {self.shape[name] - 1}" if name in self.axis_names else "there is no such axis")
            for name, i in places.items()
            if name not in self.axis_names or type(i) is not int or not 0 <= i < self.shape[name]
        ]
        rest = tuple(name for name in self.axis_names if name not in places)
        if failures or not places or not rest:
            what = f"this does not choose a part of the {mesh_text(self.shape)}"
            every = "" if failures else "it names every axis" if places else "it names no axis"
            fix = f"for instance mesh.at({self.axis_names[0]}=0)" if len(self.axis_names) > 1 else ""
            raise MeshError(report("mesh.at", what, failures or [every], fix))
        return self._part(rest, places)

    def _part(self, names: tuple[str, ...], places: dict[str, int]) -> Mesh:
        me = self.get_coordinate()
        if dist.is_initialized() and torch_internals.has_groups(self) and me is not None:
            if all(me[self.axis_names.index(name)] == i for name, i in places.items()):
                with torch_internals.unrecorded():  # torch looks for this rank in a tensor
                    return named(super().__getitem__(names))
        where = tuple(slice(None) if name in names else places.get(name, 0) for name in self.axis_names)
        here = dist.get_rank() if dist.is_initialized() else 0
        return torch_internals.unattached_mesh(self.device_type, self.mesh[where], names, Mesh, here)

    def __deepcopy__(self, memo: Any) -> Mesh:
        return self


def named(mesh: Any) -> Mesh:
    """A mesh of torch's, from here on a `Mesh`."""
    mesh.__class__ = Mesh
    return mesh


@functools.lru_cache(maxsize=256)
def _sizes(mesh: Mesh) -> AxisSizes:
    sizes = DeviceMesh.shape.__get__(mesh)  # type: ignore[attr-defined]
    return AxisSizes(dict(zip(mesh.axis_names, sizes, strict=True)))


@functools.lru_cache(maxsize=256)
def _count(mesh: Mesh) -> RankCount:
    return RankCount(mesh)
