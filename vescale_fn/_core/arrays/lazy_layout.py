"""Fresh arrays (`new_empty`, `new_zeros`) take the layout of what is first written into them.

A product, or what `new_empty` gives, is whole on every rank where its arguments are. Where a split value is written into it
(``h.add_(x)`` in torch's LSTM, ``q[..., :n] = x``), the array is split as that value is, which moves nothing, instead of
the value being gathered. Views that were taken before are taken again, so that they stay views.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base.array_notes import noted, notes_of, root_of
from ..distributed import blocks
from ..sharding.layout import WHOLE, axes_items, layout, spec_for
from ..sharding.merged_dim import Merged
from ..sharding.spec import from_split_axes, split_axes
from . import reshard, reshard_plan
from .rules.elementwise import elementwise
from .rules.table import find
from .rules.traits import DROPS_DIM, NEW

_MANY = 64  # of more views than these nobody keeps account


def is_new(func: Any, outs: Sequence[Any]) -> bool:
    """Whether an op's results, of these layouts, are new arrays that nobody has laid out."""
    return torch_internals.operator_name(func).removeprefix("aten::") in NEW and all(spec == WHOLE for spec in outs)


def note_new(outs: Sequence[Any]) -> None:
    """Note that the layout of these arrays is nobody's wish."""
    for out in outs:
        noted(out).views = []


def note_stated(x: Any) -> None:
    """Note that the user states the layout that an array has: it keeps it."""
    notes = notes_of(root_of(x))
    if notes.views is not None:
        notes.views = None


def note_view(source: Any, func: Any, args: Sequence[Any], out: Any) -> None:
    """Note a view of a new array: which of its dims each of the view's is, and which of them are cut."""
    notes = notes_of(root_of(source))
    views = notes.views
    if views is None:
        return
    if func not in DROPS_DIM or len(views) >= _MANY:
        notes.views = None
        return
    dims = _dims(source)
    at = (args[1] if len(args) > 1 else 0) % source.ndim
    cut = () if out.shape == source.shape else (dims[at],)
    if DROPS_DIM[func]:
        dims = dims[:at] + dims[at + 1 :]
    noted(out).part = source, func, tuple(args[1:]), dims
    views.append((weakref.ref(out), cut))


def _dims(x: Any) -> tuple[int, ...]:
    part = notes_of(x).part
    return tuple(range(x.ndim)) if part is None else part[3]


def settle(dispatch: Callable[..., Any], func: Any, args: Sequence[Any]) -> bool:
    """Split a new array as what is about to be written into it, or into a view of it, where that is possible."""
    target, writes = args[0], [i for i, _ in blocks.written(func)]
    root = root_of(target) if writes == [0] else None
    views = notes_of(root).views
    if root is None or views is None or find(func) is not elementwise or (root.is_leaf and root.requires_grad):
        return False
    rows = list(split_axes(layout(torch_internals.spec(root)), root.ndim))
    taken = {name for names in rows for name in names}
    cut = {dim for _, dims in views for dim in dims}
    before = list(rows)
    others = [x for x in args[1:] if isinstance(x, DTensor) and x.ndim <= target.ndim]
    for x in sorted(others, key=torch.Tensor.numel, reverse=True):
        names_of = split_axes(layout(torch_internals.spec(x)), x.ndim)
        for names, size, dim in zip(reversed(names_of), reversed(x.shape), reversed(_dims(target))):
            if (
                names
                and not isinstance(names, Merged)
                and size == root.shape[dim]
                and dim not in cut
                and not rows[dim]
                and taken.isdisjoint(names)
            ):
                rows[dim] = names
                taken.update(names)
    if rows == before:
        return False
    _split(dispatch, root, rows)
    return True


def _split(dispatch: Callable[..., Any], root: Any, rows: Sequence[tuple[str, ...]]) -> None:
    notes = noted(root)
    views, notes.views = notes.views, None
    mesh, shape, goal = torch_internals.mesh(root), tuple(root.shape), from_split_axes(rows)
    steps = reshard_plan.plan(shape, axes_items(mesh), layout(torch_internals.spec(root)), goal)  # slices alone
    torch_internals.set_local(root, reshard.run(torch_internals.local(root), shape, mesh, steps, ""))
    torch_internals.set_spec(root, spec_for(mesh, goal, root.shape, tuple(root.stride()), root.dtype))
    for ref, _ in views:  # type: ignore[union-attr]
        view = ref()
        if view is not None:
            source, func, args, _ = noted(view).part  # type: ignore[misc]
            again = dispatch(func, (source, *args), None)
            torch_internals.set_local(view, torch_internals.local(again))
            torch_internals.set_spec(view, torch_internals.spec(again))
    notes.views = views
