"""What a loop goes over, in its body: one slice, which is brought to all ranks where the leading dim is split.

Which rank has it the iteration decides, and that rank broadcasts it. The calls that bring it are the body's own, and made again
where its derivative needs the slice, so that no rank has more than one of the others' at a time. What comes back for a slice
stays on the ranks that have it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.arrays.array import is_array, made, mesh_of, moved, spec_of
from ..._core.arrays.entries import owners
from ..._core.distributed.blocks import Blocks
from ..._core.distributed.collectives import Collective, group_size
from ..._core.distributed.communicator import coordinates
from ..._core.distributed.mesh import communicator_of, same
from ..._core.distributed.rows import row_of
from ..._core.sharding.index_map import axes_of, dim_indices
from ..._core.sharding.layout import contiguous_stride, layout, spec_for
from ..._core.sharding.spec import P, axes_named, split_axes
from ..._core.transforms.primals import as_primals, gradient_spec
from ..execution.looping import own_row
from ..ir.graph import Step
from ..ir.loop import STACKED
from . import leaves as leaves_
from .loop_again import lies_stacked


def like_a_slice(x: torch.Tensor) -> torch.Tensor:
    """What has the layout and the blocks of a slice of `x`, whose leading dim is whole; the blocks may have another size."""
    return x.select(0, 0) if is_array(x) else x


def as_slice(g: torch.Tensor, x: torch.Tensor, lead: Any) -> torch.Tensor:
    """Bring the gradient of a slice to its layout, but for sums over ranks along axes that split nothing of it: these are made
    once, of the gradients of all slices.

    Args:
        lead: how the leading dim is split that the slice is of.
    """
    goal = gradient_spec(x)
    if goal is None or not is_array(g) or not same(mesh_of(g), mesh_of(x)):
        return as_primals([g], [x])[0]
    later = spec_of(g).unreduced - axes_named(goal) - axes_named(P(lead))
    goal = P(*goal, unreduced=goal.unreduced | later, reduced=goal.reduced)
    return g if spec_of(g) == goal else moved(g, mesh_of(x), goal, "grad")


def stacked(leaf: torch.Tensor, found: Any, count: int) -> torch.Tensor:
    """What is collected in all iterations, where each gives one like `leaf`, of the next plain tensors."""
    with torch_internals.no_torch_function():
        if not is_array(leaf):
            made: dict[int, torch.Tensor] = {}
            if isinstance(leaf, Blocks):
                return Blocks(
                    [made[id(x)] if id(x) in made else made.setdefault(id(x), next(found)) for x in leaf.blocks]
                )
            return next(found)
        spec = spec_of(leaf)
        lies = P(None, *spec, unreduced=spec.unreduced, reduced=spec.reduced)
        return array_like(leaf, torch.Size((count, *leaf.shape)), lies, found)


def array_like(leaf: torch.Tensor, shape: torch.Size, lies: P, found: Any) -> torch.Tensor:
    """An array where `leaf` is, of the next plain tensors."""
    held = torch_internals.local(leaf)
    local = [next(found) for _ in range(leaves_.count_of(leaf))]
    if (row := row_of(held)) is not None:
        return leaves_.array_around(Blocks(row.like(local[0])), mesh_of(leaf), lies, shape)
    return leaves_.array_of(local, mesh_of(leaf), lies, shape, type(held) is Blocks)


class SplitLeaf:
    """A leaf of what a loop goes over, an array whose leading dim is split.

    Args:
        x: the leaf.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.mesh, self.lies, self.plain = x, mesh_of(x), spec_of(x), leaves_.plain_of(x)
        self.simulated = type(torch_internals.local(x)) is Blocks
        axes, source = owners(x.shape[0], split_axes(self.lies, x.ndim)[0], axes_of(self.mesh))
        self.broadcast = Collective("broadcast", self.mesh, axes, (source,), "a slice of a split dim")

    def slice(self, recorder: Any, turn: Any, moving: bool) -> torch.Tensor:
        """Record, in a body, how the slice whose turn it is comes to all ranks, and give it, for autograd to follow if it does
        so (`moving`) with the leaf."""
        with torch_internals.no_torch_function():
            return self._slice(recorder, turn).requires_grad_(moving and self.x.requires_grad)

    def _slice(self, recorder: Any, turn: torch.Tensor) -> torch.Tensor:
        rows = []
        for block, (_, held) in zip(self.plain, _holders(torch_internals.spec(self.x), self.simulated), strict=True):
            own = Step("own_row", functools.partial(own_row, held=held), views=(0,))
            rows.append(recorder.step(own, (block, turn), block.shape[1:], block))
        local = leaves_.of_ranks(rows, torch_internals.spec(self.x)) if self.simulated else rows[0]
        if group_size(self.mesh, self.broadcast.axes) > 1:
            local = recorder.collective(self.broadcast, local, turn)
        lies = P(*self.lies[1:], unreduced=self.lies.unreduced, reduced=self.lies.reduced)
        return made(local, _spec(self.mesh, lies, self.x.shape[1:], self.x.dtype), lies)


class Collected:
    """What a loop collects of its iterations along a leading dim.

    Args:
        leaf: what one iteration gives.
        nodes: of its plain tensors.
        count: the number of iterations.
        lead: how the leading dim is to be split (`lies_stacked`); then each rank keeps its own iterations alone.

    Attributes:
        kept: for each plain tensor of it the node that gives entries, and which of them the loop keeps.
        spec, lies, ranks: where the leading dim is split, how it lies, and for each plain tensor the rank, by its place.
    """

    def __init__(self, leaf: torch.Tensor, nodes: Sequence[fx.Node], count: int, lead: Any = None) -> None:
        self.leaf, self.count = leaf, count
        self.spec: Any = None
        self.kept: list[tuple[fx.Node, str | tuple[int, ...]]] = [(node, STACKED) for node in nodes]
        if not is_array(leaf) or (lies := lies_stacked(spec_of(leaf), lead))[0] is None:
            return
        self.lies, self.simulated = lies, type(torch_internals.local(leaf)) is Blocks
        self.spec = _spec(mesh_of(leaf), lies, torch.Size((count, *leaf.shape)), leaf.dtype)
        holders = leaves_.first_holders(torch_internals.spec(leaf)) if self.simulated else (0,)
        places = {at: i for i, at in enumerate(dict.fromkeys(holders))}
        held = _holders(self.spec, self.simulated)
        self.ranks = [at for at, _ in held]
        self.kept = [(nodes[places[holders[at]]], places_) for at, places_ in held]

    def whole(self, found: Iterator[torch.Tensor]) -> torch.Tensor:
        """It, of the next plain tensors."""
        if self.spec is None:
            return stacked(self.leaf, found, self.count)
        blocks = [next(found) for _ in self.kept]
        with torch_internals.no_torch_function():
            return made(leaves_.of_ranks(blocks, self.spec) if self.simulated else blocks[0], self.spec, self.lies)


def _spec(mesh: Any, lies: P, shape: torch.Size, dtype: torch.dtype) -> Any:
    return spec_for(mesh, P(*lies, unreduced=lies.unreduced), shape, contiguous_stride(shape), dtype)


def _holders(spec: Any, simulated: bool) -> list[tuple[int, tuple[int, ...]]]:
    """For each plain tensor of an array the first rank that has it, by its place among those played here, and which entries of
    the leading dim it has."""
    mesh, shape = spec.mesh, spec.tensor_meta.shape
    names, axes = split_axes(layout(spec), len(shape))[0], axes_of(mesh)
    held = communicator_of(mesh).by_rank(
        lambda rank: tuple(dim_indices(shape[0], names, axes, coordinates(mesh, rank)))
    )
    return [(at, held[at]) for at in (dict.fromkeys(leaves_.first_holders(spec)) if simulated else (0,))]
