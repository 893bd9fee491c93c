"""Layouts that are given to choose from (`others` of `auto`): of the arguments alone, or steps that state their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._core import torch_internals
from .._core.base import context, tree
from .._core.base.errors import SpecError, VfnError
from .._core.base.messages import mesh_text, report
from .._core.distributed.abstract_mesh import AbstractMesh
from .._core.sharding.index_map import axes_of
from .._core.sharding.placements import normal
from .._core.sharding.spec import P
from ..hardware import Hardware
from ..plan.arriving import arrived
from .apply import mesh_for
from .by_name import Placed, placed
from .price_arguments import laid_out, meshed
from .recording import Recording
from .search.layouts import Layouts
from .verified import Verified, priced_as

_FORMS = "specs, as for vfn.price; (step, specs), a step that states its layout itself; or (step, specs, mesh)"


class _Given(NamedTuple):
    """A layout that is given: of the step, or of one of its own; on the meshes to choose from, or on one of its own."""

    step: Callable[..., Any] | None
    specs: Any
    mesh: AbstractMesh | None


def given(
    recorded: Recording,
    args: tuple[Any, ...],
    others: Mapping[str, Any],
    meshes: Sequence[AbstractMesh],
    fixed: Callable[[AbstractMesh], Mapping[int, P]],
    hardware: Hardware,
    memory: float | None,
    donate: Sequence[int],
) -> list[Verified]:
    """The layouts that were given, each on its own mesh, or on all meshes on which it fits, priced.

    Args:
        meshes: to choose from.
        fixed: the specs, by placeholder, that are fixed on a mesh.

    Raises:
        SpecError: one fits on no mesh, or lies otherwise than what is fixed.
    """
    found = list[Verified]()
    for name, entry in others.items():
        one = _opened(name, entry)
        if one.mesh is not None:
            hardware.check(axes_of(one.mesh), "auto")
        failure: SpecError | None = None
        step, rows = one.step or recorded.f, list[Verified]()
        for mesh in meshes if one.mesh is None else [one.mesh]:
            try:
                laid = laid_out(args, one.specs, mesh, f"auto: others[{name!r}]")
            except SpecError as error:
                failure = failure or error
                continue
            lie = _inputs(recorded, laid)
            _as_fixed(recorded, lie, fixed(mesh), mesh, name)
            try:
                layouts = Layouts(dict(axes_of(mesh)), tuple(lie))
                cost = priced_as(recorded, layouts, hardware, donate, step=step)
            except VfnError as error:
                error.add_note(f"auto: this is of others[{name!r}], on the {mesh_text(axes_of(mesh))}")
                raise
            rows.append(Verified(layouts, None, cost, memory is None or cost.peak <= memory, name, step=step))
        if not rows and failure is not None:
            raise failure
        found += rows
    return found


def own_meshes(others: Mapping[str, Any]) -> list[AbstractMesh]:
    """The meshes that layouts bring with them."""
    found = (_opened(name, entry).mesh for name, entry in others.items())
    return [mesh for mesh in found if mesh is not None]


def with_own_mesh(others: Mapping[str, Any]) -> dict[str, Any]:
    """Those that bring a mesh with them."""
    return {name: entry for name, entry in others.items() if _opened(name, entry).mesh is not None}


def in_place(entry: Any, at: Placed) -> Any:
    """An entry of `others`, its own step given its arguments as the step is that they are for."""
    return (at.alike(entry[0]), *entry[1:]) if isinstance(entry, tuple) and entry and callable(entry[0]) else entry


def _opened(name: str, entry: Any) -> _Given:
    """What an entry of `others` says."""
    if not (isinstance(entry, tuple) and entry and callable(entry[0])):
        return _Given(None, entry, None)
    if len(entry) not in (2, 3):
        raise SpecError(report("auto", f"others[{name!r}] is a tuple of {len(entry)}, a step the first", fix=_FORMS))
    step, specs, *rest = entry
    return _Given(step, specs, meshed(rest[0], (), "auto")[0] if rest else None)


def _inputs(recorded: Recording, laid: Any) -> list[P | None]:
    """How each placeholder lies, of arguments on a mesh; constants whole."""
    leaves = tree.leaves(laid)
    of = [P() if at is None else getattr(leaves[at], "spec", None) for at in recorded.leaves]
    is_tensor = [isinstance(node.meta.get("val"), torch.Tensor) for node in recorded.placeholders]
    return [spec if tensor else None for spec, tensor in zip(of, is_tensor)]


def _as_fixed(
    recorded: Recording, lie: Sequence[P | None], fixed: Mapping[int, P], mesh: AbstractMesh, name: str
) -> None:
    """Raise where a layout lies otherwise than what is fixed."""
    of = lambda spec, n: normal(P(*(spec or ())), axes_of(mesh), recorded.placeholders[n].meta["val"].shape)
    wrong = [
        f"{recorded.paths[n]}: {lie[n]!r}, and fixed as {spec!r}"
        for n, spec in fixed.items()
        if of(lie[n], n) != of(spec, n)
    ]
    if wrong:
        raise SpecError(report("auto", f"others[{name!r}] lies otherwise than fixed=", wrong))


def as_given(
    step: Callable[..., Any], specs: tuple[Any, ...], axes: Mapping[str, int], mesh: Any
) -> Callable[..., Any]:
    """A step that states its layout itself, of arguments that lie as the specs say: plain ones are laid out as they come in.

    Args:
        axes: of the mesh that it is given for, with their sizes.
        mesh: by default that of the arguments, or the current one.
    """

    @functools.wraps(step)
    @torch_internals.not_compiled
    def run(*args: Any, **kwargs: Any) -> Any:
        args = placed(step, args, kwargs, "choice").args
        on = mesh_for(axes, mesh, tree.leaves(args))
        with context.use_mesh(on):
            return step(*arrived(args, (), (), lambda: tree.paths(args, "args"), specs, "choice"))

    return run
