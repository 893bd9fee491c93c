"""A stored leaf, and the pieces in which it is stored: as plain data."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .._core.base.context import Restored


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without collections of garbage: where thousands of small objects are made and none is garbage, they take most of
    the time, as each looks through all the objects of the program."""
    with Restored(_collect, gc.isenabled()), Restored(_collect, gc.isenabled()):
        gc.disable()
        yield


def _collect(enabled: bool) -> None:
    if enabled:
        gc.enable()


class Chunk(NamedTuple):
    """A box of a tensor, or a whole Python value, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str  # its path in the folder
    offset: int
    length: int
    crc: int | None  # of these bytes; None: not said


class Stored(NamedTuple):
    """A leaf as it is stored."""

    name: str
    kind: str | None  # as of `leaf_kinds`; None: not said, a tensor or a Python value
    dtype: torch.dtype | None  # None: a Python value
    shape: tuple[int, ...] | None
    chunks: tuple[Chunk, ...]
