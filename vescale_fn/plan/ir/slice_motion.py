"""Move slices up through the ops that made their operand, so that only the part in use is computed.

A slice goes up through ops that work element by element, and through views, up to where a value comes from. It does so where
nothing but slices uses the op's result, and these are one slice, or the ranks' own parts: what is computed only gets less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from ..._core import torch_internals
from .graph import changed, copied, is_aten, name_of, value

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


class NewCall(NamedTuple):
    """What is to be called, with which arguments, `Cut`s among them; and what that gives, where it is not to be found out."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    val: torch.Tensor | None = None


Rule = Callable[
    [fx.Graph, fx.Node, Range], "NewCall | None"
]  # from a call and a part of its result to what gives that part


def _args(node: fx.Node) -> Any:
    return node.args


def part_of(node: fx.Node) -> Range | None:
    """What a node takes a part of: where it is a slice, which part of its first argument."""
    name = name_of(node)
    if name not in ("narrow", "slice") or node.target is _aten.narrow.Tensor:
        return None
    shape = value(_args(node)[0]).shape
    dim, start, *rest = (*_args(node)[1:], *(0, 0)[len(_args(node)) - 1 :])
    if name == "slice" and (rest[1:] not in ([], [1]) or node.kwargs):
        return None
    dim = dim % len(shape)
    start = start or 0
    if not isinstance(start, int):
        return None
    start = min(max(start + shape[dim] if start < 0 else start, 0), shape[dim])
    return Range(dim, start, value(node).shape[dim])


def moved_up(graph: fx.Graph, rules: Mapping[str, Rule]) -> fx.Graph:
    """The graph in which slices have gone up as far as `rules` (by the names of ops) and those of this file take them."""
    graph = copied(graph)
    hot = changed(graph)
    waiting = list(graph.nodes)
    while waiting:
        node = waiting.pop()
        rule = rules.get(name_of(node)) or _rule(node)
        if rule is None or node in hot:
            continue
        parts = {user: part for user in node.users if (part := part_of(user)) is not None and user not in hot}
        if not parts or len(parts) < len(node.users) or not _worth(node, parts):
            continue
        made: dict[Range, fx.Node | None] = {}
        for user, part in parts.items():
            if part not in made:
                made[part] = _called(graph, node, user, part, rule)
        if None in made.values():
            _erase(graph, made.values())
            continue
        for user, part in parts.items():
            user.replace_all_uses_with(made[part])
            graph.erase_node(user)
        graph.erase_node(node)
        waiting += [x for x in made.values() if x is not None]  # of which only a slice may be used, again
    return graph


def _worth(node: fx.Node, parts: Mapping[fx.Node, Range]) -> bool:
    sizes = {part: value(user).numel() for user, part in parts.items()}
    return len(sizes) == 1 or (all("own" in user.meta for user in parts) and sum(sizes.values()) <= value(node).numel())


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
            args, kwargs = map_arg((made.args, made.kwargs), value)
            val = call.target(*args, **kwargs)
    except RuntimeError:  # a view that the memory of the part does not allow
        pass
    if val is None or not _lies_as_well(val, value(user)):
        _erase(graph, new)
        return None
    made.meta = {**node.meta, "val": val}
    if made.target is _aten.narrow.default and isinstance(
        call.args[0], fx.Node
    ):  # two slices of one dim are neither of them
        made.meta.pop("own", None)
    return made


def _lies_as_well(x: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether every view of `before` can be one of `x`: it lies in the same order, without gaps, or in the same way."""
    if x.stride() == before.stride():
        return True
    steps = [before.stride(d) for d in range(x.ndim) if x.shape[d] > 1 and before.stride(d)]
    if x.is_contiguous() and steps == sorted(steps, reverse=True):
        return True
    dims = sorted((d for d in range(x.ndim) if x.shape[d] > 1), key=before.stride)
    return all(x.stride(d) == math.prod(x.shape[inner] for inner in dims[:i]) for i, d in enumerate(dims))


def _erase(graph: fx.Graph, nodes: Iterable[fx.Node | None]) -> None:
    for node in reversed([node for node in nodes if node is not None]):
        if not node.users:
            graph.erase_node(node)


# --- ops that work element by element ---------------------------------------------------------------------------------

_LIKE = {"zeros_like", "ones_like", "full_like", "empty_like", "_to_copy", "to", "detach", "alias", "lift_fresh_copy"}


def _rule(node: fx.Node) -> Rule | None:
    if not is_aten(node):
        return None
    name, op = name_of(node), cast(Any, node.target)
    if name in _VIEWS:
        return _VIEWS[name]
    by_element = torch.Tag.pointwise in op.tags or name in _LIKE
    return _by_element if by_element and not torch_internals.schema(op).is_mutable else None


def _by_element(graph: fx.Graph, node: fx.Node, part: Range) -> NewCall | None:
    """The same op on the parts of its arguments; what is broadcast along the dim stays whole."""
    ndim, size = value(node).ndim, value(node).shape[part.dim]

    def of(a: Any) -> Any:
        if not isinstance(a, fx.Node) or not isinstance(value(a), torch.Tensor):
            return a
        dim = part.dim - (ndim - value(a).ndim)
        split = dim >= 0 and value(a).shape[dim] == size and part.length != size
        return Cut(a, part._replace(dim=dim)) if split else a

    kwargs = {k: of(a) for k, a in node.kwargs.items()}
    if any(isinstance(a, (list, tuple)) for a in _args(node)) or any(isinstance(a, Cut) for a in kwargs.values()):
        return None
    return NewCall(node.target, tuple(map(of, _args(node))), kwargs)


# --- views ------------------------------------------------------------------------------------------------------------


def _same_dims(graph: fx.Graph, node: fx.Node, part: Range) -> NewCall:
    return NewCall(node.target, (Cut(_args(node)[0], part), *_args(node)[1:]), dict(node.kwargs))


def _permuted(order: Callable[[fx.Node, int], Sequence[int]]) -> Rule:
    def rule(graph: fx.Graph, node: fx.Node, part: Range) -> NewCall:
        ndim = value(node).ndim
        dim = order(node, ndim)[part.dim] % ndim
        return NewCall(node.target, (Cut(_args(node)[0], part._replace(dim=dim)), *_args(node)[1:]), dict(node.kwargs))

    return rule


def _transposed(node: fx.Node, ndim: int) -> list[int]:
    order = list(range(ndim))
    one, other = (_args(node)[1] % ndim, _args(node)[2] % ndim) if len(_args(node)) > 1 else (0, ndim - 1)
    order[one], order[other] = other, one
    return order


def _unsqueezed(graph: fx.Graph, node: fx.Node, part: Range) -> NewCall | None:
    at = _args(node)[1] % value(node).ndim
    if part.dim == at:
        return None
    return NewCall(node.target, (Cut(_args(node)[0], part._replace(dim=part.dim - (part.dim > at))), at), {})


def _selected(graph: fx.Graph, node: fx.Node, part: Range) -> NewCall:
    """An entry of a dim, which is gone from the result."""
    x, at, index = _args(node)
    dim = part.dim + (part.dim >= at % value(x).ndim)
    return NewCall(node.target, (Cut(x, part._replace(dim=dim)), at, index), {})


def _expanded(graph: fx.Graph, node: fx.Node, part: Range) -> NewCall:
    x, shape = _args(node)[0], list(value(node).shape)
    size, dim = shape[part.dim], part.dim - (len(shape) - value(x).ndim)
    shape[part.dim] = part.length
    whole = dim < 0 or value(x).shape[dim] != size or size == 1
    return NewCall(node.target, (x if whole else Cut(x, part._replace(dim=dim)), shape), {})


def _reshaped(graph: fx.Graph, node: fx.Node, part: Range) -> NewCall | None:
    """Where the part is whole entries of one dim of the argument."""
    x, shape = _args(node)[0], list(value(node).shape)
    before = value(x).shape
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
            return NewCall(node.target, (Cut(x, Range(dim, start // each, length // each)), shape), {})
    return None


def _sliced(graph: fx.Graph, node: fx.Node, part: Range) -> NewCall | None:
    x, first = _args(node)[0], part_of(node)
    if first is None:
        return None
    if first.dim == part.dim:
        return NewCall(_aten.narrow.default, (x, part.dim, first.start + part.start, part.length), {})
    return NewCall(_aten.narrow.default, (Cut(x, part), *first), {})


def _scattered(graph: fx.Graph, node: fx.Node, part: Range) -> NewCall | None:
    """A value with an entry of a dim written."""
    x, source, at, index = _args(node)
    at, index = at % value(node).ndim, index % value(node).shape[at]
    if part.dim != at:
        of_source = Cut(source, part._replace(dim=part.dim - (part.dim > at)))
        return NewCall(node.target, (Cut(x, part), of_source, at, index), {})
    if not part.start <= index < part.start + part.length:
        return NewCall(_aten.alias.default, (Cut(x, part),), {})
    return NewCall(node.target, (Cut(x, part), source, at, index - part.start), {})


_VIEWS: dict[str, Rule] = {
    "select_scatter": _scattered,
    "select": _selected,
    "narrow": _sliced,
    "slice": _sliced,
    "t": _permuted(_transposed),
    "transpose": _permuted(_transposed),
    "permute": _permuted(lambda node, ndim: _args(node)[1]),
    "unsqueeze": _unsqueezed,
    "expand": _expanded,
    "view": _reshaped,
    "reshape": _reshaped,
    "_unsafe_view": _reshaped,
    "detach": _same_dims,
    "alias": _same_dims,
}
