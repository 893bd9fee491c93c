"""typeof: the type of one value, with what its axes and its ranks have to do with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .._core.arrays.array import mesh_of
from .._core.arrays.placement import spec_of
from .._core.base import context, tree
from .._core.base.errors import TreeError
from .._core.base.messages import described, report
from .._core.distributed.places import whole_mesh
from .._core.local_types import tensor_types, types
from .._core.sharding.layout import WHOLE, type_text
from .._core.sharding.named_sharding import Sharding
from .._core.sharding.spec import P

_NUMBERS = (bool, int, float, complex, str)


@dataclass(frozen=True, repr=False)
class ValueType:
    """What `typeof` returns; it prints as messages write types: ``f32[8@dp,4]``, in a body ``f32[4,4]{V:dp}``.

    Attributes:
        shape: of the whole value; in a `shard_map` body of this rank's block, under `vmap` of one entry.
        dtype: torch's; of a key a string, of a Python value its class.
        spec, mesh: the layout of an array; ``P()`` and None for what is no array.
        varying: in a `shard_map` body, the axes over which the value differs; None in one without types, which cannot
            tell. Elsewhere there are none. Also by JAX's name, `vma`.
        unreduced, reduced: the axes over which the ranks hold partial sums, or the gradient stays unreduced.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: P = WHOLE
    mesh: Any = None
    varying: frozenset[str] | None = frozenset()
    unreduced: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def vma(self) -> frozenset[str] | None:
        """`varying`, by JAX's name."""
        return self.varying

    @property
    def sharding(self) -> Sharding | None:
        """The mesh and the spec of an array."""
        return None if self.mesh is None else Sharding(self.mesh, self.spec)

    def __repr__(self) -> str:
        if isinstance(self.dtype, type):
            return self.dtype.__name__
        axes = types.of(self.varying or (), self.unreduced, self.reduced)
        return f"{type_text(self.shape, self.dtype, P(*self.spec, at=self.spec.at))}{axes!r}"


def typeof(x: Any) -> ValueType:
    """The type of a value: shape and dtype, an array's layout, and in a `shard_map` body the axes that it varies over.

    Args:
        x: one value, under any transform and while `jit` records: a tensor, an array, a key, a numpy array, or a Python
            number or string. Not a tree, as in JAX: ``vfn.tree.map(vfn.typeof, tree)``.

    Raises:
        TreeError: `x` is a tree, or nothing that a tree holds as a leaf.

    Source: `jax.typeof`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> with vfn.simulate(2):
    ...     x = vfn.shard(torch.zeros(8, 4), vfn.make_mesh((2,), ("dp",)), P("dp"))
    ...     print(vfn.typeof(x), vfn.typeof(x).sharding)
    ...     def body(x):
    ...         print(vfn.typeof(x), vfn.typeof(vfn.psum(x, "dp")))
    ...         return x
    ...     y = vfn.shard_map(body, in_specs=P("dp"), out_specs=P("dp"))(x)
    f32[8@dp,4] Sharding(mesh (dp=2), P('dp'))
    f32[4,4]{V:dp} f32[4,4]
    """
    if isinstance(x, torch.Tensor):
        return _of_tensor(x, tuple(x.shape), x.dtype)
    if tree.opaque(x):
        return _of_tensor(x.data, x.shape, f"key<{x.impl}>")
    if isinstance(x, (np.ndarray, np.generic)):
        return ValueType(x.shape, torch.as_tensor(x).dtype)
    kind = next((kind for kind in _NUMBERS if isinstance(x, kind)), None)
    if kind is None:
        what = f"x must be one tensor, key, number or string, but it is {described(x)}"
        raise TreeError(
            report("typeof", what, fix="vfn.tree.map(vfn.typeof, tree), or vfn.show(tree), for a whole tree")
        )
    return ValueType((), kind)


def _of_tensor(x: torch.Tensor, shape: tuple[int, ...], dtype: Any) -> ValueType:
    """The type of a value of which `x` is the data."""
    body, mesh, spec = context.body(), whole_mesh(mesh_of(x)), spec_of(x)
    local = types.INVARIANT
    if body is not None and not tensor_types.outside(x, body.auto):
        if not body.check:
            return ValueType(shape, dtype, spec, mesh, None, spec.unreduced, spec.reduced)
        local = tensor_types.typeof(x, body.axes)
    return ValueType(
        shape, dtype, spec, mesh, local.varying, spec.unreduced | local.unreduced, spec.reduced | local.reduced
    )
