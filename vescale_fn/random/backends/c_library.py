"""The C backend: finds the library that the installation built, checks it against the torch definition, calls it.

Without the library (no compiler when it was installed) nothing here draws, and the torch backend does all. In a checkout,
``pip install -e .`` builds it in place.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..generators import counters

VARIANTS = ("c-baseline", "c-avx2", "c-avx512")  # in the order of native.c

# the order of `enum kind`
CODES = {
    ("bits", torch.uint8): 0,
    ("bits", torch.uint16): 1,
    ("bits", torch.uint32): 2,
    ("bits", torch.int32): 2,
    ("bits", torch.uint64): 3,
    ("bits", torch.int64): 3,
    ("uniform", torch.float32): 4,
    ("uniform", torch.float64): 5,
    ("normal", torch.float32): 6,
    ("bernoulli", torch.float32): 7,
    ("randint", torch.int8): 8,
    ("randint", torch.uint8): 8,
    ("randint", torch.int16): 9,
    ("randint", torch.uint16): 9,
    ("randint", torch.int32): 10,
    ("randint", torch.uint32): 10,
    ("exponential", torch.float32): 11,
    ("gumbel", torch.float32): 12,
    ("laplace", torch.float32): 13,
    ("logistic", torch.float32): 14,
}
SMALL = {entry: code for entry, code in CODES.items() if entry[0] != "randint"}  # of one stream of words
WORDS = 15
DROPOUTS = {torch.float32: 16, torch.bfloat16: 17}

_Ints = ctypes.c_void_p
_pack = struct.Struct("=iiiiqqddd").pack  # `Small` of native.c


class _Draw(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("keys", _Ints),
        ("nkeys", ctypes.c_int64),
        ("streams", ctypes.c_int64),
        ("sizes", _Ints),
        ("offsets", _Ints),
        ("first", ctypes.c_int64),
        ("run", ctypes.c_int64),
        ("inner", _Ints),
        ("params", ctypes.c_double * 3),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    ]


_int, _long, _draw = ctypes.c_int32, ctypes.c_int64, ctypes.POINTER(_Draw)
# name: what it gives, what it takes
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "vfn_available": (ctypes.c_int,),
    "vfn_draw": (None, ctypes.c_int, ctypes.c_int, _draw),
    "vfn_small": (None, ctypes.c_char_p, ctypes.c_void_p),
    "vfn_offsets": (ctypes.c_int, _int, _Ints, _Ints, _int, _int, _long, _long, _Ints),
    "vfn_best_fit": (_long, _int, _Ints, _Ints, _Ints),
}


def load(folder: Path = Path(__file__).parent) -> Any:
    """The library, with the types of its functions; None where it cannot be loaded, or was built from other sources."""
    try:
        library = ctypes.CDLL(str(folder / "_native.so"))
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return library


library = load()


def available() -> list[str]:
    """The variants that this machine runs, the fastest last."""
    if library is None:
        return []
    bits = library.vfn_available()
    return [name for i, name in enumerate(VARIANTS) if bits >> i & 1]


@functools.lru_cache(maxsize=256)
def _like(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((), dtype=dtype, device="cpu").expand(shape)


def small(
    variant: int,
    code: int,
    key: torch.Tensor,
    first: int,
    n: int,
    params: Sequence[float],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The `n` elements from `first` on under one key, int32 [2], in this thread, as a tensor. Made for the shortest call."""
    out = torch.empty_like(_like(shape, dtype))
    p0, p1, p2 = (*params, 0.0, 0.0, 0.0)[:3]
    library.vfn_small(_pack(variant, code, *key.tolist(), first, n, p0, p1, p2), out.data_ptr())
    return out


def draw(
    variant: int,
    code: int,
    keys: torch.Tensor,
    rectangle: counters.Rectangle,
    params: Sequence[float],
    out: torch.Tensor,
    x: torch.Tensor | None = None,
) -> None:
    """The elements of a rectangle, for each key.

    Args:
        variant, code: the place of the instruction set in `VARIANTS`, and of the kind in `enum kind`.
        keys: int32 [keys, streams, 2] on the CPU.
        out: contiguous, of as many elements; in place of `x`, contiguous, which a dropout reads.
    """
    if not out.numel():
        return
    keys = keys.contiguous()
    inner = rectangle.walk[1]
    sizes, offsets, listed = rectangle.vectors
    job = _Draw(
        code,
        len(sizes),
        keys.data_ptr(),
        keys.shape[0],
        keys.shape[1],
        sizes.ctypes.data,
        offsets.ctypes.data,
        inner.start if isinstance(inner, range) else 0,
        len(inner),
        None if listed is None else listed.ctypes.data,
        (ctypes.c_double * 3)(*params),
        None if x is None else x.data_ptr(),
        out.data_ptr(),
    )
    library.vfn_draw(variant, torch.get_num_threads(), ctypes.byref(job))
