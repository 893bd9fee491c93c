"""What can be loaded: a folder of torch.distributed.checkpoint, ours or anybody's. (`plain_files` has the other forms.)"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from .._core.base.errors import CheckpointError
from .._core.base.messages import dtype_text, report
from . import manifest
from .chunks import Piece
from .paths import METADATA, Mark, failing
from .stored_leaves import Chunk, Stored
from .torch_zip import Reader, loaded, tensor


class Entry(NamedTuple):
    """A leaf that is stored."""

    kind: str | None  # None: not said, a tensor or a Python value
    shape: tuple[int, ...] | None  # None: a Python value
    dtype: torch.dtype | None


class Source(Protocol):
    """Something that leaves can be read from."""

    path: Path
    mark: Mark  # which changes when another checkpoint takes the place of this one
    stamp: str  # the same on all ranks that have opened the same
    entries: dict[str, Entry]
    shape: Any  # the outline of the tree; None: a flat dictionary
    fingerprint: Mapping[str, Any] | None  # of the process that saved it; None: not said

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """These Python values."""
        ...

    def fill(self, wanted: Mapping[str, Sequence[Piece]]) -> None:
        """Write what is stored into these pieces of leaves."""
        ...


class Folder:
    """A folder of torch.distributed.checkpoint. Whatever is read is compared with its checksum, and with what it should be."""

    def __init__(self, path: Path, folder: Path, where: str) -> None:
        self.path, self._folder, self._where = path, folder, where
        self.mark = Mark(folder / METADATA)
        contents = manifest.read(folder, where)
        self.stamp, self.shape, self._leaves = contents.stamp, contents.shape, contents.leaves
        self.fingerprint = contents.fingerprint
        self.entries = {name: Entry(one.kind, one.shape, one.dtype) for name, one in self._leaves.items()}

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        with Reader() as reader:
            return {name: self._value(reader, self._leaves[name]) for name in names}

    def _value(self, reader: Reader, leaf: Stored) -> Any:
        value = self._read(reader, leaf, leaf.chunks[0])
        if leaf.kind not in (None, type(value).__name__):
            raise self._damaged(leaf, leaf.chunks[0], f"a {type(value).__name__} is stored, and no {leaf.kind}")
        return value

    def fill(self, wanted: Mapping[str, Sequence[Piece]]) -> None:
        todo = []
        for name, parts in wanted.items():
            leaf = self._leaves[name]
            for chunk in leaf.chunks:
                common = [each for part in parts if (each := _common(chunk, part)) is not None]
                if common:
                    todo.append((leaf, chunk, common))
        todo.sort(key=lambda each: (each[1].file, each[1].offset))
        with Reader() as reader:
            for leaf, chunk, common in todo:
                data = self._read(reader, leaf, chunk)
                for target, there, here, sizes in common:
                    _part(target, there, sizes).copy_(_part(data, here, sizes))

    def _read(self, reader: Reader, leaf: Stored, chunk: Chunk) -> Any:
        """A stored piece, or a value."""
        with failing(self._where, self.path, leaf.name):
            data = reader.read(self._folder / chunk.file, chunk.offset, chunk.length)
        if len(data) != chunk.length:
            raise self._damaged(leaf, chunk, "the file ends within it")
        if chunk.crc is not None and zlib.crc32(data) != chunk.crc:
            raise self._damaged(leaf, chunk, "the checksum does not fit")
        try:
            found = loaded(data) if leaf.dtype is None else tensor(data, leaf.dtype, chunk.sizes)
        except Exception as error:
            raise self._damaged(leaf, chunk, (str(error) or type(error).__name__).splitlines()[0]) from error
        if leaf.dtype is not None:
            self._check(leaf, chunk, found)
        return found

    def _check(self, leaf: Stored, chunk: Chunk, x: Any) -> None:
        assert leaf.dtype is not None
        if not isinstance(x, torch.Tensor) or (x.dtype, tuple(x.shape)) != (leaf.dtype, chunk.sizes):
            what = f"{dtype_text(x.dtype)}{list(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            wanted = f"{dtype_text(leaf.dtype)}{list(chunk.sizes)}"
            raise self._damaged(leaf, chunk, f"{what} is stored, and no {wanted}")

    def _damaged(self, leaf: Stored, chunk: Chunk, what: str) -> CheckpointError:
        where = f"in {chunk.file}, bytes {chunk.offset} to {chunk.offset + chunk.length}"
        failures = [f"{leaf.name}: {where}, {what}"]
        return CheckpointError(report(self._where, f"{self.path} is damaged", failures, "another checkpoint"))


_Common = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _common(chunk: Chunk, part: Piece) -> _Common | None:
    """What a stored box and a wanted one have in common: the target, the offsets there and in the box, the sizes."""
    if chunk.offsets == part.offsets and chunk.sizes == part.sizes:
        zeros = (0,) * len(part.sizes)
        return part.tensor, zeros, zeros, part.sizes
    there, here, sizes = list[int](), list[int](), list[int]()
    for a, m, b, n in zip(chunk.offsets, chunk.sizes, part.offsets, part.sizes, strict=True):
        begin, size = max(a, b), min(a + m, b + n) - max(a, b)
        if size <= 0:
            return None
        there.append(begin - b)
        here.append(begin - a)
        sizes.append(size)
    return part.tensor, tuple(there), tuple(here), tuple(sizes)


def _part(x: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    if tuple(x.shape) == sizes:
        return x
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        x = x.narrow(dim, offset, size)
    return x
