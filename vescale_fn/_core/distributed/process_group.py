"""Ranks that are processes: the collectives on a process group. Each is begun, and finished when its result is needed: at
once, or `later`.

Every collective takes a plain tensor, the group, and for each position in the order of the axes its index in that group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import torch_internals
from ..base import context, dtypes
from ..sharding.index_map import axes_of
from .communicator import Communicator, Kind, groups
from .divergence import RankCall
from .ranks import talks_to_nobody


class InFlight(NamedTuple):
    """A collective that has begun: torch's handles, what is to be done with what they bring, and the tensors in use."""

    works: Sequence[Any]
    finish: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    lent: Sequence[torch.Tensor] = ()

    def wait(self) -> torch.Tensor:
        """The result."""
        for work in self.works:
            work.wait()
        _take_back(self.lent)
        return self.finish(*self.args)


def _then(work: Any, finish: Callable[..., torch.Tensor], *args: Any, lent: Sequence[torch.Tensor]) -> Any:
    """What `finish` gives; or, where the work is still under way, a handle.

    Args:
        lent: what the group has been given, names of their own of what is used here.
    """
    begun = InFlight(() if work is None else (work,), finish, args, lent)
    return begun.wait() if work is None else begun


def _another_name(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that autograd knows nothing of: `detach` would share how often it was written."""
    return x.data


def _take_back(lent: Sequence[torch.Tensor]) -> None:
    """Let what the group was given be names of nothing. Gloo's thread holds them, and with them the memory, until it comes
    round, which on a busy machine is while much else is computed."""
    for x in lent:
        if x.device.type == "cpu":
            x.set_(x.new_empty(0))  # type: ignore[arg-type]


Positions = range | list[int]  # a range where the group's order is that of the axes

# --- groups -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _joint_group(mesh: Any, axes: frozenset[str], default: Any) -> Any:
    """This rank's process group along several axes at once (made on all ranks of the mesh together).

    `default` is the default process group: a new one makes new groups.
    """
    mine = None
    flat = mesh.mesh.flatten().tolist()
    most = timedelta(seconds=torch_internals.group_timeout(mesh.get_group(0)))
    if (watch := context.watch()) is not None:
        watch.compare(
            flat, RankCall("the first collective", f"over {tuple(name for name in axes_of(mesh) if name in axes)}")
        )
    for group in groups(mesh, [name for name in axes_of(mesh) if name in axes]):
        ranks = sorted(flat[place] for place in group)
        if len(flat) == dist.get_world_size():
            made = dist.new_group(ranks, timeout=most)
            mine = made if dist.get_rank() in ranks else mine
        elif dist.get_rank() in ranks:
            mine = torch_internals.group_of_members(ranks, most)
    return mine


def group_along(mesh: Any, axes: tuple[str, ...]) -> tuple[Any, Positions]:
    """The process group along `axes`, and for each position in the order of `axes` its index in that group."""
    single = list(axes_of(mesh)).index(axes[0])  # a mesh of torch's own may have no names
    group = mesh.get_group(single) if len(axes) == 1 else _joint_group(mesh, frozenset(axes), dist.group.WORLD)
    return group, _positions(mesh, axes, group)


@functools.lru_cache(maxsize=1024)
def _positions(mesh: Any, axes: tuple[str, ...], group: Any) -> Positions:
    found = [dist.get_group_rank(group, member) for member in _members(mesh, axes)]
    return range(len(found)) if found == list(range(len(found))) else found


@functools.lru_cache(maxsize=1024)
@torch_internals.never_recorded
def _members(mesh: Any, axes: tuple[str, ...]) -> list[int]:
    """The ranks of the world in this rank's group along `axes`, in their order."""
    place, flat = _place(mesh), mesh.mesh.flatten().tolist()
    return [flat[member] for group in groups(mesh, axes) if place in group for member in group]


def _place(mesh: Any) -> int:
    """This process's row-major place in `mesh`."""
    place = 0
    for size, i in zip(axes_of(mesh).values(), mesh.get_coordinate(), strict=True):
        place = place * size + i
    return place


class ProcessGroup(Communicator):
    """One process a rank, of a mesh of torch's; or one rank alone, without a process group."""

    holds_blocks = False

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh)
        here = mesh.get_coordinate() is not None
        place = _place(mesh) if here else 0
        self.ranks, self.all_here = range(place, place + here), mesh.size() == 1

    def processes(self, axes: tuple[str, ...] | None = None) -> Sequence[int]:
        return () if self.all_here else _members(self.mesh, tuple(axes_of(self.mesh)) if axes is None else axes)

    def lines(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        flat = self.mesh.mesh.flatten().tolist()
        return [tuple(flat[place] for place in line) for line in groups(self.mesh, axes)]

    def carry_out(
        self, kind: Kind, x: Any, axes: tuple[str, ...], params: Sequence[Any], later: bool = False, **how: Any
    ) -> Any:
        return kind.on_group(x, *group_along(self.mesh, axes), *params, later=later, **how)

    def everyone(self, mine: Sequence[Sequence[Any]], why: str) -> list[list[Any]]:
        row = [leaf[0] for leaf in mine]
        if self.all_here:
            return [row]
        if talks_to_nobody():
            return [row] * self.mesh.size()
        # a mesh may be of a part of the ranks: the others do not come
        axes, met = tuple(axes_of(self.mesh)), self.processes()
        if (watch := context.watch()) is not None:
            watch.compare(met, RankCall(f"{why} (all_gather_object)", "over all ranks"))
        group, positions = group_along(self.mesh, axes)
        values: list[Any] = [None] * len(met)
        with torch_internals.no_transforms(), torch_internals.unrecorded():  # the tensors that it makes are its own
            dist.all_gather_object(values, row, group)
        return [values[position] for position in positions]


# --- dtypes -----------------------------------------------------------------------------------------------------------

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _as_bits(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    if x.dtype in dtypes.CARRIED or x.dtype.itemsize == 1:
        carrier = dtypes.CARRIED.get(x.dtype, torch.uint8)
        return x.view(carrier) if x.ndim else x.reshape(1).view(carrier)
    return x


def _from_bits(bits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Bits that stand for a tensor like `x`."""
    return bits if bits.dtype is x.dtype and x.ndim else bits.view(x.dtype).view(x.shape)


def _ordered(x: torch.Tensor, op: str) -> torch.Tensor:
    """Integers in the order of the floats `x`, with NaN where it wins: groups lose a NaN in a maximum of floats."""
    wide = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32).contiguous()
    bits = wide.view(torch.int64 if wide.dtype is torch.float64 else torch.int32)
    bits = bits ^ ((bits >> (8 * bits.dtype.itemsize - 1)) & torch.iinfo(bits.dtype).max)
    limits = torch.iinfo(bits.dtype)
    return torch.where(wide.isnan(), limits.max if op == "max" else limits.min, bits)


def _ordered_back(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bits = bits ^ ((bits >> (8 * bits.dtype.itemsize - 1)) & torch.iinfo(bits.dtype).max)
    return bits.view(torch.float64 if bits.dtype is torch.int64 else torch.float32).to(dtype)


# --- the collectives: what `collectives` says of each; `later`, a handle whose `wait` gives the result ----------------


def all_reduce(x: torch.Tensor, group: Any, positions: Positions, op: str, later: bool, fresh: bool = False) -> Any:
    """The sum, maximum or minimum of the group's values; where `x` is `fresh`, perhaps in its memory."""
    if op != "sum" and x.dtype.is_floating_point:
        bits = _ordered(x, op)
        work = dist.all_reduce(lent := _another_name(bits), op=_REDUCE[op], group=group, async_op=later)
        return _then(work, _ordered_back, bits, x.dtype, lent=[lent])
    carrier = dtypes.SUMMED.get(x.dtype, x.dtype)
    if carrier is not x.dtype:
        out = x.to(carrier).contiguous()
    else:
        out = x if fresh else x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(lent := _another_name(out), op=_REDUCE[op], group=group, async_op=later)
    return _then(work, out.to, x.dtype, lent=[lent])


def all_gather(x: torch.Tensor, group: Any, positions: Positions, dim: int, later: bool) -> Any:
    """The values of the group's ranks, joined along `dim`."""
    bits = _as_bits(x)
    out = torch.empty((len(positions), *bits.shape), dtype=bits.dtype, device=x.device)
    lent = _another_name(out).view(-1), _another_name(bits.contiguous()).view(-1)
    work = torch_internals.all_gather_single(*lent, group=group, async_op=later)
    return _then(work, _joined, out, positions, x, dim, lent=lent)


def _joined(out: torch.Tensor, positions: Positions, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The blocks that have arrived, a row for each rank of the group, joined along `dim` as blocks of the dtype of `x`."""
    blocks = out.view(x.dtype) if out.dtype is not x.dtype else out
    if not isinstance(positions, range):
        blocks = blocks[positions]
    return blocks.movedim(0, dim).contiguous().flatten(dim, dim + 1)


def _rows(x: torch.Tensor, positions: Positions, dim: int) -> torch.Tensor:
    """The pieces of `x` along `dim`, a row for each rank of the group."""
    n = len(positions)
    rows = x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)
    return (rows if isinstance(positions, range) else rows[sorted(range(n), key=positions.__getitem__)]).contiguous()


def reduce_scatter(x: torch.Tensor, group: Any, positions: Positions, dim: int, later: bool) -> Any:
    """This rank's piece along `dim` of the sum of the group's values."""
    rows = _rows(x.to(dtypes.SUMMED.get(x.dtype, x.dtype)), positions, dim)
    if x.device.type == "cpu":  # gloo's own is a sum of a copy too, which its thread would hold
        if torch_internals.memory_number(rows) == torch_internals.memory_number(x):
            rows = rows.clone()
        work = dist.all_reduce(total := _another_name(rows), group=group, async_op=later)
        return _then(work, _row_of, rows, dist.get_rank(group), x.dtype, lent=[total])
    out = torch.empty(rows.shape[1:], dtype=rows.dtype, device=x.device)
    lent = _another_name(out).view(-1), _another_name(rows).view(-1)
    work = torch_internals.reduce_scatter_single(*lent, group=group, async_op=later)
    return _then(work, out.to, x.dtype, lent=lent)


def _row_of(rows: torch.Tensor, me: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's row, in memory of its own."""
    return rows[me].to(dtype, copy=True)


def reduce(x: torch.Tensor, group: Any, positions: Positions, target: int, later: bool) -> Any:
    """The sum of the group's values at its rank `target`; what the others get is nothing to use."""
    out = x.to(dtypes.SUMMED.get(x.dtype, x.dtype), copy=True).contiguous()
    work = dist.reduce(lent := _another_name(out), group=group, group_dst=positions[target], async_op=later)
    return _then(work, out.to, x.dtype, lent=[lent])


def all_to_all(x: torch.Tensor, group: Any, positions: Positions, split_dim: int, concat_dim: int, later: bool) -> Any:
    """The pieces along `split_dim` that the group's ranks send here, joined along `concat_dim`."""
    bits = _as_bits(_rows(x, positions, split_dim))
    out = torch.empty_like(bits)
    lent = _another_name(out), _another_name(bits)
    work = dist.all_to_all_single(*lent, group=group, async_op=later)
    return _then(work, _joined, out, positions, x, concat_dim, lent=lent)


def permute(x: torch.Tensor, group: Any, positions: Positions, pairs: Sequence[tuple[int, int]], later: bool) -> Any:
    """The value of this rank's source among the (source, destination) pairs; without one, zeros."""
    me = positions.index(dist.get_rank(group))
    bits = _as_bits(x)
    out, lent = torch.zeros_like(bits), _another_name(bits)
    operations = []
    for source, destination in pairs:
        if source == me and destination == me:
            out.copy_(bits)
        elif source == me:
            operations.append(dist.P2POp(dist.isend, lent, group=group, group_peer=positions[destination]))
        elif destination == me:
            operations.append(dist.P2POp(dist.irecv, out, group=group, group_peer=positions[source]))
    begun = InFlight(dist.batch_isend_irecv(operations) if operations else (), _from_bits, (out, x), [lent])
    return begun if later else begun.wait()


def broadcast(x: torch.Tensor, group: Any, positions: Positions, source: int, later: bool) -> Any:
    """The value of the group's rank `source`."""
    bits = _as_bits(x.clone(memory_format=torch.contiguous_format))
    work = dist.broadcast(lent := _another_name(bits), group=group, group_src=positions[source], async_op=later)
    return _then(work, _from_bits, bits, x, lent=[lent])
