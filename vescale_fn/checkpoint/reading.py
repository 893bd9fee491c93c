"""Tensors that `torch.save` has written, found in the bytes of its zip and not copied out of them."""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_HEADER, _NAME_LENGTH = 30, 26  # of a file in a zip: how long its header is, and where that says how long the name is


class Reader:
    """Reads parts of files, into memory that it uses again for the next one."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def read(self, path: Path, offset: int, length: int) -> memoryview:
        """These bytes, or as many as there are; until the next call."""
        if len(self._memory) < length:
            self._memory = bytearray(length)
        found, n = memoryview(self._memory), 0
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while n < length and (more := file.readinto(found[n:length])):
                n += more
        return found[:n]


def loaded(data: memoryview) -> Any:
    """What `torch.save` has written."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def tensor(data: memoryview, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
    """The contiguous tensor that `torch.save` has written, as a part of these bytes."""
    count = math.prod(sizes)
    start = _start(data, count * dtype.itemsize)
    if start is None:
        return loaded(data)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start).view(tuple(sizes))


def _start(data: memoryview, length: int) -> int | None:
    """Where the numbers begin, if they lie there as the memory of this machine has them."""
    if sys.byteorder != "little" or not length:
        return None
    with zipfile.ZipFile(_View(data)) as archive:
        found = [each for each in archive.infolist() if each.filename.endswith("/data/0")]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED or found[0].file_size != length:
        return None
    at = found[0].header_offset
    return at + _HEADER + sum(struct.unpack_from("<HH", data, at + _NAME_LENGTH))


class _View(io.RawIOBase):
    """Bytes as a file."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        end = len(self._data) if size is None or size < 0 else self._at + size
        found = bytes(self._data[self._at : end])
        self._at += len(found)
        return found
