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
from ..._core.arrays.array import is_array, made, mesh_of, spec_of
from ..._core.arrays.entries import owners
from ..._core.distributed.blocks import Blocks
from ..._core.distributed.collectives import Collective, group_size
from ..._core.distributed.communicator import coordinates
from ..._core.distributed.mesh import communicator_of
from ..._core.sharding.index_map import axes_of, dim_indices
from ..._core.sharding.layout import contiguous_stride, layout, spec_for
from ..._core.sharding.spec import P, split_axes
from ..execution.looping import own_row
from ..ir.graph import Step
from . import leaves as leaves_


def like_a_slice(x: torch.Tensor) -> torch.Tensor:
    """What has the layout and the blocks of a slice of `x`, whose leading dim is whole; the blocks may have another size."""
    return x.select(0, 0) if is_array(x) else x


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
        return made(local, self._spec(lies, self.x.shape[1:], self.x.dtype), lies)

    def kept(self, ct: torch.Tensor, nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, tuple[int, ...]]]:
        """For each plain tensor of the leaf's cotangent the node that gives entries of it, and the iterations that do.

        Args:
            ct: the cotangent of a slice.
            nodes: of its plain tensors.
        """
        holders = leaves_.first_holders(torch_internals.spec(ct)) if self.simulated else (0,)
        places = {at: i for i, at in enumerate(dict.fromkeys(holders))}
        rows = _holders(self._spec_of_cotangent(ct), self.simulated)
        return [(nodes[places[holders[at]]], held) for at, held in rows]

    def cotangent(self, ct: torch.Tensor, found: Iterator[torch.Tensor]) -> torch.Tensor:
        """The cotangent of the leaf, of those of its slices, one of which is `ct`, and of its plain tensors."""
        spec = self._spec_of_cotangent(ct)
        blocks = [next(found) for _ in _holders(spec, self.simulated)]
        with torch_internals.no_torch_function():
            local = leaves_.of_ranks(blocks, spec) if self.simulated else blocks[0]
            return made(local, spec, self._lies_of_cotangent(ct))

    def _lies_of_cotangent(self, ct: torch.Tensor) -> P:
        lies = spec_of(ct)
        return P(self.lies[0], *lies, unreduced=lies.unreduced, reduced=lies.reduced)

    def _spec_of_cotangent(self, ct: torch.Tensor) -> Any:
        return self._spec(self._lies_of_cotangent(ct), self.x.shape, ct.dtype)

    def _spec(self, lies: P, shape: torch.Size, dtype: torch.dtype) -> Any:
        return spec_for(self.mesh, P(*lies, unreduced=lies.unreduced), shape, contiguous_stride(shape), dtype)


def _holders(spec: Any, simulated: bool) -> list[tuple[int, tuple[int, ...]]]:
    """For each plain tensor of an array the first rank that has it, by its place among those played here, and which entries of
    the leading dim it has."""
    mesh, shape = spec.mesh, spec.tensor_meta.shape
    names, axes = split_axes(layout(spec), len(shape))[0], axes_of(mesh)
    held = communicator_of(mesh).by_rank(
        lambda rank: tuple(dim_indices(shape[0], names, axes, coordinates(mesh, rank)))
    )
    return [(at, held[at]) for at in (dict.fromkeys(leaves_.first_holders(spec)) if simulated else (0,))]
