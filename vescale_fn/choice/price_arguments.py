"""What a price is asked for, as arguments of a recording: shapes with layouts on an abstract mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .._core.arrays.array import is_array, mesh_of
from .._core.arrays.placement import spec_of
from .._core.arrays.shapes import ShapeDtype
from .._core.base import context, tree
from .._core.base.containers import opened
from .._core.base.errors import HardwareError, MeshError, SpecError
from .._core.base.messages import described, meant, mesh_text, report, short
from .._core.distributed.abstract_mesh import AbstractMesh, abstract_mesh
from .._core.distributed.places import whole_mesh
from .._core.sharding.index_map import axes_of
from .._core.sharding.layout import WHOLE, type_text
from .._core.sharding.spec import P, problems
from .._core.sharding.spec_trees import are_rules, spec_from_rules
from ..hardware import Hardware, a100, b200, cpu, h100

_PRESETS = {"h100": h100, "a100": a100, "b200": b200}
_NODE = 8


def meshed(mesh: Any, args: tuple[Any, ...], where: str = "price") -> tuple[AbstractMesh, str]:
    """The mesh without ranks of the same axes as the one that is given, or that of the arguments, or the current one; and of
    what kind its devices are, "" where nobody knows."""
    arrays = [x for x in tree.leaves(args) if isinstance(x, torch.Tensor) and is_array(x)]
    if mesh is None:
        mesh = whole_mesh(mesh_of(arrays[0])) if arrays else context.current_mesh()
    if mesh is None:
        raise MeshError(report(where, "there is no mesh", fix='mesh={"dp": 8, "tp": 8}, say: the sizes of its axes'))
    if isinstance(mesh, AbstractMesh):
        return mesh, ""
    if isinstance(mesh, Mapping):
        sizes = dict(mesh)
        wrong = [f"{short(name)} has size {short(size)}" for name, size in sizes.items() if type(size) is not int]
        if wrong or not sizes:
            raise MeshError(report(where, "mesh= names axes with their sizes", wrong, '{"dp": 8, "tp": 8}'))
        return abstract_mesh(tuple(sizes.values()), tuple(sizes)), ""
    sizes = axes_of(context.checked_mesh(mesh, where))
    return abstract_mesh(tuple(sizes.values()), tuple(sizes)), mesh.device_type


def equipped(hardware: Any, mesh: AbstractMesh, device: str, where: str = "price") -> Hardware:
    """The hardware that is meant: itself, a preset by its name with nodes for all ranks, or by default what the mesh is of."""
    ranks = math.prod(axes_of(mesh).values())
    if isinstance(hardware, Hardware):
        hardware.check(axes_of(mesh), where)
        return hardware
    name = ("cpu" if device == "cpu" else "h100") if hardware is None else hardware
    if name == "cpu":
        return cpu(ranks)
    if name in _PRESETS:
        return _PRESETS[name](math.ceil(ranks / _NODE))
    known = (*_PRESETS, "cpu")
    what = f"hardware={short(hardware)} is none that is known{meant(hardware, known)}"
    raise HardwareError(report(where, what, [f"there are {', '.join(known)}"], "vfn.hardware.Hardware(...) for others"))


def laid_out(args: tuple[Any, ...], specs: Any, mesh: AbstractMesh, where: str = "price") -> tuple[Any, ...]:
    """The arguments as shapes on the mesh.

    Args:
        specs: a spec for all, or a tuple with a prefix tree of them, or rules, for each argument; None for those as they are:
            an array's own layout, whole where there is none.
    """
    if not isinstance(specs, tuple) or isinstance(specs, P):
        specs = tuple(None if isinstance(x, int | float | str) else specs for x in args)
    if len(specs) != len(args):
        what = f"specs= is a tuple of {len(specs)} for {len(args)} argument{'s' * (len(args) != 1)}"
        raise SpecError(report(where, what, fix="one for each, None for those as they are; or one P for all"))
    failures: list[str] = []
    found = tuple(_placed(x, spec, mesh, f"args[{i}]", failures, where) for i, (x, spec) in enumerate(zip(args, specs)))
    if failures:
        fix = "the axes of the mesh, each at most once, at most one entry a dim"
        raise SpecError(report(where, f"the specs do not fit on the {mesh_text(axes_of(mesh))}", failures, fix))
    return found


def _placed(x: Any, spec: Any, mesh: AbstractMesh, name: str, failures: list[str], where: str) -> Any:
    leaves, structure = opened(x, where, name, modules=True)
    if spec is not None and are_rules(spec):
        spec = spec_from_rules(x, spec)
    specs = of_leaves(spec, tree.unflatten(structure, leaves), name, where)
    out = []
    for leaf, one, path in zip(leaves, specs, tree.paths(x, name), strict=True):
        if not isinstance(leaf, torch.Tensor):
            out.append(leaf)
            continue
        if one is None:
            one = spec_of(leaf) if is_array(leaf) else getattr(leaf, "spec", None) or P()
        if not isinstance(one, P):
            failures.append(f"the spec of {path} is {described(one)}, not a vfn.P")
            continue
        wrong = problems(one, axes_of(mesh), leaf.ndim, at=True)
        what = f"{path} is {type_text(leaf.shape, leaf.dtype, WHOLE)}, its spec {one!r}"
        failures += [f"{what}: {problem}" for problem in wrong]
        if not wrong:
            out.append(ShapeDtype(leaf.shape, leaf.dtype, one, mesh))
    return tree.unflatten(structure, out) if len(out) == len(leaves) else None


def of_leaves(spec: Any, x: Any, name: str, where: str = "price") -> list[Any]:
    """The spec of each leaf; None for what stays as it is."""
    said = tree.map_(lambda one: _AS_IT_IS if one is None else one, spec, is_leaf=lambda one: one is None)
    found = tree.broadcast(said, x, where, name.replace("args", "specs"), name)
    return [None if one is _AS_IT_IS else one for one in found]


_AS_IT_IS = object()
