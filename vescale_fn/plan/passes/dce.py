"""Dead code: calls whose results nothing uses, and writes into memory that nothing reads afterwards, are left out.

What does something besides giving a result stays. A write counts by the memory that it changes, since one rank may write into
what a collective gave where another one writes into a copy: both find that the collective is not needed, or that it is. A
collective that some other rank needs (`keep`) stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..._core import torch_internals
from ..._core.distributed.collectives import Collective
from ..ir import branches, loop, mapped, shared_bodies
from ..ir.branches import Branches, While
from ..ir.graph import KEPT, Step, calls, copied, memories, output, writers, written
from ..ir.loop import Loop
from ..ir.mapped import Mapped
from ..ir.nested import ends, nested
from ..ir.shared_bodies import Shared

_PRUNE: dict[type, Callable[[fx.Node], None]] = {
    Loop: loop.prune,
    While: loop.prune_while,
    Branches: branches.prune,
    Mapped: mapped.prune,
}


def dead(graph: fx.Graph) -> fx.Graph:
    """The graph without the calls that nothing needs."""
    graph = copied(graph)
    for node in reversed(nested(graph)):
        if type(node.target) in _PRUNE:
            _PRUNE[type(node.target)](node)  # type: ignore[index]
    shared_bodies.prune(reversed(nested(graph)))
    stays = _needed(graph, output(graph).all_input_nodes).nodes if writers(graph) else _acting(graph)
    for node in reversed(list(graph.nodes)):
        if node not in stays and not node.users and node.op == "call_function":
            graph.erase_node(node)
    return graph


def _acting(graph: fx.Graph) -> set[fx.Node]:
    """What stays though nothing uses it, where nothing is written."""
    acts = torch_internals.calls_of(graph, lambda target: isinstance(target, Step) and target.effect)
    return {*acts, *(node for node in graph.nodes if KEPT in node.meta)}


def needed_collectives(graph: fx.Graph) -> list[int]:
    """The places, among the collectives of a graph, of those that `dead` leaves; those of a body count again for each call."""
    return [i for i, stays in enumerate(_needed(graph, output(graph).all_input_nodes, {}).collectives()) if stays]


def keep(graph: fx.Graph, places: Collection[int]) -> None:
    """Mark collectives, by their places, that stay whether this rank needs them or not."""
    for i, node in enumerate(shared_bodies.inlined_collectives(graph)):
        if i in places:
            node.meta[KEPT] = True


@dataclass(frozen=True)
class _Needed:
    """What is needed of a graph: these nodes, and of the bodies that calls of it share."""

    graph: fx.Graph
    nodes: set[fx.Node]
    bodies: dict[fx.Node, _Needed]

    def collectives(self) -> list[bool]:
        """Of each collective, as `inlined` has them, whether it is."""
        found: list[bool] = []
        for node in calls(self.graph):
            if node in self.bodies:
                found += self.bodies[node].collectives()
            elif isinstance(node.target, Collective):
                found.append(node in self.nodes)
        return found


def _needed(graph: fx.Graph, outs: Iterable[fx.Node], of_bodies: dict[Any, _Needed] | None = None) -> _Needed:
    """What is needed of a graph for these of its results.

    Args:
        of_bodies: what has been found of bodies, by the call and which results it is to give; None if calls need all of these.
    """
    found, uses, bodies = set[fx.Node](), set(outs), dict[fx.Node, _Needed]()
    lie = memories(graph)
    read = set[fx.Node]().union(*(lie[x] for x in uses))  # memory, known by the node that made it
    for node in reversed(list(graph.nodes)):
        takes: Iterable[Any] = node.all_input_nodes
        if of_bodies is not None and isinstance(node.target, Shared):
            parts = tuple(sorted({part.args[1] for part in node.users if part in uses}))  # type: ignore[type-var]
            places, gives = ends(node.target.bodies[0])
            if (node.target, parts) not in of_bodies:
                of_bodies[node.target, parts] = _needed(node.target.bodies[0], [gives[i] for i in parts], of_bodies)
            bodies[node] = of_bodies[node.target, parts]
            takes = [x for x, place in zip(node.args, places, strict=True) if place in bodies[node].nodes]
        elif node not in uses and KEPT not in node.meta and (node.op != "call_function" or not _shows(node, lie, read)):
            continue
        found.add(node)
        uses.update(takes)
        read.update(*(lie[x] for x in takes))
    return _Needed(graph, found, bodies)


def _shows(node: fx.Node, lie: dict[fx.Node, frozenset[fx.Node]], read: set[fx.Node]) -> bool:
    """Whether a call does something that can be seen besides giving its result."""
    if isinstance(node.target, Step) and node.target.effect:
        return True
    return any(root in read or root.op == "placeholder" for x in written(node) for root in lie[x])
