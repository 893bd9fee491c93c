"""A write into a value that nothing else shares memory with becomes a new value.

What is written in place stays where it is in all other passes; a new value they can move, merge and leave out. Where memory can
be used again is found at the end (`reuse`), for all values.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..ir.graph import (
    changed,
    copied,
    is_aten,
    name_of,
    operator_of,
    operator_of_target,
    value,
    viewed,
    writers,
    written,
)
from ..ir.memory_aliases import Memory, memories
from ..ir.rewriting import computed

_aten = torch.ops.aten
_LAST = object()


def writes(graph: fx.Graph) -> fx.Graph:
    """The graph with new values for writes, where nobody can tell."""
    graph = copied(graph)
    if not writers(graph):
        return graph
    _name_once(graph)
    _write_rows(graph)
    lie, found = memories(graph), [node for node in writers(graph) if _is_write(node)]
    place = {node: i for i, node in enumerate(graph.nodes)}
    asked = frozenset().union(*(lie[x] for node in found for x in node.all_input_nodes))
    sharing: dict[Memory, list[fx.Node]] = {}
    of_writes = set(found)
    for node in graph.nodes:
        if not asked.isdisjoint(lie[node]) and node not in of_writes:
            for root in lie[node]:
                sharing.setdefault(root, []).append(node)
    for node in found:
        target, x, now = torch_internals.out_of_place(node.target), node.args[0], place[node]
        if target is None or not isinstance(x, fx.Node) or x.op == "placeholder" or not _is_alone(x, lie):
            continue
        (own,) = lie[x]
        if any(own in lie[y] for y in node.all_input_nodes if y is not x):
            continue  # it reads what it writes: torch's result depends on the order of the elements
        after = [other for other in sharing[own] if place[other] > now]
        if any(
            place[user] > now for other in sharing[own] if other is not x and place[other] < now for user in other.users
        ):
            continue  # a view from before, which is to see what is written
        val = computed(target, node.args, node.kwargs)
        if not _alike(val, value(x)):
            continue
        new: Any = node.args[1] if name_of(node) == "copy_" else None
        if not (isinstance(new, fx.Node) and _is_given_away(new, lie, sharing) and _alike(value(new), val)):
            with graph.inserting_before(node):
                new = graph.call_function(target, node.args, dict(node.kwargs))
            new.meta.update(node.meta, val=val)
            place[new], sharing[Memory(new)] = now, [new]
        lie[new] = frozenset((Memory(new),))
        for other in after:  # views from now on are of the new value
            lie[other] = lie[other] - {own} | lie[new]
            sharing[Memory(new)].append(other)
            sharing[own].remove(other)
        node.replace_all_uses_with(new)
        x.replace_all_uses_with(new, lambda user, now=now, new=new: user is not new and place[user] > now)
        graph.erase_node(node)
    return graph


def _name_once(graph: fx.Graph) -> None:
    """A value that is written has one name: what ``nn.Parameter(x)`` and ``x.detach()`` add is the value itself."""
    hot = changed(graph)
    for node in torch_internals.calls_of(graph, _is_name):
        if node in hot:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)


def _is_name(target: Any) -> bool:
    op = operator_of_target(target)
    return op is not None and op.name in ("detach", "alias")


def _write_rows(graph: fx.Graph) -> None:
    """``x[i].fill_(c)``, where only parts of x are used afterwards: a write of all of x, so that those can be made alone."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in writers(graph):
        row = node.args[0] if node.args else None
        if name_of(node) not in ("fill_", "zero_") or not is_aten(node) or node.users or not isinstance(row, fx.Node):
            continue
        filler: Any = node.args[1] if name_of(node) == "fill_" else 0
        if row.target is not _aten.select.int or len(row.users) > 1 or isinstance(filler, fx.Node):
            continue
        x, *where = row.args
        assert isinstance(x, fx.Node)
        later = [user for user in x.users if place.get(user, -1) > place[node] and not _is_write(user)]
        if not later or not all(name_of(user) in ("slice", "narrow") for user in later):
            continue
        like, last = value(row), node
        steps: list[tuple[Any, Any, Any]] = [
            (_aten.full.default, (list(like.shape), filler), {"dtype": like.dtype, "device": like.device}),
            (_aten.select_scatter.default, (x, _LAST, *where), {}),
            (_aten.copy_.default, (x, _LAST), {}),
        ]
        for target, args, kwargs in steps:
            with graph.inserting_before(node):
                last = graph.call_function(target, tuple(last if a is _LAST else a for a in args), kwargs)
            shape = like.shape if target is _aten.full.default else value(x).shape
            last.meta.update(node.meta, val=value(x) if target is _aten.copy_.default else like.new_empty(shape))
        graph.erase_node(node)
        graph.erase_node(row)


def _is_given_away(node: fx.Node, lie: Any, sharing: Any) -> bool:
    """Whether a value is the plan's own, and nothing else has use for it: it can be what it is copied into."""
    own = Memory(node)
    return node.op == "call_function" and lie[node] == {own} and sharing[own] == [node] and len(node.users) == 1


def _is_alone(x: fx.Node, lie: Any) -> bool:
    """Whether a value is all that lies in its memory: one that a call makes, or one of several that an operator makes."""
    if len(lie[x]) != 1:
        return False
    (own,) = lie[x]
    if own == Memory(x):
        return True
    separate = operator_of(own.maker) is not None and not viewed(own.maker)
    return x.target is operator.getitem and x.args == (own.maker, own.part) and separate


def _is_write(node: fx.Node) -> bool:
    """Whether a call writes its first argument in place, and gives it back."""
    return is_aten(node) and node.args[:1] == tuple(written(node))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
