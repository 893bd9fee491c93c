"""Initial weights: `jax.nn.initializers`, with its names, its factories and its numbers.

A factory gives a function ``(key, shape, dtype=None, *, spec=None, mesh=None)``. With a spec each rank draws its own
block alone (`orthogonal` and `delta_orthogonal`: each rank makes the whole and keeps its part). float32 weights are
those of `jax` bit for bit, but for the two orthogonal ones, which are equal up to rounding. For bfloat16 or float16
weights draw float32 and cast: a draw in 16 bits takes few different values.

As in `jax`, a weight is [..., in, out] by default. `torch.nn.Linear` keeps [out, in]: say ``in_axis=-1, out_axis=-2``;
for a convolution's [out, in, *kernel], ``in_axis=1, out_axis=0``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._core.arrays import placement
from .._core.base import context, dtypes
from .._core.base.errors import RandomError
from .._core.base.messages import report
from .._core.sharding.index_map import axes_of, local_indices
from .._core.sharding.spec import P
from . import permutations
from .keys import Key, checked, shape_of
from .parameters import Shape, need, number, one_of
from .sharded import Draw, device_of, drawn, laid_out, own

Initializer = Callable[..., torch.Tensor]  # (key, shape, dtype=None, *, spec=None, mesh=None)
Axes = int | Sequence[int]

MODES = ("fan_in", "fan_out", "fan_avg", "fan_geo_avg")
DISTRIBUTIONS = ("truncated_normal", "normal", "uniform")
TRUNCATED = 0.87962566103423978  # the standard deviation of a standard normal between -2 and 2


def zeros(
    key: Any, shape: Shape, dtype: torch.dtype = torch.float32, *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Zeros; the key is not looked at.

    Args:
        key: anything, so that all initialisers are called alike.
        shape: of the whole tensor.
        dtype: any dtype.
        spec: how it lies on the mesh. None: whole, on every rank.
        mesh: by default the current mesh.

    Raises:
        RandomError: not a shape.
        SpecError: a spec that does not fit the mesh or the shape.

    >>> import vescale_fn as vfn
    >>> vfn.random.init.zeros(vfn.random.key(0), (2,))
    tensor([0., 0.])
    """
    return _filled("random.init.zeros", 0, key, shape, dtype, spec, mesh)


def ones(
    key: Any, shape: Shape, dtype: torch.dtype = torch.float32, *, spec: P | None = None, mesh: Any = None
) -> torch.Tensor:
    """Ones; otherwise as `zeros`.

    >>> import vescale_fn as vfn
    >>> vfn.random.init.ones(vfn.random.key(0), (2,))
    tensor([1., 1.])
    """
    return _filled("random.init.ones", 1, key, shape, dtype, spec, mesh)


def constant(value: float, dtype: torch.dtype = torch.float32) -> Initializer:
    """An initialiser that fills with one number.

    >>> import vescale_fn as vfn
    >>> vfn.random.init.constant(-7.0)(vfn.random.key(0), (2,))
    tensor([-7., -7.])
    """
    where, default = "random.init.constant", dtype
    value = number(value, where, "value")

    def init(
        key: Any, shape: Shape, dtype: torch.dtype | None = None, *, spec: P | None = None, mesh: Any = None
    ) -> torch.Tensor:
        return _filled(where, value, key, shape, default if dtype is None else dtype, spec, mesh)

    return init


def uniform(scale: float = 1e-2, dtype: torch.dtype = torch.float32) -> Initializer:
    """An initialiser that draws uniform numbers in [0, scale).

    >>> import vescale_fn as vfn
    >>> vfn.random.init.uniform(10.0)(vfn.random.key(42), (2,))
    tensor([4.8871, 6.7980])
    """
    return _scaled("random.init.uniform", "uniform", (0.0, 1.0), "scale", scale, dtype)


def normal(stddev: float = 1e-2, dtype: torch.dtype = torch.float32) -> Initializer:
    """An initialiser that draws normal numbers of mean 0 and this standard deviation.

    >>> import vescale_fn as vfn
    >>> vfn.random.init.normal(5.0)(vfn.random.key(42), (2,))
    tensor([-0.1415,  2.3357])
    """
    return _scaled("random.init.normal", "normal", (), "stddev", stddev, dtype)


def truncated_normal(
    stddev: float = 1e-2, dtype: torch.dtype = torch.float32, lower: float = -2.0, upper: float = 2.0
) -> Initializer:
    """An initialiser that draws normal numbers between `lower` and `upper`, then multiplies them by stddev.

    stddev is that before the truncation.

    >>> import vescale_fn as vfn
    >>> vfn.random.init.truncated_normal(1.0, lower=-1, upper=1)(vfn.random.key(42), (2,))
    tensor([-0.0193,  0.3127])
    """
    where = "random.init.truncated_normal"
    lower, upper = number(lower, where, "lower"), number(upper, where, "upper")
    if not lower < upper:
        raise RandomError(report(where, f"lower must be below upper, but they are {lower!r} and {upper!r}"))
    return _scaled(where, "truncated_normal", (lower, upper), "stddev", stddev, dtype)


def variance_scaling(
    scale: float,
    mode: str,
    distribution: str,
    in_axis: Axes = -2,
    out_axis: Axes = -1,
    batch_axis: Axes = (),
    dtype: torch.dtype = torch.float32,
    *,
    where: str = "random.init.variance_scaling",
) -> Initializer:
    """An initialiser that draws numbers of mean 0 and variance ``scale / n``, n as many as `mode` says.

    Args:
        scale: a positive number.
        mode: "fan_in" (n inputs), "fan_out" (n outputs), "fan_avg" or "fan_geo_avg" (their arithmetic or geometric mean).
        distribution: "truncated_normal" (at twice the standard deviation), "normal" or "uniform".
        in_axis, out_axis: the dims of inputs and of outputs. All others are of a convolution's kernel, and count in both.
        batch_axis: dims that do not count.
        dtype: a float dtype, unless the initialiser is called with another.
        where: the name that messages begin with.

    Returns:
        A function ``(key, shape, dtype=None, *, spec=None, mesh=None)``.

    Raises:
        RandomError: here, another mode or distribution; later, not one key, not a shape, another dtype, dims that the
            shape does not have, a negative variance.
        SpecError: later, a spec that does not fit the mesh or the shape.

    Source: `jax.nn.initializers.variance_scaling`. Glorot and Bengio (AISTATS 2010); He et al. (ICCV 2015); LeCun et al.,
    "Efficient BackProp" (1998).

    >>> import vescale_fn as vfn
    >>> vfn.random.init.variance_scaling(1.0, "fan_in", "normal")(vfn.random.key(42), (25, 2)).shape
    torch.Size([25, 2])
    """
    one_of(mode, MODES, where, "mode")
    one_of(distribution, DISTRIBUTIONS, where, "distribution")
    scale, default = number(scale, where, "scale"), dtype

    def init(
        key: Key, shape: Shape, dtype: torch.dtype | None = None, *, spec: P | None = None, mesh: Any = None
    ) -> torch.Tensor:
        dtype = default if dtype is None else dtype
        key = checked(key, where)
        need(dtype, dtypes.FLOATS, where)
        shape = shape_of(shape, where)
        into, out_of = fans(shape, in_axis, out_axis, batch_axis, where)
        n = {"fan_in": into, "fan_out": out_of, "fan_avg": (into + out_of) / 2, "fan_geo_avg": (into * out_of) ** 0.5}
        if 0 not in shape and not scale / n[mode] >= 0:
            raise RandomError(report(where, f"scale must not be negative, but it is {scale!r}"))
        variance = 0.0 if 0 in shape else rounded(scale / n[mode], dtype)
        if distribution == "uniform":
            draw, factor = Draw("uniform", shape, dtype, (-1.0, 1.0)), root(rounded(3 * variance, dtype), dtype)
        elif distribution == "normal":
            draw, factor = Draw("normal", shape, dtype), root(variance, dtype)
        else:
            draw = Draw("truncated_normal", shape, dtype, (-2.0, 2.0))
            factor = rounded(root(variance, dtype) / rounded(TRUNCATED, dtype), dtype)
        return drawn(where, key, draw, spec, mesh) * factor

    return init


def _family(name: str, scale: float, mode: str, distribution: str, source: str) -> Callable[..., Initializer]:
    where = f"random.init.{name}"

    def factory(
        in_axis: Axes = -2, out_axis: Axes = -1, batch_axis: Axes = (), dtype: torch.dtype = torch.float32
    ) -> Initializer:
        return variance_scaling(scale, mode, distribution, in_axis, out_axis, batch_axis, dtype, where=where)

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"""``variance_scaling({scale}, "{mode}", "{distribution}")``.

    Args:
        in_axis, out_axis, batch_axis, dtype: as for `variance_scaling`.

    Source: {source}

    >>> import vescale_fn as vfn
    >>> vfn.random.init.{name}()(vfn.random.key(42), (3, 2)).shape
    torch.Size([3, 2])
    """
    return factory


_GLOROT = "Glorot and Bengio (AISTATS 2010)."
_HE = "He et al. (ICCV 2015)."
_LECUN = 'LeCun et al., "Efficient BackProp" (1998).'
glorot_uniform = _family("glorot_uniform", 1.0, "fan_avg", "uniform", _GLOROT)
glorot_normal = _family("glorot_normal", 1.0, "fan_avg", "truncated_normal", _GLOROT)
lecun_uniform = _family("lecun_uniform", 1.0, "fan_in", "uniform", _LECUN)
lecun_normal = _family("lecun_normal", 1.0, "fan_in", "truncated_normal", _LECUN)
he_uniform = _family("he_uniform", 2.0, "fan_in", "uniform", _HE)
he_normal = _family("he_normal", 2.0, "fan_in", "truncated_normal", _HE)
xavier_uniform, xavier_normal = glorot_uniform, glorot_normal
kaiming_uniform, kaiming_normal = he_uniform, he_normal


def orthogonal(scale: float = 1.0, column_axis: int = -1, dtype: torch.dtype = torch.float32) -> Initializer:
    """An initialiser that draws matrices with orthonormal rows or columns, whichever are fewer, times `scale`.

    Args:
        scale: a number.
        column_axis: the dim of the columns; all other dims together are the rows.
        dtype: float32 or float64.

    Raises:
        RandomError: later, not one key, not a shape of two dims or more, another dtype.
        SpecError: later, a spec that does not fit the mesh or the shape.

    Source: `jax.nn.initializers.orthogonal`: equal up to rounding. Saxe et al. (ICLR 2014).

    >>> import torch, vescale_fn as vfn
    >>> w = vfn.random.init.orthogonal()(vfn.random.key(42), (2, 3))
    >>> torch.allclose(w @ w.T, torch.eye(2), atol=1e-6)
    True
    """
    where, default = "random.init.orthogonal", dtype
    scale = number(scale, where, "scale")

    def init(
        key: Key, shape: Shape, dtype: torch.dtype | None = None, *, spec: P | None = None, mesh: Any = None
    ) -> torch.Tensor:
        dtype, shape = default if dtype is None else dtype, shape_of(shape, where)
        if len(shape) < 2:
            raise RandomError(report(where, f"shape must have 2 dims or more, but it is {shape}"))
        (column,) = dims(column_axis, len(shape), where, "column_axis")
        laid_out(where, key, Draw("normal", shape, dtype), spec, mesh)  # a wrong spec is found before the work
        return permutations.spread(where, key, _orthogonal(key, shape, column, scale, dtype), spec, mesh)

    return init


def delta_orthogonal(scale: float = 1.0, column_axis: int = -1, dtype: torch.dtype = torch.float32) -> Initializer:
    """An initialiser of convolutions [*kernel, in, out]: an orthogonal matrix at the kernel's centre, zeros elsewhere.

    Args:
        scale, column_axis, dtype: as for `orthogonal`.

    Raises:
        RandomError: later, not one key, not a shape of 3 to 5 dims, more inputs than outputs, another dtype.
        SpecError: later, a spec that does not fit the mesh or the shape.

    Source: `jax.nn.initializers.delta_orthogonal`: equal up to rounding. Xiao et al. (ICML 2018).

    >>> import vescale_fn as vfn
    >>> vfn.random.init.delta_orthogonal()(vfn.random.key(42), (3, 1, 1)).abs().flatten()
    tensor([0., 1., 0.])
    """
    where, default = "random.init.delta_orthogonal", dtype
    scale = number(scale, where, "scale")

    def init(
        key: Key, shape: Shape, dtype: torch.dtype | None = None, *, spec: P | None = None, mesh: Any = None
    ) -> torch.Tensor:
        dtype, shape = default if dtype is None else dtype, shape_of(shape, where)
        if len(shape) not in (3, 4, 5):
            raise RandomError(report(where, f"shape must have 3, 4 or 5 dims, but it is {shape}"))
        if shape[-1] < shape[-2]:
            raise RandomError(report(where, f"shape must not have more inputs than outputs, but it is {shape}"))
        (column,) = dims(column_axis, 2, where, "column_axis")
        laid_out(where, key, Draw("normal", shape, dtype), spec, mesh)
        matrix = _orthogonal(key, shape[-2:], column, scale, dtype)
        around = [pad for k in reversed(shape[:-2]) for pad in ((k - 1) // 2, k - 1 - (k - 1) // 2)]
        value = torch.nn.functional.pad(matrix[(None,) * (len(shape) - 2)], (0, 0, 0, 0, *around))
        return permutations.spread(where, key, value, spec, mesh)

    return init


def _orthogonal(key: Key, shape: Sequence[int], column: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    rest = [size for dim, size in enumerate(shape) if dim != column]
    q = permutations.orthogonal(key, math.prod(rest), (), dtype, shape[column])
    return q.reshape(*rest, shape[column]).movedim(-1, column) * rounded(scale, dtype)


def _filled(
    where: str, value: float, key: Any, shape: Shape, dtype: torch.dtype, spec: P | None, mesh: Any
) -> torch.Tensor:
    shape = shape_of(shape, where)
    layout, body = laid_out(where, key, Draw("bits", shape, dtype), spec, mesh), context.body()
    home = layout[1] if layout else body.mesh if body else None
    device = device_of(key, home) if isinstance(key, Key) else home.device_type if home else None
    if layout is None:
        return own(torch.full(shape, value, dtype=dtype, device=device))
    spec, mesh = layout
    axes = axes_of(mesh)
    size = lambda coord: [len(index) for index in local_indices(shape, axes, spec, coord)]
    if body is not None:
        return own(torch.full(size(dict.fromkeys(axes, 0)), value, dtype=dtype, device=device))
    block = lambda coord: torch.full(size(coord), value, dtype=dtype, device=device)
    return placement.from_blocks(block, shape, dtype, mesh, spec)


def _scaled(
    where: str, kind: str, params: tuple[float, ...], name: str, scale: float, default: torch.dtype
) -> Initializer:
    scale = number(scale, where, name)

    def init(
        key: Key, shape: Shape, dtype: torch.dtype | None = None, *, spec: P | None = None, mesh: Any = None
    ) -> torch.Tensor:
        dtype, key = default if dtype is None else dtype, checked(key, where)
        need(dtype, dtypes.FLOATS, where)
        return drawn(where, key, Draw(kind, shape_of(shape, where), dtype, params), spec, mesh) * rounded(scale, dtype)

    return init


def fans(shape: Sequence[int], in_axis: Axes, out_axis: Axes, batch_axis: Axes, where: str) -> tuple[float, float]:
    """How many inputs an output has, and how many outputs an input has."""
    if len(shape) < 2 and in_axis == -2:
        raise RandomError(
            report(
                where,
                f"a shape of {len(shape)} dims, {tuple(shape)}, has no dim of inputs",
                fix="two dims or more, or in_axis=...",
            )
        )
    names = {"in_axis": in_axis, "out_axis": out_axis, "batch_axis": batch_axis}
    inputs, outputs, batch = (
        math.prod(shape[d] for d in dims(axis, len(shape), where, name)) for name, axis in names.items()
    )
    if 0 in shape:
        return 0.0, 0.0
    kernel = math.prod(shape) / inputs / outputs / batch
    return inputs * kernel, outputs * kernel


def dims(axis: Axes, ndim: int, where: str, name: str) -> list[int]:
    """One dim or several, each from 0 on."""
    found = [axis] if isinstance(axis, int) else list(axis)
    for dim in found:
        if not -ndim <= dim < ndim:
            raise RandomError(report(where, f"{name}={axis!r} is not of a shape of {ndim} dims"))
    return [dim % ndim for dim in found]


def rounded(value: float, dtype: torch.dtype) -> float:
    """The number of `dtype` next to `value`."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()


def root(value: float, dtype: torch.dtype) -> float:
    """The correctly rounded root: that of a double is exact enough to be rounded again."""
    return rounded(math.sqrt(value), dtype)
