"""What `torch.save` writes of a contiguous tensor: a zip file, whose beginning and end depend on its dtype and sizes alone.

So they are made once for all tensors of a kind, to write them without `torch.save`, which takes ten times as long for a
small one, and to find the numbers in what is read: where beginning and end are those, dtype and sizes are right, too.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from .._core import torch_internals
from .._core.base import dtypes

ALIGNED = 64  # bytes: at a multiple of it begins each piece, and in it its numbers
_STORAGES: dict[torch.dtype, Any] = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.bool: torch.BoolStorage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}
_LOCAL, _CENTRAL, _END = "<4s5H3I2H", "<4s6H3I5H2I", "<4s4H2IH"  # of a zip file: of each file in it, and at the end
_DATE = 0x21  # the first that a zip file can have
_MOST = 2**32 - 2**20  # bytes, above which a zip file has another form


class Form(NamedTuple):
    """What comes before and after the numbers; between its two parts each time their CRC-32."""

    head: tuple[bytes, bytes]
    tail: tuple[bytes, bytes]
    length: int  # of the numbers, in bytes

    @property
    def start(self) -> int:
        """Where the numbers begin."""
        return len(self.head[0]) + 4 + len(self.head[1])

    @property
    def total(self) -> int:
        """The length of the whole."""
        return self.start + self.length + len(self.tail[0]) + 4 + len(self.tail[1])

    def fits(self, data: memoryview) -> bool:
        """Whether these bytes are of this form."""
        if len(data) != self.total:
            return False
        start, end = self.start, self.start + self.length
        return (
            data[: len(self.head[0])] == self.head[0]
            and data[len(self.head[0]) + 4 : start] == self.head[1]
            and data[end : end + len(self.tail[0])] == self.tail[0]
            and data[end + len(self.tail[0]) + 4 :] == self.tail[1]
        )

    def around(self, numbers: Any) -> tuple[bytes, bytes]:
        """What to write before and after these numbers."""
        crc = struct.pack("<I", zlib.crc32(numbers))
        return crc.join(self.head), crc.join(self.tail)


@functools.lru_cache(maxsize=1024)
def form(dtype: torch.dtype, sizes: tuple[int, ...]) -> Form | None:
    """The form of such a tensor; None for one that `torch.save` has to write."""
    length = math.prod(sizes) * dtype.itemsize
    if dtype not in _STORAGES or length > _MOST or sys.byteorder != "little":
        return None
    files = [
        ("archive/data.pkl", _pickled(dtype, sizes)),
        ("archive/version", b"3\n"),
        ("archive/byteorder", b"little"),
    ]
    head, entries = b"", list[bytes]()
    for name, data in files:
        entries.append(_central(name, zlib.crc32(data), len(data), len(head)))
        head += _local(name, zlib.crc32(data), len(data)) + data
    at, name = len(head), "archive/data/0"
    padding = -(at + struct.calcsize(_LOCAL) + len(name) + 4) % ALIGNED  # as an extra field, of a header and nothing
    head += _local(name, 0, length, b"FB" + struct.pack("<H", padding) + bytes(padding))
    entries.append(_central(name, 0, length, at))
    central = b"".join(entries)
    tail = central + struct.pack(_END, b"PK\5\6", 0, 0, len(entries), len(entries), len(central), len(head) + length, 0)
    crcs = at + 14, len(central) - len(entries[-1]) + 16
    return Form((head[: crcs[0]], head[crcs[0] + 4 :]), (tail[: crcs[1]], tail[crcs[1] + 4 :]), length)


def _local(name: str, crc: int, length: int, extra: bytes = b"") -> bytes:
    fixed = struct.pack(_LOCAL, b"PK\3\4", 20, 0, 0, 0, _DATE, crc, length, length, len(name), len(extra))
    return fixed + name.encode() + extra


def _central(name: str, crc: int, length: int, at: int) -> bytes:
    sizes = crc, length, length, len(name)
    return struct.pack(_CENTRAL, b"PK\1\2", 20, 20, 0, 0, 0, _DATE, *sizes, 0, 0, 0, 0, 0, at) + name.encode()


class _Tensor(NamedTuple):
    dtype: torch.dtype
    sizes: tuple[int, ...]

    def __reduce__(self) -> Any:
        strides = [1]
        for size in self.sizes[:0:-1]:
            strides.insert(0, strides[0] * max(size, 1))
        return torch_internals.rebuild_tensor, (
            _Storage(self),
            0,
            self.sizes,
            tuple(strides[: len(self.sizes)]),
            False,
            OrderedDict(),
        )


class _Storage(NamedTuple):
    of: _Tensor


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is _Storage:
            return "storage", _STORAGES[obj.of.dtype], "0", "cpu", math.prod(obj.of.sizes)
        return None


def _pickled(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, 2).dump(_Tensor(dtype, sizes))
    return buffer.getvalue()


def numbers(x: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return dtypes.as_bytes(x).numpy().data


def check_zip(file: Any, length: int) -> int:
    """Raise a ValueError for a zip file that is larger than its `length` once it is read, before it is read; where that is
    harmless, how many bytes its largest pickle has. What is no zip file is as large as it is."""
    if not zipfile.is_zipfile(file):
        return length
    with zipfile.ZipFile(file) as archive:
        files = archive.infolist()
        whole = sum(each.file_size for each in files)
        if whole > length:
            raise ValueError(f"it holds {whole} bytes in {length}: it is compressed, as torch.save never does it")
        pickles = [each for each in files if each.filename.endswith(".pkl")]
        for each in pickles:
            check_pickle(archive.read(each))
        return max([each.file_size for each in pickles], default=0)


def check_pickle(data: bytes) -> None:
    """Raise a ValueError for a pickle that names what makes memory of a number."""
    for name in b"c__builtin__\nbytearray\n", b"cbuiltins\nbytearray\n":
        if name in data:
            raise ValueError("it makes a bytearray, of any size, which no tensor and no plain value needs")
