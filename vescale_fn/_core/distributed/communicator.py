"""The ranks of a mesh as one process sees them: which of them it plays, what it holds for them, how they talk.

What stands above asks a mesh's `Communicator` (`mesh.communicator_of`), not what kind of mesh it is. Two facts tell kinds
apart: whether local values are `Blocks`, one tensor for each rank that this process plays (`holds_blocks`), and whether
it plays all of them, so that nothing travels (`all_here`).
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import torch_internals
from ..base.errors import MeshError
from ..base.messages import mesh_text, report
from ..sharding.index_map import axes_of
from . import blocks
from .blocks import Blocks


@dataclass(frozen=True)
class Kind:
    """What one collective is; a row of `collectives.TABLE`.

    Attributes:
        params: what it takes besides a value, a mesh, axes and a reason.
        formula: ``formula(blocks of a group, *params)``: what each rank of the group gets, or all of them.
        on_group: begins it on a process group: ``on_group(x, group, positions, *params, later=)``.
        words: ``words(*params)``, as a comparison of ranks shows them.
        shared: all ranks of a group get one value, so that `formula` gives it once.
        reshaped: ``reshaped(shape, n, *params)`` turns the shape that each of n ranks gives into that which it gets.
        pieces: ``pieces(block, at, n, *params)``: what the group's rank `at` gives to each of its n ranks, None for nothing;
            what it gives to several is one tensor.
        put: ``put(pieces, block, *params)``: what a rank gets, of what each of the n gave it and of its own block.
        sums: ``sums(*params)``: by which function of two tensors the pieces for a rank become the one that it gets.
    """

    params: tuple[str, ...]
    formula: Callable[..., Any]
    on_group: Callable[..., Any]
    words: Callable[..., str]
    shared: bool = False
    reshaped: Callable[..., None] | None = None
    pieces: Callable[..., Sequence[torch.Tensor | None]] | None = None
    put: Callable[..., torch.Tensor] | None = None
    sums: Callable[..., Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] | None = None

    def result_shape(self, shape: Sequence[int], n: int, params: Sequence[Any]) -> list[int]:
        """The shape of what a rank gets, of that of what each of `n` gives."""
        found = list(shape)
        if self.reshaped is not None:
            self.reshaped(found, n, *params)
        return found


class Communicator(ABC):
    """How this process takes part in a mesh.

    Attributes:
        mesh: the mesh.
        ranks: the row-major places in it that this process plays; of a part of a simulated mesh, in the whole.
        holds_blocks: local values are `Blocks`, one tensor for each of `ranks` in their order; else one plain tensor.
        all_here: this process plays all ranks, and no other takes part.
        by_tree: sums follow one tree over the ranks in the mesh's order, whoever plays them.
        is_elsewhere: the mesh is of ranks that this process plays none of: it holds stand-ins, and sends nothing.
    """

    by_tree = is_elsewhere = False
    holds_blocks: bool
    all_here: bool
    ranks: range

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self._sizes: dict[tuple[str, ...], int] = {}
        self._group_of: dict[tuple[str, ...], dict[int, tuple[int, ...]]] = {}

    def size(self, axes: tuple[str, ...]) -> int:
        """How many ranks there are along `axes`."""
        found = self._sizes.get(axes)
        if found is None:
            sizes = axes_of(self.mesh)
            found = self._sizes[axes] = math.prod(sizes[name] for name in axes)
        return found

    def group_of(self, at: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks along `axes` among which is the rank that this process plays as its `at`-th, in their order."""
        found = self._group_of.get(axes)
        if found is None:
            found = self._group_of[axes] = {rank: group for group in groups(self.mesh, axes) for rank in group}
        return found[self.ranks[at]]

    @property
    def asked_about(self) -> Sequence[int]:
        """The ranks that `each` may call a function for."""
        return self.ranks

    def by_rank(self, fn: Callable[[int], Any]) -> Sequence[Any]:
        """What a function gives for each rank that this process plays, in their order."""
        return tuple(map(fn, self.ranks))

    def check_takes_part(self) -> None:
        """Raise in a process that plays none of the ranks."""
        if self.ranks:
            return
        members, axes = self.mesh.mesh.flatten().tolist(), mesh_text(axes_of(self.mesh))
        what = f"this process, rank {dist.get_rank()}, is not in the {axes}, which has the ranks {members}"
        raise MeshError(report("mesh", what, fix="`if mesh.get_coordinate() is not None:` around what is done on it"))

    # What this process holds

    def each(self, fn: Callable[..., Any], *values: Any, key: Callable[[int], Any] | None = None) -> Any:
        """``fn(rank, *locals)`` on each rank that this process plays, as a local value.

        Args:
            values: local values, or plain tensors that are every rank's.
            key: what of a rank `fn` depends on; ranks with equal keys and the same tensors share one result.
        """
        return blocks.each(fn, self.ranks, *values, key=key) if self.holds_blocks else fn(self.ranks[0], *values)

    def varied(self, op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], vary: tuple[int, Any]) -> Any:
        """An op on the one rank that this process plays, of which one argument differs by rank: (position, `by_rank`)."""
        args[vary[0]] = vary[1][0]
        return op(*args, **kwargs)

    def held(self, x: Any) -> Any:
        """What every rank holds, as a local value; what is no tensor as it is."""
        plain = self.holds_blocks and type(x) is not Blocks and isinstance(x, torch.Tensor)
        return blocks.shared(x, len(self.ranks)) if plain else x

    def joined(self, row: Sequence[torch.Tensor]) -> Any:
        """The local value of which these are the blocks of the ranks played here."""
        return Blocks(row) if self.holds_blocks else row[0]

    def parts(self, local: Any) -> Sequence[torch.Tensor]:
        """The block of each rank played here."""
        return local.blocks if type(local) is Blocks else (local,) * len(self.ranks)

    # What it does with others

    @abstractmethod
    def processes(self, axes: tuple[str, ...] | None = None) -> Sequence[int]:
        """The processes, by their ranks of the world, that meet in a collective over `axes`, or over all; none where nothing
        travels."""

    def lines(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Of all groups over `axes` the processes that meet there, by their ranks of the world; none where nothing travels."""
        return []

    @abstractmethod
    def carry_out(
        self, kind: Kind, x: Any, axes: tuple[str, ...], params: Sequence[Any], later: bool = False, **how: Any
    ) -> Any:
        """A collective on a local value. `later`: perhaps an `InFlight`, whose `wait` gives the result; `fresh`, of an
        all_reduce: perhaps in the memory of `x`."""

    @abstractmethod
    def everyone(self, mine: Sequence[Sequence[Any]], why: str) -> list[list[Any]]:
        """``[rank][leaf]`` of small Python values, from ``mine[leaf][rank played here]``, on every rank."""


class Simulated(Communicator):
    """One process that plays all ranks: each collective is its formula."""

    holds_blocks = all_here = True

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh)
        self.ranks = range(math.prod(rank_axes(mesh).values()))

    def processes(self, axes: tuple[str, ...] | None = None) -> Sequence[int]:
        return ()

    def carry_out(
        self, kind: Kind, x: Any, axes: tuple[str, ...], params: Sequence[Any], later: bool = False, **how: Any
    ) -> Blocks:
        """Its results are contiguous, as those of a process group are."""
        outs: list[Any] = [None] * len(x.blocks)
        for members in groups(self.mesh, axes):
            result = kind.formula([x.blocks[m] for m in members], *params)
            arrived = [result.contiguous()] * len(members) if kind.shared else [one.contiguous() for one in result]
            for member, block in zip(members, arrived, strict=True):
                outs[member] = block
        return Blocks(outs)

    def everyone(self, mine: Sequence[Sequence[Any]], why: str) -> list[list[Any]]:
        return [list(leaves) for leaves in zip(*mine, strict=True)]


# --- places in a mesh -------------------------------------------------------------------------------------------------


def rank_axes(mesh: Any) -> dict[str, int]:
    """The axes along which the ranks of a mesh are counted: of a part of a simulated mesh those of the whole."""
    return axes_of(getattr(mesh, "whole", mesh))


@functools.lru_cache(maxsize=1024)
def coordinates(mesh: Any, rank: int) -> Mapping[str, int]:
    """The place of the `rank`-th rank (row-major over the mesh, or the simulated one it is a part of) on each axis."""
    coord = {}
    for name, size in reversed(rank_axes(mesh).items()):
        rank, coord[name] = divmod(rank, size)
    return {name: coord[name] for name in axes_of(mesh)}


def groups(mesh: Any, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The groups of row-major ranks that differ only along `names`, each in the order of `names`, major first."""
    return groups_of(tuple(rank_axes(mesh).items()), tuple(names))


@functools.lru_cache(maxsize=1024)
@torch_internals.never_recorded
def groups_of(axes_items: tuple[tuple[str, int], ...], names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """`groups`, of a mesh that has these axes."""
    order = [name for name, _ in axes_items]
    ranks = torch.arange(math.prod(size for _, size in axes_items), device="cpu").view([size for _, size in axes_items])
    rest = [name for name in order if name not in names]
    permuted = ranks.permute([order.index(name) for name in (*rest, *names)])
    size = math.prod(dict(axes_items)[name] for name in names)
    return tuple(map(tuple, permuted.reshape(-1, size).tolist()))
