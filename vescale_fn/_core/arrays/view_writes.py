"""Writes into a view whose elements lie on other ranks: each rank writes those of them that its block has.

What is written is brought to the layout of the array along the dims that the view has in common with it, and is whole along
the others; so a number, or a value that is laid out like the array, needs no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context
from ..base.op_arguments import mapped, tensors_in, with_tensors
from ..distributed import blocks
from ..distributed.communicator import coordinates
from ..distributed.mesh import communicator_of
from ..sharding.index_map import axes_of, local_indices
from ..sharding.layout import WHOLE, axes_items, layout
from ..sharding.spec import from_split_axes, split_axes
from . import reshard, reshard_plan
from .aliasing import MovedView, memories, moved_view
from .array_values import brought, copied, put_back, reason, steps_to_whole, whole_tensor
from .rules.traits import BY_ELEMENT, COPY
from .strict import refuse_moves
from .view_windows import pieces, shown_by


def is_same_view(one: MovedView, other: MovedView | None) -> bool:
    """Whether two views show the same elements."""
    if other is None or other.base is not one.base:
        return False
    a, b = one.shown, other.shown
    return (a.dtype, a.shape, a.stride(), a.storage_offset()) == (b.dtype, b.shape, b.stride(), b.storage_offset())


def by_element(func: Any) -> bool:
    """Whether an op in place gives each element of its target a value that no other element of it has a part in."""
    name = torch_internals.operator_name(func).removeprefix("aten::")
    return name in BY_ELEMENT or (name.endswith("_") and torch.Tag.pointwise in func.tags)


def check_fit(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise, on all ranks alike, what torch raises where sizes or dtypes do not fit."""
    with torch_internals.unrecorded():
        metas = iter([torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tensors_in(args, kwargs)])
        args, kwargs = with_tensors((args, kwargs), metas)
        func(*args, **kwargs)


def write_pieces(func: Any, args: Sequence[Any], kwargs: dict[str, Any], link: MovedView) -> bool:
    """Write into each block what of it the view shows; False where that is not a matter of rectangles.

    Args:
        link: how the view came about.
    """
    base, mesh, axes = link.base, torch_internals.mesh(link.base), axes_of(torch_internals.mesh(link.base))
    spec, shape = layout(torch_internals.spec(base)), tuple(base.shape)
    shown = shown_by(link.shown, shape, base.stride())
    if spec.unreduced or shown is None:
        return False
    rows = split_axes(spec, base.ndim)
    alike = {k: d for k in range(len(shown.walks)) if (d := shown.alike(k)) is not None and rows[d]}
    others = tensors_in(args[1:], kwargs)
    first = [len(shown.walks) - x.ndim for x in others]  # the dim of the view that a tensor's first one meets
    goals = [
        from_split_axes(
            [
                rows[alike[d + skip]] if d + skip in alike and size == shown.walks[d + skip].size else ()
                for d, size in enumerate(x.shape)
            ]
        )
        for x, skip in zip(others, first, strict=True)
    ]
    steps = [
        reshard_plan.plan(
            tuple(x.shape), axes_items(mesh), layout(torch_internals.spec(x)) if isinstance(x, DTensor) else WHOLE, goal
        )
        for x, goal in zip(others, goals, strict=True)
    ]
    if context.is_strict():
        refuse_moves(func, args[1:], kwargs, [(i, one, goals[i]) for i, one in enumerate(steps) if one])
    local = []
    for x, goal, one in zip(others, goals, steps, strict=True):
        if isinstance(x, DTensor):
            local.append(brought(x, goal, reason(func, tuple(x.shape), x.dtype, layout(torch_internals.spec(x)), goal)))
        else:
            local.append(reshard.run(x, tuple(x.shape), mesh, one, ""))
    held = torch_internals.local(base)
    communicator, done = communicator_of(mesh), set[Any]()

    def write(rank: int, block: torch.Tensor, *given: torch.Tensor) -> None:
        writes = [
            (
                piece.of(block),
                [_part(x, piece.spans[skip:], shown.walks[skip:]) for x, skip in zip(given, first, strict=True)],
            )
            for piece in pieces(shown, local_indices(shape, axes, spec, coordinates(mesh, rank)), list(alike))
        ]
        # A plan has this write on every rank, or its passes would see memory that is written on some ranks alone.
        for target, values in writes or [(block.as_strided((0,), (1,)), list(map(_nothing, given)))]:
            rest, named = with_tensors((args[1:], kwargs), iter(values))
            func(target, *rest, **named)

    if not communicator.holds_blocks:
        communicator.each(write, held, *local)
        return True
    if communicator.is_elsewhere and not torch_internals.is_recorded():
        return True
    for rank, block, *given in zip(communicator.ranks, *map(communicator.parts, (held, *local)), strict=True):
        if (place := torch_internals.memory(block)) not in done:
            done.add(place)
            write(rank, block, *given)
    return True


def _nothing(x: torch.Tensor) -> torch.Tensor:
    """No element of a tensor, as a view of it; a number as it is."""
    return x.as_strided((0,), (1,)) if x.ndim else x


def _part(x: torch.Tensor, spans: Sequence[slice], walks: Sequence[Any]) -> torch.Tensor:
    """What meets a piece of a view, of a tensor that meets all of it."""
    return x[tuple(span if size == walk.size else slice(None) for size, span, walk in zip(x.shape, spans, walks))]


def write_where_shown(
    cls: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], note_written: Callable[[Any, Any], None]
) -> Any:
    """A write into a view whose elements are elsewhere: each rank writes those that it has.

    Args:
        note_written: notes that an op has written an array.
    """
    out = args[0]
    link = moved_view(out) if isinstance(out, DTensor) else None
    if link is not None and len(blocks.written(func)) == 1 and by_element(func):
        check_fit(func, args, kwargs)
        if func is COPY and is_same_view(link, moved_view(args[1])):
            return out  # what Python makes of x[1:] += y ends with x[1:] = x[1:]
        if out.numel() and not write_pieces(func, args, kwargs, link):
            _write_whole(func, args, kwargs, link)
        note_written(func, link.base)
        return out
    copies: dict[int, Any] = {}  # what is written, as values of its own, which are then put where they belong

    targets = blocks.written_arguments(func, args, kwargs)
    moved = {m for x in tensors_in(targets) if moved_view(x) is not None for m in memories(x)}
    originals = list({id(x): x for x in tensors_in(targets) if moved & memories(x)}.values())
    for x in originals:
        local = brought(x, layout(torch_internals.spec(x)), "", owned=True)
        local = local if moved_view(x) is not None else copied(local)
        copies[id(x)] = torch_internals.new_dtensor(cls, local, torch_internals.spec(x))
    result = cls.redispatch(func, *mapped(lambda x: copies.get(id(x), x), (args, kwargs)))
    for x in originals:
        cls.redispatch(COPY, (x, copies[id(x)]))
    back = {id(copy): x for x, copy in zip(originals, copies.values(), strict=True)}
    return back.get(id(result), result)


def _write_whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any], link: MovedView) -> None:
    """Write into the whole of what a view shows a part of, and put that back where it lies."""
    base = link.base
    if context.is_strict():
        refuse_moves(func, (base,), {}, [(0, steps_to_whole(base), WHOLE)])
    whole, _ = whole_tensor(func, base, written=True)
    others = iter(
        [whole_tensor(func, x, written=False)[0] if isinstance(x, DTensor) else x for x in tensors_in(args[1:], kwargs)]
    )
    rest, named = with_tensors((args[1:], kwargs), others)
    func(_seen_in(whole, args[0]), *rest, **named)
    put_back(func, base, whole)


def _seen_in(whole: torch.Tensor, view: Any) -> torch.Tensor:
    """The same view of a plain tensor in the place of its base."""
    link = moved_view(view)
    if link is None:
        return whole
    out = link.func(_seen_in(whole, link.source), *link.args, **link.kwargs)
    return out if link.number is None else out[link.number]
