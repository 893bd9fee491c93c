"""Where loaded leaves go: what `like`, `mesh` and `spec` say, compared with what is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._core.arrays.array import is_array, mesh_of, moved, spec_of
from .._core.base import context
from .._core.base.errors import CheckpointError, SpecError
from .._core.base.messages import described, dtype_text, meant, mesh_text, report, short
from .._core.distributed.places import resolved
from .._core.sharding.index_map import axes_of
from .._core.sharding.spec import KEYS as KEYS_WHOLE
from .._core.sharding.spec import P, as_spec, keys_taken_apart, problems
from . import chunks
from .chunks import Piece
from .leaf_kinds import KEYS, KINDS, VALUES, Unfit, kind_of
from .names import Named
from .sources import Entry


class Target(NamedTuple):
    """A leaf to load."""

    name: str
    path: str
    kind: str | None  # as of `leaf_kinds`; None: a Python value of any type
    shape: tuple[int, ...] | None  # None: a Python value
    dtype: torch.dtype | None
    device: Any
    mesh: Any
    spec: P | None
    like: Any  # the leaf that it is to be like, or None


def of_like(one: Named) -> Target | str:
    """What a leaf of `like` asks for; or what is wrong with it."""
    x = one.value
    if type(x) in VALUES:
        return Target(one.name, one.path, type(x).__name__, None, None, None, None, None, x)
    kind = next((kind for kind in KINDS if kind.fits(x)), None)
    try:
        like = x if kind is None else kind.like(x)
    except Unfit as error:
        return f"{one.path} is {described(x)}{error}"
    shape, dtype = getattr(like, "shape", None), getattr(like, "dtype", None)
    if shape is None or not isinstance(dtype, torch.dtype) or isinstance(x, type):
        return f"{one.path} is {described(x)}, and leaves are tensors, arrays, keys, or have a shape and a dtype"
    said = "tensor" if kind is None else kind.said(x)
    device = getattr(like, "device", None)
    target = Target(one.name, one.path, said, tuple(shape), dtype, device, None, None, x)
    if isinstance(like, torch.Tensor) and is_array(like):
        mesh = mesh_of(like)
        return target._replace(device=mesh.device_type, mesh=mesh, spec=spec_of(like))
    if device is None or torch.device(device).type == "meta":
        return target._replace(device="cpu")
    return target


def of_entry(name: str, entry: Entry) -> Target:
    """What is asked for where there is nothing to be like: plain tensors, and what was no tensor as it was."""
    device = None if entry.shape is None else "cpu"
    return Target(name, name, entry.kind, entry.shape, entry.dtype, device, None, None, None)


def laid_out(targets: Sequence[Target], specs: Sequence[Any], mesh: Any, where: str) -> list[Target]:
    """The same, as these specs say: one a target."""
    mesh = context.checked_mesh(mesh if mesh is not None else context.current_mesh(), where)
    out, failures, ways = [], [], {}
    for target, spec in zip(targets, specs, strict=True):
        if target.shape is None or not kind_of(target.kind).on_mesh:
            out.append(target)
            continue
        if not isinstance(spec, P):
            found, way = [f"it must be a vfn.P, but it is {short(spec)}"], as_spec(spec)
        else:
            found, way = problems(spec, axes_of(mesh), len(target.shape), at=True), _FITTING
            if not found and kind_of(target.kind) is KEYS:
                found, way = keys_taken_apart(spec, len(target.shape)), KEYS_WHOLE
        failures += [f"{_text(target)}, its spec {spec!r}: {problem}" for problem in found]
        ways |= dict.fromkeys([way] if found else [])
        if found:
            continue
        there, spec = resolved(mesh, spec)
        out.append(target._replace(mesh=there, spec=spec, device=mesh.device_type))
    if failures:
        raise SpecError(
            report(
                where, f"{len(failures)} specs do not fit on the {mesh_text(axes_of(mesh))}", failures, "; ".join(ways)
            )
        )
    return out


_FITTING = "each axis of the mesh at most once, and at most one entry a dim"


def _text(target: Target) -> str:
    assert target.shape is not None
    assert target.dtype is not None
    return f"{target.path} is {kind_of(target.kind).text(target.shape, target.dtype)}"


def entry_text(entry: Entry) -> str:
    """What is stored, on one short line."""
    if entry.shape is None or entry.dtype is None:
        return (
            "no tensor" if entry.kind is None else f"the {entry.kind} None" if entry.kind == "NoneType" else entry.kind
        )
    return kind_of(entry.kind).text(entry.shape, entry.dtype)


def check(targets: Sequence[Target], entries: Mapping[str, Entry], at: str, partial: bool, where: str) -> None:
    """Raise one CheckpointError for all leaves that are missing, not asked for, or other than they should be."""
    failures, ways = [], {}
    asked = {target.name for target in targets}
    extra = [name for name in entries if name not in asked]
    for target in targets:
        entry = entries.get(target.name)
        if entry is None:
            failures.append(f"{target.path} is not in the checkpoint{meant(target.name, extra)}")
            ways[_OTHER] = True
        elif (problem := _unlike(target, entry)) is not None:
            failures.append(f"{target.path} {problem[0]}")
            ways[problem[1]] = True
    if not partial:
        failures += [f"{name}, {entry_text(entries[name])}, is in the checkpoint but not in like" for name in extra]
        ways |= {_PARTIAL: True} if extra else {}
    if failures:
        raise CheckpointError(report(where, f"{at} does not hold what is to be loaded", failures, "; ".join(ways)))


_OTHER = "a tree of the same names (vfn.load(path) shows what there is)"
_PARTIAL = "partial=True passes over what like has not"


def _unlike(target: Target, entry: Entry) -> tuple[str, str] | None:
    """In what an entry is not what is asked for, and what to ask for instead."""
    wanted = "None" if target.kind == "NoneType" else str(target.kind)
    there = "None" if entry.kind == "NoneType" else entry_text(entry)
    value = target.shape is None or target.dtype is None
    mine = (
        wanted
        if target.shape is None or target.dtype is None
        else kind_of(target.kind).text(target.shape, target.dtype)
    )
    unlike = f"is {mine} in like, but {there} in the checkpoint", _LIKE_IT
    if value or entry.shape is None or entry.dtype is None:
        both = (target.shape is None) == (entry.shape is None)
        return None if both and (target.kind == entry.kind or None in (target.kind, entry.kind)) else unlike
    opaque = kind_of(target.kind).opaque
    of_a_kind = opaque == kind_of(entry.kind).opaque
    if (target.shape, target.dtype) == (entry.shape, entry.dtype) and (of_a_kind or entry.kind is None):
        if not opaque or entry.kind in (None, target.kind):
            return None
        return f"is of {wanted} in like, but of {entry.kind} in the checkpoint", _LIKE_IT
    if target.shape == entry.shape and of_a_kind and not opaque:
        return unlike[0], f"a like of {dtype_text(entry.dtype)}, then .to(...): no dtype is changed silently"
    return unlike


_LIKE_IT = "a like of what was saved"


class Made(NamedTuple):
    """A leaf that is made and still to be filled."""

    target: Target
    value: Any
    parts: list[Piece]


def made(target: Target) -> Made:
    """The memory of a leaf."""
    assert target.shape is not None
    assert target.dtype is not None
    spec = None if target.spec is None else P(*target.spec, reduced=target.spec.reduced)
    value, parts = chunks.empty(target.shape, target.dtype, target.device, target.mesh, spec)
    return Made(target, value, parts)


def finished(one: Made) -> Any:
    """The leaf itself, once it is filled."""
    target, x = one.target, one.value
    if target.spec is not None and target.spec.unreduced:
        x = moved(x, target.mesh, target.spec, "load")
    try:
        return kind_of(target.kind).restore(x, str(target.kind), target.like)
    except Unfit as error:
        raise CheckpointError(report("load", f"{target.path} is {error}")) from None
