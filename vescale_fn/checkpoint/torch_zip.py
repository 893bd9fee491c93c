"""Parts of files, and the tensors in them: found in the bytes that `torch.save` has written, and not copied out of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import tensor_streams


class Reader:
    """Reads parts of files, into memory that it uses again for the next one."""

    def __init__(self) -> None:
        self._memory = bytearray()
        self._path: Path | None = None
        self._file: Any = None

    def read(self, path: Path, offset: int, length: int) -> memoryview:
        """These bytes, or as many as there are; until the next call."""
        if self._path != path:
            self.close()
            self._file, self._path = open(path, "rb", buffering=0), path
        if len(self._memory) < length:
            self._memory = bytearray(length)
        found, n = memoryview(self._memory), 0
        self._file.seek(offset)
        while n < length and (more := self._file.readinto(found[n:length])):
            n += more
        return found[:n]

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            self._file.close()
        self._file = self._path = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def loaded(data: memoryview) -> Any:
    """What `torch.save` has written."""
    file = io.BytesIO(data)
    tensor_streams.check_zip(file, len(data))
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def tensor(data: memoryview, dtype: torch.dtype, sizes: Sequence[int]) -> Any:
    """The contiguous tensor that `torch.save` has written, as a part of these bytes where they are as `save` writes them."""
    form = tensor_streams.form(dtype, tuple(sizes))
    if form is None or not form.length or not form.fits(data):
        return loaded(data)
    count = form.length // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=form.start).view(tuple(sizes))
