"""Checks of the parameters of distributions, and the layout that a draw takes from them.

Numbers are looked at; tensors are not, for that would wait for a device and stop a tracer.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._core.arrays import array
from .._core.base import context
from .._core.base.errors import RandomError
from .._core.base.messages import described, report, short
from .._core.distributed.places import at_of
from .._core.sharding.spec import P, from_split_axes, place_text, split_axes
from .keys import shape_of
from .sharded import at_place

Shape = Sequence[int] | int


def need(dtype: Any, known: Any, where: str, name: str = "dtype") -> None:
    """`dtype` is one of those known."""
    if dtype not in known:
        names = ", ".join(str(d).removeprefix("torch.") for d in known)
        what = "dtype" if name == "dtype" else f"{name}'s dtype"
        wrong_place = not isinstance(dtype, torch.dtype) and name == "dtype"
        named = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        example = torch.float32 if torch.float32 in known else next(iter(known))
        fix = (
            f"dtype={named}"
            if named in known
            else f"dtype={example}, say"
            if isinstance(dtype, str)
            else f"dtype={example}, say; numbers that come after dtype by name, minval=0.0"
            if wrong_place
            else ""
        )
        said = short(dtype) if wrong_place else dtype
        raise RandomError(report(where, f"{what} must be one of {names}, but it is {said}", fix=fix))


def one_of(value: Any, known: Sequence[Any], where: str, name: str) -> None:
    """`value` is one of those known."""
    if value not in known:
        names = " or ".join(map(repr, known))
        raise RandomError(report(where, f"{name} must be {names}, but it is {value!r}"))


def number(value: Any, where: str, name: str) -> float:
    """A real number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RandomError(report(where, f"{name} must be a number or a tensor, but it is {described(value)}")) from None


def integer(value: Any, where: str, name: str) -> int:
    """A Python integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise RandomError(report(where, f"{name} must be an integer, but it is {described(value)}")) from None


def probability(value: Any, where: str, name: str) -> float:
    """A number in [0, 1]."""
    value = number(value, where, name)
    if not 0 <= value <= 1:
        percent = f"{value / 100:g} for {value:g} %" if 2 <= value <= 100 else ""
        raise RandomError(report(where, f"{name} must be in [0, 1], but it is {value!r}", fix=percent))
    return value


def _limited(value: Any, where: str, name: str, holds: Any, what: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    value = number(value, where, name)
    if not holds(value):
        raise RandomError(report(where, f"{name} must be {what}, but it is {value!r}"))
    return value


def positive(value: Any, where: str, name: str) -> Any:
    """A tensor, or a number above zero."""
    return _limited(value, where, name, lambda v: v > 0, "positive")


def not_negative(value: Any, where: str, name: str) -> Any:
    """A tensor, or a number from zero on."""
    return _limited(value, where, name, lambda v: v >= 0, "zero or more")


def real(value: Any, where: str, name: str) -> Any:
    """A tensor, or a number that is one."""
    return _limited(value, where, name, lambda v: v == v, "a number")


def shape_and_place(
    where: str, shape: Any, spec: P | None, mesh: Any, **params: Any
) -> tuple[tuple[int, ...], P | None, Any]:
    """The shape of a draw, its spec and its mesh: where they are not given, those of its parameters, broadcast."""
    spec, mesh = at_place(where, spec, mesh)
    sizes = {name: tuple(p.shape) if isinstance(p, torch.Tensor) else () for name, p in params.items()}
    if shape is None:
        try:
            shape = tuple(torch.broadcast_shapes(*sizes.values()))
        except RuntimeError:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise RandomError(report(where, f"the shapes of its parameters do not broadcast: {listed}")) from None
    shape = shape_of(shape, where)
    arrays = [p for p in params.values() if isinstance(p, torch.Tensor) and array.is_array(p)]
    if spec is not None or not arrays or context.body() is not None:
        return shape, spec, mesh
    rows: list[tuple[str, ...]] = [()] * len(shape)
    for p in arrays:
        shift = len(shape) - p.ndim
        if shift < 0:
            continue  # an error that `fitting` describes
        for dim, axes in enumerate(split_axes(array.spec_of(p), p.ndim)):
            used = {axis for row in rows for axis in row}
            if not rows[dim + shift] and p.shape[dim] == shape[dim + shift] and not used & set(axes):
                rows[dim + shift] = axes
    return shape, from_split_axes(rows), mesh if mesh is not None else _mesh_of(where, params)


def _mesh_of(where: str, params: Mapping[str, Any]) -> Any:
    """The mesh of a draw's parameters: of their place, where some are at one."""
    meshes = {name: array.mesh_of(p) for name, p in params.items() if isinstance(p, torch.Tensor) and array.is_array(p)}
    places = {at_of(mesh): name for name, mesh in meshes.items() if at_of(mesh)}
    if len(places) > 1:
        (first, name), *others = ((place_text(at), name) for at, name in places.items())
        what = ", ".join([f"{name} is at {first}", *(f"{name} at {other}" for other, name in others)])
        raise RandomError(report(where, what, fix="spec=P(..., at=...), which says where the draw is to be"))
    return meshes[next(iter(places.values()), next(iter(meshes)))]


def fitting(where: str, drawn: torch.Tensor, **params: Any) -> list[torch.Tensor]:
    """The parameters as tensors that broadcast to what was drawn, in its dtype (integers for integers), lying as it."""
    found = []
    floating = drawn.is_floating_point()
    for name, value in params.items():
        if not isinstance(value, torch.Tensor):
            exact = number if floating else integer
            value = torch.tensor(exact(value, where, name), device=drawn.device)
        if not floating and (value.is_floating_point() or value.dtype == torch.bool):
            raise RandomError(report(where, f"{name} must be integers, but it is {described(value)}"))
        check_broadcast(where, name, value, drawn.shape)
        found.append(_lying_as(drawn, value.to(drawn.dtype) if floating else value, where))
    return found


def check_broadcast(where: str, name: str, value: torch.Tensor, shape: Sequence[int]) -> None:
    """A parameter broadcasts to the shape of a draw."""
    ndim = len(shape) - value.ndim
    if ndim < 0 or any(b not in (1, size) for b, size in zip(value.shape, shape[ndim:], strict=True)):
        raise RandomError(
            report(
                where,
                f"{name} of shape {tuple(value.shape)} does not broadcast to the shape {tuple(shape)} of the draw",
                fix=f"shape={tuple(value.shape)}, or one that ends so",
            )
        )


def _lying_as(drawn: torch.Tensor, value: torch.Tensor, where: str) -> torch.Tensor:
    """An array of parameters, brought to where the draw's elements are that it goes with."""
    if not (array.is_array(drawn) and array.is_array(value)):
        return value
    shift = drawn.ndim - value.ndim
    rows = split_axes(array.spec_of(drawn), drawn.ndim)[shift:]
    target = from_split_axes([row if value.shape[d] == drawn.shape[d + shift] else () for d, row in enumerate(rows)])
    mesh = array.mesh_of(drawn)
    if array.spec_of(value) == target and at_of(array.mesh_of(value)) == at_of(mesh):
        return value
    return array.moved(value, mesh, target, where)
