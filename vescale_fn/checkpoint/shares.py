"""What one process holds of a tree, as one flat image of bytes, and a tree put together from such images."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .._core.arrays.array import is_array, spec_of
from .._core.base.errors import CheckpointError
from .._core.base.messages import report
from . import chunks, targets
from .leaf_kinds import leaves_of
from .names import named, rebuilt

ALIGN = 64  # bytes


class ImagePart(NamedTuple):
    """A contiguous part of a leaf, and where it stands in an image."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return self.name, self.offsets

    @property
    def nbytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize

    def of(self, image: torch.Tensor) -> torch.Tensor:
        """The part itself."""
        return self.bytes_in(image).view(self.dtype).view(self.sizes)

    def bytes_in(self, image: torch.Tensor) -> torch.Tensor:
        """Its bytes."""
        return image[self.start : self.start + self.nbytes]


class Table(NamedTuple):
    """What is in an image: parts of tensors, and the leaves that are none, whole."""

    parts: tuple[ImagePart, ...]
    values: dict[str, Any]

    @property
    def form(self) -> tuple[Any, ...]:
        """What stays the same from step to step."""
        return self.parts, tuple((name, type(x)) for name, x in self.values.items())


class Share:
    """What this process holds of a tree.

    Raises:
        CheckpointError: leaves that cannot be stored, or of which a sum over ranks is still to be made.
    """

    def __init__(self, tree: Any, where: str) -> None:
        values, parts, self._tensors, at = dict[str, Any](), list[ImagePart](), list[torch.Tensor](), 0
        unreduced = list[str]()
        for leaf in leaves_of(named(tree, where, "state")[0], where):
            if not leaf.is_tensor:
                values[leaf.name] = leaf.stored
                continue
            if is_array(leaf.stored) and spec_of(leaf.stored).unreduced:
                unreduced.append(f"{leaf.path} is {spec_of(leaf.stored)!r}")
                continue
            for piece in chunks.held(leaf.stored):
                part = ImagePart(leaf.name, piece.offsets, tuple(piece.sizes), leaf.stored.dtype, at)
                at += -(-part.nbytes // ALIGN) * ALIGN
                parts.append(part)
                self._tensors.append(piece.tensor)
        if unreduced:
            raise CheckpointError(
                report(
                    where, "sums over ranks are still to be made of leaves", unreduced, "vfn.with_sharding(x, P(...))"
                )
            )
        self.table = Table(tuple(parts), values)
        self._head = pickle.dumps(self.table)
        self._begin = -(-(8 + len(self._head)) // ALIGN) * ALIGN
        self.nbytes = self._begin + at

    def write(self, image: torch.Tensor) -> None:
        """Write it into as many bytes."""
        head = struct.pack("<Q", len(self._head)) + self._head
        image[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for part, tensor in zip(self.table.parts, self._tensors, strict=True):
            part.of(image[self._begin :]).copy_(tensor)


def opened(image: torch.Tensor) -> tuple[Table, torch.Tensor]:
    """What is in an image, and the bytes that its parts are in."""
    (size,) = struct.unpack("<Q", bytes(image[:8].tolist()))
    return pickle.loads(image[8 : 8 + size].numpy().tobytes()), image[-(-(8 + size) // ALIGN) * ALIGN :]


class Filling:
    """A tree like another, whose memory is made and still to be filled."""

    def __init__(self, like: Any, where: str) -> None:
        self._where = where
        leaves, self._treedef = named(like, where, "state")
        found = [targets.of_like(one) for one in leaves]
        if failures := [one for one in found if isinstance(one, str)]:
            raise CheckpointError(report(where, "the state has leaves that cannot be kept", failures))
        self._wanted = [one for one in found if isinstance(one, targets.Target)]
        self._made = {one.name: targets.made(one) for one in self._wanted if one.shape is not None}

    def pieces(self) -> Iterator[tuple[tuple[str, tuple[int, ...]], torch.Tensor]]:
        """What is to be filled, by names and offsets; the same one perhaps several times."""
        for name, one in self._made.items():
            for piece in one.parts:
                if piece.tensor.numel():
                    yield (name, tuple(piece.offsets)), piece.tensor

    def finished(self, values: dict[str, Any]) -> Any:
        """The tree, with these leaves that are no tensors."""
        plain = {one.name for one in self._wanted} - self._made.keys()
        if plain != values.keys():
            differ = ", ".join(sorted(plain ^ values.keys()))
            raise CheckpointError(report(self._where, f"the state that was kept has other leaves: {differ}"))
        leaves = {**values, **{name: targets.finished(one) for name, one in self._made.items()}}
        return rebuilt(self._treedef, [leaves[one.name] for one in self._wanted])
