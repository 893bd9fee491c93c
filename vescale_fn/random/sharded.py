"""Draws with a spec: each rank makes its own block, as an array or as a block in a `shard_map` body.

Each rank hashes the counters of its own rectangle and of nothing else, so nothing moves between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .._core import torch_internals
from .._core.arrays import placement
from .._core.base import context
from .._core.base.errors import SpecError
from .._core.base.messages import mesh_text, report
from .._core.distributed import blocks
from .._core.distributed.mesh import coordinates, is_simulated, played_ranks, same
from .._core.local_types import replica_check, tensor_types, types
from .._core.sharding.index_map import axes_of, is_even, local_indices
from .._core.sharding.spec import P, split_axes, validate
from .backends import draw_op
from .bits import counters, elementwise_draws
from .keys import Key


class Draw(NamedTuple):
    """What is drawn, before it is said where: an entry of `kinds.KINDS`, its numbers, its dtype, the whole shape."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    params: tuple[elementwise_draws.Number, ...] = ()


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
        out = draw_op.draw_small(key.data, draw.kind, draw.shape, draw.dtype, draw.params)
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


def laid_out(where: str, key: Key, draw: Draw, spec: P | None, mesh: Any) -> tuple[P, Any] | None:
    """The spec and the mesh of a draw, checked; None where it is whole, on one device or on every rank alike."""
    body = context.body()
    if spec is None and mesh is None:
        return None
    if mesh is not None:
        context.checked_mesh(mesh, where)
    spec = _checked(where, P() if spec is None else spec)
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
    validate(spec, axes_of(mesh), len(draw.shape), where, f"a draw of shape {draw.shape}")
    if body:
        _check_in_body(where, draw, spec, mesh, body)
    elif context.on_one_device():
        return None
    if isinstance(key, Key) and replica_check.looked_for():
        replica_check.key_alike(where, key.data, mesh)
    return spec, mesh


def draw_local(key: Any, draw: Draw, indices: Sequence[counters.Indices], device: Any = "cpu") -> torch.Tensor:
    """One rectangle of a draw: the elements at these global indices, one vector a dim, as a plain tensor.

    Args:
        key: a `Key`, or its data; a batch of keys gives a batch of draws, in front.
        indices: for each dim of `draw.shape`, the global indices to draw (a range where they are neighbours).
    """
    data = key.data if isinstance(key, Key) else key
    where = None if counters.is_whole(draw.shape, indices) else rows_of(indices)
    local = tuple(map(len, indices))
    return draw_op.draw(data, where, draw.shape, local, draw.kind, draw.params, draw.dtype, torch.device(device))


def rows_of(indices: Sequence[counters.Indices]) -> torch.Tensor:
    """The rectangle as a tensor that says it to an operator."""
    # by numpy, because torch's factories mean something else inside a body
    return torch.from_numpy(np.asarray(counters.encode(indices), dtype=np.int64).reshape(-1, 3))


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
    return own(draw_op.draw(key.data, None, draw.shape, draw.shape, draw.kind, draw.params, draw.dtype, device))


def own(out: torch.Tensor) -> torch.Tensor:
    """What is the same on all ranks, in a body each rank's own, as what a factory makes there: it may write into it."""
    body = context.body()
    if (
        body is not None
        and is_simulated(body.mesh)
        and torch_internals.is_bare(out)
        and not torch_internals.transforming()
    ):
        with torch_internals.no_torch_function():
            out = blocks.Blocks((out, *(out.clone() for _ in played_ranks(body.mesh)[1:])))
        tensor_types.mark(out, tensor_types.made_in(body))
    return out


def _on_mesh(data: torch.Tensor, draw: Draw, spec: P, mesh: Any) -> torch.Tensor:
    """An array; the batch dims of `data` come first and are not split."""
    data = placement.unshard(data)
    axes, batch = axes_of(mesh), data.shape[:-1]

    def block(coord: Any) -> torch.Tensor:
        return draw_local(data, draw, local_indices(draw.shape, axes, spec, coord), mesh.device_type)

    dtype = elementwise_draws.result_dtype(draw.kind, draw.dtype)
    return placement.from_blocks(block, (*batch, *draw.shape), dtype, mesh, P(*(None,) * len(batch), *spec))


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


def body_rows(draw: Draw, spec: P, mesh: Any) -> tuple[Any, tuple[int, ...]]:
    """This rank's rectangle of a draw in a body (None: everything), and the rectangle's shape, which all ranks share."""
    axes = axes_of(mesh)
    if not any(split_axes(spec, len(spec))):
        return None, draw.shape

    def rows(rank: int) -> torch.Tensor:
        return rows_of(local_indices(draw.shape, axes, spec, coordinates(mesh, rank)))

    local = tuple(map(len, local_indices(draw.shape, axes, spec, dict.fromkeys(axes, 0))))
    return blocks.each(rows, played_ranks(mesh)), local


def _in_body(key: Key, draw: Draw, spec: P, mesh: Any) -> torch.Tensor:
    mine, local = body_rows(draw, spec, mesh)
    device = device_of(key, mesh)
    if mine is None:
        return _whole(key, draw, device)
    tensor_types.mark(mine, types.of_spec(spec))  # which makes the draw vary over the spec's axes
    return draw_op.draw(key.data, mine, draw.shape, local, draw.kind, draw.params, draw.dtype, device)
