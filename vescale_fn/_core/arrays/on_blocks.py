"""Decisions whose op runs on the blocks, after its arguments were brought where it needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context
from ..base.array_notes import note_root, noted
from ..base.op_arguments import bind, tensors_in, with_tensors
from ..distributed import blocks, collectives
from ..distributed.mesh import communicator_of
from ..distributed.places import is_elsewhere
from ..sharding.spec import P, split_axes
from . import in_place, reshard, reshard_buckets, reshard_plan
from .aliasing import after_write, check_reads, check_writable, note_copy, note_views, remember_sums, remember_table
from .array_values import brought
from .decision import Decision
from .deferred_views import deferred, elements_move, state_offsets
from .lazy_layout import note_new, note_stated, note_view
from .places import not_here, stand_ins
from .rules.traits import READS_TABLE, SAME_VALUE, UNSHARED_VIEW
from .strict import refuse_moves

_local, _bare_dtensor = torch_internals.local, torch_internals.bare_dtensor
_forbid_data_ptr = torch_internals.forbid_data_ptr
_LISTS = frozenset((list, tuple))


@dataclass(frozen=True, eq=False)
class Local(Decision):
    """The op as it is, on the blocks as they are; one result, a new array."""

    op: Any  # what runs on the blocks
    out: Any  # the DTensorSpec of its result

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        local = [_local(a) if a.__class__ is cls else a for a in args]
        out = self.op(*local, **kwargs) if kwargs else self.op(*local)
        wrapped = _bare_dtensor(cls, out, self.out, requires_grad=False)
        _forbid_data_ptr(wrapped)
        return wrapped


@dataclass(frozen=True, eq=False)
class LocalNew(Local):
    """`Local`, whose result's layout nobody has stated."""

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        out = Local.run(self, cls, args, kwargs)
        note_new((out,))
        return out


@dataclass(frozen=True, eq=False, kw_only=True)
class OnBlocks(Decision):
    """The op, or what stands for it, on the blocks; then what the ranks' parts make up. The results are new arrays."""

    targets: tuple[P, ...]  # how each tensor argument must lie, in order
    # (which tensor argument, the steps to its target, why)
    moves: tuple[tuple[int, tuple[reshard_plan.MoveStep, ...], str], ...]
    outs: tuple[Any, ...]  # a DTensorSpec, or None for no tensor, for each result
    many: Any  # tuple or list, where the op gives several results
    op: Any  # what runs on the blocks
    binds: bool = False  # it takes all arguments of `func`, in order
    finish: Any = None  # what makes the results of the folded parts
    again: bool = False  # `finish` takes the arguments, too
    sizes: tuple[int, tuple[Any, ...]] | None = None  # (argument position, its value on each played rank)
    reshapes: bool = False  # a view into that size, which may be none of a block
    covered: tuple[Any, ...] | None = None  # of each played rank, what its block covers: the last argument of `op`
    # (max, min or total, the axes to fold over, for each result)
    fold: tuple[str, tuple[tuple[str, ...], ...]] | None = None
    copies: bool = False  # the results are copies where the op gives views
    partial: bool = False  # some result is a partial sum: it will remember what it adds up to
    new: bool = False  # the results are new arrays whose layout nobody has stated
    numbers: tuple[Any, ...] = ()  # the results that are ints

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        results, copied = self.computed(args, kwargs)
        wrapped: list[Any] = [
            r if spec is None or r is None else torch_internals.new_dtensor(cls, r, spec)
            for r, spec in zip(results, self.outs, strict=True)
        ]
        self.note(args, kwargs, wrapped, copied)
        return self.many(wrapped) if self.many else wrapped[0]

    def note(self, args: Sequence[Any], kwargs: dict[str, Any], wrapped: list[Any], copied: bool) -> None:
        """Note of the results what later ops on them need to know."""
        if copied and self.func in UNSHARED_VIEW:
            note_copy(args[0], wrapped[0])
        if self.covered is not None and self.func in READS_TABLE:
            remember_table(args[1], args[0], split_axes(self.targets[0], 2)[0])  # after what was gathered before
        if self.new:
            note_new(wrapped)
        if self.partial:
            remember_sums(args[0], wrapped, self.func in SAME_VALUE)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any], Any]:
        """The local arguments, where the op needs them, and (position, value on each rank) of one that differs by rank."""
        tensors = tensors_in(args, kwargs)
        local: list[Any] = [torch_internals.local(x) if isinstance(x, DTensor) else x for x in tensors]
        for i, steps, why in self.moves:
            x = tensors[i]
            if isinstance(x, DTensor):
                local[i] = brought(x, self.targets[i], why)
            else:
                local[i] = reshard.run(x, tuple(x.shape), self.mesh, steps, "")
        values = iter(local)
        local_args, local_kwargs = with_tensors(list(args), values), with_tensors(kwargs, values) if kwargs else {}
        if self.binds:
            bound = bind(self.func, local_args, local_kwargs)
            only = {a.name for a in torch_internals.schema(self.func).arguments if a.kwarg_only}
            local_args = [v for k, v in bound.items() if k not in only]
            local_kwargs = {k: v for k, v in bound.items() if k in only}
        if self.covered is None:
            return local_args, local_kwargs, self.sizes
        return [*local_args, None], local_kwargs, (len(local_args), self.covered)

    def not_here(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether nothing is to be computed, as the arguments are at another place. Refused is the same on all ranks."""
        if self.moves and context.is_strict():
            refuse_moves(self.func, args, kwargs, self.moves_of(args, kwargs))
        return is_elsewhere(self.mesh) and not_here(self.mesh, tensors_in(args, kwargs))

    def moves_of(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[tuple[int, tuple[reshard_plan.MoveStep, ...], P]]:
        return [(i, steps, self.targets[i]) for i, steps, _ in self.moves]

    def computed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], bool]:
        """The local results, and whether they are copies of what is a view on one device."""
        if self.not_here(args, kwargs):
            outs = [number if spec is None else spec for spec, number in zip(self.outs, self.numbers, strict=True)]
            return stand_ins(self.mesh, outs, tensors_in(args, kwargs), kwargs), bool(self.moves or self.copies)
        local_args, local_kwargs, vary = self.arguments(args, kwargs)
        op, copied = self.op, [True] * bool(self.moves or self.copies)
        if self.reshapes:
            op = _reshape_if_needed(op, copied)
        results = self._list(run_on_blocks(op, local_args, local_kwargs, self.mesh, None, vary))
        if self.fold:
            results = _folded(self.func, results, self.mesh, *self.fold)
        if self.finish is not None:
            parts = [*results, *local_args] if self.again else results
            results = self._list(run_on_blocks(self.finish, parts, {}, self.mesh, None))
        return results, bool(copied)

    def _list(self, out: Any) -> list[Any]:
        return list(out) if self.many else [out]


@dataclass(frozen=True, eq=False, kw_only=True)
class ViewOnBlocks(OnBlocks):
    """A view of the blocks, or of what has been brought; where elements must move, that is left until they are read."""

    offsets: tuple[int, ...]  # where on one device each result begins in the memory of the first argument

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self.copies and elements_move(args[0], bool(self.moves)):
            note_stated(args[0])  # what shows elements that lie elsewhere knows where they do
            return deferred(cls, args, kwargs, self)
        return OnBlocks.run(self, cls, args, kwargs)

    run_now = OnBlocks.run

    def spec_of_result(self, i: int, shown: torch.Tensor) -> Any:
        """How a result lies; `shown` is that result in a tensor without values."""
        return self.outs[i]

    def note(self, args: Sequence[Any], kwargs: dict[str, Any], wrapped: list[Any], copied: bool) -> None:
        state_offsets(self.func, args, wrapped, self.offsets)
        note_views(args[0], wrapped, copied)
        for view in wrapped:
            note_view(args[0], self.func, args, view)
        OnBlocks.note(self, args, kwargs, wrapped, copied)
        if self.partial and not self.many and not self.moves and args[0].numel() == wrapped[0].numel():
            noted(wrapped[0]).seen = (args[0], torch_internals.spec(args[0]), self.func, args[1:], kwargs)


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalView(ViewOnBlocks):
    """A view of the blocks as they are; one result."""

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        notes = source.vfn_notes
        if notes is not None and notes.moved is not None:
            return ViewOnBlocks.run(self, cls, args, kwargs)
        local = [_local(a) if a.__class__ is cls else a for a in args]
        sizes = self.sizes
        if sizes is not None:
            local[sizes[0]] = sizes[1][0]
        try:
            out = self.op(*local, **kwargs) if kwargs else self.op(*local)
        except (RuntimeError, ValueError):  # the latter on tensors without values
            return ViewOnBlocks.run(self, cls, args, kwargs)
        wrapped = _bare_dtensor(cls, out, self.outs[0], requires_grad=False)
        _forbid_data_ptr(wrapped)
        if notes or self.offsets[0]:  # what is no view of another array begins where its memory does
            if wrapped.storage_offset() != (offset := source.storage_offset() + self.offsets[0]):
                torch_internals.set_storage_offset(wrapped, offset)
        if notes:
            note_views(source, (wrapped,), False)
            note_view(source, self.func, args, wrapped)
        else:
            note_root(wrapped, source)
        return wrapped


@dataclass(frozen=True, eq=False, kw_only=True)
class WriteOnBlocks(OnBlocks):
    """The op writes into the blocks of its first argument, or of each array of a list, which lies right for it."""

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return in_place.write(self, cls, args, kwargs, bool(self.moves))

    def run_now(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Carry it out, after all that may be refused."""
        places = [i for i, _ in blocks.written(self.func)]
        if not self.not_here(args, kwargs):
            local_args, local_kwargs, vary = self.arguments(args, kwargs)
            lists = [local_args[i] for i in places]
            target = list(zip(*lists)) if isinstance(lists[0], (list, tuple)) else lists[0]
            run_on_blocks(self.op, local_args, local_kwargs, self.mesh, target, vary)
        for x in tensors_in([args[i] for i in places]):
            in_place.note_written(self.func, x)
        return args[0] if torch_internals.schema(self.func).returns else None


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalWrite(WriteOnBlocks):
    """The op as it is, on the blocks as they are: it writes the first."""

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        func, source = self.func, args[0]
        notes = source.vfn_notes
        if notes is not None and notes.moved is not None:
            return WriteOnBlocks.run(self, cls, args, kwargs)
        local = [_local(a) if a.__class__ is cls else a for a in args]
        for a in args:  # what shares memory with another array knows it
            if notes or kwargs or a.__class__ in _LISTS or (a.__class__ is cls and a.vfn_notes):
                check_reads(func, args, kwargs, source)
                break
        if notes:
            check_writable(func, source)
        self.op(*local, **kwargs) if kwargs else self.op(*local)
        if notes:
            after_write(source)
        return source


# --- running ----------------------------------------------------------------------------------------------------------


def run_on_blocks(op: Any, args: list[Any], kwargs: dict[str, Any], mesh: Any, target: Any, vary: Any = None) -> Any:
    """Run an op on local values, on each rank that this process plays.

    Args:
        target: what it writes.
        vary: (position, value on each rank) of an argument that differs by rank.
    """
    communicator = communicator_of(mesh)
    if not communicator.holds_blocks:
        return op(*args, **kwargs) if vary is None else communicator.varied(op, args, kwargs, vary)
    if vary is None and blocks.ranks_in((*args, *kwargs.values())) is None:
        out = op(*args, **kwargs)
        many = isinstance(out, (list, tuple))
        return type(out)(map(communicator.held, out)) if many else communicator.held(out)
    return blocks.run_ranks(op, len(communicator.ranks), args, kwargs, target, share=True, vary=vary)


def _folded(func: Any, parts: list[Any], mesh: Any, how: str, axes_of_parts: Sequence[tuple[str, ...]]) -> list[Any]:
    """The results that the ranks' parts make up."""
    why = f"{torch_internals.operator_name(func).split('::')[-1].strip('_')} puts its parts together"
    if how != "total":
        return [
            collectives.all_reduce(part, mesh, axes, why, how) if axes else part
            for part, axes in zip(parts, axes_of_parts, strict=True)
        ]
    together: dict[Any, list[int]] = {}
    for i, (part, axes) in enumerate(zip(parts, axes_of_parts, strict=True)):
        if axes:
            together.setdefault((axes, part.dtype), []).append(i)
    for (axes, _), members in together.items():
        summed = reshard_buckets.all_reduce_bucket([parts[i] for i in members], mesh, axes, why)
        for i, value in zip(members, summed, strict=True):
            parts[i] = value
    return parts


def in_order(op: Callable[..., Any]) -> Callable[..., Any]:
    """An op whose arguments are made contiguous first."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return op(*(a.contiguous() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)

    return run


def _reshape_if_needed(op: Any, copied: list[bool]) -> Any:
    """A block may lie in memory so that what is a view of the whole is a copy of the block: that is noted in `copied`."""

    def run(x: torch.Tensor, size: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return op(x, size, **kwargs)
        except (RuntimeError, ValueError):  # the latter on tensors without values
            copied.append(True)
            return x.reshape(size)

    return run
