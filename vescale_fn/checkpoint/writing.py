"""One rank's share of a checkpoint, written to a file of its own as torch.distributed.checkpoint lays it out."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from .. import _torch
from .folders import failing
from .stored import Sum

ALIGNED = 64  # bytes: at a multiple of it begins each piece, and in it its numbers


class Item(NamedTuple):
    """A piece of a leaf, or a Python value."""

    index: MetadataIndex
    path: str  # of the leaf, in the user's words
    data: Any


class Written(NamedTuple):
    """What one rank has written."""

    places: dict[MetadataIndex, Any]  # for torch's metadata
    sums: list[Sum]
    files: dict[str, int]


class _Summing(io.RawIOBase):
    """A file, with the CRC-32 of what is written to it."""

    def __init__(self, file: Any) -> None:
        self.file, self.crc, self.length = file, 0, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.length += len(data)
        return self.file.write(data)


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory of the CPU, with nothing around it that would be written too."""
    x = x.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def write(folder: Path, name: Path, rank: int, items: Sequence[Item], where: str) -> Written:
    """Write these items into the folder, which will be called `name`, and flush them to the disk."""
    if not items:
        return Written({}, [], {})
    file_name = f"__{rank}_0.distcp"
    places, sums, offset, at = {}, list[Sum](), 0, items[0].path
    try:
        with open(folder / file_name, "wb") as file:
            for item in items:
                at, summing = item.path, _Summing(file)
                offset += file.write(bytes(-offset % ALIGNED))
                data = on_cpu(item.data) if isinstance(item.data, torch.Tensor) else item.data
                torch.save(data, cast("IO[bytes]", summing))
                places[item.index] = _torch.stored_at(file_name, offset, summing.length)
                sums.append((file_name, offset, summing.length, summing.crc, item.index.fqn))
                offset += summing.length
            at = ""
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with failing(where, name, at):
            raise OSError(error.errno, error.strerror or str(error)) from error
    except RuntimeError as error:  # of torch.save, which wraps what a write raised
        cause = error.__context__ or error.__cause__
        with failing(where, name, at):
            raise cause if isinstance(cause, OSError) else OSError(0, str(error)) from error
    return Written(places, sums, {file_name: offset})
