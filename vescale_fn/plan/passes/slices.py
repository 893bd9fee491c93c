"""A slice of what an op made is that op on slices: slices move up, so that less is computed.

A slice goes up through ops that work element by element, and through views, up to where a value comes from. It does so where
nothing but slices uses the op's result, and these are one slice, or the ranks' own parts: what is computed only gets less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from ..graph import changed, copied, is_aten, name_of, value

_aten = torch.ops.aten


class Range(NamedTuple):
    """Which part of a value: along `dim`, `length` entries from `start` on."""

    dim: int
    start: int
    length: int


@dataclass(frozen=True)
class Cut:
    """A part of an argument, where an op is to be called on a part."""

    node: fx.Node
    part: Range


class Call(NamedTuple):
    """What is to be called, with which arguments, `Cut`s among them; and what that gives, where it is not to be found out."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    val: torch.Tensor | None = None


Rule = Callable[[fx.Graph, fx.Node, Range], "Call | None"]  # from a call and a part of its result to what gives that part


def part_of(node: fx.Node) -> Range | None:
    """What a node takes a part of: where it is a slice, which part of its first argument."""
    name = name_of(node)
    if name not in ("narrow", "slice") or node.target is _aten.narrow.Tensor:
        return None
    shape = value(node.args[0]).shape  # type: ignore[arg-type]
    dim, start, *rest = (*node.args[1:], *(0, 0)[len(node.args) - 1 :])
    if name == "slice" and (rest[1:] not in ([], [1]) or node.kwargs):
        return None
    dim = dim % len(shape)  # type: ignore[operator]
    start = start or 0
    if not isinstance(start, int):
        return None
    start = min(max(start + shape[dim] if start < 0 else start, 0), shape[dim])
    return Range(dim, start, value(node).shape[dim])


def moved_up(graph: fx.Graph, rules: Mapping[str, Rule]) -> fx.Graph:
    """The graph in which slices have gone up as far as `rules` (by the names of ops) and those of this file take them."""
    graph = copied(graph)
    hot = changed(graph)
    for node in reversed(list(graph.nodes)):
        rule = rules.get(name_of(node)) or _rule(node)
        if rule is None or node in hot:
            continue
        parts = {user: part_of(user) for user in node.users}
        if not parts or None in parts.values() or any(user in hot for user in parts) or not _worth(node, parts):
            continue
        made: dict[Range, fx.Node | None] = {}
        for user, part in parts.items():
            if part not in made:
                made[part] = _called(graph, node, user, part, rule)  # type: ignore[arg-type, index]
        if None in made.values():
            _erase(graph, made.values())
            continue
        for user, part in parts.items():
            user.replace_all_uses_with(made[part])  # type: ignore[arg-type, index]
            graph.erase_node(user)
        graph.erase_node(node)
    return graph


def _worth(node: fx.Node, parts: Mapping[fx.Node, Range | None]) -> bool:
    different = set(parts.values())
    return len(different) == 1 or (
        all("own" in user.meta for user in parts)
        and sum(math.prod(value(user).shape) for user in parts) <= math.prod(value(node).shape)
    )


def _called(graph: fx.Graph, node: fx.Node, user: fx.Node, part: Range, rule: Rule) -> fx.Node | None:
    """The node that makes a part of what `node` makes; None where that is not possible, or would lie otherwise in memory."""
    new: list[fx.Node] = []

    def cut(a: Any) -> Any:
        if not isinstance(a, Cut):
            return type(a)(map(cut, a)) if isinstance(a, (list, tuple)) else a
        new.append(graph.call_function(_aten.narrow.default, (a.node, *a.part)))
        new[-1].meta = {**user.meta, "val": value(a.node).narrow(*a.part)}
        return new[-1]

    with graph.inserting_before(node):
        call = rule(graph, node, part)
        if call is None:
            return None
        made = graph.call_function(call.target, cut(call.args), call.kwargs)
    new.append(made)
    val = call.val
    try:
        if val is None:
            args, kwargs = fx.node.map_arg((made.args, made.kwargs), value)
            val = call.target(*args, **kwargs)
    except RuntimeError:  # a view that the memory of the part does not allow
        pass
    if val is None or not (val.is_contiguous() or val.stride() == value(user).stride()):
        _erase(graph, new)
        return None
    made.meta = {**{key: what for key, what in node.meta.items() if key != "own"}, "val": val}
    return made


def _erase(graph: fx.Graph, nodes: Iterable[fx.Node | None]) -> None:
    for node in reversed([node for node in nodes if node is not None]):
        if not node.users:
            graph.erase_node(node)


# --- ops that work element by element ---------------------------------------------------------------------------------

_LIKE = {"zeros_like", "ones_like", "full_like", "empty_like", "_to_copy", "to", "detach", "alias", "lift_fresh_copy"}


def _rule(node: fx.Node) -> Rule | None:
    if not is_aten(node):
        return None
    name, op = name_of(node), node.target
    if name in _VIEWS:
        return _VIEWS[name]
    by_element = torch.Tag.pointwise in op.tags or name in _LIKE  # type: ignore[union-attr]
    return _by_element if by_element and not op._schema.is_mutable else None  # type: ignore[union-attr]


def _by_element(graph: fx.Graph, node: fx.Node, part: Range) -> Call | None:
    """The same op on the parts of its arguments; what is broadcast along the dim stays whole."""
    ndim, size = value(node).ndim, value(node).shape[part.dim]

    def of(a: Any) -> Any:
        if not isinstance(a, fx.Node) or not isinstance(value(a), torch.Tensor):
            return a
        dim = part.dim - (ndim - value(a).ndim)
        return Cut(a, part._replace(dim=dim)) if dim >= 0 and value(a).shape[dim] == size != 1 else a

    kwargs = {k: of(a) for k, a in node.kwargs.items()}
    if any(isinstance(a, (list, tuple)) for a in node.args) or any(isinstance(a, Cut) for a in kwargs.values()):
        return None
    return Call(node.target, tuple(map(of, node.args)), kwargs)


# --- views ------------------------------------------------------------------------------------------------------------


def _same_dims(graph: fx.Graph, node: fx.Node, part: Range) -> Call:
    return Call(node.target, (Cut(node.args[0], part), *node.args[1:]), dict(node.kwargs))  # type: ignore[arg-type]


def _permuted(order: Callable[[fx.Node, int], Sequence[int]]) -> Rule:
    def rule(graph: fx.Graph, node: fx.Node, part: Range) -> Call:
        ndim = value(node).ndim
        dim = order(node, ndim)[part.dim] % ndim
        return Call(node.target, (Cut(node.args[0], part._replace(dim=dim)), *node.args[1:]), dict(node.kwargs))  # type: ignore[arg-type]

    return rule


def _transposed(node: fx.Node, ndim: int) -> list[int]:
    order = list(range(ndim))
    one, other = (node.args[1] % ndim, node.args[2] % ndim) if len(node.args) > 1 else (0, ndim - 1)  # type: ignore[operator]
    order[one], order[other] = other, one
    return order


def _unsqueezed(graph: fx.Graph, node: fx.Node, part: Range) -> Call | None:
    at = node.args[1] % value(node).ndim  # type: ignore[operator]
    if part.dim == at:
        return None
    return Call(node.target, (Cut(node.args[0], part._replace(dim=part.dim - (part.dim > at))), at), {})  # type: ignore[arg-type]


def _expanded(graph: fx.Graph, node: fx.Node, part: Range) -> Call:
    x, shape = node.args[0], list(value(node).shape)
    size, dim = shape[part.dim], part.dim - (len(shape) - value(x).ndim)  # type: ignore[arg-type]
    shape[part.dim] = part.length
    whole = dim < 0 or value(x).shape[dim] != size or size == 1  # type: ignore[arg-type]
    return Call(node.target, (x if whole else Cut(x, part._replace(dim=dim)), shape), {})  # type: ignore[arg-type]


def _reshaped(graph: fx.Graph, node: fx.Node, part: Range) -> Call | None:
    """Where the part is whole entries of one dim of the argument."""
    x, shape = node.args[0], list(value(node).shape)
    before = value(x).shape  # type: ignore[arg-type]
    if 0 in shape:
        return None
    inner, outer = math.prod(shape[part.dim + 1 :]), math.prod(shape[: part.dim])
    for dim, size in enumerate(before):
        each = math.prod(before[dim + 1 :])
        if math.prod(before[:dim]) == outer and size * each == shape[part.dim] * inner and size > 1:
            start, length = part.start * inner, part.length * inner
            if start % each or length % each:
                return None
            shape[part.dim] = part.length
            return Call(node.target, (Cut(x, Range(dim, start // each, length // each)), shape), {})  # type: ignore[arg-type]
    return None


_VIEWS: dict[str, Rule] = {
    "t": _permuted(_transposed),
    "transpose": _permuted(_transposed),
    "permute": _permuted(lambda node, ndim: node.args[1]),  # type: ignore[arg-type, return-value]
    "unsqueeze": _unsqueezed,
    "expand": _expanded,
    "view": _reshaped,
    "reshape": _reshaped,
    "_unsafe_view": _reshaped,
    "detach": _same_dims,
    "alias": _same_dims,
}
