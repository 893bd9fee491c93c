"""`ShapeDtype`: what a tensor or an array is, without its values; a leaf of trees wherever a function asks for shapes alone."""

from __future__ import annotations

from typing import Any

import torch

from .. import torch_internals
from ..base import context, no_values, tree
from ..base.errors import SpecError
from ..base.messages import described, report
from ..distributed import blocks
from ..distributed.communicator import coordinates
from ..distributed.mesh import communicator_of
from ..distributed.places import resolved
from ..sharding.index_map import axes_of, checked_shape, local_shape
from ..sharding.layout import WHOLE, contiguous_stride, type_text
from ..sharding.named_sharding import without_mesh
from ..sharding.spec import P, is_spec, too_long, validate
from .array import Array, is_array, mesh_of, spec_of, wrap

_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__dlpack__")
)


class _OfAnyLayout(type(torch.Tensor)):
    """So that what is split over a mesh is made, and known, by the same name."""

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.is_meta

    def __call__(cls, shape: Any, dtype: Any, spec: Any = None, mesh: Any = None) -> Any:
        shape = torch.Size(checked_shape(shape, "ShapeDtype", "vfn.ShapeDtype((8, 6), torch.float32)"))
        if not isinstance(dtype, torch.dtype):
            raise SpecError(
                report("ShapeDtype", f"dtype must be torch's, but it is {described(dtype)}", fix="torch.float32")
            )
        spec, mesh = without_mesh(
            spec, None if mesh is None else context.checked_mesh(mesh, "ShapeDtype"), "ShapeDtype"
        )
        if spec is not None:
            is_spec(spec, "ShapeDtype")
            mesh = context.current_mesh() if mesh is None else mesh
        what = f"a value of shape {tuple(shape)}"
        if mesh is None:
            if spec is not None and (wrong := too_long(spec, len(shape))):
                raise SpecError(report("ShapeDtype", f"the spec {spec!r} does not fit {what}", wrong))
            return without_values(torch.empty(shape, dtype=dtype, device="meta"))
        spec = P() if spec is None else spec
        validate(spec, axes_of(mesh), len(shape), "ShapeDtype", what, at=True)
        mesh, spec = resolved(mesh, spec)
        return on_mesh(shape, dtype, spec, mesh)


class ShapeDtype(torch.Tensor, metaclass=_OfAnyLayout):
    """The shape and the dtype of a tensor, and of an array its layout; the values are not there.

    `eval_shape` returns such leaves, and every function that needs no values takes them: `eval_shape`, ``jit(f).lower``,
    `shard`, `init`, ``opt.init``, `spec_from_rules`, `load`. With a spec and a mesh it is an array without values: ops on it
    give others, as on a mesh of `abstract_mesh`. Without, it is a tensor on torch's meta device.

    Args:
        shape: the sizes; of an array those of the whole.
        dtype: torch's.
        spec: the layout, a `P`; or an array's ``sharding``.
        mesh: of any kind; by default the current one, where there is a spec.

    Attributes:
        shape, dtype: as given.
        spec, mesh, sharding: as given; None without a layout.

    Raises:
        SpecError: no shape or dtype, or a spec that does not fit. A NoValueError where a value is read of it.

    Source: `jax.ShapeDtypeStruct`.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> vfn.ShapeDtype((8, 4), torch.float32), vfn.ShapeDtype((8, 4), torch.float32) == vfn.ShapeDtype((8, 4), torch.int32)
    (ShapeDtype f32[8,4], False)
    >>> vfn.ShapeDtype((8, 4), torch.float32, P("dp"), vfn.abstract_mesh(512, "dp"))
    Array f32[8@dp,4] on mesh (dp=512), without values
    """

    spec = mesh = sharding = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise no_values.refusal(func.__name__.strip("_"))
        with torch_internals.no_torch_function():
            out = func(*args, **kwargs or {})
        return tree.map_(_again, out)

    def __eq__(self, other: Any) -> Any:  # type: ignore[override]
        if type(other) is not ShapeDtype:
            return super().__eq__(other)
        return self.shape == other.shape and self.dtype is other.dtype

    def __ne__(self, other: Any) -> Any:  # type: ignore[override]
        return super().__ne__(other) if type(other) is not ShapeDtype else not self == other

    def __hash__(self) -> int:
        return hash((tuple(self.shape), self.dtype))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShapeDtype {type_text(self.shape, self.dtype, WHOLE)}"


def _again(x: Any) -> Any:
    """What an op on one gives: another, unless it was given a device."""
    return x.as_subclass(ShapeDtype) if type(x) is torch.Tensor and x.is_meta else x


def on_mesh(shape: torch.Size, dtype: torch.dtype, spec: P, mesh: Any) -> Array:
    """An array without values."""
    communicator, axes, device = communicator_of(mesh), axes_of(mesh), torch.device(mesh.device_type)

    def local(rank: int) -> tuple[int, ...]:
        return local_shape(shape, axes, spec, coordinates(mesh, rank))

    def made(rank: int) -> torch.Tensor:
        return no_values.empty(local(rank), contiguous_stride(local(rank)), dtype, device)

    if communicator.is_elsewhere:  # what it holds for each is a number
        row = list(map(made, communicator.ranks))
        return wrap(blocks.Blocks(row) if communicator.holds_blocks else row[0], mesh, spec, shape)
    return wrap(communicator.each(made, key=local), mesh, spec, shape)


def without_values(x: Any) -> Any:
    """What a leaf is without its values: a tensor as a ShapeDtype, an array as one without values, anything else as it is."""
    if not isinstance(x, torch.Tensor) or type(x) is ShapeDtype:
        return x
    if is_array(x):
        local = blocks.of_each(no_values.like, torch_internals.local(x))
        return wrap(local, mesh_of(x), spec_of(x), x.shape, tuple(x.stride()))
    with torch_internals.unrecorded(), torch_internals.no_torch_function():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta").as_subclass(ShapeDtype)
