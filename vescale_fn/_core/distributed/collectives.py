"""The collectives themselves: on a process group, and, rank by rank, on `Blocks`; each one is logged.

Every function takes one local value (a plain tensor on a real mesh, a `Blocks` on a simulated one), the mesh, and the
axes as a tuple of names, major first: the ranks of a group are numbered in that order. Nothing here is differentiable;
`ops/maps.py` and `reshard.py` are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .. import torch_internals
from ..base import context, op_lines, state
from ..base.messages import dtype_text
from ..sharding.index_map import axes_of
from ..sharding.layout import text
from . import process_group
from .blocks import Blocks, each
from .divergence import Call, Value
from .mesh import groups, is_simulated, my_rank, played_ranks
from .value_flow import Moved

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast")


@dataclass(frozen=True)
class Record:
    """One collective: what, over which axes, how many bytes on one rank, why, the user's line, and the dtype."""

    op: str
    axes: tuple[str, ...]
    bytes: int
    why: str
    line: str
    backward: bool = False  # then `line` is that of the forward op, if that was logged too
    dtype: str = ""  # of what travels: f32, bf16
    # of what the interpreter moved: which value it was, and what became of the result
    moved: Moved | None = field(default=None, compare=False, repr=False)

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
        elements: of the largest rank's value, where ranks outside of the group may have more.
        padded: whether blocks are padded before it, and cut after it, on some ranks: what stands next to it on one rank need
            not do so on another.

    Called with a local value; or, on a simulated mesh, with the list of the ranks' blocks, which gives a list.
    """

    kind: str
    mesh: Any
    axes: tuple[str, ...]
    params: tuple[Any, ...] = ()
    why: str = field(default="", compare=False)
    line: str = field(default="", compare=False)
    elements: int = field(default=0, compare=False)
    padded: bool = field(default=False, compare=False)

    @property
    def __name__(self) -> str:  # by which a graph calls its nodes
        return self.kind

    def __call__(self, x: Any) -> Any:
        return self._carry_out(x)

    def _carry_out(self, x: Any, **how: Any) -> Any:
        named = dict(zip(_PARAMS[self.kind], self.params, strict=True))
        run = globals()[self.kind]
        with context.setting(line=self.line) if self.line and context.logs() else contextlib.nullcontext():
            if isinstance(x, (list, tuple)):
                return run(Blocks(x), self.mesh, self.axes, **named, **how, why=self.why).blocks
            return run(x, self.mesh, self.axes, **named, **how, why=self.why)

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


@dataclass(frozen=True)
class Start(Collective):
    """The collective, begun: what it gives is still to come, and `wait` gives it. On a simulated mesh all is done at once."""

    @property
    def __name__(self) -> str:
        return f"start_{self.kind}"

    def __call__(self, x: Any) -> Any:
        return self._carry_out(x, later=True)


def wait(begun: Any) -> Any:
    """The result of a collective that has begun."""
    return begun.wait() if isinstance(begun, process_group.InFlight) else begun


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
        if (
            torch_internals.dispatch_modes()
            and (recorder := torch_internals.recorder()) is not None
            and group_size(mesh, axes) > 1
        ):
            given: dict[str, Any] = {"op": "sum", "elements": 0, "padded": False} | dict(zip(names, rest)) | named
            params = tuple(tuple(p) if isinstance(p := given[name], list) else p for name in _PARAMS[fn.__name__])
            what = Collective(
                fn.__name__, mesh, tuple(axes), params, given["why"], elements=given["elements"], padded=given["padded"]
            )
            return recorder.collective(what, x)
        return fn(x, mesh, axes, *rest, **named)

    return collective


def _wide(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A sum in the dtype of `context.summing_in`, where that holds more; a plan is made for one such dtype."""

    names = tuple(inspect.signature(fn).parameters)[3:]

    @functools.wraps(fn)
    def collective(x: Any, mesh: Any, axes: tuple[str, ...], *rest: Any, **named: Any) -> Any:
        wide = context.sums_in()
        if wide is None or (dict(zip(names, rest)) | named).get("op", "sum") != "sum":
            return fn(x, mesh, axes, *rest, **named)
        if x.dtype == wide or not x.dtype.is_floating_point or torch.promote_types(x.dtype, wide) != wide:
            return fn(x, mesh, axes, *rest, **named)
        out = fn(_in_dtype(x, mesh, wide), mesh, axes, *rest, **named) if group_size(mesh, axes) > 1 else x
        return _in_dtype(out, mesh, x.dtype)

    return collective


def _in_dtype(x: Any, mesh: Any, dtype: Any) -> Any:
    return each(lambda _, block: block.to(dtype), played_ranks(mesh), x, key=lambda rank: None)


def _note(op: str, mesh: Any, axes: tuple[str, ...], tensor: Any, factor: int, why: str, details: str = "") -> None:
    """Log a collective that is about to run; in debug mode, first compare it with what the group's other ranks run."""
    if (watch := context.watch()) is not None and not is_simulated(mesh):
        values, details = watch.sent() or ((Value("", text(tensor)),), details)
        watch.compare(members(mesh, axes), _call(op, axes, values, why, details))
    logs = context.logs()
    if logs:
        one = tensor.blocks[0] if type(tensor) is Blocks else tensor
        recorded = state.now().line
        line, backward = (recorded, False) if recorded else op_lines.here()
        record = Record(op, axes, one.numel() * one.element_size() * factor, why, line, backward, dtype_text(one.dtype))
        for log in logs:
            log.append(record)


def members(mesh: Any, axes: tuple[str, ...]) -> list[int]:
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


# --- the collectives --------------------------------------------------------------------------------------------------

_FOLD = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def _simulated(x: Any, mesh: Any, axes: tuple[str, ...], formula: Callable[[list[torch.Tensor]], Any]) -> Blocks:
    """Apply ``formula(blocks of a group) -> one block, or a list of one a member`` to each group. The results are contiguous,
    as those of a process group are."""
    outs: list[Any] = [None] * len(x.blocks)
    for members in groups(mesh, axes):
        result = formula([x.blocks[m] for m in members])
        several = isinstance(result, (list, tuple))
        arrived = [one.contiguous() for one in result] if several else [result.contiguous()] * len(members)
        for member, block in zip(members, arrived, strict=True):
            outs[member] = block
    return Blocks(outs)


@_wide
@_recorded
def all_reduce(
    x: Any,
    mesh: Any,
    axes: tuple[str, ...],
    why: str,
    op: str = "sum",
    fresh: bool = False,
    elements: int = 0,
    later: bool = False,
) -> Any:
    """The sum (or max, min) of the group's values, on every rank; where `x` is `fresh`, perhaps in its memory.

    `elements`: of the largest rank's value, where ranks outside of the group have more.
    """
    if group_size(mesh, axes) == 1:
        return x
    _note("all_reduce", mesh, axes, x, 1, why, "" if op == "sum" else op)
    if is_simulated(mesh):
        return _simulated(x, mesh, axes, functools.partial(functools.reduce, _FOLD[op]))
    return process_group.all_reduce(x, mesh, axes, op, fresh, later)


@_recorded
def all_gather(
    x: Any,
    mesh: Any,
    axes: tuple[str, ...],
    dim: int,
    why: str,
    elements: int = 0,
    padded: bool = False,
    later: bool = False,
) -> Any:
    """The group's values, concatenated along `dim` in the order of `axes`, on every rank. All have one shape.

    `elements`, `padded`: as of a `Collective`.
    """
    n = group_size(mesh, axes)
    if n == 1:
        return x
    _note("all_gather", mesh, axes, x, n, why, f"dim {dim}")
    if is_simulated(mesh):
        return _simulated(x, mesh, axes, lambda blocks: torch.cat(blocks, dim))
    return process_group.all_gather(x, mesh, axes, n, dim, later)


@_wide
@_recorded
def reduce_scatter(
    x: Any,
    mesh: Any,
    axes: tuple[str, ...],
    dim: int,
    why: str,
    elements: int = 0,
    padded: bool = False,
    later: bool = False,
) -> Any:
    """The sum of the group's values, of which each rank keeps its piece along `dim`. The size must divide.

    `elements`, `padded`: as of a `Collective`.
    """
    n = group_size(mesh, axes)
    if n == 1:
        return x
    _note("reduce_scatter", mesh, axes, x, 1, why, f"dim {dim}")
    if is_simulated(mesh):
        return _simulated(
            x, mesh, axes, lambda blocks: [b.contiguous() for b in functools.reduce(torch.add, blocks).chunk(n, dim)]
        )
    return process_group.reduce_scatter(x, mesh, axes, n, dim, later)


@_recorded
def all_to_all(
    x: Any,
    mesh: Any,
    axes: tuple[str, ...],
    split_dim: int,
    concat_dim: int,
    why: str,
    elements: int = 0,
    padded: bool = False,
    later: bool = False,
) -> Any:
    """Piece i along `split_dim` goes to the group's rank i; what arrives is concatenated along `concat_dim`.

    `elements`, `padded`: as of a `Collective`.
    """
    n = group_size(mesh, axes)
    if n == 1:
        return x
    _note("all_to_all", mesh, axes, x, 1, why, f"dim {split_dim} to dim {concat_dim}")
    if is_simulated(mesh):

        def formula(blocks: list[torch.Tensor]) -> list[torch.Tensor]:
            pieces = [b.chunk(n, split_dim) for b in blocks]
            return [torch.cat([pieces[source][i] for source in range(n)], concat_dim) for i in range(n)]

        return _simulated(x, mesh, axes, formula)
    return process_group.all_to_all(x, mesh, axes, n, split_dim, concat_dim, later)


@_recorded
def permute(
    x: Any, mesh: Any, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]], why: str, later: bool = False
) -> Any:
    """The value of `source` arrives at `destination` for each pair; a rank that is no destination gets zeros."""
    n = group_size(mesh, axes)
    if n == 1:
        return x if pairs else torch.zeros_like(x)
    _note("permute", mesh, axes, x, 1, why, f"perm {list(pairs)}")
    if is_simulated(mesh):
        source_of = {destination: source for source, destination in pairs}
        return _simulated(
            x,
            mesh,
            axes,
            lambda blocks: [blocks[source_of[i]] if i in source_of else torch.zeros_like(blocks[i]) for i in range(n)],
        )
    return process_group.permute(x, mesh, axes, pairs, later)


@_recorded
def broadcast(x: Any, mesh: Any, axes: tuple[str, ...], source: int, why: str, later: bool = False) -> Any:
    """The value of the group's rank `source`, on every rank."""
    if group_size(mesh, axes) == 1:
        return x
    _note("broadcast", mesh, axes, x, 1, why, f"from {source}")
    if is_simulated(mesh):
        return _simulated(x, mesh, axes, lambda blocks: blocks[source])
    return process_group.broadcast(x, mesh, axes, source, later)


def everyone(mine: Any, mesh: Any, why: str) -> list[Any]:
    """``[rank][leaf]`` of small Python values, from ``mine[leaf][played rank]``, on every rank."""
    if is_simulated(mesh) or group_size(mesh, tuple(axes_of(mesh))) == 1:
        ranks = len(mine[0]) if mine else 0
        return [[row[rank] for row in mine] for rank in range(ranks)]
    flat = mesh.mesh.flatten().tolist()  # a mesh may be of a part of the ranks: the others do not come
    if (watch := context.watch()) is not None:
        watch.compare(flat, Call(f"{why} (all_gather_object)", "over all ranks"))
    group, positions = process_group.group_along(mesh, tuple(axes_of(mesh)))
    values: list[Any] = [None] * len(flat)
    with torch_internals.no_transforms(), torch_internals.unrecorded():  # the tensors that it makes are its own
        dist.all_gather_object(values, [row[0] for row in mine], group)
    return [values[position] for position in positions]
