"""Views whose elements lie on other ranks: made without them, which are moved when the view is first read."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context
from ..base.array_notes import noted, notes_of
from ..base.errors import ReshardError
from ..distributed import value_flow
from ..distributed.blocks import of_each
from .aliasing import MovedView, missed, moved_view, note_views, remember_sums
from .rules.traits import STATES_OFFSET
from .strict import refuse_moves


def state_offsets(func: Any, args: Sequence[Any], views: Sequence[Any], offsets: Sequence[int]) -> None:
    """Make views say where they begin in memory on one device: autograd under functorch shows a gradient by that."""
    at = STATES_OFFSET.get(func)
    first = 0 if at is not None and len(args) > at and args[at] is not None else args[0].storage_offset()
    for view, offset in zip(views, offsets):
        if isinstance(view, DTensor) and view is not args[0] and view.storage_offset() != first + offset:
            torch_internals.set_storage_offset(view, first + offset)


def elements_move(x: Any, moves: bool) -> bool:
    """Whether a view of `x`, for which `x` moves or not, shows elements that are to come from other ranks, or is a view of
    such a view. Not where `x` is a copy by nature (a conjugate): what is written there is refused."""
    return moved_view(x) is not None or (moves and notes_of(x).moved is None)


def deferred(cls: Any, args: Sequence[Any], kwargs: dict[str, Any], decision: Any) -> Any:
    """A view without elements: they are moved when it is first read, and what is written into it is written where they are."""
    source, link, func = args[0], moved_view(args[0]), decision.func
    with torch_internals.unrecorded():
        shown: Any = (
            link.shown
            if link is not None
            else torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
        )
        metas = func(shown, *args[1:], **kwargs)
    metas = list(metas) if decision.many else [metas]
    base = link.base if link is not None else source
    recorded = torch_internals.is_recorded()
    refusal = _refusal(args, kwargs, decision) if context.is_strict() else None
    outs, siblings = [], []
    for i, meta in enumerate(metas):
        local = torch_internals.local(base)
        if meta.dtype != base.dtype:  # of what is made here only the kind counts
            local = of_each(lambda block, dtype=meta.dtype: block.view(dtype), local)
        out = torch_internals.new_dtensor(cls, local, decision.spec_of_result(i, meta))
        torch_internals.forget_local(out)
        outs.append(out)
    state_offsets(func, args, outs, decision.offsets)
    remember_sums(source, outs, False)
    note_views(source, outs, True)
    for i, (out, meta) in enumerate(zip(outs, metas, strict=True)):
        noted(out).moved = MovedView(
            source,
            torch_internals.spec(source),
            func,
            tuple(args[1:]),
            kwargs,
            decision,
            i if decision.many else None,
            meta,
            base,
            recorded,
            siblings,
            refusal,
        )
        siblings.append(weakref.ref(out))
    return outs if decision.many else outs[0]


def _refusal(args: Sequence[Any], kwargs: dict[str, Any], decision: Any) -> ReshardError | None:
    """What `strict` says of the move, should the view be read: with the line that takes it."""
    try:
        refuse_moves(decision.func, args, kwargs, decision.moves_of(args, kwargs))
    except ReshardError as error:
        return error
    return None


def read(x: Any) -> None:
    """Bring the elements of a view that was made without them."""
    link = moved_view(x)
    if link is None or torch_internals.spec(link.source) is not link.spec:
        raise AttributeError(torch_internals.LOCAL) if link is None else missed()
    if link.refusal is not None and context.is_strict():
        raise link.refusal
    outside = torch_internals.is_recorded() and not link.recorded  # a recording that began later sees a finished value
    with torch_internals.unrecorded() if outside else contextlib.nullcontext(), value_flow.of_one_op():
        out = link.decision.run_now(type(x), (link.source, *link.args), link.kwargs)
    if link.number is None:
        torch_internals.set_local(x, torch_internals.local(out))
        return
    torch_internals.set_local(x, torch_internals.local(out[link.number]))
    for i, sibling in enumerate(link.siblings):  # which came with it
        if (other := sibling()) is not None and other is not x:
            torch_internals.set_local(other, torch_internals.local(out[i]))
