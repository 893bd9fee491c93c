"""The collectives: one row each in `TABLE`, and one way for all of them, which records, widens sums, compares, logs.

Every function takes one local value (a plain tensor on a real mesh, a `Blocks` on a simulated one), the mesh, and the
axes as a tuple of names, major first: the ranks of a group are numbered in that order. Nothing here is differentiable;
`shard_map/collective_maps.py` and `arrays/reshard.py` are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import torch_internals
from ..base import context, op_lines, state
from ..base.messages import dtype_text
from ..base.no_values import NoValues
from ..sharding.layout import text
from . import process_group
from .bit_notes import BitNotes
from .blocks import Blocks
from .communicator import Communicator, Kind
from .divergence import RankCall, Value
from .mesh import communicator_of
from .value_flow import Moved

# --- what each is -----------------------------------------------------------------------------------------------------

_FOLD = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_Group = Sequence[torch.Tensor]  # the blocks of a group's ranks


def _folded(blocks: _Group, op: str) -> torch.Tensor:
    return functools.reduce(_FOLD[op], blocks)


def _exchanged(blocks: _Group, split_dim: int, concat_dim: int) -> list[torch.Tensor]:
    pieces = zip(*(b.chunk(len(blocks), split_dim) for b in blocks), strict=True)
    return [torch.cat(arrived, concat_dim) for arrived in pieces]


def _one_given(pieces: Sequence[torch.Tensor | None], block: torch.Tensor, *_: Any) -> torch.Tensor:
    """What one rank has given; zeros where none has."""
    given = [piece for piece in pieces if piece is not None]
    return given[0] if given else torch.zeros_like(block)


def _sum_at(pieces: Sequence[torch.Tensor], block: torch.Tensor, *_: Any) -> torch.Tensor:
    """What one rank gets of a sum, of the one piece of it that it has: a piece of nothing is zeros."""
    return pieces[0] if pieces[0].shape == block.shape else torch.zeros_like(block)


def _reduced(blocks: _Group, target: int) -> list[torch.Tensor]:
    return [_folded(blocks, "sum") if i == target else torch.zeros_like(block) for i, block in enumerate(blocks)]


def _permuted(blocks: _Group, pairs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    source_of = {destination: source for source, destination in pairs}
    return [blocks[source_of[i]] if i in source_of else torch.zeros_like(block) for i, block in enumerate(blocks)]


def _joined(shape: list[int], n: int, dim: int) -> None:
    shape[dim] *= n


def _split(shape: list[int], n: int, dim: int) -> None:
    shape[dim] //= n


def _split_and_joined(shape: list[int], n: int, split_dim: int, concat_dim: int) -> None:
    shape[split_dim] //= n
    shape[concat_dim] *= n


TABLE = {
    "all_reduce": Kind(
        ("op",),
        _folded,
        process_group.all_reduce,
        lambda op: "" if op == "sum" else op,
        shared=True,
        sums=_FOLD.__getitem__,
    ),
    "all_gather": Kind(
        ("dim",),
        torch.cat,
        process_group.all_gather,
        lambda dim: f"dim {dim}",
        shared=True,
        reshaped=_joined,
        pieces=lambda block, at, n, dim: [block] * n,
        put=lambda pieces, block, dim: torch.cat(pieces, dim),
    ),
    "reduce_scatter": Kind(
        ("dim",),
        lambda blocks, dim: _folded(blocks, "sum").chunk(len(blocks), dim),
        process_group.reduce_scatter,
        lambda dim: f"dim {dim}",
        reshaped=_split,
        pieces=lambda block, at, n, dim: block.chunk(n, dim),
        sums=lambda dim: torch.add,
    ),
    "reduce": Kind(
        ("target",),
        _reduced,
        process_group.reduce,
        lambda target: f"to {target}",
        pieces=lambda block, at, n, target: [block if i == target else block.reshape(-1)[:0] for i in range(n)],
        put=_sum_at,
        sums=lambda target: torch.add,
    ),
    "all_to_all": Kind(
        ("split_dim", "concat_dim"),
        _exchanged,
        process_group.all_to_all,
        lambda split_dim, concat_dim: f"dim {split_dim} to dim {concat_dim}",
        reshaped=_split_and_joined,
        pieces=lambda block, at, n, split_dim, concat_dim: block.chunk(n, split_dim),
        put=lambda pieces, block, split_dim, concat_dim: torch.cat(pieces, concat_dim),
    ),
    "permute": Kind(
        ("pairs",),
        _permuted,
        process_group.permute,
        lambda pairs: f"perm {list(pairs)}",
        pieces=lambda block, at, n, pairs: [block if (at, i) in pairs else None for i in range(n)],
        put=_one_given,
    ),
    "broadcast": Kind(
        ("source",),
        lambda blocks, source: blocks[source],
        process_group.broadcast,
        lambda source: f"from {source}",
        shared=True,
        pieces=lambda block, at, n, source: [block if at == source else None] * n,
        put=_one_given,
    ),
}
OPS = (*TABLE, "send", "receive")  # of a log: messages of pipelines, too


def all_reduce(
    x: Any, mesh: Any, axes: tuple[str, ...], why: str, op: str = "sum", fresh: bool = False, elements: int = 0
) -> Any:
    """The sum (or max, min) of the group's values, on every rank; where `x` is `fresh`, perhaps in its memory.

    `elements`: of the largest rank's value, where ranks outside of the group have more.
    """
    return _run("all_reduce", x, mesh, axes, (op,), why, elements, fresh=fresh)


def all_gather(
    x: Any, mesh: Any, axes: tuple[str, ...], dim: int, why: str, elements: int = 0, padded: bool = False
) -> Any:
    """The group's values, concatenated along `dim` in the order of `axes`, on every rank. All have one shape.

    `elements`, `padded`: as of a `Collective`.
    """
    return _run("all_gather", x, mesh, axes, (dim,), why, elements, padded)


def reduce_scatter(
    x: Any, mesh: Any, axes: tuple[str, ...], dim: int, why: str, elements: int = 0, padded: bool = False
) -> Any:
    """The sum of the group's values, of which each rank keeps its piece along `dim`. The size must divide.

    `elements`, `padded`: as of a `Collective`.
    """
    return _run("reduce_scatter", x, mesh, axes, (dim,), why, elements, padded)


def all_to_all(
    x: Any,
    mesh: Any,
    axes: tuple[str, ...],
    split_dim: int,
    concat_dim: int,
    why: str,
    elements: int = 0,
    padded: bool = False,
) -> Any:
    """Piece i along `split_dim` goes to the group's rank i; what arrives is concatenated along `concat_dim`.

    `elements`, `padded`: as of a `Collective`.
    """
    params = (split_dim, concat_dim)
    return _run("all_to_all", x, mesh, axes, params, why, elements, padded)


def permute(x: Any, mesh: Any, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]], why: str) -> Any:
    """The value of `source` arrives at `destination` for each pair; a rank that is no destination gets zeros."""
    if not pairs and group_size(mesh, axes) == 1:
        return torch.zeros_like(x)
    return _run("permute", x, mesh, axes, (tuple(pairs),), why)


def broadcast(x: Any, mesh: Any, axes: tuple[str, ...], source: int, why: str) -> Any:
    """The value of the group's rank `source`, on every rank."""
    return _run("broadcast", x, mesh, axes, (source,), why)


# --- one of them, carried out -----------------------------------------------------------------------------------------


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


New = Callable[[Sequence[int], torch.Tensor], torch.Tensor]


def _new_empty(shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(shape)


@dataclass(frozen=True)
class Collective:
    """A collective as a value, to be carried out later, any number of times: a node of a plan.

    Args:
        kind: its name in `TABLE`.
        params: what it takes besides the value, the mesh, the axes and the reason.
        why, line: the reason, and the user's line, for logs; they are no part of what the collective is.
        elements: of the largest rank's value, where ranks outside of the group may have more.
        padded: whether blocks are padded before it, and cut after it, on some ranks: what stands next to it on one rank need
            not do so on another.

    Called with a local value; or, on a simulated mesh, with the list of the ranks' blocks, which gives a list. A broadcast in a
    loop has another source in each iteration, a reduce another target: this parameter is a tuple with one for each, and it is
    called with the iteration's number (`turn`), too.
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

    def __call__(self, x: Any, turn: torch.Tensor | None = None, later: bool = False) -> Any:
        params = self.params if turn is None else (self.params[0][int(turn)],)
        told = self.line and (context.logs() or state.process.notes is not None)
        with context.setting(line=self.line) if told else contextlib.nullcontext():
            listed = isinstance(x, (list, tuple))
            x = Blocks(x) if listed else x
            out = _run(self.kind, x, self.mesh, self.axes, params, self.why, later=later)
            return out.blocks if listed else out

    def like(self, x: torch.Tensor, new: New = _new_empty) -> torch.Tensor:
        """A tensor of the result's shape and dtype, in which nothing is, made by `new` of its shape and `x`: communicates
        nothing."""
        return new(TABLE[self.kind].result_shape(x.shape, group_size(self.mesh, self.axes), self.params), x)

    def like_all(self, blocks: Sequence[torch.Tensor], new: New = _new_empty) -> list[torch.Tensor]:
        """`like`, of the blocks of all ranks that this process plays; ranks that get one value share one tensor."""
        if not TABLE[self.kind].shared:
            return [self.like(x, new) for x in blocks]
        communicator, made = communicator_of(self.mesh), dict[Any, torch.Tensor]()
        for at, x in enumerate(blocks):
            group = communicator.group_of(at, self.axes)
            made[group] = self.like(x, new) if group not in made else made[group]
        return [made[communicator.group_of(at, self.axes)] for at in range(len(blocks))]


@dataclass(frozen=True)
class Start(Collective):
    """The collective, begun: what it gives is still to come, and `wait` gives it. On a simulated mesh all is done at once."""

    @property
    def __name__(self) -> str:
        return f"start_{self.kind}"

    def __call__(self, x: Any, turn: torch.Tensor | None = None, later: bool = True) -> Any:
        return super().__call__(x, turn, later)


def wait(begun: Any) -> Any:
    """The result of a collective that has begun."""
    return begun.wait() if isinstance(begun, process_group.InFlight) else begun


def _run(
    kind: str,
    x: Any,
    mesh: Any,
    axes: tuple[str, ...],
    params: tuple[Any, ...],
    why: str,
    elements: int = 0,
    padded: bool = False,
    **how: Any,
) -> Any:
    """A collective of more than one rank: noted by a recorder, where one is at work, or carried out, a sum in the dtype of
    `context.sum_in`, where that holds more; a plan is made for one such dtype.

    Args:
        how: `later`, `fresh`: see `Communicator.carry_out`.
    """
    communicator = communicator_of(mesh)
    n = communicator.size(axes)
    if n == 1:
        return x
    wide = context.sums_in()
    if wide is not None and x.dtype.is_floating_point and (kind in ("reduce", "reduce_scatter") or params == ("sum",)):
        if x.dtype != wide and torch.promote_types(x.dtype, wide) == wide:
            out = _run(kind, _in_dtype(x, communicator, wide), mesh, axes, params, why, elements, padded, **how)
            return _in_dtype(out, communicator, x.dtype)
    if torch_internals.dispatch_modes() and (recorder := torch_internals.recorder()) is not None:
        return recorder.collective(Collective(kind, mesh, axes, params, why, elements=elements, padded=padded), x)
    row, logs = TABLE[kind], context.logs()
    if communicator.is_elsewhere:
        return communicator.carry_out(row, x, axes, params, **how)
    if (watch := context.watch()) is not None and (met := communicator.processes(axes)):
        values, details = watch.sent() or ((Value("", text(x)),), row.words(*params))
        watch.compare(met, _call(kind, axes, values, why, details))
    if state.process.notes is not None:
        _note(state.process.notes, kind, x, mesh, axes, params, why)
    if logs:
        one = x.blocks[0] if type(x) is Blocks else x
        recorded = state.now().line
        line, backward = (recorded, False) if recorded else op_lines.here()
        size = one.numel() * one.element_size() * (n if kind == "all_gather" else 1)
        record = Record(kind, axes, size, why, line, backward, dtype_text(one.dtype))
        for log in logs:
            log.append(record)
    return communicator.carry_out(row, x, axes, params, **how)


def _note(
    notes: BitNotes, kind: str, x: Any, mesh: Any, axes: tuple[str, ...], params: tuple[Any, ...], why: str
) -> None:
    """Note what a collective of a whole mesh is given: which copies of a part a process plays depends on how many there are."""
    communicator = communicator_of(mesh)
    if (
        not communicator.by_tree
        or getattr(mesh, "whole", mesh) is not mesh
        or mesh.cut
        or mesh.place is not None
        or isinstance(x.blocks[0], NoValues)
    ):
        return
    call = str(_call(kind, axes, (Value("", text(x.blocks[0])),), why, TABLE[kind].words(*params))).removesuffix(" at ")
    given = _sent_away(kind, communicator, x.blocks, axes, params)
    notes.compare(call, zip(communicator.ranks, given, strict=True), state.now().line or op_lines.here()[0])


def _sent_away(
    kind: str, communicator: Communicator, row: Sequence[torch.Tensor], axes: tuple[str, ...], params: tuple[Any, ...]
) -> Sequence[torch.Tensor]:
    """The blocks; in place of those of ranks from which nothing goes, empty ones: where a value is at a place, they have what
    their process has."""
    if kind not in ("broadcast", "permute"):
        return row
    sources = {params[0]} if kind == "broadcast" else {source for source, _ in params[0]}
    places = [communicator.group_of(at, axes).index(rank) for at, rank in enumerate(communicator.ranks)]
    return [x if place in sources else x.new_empty(0) for place, x in zip(places, row, strict=True)]


def _in_dtype(x: Any, communicator: Communicator, dtype: Any) -> Any:
    return communicator.each(lambda _, block: block.to(dtype), x, key=lambda rank: None)


_BY_NAME = {"psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute", "pbroadcast"}


def _call(op: str, axes: tuple[str, ...], values: tuple[Value, ...], why: str, details: str) -> RankCall:
    """What a rank tells the others of a collective: in the user's words where the user called it."""
    cause = why.removeprefix("gradient of ")
    what = why if why in _BY_NAME else f"{why} ({op})" if cause.isidentifier() else op
    told = [part for part in (details, "" if cause.isidentifier() else why) if part]
    over = f"over {axes[0]!r}" if len(axes) == 1 else f"over {axes}"
    return RankCall(what, over, values, ", ".join(told))


def group_size(mesh: Any, axes: Sequence[str]) -> int:
    """How many ranks there are along `axes`."""
    return communicator_of(mesh).size(tuple(axes))
