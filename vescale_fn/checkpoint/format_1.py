"""Checkpoints of format 1, which vescale_fn wrote before 0.1.0: the places of pieces stand in torch's metadata alone."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import torch_metadata
from .stored_leaves import Stored


class Manifest(NamedTuple):
    """What such a manifest says."""

    leaves: Mapping[str, Stored]
    shape: Any
    files: Mapping[str, int]
    crc: int


def read(data: bytes, packed: bytes) -> Manifest | None:
    """What the manifest `data` and torch's metadata `packed` say together; None where `data` is not of format 1.

    Any exception means that they are damaged.
    """
    outer = json.loads(data)
    if outer["format"] != 1:
        return None
    body = outer["manifest"]
    if zlib.crc32(body.encode()) != outer["crc32"]:
        raise ValueError("its checksum does not fit")
    said = json.loads(body)
    if said["metadata"] != [len(packed), zlib.crc32(packed)]:
        raise ValueError("torch's metadata is not what was written with it")
    crcs = {(file, offset, length, name): crc for file, offset, length, crc, name in said["sums"]}
    found, _ = torch_metadata.unpacked(packed)
    leaves = {
        name: one._replace(
            kind=said["kinds"][name],
            chunks=tuple(c._replace(crc=crcs[c.file, c.offset, c.length, name]) for c in one.chunks),
        )
        for name, one in found.items()
    }
    return Manifest(leaves, said["shape"], said["files"], outer["crc32"])
