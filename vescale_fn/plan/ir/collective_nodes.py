"""A collective in a graph: what each rank gives to it, and what each gets, in both of its forms.

On a real mesh it takes one tensor and gives one. On a simulated one it takes the list of the ranks' blocks and gives a
list, of which ``operator.getitem`` takes the parts; ranks that get the same value may share one part.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..._core.base import context
from ..._core.distributed.collectives import TABLE, Collective, group_size
from ..._core.distributed.mesh import communicator_of
from .graph import ARRIVED, HOLDERS, KEPT, PLAYED, Step, name_of, nbytes, value


def collective_of(node: fx.Node) -> Collective:
    """The collective that a node is."""
    assert isinstance(node.target, Collective)
    return node.target


def is_listed(node: fx.Node) -> bool:
    """Whether a collective takes the list of all ranks' blocks."""
    return isinstance(node.args[0], (list, tuple))


def given(node: fx.Node) -> list[fx.Node]:
    """What a collective takes: a block of each rank that this process plays."""
    x = node.args[0]
    return list(x) if isinstance(x, (list, tuple)) else [x]  # type: ignore[list-item, arg-type]


def got(node: fx.Node) -> dict[int, fx.Node]:
    """What is taken out of a collective's result, by the place of the rank."""
    if not is_listed(node):
        return {0: node}
    return {part.args[1]: part for part in node.users if part.target is operator.getitem}  # type: ignore[misc]


def source(x: Any) -> tuple[fx.Node, int] | None:
    """The collective whose result a value is, and of which place."""
    if not isinstance(x, fx.Node):
        return None
    if isinstance(x.target, Collective) and not is_listed(x):
        return x, 0
    if x.target is operator.getitem and isinstance(x.args[0], fx.Node) and isinstance(x.args[0].target, Collective):
        return x.args[0], x.args[1]  # type: ignore[return-value]
    return None


def gets_same(node: fx.Node, place: int, other: int) -> bool:
    """Whether two ranks get one value."""
    collective = collective_of(node)
    if place == other or not TABLE[collective.kind].shared:
        return place == other
    group_of = communicator_of(collective.mesh).group_of
    return group_of(place, collective.axes) is group_of(other, collective.axes)


def sole_source(parts: Sequence[fx.Node]) -> fx.Node | None:
    """The collective of whose result `parts` are each rank's part, where nothing else uses it; else None."""
    found = [source(x) for x in parts]
    if any(one is None for one in found):
        return None
    (node, _), *_ = found  # type: ignore[misc]
    if len(given(node)) != len(parts):
        return None
    if not all(one[0] is node and gets_same(node, place, one[1]) for place, one in enumerate(found)):  # type: ignore[index]
        return None
    users = {user for part in got(node).values() for user in part.users}
    return node if len(users) == 1 else None


def size(node: fx.Node) -> int:
    """The bytes that a rank gives to a collective: of the rank that gives most, so that all ranks find the same number."""
    largest = max((value(x) for x in given(node)), key=torch.Tensor.numel)
    return max(nbytes(largest), collective_of(node).elements * largest.element_size())


def in_order_of_ranks(node: fx.Node, by_gloo: bool | None = None) -> int:
    """The bytes that a collective takes besides what it is given and what it gives: on real ranks values travel rank by rank,
    so that pieces along another dim than the first are put in order before it, or joined after it.

    Args:
        node: its call.
        by_gloo: whether gloo carries it out, which gathers into memory of its own, and adds up in a copy. By default where
            processes talk and compute on CPUs: a mesh without ranks stands for devices, unless `context.devices` says so.
    """
    if is_listed(node) or HOLDERS in node.meta or PLAYED in node.meta:
        return 0
    collective, given, made = collective_of(node), value(node.args[0]), value(node)  # type: ignore[arg-type]
    kind, (dim, *more) = collective.kind, collective.params
    if by_gloo is None:
        processes = not communicator_of(collective.mesh).all_here or context.devices() == "cpu"
        by_gloo = given.device.type == "cpu" and processes
    along = lambda x, dim: math.prod(x.shape[:dim]) != 1
    if kind == "all_gather":
        return nbytes(given) * (not given.is_contiguous()) + nbytes(made) * (by_gloo or along(made, dim))
    if kind == "reduce_scatter":
        return nbytes(given) * (by_gloo or along(given, dim) or not given.is_contiguous())
    if kind == "all_to_all":
        return nbytes(given) * (along(given, dim) or not given.is_contiguous()) + nbytes(made) * along(made, *more)
    return 0


_VIEWS = {
    "view",
    "_unsafe_view",
    "reshape",
    "t",
    "transpose",
    "permute",
    "unsqueeze",
    "narrow",
    "slice",
    "detach",
    "alias",
}


def is_light(node: fx.Node) -> bool:
    """Whether a call only looks at a value in another way, or packs or unpacks what travels."""
    packs = isinstance(node.target, Step) and node.target.name in ("pack", "unpack")
    return packs or node.target is operator.getitem or name_of(node) in _VIEWS


_MOVES = {"index", "index_select", "cat", "new_zeros", "clone"}  # by which a block is padded, on the ranks that must


def made_at(node: fx.Node, place: Mapping[fx.Node, float]) -> float:
    """The place of the last call that makes what a collective takes; -1 where it is there from the start.

    What only moves elements is looked through: a rank may have to pad its block, and another not.
    """
    waiting, last = given(node), -1.0
    while waiting:
        x = waiting.pop()
        if only_moves(x):
            waiting += x.all_input_nodes
        elif x.op == "call_function":
            last = max(last, place[x])
    return last


def is_written(node: fx.Node, hot: frozenset[fx.Node], taken: bool = True) -> bool:
    """Whether the memory of what a collective gives is written in place, or (where it counts what is `taken`) of what it takes.

    What only moves elements is looked through, both ways: one rank takes a block as it is, another has to pad it, and pads
    or cuts off a copy.

    Args:
        hot: the values whose memory is written (`graph.changed`).
    """
    up, down = list(given(node)) if taken else [], list(got(node).values())
    for x in up:
        if only_moves(x):
            up += [source for source in x.all_input_nodes if source not in up]
    for x in down:
        down += [user for user in x.users if only_moves(user) and user not in down]
    return not hot.isdisjoint((*up, *down))


def only_moves(x: fx.Node) -> bool:
    """Whether a call moves elements and computes none."""
    return is_light(x) or name_of(x) in _MOVES


def carried_out(
    graph: fx.Graph, collective: Collective, parts: Sequence[fx.Node], like: fx.Node, *turn: fx.Node
) -> list[fx.Node]:
    """A new collective of `parts`, at the graph's insertion point: each rank's result. The rest is noted as on `like`.

    Args:
        turn: the number of the iteration, where the collective takes that, and `like` does not.
    """
    if not is_listed(like):
        node = graph.call_function(collective, (parts[0], *like.args[1:], *turn))
        return [noted(node, collective.like(value(parts[0])), like)]
    vals = collective.like_all([*map(value, parts)])
    node = noted(graph.call_function(collective, (list(parts), *like.args[1:], *turn)), vals, like)
    return [noted(graph.call_function(operator.getitem, (node, i)), val, like) for i, val in enumerate(vals)]


def noted(node: fx.Node, val: Any, like: fx.Node) -> fx.Node:
    """A new node with its value, and what else is known of the one whose place it takes."""
    node.meta = {**{key: like.meta[key] for key in ("line", "again", KEPT) if key in like.meta}, "val": val}
    return node


def put(graph: fx.Graph, node: fx.Node, results: Sequence[fx.Node]) -> None:
    """Let each rank's result stand in the place of that of the collective `node`, which is erased."""
    if HOLDERS in node.meta:
        results[0].meta[ARRIVED] = node.meta[HOLDERS]
    for place, part in got(node).items():
        part.replace_all_uses_with(results[place])
        if part is not node:
            graph.erase_node(part)
    graph.erase_node(node)
    erase_unused(graph, results)


def erase_unused(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Take out those of the nodes that nothing uses, and what a pass made for them alone."""
    for node in dict.fromkeys(nodes):
        if not node.users and node.op == "call_function":
            made = node.target is operator.getitem or (isinstance(node.target, Step) and not node.target.effect)
            sources = list(node.all_input_nodes) if made else []
            graph.erase_node(node)
            erase_unused(graph, sources)


def over(collective: Collective, axes: tuple[str, ...], *params: Any, kind: str = "") -> Collective:
    """The like of a collective over other axes."""
    assert group_size(collective.mesh, axes) > 1
    return dataclasses.replace(collective, kind=kind or collective.kind, axes=axes, params=params or collective.params)
