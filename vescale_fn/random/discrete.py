"""Counts: geometric, poisson, binomial, multinomial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .._core.base import context, dtypes
from .._core.base.errors import RandomError
from .._core.base.messages import report
from .._core.sharding.spec import P, split_axes
from ..ops.reductions import pmax
from .generators import elementwise_draws, float_ops
from .keys import Key, checked
from .parameters import Shape, check_broadcast, fitting, need, not_negative, probability, real, shape_and_place
from .sharded import Draw, drawn
from .sharded_rejection import sampled
from .streams import pieces


def _rounds(
    where: str, key: Key, kind: str, shape: tuple[int, ...], params: Sequence[torch.Tensor], spec: P | None, mesh: Any
) -> torch.Tensor:
    """How many rounds of trials a whole draw takes: one number, for which the ranks take one maximum."""
    if not math.prod(shape):
        return torch.zeros((), dtype=torch.int32)
    rounds = sampled(where, key, Draw(kind, shape, torch.int32), params, spec, mesh).amax()
    axes = tuple(axis for row in split_axes(spec, len(shape)) for axis in row) if spec is not None else ()
    return pmax(rounds, axes) if axes and context.body() is not None else rounds


def _as_tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)


def geometric(
    key: Key,
    p: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.int32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw how many trials, each a success with probability p, it takes up to the first success.

    Args:
        key: one key.
        p: a number in [0, 1], or a float tensor that broadcasts to shape.
        shape: of the whole draw; by default that of p.
        dtype: an integer dtype. A count that it cannot hold is its largest number.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, a p that is not in [0, 1], not floating point or does not
            broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.geometric`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.geometric(vfn.random.key(42), 0.3, (4,))
    tensor([3, 2, 2, 2], dtype=torch.int32)
    """
    where = "random.geometric"
    key = checked(key, where)
    need(dtype, dtypes.INTEGERS, where)
    p = p if isinstance(p, torch.Tensor) else probability(p, where, "p")
    wide = p.dtype if isinstance(p, torch.Tensor) else torch.float32
    need(wide, dtypes.FLOATS, where, "p")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, p=p)
    u = drawn(where, key, Draw("uniform", shape, wide, (0.0, 1.0)), spec, mesh)
    (p,) = fitting(where, u, p=p)
    u = torch.where(u == 0, 1, u)
    return elementwise_draws.as_integers(((float_ops.log(u) / float_ops.log1p(-p)).floor() + 1).detach(), dtype)


def poisson(
    key: Key,
    lam: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.int32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the Poisson distribution.

    From a rate of 10 on, a number depends, as JAX's does, on how many rounds of trials the whole draw takes: on a mesh
    the ranks take the maximum of theirs, the only communication.

    Args:
        key: one key.
        lam: the rate: a number, zero or more, or a tensor that broadcasts to shape; it is made float32.
        shape: of the whole draw; by default that of lam.
        dtype: an integer dtype. A count that it cannot hold is its largest number.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, a lam that is negative or does not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.poisson`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.poisson(vfn.random.key(42), 3.0, (4,))
    tensor([6, 2, 2, 1], dtype=torch.int32)
    """
    where = "random.poisson"
    key = checked(key, where)
    need(dtype, dtypes.INTEGERS, where)
    lam = not_negative(lam, where, "lam")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, lam=lam)
    rate = _as_tensor(lam, torch.float32)
    if spec is None or context.body() is None:
        check_broadcast(where, "lam", rate, shape)
    if isinstance(lam, torch.Tensor) or lam >= 10:
        rounds = _rounds(where, key, "poisson_rounds", shape, (rate,), spec, mesh)
    else:
        rounds = torch.zeros((), dtype=torch.int32)
    return sampled(where, key, Draw("poisson", shape, dtype), (rate, rounds), spec, mesh)


def _binomials(
    where: str,
    key: Key,
    n: torch.Tensor,
    p: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    spec: P | None,
    mesh: Any,
) -> torch.Tensor:
    rounds = _rounds(where, key, "binomial_rounds", shape, (n, p), spec, mesh)
    return sampled(where, key, Draw("binomial", shape, dtype), (n, p, rounds), spec, mesh)


def binomial(
    key: Key,
    n: Any,
    p: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw how many of n trials, each a success with probability p, are successes.

    Where n * p (or n * (1 - p)) is above 10, a number depends, as JAX's does, on how many rounds of trials the whole
    draw takes: on a mesh the ranks take the maximum of theirs, the only communication.

    Args:
        key: one key.
        n: a number, or a tensor that broadcasts to shape.
        p: a number in [0, 1], or a float tensor that broadcasts to shape, in whose dtype the trials are made.
        shape: of the whole draw; by default that of the parameters, broadcast.
        dtype: a float dtype; NaN stands for a negative n, or for a p in a tensor that is no probability.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, an n that is NaN, a p that is not in [0, 1] or not
            floating point, parameters that do not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.binomial`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.binomial(vfn.random.key(42), 20, 0.3, (4,))
    tensor([5., 7., 4., 5.])
    """
    where = "random.binomial"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    n = real(n, where, "n")
    p = p if isinstance(p, torch.Tensor) else probability(p, where, "p")
    wide = p.dtype if isinstance(p, torch.Tensor) else torch.float32
    need(wide, dtypes.FLOATS, where, "p")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, n=n, p=p)
    n, p = _as_tensor(n, wide), _as_tensor(p, wide)
    if spec is None or context.body() is None:
        check_broadcast(where, "n", n, shape)
        check_broadcast(where, "p", p, shape)
    return _binomials(where, key, n, p, shape, dtype, spec, mesh)


def multinomial(
    key: Key,
    n: Any,
    p: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw how n trials, each with one outcome out of several, fall.

    Args:
        key: one key.
        n: a number, or a tensor that broadcasts to shape without its last dim; NaN stands for what comes of a negative one.
        p: float [..., outcomes], the probabilities of the outcomes, that broadcasts to shape.
        shape: of the whole draw, the outcomes last; by default that of p.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, an n that is NaN, a p that is not floating point, parameters
            that do not broadcast, split outcomes.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.multinomial`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.multinomial(vfn.random.key(42), 20, torch.tensor([0.2, 0.3, 0.5]))
    tensor([ 4.,  4., 12.])
    """
    where = "random.multinomial"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    n = real(n, where, "n")
    p = p if isinstance(p, torch.Tensor) else torch.tensor(p, dtype=torch.float32)
    need(p.dtype, dtypes.FLOATS, where, "p")
    if not p.ndim:
        raise RandomError(report(where, "p must have a dim of outcomes, but its shape is ()"))
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, p=p)
    check_broadcast(where, "p", p, shape)
    left = _as_tensor(n, p.dtype)
    check_broadcast(where, "n", left, shape[:-1])
    if spec is not None and len(spec) == len(shape) and spec[-1] is not None:
        raise RandomError(
            report(where, f"the outcomes cannot be split, but the spec is {spec!r}", fix=f"spec={P(*spec[:-1])!r}")
        )
    rest = None if spec is None else P(*spec[: len(shape) - 1])
    columns = p.unbind(-1)
    above = [columns[-1]]
    for column in columns[-2::-1]:
        above.insert(0, above[0] + column)  # what is left for an outcome and those after it
    counts = []
    for part, column, total in zip(pieces(key, shape[-1]), columns, above, strict=True):
        ratio = (column / torch.where(total == 0, 1, total)).clamp(0, 1)
        counts.append(_binomials(where, part, left, ratio, shape[:-1], p.dtype, rest, mesh))
        left = left - counts[-1]
    return torch.stack(counts, dim=-1).to(dtype)
