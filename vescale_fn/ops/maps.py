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
from typing import Any

import torch

from .. import _torch, linear, types, wire
from ..blocks import Blocks, each, shared
from ..errors import CollectiveError, report
from ..mesh import axes_of, coordinates, is_simulated, played_ranks


@dataclass(frozen=True)
class Collective:
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

    @property
    def n(self) -> int:
        """The number of ranks that take part."""
        return wire.group_size(self.mesh, self.axes)

    def transpose(self) -> Collective:
        """The map of cotangents."""
        return TABLE[self.row].transpose(self)

    def tangent(self) -> Collective:
        """The map of tangents: itself, where it is linear."""
        return _no_derivative(self) if self.row in ("pmax", "pmin") else self

    def batched(self) -> Collective:
        """The same map with one more dim in front."""
        return replace(self, dim=self.dim + (self.dim >= 0), other=self.other + (self.other >= 0))

    def __call__(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        row = TABLE[self.row]
        with _torch.no_torch_function():
            if row.move is None:
                return tuple(row.after(self, row.before(self, x)) for x in xs)
            if is_simulated(self.mesh):
                xs = tuple(x if type(x) is Blocks else shared(x, self.mesh.size()) for x in xs)
            pieces = [row.before(self, x) for x in xs]
            if len(pieces) == 1:
                return (row.after(self, _own(row.move(self, pieces[0]), pieces[0])),)
            flat = [piece.reshape(piece.shape[0], -1) for piece in pieces]
            bucket = torch.cat(flat, 1)
            moved = _own(row.move(self, bucket), bucket).split([f.shape[1] for f in flat], 1)
            return tuple(row.after(self, m.reshape(m.shape[0], *p.shape[1:])) for m, p in zip(moved, pieces))


def _own(moved: Any, given: Any) -> Any:
    return moved.clone() if moved is given else moved  # one rank: nothing was moved, but the result is a new value


@dataclass(frozen=True)
class Row:
    """One linear map: operand to pieces, the collective, pieces to result, and the transpose."""

    before: Callable[[Collective, Any], Any]
    move: Callable[[Collective, Any], Any] | None
    after: Callable[[Collective, Any], Any]
    transpose: Callable[[Collective], Collective]


def _becomes(op: Collective, row: str, **changes: Any) -> Collective:
    why = op.why.removeprefix("gradient of ") if op.why.startswith("gradient of ") else f"gradient of {op.why}"
    return replace(op, row=row, why=why, **changes)


def _whole(op: Collective, x: Any) -> Any:
    return x.unsqueeze(0)


def _first(op: Collective, pieces: Any) -> Any:
    return pieces.select(0, 0)


def _same(op: Collective, x: Any) -> Any:
    return x


def _alias(op: Collective, x: Any) -> Any:
    return x.detach()  # a new tensor on the same memory that shares its count of writes, so autograd notices a write


def _cut(op: Collective, x: Any) -> Any:
    """The n pieces of `x` along `dim`, in front: consecutive slices when tiled, else the entries of that dim."""
    dim = op.dim % x.ndim
    if op.tiled:
        x = x.unflatten(dim, (op.n, x.shape[dim] // op.n))
    return x.movedim(dim, 0)


def _pasted_at(dim: str) -> Callable[[Collective, Any], Any]:
    """The pieces put together along a dim: one after the other when tiled, else as a new dim."""

    def paste(op: Collective, pieces: Any) -> Any:
        at = getattr(op, dim) % (pieces.ndim - op.tiled)
        x = pieces.movedim(0, at)
        return x.flatten(at, at + 1) if op.tiled else x

    return paste


def index(mesh: Any, axes: tuple[str, ...]) -> Any:
    """This rank's position along `axes`, major first, as a 0-d int32 tensor (a new one on each call)."""
    made = _index(mesh, axes)
    return Blocks(made.blocks) if type(made) is Blocks else made.detach()


@functools.lru_cache(maxsize=256)
def _index(mesh: Any, axes: tuple[str, ...]) -> Any:
    sizes = axes_of(mesh)

    def position(rank: int) -> torch.Tensor:
        at, coord = 0, coordinates(mesh, rank)
        for axis in axes:
            at = at * sizes[axis] + coord[axis]
        return torch.tensor(at, dtype=torch.int32, device=mesh.device_type)

    with _torch.no_torch_function():
        made = each(position, played_ranks(mesh))
        return shared(made, 1) if is_simulated(mesh) and type(made) is not Blocks else made


def _mine(op: Collective, pieces: Any) -> Any:
    return pieces.index_select(0, index(op.mesh, op.axes).reshape(1)).select(0, 0)


def _only_at_source(op: Collective, pieces: Any) -> Any:
    x = pieces.select(0, 0)
    return torch.where(index(op.mesh, op.axes) == op.source, x, torch.zeros_like(x))


def _all_reduce(reduction: str) -> Callable[[Collective, Any], Any]:
    return lambda op, x: wire.all_reduce(x, op.mesh, op.axes, op.why, reduction)


def _all_gather(op: Collective, x: Any) -> Any:
    return wire.all_gather(x, op.mesh, op.axes, 0, op.why)


def _no_derivative(op: Collective) -> Any:
    raise CollectiveError(report(
        op.row, "it was differentiated, but it has no derivative (nor has JAX's)",
        fix=f"vfn.{op.row}(x.detach(), ...) where the result only stabilises, as in log-sum-exp; or vfn.all_gather, "
        f"then x.{op.row.replace('p', 'a', 1)}(0)"))  # fmt: skip


TABLE: dict[str, Row] = {
    "psum": Row(_whole, _all_reduce("sum"), _first, lambda op: _becomes(op, "copy" if op.checked else "psum")),
    "copy": Row(_alias, None, _same, lambda op: _becomes(op, "psum")),
    "relabel": Row(_alias, None, _same, lambda op: _becomes(op, "relabel")),
    "pmax": Row(_whole, _all_reduce("max"), _first, _no_derivative),
    "pmin": Row(_whole, _all_reduce("min"), _first, _no_derivative),
    "all_gather": Row(_whole, _all_gather, _pasted_at("dim"), lambda op: _becomes(op, "psum_scatter")),
    "psum_scatter": Row(
        _cut,
        lambda op, x: wire.reduce_scatter(x, op.mesh, op.axes, 0, op.why),
        _first,
        lambda op: _becomes(op, "all_gather"),
    ),
    "all_gather_invariant": Row(_whole, _all_gather, _pasted_at("dim"), lambda op: _becomes(op, "my_piece")),
    "my_piece": Row(_cut, None, _mine, lambda op: _becomes(op, "all_gather_invariant")),
    "all_to_all": Row(
        _cut,
        lambda op, x: wire.all_to_all(x, op.mesh, op.axes, 0, 0, op.why),
        _pasted_at("other"),
        lambda op: _becomes(op, "all_to_all", dim=op.other, other=op.dim),
    ),
    "ppermute": Row(
        _whole,
        lambda op, x: wire.permute(x, op.mesh, op.axes, op.perm, op.why),
        _first,
        lambda op: _becomes(op, "ppermute", perm=tuple((to, source) for source, to in op.perm)),
    ),
    "pbroadcast": Row(
        _whole,
        lambda op, x: wire.broadcast(x, op.mesh, op.axes, op.source, op.why),
        _first,
        lambda op: _becomes(op, "sum_at_source"),
    ),
    "sum_at_source": Row(_whole, _all_reduce("sum"), _only_at_source, lambda op: _becomes(op, "pbroadcast")),
    # A tensor that every rank of a simulated mesh holds <-> a Blocks.
    "enter": Row(lambda op, x: shared(x, op.mesh.size()), None, _same, lambda op: _becomes(op, "leave")),
    "leave": Row(lambda op, x: x.blocks[0] if type(x) is Blocks else x, None, _alias, lambda op: _becomes(op, "enter")),
    # The end of a body without types: its result is as many values as there are ranks, of which one is the output.
    "share": Row(_alias, None, _same, lambda op: _becomes(op, "divide")),
    "divide": Row(lambda op, x: x / op.n, None, _same, lambda op: _becomes(op, "divide")),
}


def promote(x: torch.Tensor, have: types.Type, want: types.Type, mesh: Any) -> torch.Tensor:
    """`x` cast to varying over the axes over which `want` varies and `x` does not yet."""
    invariant, reduced = types.promotion(have, want)
    if invariant:
        (x,) = linear.apply(Collective("copy", mesh, invariant, "pvary"), x)
    if reduced:
        (x,) = linear.apply(Collective("relabel", mesh, reduced, "pcast"), x)
    return x


def enter(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """A tensor from outside a body as a local value that all ranks of a simulated mesh hold."""
    (x,) = linear.apply(Collective("enter", mesh, tuple(axes_of(mesh)), "closure"), x)
    return x
