"""The same small call for many leaves, at the end of a step, as one call of torch's ``_foreach_`` functions: the update.

Elementwise calls whose results only leave, or go into others of the kind, are put at the end, level by level; equal ones of a
level become one. On a CPU that halves what they cost; on a GPU a list of leaves is one kernel. Large leaves, which
gain nothing and would only be kept alive for longer, stay where they are.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir.graph import calls, copied, is_aten, memories, name_of, nbytes, output, value, written
from .donate import HAND_OVER

LIMIT = 1 << 18  # bytes of a leaf
OWN = "foreach: nothing else looks at what this writes over"
_aten = torch.ops.aten
_BINARY, _UNARY = ("add", "sub", "mul", "div"), ("sqrt", "neg", "reciprocal", "abs", "exp", "sign")
_TERNARY = {"addcmul": 3, "addcdiv": 3, "lerp": 2}  # and how many of their arguments are lists


@dataclass(frozen=True)
class _Call:
    """What a call would be among others.

    Args:
        kind: equal for calls that can be one: the operator on lists, numbers and tensors that all share, dtype and device.
        lists: the arguments of which each leaf has its own.
        shared: what comes after the lists.
        in_place: whether the first is written.
        narrowed: the dtype in which the lists' kernels take the one tensor that all share.
    """

    kind: Any
    target: Any
    lists: tuple[fx.Node, ...]
    shared: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    in_place: bool
    narrowed: torch.dtype | None = None


def foreach(graph: fx.Graph) -> fx.Graph:
    """The graph with one call for many leaves."""
    graph = copied(graph)
    _mark_own(graph)
    memory = _Memory(graph)
    groups: dict[Any, list[fx.Node]] = {}
    for node, level in _levels(memory, _waiting(graph, memory)).items():
        one = call_of(node)
        groups.setdefault((level, node if one is None else one.kind), []).append(node)
    end, moved, gone = output(graph), _Touched(), set[fx.Node]()  # gone: what gives its result at the end only
    instead: dict[fx.Node, fx.Node] = {}
    for _, nodes in sorted(groups.items(), key=lambda group: group[0][0]):
        if len(nodes) == 1 and moved.can_follow(memory, nodes[0]) and gone.isdisjoint(nodes[0].all_input_nodes):
            continue  # it stays where it is
        for node in nodes:
            moved.add(memory, node)
        if len(nodes) > 1:
            made = _together(graph, end, nodes)
            gone.update(made.values())
            instead |= made
        else:
            end.prepend(nodes[0])
            gone.add(nodes[0])
    end.args = fx.map_arg(end.args, lambda x: instead.get(x, x))  # of all results at once: there may be thousands
    for node in instead:
        graph.erase_node(node)
    return graph


def _mark_own(graph: fx.Graph) -> None:
    """Mark the calls that write over what nothing else will look at: their results may as well be new."""
    lie = memories(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    last: dict[fx.Node, int] = {}  # the last place where a value is used by this name
    names: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        last[node] = max((place[user] for user in node.users), default=0)
        for root in lie[node]:
            names.setdefault(root, []).append(node)
    for node in calls(graph):
        out = node.kwargs.get("out")
        if isinstance(out, fx.Node) and not any(root.op == "placeholder" for root in lie[out]):
            before = (x for root in lie[out] for x in names[root] if place[x] < place[node])
            if all(last[x] <= place[node] for x in before):
                node.meta[OWN] = True


class _Memory:
    """The memory, known by the nodes that made it, that each call of a graph reads or writes, and that it writes."""

    def __init__(self, graph: fx.Graph) -> None:
        lie = memories(graph)
        self.touches = {n: {root for x in (n, *n.all_input_nodes) for root in lie[x]} for n in calls(graph)}
        self.writes = {n: {root for x in written(n) for root in lie[x]} for n in calls(graph)}


class _Touched:
    """The memory that some calls touch."""

    def __init__(self) -> None:
        self.touched: set[fx.Node] = set()
        self.changed: set[fx.Node] = set()

    def add(self, memory: _Memory, node: fx.Node) -> None:
        self.touched |= memory.touches[node]
        self.changed |= memory.writes[node]

    def can_follow(self, memory: _Memory, node: fx.Node) -> bool:
        """Whether a call may as well come on the other side of these."""
        return not memory.writes[node] & self.touched and not memory.touches[node] & self.changed


def _waiting(graph: fx.Graph, memory: _Memory) -> list[fx.Node]:
    """The calls that can wait until all others are done, in order."""
    found: dict[fx.Node, None] = {}
    later = _Touched()
    for node in reversed(list(calls(graph))):
        free = all(user in found or user.op == "output" for user in node.users)
        if free and later.can_follow(memory, node) and (node.target is HAND_OVER or call_of(node) is not None):
            found[node] = None
        else:
            later.add(memory, node)
    return list(reversed(found))


def _levels(memory: _Memory, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each call its level: it needs only lower ones before it."""
    levels: dict[fx.Node, int] = {}
    read: dict[fx.Node, int] = {}  # memory -> the last level that touches it
    changed: dict[fx.Node, int] = {}
    for node in nodes:
        before = [changed.get(root, 0) for root in memory.touches[node]]
        before += [read.get(root, 0) for root in memory.writes[node]]
        before += [levels.get(x, 0) for x in node.all_input_nodes]
        levels[node] = level = 1 + max(before)
        read.update((root, max(level, read.get(root, 0))) for root in memory.touches[node])
        changed.update((root, level) for root in memory.writes[node])
    return levels


def call_of(node: fx.Node) -> _Call | None:
    """A call as one of many; None where it is none of those."""
    v = node.meta.get("val")
    if not is_aten(node) or not isinstance(v, torch.Tensor) or nbytes(v) > LIMIT:
        return None
    name, args, kwargs = name_of(node), list(node.args), dict(node.kwargs)
    out = kwargs.pop("out", None)
    in_place = name.endswith("_")
    if out is not None and name in ("add", "mul") and not kwargs and out is args[1]:  # x + y over y is y + x
        args.reverse()
        in_place = True
    elif out is not None and OWN not in node.meta:
        return None
    name = name.removesuffix("_")
    own = _own(args, v)
    form = None if own is None else _form(name, args, own, set(kwargs))
    if own is None or form is None:
        return None
    shared: tuple[Any, ...] = tuple(args[len(own) :])
    numbers = all(isinstance(x, (int, float)) for x in (*shared, *kwargs.values()))
    narrowed = None
    if form == "shared":
        form = "Scalar" if numbers else "Tensor"
        # torch rounds the number itself to a half where many halves are changed in place, but not of one
        if (in_place and v.dtype.itemsize < 4) if numbers else not _fits(name, shared[0], v):
            return None
        if not numbers and value(shared[0]).dtype != v.dtype:
            narrowed = v.dtype  # as torch does with each of the leaves
    elif form == "Scalar" and not numbers:
        return None
    target = getattr(getattr(_aten, f"_foreach_{name}{'_' if in_place else ''}", None), form, None)
    if target is None:
        return None
    kind = (target, *map(repr, shared), repr(sorted(kwargs.items())), v.dtype, v.device)
    return _Call(kind, target, tuple(own), shared, tuple(kwargs.items()), in_place, narrowed)


def _own(args: Sequence[Any], v: torch.Tensor) -> list[fx.Node] | None:
    """The arguments of which each leaf has its own: those of its shape. None where they are of other dtypes, or no tensors."""
    tensors = [x for x in args if isinstance(x, fx.Node)]
    if not all(isinstance(value(x), torch.Tensor) for x in tensors):
        return None
    own = [x for x in tensors if (value(x).shape, value(x).device) == (v.shape, v.device)]
    return own if all(value(x).dtype == v.dtype for x in own) else None


def _form(name: str, args: Sequence[Any], own: Sequence[fx.Node], keywords: set[str]) -> str | None:
    """The overload for lists, by which arguments each leaf has of its own; "shared" where all have one second argument."""
    count = len(args)
    if name in _UNARY and count == len(own) == 1 and not keywords:
        return "default"
    if name in _BINARY and count == 2 and own == args and keywords <= {"alpha"}:
        return "List"
    if name in _BINARY and count == 2 and own == args[:1] and not keywords and value(own[0]).ndim:
        return "shared"
    if name in _TERNARY and count == 3 and own == args[: _TERNARY[name]] and keywords <= {"value"}:
        return "Scalar"
    return None


def _fits(name: str, number: Any, v: torch.Tensor) -> bool:
    """Whether a list's kernel takes a second argument that all leaves share: a tensor of one element."""
    n = value(number) if isinstance(number, fx.Node) else None
    if n is None or n.ndim or name not in ("mul", "add", "div") or not n.dtype.is_floating_point:
        return False
    return n.dtype == v.dtype or (v.dtype.itemsize >= 4 and n.device == v.device)


def _together(graph: fx.Graph, end: fx.Node, nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """One call, in front of the end, for several; for each of them what stands for its result, in all calls."""
    made: list[Any] = [call_of(node) for node in nodes]
    lists = [list(column) for column in zip(*(one.lists for one in made))]
    first, given = made[0], dict[fx.Node, fx.Node]()
    with graph.inserting_before(end):
        call = graph.call_function(first.target, (*lists, *_narrowed(graph, first)), dict(first.kwargs))
        call.meta.update(nodes[-1].meta, val=None if first.in_place else [value(node) for node in nodes])
        for i, (node, one) in enumerate(zip(nodes, made)):
            new = one.lists[0]
            if not first.in_place:
                new = graph.call_function(operator.getitem, (call, i))
                new.meta.update(node.meta)
            node.replace_all_uses_with(new, lambda user: user is not end)
            given[node] = new
    return given


def _narrowed(graph: fx.Graph, one: _Call) -> tuple[Any, ...]:
    """What all leaves share, in the dtype that the kernels want."""
    if one.narrowed is None:
        return one.shared
    (number,) = one.shared
    cast = graph.call_function(_aten._to_copy.default, (number,), {"dtype": one.narrowed})
    cast.meta.update(number.meta, val=value(number).to(one.narrowed))
    return (cast,)
