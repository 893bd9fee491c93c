"""`Mesh`: a DeviceMesh of torch's that can also be asked as JAX's meshes are: ``mesh.shape["dp"]``, ``mesh.axis_names``."""

from __future__ import annotations

import functools
from collections.abc import ItemsView, KeysView, ValuesView
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..base.errors import MeshError
from ..base.messages import meant, mesh_text, report
from ..base.saved_names import saved_as


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
    """

    @property
    def shape(self) -> AxisSizes:  # type: ignore[override]
        return _sizes(self)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.mesh_dim_names or ()

    @property
    def size(self) -> RankCount:  # type: ignore[override]
        return _count(self)

    def __getitem__(self, names: Any) -> Any:
        return named(super().__getitem__(names))

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
