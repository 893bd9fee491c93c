"""`Sharding`: a spec with the mesh that it is for; what `array.sharding` gives, and stands where specs are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..base import tree
from ..base.errors import MeshError
from ..base.messages import mesh_text, report
from .index_map import axes_of
from .spec import P


@dataclass(frozen=True, repr=False)
class Sharding:
    """Where an array lies: its mesh and its spec. Equal ones have equal meshes and specs.

    It may stand for the spec in `shard`, `with_sharding`, `from_local`, `init` and `jit`.

    Source: `jax.sharding.NamedSharding`.
    """

    mesh: Any
    spec: P

    def __repr__(self) -> str:
        return f"Sharding({mesh_text(axes_of(self.mesh))}, {self.spec!r})"


def without_mesh(spec: Any, mesh: Any, where: str) -> tuple[Any, Any]:
    """A tree of specs as a tree of `P`s, and the mesh that is meant: that of its shardings, if there are any, or `mesh`."""
    if type(spec) is P:
        return spec, mesh
    meshes = [one.mesh for one in tree.leaves(spec) if isinstance(one, Sharding)]
    if not meshes:
        return spec, mesh
    given = [*meshes, *([] if mesh is None else [mesh])]
    if any(one != given[0] for one in given):
        named = [f"spec is on the {mesh_text(axes_of(one))}" for one in dict.fromkeys(meshes)]
        named += [] if mesh is None else [f"mesh is the {mesh_text(axes_of(mesh))}"]
        raise MeshError(
            report(where, "the shardings are not on one mesh", named, "x.sharding.spec, a spec for any mesh")
        )
    return tree.map_(lambda one: one.spec if isinstance(one, Sharding) else one, spec), meshes[0]
