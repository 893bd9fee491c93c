"""Whether what a checkpoint says of itself can be true: boxes that cover each tensor once, files that are there and hold
what they should. So a value is never left unset, and never takes more memory than its files have bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .stored_leaves import Chunk, Stored

DIMS = 64  # as many as a tensor of torch can have


def problems(folder: Path, leaves: Mapping[str, Stored], files: Mapping[str, int] | None) -> list[str]:
    """What is wrong, a line each; `files` are the lengths that files should have."""
    found = [f"{_text(name)}: {what}" for name, one in leaves.items() if (what := _malformed(one)) is not None]
    if found:
        return found
    places = sorted(
        (chunk.file, chunk.offset, chunk.length, name) for name, one in leaves.items() for chunk in one.chunks
    )
    if files is not None:
        found = [f"{_text(name)} is no length of a file" for name, length in files.items() if not _is_count(length)]
        found += [f"the manifest does not list {name}" for name in {place[0] for place in places} - files.keys()]
        if found:
            return found
    lengths: dict[str, int | None] = {}
    for name in sorted({*(place[0] for place in places), *(files or ())}):
        outside = leads_out(folder, name)
        if outside is not None:
            found.append(outside)
        else:
            lengths[name] = (folder / name).stat().st_size if (folder / name).is_file() else None
    return found or _lost(places, lengths, files) or _overlapping(places)


def leads_out(folder: Path, name: str) -> str | None:
    """What is wrong with the path of a file, if it does not lie in the folder."""
    if "\0" in name or not name:
        return f"{name!r} is no path of a file"
    if os.path.isabs(name) or ".." in Path(name).parts:
        return f"{_text(name)} leads out of the folder"
    real = Path(os.path.realpath(folder / name))
    inside = [Path(os.path.realpath(folder))]
    for each in inside[0].parents:
        if each.name == "snapshots":  # of Hugging Face's cache, which keeps the files of all snapshots in one folder
            inside.append(each.parent / "blobs")
    if not any(real.is_relative_to(each) for each in inside):
        return f"{_text(name)} leads out of the folder, to {real}"
    return None


def _text(name: str) -> str:
    return name if name.isprintable() else repr(name)


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**63


def _malformed(one: Stored) -> str | None:
    """What of a leaf is not as it must be, whatever the files hold."""
    if not isinstance(one.kind, str | None) or not isinstance(one.name, str):
        return "its kind is no name"
    for chunk in one.chunks:
        if not isinstance(chunk.file, str) or not _is_count(chunk.offset) or not _is_count(chunk.length):
            return f"{chunk.file}, bytes from {chunk.offset}, {chunk.length} of them: no part of a file"
        if chunk.crc is not None and not _is_count(chunk.crc):
            return f"{chunk.crc} is no checksum"
    if one.shape is None and one.dtype is None:
        return None if len(one.chunks) == 1 and one.chunks[0][:2] == ((), ()) else "it has no single place"
    if one.shape is None or not isinstance(one.dtype, torch.dtype):
        return f"it has the dtype {one.dtype} and the shape {one.shape}"
    if (
        not all(map(_is_count, one.shape))
        or len(one.shape) > DIMS
        or math.prod(one.shape) * one.dtype.itemsize >= 2**63
    ):
        return f"no tensor has the shape {one.shape}"
    return _uncovered(one.shape, one.chunks, one.dtype.itemsize)


def _uncovered(shape: tuple[int, ...], chunks: Sequence[Chunk], itemsize: int) -> str | None:
    """Why these boxes are not each element of the shape once."""
    count, boxes = 0, list[Chunk]()
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return f"{_box(chunk)} has not its {len(shape)} dims"
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape):
            if not _is_count(offset) or not _is_count(size) or offset + size > whole:
                return f"{_box(chunk)} is not within its shape {shape}"
        length = math.prod(chunk.sizes)
        if length * itemsize > chunk.length:
            return f"{_box(chunk)} has {length * itemsize} bytes, but {chunk.length} are stored"
        count += length
        if length:
            boxes.append(chunk)
    total = math.prod(shape)
    if count != total:
        return f"its pieces have {count} elements of {total}"
    if total == 0 and chunks:
        ends = tuple(max(chunk.offsets[dim] + chunk.sizes[dim] for chunk in chunks) for dim in range(len(shape)))
        return None if ends == shape else f"its pieces end at {ends}, and its shape is {shape}"
    return _overlap(sorted(boxes)) if len(boxes) > 1 else None


def _overlap(boxes: Sequence[Chunk]) -> str | None:
    """Which of these boxes, in order of their offsets, overlap."""
    active = list[Chunk]()
    for chunk in boxes:
        active = [other for other in active if other.offsets[0] + other.sizes[0] > chunk.offsets[0]]
        for other in active:
            if all(a < b + n and b < a + m for a, m, b, n in zip(*chunk[:2], *other[:2], strict=True)):
                return f"{_box(other)} and {_box(chunk)} overlap"
        active.append(chunk)
    return None


def _box(chunk: Chunk) -> str:
    return f"the piece at {chunk.offsets} of sizes {chunk.sizes}"


def _lost(
    places: Iterable[tuple[str, int, int, str]], lengths: Mapping[str, int | None], files: Mapping[str, int] | None
) -> list[str]:
    """Files that are missing or too short, or have another length than they should, with the leaves that are not there."""
    found, lost = list[str](), dict[str, dict[str, None]]()
    for file, offset, length, name in places:
        if offset + length > (lengths[file] or 0) or lengths[file] is None:
            lost.setdefault(file, {})[name] = None
    for file, there in lengths.items():
        wanted = None if files is None else files.get(file)
        if there is None or file in lost or (wanted is not None and there != wanted):
            what = "is missing" if there is None else f"has {there} bytes{'' if wanted is None else f' of {wanted}'}"
            found.append(f"{file} {what}{f': {some(lost[file])}' if file in lost else ''}")
    return found


def _overlapping(places: Sequence[tuple[str, int, int, str]]) -> list[str]:
    """Places that share bytes: one of them is wrong, and many could make much memory of one small file."""
    for (file, offset, length, name), (other, start, n, after) in zip(places, places[1:]):
        if file == other and start < offset + length and n:
            return [f"{_text(name)} and {_text(after)} share bytes of {file}"]
    return []


def some(names: Iterable[str], most: int = 5) -> str:
    """The first few of these names."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more leaves" if len(listed) > most else "")
