"""Distributions made of one or two elementwise draws: what is random is one operator, and the rest carries gradients."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from .._core.base import dtypes
from .._core.base.errors import RandomError
from .._core.base.messages import report
from .._core.sharding.spec import P
from .generators import elementwise_draws, float_ops
from .keys import Key, checked, shape_of
from .parameters import Shape, fitting, need, not_negative, one_of, positive, real, shape_and_place
from .sharded import Draw, at_place, drawn
from .streams import pieces


def _standard(
    name: str, key: Key, shape: Shape, dtype: torch.dtype, known: Collection[torch.dtype], spec: P | None, mesh: Any
) -> torch.Tensor:
    """A draw without parameters, of the kind of its name."""
    where = f"random.{name}"
    key = checked(key, where)
    need(dtype, known, where)
    return drawn(where, key, Draw(name, shape_of(shape, where), dtype), spec, mesh)


def exponential(
    key: Key, shape: Shape = (), dtype: torch.dtype = torch.float32, *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Draw from the exponential distribution of rate 1.

    Args:
        key: one key.
        shape: of the whole draw.
        dtype: a float dtype.
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.exponential`: float32, float16 and bfloat16 with its bits.

    >>> import vescale_fn as vfn
    >>> vfn.random.exponential(vfn.random.key(42), (2,))
    tensor([0.6708, 1.1388])
    """
    return _standard("exponential", key, shape, dtype, dtypes.FLOATS, spec, mesh)


def laplace(
    key: Key, shape: Shape = (), dtype: torch.dtype = torch.float32, *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Draw from the Laplace distribution of mean 0 and scale 1.

    Args:
        key: one key.
        shape: of the whole draw.
        dtype: a float dtype.
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.laplace`: float32, float16 and bfloat16 with its bits.

    >>> import vescale_fn as vfn
    >>> vfn.random.laplace(vfn.random.key(42), (2,))
    tensor([ 0.0228, -0.4457])
    """
    return _standard("laplace", key, shape, dtype, dtypes.FLOATS, spec, mesh)


def logistic(
    key: Key, shape: Shape = (), dtype: torch.dtype = torch.float32, *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Draw from the logistic distribution of mean 0 and scale 1.

    Args:
        key: one key.
        shape: of the whole draw.
        dtype: a float dtype.
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.logistic`: float32, float16 and bfloat16 with its bits.

    >>> import vescale_fn as vfn
    >>> vfn.random.logistic(vfn.random.key(42), (2,))
    tensor([-0.0452,  0.7528])
    """
    return _standard("logistic", key, shape, dtype, dtypes.FLOATS, spec, mesh)


def cauchy(
    key: Key, shape: Shape = (), dtype: torch.dtype = torch.float32, *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Draw from the Cauchy distribution of location 0 and scale 1.

    Args:
        key: one key.
        shape: of the whole draw.
        dtype: a float dtype.
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.cauchy`, to the last bit or two.

    >>> import vescale_fn as vfn
    >>> vfn.random.cauchy(vfn.random.key(42), (2,))
    tensor([-0.0355,  0.6337])
    """
    return _standard("cauchy", key, shape, dtype, dtypes.FLOATS, spec, mesh)


def gumbel(
    key: Key,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    mode: str | None = None,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the Gumbel distribution of location 0 and scale 1.

    Args:
        key: one key.
        shape: of the whole draw.
        dtype: a float dtype.
        mode: "low" (the default) makes it of one uniform number; "high" of two, with a longer tail.
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, an unknown mode.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.gumbel`: float32, float16 and bfloat16 with its bits.

    >>> import vescale_fn as vfn
    >>> vfn.random.gumbel(vfn.random.key(42), (2,))
    tensor([0.3341, 0.9520])
    """
    key = checked(key, "random.gumbel")
    need(dtype, dtypes.FLOATS, "random.gumbel")
    one_of(mode, (None, "low", "high"), "random.gumbel", "mode")
    shape = shape_of(shape, "random.gumbel")
    return gumbel_noise("random.gumbel", key, shape, dtype, mode, spec, mesh)


def gumbel_noise(
    where: str,
    key: Key,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mode: str | None,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """`gumbel` for other draws, all checked."""
    if mode != "high":
        return drawn(where, key, Draw("gumbel", shape, dtype), spec, mesh)
    pair, (spec, mesh) = Draw("uniform", (2, *shape), dtype, (0.0, 1.0)), at_place(where, spec, mesh)
    coarse, fine = drawn(where, key, pair, spec if spec is None else P(None, *spec), mesh).unbind(0)
    finer = coarse + 2.0 ** -dtypes.FLOATS[dtype][0] * fine + torch.finfo(dtype).tiny
    return -float_ops.log(-float_ops.log1p(-torch.where(coarse >= 0.5, coarse, finer)))


def rademacher(
    key: Key, shape: Shape = (), dtype: torch.dtype = torch.int32, *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Draw 1 or -1, each with probability 1/2.

    Args:
        key: one key.
        shape: of the whole draw.
        dtype: a signed integer dtype, or a float one.
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.rademacher`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.rademacher(vfn.random.key(42), (4,))
    tensor([ 1, -1, -1, -1], dtype=torch.int32)
    """
    signed = [d for d in (*dtypes.INTEGERS, *dtypes.FLOATS) if d.is_signed]
    return _standard("rademacher", key, shape, dtype, signed, spec, mesh)


def truncated_normal(
    key: Key,
    lower: Any,
    upper: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the standard normal distribution between two bounds.

    Args:
        key: one key.
        lower: a number, or a tensor that broadcasts to shape; gradients go through it.
        upper: the same.
        shape: of the whole draw; by default that of the bounds, broadcast.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, numbers that are no interval, bounds that do not
            broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.truncated_normal`: float32, float16 and bfloat16 with its bits.

    >>> import vescale_fn as vfn
    >>> vfn.random.truncated_normal(vfn.random.key(42), -1, 1, (2,))
    tensor([-0.0193,  0.3127])
    """
    where = "random.truncated_normal"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    lower, upper = real(lower, where, "lower"), real(upper, where, "upper")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, lower=lower, upper=upper)
    if not isinstance(lower, torch.Tensor) and not isinstance(upper, torch.Tensor):
        if not lower < upper:
            raise RandomError(report(where, f"lower must be below upper, but they are {lower!r} and {upper!r}"))
        return drawn(where, key, Draw("truncated_normal", shape, dtype, (lower, upper)), spec, mesh)
    unit = drawn(where, key, Draw("uniform", shape, dtype, (0.0, 1.0)), spec, mesh)
    lower, upper = fitting(where, unit, lower=lower, upper=upper)
    root = torch.tensor(math.sqrt(2), dtype=dtype, device=unit.device)
    u = elementwise_draws.between(unit, float_ops.erf(lower / root), float_ops.erf(upper / root))
    least, most = float_ops.above(lower), float_ops.below(upper)
    return torch.minimum(torch.maximum(float_ops.erfinv(u) * root, least), most)


def pareto(
    key: Key,
    b: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the Pareto distribution of scale 1 and shape b.

    Args:
        key: one key.
        b: a positive number, or a tensor that broadcasts to shape; gradients go through it.
        shape: of the whole draw; by default that of b.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, a b that is not positive or does not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.pareto`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.pareto(vfn.random.key(42), 2.0, (2,))
    tensor([1.3985, 1.7672])
    """
    where = "random.pareto"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    b = positive(b, where, "b")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, b=b)
    x = drawn(where, key, Draw("exponential", shape, dtype), spec, mesh)
    (b,) = fitting(where, x, b=b)
    return float_ops.exp(x / b)


def rayleigh(
    key: Key,
    scale: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the Rayleigh distribution.

    Args:
        key: one key.
        scale: a number, zero or more, or a tensor that broadcasts to shape; gradients go through it.
        shape: of the whole draw; by default that of scale.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, a scale that is negative or does not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.rayleigh`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.rayleigh(vfn.random.key(42), 2.0, (2,))
    tensor([2.3933, 1.7572])
    """
    where = "random.rayleigh"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    scale = not_negative(scale, where, "scale")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, scale=scale)
    x = drawn(where, key, Draw("uniform", shape, dtype, (0.0, 1.0)), spec, mesh)
    (scale,) = fitting(where, x, scale=scale)
    return float_ops.sqrt(float_ops.log(x) * -2) * scale


def lognormal(
    key: Key,
    sigma: Any = 1.0,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw numbers whose logarithms are normal, of mean 0 and standard deviation sigma.

    Args:
        key: one key.
        sigma: a number, zero or more, or a tensor that broadcasts to shape; gradients go through it.
        shape: of the whole draw; by default that of sigma.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, a sigma that is negative or does not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.lognormal`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.lognormal(vfn.random.key(42), 0.5, (2,))
    tensor([0.9859, 1.2631])
    """
    where = "random.lognormal"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    sigma = not_negative(sigma, where, "sigma")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, sigma=sigma)
    x = drawn(where, key, Draw("normal", shape, dtype), spec, mesh)
    (sigma,) = fitting(where, x, sigma=sigma)
    return float_ops.exp(x * sigma)


def weibull_min(
    key: Key,
    scale: Any,
    concentration: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the Weibull distribution of minima.

    Args:
        key: one key.
        scale: a number, zero or more, or a tensor that broadcasts to shape; gradients go through it.
        concentration: a positive number, or such a tensor.
        shape: of the whole draw; by default that of the parameters, broadcast.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, parameters that are not positive or do not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.weibull_min`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.weibull_min(vfn.random.key(42), 2.0, 1.5, (2,))
    tensor([1.5326, 2.1810])
    """
    where = "random.weibull_min"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    scale, concentration = not_negative(scale, where, "scale"), positive(concentration, where, "concentration")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, scale=scale, concentration=concentration)
    x = drawn(where, key, Draw("exponential", shape, dtype), spec, mesh)
    scale, concentration = fitting(where, x, scale=scale, concentration=concentration)
    return float_ops.power(x, 1 / concentration) * scale


def triangular(
    key: Key,
    left: Any,
    mode: Any,
    right: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the triangular distribution.

    Args:
        key: one key.
        left: where it begins: a number, or a tensor that broadcasts to shape; gradients go through it.
        mode: where it is highest, the same.
        right: where it ends, the same.
        shape: of the whole draw; by default that of the parameters, broadcast.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, parameters that are not numbers or do not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.triangular`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.triangular(vfn.random.key(42), -1.0, 0.5, 2.0, (2,))
    tensor([0.4830, 0.7996])
    """
    where = "random.triangular"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    left, mode, right = real(left, where, "left"), real(mode, where, "mode"), real(right, where, "right")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, left=left, mode=mode, right=right)
    u = drawn(where, key, Draw("uniform", shape, dtype, (0.0, 1.0)), spec, mesh)
    left, mode, right = fitting(where, u, left=left, mode=mode, right=right)
    rises = u < (mode - left) / (right - left)
    area = torch.where(rises, u * (right - left) * (mode - left), (1 - u) * (right - left) * (right - mode))
    apart = float_ops.sqrt(area)
    return torch.where(rises, left + apart, right - apart)


def _norms(where: str, key: Key, shape: tuple[int, ...], dtype: torch.dtype, spec: P | None, mesh: Any) -> torch.Tensor:
    """The lengths of vectors of three normal numbers."""
    spec, mesh = at_place(where, spec, mesh)
    rows = None if spec is None else P(*spec, *(None,) * (len(shape) - len(spec)))
    x, y, z = drawn(where, key, Draw("normal", (*shape, 3), dtype), rows, mesh).unbind(-1)
    return float_ops.sqrt(x * x + y * y + z * z)


def maxwell(
    key: Key, shape: Shape = (), dtype: torch.dtype = torch.float32, *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Draw from the Maxwell distribution of scale 1: the length of a normal vector in space.

    Args:
        key: one key.
        shape: of the whole draw.
        dtype: a float dtype.
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.maxwell`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.maxwell(vfn.random.key(42), (2,))
    tensor([0.5536, 0.2933])
    """
    key = checked(key, "random.maxwell")
    need(dtype, dtypes.FLOATS, "random.maxwell")
    return _norms("random.maxwell", key, shape_of(shape, "random.maxwell"), dtype, spec, mesh)


def double_sided_maxwell(
    key: Key,
    loc: Any,
    scale: Any,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the Maxwell distribution mirrored at zero, scaled and shifted.

    Args:
        key: one key.
        loc: a number, or a tensor; gradients go through it.
        scale: a number, zero or more, or a tensor; gradients go through it.
        shape: of the draw in front of the dims of the parameters, broadcast, which follow once more; by default those
            too.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, a negative scale, parameters that do not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.double_sided_maxwell`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.double_sided_maxwell(vfn.random.key(42), 1.0, 2.0, (2,))
    tensor([-1.7620, -0.3514])
    """
    where = "random.double_sided_maxwell"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    loc, scale = real(loc, where, "loc"), not_negative(scale, where, "scale")
    last, _, _ = shape_and_place(where, None, spec, mesh, loc=loc, scale=scale)
    full = (*(shape_of(shape, where) or last), *last)
    full, spec, mesh = shape_and_place(where, full, spec, mesh, loc=loc, scale=scale)
    lengths, signs = pieces(key)
    x = _norms(where, lengths, full, dtype, spec, mesh) * drawn(
        where, signs, Draw("rademacher", full, dtype), spec, mesh
    )
    loc, scale = fitting(where, x, loc=loc, scale=scale)
    return x * scale + loc


def wald(
    key: Key,
    mean: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the Wald (inverse Gaussian) distribution of shape parameter 1.

    Args:
        key: one key.
        mean: a positive number, or a tensor that broadcasts to shape; gradients go through it.
        shape: of the whole draw; by default that of mean.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, a mean that is not positive or does not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: Michael, Schucany and Haas (1976), as in `jax.random.wald`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.wald(vfn.random.key(42), 2.0, (2,))
    tensor([2.2266, 3.9277])
    """
    where = "random.wald"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    mean = positive(mean, where, "mean")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, mean=mean)
    normals, uniforms = pieces(key)
    x = drawn(where, normals, Draw("normal", shape, dtype), spec, mesh)
    u = drawn(where, uniforms, Draw("uniform", shape, dtype, (0.0, 1.0)), spec, mesh)
    (mean,) = fitting(where, x, mean=mean)
    y, square = x * x, mean * mean
    x = mean + square * y / 2 - mean / 2 * float_ops.sqrt(4 * mean * y + square * (y * y))
    return torch.where(u <= mean / (mean + x), x, square / x)
