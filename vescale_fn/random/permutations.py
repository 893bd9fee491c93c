"""Draws that look along a whole axis of a tensor: permutation, choice, categorical, orthogonal.

What can be computed from the key alone is computed by every rank, and each keeps its part: nothing moves. Where data
is drawn from, as little of it moves as is needed, and `comm_log` shows it.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import numpy as np
import torch

from .._core.arrays import array
from .._core.arrays.placement import with_sharding
from .._core.base import context, dtypes
from .._core.base.errors import RandomError
from .._core.base.messages import described, report
from .._core.distributed.communicator import coordinates
from .._core.distributed.mesh import communicator_of
from .._core.local_types import tensor_types, types
from .._core.sharding.index_map import axes_of, dim_indices
from .._core.sharding.spec import P, from_split_axes, split_axes
from . import shared_keys
from .continuous import gumbel_noise
from .generators import elementwise_draws, float_ops
from .keys import Key, checked, shape_of
from .parameters import Shape, need, one_of
from .sharded import Draw, at_place, drawn, laid_out
from .streams import pieces


def permutation(
    key: Key, x: Any, axis: int = 0, independent: bool = False, *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Shuffle the numbers below n, or the slices of a tensor.

    Args:
        key: one key.
        x: an integer n, or a tensor or array of one dim or more.
        axis: the dim along which x is shuffled.
        independent: shuffle every row along that dim for itself, instead of whole slices alike.
        spec: how the result lies on the mesh; by default as x, and whole for an integer.
        mesh: by default that of x, else the current mesh; without one the result is whole.

    Returns:
        As x; int32 [n] for an integer n. Every rank makes the permutation itself; only slices of an x that is split
        along `axis` move. An array with another dim to split is turned over to that one and back, another is gathered.

    Raises:
        RandomError: not one key, x neither an integer nor a tensor with dims, no such dim.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.permutation`, with its streams.

    >>> import vescale_fn as vfn
    >>> vfn.random.permutation(vfn.random.key(42), 8).tolist()
    [7, 4, 2, 5, 3, 6, 0, 1]
    """
    where = "random.permutation"
    key = checked(key, where)
    if not isinstance(x, torch.Tensor) or not x.ndim:
        axis = _dim(axis, 1, where)
        return spread(where, key, _shuffled(key, _size(x, where, "x")).to(torch.int32), spec, mesh)
    axis = _dim(axis, x.ndim, where)
    if independent and x.ndim > 1:
        return spread(where, key, _shuffled_rows(where, key, x, axis), spec, mesh)
    return spread(where, key, _taken(x, _shuffled(key, x.shape[axis]), axis), spec, mesh)


def choice(
    key: Key,
    a: Any,
    shape: Shape = (),
    replace: bool = True,
    p: Any = None,
    axis: int = 0,
    mode: str | None = None,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw from the numbers below n, or from the slices of a tensor.

    Args:
        key: one key.
        a: an integer n, or a tensor or array of one dim or more.
        shape: how many, in what shape.
        replace: whether the same one may be drawn again.
        p: float [n], how probable each is; None: all alike. Without replacement p need not add up to 1.
        axis: the dim of `a` that is drawn from.
        mode: of the Gumbel noise that draws with p and without replacement: "low" or "high".
        spec: how the result lies on the mesh. None: whole, or as the other dims of `a` do.
        mesh: by default that of `a`, else the current mesh; without one the result is whole.

    Returns:
        For an integer: int32 of `shape`. For a tensor: `shape` takes the place of `axis`.

    Raises:
        RandomError: not one key, not a shape, no such dim, more draws than there are things, p of another shape, an
            unknown mode.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.choice`, with its streams; without replacement and with p by the Gumbel-top-k trick (Vieira, 2014).

    >>> import vescale_fn as vfn
    >>> vfn.random.choice(vfn.random.key(42), 100, (3,)).tolist()
    [44, 14, 71]
    """
    where = "random.choice"
    key = checked(key, where)
    shape = shape_of(shape, where)
    tensor = isinstance(a, torch.Tensor) and a.ndim > 0
    axis = _dim(axis, a.ndim if tensor else 1, where)
    n, count = a.shape[axis] if tensor else _size(a, where, "a"), math.prod(shape)
    one_of(mode, (None, "low", "high"), where, "mode")
    if count and not n:
        raise RandomError(report(where, f"{count} things cannot be drawn out of none"))
    if not replace and count > n:
        raise RandomError(
            report(where, f"{count} things cannot be drawn out of {n} without replacement", fix="replace=True")
        )
    if p is not None:
        p = p if isinstance(p, torch.Tensor) else torch.tensor(p, dtype=torch.float32)
        # weights: 0 or 1, or counts
        p = p.to(torch.float32) if p.dtype is torch.bool or p.dtype in dtypes.INTEGERS else p
        need(p.dtype, dtypes.FLOATS, where, "p")
        if tuple(p.shape) != (n,):
            raise RandomError(
                report(where, f"p must be of shape ({n},), one number for each thing, but it is {described(p)}")
            )
    own = spec if not tensor else None  # indices lie as the result does; slices of a tensor come to lie so afterwards
    if replace and p is None:
        index = drawn(
            where,
            key,
            Draw("randint", shape, torch.int32, elementwise_draws.integer_range(0, n, torch.int32)),
            own,
            mesh,
        )
    elif replace:
        assert p is not None
        below = p.cumsum(0)
        u = drawn(where, key, Draw("uniform", shape, p.dtype, (0.0, 1.0)), own, mesh)
        index = torch.searchsorted(below, (below[-1] * (1 - u)).contiguous()).to(torch.int32)
    elif p is None:
        index = _shuffled(key, n)[:count].reshape(shape)
    else:
        g = gumbel_noise(where, key, (n,), p.dtype, mode) + float_ops.log(p)
        index = _largest(g, count, 0).reshape(shape)
    if not tensor:
        return spread(where, key, index.to(torch.int32), spec, mesh)
    taken = _taken(a, index.to(torch.int64).flatten(), axis)
    out = taken.reshape((*a.shape[:axis], *shape, *a.shape[axis + 1 :]))
    return spread(where, key, out, spec, mesh)


def categorical(
    key: Key,
    logits: torch.Tensor,
    axis: int = -1,
    shape: Shape | None = None,
    replace: bool = True,
    mode: str | None = None,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw classes from unnormalised log-probabilities.

    Args:
        key: one key.
        logits: a float tensor or array; one dim are the classes, the others are the batch.
        axis: the dim of the classes.
        shape: of the result: dims of repeated draws, then what the batch broadcasts to; by default the batch's shape.
        replace: whether repeated draws for one row may give one class twice.
        mode: of the Gumbel noise: "low" or "high".
        spec: how the result lies on the mesh. None: as the batch of the logits does. In a body with a spec the logits
            are this rank's block.
        mesh: by default that of the logits, else the current mesh; without one the result is whole.

    Returns:
        int32, the numbers of classes. Each rank draws noise for its own block of the logits. Where the classes
        are split, only the largest value and the place of it travel: two small all-reduces.

    Raises:
        RandomError: not one key, not a shape, logits that are not floating point, no such dim, a shape that the batch
            does not broadcast to, more draws without replacement than classes, an unknown mode.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.categorical`, with its streams: the Gumbel-max trick.

    >>> import torch, vescale_fn as vfn
    >>> vfn.random.categorical(vfn.random.key(42), torch.zeros(5), shape=(6,)).tolist()
    [1, 4, 2, 0, 3, 4]
    """
    where = "random.categorical"
    key = checked(key, where)
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point() or not logits.ndim:
        raise RandomError(
            report(where, f"logits must be a float tensor with a dim of classes, but it is {described(logits)}")
        )
    one_of(mode, (None, "low", "high"), where, "mode")
    axis = _dim(axis, logits.ndim, where) - logits.ndim
    classes, (spec, mesh) = logits.shape[axis], at_place(where, spec, mesh)
    batch = (*logits.shape[:axis], *logits.shape[axis:][1:])
    split = _splits(spec, mesh, len(batch) if shape is None else len(shape_of(shape, where)))
    shape = tuple(map(operator.mul, batch, split)) if shape is None else shape_of(shape, where)
    here = tuple(size // n for size, n in zip(shape, split, strict=True))
    extra = len(shape) - len(batch)
    if extra < 0 or any(b not in (1, size) for b, size in zip(batch, here[extra:], strict=True)):
        raise RandomError(report(where, f"the batch {batch} of the logits does not broadcast to shape={here}"))
    shared_keys.warn(where, key, {"logits": logits}, spec)
    own_spec, own_mesh = _as_logits(logits, spec, mesh, axis, extra)
    if replace:
        wide = [*shape[extra:]]
        wide.insert(len(wide) + axis + 1, classes)
        noise = gumbel_noise(where, key, (*shape[:extra], *wide), logits.dtype, mode, own_spec, own_mesh)
        found = _first_largest(noise + logits, axis)
        return found if context.body() is not None else spread(where, key, found, spec, mesh)
    count = math.prod(shape[:extra])
    if count > classes:
        raise RandomError(
            report(
                where,
                f"{count} draws without replacement need as many classes, but there are {classes}",
                fix="replace=True",
            )
        )
    own_spec = own_spec if own_spec is None else P(*own_spec[extra:])
    wide = [*map(operator.mul, batch, split[extra:])]
    wide.insert(len(wide) + axis + 1, classes)
    noise = gumbel_noise(where, key, tuple(wide), logits.dtype, mode, own_spec, own_mesh)
    found = _largest(noise + logits, count, axis).movedim(axis, 0).reshape((*shape[:extra], *batch)).to(torch.int32)
    return found.expand(here) if context.body() is not None else spread(where, key, found.expand(shape), spec, mesh)


def orthogonal(
    key: Key,
    n: int,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    m: int | None = None,
    *,
    spec: P | None = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Draw uniformly from the orthogonal matrices, or from the n x m matrices with orthonormal rows or columns.

    Args:
        key: one key.
        n: the number of rows.
        shape: of the batch of matrices.
        dtype: float32, float64, complex64 or complex128 (unitary matrices).
        m: the number of columns; n by default.
        spec: how the draw, [*shape, n, m], lies on the mesh. Batches that are split are drawn apart; a matrix is
            made whole by each rank that holds a part of it. None: whole, on every rank.
        mesh: by default the current mesh; without one the draw is whole.

    Raises:
        RandomError: not one key, not a shape, another dtype.
        SpecError: a spec that does not fit the mesh or the shape.

    Source: `jax.random.orthogonal`: equal up to rounding. Mezzadri, "How to generate random matrices from the classical
    compact groups" (2007).

    >>> import torch, vescale_fn as vfn
    >>> q = vfn.random.orthogonal(vfn.random.key(0), 3)
    >>> torch.allclose(q @ q.mT, torch.eye(3), atol=1e-6)
    True
    """
    where = "random.orthogonal"
    key = checked(key, where)
    need(dtype, [torch.float32, torch.float64, *dtypes.PARTS], where)
    shape, (n,), (m,) = shape_of(shape, where), shape_of(n, where, "n"), shape_of(n if m is None else m, where, "m")
    spec, mesh = at_place(where, spec, mesh)
    rows = split_axes(spec, len(shape) + 2) if isinstance(spec, P) and len(spec) <= len(shape) + 2 else ()
    laid_out(where, key, Draw("normal", (*shape, n, m), dtype), spec, mesh)  # all that may be wrong with the spec
    batch = None if spec is None else from_split_axes([*rows[: len(shape)], (), ()])
    draw = Draw("normal", (*shape, max(n, m), min(n, m)), dtypes.PARTS.get(dtype, dtype))
    if dtype in dtypes.PARTS:
        real, imaginary = (drawn(where, part, draw, batch, mesh) for part in pieces(key))
        z = torch.complex(real, imaginary) / math.sqrt(2)
    else:
        z = drawn(where, key, draw, batch, mesh)
    q, r = torch.linalg.qr(z)
    q = q * torch.sgn(r.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)
    q = q.mT if n < m else q
    if spec is None:
        return q
    if (body := context.body()) is None:
        return spread(where, key, q, spec, mesh)
    return _cut(q, from_split_axes(rows[len(shape) :]), len(shape), mesh or body.mesh)


def _dim(axis: Any, ndim: int, where: str) -> int:
    try:
        dim = operator.index(axis)
    except TypeError:
        raise RandomError(report(where, f"axis must be an integer, but it is {described(axis)}")) from None
    if not -ndim <= dim < ndim:
        raise RandomError(report(where, f"axis={dim} is not a dim of a tensor with {ndim} dims"))
    return dim % ndim


def _size(n: Any, where: str, name: str) -> int:
    try:
        size = operator.index(n)
    except TypeError:
        raise RandomError(
            report(where, f"{name} must be an integer or a tensor with dims, but it is {described(n)}")
        ) from None
    if size < 0:
        raise RandomError(report(where, f"{name} must not be negative, but it is {size}"))
    return size


def _rounds(size: int) -> int:
    """How often to sort by 32 random bits until equal bits are no matter."""
    return math.ceil(3 * math.log(max(1, size)) / math.log((1 << 32) - 1))


def _order(words: torch.Tensor, dim: int) -> torch.Tensor:
    """What sorts words, held as int32, as unsigned ones; equal ones stay as they come."""
    return (words ^ torch.iinfo(torch.int32).min).argsort(dim=dim, stable=True)


def _shuffled(key: Key, n: int) -> torch.Tensor:
    """The numbers below n in another order: int64, the same on every rank."""
    found = None
    for _ in range(_rounds(n)):
        key, part = pieces(key)
        order = _order(drawn("random.permutation", part, Draw("bits", (n,), torch.int32)), 0)
        found = order if found is None else found.gather(0, order)
    return torch.arange(n) if found is None else found


def _shuffled_rows(where: str, key: Key, x: torch.Tensor, axis: int) -> torch.Tensor:
    spec, mesh = (array.spec_of(x), array.mesh_of(x)) if array.is_array(x) and context.body() is None else (None, None)
    whole = spec
    if spec is not None and split_axes(spec, x.ndim)[axis]:
        spec = _turned(tuple(x.shape), spec, axis)
        x = with_sharding(x, spec)
    for _ in range(_rounds(x.numel())):
        key, part = pieces(key)
        words = drawn(where, part, Draw("bits", tuple(x.shape), torch.int32), spec and P(*spec), mesh)
        x = x.gather(axis, _order(words, axis))
    return x if spec is whole or whole is None else with_sharding(x, whole)


def _turned(shape: tuple[int, ...], spec: P, axis: int) -> P:
    """A spec with dim `axis` whole: its axes go to the largest of the other dims, if there is one."""
    rows = list(split_axes(spec, len(shape)))
    moving, rows[axis] = rows[axis], ()
    others = [d for d in range(len(shape)) if d != axis]
    if others:
        to = max(others, key=lambda d: (not rows[d], shape[d]))
        rows[to] = (*rows[to], *moving)
    return from_split_axes(rows)


def _taken(x: torch.Tensor, index: torch.Tensor, axis: int) -> torch.Tensor:
    """The slices of x with these numbers. Where x is split along `axis`, it is split elsewhere meanwhile."""
    if not array.is_array(x) or context.body() is not None:
        return x.index_select(axis, index.to(x.device))
    spec = array.spec_of(x)
    if not split_axes(spec, x.ndim)[axis]:
        return x.index_select(axis, index)
    out = with_sharding(x, _turned(tuple(x.shape), spec, axis)).index_select(axis, index)
    return with_sharding(out, P(*spec))


def _largest(x: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """Where the `count` largest values are, the largest first, the first of equals first."""
    return x.argsort(dim=dim, descending=True, stable=True).narrow(dim, 0, count)


def _first_largest(x: torch.Tensor, dim: int) -> torch.Tensor:
    """int32 argmax, the first of equals; along a split dim by two small reductions."""
    if not array.is_array(x) or context.body() is not None or not split_axes(array.spec_of(x), x.ndim)[dim]:
        return x.argmax(dim).to(torch.int32)
    n = x.shape[dim]
    places = torch.arange(n, dtype=torch.int32).view(n, *(1,) * (-dim - 1))
    return torch.where(x == x.amax(dim, keepdim=True), places, n).amin(dim).to(torch.int32)


def _splits(spec: P | None, mesh: Any, ndim: int) -> tuple[int, ...]:
    """In a body: into how many blocks a spec splits each dim, of which the logits are one. Elsewhere they are whole."""
    body = context.body()
    if body is None or not isinstance(spec, P) or len(spec) > ndim:
        return (1,) * ndim
    sizes = axes_of(context.seen(mesh or body.mesh))
    return tuple(math.prod(sizes.get(name, 1) for name in names) for names in split_axes(spec, ndim))


def _as_logits(logits: torch.Tensor, spec: P | None, mesh: Any, axis: int, extra: int) -> tuple[P | None, Any]:
    """How the noise lies: as the logits, or, for plain logits, so that the result lies as it shall."""
    if context.body() is None and array.is_array(logits):
        rows = split_axes(array.spec_of(logits), logits.ndim)
        return from_split_axes([*((),) * extra, *rows]), array.mesh_of(logits)
    if not isinstance(spec, P):
        return spec, mesh
    rows = list(split_axes(spec, max(len(spec), logits.ndim - 1 + extra)))
    rows.insert(len(rows) + axis + 1, ())
    return from_split_axes(rows), mesh


def spread(where: str, key: Key, value: torch.Tensor, spec: P | None, mesh: Any) -> torch.Tensor:
    """What all ranks have computed, laid out: each keeps its part; or an array, brought to its spec."""
    if array.is_array(value) and mesh is None and context.body() is None:
        mesh = array.mesh_of(value) if spec is not None else None
    layout = laid_out(where, key, Draw("bits", tuple(value.shape), value.dtype), spec, mesh)
    if layout is None:
        return value
    spec, mesh = layout
    return array.place(value, mesh, spec, where) if context.body() is None else _cut(value, spec, 0, mesh)


def _cut(value: torch.Tensor, spec: P, first: int, mesh: Any) -> torch.Tensor:
    """In a body: this rank's part of what all ranks have, by the rows of `spec` from dim `first` on."""
    axes = axes_of(mesh)
    for dim, names in enumerate(split_axes(spec, value.ndim - first), first):
        if names:
            index = communicator_of(mesh).each(functools.partial(_indices, value.shape[dim], names, mesh, axes))
            tensor_types.mark(index, types.of(names))
            value = value.index_select(dim, index.to(value.device))
    return value


def _indices(size: int, names: tuple[str, ...], mesh: Any, axes: dict[str, int], rank: int) -> torch.Tensor:
    # by numpy, because torch's factories mean something else inside a body
    return torch.from_numpy(np.asarray(dim_indices(size, names, axes, coordinates(mesh, rank)), dtype=np.int64))
