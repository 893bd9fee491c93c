"""torch's own metadata of a checkpoint, a pickle: written for other programs, and read, with care, from them."""

from __future__ import annotations

import functools
import importlib
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, ClassVar

import torch

from .._core import torch_internals
from .stored_leaves import Chunk, Stored


@functools.cache
def _classes() -> Any:
    """torch's classes of metadata: imported when something is saved or loaded."""
    return importlib.import_module("torch.distributed.checkpoint.metadata")


def packed(leaves: Sequence[Stored], keys: Mapping[str, tuple[str, ...]], saved_as: str) -> bytes:
    """The pickle for these leaves. What many of them share is in it once."""
    theirs, stored_at = _classes(), torch_internals.stored_at()
    kinds: dict[Any, Any] = {}
    boxes: dict[Any, Any] = {}
    shapes: dict[Any, torch.Size] = {}
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for one in leaves:
        if one.dtype is None or one.shape is None:
            described[one.name] = theirs.BytesStorageMetadata()
            places[theirs.MetadataIndex(one.name)] = stored_at(*one.chunks[0][2:5])
            continue
        chunks = list[Any]()
        for i, chunk in enumerate(one.chunks):
            box = boxes.get(chunk[:2])
            if box is None:
                box = boxes[chunk[:2]] = theirs.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            chunks.append(box)
            places[theirs.MetadataIndex(one.name, box.offsets, i)] = stored_at(chunk.file, chunk.offset, chunk.length)
        properties = kinds.get(one.dtype)
        if properties is None:
            properties = kinds[one.dtype] = theirs.TensorProperties(dtype=one.dtype)
        shape = shapes.setdefault(one.shape, torch.Size(one.shape))
        described[one.name] = theirs.TensorStorageMetadata(properties, shape, chunks)
    made = theirs.Metadata(
        described, planner_data=dict(keys), storage_data=places, storage_meta=theirs.StorageMeta(save_id=saved_as)
    )
    return pickle.dumps(made)


def unpacked(data: bytes) -> tuple[dict[str, Stored], str | None]:
    """The leaves, and as what the checkpoint was saved; any exception for what is no metadata."""
    theirs = _classes()
    found = _Plain(io.BytesIO(data)).load()
    if not isinstance(found, theirs.Metadata):
        raise ValueError(f"it holds a {type(found).__name__}")
    places = found.storage_data
    count = sum(
        len(x.chunks) for x in found.state_dict_metadata.values() if isinstance(x, theirs.TensorStorageMetadata)
    )
    if count > 10 * len(places):  # one list of chunks for many leaves: it would take long to look through
        raise ValueError(f"it has {count} pieces, and says of {len(places)} where they are")
    leaves = dict[str, Stored]()
    for name, what in found.state_dict_metadata.items():
        if isinstance(what, theirs.BytesStorageMetadata):
            leaves[name] = Stored(name, None, None, None, (_chunk(places, name, None, (), ()),))
        elif isinstance(what, theirs.TensorStorageMetadata):
            chunks = tuple(
                _chunk(places, name, box.offsets, tuple(box.offsets), tuple(box.sizes)) for box in what.chunks
            )
            leaves[name] = Stored(name, None, what.properties.dtype, tuple(what.size), chunks)
        else:
            raise ValueError(f"{name} is a {type(what).__name__}")
    return leaves, getattr(found.storage_meta, "save_id", None)


def _chunk(places: Any, name: str, key: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
    at = places.get(_classes().MetadataIndex(name, key))
    if not isinstance(at, torch_internals.stored_at()):
        raise ValueError(f"it does not say where {name} is")
    if changed := getattr(at, "transform_descriptors", None):
        raise ValueError(f"{name} is stored as changed by {', '.join(map(str, changed))}, which vescale_fn cannot undo")
    return Chunk(offsets, sizes, at.relative_path, at.offset, at.length, None)


class _Plain(pickle._Unpickler):  # in Python: the one in C takes memory for numbers in the file, for its memo, too
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

    def _build(self) -> None:
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError("it changes a class")
        self.load_build()

    dispatch: ClassVar[Any] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }
    dispatch[pickle.BUILD[0]] = _build


_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
