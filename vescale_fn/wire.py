"""The collectives themselves: on a process group, and, rank by rank, on `Blocks`; each one is logged.

Every function takes one local value (a plain tensor on a real mesh, a `Blocks` on a simulated one), the mesh, and the
axes as a tuple of names, major first: the ranks of a group are numbered in that order. Nothing here is differentiable;
`ops/maps.py` and `reshard.py` are.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from . import _torch, context
from .agreement import Call, Value
from .blocks import Blocks
from .layout import text
from .lines import user_line
from .mesh import axes_of, groups, is_simulated, my_rank, root

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast")


@dataclass(frozen=True)
class Record:
    """One collective: what, over which axes, how many bytes on one rank, why, and the user's line."""

    op: str
    axes: tuple[str, ...]
    bytes: int
    why: str
    line: str

    @property
    def axis(self) -> str:
        """The axes as the user would write them: ``tp`` or ``dp,tp``."""
        return ",".join(self.axes)


@dataclass(frozen=True)
class Collective:
    """A collective as a value, to be carried out later, any number of times: a node of a plan.

    Args:
        kind: the name of a function of this file.
        params: what it takes besides the value, the mesh, the axes and the reason.
        why, line: the reason, and the user's line, for logs; they are no part of what the collective is.

    Called with a local value; or, on a simulated mesh, with the list of the ranks' blocks, which gives a list.
    """

    kind: str
    mesh: Any
    axes: tuple[str, ...]
    params: tuple[Any, ...] = ()
    why: str = field(default="", compare=False)
    line: str = field(default="", compare=False)

    @property
    def __name__(self) -> str:  # by which a graph calls its nodes
        return self.kind

    def __call__(self, x: Any) -> Any:
        before, _state.line = _state.line, self.line
        try:
            named = dict(zip(_PARAMS[self.kind], self.params, strict=True))
            run = globals()[self.kind]
            if isinstance(x, (list, tuple)):
                return run(Blocks(x), self.mesh, self.axes, **named, why=self.why).blocks
            return run(x, self.mesh, self.axes, **named, why=self.why)
        finally:
            _state.line = before

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of the result's shape and dtype, in which nothing is: communicates nothing."""
        n = group_size(self.mesh, self.axes)
        shape = list(x.shape)
        if self.kind == "all_gather":
            shape[self.params[0]] *= n
        elif self.kind == "reduce_scatter":
            shape[self.params[0]] //= n
        elif self.kind == "all_to_all":
            split_dim, concat_dim = self.params
            shape[split_dim] //= n
            shape[concat_dim] *= n
        return x.new_empty(shape)


class _State(threading.local):
    line: str = ""  # of the user's, of the recorded collective that runs


_state = _State()


_PARAMS: dict[str, tuple[str, ...]] = {  # what each collective takes besides a value, a mesh, axes and a reason
    "all_reduce": ("op",),
    "all_gather": ("dim",),
    "reduce_scatter": ("dim",),
    "all_to_all": ("split_dim", "concat_dim"),
    "permute": ("pairs",),
    "broadcast": ("source",),
}


def _recorded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that a recorder, where one is at work, notes instead of having it carried out."""
    names = tuple(inspect.signature(fn).parameters)[3:]

    @functools.wraps(fn)
    def collective(x: Any, mesh: Any, axes: tuple[str, ...], *rest: Any, **named: Any) -> Any:
        if _torch.dispatch_modes() and (recorder := _torch.recorder()) is not None and group_size(mesh, axes) > 1:
            given = {"op": "sum"} | dict(zip(names, rest)) | named
            params = tuple(tuple(p) if isinstance(p := given[name], list) else p for name in _PARAMS[fn.__name__])
            return recorder.collective(Collective(fn.__name__, mesh, tuple(axes), params, given["why"]), x)
        return fn(x, mesh, axes, *rest, **named)

    return collective


def _note(op: str, mesh: Any, axes: tuple[str, ...], tensor: Any, factor: int, why: str, details: str = "") -> None:
    """Log a collective that is about to run; in debug mode, first compare it with what the group's other ranks run."""
    if (watch := context.watch()) is not None and not is_simulated(mesh):
        values, details = watch.sent() or ((Value("", text(tensor)),), details)
        watch.compare(_members(mesh, axes), _call(op, axes, values, why, details))
    logs = context.logs()
    if logs:
        one = tensor.blocks[0] if type(tensor) is Blocks else tensor
        record = Record(op, axes, one.numel() * one.element_size() * factor, why, _state.line or user_line())
        for log in logs:
            log.append(record)


def _members(mesh: Any, axes: tuple[str, ...]) -> list[int]:
    """The ranks of the world in this rank's group along `axes`."""
    place, flat = my_rank(mesh), mesh.mesh.flatten().tolist()
    return [flat[member] for group in groups(mesh, axes) if place in group for member in group]


_BY_NAME = {"psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute", "pbroadcast"}


def _call(op: str, axes: tuple[str, ...], values: tuple[Value, ...], why: str, details: str) -> Call:
    """What a rank tells the others of a collective: in the user's words where the user called it."""
    cause = why.removeprefix("gradient of ")
    what = why if why in _BY_NAME else f"{why} ({op})" if cause.isidentifier() else op
    told = [part for part in (details, "" if cause.isidentifier() else why) if part]
    over = f"over {axes[0]!r}" if len(axes) == 1 else f"over {axes}"
    return Call(what, over, values, ", ".join(told))


def group_size(mesh: Any, axes: Sequence[str]) -> int:
    """How many ranks there are along `axes`."""
    sizes = axes_of(mesh)
    return math.prod(sizes[name] for name in axes)


# --- process groups ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _joint_group(mesh: Any, axes: frozenset[str], default: Any) -> Any:
    """This rank's process group along several axes at once (made on all ranks together), with its world ranks in order.

    `default` is the default process group: a new one makes new groups.
    """
    mine = None
    mesh = root(mesh)  # of which all ranks make the groups
    flat = mesh.mesh.flatten().tolist()
    if (watch := context.watch()) is not None:
        watch.compare(
            flat, Call("the first collective", f"over {tuple(name for name in axes_of(mesh) if name in axes)}")
        )
    for group in groups(mesh, [name for name in axes_of(mesh) if name in axes]):
        ranks = sorted(flat[place] for place in group)
        made = dist.new_group(ranks, use_local_synchronization=len(flat) < dist.get_world_size())
        if dist.get_rank() in ranks:
            mine = made
    return mine


def _group(mesh: Any, axes: tuple[str, ...]) -> tuple[Any, list[int]]:
    """The process group along `axes`, and for each position in the order of `axes` its index in that group."""
    single = list(axes_of(mesh)).index(axes[0])  # a mesh of torch's own may have no names
    group = mesh.get_group(single) if len(axes) == 1 else _joint_group(mesh, frozenset(axes), dist.group.WORLD)
    return group, _positions(mesh, axes, group)


@functools.lru_cache(maxsize=1024)
def _positions(mesh: Any, axes: tuple[str, ...], group: Any) -> list[int]:
    place = my_rank(mesh)
    members = next(g for g in groups(mesh, axes) if place in g)
    flat = mesh.mesh.flatten().tolist()
    return [dist.get_group_rank(group, flat[member]) for member in members]


_CARRIED = {  # what gloo cannot carry travels as bits of another type; sums of small integers as int32
    torch.uint16: torch.int8,
    torch.int16: torch.int8,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.bool: torch.uint8,
}


def _as_bits(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    if x.dtype in _CARRIED or x.dtype.itemsize == 1:
        return (
            x.view(_CARRIED.get(x.dtype, torch.uint8))
            if x.ndim
            else x.reshape(1).view(_CARRIED.get(x.dtype, torch.uint8))
        )
    return x


# --- the collectives --------------------------------------------------------------------------------------------------

_REDUCE = {
    "sum": (dist.ReduceOp.SUM, lambda blocks: functools.reduce(torch.add, blocks)),
    "max": (dist.ReduceOp.MAX, lambda blocks: functools.reduce(torch.maximum, blocks)),
    "min": (dist.ReduceOp.MIN, lambda blocks: functools.reduce(torch.minimum, blocks)),
}


def _simulated(x: Any, mesh: Any, axes: tuple[str, ...], formula: Callable[[list[torch.Tensor]], Any]) -> Blocks:
    """Apply ``formula(blocks of a group) -> one block, or a list of one a member`` to each group."""
    outs: list[Any] = [None] * len(x.blocks)
    for members in groups(mesh, axes):
        result = formula([x.blocks[m] for m in members])
        for i, member in enumerate(members):
            outs[member] = result[i] if isinstance(result, (list, tuple)) else result
    return Blocks(outs)


@_recorded
def all_reduce(x: Any, mesh: Any, axes: tuple[str, ...], why: str, op: str = "sum", fresh: bool = False) -> Any:
    """The sum (or max, min) of the group's values, on every rank; where `x` is `fresh`, perhaps in its memory."""
    if group_size(mesh, axes) == 1:
        return x
    _note("all_reduce", mesh, axes, x, 1, why, "" if op == "sum" else op)
    reduce_op, fold = _REDUCE[op]
    if is_simulated(mesh):
        return _simulated(x, mesh, axes, fold)
    group, _ = _group(mesh, axes)
    if op != "sum" and x.dtype.is_floating_point:
        bits = _ordered(x, op)
        dist.all_reduce(bits, op=reduce_op, group=group)
        return _ordered_back(bits, x.dtype)
    carrier = torch.int32 if x.dtype in (torch.int16, torch.uint16, torch.bool) else x.dtype
    if x.dtype in (torch.uint32, torch.uint64):
        carrier = torch.int64
    if carrier is not x.dtype:
        out = x.to(carrier).contiguous()
    else:
        out = x if fresh else x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=reduce_op, group=group)
    return out.to(x.dtype)


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


@_recorded
def all_gather(x: Any, mesh: Any, axes: tuple[str, ...], dim: int, why: str) -> Any:
    """The group's values, concatenated along `dim` in the order of `axes`, on every rank. All have one shape."""
    n = group_size(mesh, axes)
    if n == 1:
        return x
    _note("all_gather", mesh, axes, x, n, why, f"dim {dim}")
    if is_simulated(mesh):
        return _simulated(x, mesh, axes, lambda blocks: torch.cat(blocks, dim))
    group, positions = _group(mesh, axes)
    bits = _as_bits(x)
    out = torch.empty((n, bits.numel()), dtype=bits.dtype, device=x.device)
    _torch.all_gather_single(out.view(-1), bits.reshape(-1), group=group)
    if positions != list(range(n)):
        out = out[positions]
    blocks = out.view(n, *bits.shape).view(x.dtype) if bits.dtype is not x.dtype else out.view(n, *bits.shape)
    if dim == 0:
        return blocks.reshape(n * x.shape[0], *x.shape[1:])
    return torch.cat(blocks.unbind(), dim)


@_recorded
def reduce_scatter(x: Any, mesh: Any, axes: tuple[str, ...], dim: int, why: str) -> Any:
    """The sum of the group's values, of which each rank keeps its piece along `dim`. The size must divide."""
    n = group_size(mesh, axes)
    if n == 1:
        return x
    _note("reduce_scatter", mesh, axes, x, 1, why, f"dim {dim}")
    if is_simulated(mesh):
        return _simulated(x, mesh, axes, lambda blocks: [
            b.contiguous() for b in functools.reduce(torch.add, blocks).chunk(n, dim)])  # fmt: skip
    group, positions = _group(mesh, axes)
    if x.dtype in (torch.int16, torch.uint16, torch.bool, torch.uint32, torch.uint64):
        wide = torch.int64 if x.dtype.itemsize == 4 or x.dtype.itemsize == 8 else torch.int32
        return _reduce_scatter(x.to(wide), n, group, positions, dim).to(x.dtype)
    return _reduce_scatter(x, n, group, positions, dim)


def _reduce_scatter(x: torch.Tensor, n: int, group: Any, positions: list[int], dim: int) -> torch.Tensor:
    pieces: list[Any] = [None] * n
    for position, piece in zip(positions, x.chunk(n, dim), strict=True):
        pieces[position] = piece
    in_order = dim == 0 and positions == list(range(n))
    stacked = x.contiguous() if in_order else torch.stack(pieces).flatten(0, 1) if x.ndim > 1 else torch.cat(pieces)
    out = torch.empty(pieces[0].shape, dtype=x.dtype, device=x.device)
    _torch.reduce_scatter_single(out.view(-1), stacked.reshape(-1), group=group)
    return out


@_recorded
def all_to_all(x: Any, mesh: Any, axes: tuple[str, ...], split_dim: int, concat_dim: int, why: str) -> Any:
    """Piece i along `split_dim` goes to the group's rank i; what arrives is concatenated along `concat_dim`."""
    n = group_size(mesh, axes)
    if n == 1:
        return x
    _note("all_to_all", mesh, axes, x, 1, why, f"dim {split_dim} to dim {concat_dim}")
    if is_simulated(mesh):

        def formula(blocks: list[torch.Tensor]) -> list[torch.Tensor]:
            pieces = [b.chunk(n, split_dim) for b in blocks]
            return [torch.cat([pieces[source][i] for source in range(n)], concat_dim) for i in range(n)]

        return _simulated(x, mesh, axes, formula)
    group, positions = _group(mesh, axes)
    pieces: list[Any] = [None] * n
    for position, piece in zip(positions, x.chunk(n, split_dim), strict=True):
        pieces[position] = piece
    stacked = torch.stack(pieces)
    bits = _as_bits(stacked)
    out = torch.empty_like(bits)
    dist.all_to_all_single(out, bits, group=group)
    arrived = out.view(x.dtype).unbind() if bits.dtype is not x.dtype else out.unbind()
    return torch.cat([arrived[position] for position in positions], concat_dim)


@_recorded
def permute(x: Any, mesh: Any, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]], why: str) -> Any:
    """The value of `source` arrives at `destination` for each pair; a rank that is no destination gets zeros."""
    n = group_size(mesh, axes)
    if n == 1:
        return x if pairs else torch.zeros_like(x)
    _note("permute", mesh, axes, x, 1, why, f"perm {list(pairs)}")
    source_of = {destination: source for source, destination in pairs}
    if is_simulated(mesh):
        return _simulated(x, mesh, axes, lambda blocks: [
            blocks[source_of[i]] if i in source_of else torch.zeros_like(blocks[i]) for i in range(n)])  # fmt: skip
    group, positions = _group(mesh, axes)
    me = positions.index(dist.get_rank(group))
    bits = _as_bits(x)
    out = torch.zeros_like(bits)
    operations = []
    for source, destination in pairs:
        if source == me and destination == me:
            out.copy_(bits)
        elif source == me:
            operations.append(dist.P2POp(dist.isend, bits, group=group, group_peer=positions[destination]))
        elif destination == me:
            operations.append(dist.P2POp(dist.irecv, out, group=group, group_peer=positions[source]))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return out.view(x.dtype).view(x.shape) if bits.dtype is not x.dtype else out


@_recorded
def broadcast(x: Any, mesh: Any, axes: tuple[str, ...], source: int, why: str) -> Any:
    """The value of the group's rank `source`, on every rank."""
    if group_size(mesh, axes) == 1:
        return x
    _note("broadcast", mesh, axes, x, 1, why, f"from {source}")
    if is_simulated(mesh):
        return _simulated(x, mesh, axes, lambda blocks: blocks[source])
    group, positions = _group(mesh, axes)
    bits = _as_bits(x).clone()
    dist.broadcast(bits, group=group, group_src=positions[source])
    return bits.view(x.dtype).view(x.shape) if bits.dtype is not x.dtype else bits


def everyone(mine: Any, mesh: Any, why: str) -> list[Any]:
    """``[rank][leaf]`` of small Python values, from ``mine[leaf][played rank]``, on every rank."""
    if is_simulated(mesh) or group_size(mesh, tuple(axes_of(mesh))) == 1:
        ranks = len(mine[0]) if mine else 0
        return [[row[rank] for row in mine] for rank in range(ranks)]
    flat = mesh.mesh.flatten().tolist()  # a mesh may be of a part of the ranks: the others do not come
    if (watch := context.watch()) is not None:
        watch.compare(flat, Call(f"{why} (all_gather_object)", "over all ranks"))
    group, positions = _group(mesh, tuple(axes_of(mesh)))
    values: list[Any] = [None] * len(flat)
    dist.all_gather_object(values, [row[0] for row in mine], group)
    return [values[position] for position in positions]
