"""The gamma distribution and its family: what is drawn by trial, with gradients through its parameters."""

from __future__ import annotations

from typing import Any

import torch

from .._core.base import context, dtypes
from .._core.sharding.spec import P
from .generators import float_ops
from .keys import Key, checked, shape_of
from .parameters import Shape, check_broadcast, fitting, need, not_negative, positive, shape_and_place
from .sharded import Draw, drawn
from .sharded_rejection import sampled
from .streams import pieces


def draw_gammas(
    where: str,
    key: Key,
    kind: str,
    name: str,
    a: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    spec: P | None,
    mesh: Any,
) -> torch.Tensor:
    """Gamma numbers, or their logarithms (`kind`), of concentration `a`, which messages call `name`."""
    tensor = isinstance(a, torch.Tensor)
    a = a.to(dtype) if tensor else torch.tensor(a, dtype=dtype)
    if spec is None or context.body() is None:
        check_broadcast(where, name, a, shape)
    x = sampled(where, key, Draw(kind, shape, dtype), (a,), spec, mesh)
    if not tensor:
        return x
    (a,) = fitting(where, x, **{name: a})
    return float_ops.implicit(x, a.expand(x.shape), kind == "loggamma")


def gamma(
    key: Key,
    a: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the gamma distribution of scale 1.

    Args:
        key: one key.
        a: the concentration: a number, zero or more, or a tensor that broadcasts to shape; gradients go through it.
        shape: of the whole draw; by default that of a.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, an a that is negative or does not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: Marsaglia and Tsang (2000), as in `jax.random.gamma`, with its streams. The gradient in a is the implicit
    one of Figurnov et al. (2018).

    >>> import vescale_fn as vfn
    >>> vfn.random.gamma(vfn.random.key(42), 2.5, (2,))
    tensor([4.3781, 1.5008])
    """
    where = "random.gamma"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    a = not_negative(a, where, "a")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, a=a)
    return draw_gammas(where, key, "gamma", "a", a, shape, dtype, spec, mesh)


def loggamma(
    key: Key,
    a: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw numbers whose exp has the gamma distribution of scale 1.

    For small a, where gamma numbers are too small to be told from 0, their logarithms still are numbers.

    Args:
        key: one key.
        a: the concentration: a number, zero or more, or a tensor that broadcasts to shape; gradients go through it.
        shape: of the whole draw; by default that of a.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, an a that is negative or does not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: Marsaglia and Tsang (2000), as in `jax.random.loggamma`, with its streams. The gradient in a is the implicit
    one of Figurnov et al. (2018).

    >>> import vescale_fn as vfn
    >>> vfn.random.loggamma(vfn.random.key(42), 2.5, (2,))
    tensor([1.4766, 0.4060])
    """
    where = "random.loggamma"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    a = not_negative(a, where, "a")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, a=a)
    return draw_gammas(where, key, "loggamma", "a", a, shape, dtype, spec, mesh)


def beta(
    key: Key,
    a: Any,
    b: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the beta distribution.

    Args:
        key: one key.
        a: a number, zero or more, or a tensor that broadcasts to shape; gradients go through it.
        b: the same.
        shape: of the whole draw; by default that of the parameters, broadcast.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, parameters that are not positive or do not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.beta`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.beta(vfn.random.key(42), 2.0, 3.0, (2,))
    tensor([0.4320, 0.3128])
    """
    where = "random.beta"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    a, b = not_negative(a, where, "a"), not_negative(b, where, "b")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, a=a, b=b)
    key_a, key_b = pieces(key)
    x = draw_gammas(where, key_a, "loggamma", "a", a, shape, dtype, spec, mesh)
    y = draw_gammas(where, key_b, "loggamma", "b", b, shape, dtype, spec, mesh)
    top = torch.maximum(x, y)
    x, y = float_ops.exp(x - top), float_ops.exp(y - top)
    return x / (x + y)


def _chisquares(
    where: str, key: Key, name: str, df: Any, shape: tuple[int, ...], dtype: torch.dtype, spec: P | None, mesh: Any
) -> torch.Tensor:
    return float_ops.exp(draw_gammas(where, key, "loggamma", name, df / 2, shape, dtype, spec, mesh)) * 2


def chisquare(
    key: Key,
    df: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the chi-square distribution.

    Args:
        key: one key.
        df: the degrees of freedom: a number, zero or more, or a tensor that broadcasts to shape; gradients go through it.
        shape: of the whole draw; by default that of df.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, a df that is negative or does not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.chisquare`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.chisquare(vfn.random.key(42), 3.0, (2,))
    tensor([5.8707, 1.3979])
    """
    where = "random.chisquare"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    df = not_negative(df, where, "df")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, df=df)
    return _chisquares(where, key, "df", df, shape, dtype, spec, mesh)


def t(
    key: Key,
    df: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from Student's t distribution.

    Args:
        key: one key.
        df: the degrees of freedom: a positive number, or a tensor that broadcasts to shape; gradients go through it.
        shape: of the whole draw; by default that of df.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, a df that is not positive or does not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.t`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.t(vfn.random.key(42), 5.0, (2,))
    tensor([ 0.0842, -1.1023])
    """
    where = "random.t"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    df = positive(df, where, "df")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, df=df)
    key_n, key_g = pieces(key)
    n = drawn(where, key_n, Draw("normal", shape, dtype), spec, mesh)
    g = draw_gammas(where, key_g, "gamma", "df", df / 2, shape, dtype, spec, mesh)
    (half,) = fitting(where, n, df=df / 2)
    return n * float_ops.sqrt(half / g)


def f(
    key: Key,
    dfnum: Any,
    dfden: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the F distribution.

    Args:
        key: one key.
        dfnum: the degrees of freedom of the numerator: a positive number, or a tensor that broadcasts to shape;
            gradients go through it.
        dfden: those of the denominator, the same.
        shape: of the whole draw; by default that of the parameters, broadcast.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, parameters that are not positive or do not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.f`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.f(vfn.random.key(42), 2.0, 3.0, (2,))
    tensor([0.6476, 0.1726])
    """
    where = "random.f"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    dfnum, dfden = positive(dfnum, where, "dfnum"), positive(dfden, where, "dfden")
    shape, spec, mesh = shape_and_place(where, shape, spec, mesh, dfnum=dfnum, dfden=dfden)
    key_den, key_num = pieces(key)
    over = _chisquares(where, key_num, "dfnum", dfnum, shape, dtype, spec, mesh)
    under = _chisquares(where, key_den, "dfden", dfden, shape, dtype, spec, mesh)
    dfnum, dfden = fitting(where, over, dfnum=dfnum, dfden=dfden)
    return (over / dfnum) / (under / dfden)


def draw_generalized_normals(
    where: str, key: Key, p: Any, shape: tuple[int, ...], dtype: torch.dtype, spec: P | None, mesh: Any
) -> torch.Tensor:
    """Numbers of density in proportion to exp(-|x|**p)."""
    key_g, key_r = pieces(key)
    g = draw_gammas(where, key_g, "gamma", "p", 1 / p, shape, dtype, spec, mesh)
    (exponent,) = fitting(where, g, p=1 / p)
    return drawn(where, key_r, Draw("rademacher", shape, dtype), spec, mesh) * float_ops.power(g, exponent)


def generalized_normal(
    key: Key, p: Any, shape: Shape = (), dtype: torch.dtype = torch.float32, *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Draw from the generalized normal distribution, whose density is in proportion to exp(-|x|**p).

    Args:
        key: one key.
        p: a positive number, or a tensor that broadcasts to shape; gradients go through it.
        shape: of the whole draw.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, a p that is not positive or does not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.generalized_normal`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.generalized_normal(vfn.random.key(42), 1.5, (2,))
    tensor([-0.8782, -0.2062])
    """
    where = "random.generalized_normal"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    p = positive(p, where, "p")
    shape, spec, mesh = shape_and_place(where, shape_of(shape, where), spec, mesh, p=p)
    return draw_generalized_normals(where, key, p, shape, dtype, spec, mesh)
