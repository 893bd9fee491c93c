"""Vectors: dirichlet, ball, multivariate_normal. Each is drawn whole, then split if the spec splits its entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core.arrays import array
from .._core.base import context, dtypes
from .._core.base.errors import RandomError
from .._core.base.messages import described, report
from .._core.sharding.index_map import axes_of
from .._core.sharding.spec import P, split_axes
from ..ops.positions import axis_index
from .gammas import draw_gammas, draw_generalized_normals
from .generators import float_ops
from .keys import Key, checked, shape_of
from .parameters import Shape, fitting, integer, need, one_of, positive, shape_and_place
from .sharded import Draw, at_place, drawn
from .streams import pieces


def _with_rows_whole(
    where: str, shape: tuple[int, ...], spec: P | None, mesh: Any, make: Callable[[P | None], torch.Tensor]
) -> torch.Tensor:
    """``make(spec)`` with the last dim, of the vectors' entries, whole on every rank, and split afterwards."""
    if spec is None or len(spec) < len(shape) or not split_axes(spec, len(shape))[-1]:
        return make(spec)
    names, rows = split_axes(spec, len(shape))[-1], P(*spec[:-1])
    vectors = make(rows)
    body = context.body()
    if body is None:
        return array.moved(vectors, array.mesh_of(vectors), spec, where) if array.is_array(vectors) else vectors
    n = 1
    for name in names:
        n *= axes_of(body.mesh)[name]
    if shape[-1] % n:
        raise RandomError(
            report(
                where,
                f"the entries of a vector are split {n} times by {names}, and {shape[-1]} % {n} = {shape[-1] % n}",
            )
        )
    size = shape[-1] // n
    first = 0
    for name in names:
        first = first * axes_of(body.mesh)[name] + axis_index(name)
    return vectors.index_select(-1, first * size + torch.arange(size, device=vectors.device))


def dirichlet(
    key: Key,
    alpha: Any,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the Dirichlet distribution: vectors of positive numbers that add up to one.

    Args:
        key: one key.
        alpha: [..., n], the concentrations, positive; gradients go through it.
        shape: of the draw without its last dim, which is alpha's; by default that of alpha without it.
        dtype: a float dtype.
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, an alpha without dims or that does not broadcast.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.dirichlet`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.dirichlet(vfn.random.key(42), torch.tensor([0.5, 1.0, 3.0]))
    tensor([0.1613, 0.0535, 0.7852])
    """
    where = "random.dirichlet"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    alpha = alpha if isinstance(alpha, torch.Tensor) else torch.tensor(alpha, dtype=dtype)
    if not alpha.ndim:
        raise RandomError(report(where, f"alpha must be [..., n], but it is {described(alpha)}"))
    full = None if shape is None else (*shape_of(shape, where), alpha.shape[-1])
    full, spec, mesh = shape_and_place(where, full, spec, mesh, alpha=alpha)

    def vectors(spec: P | None) -> torch.Tensor:
        x = draw_gammas(where, key, "loggamma", "alpha", alpha, full, dtype, spec, mesh)
        x = float_ops.exp(x - x.detach().amax(-1, keepdim=True))
        return x / float_ops.tree_sum(x)[..., None]

    return _with_rows_whole(where, full, spec, mesh, vectors)


def ball(
    key: Key,
    d: int,
    p: Any = 2,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw uniformly from the unit ball of the p-norm in d dimensions.

    Args:
        key: one key.
        d: the size of a vector.
        p: a positive number, or a 0-d tensor; gradients go through it.
        shape: of the draw without its last dim, of size d.
        dtype: a float dtype.
        spec: how the draw lies on the mesh; each rank draws its own block alone. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, a d or p that is not positive.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: Barthe, Guedon, Mendelson and Naor (2005), as in `jax.random.ball`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.ball(vfn.random.key(42), 3)
    tensor([0.3234, 0.0613, 0.0182])
    """
    where = "random.ball"
    key = checked(key, where)
    need(dtype, dtypes.FLOATS, where)
    d, p = integer(d, where, "d"), positive(p, where, "p")
    if d < 1:
        raise RandomError(report(where, f"d must be positive, but it is {d}"))
    if isinstance(p, torch.Tensor) and p.ndim:
        raise RandomError(report(where, f"p must be one number, but it is {described(p)}"))
    shape, (spec, mesh) = shape_of(shape, where), at_place(where, spec, mesh)
    key_g, key_e = pieces(key)

    def vectors(spec: P | None) -> torch.Tensor:
        g = draw_generalized_normals(where, key_g, p, (*shape, d), dtype, spec, mesh)
        e = drawn(
            where, key_e, Draw("exponential", shape, dtype), spec if spec is None else P(*spec[: len(shape)]), mesh
        )
        power, root = fitting(where, e, p=p, root=1 / p)
        size = float_ops.power(float_ops.tree_sum(float_ops.power(g.abs(), power)) + e, root)
        return g / size[..., None]

    return _with_rows_whole(where, (*shape, d), spec, mesh, vectors)


def multivariate_normal(
    key: Key,
    mean: Any,
    cov: Any,
    shape: Shape | None = None,
    dtype: torch.dtype | None = None,
    method: str = "cholesky",
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw normal vectors of a given mean and covariance.

    Args:
        key: one key.
        mean: [..., n], a tensor; gradients go through it.
        cov: [..., n, n], the same; positive definite.
        shape: of the draw without its last dim; by default those of the parameters, broadcast.
        dtype: a float dtype; by default the mean's.
        method: how the covariance is factored: "cholesky", "eigh" or "svd".
        spec: how the draw lies on the mesh. None: as its parameters do; whole, on every rank, where those are plain.
        mesh: by default that of the parameters, or the current mesh; without one the draw is whole.

    Returns:
        A tensor; with a spec and a mesh, an array. Inside a `shard_map` body with a spec, this rank's block.

    Raises:
        RandomError: not one key, not a shape, another dtype, an unknown method, parameters of other shapes.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.multivariate_normal`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.multivariate_normal(vfn.random.key(42), torch.zeros(2), torch.eye(2))
    tensor([-0.0283,  0.4671])
    """
    where = "random.multivariate_normal"
    key = checked(key, where)
    mean, cov = (x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float32) for x in (mean, cov))
    wanted: torch.dtype = mean.dtype if dtype is None else dtype
    need(wanted, dtypes.FLOATS, where)
    one_of(method, ("cholesky", "eigh", "svd"), where, "method")
    n = mean.shape[-1] if mean.ndim else 0
    if not mean.ndim or cov.ndim < 2 or tuple(cov.shape[-2:]) != (n, n):
        raise RandomError(
            report(
                where, f"mean must be [..., n] and cov [..., n, n], but they are {described(mean)} and {described(cov)}"
            )
        )
    full = None if shape is None else (*shape_of(shape, where), n)
    full, spec, mesh = shape_and_place(where, full, spec, mesh, mean=mean, cov=cov.detach()[..., 0])
    factor = _factor(cov, method).to(wanted)

    def vectors(spec: P | None) -> torch.Tensor:
        z = drawn(where, key, Draw("normal", full, wanted), spec, mesh)
        (at,) = fitting(where, z, mean=mean)
        columns = [fitting(where, z, cov=column)[0] for column in factor.unbind(-1)]
        total = columns[0] * z[..., 0:1]
        for j in range(1, n):  # in this order everywhere: a product of matrices adds up in an order of its own
            total = total + columns[j] * z[..., j : j + 1]
        return at + total

    return _with_rows_whole(where, full, spec, mesh, vectors)


def _factor(cov: torch.Tensor, method: str) -> torch.Tensor:
    """A matrix that times its transpose is the covariance."""
    wide = cov.to(dtypes.wide(cov.dtype))
    if method == "cholesky":
        return torch.linalg.cholesky(wide)
    if method == "eigh":
        values, vectors = torch.linalg.eigh(wide)
    else:
        vectors, values, _ = torch.linalg.svd(wide)
    return vectors * float_ops.sqrt(values)[..., None, :]
