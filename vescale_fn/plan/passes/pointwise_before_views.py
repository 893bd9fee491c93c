"""Elementwise ops run before a view instead of after it, so that chains of views can meet and cancel.

So the views between the matrix products of a layer, from the rows of a matrix to the tokens of a batch and back, meet and
cancel (`views`). What works along the last dim, or adds up all others, can do so too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.distributed.collectives import Collective
from ..ir.graph import is_aten, name_of, value, viewed
from ..ir.mapped import Mapped
from ..ir.rewriting import Rewriting
from .views import seen

_VIEW = torch.ops.aten.view.default
_ALONG = {"_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2}  # their dim
_SUMS = ("sum", "mean", "amax", "amin")


def flat(graph: fx.Graph) -> fx.Graph:
    """The graph with views after elementwise calls in the place of views before them."""
    work = Rewriting(graph)
    packed: set[fx.Node] = set()
    unlike: dict[fx.Node, set[Any]] = {}  # of what gives several results, the shapes of arguments that are not packed
    for node in list(work.graph.nodes):
        part = node.target is operator.getitem
        if node.op == "call_function" and not part and node not in work.fixed and isinstance(value(node), torch.Tensor):
            node = _put_off(work, node, packed)
        if _is_packed(node, packed, unlike):
            packed.add(node)
    return work.graph


def _is_packed(node: fx.Node, packed: set[fx.Node], unlike: dict[fx.Node, set[Any]]) -> bool:
    """Whether a value is contiguous for certain: of arguments of its shape that lie in several ways, some of torch's kernels
    make results that lie otherwise than is said of them."""
    v = node.meta.get("val")
    if not isinstance(v, torch.Tensor) or not v.is_contiguous():
        return False
    if node.op == "placeholder":
        return True
    maker: Any = node.args[0] if node.target is operator.getitem else node
    if isinstance(maker.target, Mapped):
        return False
    if views_of := viewed(maker):
        return packed.issuperset(views_of)
    if maker not in unlike:
        unlike[maker] = {getattr(value(x), "shape", None) for x in maker.all_input_nodes if x not in packed}
    return v.shape not in unlike[maker]


def _put_off(work: Rewriting, node: fx.Node, packed: set[fx.Node]) -> fx.Node:
    """Compute a node in another shape, and view the result: what stands in its place."""
    inputs = node.all_input_nodes
    if not inputs or not all(isinstance(value(x), torch.Tensor) and x not in work.fixed for x in inputs):
        return node
    whole = value(inputs[0]).shape if name_of(node) in _SUMS else value(node).shape
    shapes = {tuple(value(made).shape) for x in inputs if (made := _made(x)) is not x and value(x).shape == whole}
    if len(shapes) != 1:
        return node
    before = shapes.pop()
    args = _arguments(node, whole, before)
    if args is None or not whole or not before:
        return node
    found = {x: _in_shape(x, whole, before) for x in inputs}
    more = sum(isinstance(how, tuple) for how in found.values())
    if None in found.values() or more > sum(how is not x for x, how in found.items()) - more:
        return node
    sources = {_made(x) if isinstance(how, tuple) else how for x, how in found.items()}
    if not packed.issuperset(sources):
        return node
    given: dict[fx.Node, fx.Node] = {}
    for x, how in found.items():
        given[x] = work.add(node, _VIEW, (x, list(how))) if isinstance(how, tuple) else how  # type: ignore[assignment]
    new = work.add(node, node.target, *fx.map_arg((args, node.kwargs), given.__getitem__))  # type: ignore[arg-type]
    if seen(value(new), value(node).shape) is None:
        return node
    view = work.add(node, _VIEW, (new, list(value(node).shape)), val=value(node))
    if not work.replace(node, view):
        return node
    packed.update(given.values())
    packed.update(x for x in (new, view) if value(x).is_contiguous())
    return view


def _made(x: fx.Node) -> Any:
    """What a value is a view of, in another shape."""
    made: Any = x
    while made.target is _VIEW:
        made = made.args[0]
    return made


def _in_shape(x: fx.Node, whole: Sequence[int], before: Sequence[int]) -> fx.Node | tuple[int, ...] | None:
    """What stands for an argument when the call is made in the shape `before` and not in `whole`: a value; or the shape in
    which the argument must be seen; None where there is neither."""
    shape = tuple(value(x).shape)
    common = 0  # how many of the last dims are the same
    while common < min(len(whole), len(before)) and whole[-1 - common] == before[-1 - common]:
        common += 1
    if len(shape) <= common:
        return x
    if shape == tuple(whole):
        wanted = tuple(before)
    elif common and shape == (*whole[:-1], 1):
        wanted = (*before[:-1], 1)
    else:
        return None
    made = _made(x)
    if tuple(value(made).shape) == wanted:
        return made
    return wanted if seen(value(x), wanted) is not None else None


def _arguments(node: fx.Node, whole: Sequence[int], before: Sequence[int]) -> tuple[Any, ...] | None:
    """The arguments of a call in another shape; None where it is not the same call there."""
    if isinstance(node.target, Collective):
        return node.args if node.target.kind == "all_reduce" else None
    if not is_aten(node):
        return None
    op: Any = node.target
    if torch.Tag.pointwise in op.tags and not torch_internals.schema(op).is_mutable:
        return node.args if node.kwargs.get("memory_format") in (None, torch.preserve_format) else None
    name, last = name_of(node), len(whole) - 1
    if whole[-1:] != before[-1:]:
        return None
    if name in _ALONG:
        place = _ALONG[name]
        if node.args[place] in (-1, last):
            return (*node.args[:place], -1, *node.args[place + 1 :])
    if name in _SUMS and len(node.args) > 1 and isinstance(node.args[1], (list, tuple)):
        dims = sorted(d % len(whole) for d in node.args[1])  # type: ignore[operator]
        if dims == [last]:
            return (node.args[0], [-1], *node.args[2:])
        if dims == list(range(last)) and len(before) == 2 and name == "sum":
            return (node.args[0], [0], *node.args[2:])
    return None
