"""What the package knows of torch's dtypes: a new one is a new row here, and whatever kernels of ours know it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Float(NamedTuple):
    """A float dtype."""

    mantissa: int  # bits, without the leading one
    word: int  # bits of the random word whose top bits are the mantissa of a draw
    integer: torch.dtype  # of the same size
    one: int  # 1.0 as such an integer
    tolerance: float  # by how much two ways to compute one value may differ, of its size
    names: tuple[str, ...]  # what users call it


FLOATS = {
    torch.float64: Float(52, 64, torch.int64, 0x3FF0000000000000, 1e-9, ("f64", "float64", "double")),
    torch.float32: Float(23, 32, torch.int32, 0x3F800000, 2e-5, ("f32", "float32", "float")),
    torch.float16: Float(10, 16, torch.int16, 0x3C00, 4e-3, ("f16", "float16", "half")),
    torch.bfloat16: Float(7, 8, torch.int16, 0x3F80, 3e-2, ("bf16", "bfloat16")),
}
PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # what a complex number is made of

INTEGERS = {  # their bits
    torch.int8: 8,
    torch.uint8: 8,
    torch.int16: 16,
    torch.uint16: 16,
    torch.int32: 32,
    torch.uint32: 32,
    torch.int64: 64,
    torch.uint64: 64,
}
UNSIGNED = tuple(dtype for dtype in INTEGERS if not dtype.is_signed)
SIGNED = {bits // 8: dtype for dtype, bits in INTEGERS.items() if dtype.is_signed}  # by their size in bytes

CARRIED = {  # as what the bits travel of a dtype that gloo does not know; of one byte, as uint8
    torch.uint16: torch.int8,
    torch.int16: torch.int8,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
SUMMED = {  # as what ranks add up a dtype whose sums gloo does not know
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.bool: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch adds such numbers up: float32 for narrower floats, else their own."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point or dtype.is_complex else dtype


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements in row-major order, flat, as uint8.

    A contiguous tensor of one element may have any stride, which `contiguous` and `reshape` keep.
    """
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


def exact_below(dtype: torch.dtype) -> int:
    """The number below which a dtype holds every natural number, as `random_` draws them."""
    row = FLOATS.get(dtype)
    return 2 ** (row.mantissa + 1) if row else 2 if dtype is torch.bool else torch.iinfo(dtype).max


def tolerance(dtype: torch.dtype) -> float:
    """By how much two ways to compute a value may differ, of its size; 0 for what must be equal."""
    row = FLOATS.get(PARTS.get(dtype, dtype))
    return row.tolerance if row else 0.0


def category(dtype: torch.dtype) -> int:
    """0 for bool, 1 for integers, 2 for floats and complex numbers: a conversion to a lower one is not linear."""
    return 0 if dtype is torch.bool else 2 if dtype.is_floating_point or dtype.is_complex else 1
