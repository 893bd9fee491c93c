"""Draws: JAX's distributions, its argument names, its numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._core.base import dtypes
from .._core.base.errors import RandomError
from .._core.base.front_door import public
from .._core.base.messages import report
from .._core.sharding.spec import P
from . import shared_keys
from .generators import elementwise_draws
from .keys import Key, checked, shape_of
from .parameters import Shape, fitting, integer, need, number, probability
from .sharded import Draw, at_place, drawn
from .streams import pieces


def bits(
    key: Key, shape: Shape = (), dtype: torch.dtype = torch.uint32, *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Draw random bits.

    Args:
        key: one key.
        shape: of the whole draw.
        dtype: uint8, uint16, uint32 or uint64.
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.bits`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.bits(vfn.random.key(42), (2,)).tolist()
    [2098992034, 2919706841]
    """
    key = checked(key, "random.bits")
    need(dtype, dtypes.UNSIGNED, "random.bits")
    return drawn("random.bits", key, Draw("bits", shape_of(shape, "random.bits"), dtype), spec, mesh)


@public("random.uniform")
def uniform(
    key: Key,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    minval: Any = 0.0,
    maxval: Any = 1.0,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw uniform numbers in [minval, maxval).

    In bfloat16 there are only 128 different ones on [0, 1), in float16 1024: for initial weights draw float32 and cast.

    Args:
        key: one key.
        shape: of the whole draw.
        dtype: a float dtype.
        minval: a number, or a tensor that broadcasts to shape; gradients go through it.
        maxval: the same; never reached but by rounding.
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, bounds that do not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.uniform`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.uniform(vfn.random.key(42), (2,))
    tensor([0.4887, 0.6798])
    """
    key = checked(key, "random.uniform")
    need(dtype, dtypes.FLOATS, "random.uniform")
    shape = shape_of(shape, "random.uniform")
    if not isinstance(minval, torch.Tensor) and not isinstance(maxval, torch.Tensor):
        bounds = number(minval, "random.uniform", "minval"), number(maxval, "random.uniform", "maxval")
        return drawn("random.uniform", key, Draw("uniform", shape, dtype, bounds), spec, mesh)
    unit = drawn("random.uniform", key, Draw("uniform", shape, dtype, (0.0, 1.0)), spec, mesh)
    low, high = fitting("random.uniform", unit, minval=minval, maxval=maxval)
    return elementwise_draws.between(unit, low, high)


@public("random.normal")
def normal(
    key: Key, shape: Shape = (), dtype: torch.dtype = torch.float32, *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Draw from the standard normal distribution.

    A draw in bfloat16 has only 128 different values: for initial weights draw float32 and cast.

    Args:
        key: one key.
        shape: of the whole draw.
        dtype: a float dtype, or complex64 or complex128 (real and imaginary part of variance 1/2 each).
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.normal`: float32, float16 and bfloat16 with its bits, float64 to about 1e-15.

    >>> import vescale_fn as vfn
    >>> vfn.random.normal(vfn.random.key(0), (2,))
    tensor([1.6226, 2.0253])
    """
    key = checked(key, "random.normal")
    need(dtype, (*dtypes.FLOATS, *dtypes.PARTS), "random.normal")
    draw = Draw("normal", shape_of(shape, "random.normal"), dtypes.PARTS.get(dtype, dtype))
    if dtype not in dtypes.PARTS:
        return drawn("random.normal", key, draw, spec, mesh)
    real, imaginary = (drawn("random.normal", part, draw, spec, mesh) for part in pieces(key))
    return torch.complex(real, imaginary) / math.sqrt(2)


@public("random.bernoulli")
def bernoulli(
    key: Key, p: Any = 0.5, shape: Shape | None = None, mode: str = "low", *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Draw booleans that are true with probability p.

    Args:
        key: one key.
        p: a number in [0, 1], or a float tensor that broadcasts to shape.
        shape: of the whole draw; by default that of p.
        mode: "low" compares one uniform number with p, "high" two, for p below 1e-6.
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A bool tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, p outside [0, 1] or not floating point, an unknown mode.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.bernoulli`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.bernoulli(vfn.random.key(42), 0.5, (3,))
    tensor([ True, False, False])
    """
    key = checked(key, "random.bernoulli")
    if mode not in ("low", "high"):
        raise RandomError(report("random.bernoulli", f"mode must be 'low' or 'high', but it is {mode!r}"))
    tensor = isinstance(p, torch.Tensor)
    p = p if tensor else probability(p, "random.bernoulli", "p")
    dtype = p.dtype if tensor else torch.float32
    need(dtype, dtypes.FLOATS, "random.bernoulli", "p")
    shape = (tuple(p.shape) if tensor else ()) if shape is None else shape_of(shape, "random.bernoulli")
    shared_keys.warn("random.bernoulli", key, {"p": p}, spec)
    if not tensor and mode == "low":
        return drawn("random.bernoulli", key, Draw("bernoulli", shape, dtype, (p,)), spec, mesh)
    if mode == "low":
        unit = drawn("random.bernoulli", key, Draw("uniform", shape, dtype, (0.0, 1.0)), spec, mesh)
        (p,) = fitting("random.bernoulli", unit, p=p)
        return unit < p
    pair, (spec, mesh) = Draw("uniform", (2, *shape), dtype, (0.0, 1.0)), at_place("random.bernoulli", spec, mesh)
    coarse, fine = drawn("random.bernoulli", key, pair, spec if spec is None else P(None, *spec), mesh).unbind(0)
    (p,) = fitting("random.bernoulli", coarse, p=p)
    return fine * 2.0 ** -dtypes.FLOATS[dtype][0] < p - coarse


@public("random.randint")
def randint(
    key: Key,
    shape: Shape,
    minval: Any,
    maxval: Any,
    dtype: torch.dtype = torch.int32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw integers in [minval, maxval); minval alone where that is empty.

    Args:
        key: one key.
        shape: of the whole draw.
        minval: an integer, or an integer tensor that broadcasts to shape; beyond the dtype's range it is that range's
            end.
        maxval: the same, one more than the largest that is drawn.
        dtype: an integer dtype of any width; int64 and int32 draws are different numbers.
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, bounds that are not integers or do not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.randint`, with its streams (and its small bias where the span is no power of two).

    >>> import vescale_fn as vfn
    >>> vfn.random.randint(vfn.random.key(42), (3,), 0, 1000)
    tensor([644, 914,  71], dtype=torch.int32)
    """
    where = "random.randint"
    key = checked(key, where)
    need(dtype, dtypes.INTEGERS, where)
    shape = shape_of(shape, where)
    if not isinstance(minval, torch.Tensor) and not isinstance(maxval, torch.Tensor):
        bounds = integer(minval, where, "minval"), integer(maxval, where, "maxval")
        return drawn(
            where, key, Draw("randint", shape, dtype, elementwise_draws.integer_range(*bounds, dtype)), spec, mesh
        )
    width = max(32, dtypes.INTEGERS[dtype])
    words = Draw("bits", shape, torch.int64 if width == 64 else torch.int32)
    higher, lower = (drawn(where, part, words, spec, mesh) for part in pieces(key))
    low, high = fitting(where, lower, minval=minval, maxval=maxval)
    low, span, factor = elementwise_draws.integer_ranges(low, high, dtype)
    return elementwise_draws.modulo_offset(higher, lower, low, span, factor, width).to(dtype)
