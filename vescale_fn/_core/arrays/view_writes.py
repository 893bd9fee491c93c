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
from ..base.op_arguments import replace, tensors_in
from ..distributed.blocks import Blocks
from ..distributed.mesh import coordinates, played_ranks
from ..sharding.index_map import axes_of, local_indices
from ..sharding.layout import WHOLE, axes_items, layout
from ..sharding.spec import from_split_axes, split_axes
from . import reshard
from .aliasing import MovedView
from .decision import reason
from .strict import refuse_moves
from .view_windows import pieces, shown_by


def is_same_view(one: MovedView, other: MovedView | None) -> bool:
    """Whether two views show the same elements."""
    if other is None or other.base is not one.base:
        return False
    a, b = one.shown, other.shown
    return (a.dtype, a.shape, a.stride(), a.storage_offset()) == (b.dtype, b.shape, b.stride(), b.storage_offset())


_BY_ELEMENT = {"copy_", "fill_", "zero_", "masked_fill_"}


def by_element(func: Any) -> bool:
    """Whether an op in place gives each element of its target a value that no other element of it has a part in."""
    name = torch_internals.operator_name(func).removeprefix("aten::")
    return name in _BY_ELEMENT or (name.endswith("_") and torch.Tag.pointwise in func.tags)


def check_fit(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise, on all ranks alike, what torch raises where sizes or dtypes do not fit."""
    with torch_internals.unrecorded():
        metas = iter([torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tensors_in(args, kwargs)])
        func(*[replace(a, metas) for a in args], **{k: replace(a, metas) for k, a in kwargs.items()})


def write_pieces(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], link: MovedView, brought: Callable[..., Any]
) -> bool:
    """Write into each block what of it the view shows; False where that is not a matter of rectangles.

    Args:
        link: how the view came about.
        brought: gives the local value of an array in another layout.
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
        reshard.plan(
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
    done: set[Any] = set()
    for at, rank in enumerate(played_ranks(mesh) if type(held) is Blocks else (played_ranks(mesh)[0],)):
        block = held.blocks[at] if type(held) is Blocks else held
        if (place := torch_internals.memory(block)) in done:
            continue
        done.add(place)
        given = [x.blocks[at] if type(x) is Blocks else x for x in local]
        writes = [
            (
                piece.of(block),
                [_part(x, piece.spans[skip:], shown.walks[skip:]) for x, skip in zip(given, first, strict=True)],
            )
            for piece in pieces(shown, local_indices(shape, axes, spec, coordinates(mesh, rank)), list(alike))
        ]
        # A plan has this write on every rank, or its passes would see memory that is written on some ranks alone.
        for target, values in writes or [(block.as_strided((0,), (1,)), list(map(_nothing, given)))]:
            mine = iter(values)
            rest = [replace(a, mine) for a in args[1:]]
            func(target, *rest, **{k: replace(a, mine) for k, a in kwargs.items()})
    return True


def _nothing(x: torch.Tensor) -> torch.Tensor:
    """No element of a tensor, as a view of it; a number as it is."""
    return x.as_strided((0,), (1,)) if x.ndim else x


def _part(x: torch.Tensor, spans: Sequence[slice], walks: Sequence[Any]) -> torch.Tensor:
    """What meets a piece of a view, of a tensor that meets all of it."""
    return x[tuple(span if size == walk.size else slice(None) for size, span, walk in zip(x.shape, spans, walks))]
