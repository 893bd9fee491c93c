"""Sharded draws by rejection, whose elements take different numbers of trials, with tensor parameters.

Element `i` still depends on the key, on `i` and on its own parameters alone, so each rank works on its block, and stops
when its own elements are done; nothing moves but parameters that lie otherwise than the draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .._core import torch_internals
from .._core.arrays import array
from .._core.arrays.placement import unshard
from .._core.base import context
from .._core.distributed.mesh import communicator_of
from .._core.distributed.places import at_of
from .._core.sharding.spec import P, from_split_axes, split_axes
from . import sharded, shared_keys
from .backends import draw_op
from .generators import counters, rejection_draws
from .keys import Key
from .sharded import Draw

BLOCK = 1 << 15  # elements that go through their trials together

_library = torch.library.Library("vescale_fn", "FRAGMENT")
_library.define(
    "sample(Tensor key, Tensor? where, Tensor[] params, SymInt[] shape, SymInt[] local, str kind, ScalarType dtype, "
    "Device device) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def sampled(
    where: str, key: Key, draw: Draw, params: Sequence[torch.Tensor], spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """A draw by trials, laid out as `sharded.drawn` lays its draws out.

    Args:
        where: the function that asks, for messages.
        key: one key.
        draw: its kind is an entry of `rejection_draws.SAMPLERS`.
        params: tensors, arrays or local values that broadcast to the shape of the draw (in a body with a spec: to this
            rank's block of it). Nothing is differentiated here.
        spec, mesh: as for `sharded.drawn`.
    """
    shared_keys.warn(where, key, {f"parameter {i}": p for i, p in enumerate(params) if p.ndim}, spec)
    params = [p.detach() for p in params]
    layout = sharded.laid_out(where, key, draw, spec, mesh)
    if layout is None:
        body = context.body()
        device = next((p.device for p in params if p.ndim), None) or sharded.device_of(key, body.mesh if body else None)
        return sharded.own(_sample(key.data, None, params, draw, draw.shape, device))
    spec, mesh = layout
    if context.body() is None:
        laid = _Laid.apply if torch_internals.transforming() else _on_mesh
        return laid(key.data, draw, spec, mesh, *params)
    mine, local = sharded.encoded_in_body(draw, spec, mesh)
    return _sample(key.data, mine, params, draw, local, sharded.device_of(key, mesh))


def _sample(
    key: torch.Tensor,
    where: Any,
    params: Sequence[torch.Tensor],
    draw: Draw,
    local: Sequence[int],
    device: torch.device,
) -> torch.Tensor:
    operator = torch.ops.vescale_fn.sample.default
    return operator(key, where, list(params), draw.shape, local, draw.kind, draw.dtype, device)


def _on_mesh(data: torch.Tensor, draw: Draw, spec: P, mesh: Any, *params: torch.Tensor) -> torch.Tensor:
    data = unshard(data)
    batch, mine = data.shape[:-1], sharded.rectangles(draw.shape, spec, mesh)
    shape = (*batch, *draw.shape)
    rows = (*((),) * len(batch), *split_axes(spec, len(draw.shape)))

    def block(rank: int, *params: torch.Tensor) -> torch.Tensor:
        where, local = mine[rank].where(), mine[rank].local
        return _sample(data, where, params, draw, local, torch.device(mesh.device_type))

    here = [_block(p, mesh, _lying(p, shape, rows), f"random.{draw.kind}") for p in params]
    local = communicator_of(mesh).each(block, *here, key=mine.get)
    return array.wrap(local, mesh, from_split_axes(rows), torch.Size(shape))


def _block(p: torch.Tensor, mesh: Any, spec: P, where: str) -> Any:
    """Each rank's block of a parameter, which may be at another place than the draw."""
    if array.is_array(p) and at_of(array.mesh_of(p)) != at_of(mesh):
        p = array.moved(p, mesh, spec, where)
    return array.bring_in(p, array.Boundary(mesh, spec), where)


def _lying(p: torch.Tensor, shape: Sequence[int], rows: Sequence[tuple[str, ...]]) -> P:
    """How a parameter lies that broadcasts to a draw of this shape, split so."""
    shift = len(shape) - p.ndim
    return from_split_axes([rows[d + shift] if size == shape[d + shift] else () for d, size in enumerate(p.shape)])


class _Laid(torch.autograd.Function):
    """`_on_mesh` under functorch transforms, which see a function of keys and parameters with a rule for batches."""

    @staticmethod
    def forward(data: torch.Tensor, draw: Draw, spec: P, mesh: Any, *params: torch.Tensor) -> torch.Tensor:
        return _on_mesh(data, draw, spec, mesh, *params)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def vmap(info: Any, in_dims: Any, data: torch.Tensor, draw: Draw, spec: P, mesh: Any, *params: Any) -> Any:
        data, params = _batched(info, in_dims[0], in_dims[4:], data, params, len(draw.shape))
        return _Laid.apply(data, draw, spec, mesh, *params), 0


def _batched(info: Any, key_dim: Any, dims: Any, key: torch.Tensor, params: Sequence[torch.Tensor], ndim: int) -> Any:
    """Key and parameters with a new dim of batches in front: a key that is not batched is every element's."""
    if key_dim is None:
        key = key.expand(info.batch_size, *key.shape)
    else:
        key = key.movedim(key_dim, 0)
    depth = key.ndim - 2 + ndim
    return key, [p if d is None else draw_op.batch_in_front(p, d, depth) for p, d in zip(params, dims, strict=True)]


def _run(
    key: torch.Tensor,
    where: torch.Tensor | None,
    params: Sequence[torch.Tensor],
    shape: Sequence[int],
    local: Sequence[int],
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    batch, n = key.shape[:-1], math.prod(local)
    keys = key.reshape(-1, 1, 2)
    out = torch.empty((len(keys), n), dtype=dtype, device=device)
    rows = [p if p.numel() == 1 else p.expand(*batch, *local).reshape(len(keys), n) for p in params]
    for here, ((k0, k1),), high, low in draw_op.blocks(keys, counters.decoded(shape, where), BLOCK, device):
        mine = [p.reshape(1, 1).expand(low.shape) if p.numel() == 1 else p[here] for p in rows]
        high = high.expand(low.shape) if isinstance(high, torch.Tensor) else high
        out[here] = rejection_draws.SAMPLERS[kind](k0, k1, high, low, mine, dtype)
    return out.view((*batch, *local))


def _run_fake(key: Any, where: Any, params: Any, shape: Any, local: Any, kind: Any, dtype: Any, device: Any) -> Any:
    return torch.empty((*key.shape[:-1], *local), dtype=dtype, device=device)


def _run_vmap(
    info: Any, in_dims: Any, key: torch.Tensor, where: Any, params: Any, shape: Any, local: Any, *rest: Any
) -> Any:
    if in_dims[1] is not None:
        raise NotImplementedError("vescale_fn::sample: the rectangle of a draw cannot differ along a vmapped dim")
    key, params = _batched(info, in_dims[0], in_dims[2], key, params, len(local))
    return torch.ops.vescale_fn.sample.default(key, where, params, shape, local, *rest), 0


_library.impl("sample", _run, "CompositeExplicitAutograd")
torch.library.register_fake("vescale_fn::sample", _run_fake, lib=_library)
torch.library.register_vmap("vescale_fn::sample", _run_vmap, lib=_library)
