"""Which contiguous parts of a value each rank holds. A block may be several: where an uneven dim is split by two axes
against the order of the mesh, or where split dims were merged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._core import torch_internals
from .._core.arrays.array import Array, is_array, mesh_of, moved_together, place, spec_of
from .._core.arrays.placement import from_blocks
from .._core.distributed.communicator import coordinates
from .._core.distributed.mesh import communicator_of
from .._core.distributed.places import is_elsewhere
from .._core.sharding.index_map import axes_of, index_runs, local_indices, local_shape
from .._core.sharding.spec import P


class Piece(NamedTuple):
    """A contiguous part of a whole value, and the memory of it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor  # a view


def cut(block: torch.Tensor, where: Sequence[Sequence[int]]) -> Iterator[Piece]:
    """The pieces of a block that has these indices of the whole, a dim."""
    for runs in itertools.product(*(tuple(index_runs(indices)) for indices in where)):
        view = block
        for dim, (_, here, n) in enumerate(runs):
            view = view.narrow(dim, here, n)
        yield Piece(tuple(run[0] for run in runs), tuple(run[2] for run in runs), view)


def _whole(x: torch.Tensor) -> Piece:
    return Piece((0,) * x.ndim, tuple(x.shape), x)


def is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor is no array; the types that nearly all plain ones have are asked for first."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) or not is_array(x)


def held(x: torch.Tensor) -> list[Piece]:
    """The pieces that this process holds of a plain tensor, or of an array that nothing is left to add for; each once.

    Of a value without elements it holds the whole, on every rank.
    """
    if is_plain(x):
        return [_whole(x)]
    assert isinstance(x, Array)
    if x.numel() == 0:
        return [_whole(torch.empty(x.shape, dtype=x.dtype))]
    mesh, spec, local = torch_internals.mesh(x), spec_of(x), torch_internals.local(x)
    if mesh.get_coordinate() is None or is_elsewhere(mesh):  # this rank is no part of it
        return []
    axes, found = axes_of(mesh), dict[Any, Piece]()
    communicator = communicator_of(mesh)
    for rank, block in zip(communicator.ranks, communicator.parts(local), strict=True):
        for piece in cut(block, local_indices(tuple(x.shape), axes, spec, coordinates(mesh, rank))):
            found.setdefault(piece.offsets, piece)
    return list(found.values())


def added_up(arrays: Mapping[str, torch.Tensor], where: str) -> dict[str, Any]:
    """The same as arrays of which nothing is left to add: one collective for all of one layout."""
    found = {name: place(x, mesh_of(x), spec_of(x), where) for name, x in arrays.items()}
    todo = {name: x for name, x in found.items() if spec_of(x).unreduced}
    return found | dict(zip(todo, moved_together(list(todo.values()), [P(*spec_of(x)) for x in todo.values()], where)))


def empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: Any, mesh: Any, spec: P | None
) -> tuple[Any, list[Piece]]:
    """A tensor, or with a mesh an array, that is still to be filled, and the pieces of it to fill."""
    if mesh is None or spec is None:
        x = torch.empty(shape, dtype=dtype, device=device)
        return x, [_whole(x)] if x.numel() else []
    axes, pieces = axes_of(mesh), list[Piece]()

    def block(coord: dict[str, int]) -> torch.Tensor:
        made = torch.empty(local_shape(shape, axes, spec, coord), dtype=dtype, device=device)
        pieces.extend(cut(made, local_indices(shape, axes, spec, coord)))
        return made

    return from_blocks(block, shape, dtype, mesh, spec), pieces
