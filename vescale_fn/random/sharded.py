"""Draws with a spec: each rank makes its own block, as an array or as a block in a `shard_map` body.

Each rank hashes the counters of its own rectangle and of nothing else, so nothing moves between ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .._core import torch_internals
from .._core.arrays import array, placement
from .._core.base import context
from .._core.base.errors import SpecError
from .._core.base.messages import mesh_text, report
from .._core.distributed.communicator import coordinates
from .._core.distributed.mesh import communicator_of, same
from .._core.distributed.places import resolved, whole_mesh
from .._core.local_types import replica_check, tensor_types, types
from .._core.sharding.index_map import axes_of, is_even, local_indices
from .._core.sharding.spec import P, split_axes, validate, without_place
from .backends import draw_op
from .generators import counters
from .generators.elementwise_draws import Draw
from .keys import Key

# Elements of a draw up to which its rectangles are kept: beside a larger draw they take no time.
PLANNED = 1 << 18


def drawn(
    where: str, key: Key, draw: Draw, spec: P | None = None, mesh: Any = None, device: Any = None
) -> torch.Tensor:
    """The draw, laid out as `spec` says on `mesh` (by default the current one); whole, on `device`, without a mesh.

    Inside a `shard_map` body: this rank's block of the draw; without a spec, the same whole draw on every rank.
    """
    if (
        spec is None
        and mesh is None
        and device is None
        and context.body() is None
        and torch_internals.is_plain(key.data)
    ):
        out = draw_op.draw_small(key.data, draw, 0, draw.shape)
        if out is not None:
            return out
    layout = laid_out(where, key, draw, spec, mesh)
    if layout is None:
        body = context.body()
        return _whole(key, draw, device or device_of(key, body.mesh if body else None))
    spec, mesh = layout
    if context.body():
        return _in_body(key, draw, spec, mesh)
    if torch_internals.transforming():
        return _Placed.apply(key.data, draw, spec, mesh)
    return _on_mesh(key.data, draw, spec, mesh)


def laid_out(where: str, key: Key, draw: Draw, spec: Any, mesh: Any) -> tuple[P, Any] | None:
    """The spec and the mesh of a draw, checked; None where it is whole, on one device or on every rank alike."""
    body = context.body()
    if spec is None and mesh is None:
        return None
    if mesh is not None:
        context.checked_mesh(mesh, where)
    spec, mesh = at_place(where, _checked(where, P() if spec is None else spec), mesh)
    if mesh is None:
        mesh = body.mesh if body else context.current_mesh()
    mesh = context.seen(mesh)
    if mesh is None:
        if len(spec) > len(draw.shape):
            raise SpecError(
                report(
                    where,
                    f"the spec {spec!r} has {len(spec)} entries, but the draw has shape {draw.shape}",
                    fix="at most one entry a dim",
                )
            )
        return None
    _validate(where, draw.shape, spec, mesh)
    if body:
        _check_in_body(where, draw, spec, mesh, body)
    elif context.on_one_device():
        return None
    if isinstance(key, Key) and replica_check.looked_for():
        replica_check.key_alike(where, key.data, mesh)
    return spec, mesh


def at_place(where: str, spec: Any, mesh: Any) -> tuple[Any, Any]:
    """The spec among the ranks of the place that ``at`` of it names, and the mesh of these; what names none as it is."""
    if not isinstance(spec, P) or not spec.at:
        return spec, mesh
    if context.body() is not None:
        what = f"spec={spec!r} says at, and in a shard_map body every rank has its block"
        raise SpecError(report(where, what, fix="the draw outside of the body, as an argument of the shard_map"))
    mesh = whole_mesh(context.current_mesh() if mesh is None else mesh)
    if mesh is None or context.on_one_device():
        return without_place(spec), mesh
    validate(spec, axes_of(mesh), None, where, at=True)
    mesh, spec = resolved(mesh, spec)
    return spec, mesh


def rectangles(shape: tuple[int, ...], spec: P, mesh: Any) -> Mapping[int, counters.Rectangle]:
    """What each rank that this process plays makes of a draw of this shape; ranks that make the same share one object."""
    planned = _rectangles if math.prod(shape) <= PLANNED else _rectangles.__wrapped__
    return planned(shape, spec, mesh, communicator_of(mesh).asked_about)


@functools.lru_cache(maxsize=256)
def _rectangles(shape: tuple[int, ...], spec: P, mesh: Any, ranks: Sequence[int]) -> Mapping[int, counters.Rectangle]:
    axes, made, found = axes_of(mesh), {}, {}
    names = [name for row in split_axes(spec, len(shape)) for name in row]
    for rank in ranks:
        coord = coordinates(mesh, rank)
        place = tuple(coord[name] for name in names)
        if place not in made:
            made[place] = counters.Rectangle(shape, local_indices(shape, axes, spec, coord))
        found[rank] = made[place]
    return found


@functools.lru_cache(maxsize=256)
def _validate(where: str, shape: tuple[int, ...], spec: P, mesh: Any) -> None:
    validate(spec, axes_of(mesh), len(shape), where, f"a draw of shape {shape}")


def _checked(where: str, spec: Any) -> P:
    if not isinstance(spec, P):
        raise SpecError(
            report(
                where,
                f"spec must be a P, but it is the {type(spec).__name__} {spec!r}",
                fix='for instance P("dp", None)',
            )
        )
    if spec.unreduced or spec.reduced:
        raise SpecError(
            report(
                where,
                f"the spec {spec!r} speaks of sums between ranks, and a draw is not one",
                fix=f"spec={P(*spec)!r}",
            )
        )
    return spec


def device_of(key: Key, mesh: Any) -> torch.device:
    """Where a draw is made."""
    if key.data.device.type != "cpu":
        return key.data.device
    if mesh is not None:
        return torch.device(mesh.device_type)
    return torch.empty(0).device if torch.compiler.is_compiling() else torch_internals.default_device()


def _whole(key: Key, draw: Draw, device: torch.device) -> torch.Tensor:
    return own(draw_op.draw_encoded(key.data, draw, None, draw.shape, device))


def own(out: torch.Tensor) -> torch.Tensor:
    """What is the same on all ranks, in a body each rank's own, as what a factory makes there: it may write into it."""
    body = context.body()
    if (
        body is not None
        and communicator_of(body.mesh).holds_blocks
        and torch_internals.is_bare(out)
        and not torch_internals.transforming()
    ):
        with torch_internals.no_torch_function():
            out = communicator_of(body.mesh).each(lambda rank: out.clone() if rank else out)
        tensor_types.mark(out, tensor_types.made_in(body))
    return out


def _on_mesh(data: torch.Tensor, draw: Draw, spec: P, mesh: Any) -> torch.Tensor:
    """An array; the batch dims of `data` come first and are not split."""
    data, device, mine = placement.unshard(data), torch.device(mesh.device_type), rectangles(draw.shape, spec, mesh)
    batch = data.shape[:-1]
    made = communicator_of(mesh).each(lambda rank: draw_op.draw(data, draw, mine[rank], device), key=mine.__getitem__)
    return array.wrap(made, mesh, P(*(None,) * len(batch), *spec), torch.Size((*batch, *draw.shape)))


class _Placed(torch.autograd.Function):
    """`_on_mesh` under functorch transforms, which see a function of the key with a rule for batches."""

    @staticmethod
    def forward(data: torch.Tensor, draw: Draw, spec: P, mesh: Any) -> torch.Tensor:
        return _on_mesh(data, draw, spec, mesh)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, data: torch.Tensor, draw: Draw, spec: P, mesh: Any) -> Any:
        return _Placed.apply(data.movedim(in_dims[0], 0), draw, spec, mesh), 0


def _check_in_body(where: str, draw: Draw, spec: P, mesh: Any, body: Any) -> None:
    axes = axes_of(body.mesh)
    names = [name for row in split_axes(spec, len(spec)) for name in row]
    failures = [
        f"axis {name!r} is not manual here: the body's axes are {tuple(body.axes)}"
        for name in names
        if name not in body.axes
    ]
    if not same(mesh, body.mesh):
        failures = [f"mesh is the {mesh_text(axes_of(mesh))}, not that of the body: leave it out"]
    elif not failures and not is_even(draw.shape, axes, spec):
        for dim, (size, row) in enumerate(zip(draw.shape, split_axes(spec, len(draw.shape)), strict=True)):
            n = int(np.prod([axes[name] for name in row]))
            if size % n:
                failures.append(f"dim {dim} of size {size} is split {n} times by {row}, and {size} % {n} = {size % n}")
    if failures:
        raise SpecError(
            report(
                where,
                f"the spec {spec!r} does not fit a draw of shape {draw.shape} inside a shard_map "
                f"body on the {mesh_text(axes)}",
                failures,
                "sizes that the axes divide; outside of bodies any size will do",
            )
        )


def encoded_in_body(draw: Draw, spec: P, mesh: Any) -> tuple[Any, tuple[int, ...]]:
    """This rank's rectangle of a draw in a body (None: everything), and the rectangle's shape, which all ranks share."""
    if not any(split_axes(spec, len(spec))):
        return None, draw.shape
    mine = rectangles(draw.shape, spec, mesh)
    encoded = communicator_of(mesh).each(lambda rank: mine[rank].encoded())
    tensor_types.mark(encoded, types.of_spec(spec))  # which makes the draw vary over the spec's axes
    return encoded, mine[next(iter(mine))].local


def _in_body(key: Key, draw: Draw, spec: P, mesh: Any) -> torch.Tensor:
    where, local = encoded_in_body(draw, spec, mesh)
    device = device_of(key, mesh)
    return _whole(key, draw, device) if where is None else draw_op.draw_encoded(key.data, draw, where, local, device)
