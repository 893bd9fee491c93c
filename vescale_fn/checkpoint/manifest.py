"""What a checkpoint's folder says of itself: a manifest, and beside it torch's own metadata for other programs.

The manifest (`vescale_fn.json`) has three lines of JSON: its format and the checksums of the other two; which files there
are; the shape of the tree, and each leaf with the pieces in which it is stored and their checksums.
`.metadata` is what any torch.distributed.checkpoint reads and writes; it is read where there is no manifest. Whatever they
say is compared with itself and with the files before memory is taken for a value.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._core.base.errors import CheckpointError
from .._core.base.messages import report
from . import format_1, torch_metadata
from .names import outlined
from .paths import METADATA, failing
from .stored_leaves import Chunk, Stored
from .validation import problems

MANIFEST, FORMAT = "vescale_fn.json", 2


@dataclass(frozen=True)
class Contents:
    """What there is in a checkpoint."""

    leaves: Mapping[str, Stored] = field(default_factory=dict)
    shape: Any = None  # the outline of the tree; None where another program has written it
    files: Mapping[str, int] | None = None  # how many bytes each has; None where that is not said
    stamp: str = ""  # differs from that of any other checkpoint, whose values would be others
    fingerprint: Mapping[str, Any] | None = None  # of the process that saved it; None where that is not said


def write(
    folder: Path,
    leaves: Sequence[Stored],
    shape: Any,
    files: Mapping[str, int],
    keys: Mapping[str, tuple[str, ...]],
    fingerprint: Mapping[str, Any],
) -> None:
    """Write both, to the disk. `keys` are the names of the leaves in parts."""
    packed = torch_metadata.packed(leaves, keys, MANIFEST)
    there = {
        "torch": torch.__version__,
        "files": dict(files),
        "metadata": [len(packed), zlib.crc32(packed)],
        "fingerprint": dict(fingerprint),
    }
    tree = {
        "shape": shape,
        "leaves": [
            [one.name, one.kind, None if one.dtype is None else str(one.dtype)[6:], one.shape, one.chunks]
            for one in leaves
        ],
    }
    lines = [json.dumps(each).encode() for each in (there, tree)]
    lines.insert(0, json.dumps({"format": FORMAT, "crc32": [zlib.crc32(line) for line in lines]}).encode())
    for name, data in (METADATA, packed), (MANIFEST, b"\n".join(lines)):
        with open(folder / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


_OURS = re.compile(r"__\d+_\d+\.distcp")


def is_name_of_ours(name: str) -> bool:
    """Whether a file of a checkpoint can be called so."""
    return name in (METADATA, MANIFEST) or _OURS.fullmatch(name) is not None


def files_of(folder: Path) -> frozenset[str] | None:
    """The files that belong to a checkpoint of ours; None for any other folder, and for a damaged manifest."""
    try:
        packed = (folder / METADATA).read_bytes()
        data = (folder / MANIFEST).read_bytes()
        if (older := _of_format_1(folder, "", data, packed)) is not None:
            files = older.files
        else:
            first, second, *_ = [*data.split(b"\n", 2), b"", b""]
            files, *_ = _files(folder, "", first, second, packed)
        return frozenset(name for name in (*files, METADATA, MANIFEST) if is_name_of_ours(name))
    except (OSError, CheckpointError):
        return None


def read(folder: Path, where: str) -> Contents:
    """What there is in a folder: checked, against the lengths of its files too."""
    with failing(where, folder):
        packed = (folder / METADATA).read_bytes()
        ours = (folder / MANIFEST).exists()
    contents = _ours(folder, where, packed) if ours else _of_others(folder, where, packed)
    found = problems(folder, contents.leaves, contents.files)
    if found:
        raise CheckpointError(report(where, f"{folder} is damaged", found, "another checkpoint"))
    return contents


def _of_others(folder: Path, where: str, packed: bytes) -> Contents:
    try:
        leaves, saved_as = torch_metadata.unpacked(packed)
    except Exception as error:
        raise CheckpointError(
            report(
                where,
                f"{folder / METADATA} is damaged, or no metadata of torch.distributed.checkpoint",
                [f"{type(error).__name__}: {error}"],
            )
        ) from error
    if saved_as == MANIFEST:
        raise CheckpointError(report(where, f"{folder} is damaged", [f"{MANIFEST} is missing"], "another checkpoint"))
    return Contents(leaves)


def _ours(folder: Path, where: str, packed: bytes) -> Contents:
    with failing(where, folder):
        data = (folder / MANIFEST).read_bytes()
    if (older := _of_format_1(folder, where, data, packed)) is not None:
        return Contents(older.leaves, older.shape, older.files, f"{older.crc:08x}")
    first, second, third, *_ = [*data.split(b"\n", 2), b"", b"", b""]
    files, crc, fingerprint = _files(folder, where, first, second, packed)
    if zlib.crc32(third) != crc:
        raise CheckpointError(report(where, f"{folder / MANIFEST} is damaged", [_UNFIT]))
    try:
        inner = json.loads(third)
        leaves = {
            name: Stored(
                name,
                kind,
                _DTYPES.get(dtype, dtype),
                None if shape is None else tuple(shape),
                tuple(Chunk(tuple(offsets), tuple(sizes), *rest) for offsets, sizes, *rest in chunks),
            )
            for name, kind, dtype, shape, chunks in inner["leaves"]
        }
        sound = len(leaves) == len(inner["leaves"]) and sorted(outlined(inner["shape"])) == sorted(leaves)
        sound = sound and all(chunk.crc is not None for one in leaves.values() for chunk in one.chunks)
    except _MALFORMED:
        sound, leaves, inner = False, {}, {"shape": None}
    if not sound:
        raise CheckpointError(report(where, f"{folder / MANIFEST} is damaged", ["its parts do not fit together"]))
    return Contents(leaves, inner["shape"], files, f"{crc:08x}", fingerprint)


def _of_format_1(folder: Path, where: str, data: bytes, packed: bytes) -> format_1.Manifest | None:
    if not data.startswith(b'{"format": 1,'):
        return None
    try:
        found = format_1.read(data, packed)
        if found is None or sorted(outlined(found.shape)) != sorted(found.leaves):
            raise ValueError("its parts do not fit together")
    except Exception as error:
        text = [f"{type(error).__name__}: {error}"]
        raise CheckpointError(report(where, f"{folder / MANIFEST} is damaged", text)) from error
    return found


_DTYPES: Mapping[Any, Any] = {str(x)[6:]: x for x in vars(torch).values() if isinstance(x, torch.dtype)} | {None: None}
_MALFORMED = ValueError, KeyError, TypeError, AttributeError, RecursionError  # what is no manifest raises one of these


_UNFIT = "its checksum does not fit"


def _files(
    folder: Path, where: str, first: bytes, second: bytes, packed: bytes
) -> tuple[dict[str, int], int, dict[str, Any] | None]:
    """How long the files are as the manifest has it, the checksum of its third line, and the fingerprint; compared with
    torch's metadata."""
    version, there = None, None
    try:
        outer = json.loads(first)
        version, (mine, crc) = outer["format"], outer["crc32"]
        if version == FORMAT and zlib.crc32(second) == mine:
            there = json.loads(second)
            files, (size, expected), saved_by = dict(there["files"]), there["metadata"], there.get("fingerprint")
            if len(packed) != size or zlib.crc32(packed) != expected:
                what = f"it has {len(packed)} bytes of {size}" if len(packed) != size else _UNFIT
                raise CheckpointError(report(where, f"{folder / METADATA} is damaged", [what]))
            return files, int(crc), None if saved_by is None else dict(saved_by)
    except _MALFORMED:
        pass
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(report(where, f"{folder / MANIFEST} is of a newer vescale_fn", fix="a newer vescale_fn"))
    raise CheckpointError(report(where, f"{folder / MANIFEST} is damaged", [_UNFIT]))
