"""Views of views are one view, and what changes nothing goes: a view to the same shape, a transpose of a transpose,
another name for a value, a copy of what nobody changes.

Only what an operator says of shapes is used, never how a value lies in memory: ``view`` raises where that does not fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..ir.graph import is_aten, name_of, value
from ..ir.rewriting import Rewriting

_aten = torch.ops.aten
_VIEW, _PERMUTE, _T = _aten.view.default, _aten.permute.default, _aten.t.default
_SAME = ("detach", "alias", "lift_fresh", "lift")
_COPIES = ("clone", "contiguous")
_RESHAPES = ("view", "_unsafe_view", "squeeze", "unsqueeze", "expand", "slice", "narrow")
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}


def views(graph: fx.Graph) -> fx.Graph:
    """The graph with chains of views folded."""
    work = Rewriting(graph)
    for node in work.calls():
        if is_aten(node) and node not in work.fixed and isinstance(value(node), torch.Tensor):
            _fold(work, node)
    return work.graph


def _fold(work: Rewriting, node: fx.Node) -> None:
    name = name_of(node)
    x = node.args[0] if node.args else None
    if name in _PRODUCTS:
        for place in _PRODUCTS[name]:
            _uncopied(work, node, place)
    if not isinstance(x, fx.Node) or x in work.fixed or not isinstance(value(x), torch.Tensor):
        return
    if name in _SAME or (name == "to" and _alike(node, x)):
        work.replace(node, x)
    elif name in _COPIES:
        if _lies_alike(value(node), value(x)) and not node.meta.get("again"):
            work.replace(node, x)
    elif (order := permutation(node)) is not None and not _keeps_order(order, value(x).shape):
        _permuted(work, node, x, order)
    elif order is not None or (name in _RESHAPES and value(node).numel() == value(x).numel()):
        _reshaped(work, node, x)


def _reshaped(work: Rewriting, node: fx.Node, x: fx.Node) -> None:
    """A view of all elements in their order: one view of the first value that is no such view."""
    while x.target is _VIEW and x not in work.fixed:
        x = x.args[0]  # type: ignore[assignment]
    shape = list(value(node).shape)
    if list(value(x).shape) == shape and work.replace(node, x):
        return
    if node.target is _VIEW and node.args[0] is x:
        return
    if can_view(value(x), shape):
        work.replace(node, work.add(node, _VIEW, (x, shape), val=value(node)))


def _permuted(work: Rewriting, node: fx.Node, x: fx.Node, order: Sequence[int]) -> None:
    """A permutation of a permutation is one permutation."""
    before = permutation(x)
    if before is not None and x.args[0] not in work.fixed:
        order = [before[i] for i in order]
        x = x.args[0]  # type: ignore[assignment]
        if list(order) == sorted(order) and work.replace(node, x):
            return
    target, args = (_T, (x,)) if list(order) == [1, 0] else (_PERMUTE, (x, list(order)))
    if node.target is not target or node.args[0] is not x:
        work.replace(node, work.add(node, target, args, val=value(node)))


def permutation(node: fx.Node) -> list[int] | None:
    """The order in which a call puts the dims of its argument; None where it does something else."""
    name = name_of(node)
    if name not in ("permute", "transpose", "t") or not is_aten(node):
        return None
    n = value(node).ndim
    order = list(range(n))
    if name == "permute":
        return [d % n for d in node.args[1]]  # type: ignore[union-attr, operator]
    if n >= 2:
        a, b = (d % n for d in node.args[1:3]) if name == "transpose" else (0, 1)  # type: ignore[operator]
        order[a], order[b] = order[b], order[a]
    return order


def _keeps_order(order: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether dims that are not of size 1 stay in their order: then the permutation is a view to another shape."""
    moved = [d for d in order if shape[d] != 1]
    return moved == sorted(moved)


def can_view(x: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether a value that lies as `x` can be seen in another shape."""
    return seen(x, shape) is not None


def seen(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """How a value that lies as `x` lies when it is seen in another shape; None where that takes a copy."""
    return _seen(tuple(x.shape), x.stride(), tuple(shape))


@functools.lru_cache(maxsize=4096)  # the layers of a model ask for the same again and again
def _seen(before: tuple[int, ...], stride: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor | None:
    try:
        return torch.empty_strided(before, stride, device="meta").view(shape)
    except RuntimeError:
        return None


def _alike(node: fx.Node, x: fx.Node) -> bool:
    """Whether a conversion changes nothing."""
    a, b = value(node), value(x)
    return a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride() and True not in node.args


def _lies_alike(copy: torch.Tensor, x: torch.Tensor) -> bool:
    if (copy.is_conj(), copy.is_neg()) != (x.is_conj(), x.is_neg()):  # what is conjugated as it is read
        return False
    if math.prod(x.shape) == 0:
        return copy.stride() == x.stride()
    return all(a == b for a, b, size in zip(copy.stride(), x.stride(), x.shape) if size != 1)


def _uncopied(work: Rewriting, node: fx.Node, place: int) -> None:
    """A factor of a product need not be copied to lie contiguous: a transposed one will do."""
    factor: Any = node.args[place]
    order = permutation(factor) if isinstance(factor, fx.Node) else None
    viewed: Any = factor if order is None else factor.args[0]
    copy = viewed
    while isinstance(copy, fx.Node) and copy.target is _VIEW:
        copy = copy.args[0]
    if not isinstance(copy, fx.Node) or name_of(copy) not in _COPIES:
        return
    x: Any = copy.args[0]
    if (
        not work.fixed.isdisjoint((factor, viewed, copy, x))
        or value(x).is_conj()
        or value(x).dtype != value(factor).dtype
    ):
        return
    shape = list(value(viewed).shape)
    lies = seen(value(x), shape)
    if lies is None or not _is_matrix(lies):
        return
    new = work.add(node, _VIEW, (x, shape)) if list(value(x).shape) != shape else x
    node.update_arg(place, new if order is None else work.add(node, _PERMUTE, (new, order)))


def _is_matrix(x: torch.Tensor) -> bool:
    """Whether BLAS takes the last two dims as a matrix, or a transposed one, without a copy."""
    rows, columns = x.stride()[-2:]
    return (columns == 1 and rows >= max(1, x.shape[-1])) or (rows == 1 and columns >= max(1, x.shape[-2]))
