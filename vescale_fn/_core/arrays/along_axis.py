"""A mesh with an axis along which ranks do different things: arrays on it as arrays on the mesh of its other axes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import no_values
from ..base.errors import SpecError, VfnError
from ..base.messages import report
from ..distributed.blocks import Blocks
from ..distributed.communicator import groups
from ..distributed.mesh import communicator_of, mesh_name
from ..distributed.places import at_of, at_place, is_elsewhere, place_of, whole_mesh
from ..distributed.teams import PlayedPart, shares_along
from ..sharding.index_map import axes_of
from ..sharding.layout import type_text
from ..sharding.spec import P, axes_named, with_place
from .array import place, spec_of, wrap


class AlongAxis:
    """A mesh with such an axis.

    Attributes:
        rest: the mesh of the other axes; None where there are none, and arrays become plain tensors.
        size: of the axis.
        lines: for each place on the other axes the ranks along this one, by their places in the mesh.
        all_here: whether this process plays all ranks.
        simulated: whether it plays ranks with a block for each.
        by_tree: whether what is computed is to have the same bits whoever plays the ranks.
        played: of the `lines` those of which this process plays ranks, by their numbers.
        ranks: the processes along the axis, by their ranks of the world, where this one is one of several.
        players: for each place on the axis, which of these plays it; 0 where none but this one does.
        me: which of these this process is.
    """

    def __init__(self, mesh: Any, axis: str) -> None:
        self.mesh, self.axis = mesh, axis
        names = tuple(name for name in axes_of(mesh) if name != axis)
        communicator = communicator_of(mesh)
        of_each = None if communicator.all_here or not communicator.by_tree else shares_along(mesh, (axis,))
        self.rest = mesh[names] if names else None
        self.size = axes_of(mesh)[axis]
        self.lines = groups(mesh, (axis,))
        self._is_running = False
        self.simulated, self.all_here = communicator.holds_blocks, communicator.all_here
        self.by_tree = communicator.by_tree
        communicator.check_takes_part()
        self.ranks: Sequence[int] = () if self.all_here else communicator.processes((axis,))
        self.played, self.players, self.me = range(len(self.lines)), tuple(range(self.size)), 0
        if self.all_here:
            self.players = (0,) * self.size
        elif of_each is not None:
            self._share_out(of_each, mesh.process[0])
        else:
            self.me = mesh.get_coordinate()[tuple(axes_of(mesh)).index(axis)]

    def _share_out(self, of_each: Sequence[PlayedPart], me: int) -> None:
        """Find who of the processes that play some ranks each plays which place."""
        mine = of_each[me]
        self.played = range(*mine.run)
        beside = [share.places for share in of_each if share.run == mine.run]
        self.players = tuple(next(i for i, places in enumerate(beside) if at in places) for at in range(self.size))
        self.me = self.players[mine.places[0]]

    def plays(self, place: int) -> bool:
        """Whether this process plays the ranks at a place of the axis."""
        return self.players[place] == self.me

    def begin(self) -> None:
        """A step begins."""
        self.check_idle()
        self._is_running = not self.all_here

    def check_idle(self) -> None:
        """Raise where messages of a step that has failed may be under way, which the next one would take for its own, and other
        ranks wait for them."""
        if self._is_running:
            what = "an earlier step failed on this rank, and messages of it may still be under way"
            raise VfnError(report("pipeline", what, fix="the processes started again"))

    def end(self) -> None:
        """The step has ended."""
        self._is_running = False

    def check(self, x: Any, name: str, where: str, placed: bool) -> None:
        """Raise for an array that is not whole along the axis, nor, where it may be (`placed`), at coordinates of it."""
        if not isinstance(x, DTensor):
            return
        mesh, spec = torch_internals.mesh(x), spec_of(x)
        place = place_of(mesh)
        fits = place is None or (placed and place.axes == (self.axis,))
        if not fits or whole_mesh(mesh) != self.mesh or self.axis in axes_named(spec) | spec.unreduced | spec.reduced:
            lies = with_place(spec, at_of(mesh))
            told = f"{name} is {type_text(x.shape, x.dtype, lies)} on the {mesh_name(whole_mesh(mesh))}"
            what = f"arguments are whole along the axis {self.axis!r} of the {mesh_name(self.mesh)}"
            what += ", or at coordinates of it" if placed else ""
            raise SpecError(
                report(where, what, [told], f"vfn.with_sharding(x, a spec that {self.axis!r} does not split)")
            )

    def coordinates(self, x: Any) -> tuple[int, ...] | None:
        """The coordinates on the axis that a value is at; None for one that all ranks have."""
        place = place_of(torch_internals.mesh(x)) if isinstance(x, DTensor) else None
        return None if place is None else dict(place.at)[self.axis]

    def homes(self, x: Any) -> tuple[int, ...] | None:
        """The coordinates on the axis whose ranks have an array on the mesh; None for what is no such array."""
        if not isinstance(x, DTensor) or whole_mesh(torch_internals.mesh(x)) != self.mesh:
            return None
        return tuple(range(self.size)) if (at := self.coordinates(x)) is None else at

    def without(self, x: Any) -> Any:
        """A value as the ranks at each place of the axis have it; what is no array as it is. Of one at a place the ranks
        elsewhere have nothing that is to be used."""
        if not isinstance(x, DTensor):
            return x
        local: Any = torch_internals.local(x)
        if self.simulated:
            first = list(local.blocks)
            if place_of(torch_internals.mesh(x)) is None:
                at, here = self.players.index(self.me), communicator_of(self.mesh).ranks[0]
                first = [local.blocks[self.lines[i][at] - here] for i in self.played]
            local = Blocks(first) if self.rest is not None else first[0]
        if self.rest is not None:
            return wrap(local, self.rest, spec_of(x), x.shape, _stride(x))
        if is_elsewhere(torch_internals.mesh(x)) and not torch_internals.is_recorded():  # which takes it as where it is
            return no_values.empty(x.shape, _stride(x), x.dtype, local.device)
        if local.stride() != _stride(x):
            local = torch.empty_strided(x.shape, _stride(x), dtype=x.dtype, device=local.device).copy_(local)
        return local

    def at(self, owner: int, local: Any, lies: P, shape: torch.Size) -> Any:
        """What the ranks at one place of the axis have, plain tensors or blocks on the other axes, as an array there."""
        return wrap(local, at_place(self.mesh, ((self.axis, (owner,)),)), lies, shape)

    def moved(self, x: Any, home: tuple[int, ...] | None, why: str) -> Any:
        """An array at a place of the axis at other ones; None: on all ranks."""
        mesh = self.mesh if home is None else at_place(self.mesh, ((self.axis, home),))
        spec = spec_of(x)
        return place(x, mesh, P(*spec, unreduced=spec.unreduced, reduced=spec.reduced), why)

    def plain(self, x: Any) -> torch.Tensor:
        """What a rank has of an array that all hold alike."""
        local: Any = torch_internals.local(x)
        return local.blocks[0] if self.simulated else local


def _stride(x: DTensor) -> tuple[int, ...]:
    meta: Any = torch_internals.spec(x).tensor_meta
    return meta.stride
