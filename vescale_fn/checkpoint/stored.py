"""What a checkpoint's folder says of itself: torch's own metadata, and beside it a manifest with what that cannot say.

`.metadata` is what any torch.distributed.checkpoint reads and writes. The manifest (`vescale_fn.json`) has the shape of
the tree, the kind of each leaf, and checksums; a checkpoint that others have written has none.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import StorageMeta

from ..errors import CheckpointError, report
from .folders import METADATA, failing

MANIFEST, FORMAT = "vescale_fn.json", 1
Sum = tuple[str, int, int, int, str]  # file, offset, length, CRC-32, leaf


@dataclass(frozen=True)
class Manifest:
    """What we add to torch's metadata."""

    shape: Any = None  # the outline of the tree
    kinds: Mapping[str, str] = field(default_factory=dict)  # of each leaf
    files: Mapping[str, int] = field(default_factory=dict)  # how many bytes each has
    sums: tuple[Sum, ...] = ()
    stamp: str = ""  # differs from that of any other checkpoint, whose values would be others


def write(folder: Path, metadata: Metadata, manifest: Manifest) -> None:
    """Write both, to the disk."""
    metadata.storage_meta = StorageMeta(save_id=MANIFEST)  # without which it is damaged
    packed = pickle.dumps(metadata)
    body = json.dumps({
        "torch": torch.__version__,
        "shape": manifest.shape,
        "kinds": dict(manifest.kinds),
        "files": dict(manifest.files),
        "sums": manifest.sums,
        "metadata": [len(packed), zlib.crc32(packed)],
    })  # fmt: skip
    text = json.dumps({"format": FORMAT, "crc32": zlib.crc32(body.encode()), "manifest": body})
    for name, data in (METADATA, packed), (MANIFEST, text.encode()):
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
        manifest = _manifest(folder, "", (folder / METADATA).read_bytes())
    except (OSError, CheckpointError):
        return None
    return frozenset(name for name in (*manifest.files, METADATA, MANIFEST) if is_name_of_ours(name))


def read(folder: Path, where: str) -> tuple[Metadata, Manifest | None]:
    """Both, checked; None for a manifest that is not there."""
    with failing(where, folder):
        packed = (folder / METADATA).read_bytes()
        manifest = _manifest(folder, where, packed) if (folder / MANIFEST).exists() else None
    try:
        metadata = _Plain(io.BytesIO(packed)).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"it holds a {type(metadata).__name__}")
    except Exception as error:
        raise CheckpointError(report(
            where, f"{folder / METADATA} is damaged, or no metadata of torch.distributed.checkpoint",
            [f"{type(error).__name__}: {error}"])) from error  # fmt: skip
    if manifest is None and getattr(metadata.storage_meta, "save_id", None) == MANIFEST:
        raise CheckpointError(report(where, f"{folder} is damaged", [f"{MANIFEST} is missing"], "another checkpoint"))
    return metadata, manifest


def _manifest(folder: Path, where: str, packed: bytes) -> Manifest:
    try:
        outer = json.loads((folder / MANIFEST).read_bytes())
        newer = outer["format"] > FORMAT
        body = outer["manifest"]
        sound = zlib.crc32(body.encode()) == outer["crc32"] and outer["format"] > 0
        inner = json.loads(body) if sound and not newer else {}
    except (ValueError, KeyError, TypeError, AttributeError):
        newer = sound = False
        inner = {}
    if newer:
        raise CheckpointError(report(where, f"{folder / MANIFEST} is of a newer vescale_fn", fix="a newer vescale_fn"))
    if not sound:
        raise CheckpointError(report(where, f"{folder / MANIFEST} is damaged", ["its checksum does not fit"]))
    size, crc = inner["metadata"]
    if len(packed) != size or zlib.crc32(packed) != crc:
        what = f"it has {len(packed)} bytes of {size}" if len(packed) != size else "its checksum does not fit"
        raise CheckpointError(report(where, f"{folder / METADATA} is damaged", [what]))
    return Manifest(inner["shape"], inner["kinds"], inner["files"], tuple(map(tuple, inner["sums"])),
                    f"{outer['crc32']:08x}")  # fmt: skip


class _Plain(pickle.Unpickler):
    """Reads metadata, and nothing that a file made to do harm could name."""

    def find_class(self, module: str, name: str) -> Any:
        theirs = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        plain = (module, name) in _PLAIN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        if theirs or plain:
            found = super().find_class(module, name)
            if plain or (
                getattr(found, "__module__", None) == module and (is_dataclass(found) or issubclass(found, Enum))
            ):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata has")


_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
