"""What `auto` is asked for: meshes, memory, specs that are given, arguments that may be used up."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import optree
import torch

from .._core.base import tree
from .._core.base.errors import MeshError, SpecError, TransformError
from .._core.base.messages import described, report, short
from .._core.distributed.abstract_mesh import AbstractMesh
from .._core.sharding.index_map import axes_of
from .._core.sharding.layout import WHOLE, type_text
from .._core.sharding.spec import P, problems
from .._core.sharding.spec_trees import are_rules
from ..hardware import Hardware
from ..plan.ir.memory_limit import limit
from .price_arguments import equipped, meshed, of_leaves
from .recording import Recording


def on_meshes(mesh: Any, args: tuple[Any, ...], hardware: Any) -> tuple[list[AbstractMesh], Hardware]:
    """The meshes to choose from, without ranks, and the hardware that all of them fit on."""
    several = isinstance(mesh, (list, tuple))
    if several and not mesh:
        raise MeshError(report("auto", "mesh= is an empty list", fix='mesh={"dp": 8, "tp": 8}, or vfn.mesh_shapes(64)'))
    found = [meshed(one, args, "auto") for one in (mesh if several else [mesh])]
    largest, device = max(found, key=lambda one: math.prod(axes_of(one[0]).values()))
    return list(dict.fromkeys(one for one, _ in found)), equipped(hardware, largest, device, "auto")


def budgeted(memory: Any, hardware: Hardware) -> float:
    """The bytes that a rank may need."""
    if memory is None:
        return hardware.memory
    try:
        return limit(memory).of(int(hardware.memory))
    except TransformError:
        what = f"memory={short(memory)} is no amount of memory"
        fix = 'bytes, as an int or as memory="70 GiB"; or a share of what a device has, memory="90 %"'
        raise TransformError(report("auto", what, fix=fix)) from None


def donated(numbers: Any, count: int) -> tuple[int, ...]:
    """The arguments that may be used up, by position."""
    found = (numbers,) if type(numbers) is int else tuple(numbers)
    wrong = [f"{short(n)} is no position of an argument" for n in found if type(n) is not int or not 0 <= n < count]
    if wrong:
        raise TransformError(report("auto", f"donate_argnums={short(numbers)}, of {count} arguments", wrong))
    return found


def given_specs(recorded: Recording, fixed: Any, mesh: AbstractMesh) -> tuple[dict[int, P], list[str]]:
    """The specs that are given, by placeholder, and what is wrong with them on this mesh.

    Raises:
        SpecError: they fit on no mesh: other structures, or what is no spec.
    """
    args = recorded.call.args
    if fixed is None:
        return {}, []
    entries = fixed
    if isinstance(fixed, P) or not isinstance(fixed, tuple):
        entries = tuple(None if isinstance(x, int | float | str) else fixed for x in args)
    if len(entries) != len(args):
        what = f"fixed= is a tuple of {len(entries)} for {len(args)} argument{'s' * (len(args) != 1)}"
        raise SpecError(report("auto", what, fix="one for each, None for those that are free"))
    specs = [spec for n, (x, one) in enumerate(zip(args, entries)) for spec in _of_argument(x, one, n)]
    found, wrong = dict[int, P](), list[str]()
    axes = axes_of(mesh)
    for n, (at, path, node) in enumerate(zip(recorded.leaves, recorded.paths, recorded.placeholders)):
        spec, x = (None if at is None else specs[at]), node.meta.get("val")
        if spec is None or not isinstance(x, torch.Tensor):
            continue
        failures = problems(spec, axes, x.ndim)
        if spec.unreduced or spec.reduced:
            failures.append("an argument is split over dims, or whole")
        wrong += [f"{path} is {type_text(x.shape, x.dtype, WHOLE)}, its spec {spec!r}: {one}" for one in failures]
        if not failures:
            found[n] = spec
    return found, wrong


def _of_argument(x: Any, spec: Any, n: int) -> list[P | None]:
    """Of each leaf of an argument the spec that is given, or None."""
    if spec is None:
        return [None] * len(tree.leaves(x))
    if are_rules(spec):
        return _matched(x, spec, n)
    found = of_leaves(spec, x, f"args[{n}]", "auto")
    wrong = [f"{described(one)} is no vfn.P" for one in found if one is not None and not isinstance(one, P)]
    if wrong:
        raise SpecError(report("auto", f"fixed[{n}] has other things than specs", wrong))
    return found


def _matched(x: Any, rules: Sequence[tuple[str, P]], n: int) -> list[P | None]:
    """What the first rule that matches gives each leaf; None where none does."""
    paths = [tree.dotted(accessor) for accessor in optree.tree_accessors(x)]
    unused = [f"{pattern!r}" for pattern, _ in rules if not any(re.search(pattern, path) for path in paths)]
    if unused:
        raise SpecError(report("auto", f"rules of fixed[{n}] match no leaf", unused))
    return [next((spec for pattern, spec in rules if re.search(pattern, path)), None) for path in paths]
