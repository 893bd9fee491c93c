"""What can be loaded: a folder of torch.distributed.checkpoint, ours or anybody's. (`plain_files` has the other forms.)"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint import BytesStorageMetadata, ChunkStorageMetadata, ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..errors import CheckpointError, report
from . import stored
from .folders import METADATA, Mark, failing
from .pieces import Piece
from .reading import Reader, loaded, tensor


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

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """These Python values."""
        ...

    def fill(self, wanted: Mapping[str, Sequence[Piece]]) -> None:
        """Write what is stored into these pieces of leaves."""
        ...


class Folder:
    """A folder of torch.distributed.checkpoint. Whatever is read is compared with its checksum."""

    def __init__(self, path: Path, folder: Path, where: str) -> None:
        self.path, self._folder, self._where = path, folder, where
        self.mark = Mark(folder / METADATA)
        self._metadata, self._manifest = stored.read(folder, where)
        self.stamp = "" if self._manifest is None else self._manifest.stamp
        self._reader = Reader()
        kinds: Mapping[str, str] = {}
        self.shape, self._sums = None, dict[tuple[str, int], tuple[int, int]]()
        if self._manifest is not None:
            self.shape, kinds = self._manifest.shape, self._manifest.kinds
            self._sums = {(file, offset): (length, crc) for file, offset, length, crc, _ in self._manifest.sums}
            self._check_files(self._manifest)
        self.entries = {
            name: Entry(kinds.get(name), None, None)
            if isinstance(what, BytesStorageMetadata)
            else Entry(kinds.get(name), tuple(what.size), what.properties.dtype)
            for name, what in self._metadata.state_dict_metadata.items()
        }

    def _check_files(self, manifest: stored.Manifest) -> None:
        """Raise for files that are missing or have another length, with the leaves that are in what is not there."""
        failures = []
        for name, size in manifest.files.items():
            there = (self._folder / name).stat().st_size if (self._folder / name).exists() else None
            if there != size:
                lost = dict.fromkeys(leaf for file, offset, length, _, leaf in manifest.sums
                                     if file == name and (there is None or offset + length > there))  # fmt: skip
                what = "is missing" if there is None else f"has {there} bytes of {size}"
                failures.append(f"{name} {what}: {_some(lost)}" if lost else f"{name} {what}")
        if failures:
            raise CheckpointError(report(self._where, f"{self.path} is damaged", failures, "another checkpoint"))

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: self._read(MetadataIndex(name), name) for name in names}

    def fill(self, wanted: Mapping[str, Sequence[Piece]]) -> None:
        todo: dict[MetadataIndex, list[tuple[ReadItem, torch.Tensor]]] = {}
        for name, parts in wanted.items():
            targets = {part.offsets: part.tensor for part in parts}
            boxes = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in parts]
            whole: Any = self._metadata.state_dict_metadata[name]
            for item in create_read_items_for_chunk_list(name, whole, boxes):
                target = targets[tuple(item.dest_index.offset or ())]
                todo.setdefault(item.storage_index, []).append((item, target))
        places = self._metadata.storage_data
        known = {index: (places[index].relative_path, places[index].offset) for index in todo if index in places}
        for index in sorted(todo, key=lambda index: known.get(index, ("", 0))):
            whole = self._metadata.state_dict_metadata[index.fqn]
            sizes = next(chunk.sizes for chunk in whole.chunks if chunk.offsets == index.offset)
            data = self._read(index, index.fqn, whole.properties.dtype, sizes)
            for item, target in todo[index]:
                _part(target, item.dest_offsets, item.lengths).copy_(_part(data, item.storage_offsets, item.lengths))

    def _read(self, index: MetadataIndex, name: str, dtype: Any = None, sizes: Sequence[int] = ()) -> Any:
        """A stored piece, or (without a dtype) a value; its checksum compared."""
        try:
            at = self._metadata.storage_data[index]
        except KeyError:
            raise self._damaged(name, "the metadata does not say where it is") from None
        with failing(self._where, self.path, name):
            data = self._reader.read(self._folder / at.relative_path, at.offset, at.length)
        where = f"in {at.relative_path}, bytes {at.offset} to {at.offset + at.length}"
        length, crc = self._sums.get((at.relative_path, at.offset), (at.length, None))
        if len(data) != length:
            raise self._damaged(name, f"{at.relative_path} ends within it")
        if crc is not None and zlib.crc32(data) != crc:
            raise self._damaged(name, f"{where}, the checksum does not fit")
        try:
            return loaded(data) if dtype is None or crc is None else tensor(data, dtype, sizes)
        except Exception as error:
            raise self._damaged(name, f"{where}: {str(error).splitlines()[0]}") from error

    def _damaged(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(
            report(self._where, f"{self.path} is damaged", [f"{name}: {what}"], "another checkpoint")
        )


def _part(x: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        x = x.narrow(dim, offset, size)
    return x


def _some(names: Sequence[str] | Mapping[str, Any], most: int = 5) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more leaves" if len(listed) > most else "")
