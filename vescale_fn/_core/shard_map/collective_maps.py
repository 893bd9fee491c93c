"""The collectives as linear maps: one row each, with its transpose.

A row of `TABLE` reads: how an operand becomes pieces ``[k, ...]``, which collective moves the pieces of all operands at
once, how a result is put together from what arrives, and which row is the transpose. A row is correct for values whose
types are
tracked: the cotangent of a value that is the same on all ranks is the same on all ranks and complete. Where types are
not tracked (``check_vma=False``) every value counts as each rank's own, and `psum` is its own transpose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..arrays import reshard, reshard_plan
from ..arrays.array import made
from ..base import context, linear_map
from ..base.errors import CollectiveError
from ..base.messages import report
from ..base.tables import table
from ..distributed import collectives, rows
from ..distributed.blocks import Blocks, parts
from ..distributed.communicator import coordinates
from ..distributed.mesh import communicator_of, is_part
from ..local_types import types
from ..sharding.index_map import axes_of, is_even
from ..sharding.layout import axes_items, contiguous_stride, layout, spec_for, text
from ..sharding.spec import P, from_split_axes, split_axes


@dataclass(frozen=True)
class CollectiveMap:
    """One row of `TABLE` with its parameters: a `linear.LinearMap`."""

    row: str
    mesh: Any
    axes: tuple[str, ...]
    why: str
    checked: bool = True
    dim: int = 0
    other: int = 0
    tiled: bool = False
    perm: tuple[tuple[int, int], ...] = ()
    source: int = 0
    fresh: bool = False  # whether what moves is in memory that may be written

    @property
    def n(self) -> int:
        """The number of ranks that take part."""
        return collectives.group_size(self.mesh, self.axes)

    def transpose(self) -> CollectiveMap:
        """The map of cotangents."""
        return TABLE[self.row].transpose(self)

    def tangent(self) -> CollectiveMap:
        """The map of tangents: itself, where it is linear."""
        return no_derivative(self) if self.row in ("pmax", "pmin") else self

    def batched(self, over: tuple[str, ...]) -> CollectiveMap:
        """The same map with one more dim in front."""
        return replace(self, dim=self.dim + (self.dim >= 0), other=self.other + (self.other >= 0))

    def told(self) -> str:
        """The parameters, in words."""
        words = {
            "all_to_all": f"dim {self.dim} to dim {self.other}",
            "ppermute": f"perm {list(self.perm)}",
            "pbroadcast": f"from {self.source}",
        }
        gathers = self.row.startswith("all_gather") or self.row == "psum_scatter"
        said = f"dim {self.dim}" if gathers else words.get(self.row, "")
        return said + ", tiled" * self.tiled

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        row = TABLE[self.row]
        with torch_internals.no_torch_function():
            if row.move is None:
                return tuple(row.after(self, row.before(self, x)) for x in xs)
            communicator = communicator_of(self.mesh)
            if communicator.holds_blocks:
                xs = tuple(x if isinstance(x, DTensor) else communicator.held(x) for x in xs)
            else:  # what is sent lies in memory as it is; `Blocks` sees to that for simulated ranks
                xs = tuple(map(torch_internals.materialized, xs))
            if (watch := context.watch()) is not None:
                watch.about_to_send(
                    [(f"leaf {i}" if len(xs) > 1 else "", text(x)) for i, x in enumerate(xs)], self.told()
                )
            apart = len(xs) == 1 or torch_internals.is_recorded()  # of what is recorded a pass makes buckets, by size
            if not apart and row.after is _first and row.before is _whole and _PLAIN.issuperset(map(type, xs)):
                return torch_internals.unflattened(
                    row.move(replace(self, fresh=True), torch_internals.flattened(xs)), xs
                )
            opened = [_opened(self, row.before(self, x)) for x in xs]
            if apart or any(one.ragged for one in opened):
                moved = [_own(row.move(self, one.pieces), one.pieces) for one in opened]
            else:
                flat = [one.pieces.reshape(one.pieces.shape[0], -1) for one in opened]
                bucket = torch.cat(flat, 1)
                parts = _own(row.move(self, bucket), bucket).split([f.shape[1] for f in flat], 1)
                moved = [m.reshape(m.shape[0], *one.pieces.shape[1:]) for m, one in zip(parts, opened)]
            return tuple(row.after(self, one.close(m)) for m, one in zip(moved, opened))


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _own(moved: Any, given: Any) -> Any:
    """What arrived, in memory that is nobody else's, as it is on real ranks: the body may write it."""
    if type(moved) is not Blocks:
        return moved.clone() if moved is given else moved  # one rank: nothing was moved
    if type(moved.blocks) is rows.RankRow:
        return Blocks(moved.blocks.own())
    taken = set(map(torch_internals.memory, given.blocks))
    blocks = []
    for block in moved.blocks:
        place = torch_internals.memory(block)
        blocks.append(block.clone() if place in taken else block)
        taken.add(place)
    return Blocks(blocks)


class _Opened(NamedTuple):
    """The pieces of an operand as they travel; whether their sizes differ between ranks; and what makes of what arrives
    again what the operand was."""

    pieces: Any
    ragged: bool
    close: Callable[[Any], Any]


def _opened(op: CollectiveMap, pieces: Any) -> _Opened:
    """A local value is its own pieces. Of an array on the other axes of the mesh each rank sends its block."""
    if not isinstance(pieces, DTensor):
        return _Opened(pieces, False, lambda arrived: arrived)
    mesh, shape, lies = torch_internals.mesh(pieces), tuple(pieces.shape), layout(torch_internals.spec(pieces))
    rows = split_axes(lies, len(shape))
    spec = from_split_axes([(), *rows[1:]], lies.unreduced if op.row not in ("pmax", "pmin") else ())
    local = reshard.run(
        torch_internals.local(pieces), shape, mesh, reshard_plan.plan(shape, axes_items(mesh), lies, spec), op.why
    )
    rest = shape[1:]

    def close(arrived: Any) -> Any:
        if type(arrived) is Blocks:
            arrived = Blocks(arrived.blocks)  # whose sizes may differ, as an array's may
        whole = torch.Size((arrived.shape[0], *rest))
        return made(arrived, spec_for(mesh, spec, whole, contiguous_stride(whole), arrived.dtype), spec)

    return _Opened(local, not is_even(shape, axes_of(mesh), spec), close)


@dataclass(frozen=True)
class Row:
    """One linear map: operand to pieces, the collective, pieces to result, and the transpose."""

    before: Callable[[CollectiveMap, Any], Any]
    move: Callable[[CollectiveMap, Any], Any] | None
    after: Callable[[CollectiveMap, Any], Any]
    transpose: Callable[[CollectiveMap], CollectiveMap]


def _becomes(op: CollectiveMap, row: str, **changes: Any) -> CollectiveMap:
    why = op.why.removeprefix("gradient of ") if op.why.startswith("gradient of ") else f"gradient of {op.why}"
    return replace(op, row=row, why=why, **changes)


def _whole(op: CollectiveMap, x: Any) -> Any:
    return x.unsqueeze(0)


def _first(op: CollectiveMap, pieces: Any) -> Any:
    return pieces.select(0, 0)


def _same(op: CollectiveMap, x: Any) -> Any:
    return x


def _alias(op: CollectiveMap, x: Any) -> Any:
    return x.detach()  # a new tensor on the same memory that shares its count of writes, so autograd notices a write


def _cut(op: CollectiveMap, x: Any) -> Any:
    """The n pieces of `x` along `dim`, in front: consecutive slices when tiled, else the entries of that dim."""
    dim = op.dim % x.ndim
    if op.tiled:
        x = x.unflatten(dim, (op.n, x.shape[dim] // op.n))
    return x.movedim(dim, 0)


def _pasted_at(dim: str) -> Callable[[CollectiveMap, Any], Any]:
    """The pieces put together along a dim: one after the other when tiled, else as a new dim."""

    def paste(op: CollectiveMap, pieces: Any) -> Any:
        at = getattr(op, dim) % (pieces.ndim - op.tiled)
        x = pieces.movedim(0, at)
        return x.flatten(at, at + 1) if op.tiled else x

    return paste


def index(mesh: Any, axes: tuple[str, ...]) -> Any:
    """This rank's position along `axes`, major first, as a 0-d int32 tensor (a new one on each call)."""
    communicator = communicator_of(mesh)
    with torch_internals.no_torch_function():  # what is not typed yet would count as the same on all ranks
        if torch_internals.is_recorded() and not communicator.holds_blocks:
            return communicator.each(functools.partial(_position, mesh, axes)).clone()
        return _index(mesh, axes).clone()


@functools.lru_cache(maxsize=256)
@torch_internals.never_recorded
def _index(mesh: Any, axes: tuple[str, ...]) -> Any:
    with torch_internals.no_torch_function():
        return communicator_of(mesh).each(functools.partial(_position, mesh, axes))


@functools.lru_cache(maxsize=4096)
@torch_internals.never_recorded
def _position(mesh: Any, axes: tuple[str, ...], rank: int) -> torch.Tensor:
    at, sizes, coord = 0, axes_of(mesh), coordinates(mesh, rank)
    for axis in axes:
        at = at * sizes[axis] + coord[axis]
    return table(
        torch_internals.peel(torch.tensor(at, dtype=torch.int32)), mesh.device_type
    )  # kept: no transform's own


def _mine(op: CollectiveMap, pieces: Any) -> Any:
    return pieces.index_select(0, index(op.mesh, op.axes).reshape(1)).select(0, 0)


def _entered(op: CollectiveMap, x: Any) -> Any:
    """What every rank of a simulated mesh has, on each. As the cotangent of what left the body it may be there already, or
    an array: outside a plain tensor meets arrays."""
    if isinstance(x, DTensor):
        return x.detach() if is_part(torch_internals.mesh(x)) else _gathered(x, op.why)
    return x.detach() if type(x) is Blocks else communicator_of(op.mesh).held(x)


def _left(op: CollectiveMap, x: Any) -> Any:
    """What every rank of a simulated mesh has, once."""
    x = _gathered(x, op.why) if isinstance(x, DTensor) else x
    return parts(x)[0]


def _gathered(x: DTensor, why: str) -> Any:
    """Each rank's copy of a whole array."""
    mesh, shape = torch_internals.mesh(x), tuple(x.shape)
    return reshard.run(
        torch_internals.local(x),
        shape,
        mesh,
        reshard_plan.plan(shape, axes_items(mesh), layout(torch_internals.spec(x)), P()),
        why,
    )


def _only_at_source(op: CollectiveMap, pieces: Any) -> Any:
    x = pieces.select(0, 0)
    return torch.where(index(op.mesh, op.axes) == op.source, x, torch.zeros_like(x))


def _all_reduce(reduction: str) -> Callable[[CollectiveMap, Any], Any]:
    return lambda op, x: collectives.all_reduce(x, op.mesh, op.axes, op.why, reduction, fresh=op.fresh)


def _all_gather(op: CollectiveMap, x: Any) -> Any:
    return collectives.all_gather(x, op.mesh, op.axes, 0, op.why)


def no_derivative(op: Any) -> Any:
    """Raise: `op.row` was differentiated."""
    raise CollectiveError(
        report(
            op.row,
            "it was differentiated, but it has no derivative (nor has JAX's)",
            fix=f"vfn.{op.row}(x.detach(), ...) where the result only stabilises, as in log-sum-exp; or vfn.all_gather, "
            f"then x.{op.row.replace('p', 'a', 1)}(0)",
        )
    )


TABLE: dict[str, Row] = {
    "psum": Row(_whole, _all_reduce("sum"), _first, lambda op: _becomes(op, "copy" if op.checked else "psum")),
    "copy": Row(_alias, None, _same, lambda op: _becomes(op, "psum")),
    "relabel": Row(_alias, None, _same, lambda op: _becomes(op, "relabel")),
    "pmax": Row(_whole, _all_reduce("max"), _first, no_derivative),
    "pmin": Row(_whole, _all_reduce("min"), _first, no_derivative),
    "all_gather": Row(_whole, _all_gather, _pasted_at("dim"), lambda op: _becomes(op, "psum_scatter")),
    "psum_scatter": Row(
        _cut,
        lambda op, x: collectives.reduce_scatter(x, op.mesh, op.axes, 0, op.why),
        _first,
        lambda op: _becomes(op, "all_gather"),
    ),
    "all_gather_invariant": Row(_whole, _all_gather, _pasted_at("dim"), lambda op: _becomes(op, "my_piece")),
    "my_piece": Row(_cut, None, _mine, lambda op: _becomes(op, "all_gather_invariant")),
    "all_to_all": Row(
        _cut,
        lambda op, x: collectives.all_to_all(x, op.mesh, op.axes, 0, 0, op.why),
        _pasted_at("other"),
        lambda op: _becomes(op, "all_to_all", dim=op.other, other=op.dim),
    ),
    "ppermute": Row(
        _whole,
        lambda op, x: collectives.permute(x, op.mesh, op.axes, op.perm, op.why),
        _first,
        lambda op: _becomes(op, "ppermute", perm=tuple((to, source) for source, to in op.perm)),
    ),
    "pbroadcast": Row(
        _whole,
        lambda op, x: collectives.broadcast(x, op.mesh, op.axes, op.source, op.why),
        _first,
        lambda op: _becomes(op, "sum_at_source"),
    ),
    "sum_at_source": Row(_whole, _all_reduce("sum"), _only_at_source, lambda op: _becomes(op, "pbroadcast")),
    # A tensor that every rank of a simulated mesh holds <-> a Blocks.
    "enter": Row(_entered, None, _same, lambda op: _becomes(op, "leave")),
    "leave": Row(_left, None, _alias, lambda op: _becomes(op, "enter")),
    # The end of a body without types: its result is as many values as there are ranks, of which one is the output.
    "share": Row(_alias, None, _same, lambda op: _becomes(op, "divide")),
    # In a second derivative cotangents of the divided value differ by rank: their mean is the whole's cotangent.
    "divide": Row(lambda op, x: x / op.n, None, _same, lambda op: _becomes(op, "mean")),
    "mean": Row(_whole, _all_reduce("sum"), lambda op, x: _first(op, x) / op.n, lambda op: _becomes(op, "divide")),
}


def promote(x: torch.Tensor, have: types.Type, want: types.Type, mesh: Any) -> torch.Tensor:
    """`x` cast to varying over the axes over which `want` varies and `x` does not yet."""
    invariant, reduced = types.promotion(have, want)
    if invariant:
        (x,) = linear_map.apply(CollectiveMap("copy", mesh, invariant, "pvary"), x)
    if reduced:
        (x,) = linear_map.apply(CollectiveMap("relabel", mesh, reduced, "pcast"), x)
    return x


def enter(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """A tensor from outside a body as a local value that all ranks of a simulated mesh hold."""
    (x,) = linear_map.apply(CollectiveMap("enter", mesh, tuple(axes_of(mesh)), "closure"), x)
    return x
