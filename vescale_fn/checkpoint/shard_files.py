"""One rank's share of a checkpoint, written to a file of its own as torch.distributed.checkpoint has it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

from .paths import failing
from .stored_leaves import Chunk
from .tensor_streams import ALIGNED, form, numbers


class Item(NamedTuple):
    """A piece of a leaf, or a Python value."""

    name: str
    path: str  # of the leaf, in the user's words
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: Any


class Written(NamedTuple):
    """What one rank has written."""

    chunks: list[tuple[str, Chunk]]  # of which leaf
    files: dict[str, int]


class _Summing:
    """A file, with the length and the CRC-32 of what is written to it."""

    def __init__(self, file: Any) -> None:
        self.file, self.crc, self.length = file, 0, 0

    def write(self, data: Any, /) -> int:
        self.crc = zlib.crc32(data, self.crc)
        n = self.file.write(data)
        self.length += n
        return n

    def flush(self) -> None:
        pass


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory of the CPU, with nothing around it that would be written too."""
    x = x.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def write(folder: Path, name: Path, rank: int, items: Sequence[Item], where: str) -> Written:
    """Write these items into the folder, which will be called `name`, and flush them to the disk."""
    if not items:
        return Written([], {})
    file_name = f"__{rank}_0.distcp"
    chunks, offset, at = list[tuple[str, Chunk]](), 0, items[0].path
    try:
        with open(folder / file_name, "wb") as file:
            for item in items:
                at = item.path
                offset += file.write(bytes(-offset % ALIGNED))
                summing = _Summing(file)
                _write(summing, item.data)
                chunk = Chunk(item.offsets, item.sizes, file_name, offset, summing.length, summing.crc)
                chunks.append((item.name, chunk))
                offset += summing.length
            at = ""
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with failing(where, name, at):
            raise OSError(error.errno, error.strerror or str(error)) from error
    except RuntimeError as error:  # of torch.save, which wraps what a write raised
        cause = error.__context__ or error.__cause__
        if isinstance(cause, BaseException) and not isinstance(cause, Exception):
            raise cause from None  # an interrupt
        with failing(where, name, at):
            raise cause if isinstance(cause, OSError) else OSError(0, str(error)) from error
    return Written(chunks, {file_name: offset})


def _write(file: _Summing, data: Any) -> None:
    """Write what `torch.save` writes, by the form of such tensors where there is one."""
    made = None
    if isinstance(data, torch.Tensor):
        data = on_cpu(data)
        made = form(data.dtype, tuple(data.shape))
    if made is None:
        torch.save(data, cast("IO[bytes]", file))
        return
    content = numbers(data)
    before, after = made.around(content)
    for part in (before + bytes(content) + after,) if made.length < 2**16 else (before, content, after):
        file.write(part)
