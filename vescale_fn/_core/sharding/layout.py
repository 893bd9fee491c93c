"""An array's layout in three forms: a `P`, DTensor's spec, and a line of text. Specs are interned."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base.messages import dtype_text
from .index_map import axes_of
from .merged_dim import parts_of
from .placements import from_placements, normal, to_placements
from .spec import P, from_split_axes, place_text, split_axes, with_place

WHOLE = P()


@functools.lru_cache(maxsize=65536)
def spec_for(mesh: Any, spec: P, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The DTensorSpec of an array; of one `P` it is one object, so that looking up decisions compares identities."""
    axes = axes_of(mesh)
    made = torch_internals.DTensorSpec(
        mesh,
        to_placements(spec, axes, len(shape)),
        tensor_meta=torch_internals.TensorMeta(torch.Size(shape), stride, dtype),
    )
    written = from_split_axes(split_axes(spec, len(shape)), spec.unreduced)
    if written != normal(spec, axes, shape):
        made.written = written
    return made


def as_written(spec: Any) -> P:
    """The `P` that a DTensorSpec was made from: `layout`, but for the order of axes of size 1, which placements do not hold."""
    return spec.__dict__.get("written") or layout(spec)


@functools.lru_cache(maxsize=65536)
def layout(spec: Any) -> P:
    """The `P` of a DTensorSpec."""
    shape = spec.tensor_meta.shape
    return from_placements(spec.placements, axes_of(spec.mesh), len(shape), tuple(shape))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of `shape`."""
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def axes_items(mesh: Any) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh as (name, size) pairs: hashable."""
    return tuple(axes_of(mesh).items())


def type_text(shape: Sequence[int], dtype: torch.dtype, spec: P) -> str:
    """A value's type on one short line: ``f32[8@dp,4]{U:tp}``."""
    rows = split_axes(spec, len(shape))
    dims = [
        "*".join(f"{n}@{'+'.join(names)}" if names else str(n) for n, names in parts_of(row, size))
        for size, row in zip(shape, rows, strict=True)
    ]
    return (
        f"{dtype_text(dtype)}[{','.join(dims)}]"
        + "".join(
            f"{{{letter}:{','.join(sorted(names))}}}"
            for letter, names in (("U", spec.unreduced), ("R", spec.reduced))
            if names
        )
        + (f"{{at {place_text(spec.at)}}}" if spec.at else "")
    )


def text(x: Any) -> str:
    """The type of a tensor or an array, on one short line."""
    if not isinstance(x, DTensor):
        return _plain_text(x.shape, x.dtype)
    return type_text(x.shape, x.dtype, whole_layout(x))


def whole_layout(x: Any) -> P:
    """The `P` of an array, with the place at which it exists."""
    place = getattr(torch_internals.mesh(x), "place", None)
    spec = layout(torch_internals.spec(x))
    return spec if place is None else with_place(spec, place.at)


@functools.lru_cache(maxsize=4096)
def _plain_text(shape: torch.Size, dtype: torch.dtype) -> str:
    return type_text(shape, dtype, WHOLE)
