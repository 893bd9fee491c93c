"""Notes on arrays: the reduced value of a partial sum, views that had to be copied, the table that a lookup read.

A write through a copied view would be lost, and such a view would miss writes to its array: both raise.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import torch_internals
from ..base.array_notes import noted, notes_of, root_of
from ..base.errors import InPlaceError
from ..base.messages import op_text, report
from ..base.op_arguments import tensors_in
from ..distributed.blocks import LIST_OPS
from ..sharding.layout import layout, text
from .refusals import LOST, MISSED, ONE, READS
from .rules.traits import READS_A_NUMBER
from .strides import overlaps
from .view_windows import Place, overlap


class MovedView(NamedTuple):
    """How a view came about whose elements are not where it shows them: it is read by moving them, and a write goes back."""

    source: Any  # what it is a view of, and the layout that this had
    spec: Any
    func: Any  # the op that gave it, with the other arguments
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    decision: Any
    number: int | None  # which of the op's results it is
    shown: torch.Tensor  # the view, in a tensor without values that stands for `base`
    base: Any  # the array that has the elements
    recorded: bool
    siblings: list[Any]  # the op's results
    refusal: Any = None  # what `strict` says to a reader


def moved_view(x: Any) -> MovedView | None:
    """How a view came about whose elements are elsewhere; None for any other tensor."""
    found = notes_of(x).moved
    return found if type(found) is MovedView else None


def remember_sums(source: Any, outs: Sequence[Any], alias: bool) -> None:
    """Give each partial result a cell that keeps what it adds up to, shared by its aliases, until it is written."""
    shared = notes_of(source).sums if alias and len(outs) == 1 and source.shape == outs[0].shape else None
    for out in outs:
        if out is not None and layout(torch_internals.spec(out)).unreduced:
            noted(out).sums = shared if shared is not None else []


def note_views(source: Any, outs: Sequence[Any], moved: bool) -> None:
    """Note what the results alias: a write through one that had to be moved would be lost, and it would miss writes."""
    root, beside = root_of(source), _beside(source)
    moved = moved or notes_of(source).moved is not None
    for out in outs:
        if not isinstance(out, DTensor) or out is source:
            continue
        noted(out).root = root
        if moved and isinstance(root, DTensor):
            noted(out).moved = True
            _note_stale_after_write(root, out)
        for known in beside:
            _note_stale_after_write(known, out)


def _note_stale_after_write(root: Any, out: Any) -> None:
    notes = noted(root)
    copies = notes.copies = notes.copies or []
    if len(copies) % 64 == 63:  # those that nobody has any more
        copies[:] = [copy for copy in copies if copy() is not None]
    copies.append(weakref.ref(out))


def note_copy(source: Any, out: Any) -> None:
    """Note that a result is a copy of what should be memory of its source, which only matters while that is known."""
    root = root_of(source)
    noted(out).beside = (weakref.ref(root), *notes_of(root).beside)


def note_elsewhere(source: Any, out: Any) -> None:
    """Note that a result lies elsewhere than its source, whose memory it would be on one device: `with_sharding` moved it."""
    note_copy(source, out)
    for known in _beside(out):
        _note_stale_after_write(known, out)


def _beside(x: Any) -> list[Any]:
    """The arrays that somebody still knows, of whose memory `x`, or what it is a view of, would be a part on one device."""
    refs = notes_of(root_of(x)).beside
    return [known for ref in refs if (known := ref()) is not None] if refs else []


def memories(x: Any) -> set[int]:
    """What stands for the memory that a tensor has on one device: equal numbers, where two tensors may share some."""
    if not isinstance(x, DTensor):
        return {torch_internals.memory_number(x)} if x.layout is torch.strided else set()
    return {id(root_of(x)), *map(id, _beside(x))}


def entries(func: Any, args: Sequence[Any], kwargs: dict[str, Any], targets: Sequence[Any]) -> list[Any]:
    """The arguments of an op on lists, entry by entry, where an entry has memory in common with what another one writes.

    One device goes through the lists in order, so an entry sees what those before it wrote. Empty for any other call.

    Args:
        targets: the arguments that are written.
    """
    if (
        not targets
        or not isinstance(targets[0], (list, tuple))
        or not torch_internals.operator_name(func).startswith(LIST_OPS)
    ):
        return []
    n = len(targets[0])

    def entry(a: Any, k: int, name: str = "") -> Any:
        if isinstance(a, (list, tuple)) and len(a) == n:
            return [a[k]]
        return a[k : k + 1] if name == "scalars" and isinstance(a, torch.Tensor) and a.ndim else a

    names = [a.name for a in torch_internals.schema(func).arguments]
    calls = [
        ([entry(a, k, name) for a, name in zip(args, names)], {name: entry(a, k, name) for name, a in kwargs.items()})
        for k in range(n)
    ]
    writers: dict[int, set[int]] = {}
    for k in range(n):
        for memory in _all_memories([entry(a, k) for a in targets if isinstance(a, (list, tuple))]):
            writers.setdefault(memory, set()).add(k)
    alone = all(writers.get(memory, {k}) == {k} for k, call in enumerate(calls) for memory in _all_memories(*call))
    return [] if alone else calls


def _all_memories(*values: Any) -> set[int]:
    return {memory for x in tensors_in(*values) for memory in memories(x)}


@functools.lru_cache(maxsize=4096)
def _reads_first(func: Any) -> bool:
    """Whether an op has read all that it needs before it writes: a number, which is the only thing that it reads."""
    return torch_internals.operator_name(func).removeprefix("aten::") in READS_A_NUMBER


def check_reads(func: Any, args: Sequence[Any], kwargs: dict[str, Any], target: Any) -> None:
    """Raise, on all ranks alike, if an op reads some of what it writes: one device refuses it, or gives what the order of the
    elements makes of it; a block does one or the other by its size.
    """
    if isinstance(target, (list, tuple)):
        roots = {id(root_of(x)) for x in target}
        if all(id(root_of(x)) not in roots for x in tensors_in([a for a in args if a is not target], kwargs)):
            return
        for k, x in enumerate(target):
            row = [a[k] if isinstance(a, (list, tuple)) and len(a) == len(target) else a for a in args]
            check_reads(func, row, {name: a for name, a in kwargs.items() if isinstance(a, torch.Tensor)}, x)
        return
    if not isinstance(target, DTensor):
        return
    root = root_of(target)
    for x in tensors_in(args, kwargs):
        if x is target or not isinstance(x, DTensor) or root_of(x) is not root:
            continue
        if not _reads_first(func) and overlap(_place(x), _place(target)):
            raise InPlaceError(
                report(
                    op_text(func),
                    READS,
                    [f"it writes {text(target)} and reads {text(x)}"],
                    "a copy of what is read: v.mul_(v[:, :1].clone())",
                )
            )


def _place(x: Any) -> Place:
    return Place(tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))


def check_writable(func: Any, target: Any) -> None:
    """Raise if a write to `target` (an array, or a list of them) would be lost, or seen in some of the places where one device
    shows it."""
    for x in target if isinstance(target, (list, tuple)) else (target,):
        if isinstance(x, DTensor) and any(overlaps(y.shape, y.stride()) for y in (x, root_of(x))):
            raise InPlaceError(
                report(
                    op_text(func), ONE, [f"it is {text(x)}, a part of what was expanded or unfolded"], "x.clone() first"
                )
            )
        if isinstance(x, DTensor) and (notes_of(x).moved is True or _beside(x)):
            raise InPlaceError(
                report(
                    op_text(func),
                    LOST,
                    [f"it is {text(x)}, of {text((*_beside(x), root_of(x))[0])}"],
                    "a new array: torch.where(mask, new, x), torch.cat, x.index_copy(...), x + y; or a layout of the source "
                    "in which the view is local: x = vfn.with_sharding(x, P())",
                )
            )


def missed() -> InPlaceError:
    """The error of a value that missed a write."""
    return InPlaceError(report("array", MISSED, fix="take the view, or call with_sharding, after the write"))


class _Stale:
    """Stands for the spec of a view that missed a write: whatever asks for it raises."""

    def __getattr__(self, name: str) -> Any:
        raise missed()

    def __hash__(self) -> int:
        return self.missing


def after_write(x: Any) -> None:
    """What was copied out of `x`, or out of what it is a view of, has missed a write: a view is read anew, the rest raises."""
    seen = x
    while seen is not None:  # torch counts no writes that an op of several steps makes, nor those into its views
        notes = notes_of(seen)
        if notes.sums:
            notes.sums.clear()
        seen = notes.seen[0] if notes.seen else None
    root = root_of(x)
    copies = notes_of(root).copies
    if copies:
        noted(root).copies = ()
    for view in (copy() for copy in copies):
        if moved_view(view) is not None and not _beside(view):
            torch_internals.forget_local(view)
            if sums := notes_of(view).sums:
                sums.clear()
            _note_stale_after_write(root, view)
        elif view is not None:
            torch_internals.set_spec(view, _Stale())


# Torch's op for the gradient of a table is given no table: how the table lay is known by the indices that it was read at,
# which autograd keeps. Where another transform has made new indices of them nothing is known, and the gradient is made whole.
_tables: Any = WeakTensorKeyDictionary()


def remember_table(indices: torch.Tensor, table: torch.Tensor, rows: tuple[str, ...]) -> None:
    """Note that a table whose rows lie along these axes was read at these indices."""
    _tables.setdefault(indices, {})[tuple(table.shape)] = rows


def table_rows(args: Sequence[Any]) -> tuple[str, ...]:
    """The axes along which the rows lay of the table that embedding_dense_backward is to give the gradient of."""
    grad, indices, count = args[:3]
    return _tables.get(indices, {}).get((count, grad.shape[-1]), ())
