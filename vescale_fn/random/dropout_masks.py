"""Dropout: a mask from a key, in its operand's layout, made in the pass that uses it and never kept.

The mask is known from the key, so the backward pass keeps the key alone. Dropout with a key is a linear map that is its
own transpose; all its derivatives are itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .._core import torch_internals
from .._core.arrays import array
from .._core.base import context, traced_steps
from .._core.base.errors import RandomError
from .._core.base.front_door import public
from .._core.base.messages import described, report
from .._core.distributed.mesh import communicator_of
from .._core.local_types import replica_check
from .._core.sharding.index_map import axes_of
from .._core.sharding.spec import P, split_axes
from . import sharded, shared_keys
from .backends import c_library, choice, draw_op, triton_launch
from .generators import counters, elementwise_draws
from .generators.threefry import hash_words
from .keys import Key, checked
from .parameters import probability
from .sharded import Draw, drawn

# Not `dropout`: in a body that is the name of a draw from a rank's own generator.
_library = torch.library.Library("vescale_fn", "FRAGMENT")
_library.define(
    "keyed_dropout(Tensor key, Tensor? where, Tensor x, SymInt[] shape, float keep) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@public("random.dropout")
def dropout(key: Key, x: torch.Tensor, rate: float, *, spec: P | None = None) -> torch.Tensor:
    """Set each element of x to zero with probability `rate`, and multiply the others by ``1 / (1 - rate)``.

    The mask is ``bernoulli(key, 1 - rate, x.shape)``, drawn in float32 whatever x is: element i of it depends on the
    key and on i alone. On an array each rank draws its own block of the mask, so the result is the same on every mesh.
    Inside a `shard_map` body, x is one rank's block: with the same key on all ranks, all their blocks have the same
    mask; with `spec`, or with ``fold_in(key, axis_index(axis))``, they differ.

    Args:
        key: one key.
        x: a float tensor or array.
        rate: a number in [0, 1]; 0 gives x back, 1 gives zeros.
        spec: inside a `shard_map` body alone: how the global value lies whose block x is. The mask is then this rank's
            block of the global mask, the same numbers as of a dropout outside.

    Returns:
        As x: shape, dtype, placement. Differentiable in x; for that the key is kept, and neither the mask nor x.

    Raises:
        RandomError: not one key, x not floating point, rate outside [0, 1], a spec outside of a `shard_map` body.
        SpecError: a spec that does not fit x or the body's mesh.

    Source: Srivastava et al., "Dropout" (JMLR 2014), scaled as is usual since.

    >>> import torch, vescale_fn as vfn
    >>> vfn.random.dropout(vfn.random.key(42), torch.ones(4), 0.5)
    tensor([2., 0., 0., 0.])
    """
    key = checked(key, "random.dropout")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise RandomError(report("random.dropout", f"rate must be a number, but it is {described(rate)}"))
    keep = 1 - probability(rate, "random.dropout", "rate")
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        raise RandomError(report("random.dropout", f"x must be a float tensor, but it is {described(x)}"))
    where, shape = (None, x.shape) if spec is None else _place_in_body(x, spec)
    if keep == 1:
        return x
    shared_keys.warn("random.dropout", key, {"x": x}, spec)
    if not torch.compiler.is_compiling() and context.body() is None and array.is_array(x):
        return _of_array(key, x, keep)
    transformed = torch_internals.transforming() or (
        not torch.compiler.is_compiling() and torch_internals.forward_ad_active()
    )
    # a compiler takes no Function with rules for transforms, and of one in a body nobody knows along which axes it varies
    if x.is_complex() or (transformed and (torch.compiler.is_compiling() or context.body() is not None)):
        draw = Draw("bernoulli", tuple(shape), torch.float32, (keep,))
        mask = draw_op.draw_encoded(key.data, draw, where, x.shape, x.device)
        return _by_mask(mask, x, keep)
    if transformed:
        return torch_internals.apply(_Dropout, key.data, where, x, tuple(shape), keep)
    return torch.ops.vescale_fn.keyed_dropout.default(key.data, where, x, shape, keep)


def _of_array(key: Key, x: Any, keep: float) -> torch.Tensor:
    lying, mesh = array.spec_of(x), array.mesh_of(x)
    if replica_check.looked_for():
        replica_check.key_alike("random.dropout", key.data, mesh)
    if lying.unreduced and not x.is_complex():
        x, lying = array.moved(x, mesh, P(*lying, reduced=lying.reduced), "random.dropout"), P(*lying)
    if x.is_complex() or lying.reduced:  # no rule of ours: by ops that have theirs
        draw = Draw("bernoulli", tuple(x.shape), torch.float32, (keep,))
        return _by_mask(drawn("random.dropout", key, draw, P(*lying), mesh), x, keep)
    return torch_internals.apply(_Dropout, key.data, None, x, tuple(x.shape), keep)


def _by_mask(mask: torch.Tensor, x: torch.Tensor, keep: float) -> torch.Tensor:
    return torch.where(mask, x * scale(keep), 0.0)


def scale(keep: float) -> float:
    """What kept elements are multiplied by: a product is rounded alike everywhere, a quotient by a number is not."""
    return 1 / keep if keep else 0.0


def _place_in_body(x: torch.Tensor, spec: Any) -> tuple[Any, tuple[int, ...]]:
    """This rank's rectangle of the global mask, and the global shape."""
    body = context.body()
    if body is None:
        raise RandomError(
            report(
                "random.dropout", f"spec={spec!r} outside of a shard_map body", fix="no spec: the mask lies as x does"
            )
        )
    rows = split_axes(spec, x.ndim) if isinstance(spec, P) and len(spec) <= x.ndim else ((),) * x.ndim
    axes = axes_of(body.mesh)
    sizes = [math.prod(axes.get(name, 1) for name in row) for row in rows]
    draw = Draw("bernoulli", tuple(n * size for n, size in zip(x.shape, sizes, strict=True)), torch.float32)
    layout = sharded.laid_out("random.dropout", Key(torch.zeros(2, dtype=torch.int32)), draw, spec, body.mesh)
    assert layout is not None
    return sharded.encoded_in_body(draw, spec, body.mesh)[0], draw.shape


class _Dropout(torch.autograd.Function):
    """Dropout as transforms and arrays see it: linear in x, its own transpose."""

    @staticmethod
    def forward(key: Any, where: Any, x: Any, shape: tuple[int, ...], keep: float) -> Any:
        if array.is_array(x):
            run = lambda: _on_mesh(key, x, shape, keep)
            if not torch_internals.is_traced():
                return run()
            return traced_steps.as_one_step(lambda x: _Dropout.apply(key, where, x, shape, keep), (x,), {}, run)
        return torch.ops.vescale_fn.keyed_dropout.default(key, where, x, shape, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        key, where, _, ctx.shape, ctx.keep = inputs
        ctx.save_for_backward(key, where)
        ctx.save_for_forward(key, where)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        return None, None, _again(ctx, cotangent), None, None

    @staticmethod
    def jvp(ctx: Any, _key: Any, _where: Any, tangent: Any, *_: Any) -> Any:
        return _again(ctx, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, key: Any, where: Any, x: Any, shape: tuple[int, ...], keep: float) -> Any:
        return _Dropout.apply(*_batched(info, in_dims, key, where, x), shape, keep), 0


def _again(ctx: Any, x: Any) -> Any:
    key, where = ctx.saved_tensors
    if array.is_array(x) and array.spec_of(x).unreduced:
        x = array.moved(x, array.mesh_of(x), P(*array.spec_of(x)), "random.dropout")
    return _Dropout.apply(key, where, x, ctx.shape, ctx.keep)


def _batched(info: Any, in_dims: Any, key: torch.Tensor, where: Any, x: torch.Tensor) -> tuple[Any, Any, Any]:
    """Key and x with the dim of batches in front of both."""
    if in_dims[1] is not None:
        raise NotImplementedError(
            "vescale_fn::keyed_dropout: the rectangle of a mask cannot differ along a vmapped dim"
        )
    front = lambda t, dim: t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
    return front(key, in_dims[0]), where, front(x, in_dims[2])


def _on_mesh(key: torch.Tensor, x: Any, shape: Sequence[int], keep: float) -> Any:
    """Each rank's block, with the mask of its own counters; dims of x before those of `shape` are of batches."""
    mesh, spec = array.mesh_of(x), array.spec_of(x)
    key, depth = array.whole(key) if array.is_array(key) else key, x.ndim - len(shape)
    rectangles = sharded.rectangles(tuple(x.shape), spec, mesh)

    def block(rank: int, mine: torch.Tensor) -> torch.Tensor:
        keys, rectangle = key, rectangles[rank]
        if depth:
            for dim, index in enumerate(rectangle.indices[:depth]):
                keys = keys.index_select(dim, torch.tensor(list(index), dtype=torch.int64, device=keys.device))
            rectangle = counters.Rectangle(tuple(shape), rectangle.indices[depth:])
        if torch_internals.tracing():
            return torch.ops.vescale_fn.keyed_dropout.default(keys, rectangle.where(), mine, shape, keep)
        return _run(keys, rectangle, mine, keep)

    out = communicator_of(mesh).each(block, torch_internals.local(x), key=rectangles.get)
    return array.wrap(out, mesh, P(*spec), x.shape)


def _run_encoded(
    key: torch.Tensor, where: torch.Tensor | None, x: torch.Tensor, shape: Sequence[int], keep: float
) -> torch.Tensor:
    return _run(key, counters.decoded(shape, where), x, keep)


def _run(key: torch.Tensor, rectangle: counters.Rectangle, x: torch.Tensor, keep: float) -> torch.Tensor:
    batch = key.shape[:-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    source = x if x.is_contiguous() else out.copy_(x)  # then it works in place
    n = math.prod(x.shape[len(batch) :])
    keys = key.reshape(-1, 1, 2)
    source, flat = source.view(len(keys), n), out.view(len(keys), n)
    if not out.numel():
        return out
    code, variant = c_library.DROPOUTS.get(x.dtype), choice.chosen().variant
    if variant is not None and code is not None and x.device.type == "cpu":
        c_library.draw(variant, code, keys.cpu(), rectangle, (keep, scale(keep)), flat, source)
        return out
    if x.device.type == "cuda" and choice.chosen().on_cuda:
        draw = Draw("dropout", rectangle.shape, x.dtype, (keep, scale(keep)))
        if triton_launch.draw(draw, keys, rectangle, flat, source):
            return out
    size = draw_op.BLOCK.get(x.device.type, draw_op.BLOCK_ELSEWHERE)
    factor = torch.tensor(
        scale(keep), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device
    )
    for here, ((k0, k1),), high, low in draw_op.blocks(keys, rectangle, size, x.device):
        mask = elementwise_draws.bernoulli(hash_words(k0, k1, high, low), torch.float32, (keep,))
        flat[here] = torch.where(mask, source[here].to(factor.dtype) * factor, 0.0)
    return out


def _run_fake(key: Any, where: Any, x: Any, shape: Any, keep: Any) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _run_vmap(info: Any, in_dims: Any, key: Any, where: Any, x: Any, shape: Any, keep: Any) -> Any:
    return torch.ops.vescale_fn.keyed_dropout.default(*_batched(info, in_dims, key, where, x), shape, keep), 0


def _keep_key(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    key, where, _, ctx.shape, ctx.keep = inputs
    ctx.save_for_backward(key, where)


def _run_backward(ctx: Any, cotangent: Any) -> Any:
    key, where = ctx.saved_tensors
    return (
        None,
        None,
        torch.ops.vescale_fn.keyed_dropout.default(key, where, cotangent, ctx.shape, ctx.keep),
        None,
        None,
    )


_library.impl("keyed_dropout", _run_encoded, "CompositeExplicitAutograd")
torch.library.register_fake("vescale_fn::keyed_dropout", _run_fake, lib=_library)
torch.library.register_vmap("vescale_fn::keyed_dropout", _run_vmap, lib=_library)
torch.library.register_autograd("vescale_fn::keyed_dropout", _run_backward, setup_context=_keep_key, lib=_library)
