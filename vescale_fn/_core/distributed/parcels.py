"""Values as messages: those that one task has for another travel as one, and lie behind it as they lay before."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..base import dtypes

_ALIGNED = 64  # bytes, at a multiple of which each of several values begins, as memory of its own does


class Lies(NamedTuple):
    """How a value lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor) -> Lies:
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.device)


class Parcel:
    """How the values of a message travel: all on a device as one. What has no elements does not.

    Args:
        lies: how each of them lies.

    Attributes:
        lies: the same.
        rows: of each tensor that travels the places of its values.
        sizes: of each how many bytes it has.
    """

    def __init__(self, lies: Sequence[Lies]) -> None:
        self.lies, rows = lies, dict[torch.device, list[int]]()
        for i, one in enumerate(lies):
            if 0 not in one.shape:
                rows.setdefault(one.device, []).append(i)
        self.rows = list(rows.values())
        self._ways = [_Way([_Piece(lies[i]) for i in row]) for row in self.rows]
        self._alone = len(lies) == 1 and len(self._ways) == 1 and self._ways[0].is_itself
        self.sizes = [way.bytes for way in self._ways]

    def room(self) -> list[torch.Tensor]:
        """Memory for what arrives."""
        return [way.room() for way in self._ways]

    def packed(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What travels, each tensor in one piece of memory."""
        if self._alone and (x := values[0]).is_contiguous() and not x.is_neg():
            return [x]
        return [way.packed([values[i] for i in row]) for row, way in zip(self.rows, self._ways)]

    def unpacked(self, arrived: list[torch.Tensor]) -> list[torch.Tensor]:
        """The values, of what has arrived."""
        if self._alone:
            return arrived
        found: dict[int, torch.Tensor] = {}
        for row, way, bits in zip(self.rows, self._ways, arrived, strict=True):
            found.update(zip(row, way.unpacked(bits), strict=True))
        return [found[i] if i in found else _empty(one.shape, one) for i, one in enumerate(self.lies)]


def as_arrived(x: torch.Tensor, lies: Lies) -> torch.Tensor:
    """A value as it would lie behind a message: by that a kernel may choose how it computes."""
    if x.stride() == lies.stride and x.data_ptr() % _ALIGNED == 0 and not (x.is_conj() or x.is_neg()):
        return x
    parcel = Parcel([lies])
    return parcel.unpacked([one.clone() for one in parcel.packed([x])])[0]


class _Way:
    """How values on a device travel: one as what carries it, several as bytes."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._pieces, self._device = pieces, pieces[0].lies.device
        sizes = [-(-piece.count * piece.carrier.itemsize // _ALIGNED) * _ALIGNED for piece in pieces]
        self._begins = [0, *itertools.accumulate(sizes)]
        first = pieces[0]
        self.is_itself = len(pieces) == 1 and first.is_itself
        self._shape, self._dtype = (self._begins[-1],), torch.uint8
        if len(pieces) == 1:
            self._shape, self._dtype = first.lies.shape if first.is_itself else (first.count,), first.carrier
        self.bytes = math.prod(self._shape) * self._dtype.itemsize

    def room(self) -> torch.Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def packed(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(values) == 1:
            return self._pieces[0].packed(values[0])
        bits = self.room()
        for x, piece, at in zip(values, self._pieces, self._begins):
            self._part(bits, piece, at).copy_(piece.packed(x))
        return bits

    def unpacked(self, bits: torch.Tensor) -> list[torch.Tensor]:
        if len(self._pieces) == 1:
            return [self._pieces[0].unpacked(bits)]
        return [piece.unpacked(self._part(bits, piece, at)) for piece, at in zip(self._pieces, self._begins)]

    @staticmethod
    def _part(bits: torch.Tensor, piece: _Piece, at: int) -> torch.Tensor:
        return bits[at : at + piece.count * piece.carrier.itemsize].view(piece.carrier)


class _Piece:
    """How the elements of a value travel, each once, in the order of memory.

    Attributes:
        carrier: the dtype of what travels.
        count: how many of these there are.
        is_itself: whether the value travels as it is.
    """

    def __init__(self, lies: Lies) -> None:
        self.lies, self.carrier = lies, _carrier(lies.dtype)
        self._is_dense = is_dense(lies)
        # without what is expanded
        self._narrowed = tuple(1 if s == 0 else n for s, n in zip(lies.stride, lies.shape, strict=True))
        elements = math.prod(lies.shape if self._is_dense else self._narrowed)
        self.count = elements * (lies.dtype.itemsize // self.carrier.itemsize)
        in_order = torch.empty(lies.shape, device="meta").stride() == lies.stride
        self.is_itself = in_order and self.carrier == lies.dtype

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        lies = self.lies
        if self._is_dense:
            if x.stride() != lies.stride:
                x = _empty(lies.shape, lies).copy_(x)
            flat = x.as_strided((x.numel(),), (1,))
        else:
            for dim, size in enumerate(self._narrowed):
                x = x.narrow(dim, 0, size)
            flat = x.contiguous().view(-1)
        flat = flat.clone() if flat.is_conj() or flat.is_neg() else flat
        return flat.view(self.carrier)

    def unpacked(self, bits: torch.Tensor) -> torch.Tensor:
        """The value again, lying as it lay."""
        lies = self.lies
        if self.is_itself:
            return bits.view(lies.shape)
        flat = bits.view(lies.dtype)
        if self._is_dense:
            return flat.as_strided(lies.shape, lies.stride)
        return _empty(self._narrowed, lies).copy_(flat.view(self._narrowed)).as_strided(lies.shape, lies.stride)


def _empty(shape: tuple[int, ...], lies: Lies) -> torch.Tensor:
    return torch.empty_strided(shape, lies.stride, dtype=lies.dtype, device=lies.device)


def is_dense(lies: Lies) -> bool:
    """Whether the elements fill a piece of memory, each once."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(lies.stride, lies.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """What backends send in the place of a dtype that they do not know."""
    if dtype in dtypes.CARRIED:
        return dtypes.CARRIED[dtype]
    if dtype.is_complex:
        return dtype.to_real()
    return torch.uint8 if dtype.itemsize == 1 else dtype
