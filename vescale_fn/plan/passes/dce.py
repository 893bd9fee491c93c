"""Dead code: calls whose results nothing uses, and writes into memory that nothing reads afterwards, are left out.

What does something besides giving a result stays. A write counts by the memory that it changes, since one rank may write into
what a collective gave where another one writes into a copy: both find that the collective is not needed, or that it is. A
collective that some other rank needs (`keep`) stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import fx

from ..ir import branches, loop, mapped, shared_bodies
from ..ir.branches import Branches
from ..ir.graph import KEPT, Step, collectives, copied, memories, written
from ..ir.loop import Loop
from ..ir.mapped import Mapped
from ..ir.nested import nested

_PRUNE: dict[type, Callable[[fx.Node], None]] = {
    Loop: loop.prune,
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
    stays = _needed(graph)
    for node in reversed(list(graph.nodes)):
        if node not in stays:
            graph.erase_node(node)
    return graph


def needed_collectives(graph: fx.Graph) -> list[int]:
    """The places, among the collectives of a graph, of those that `dead` leaves."""
    graph = shared_bodies.inlined(graph)
    stays = _needed(graph)
    return [i for i, node in enumerate(collectives(graph)) if node in stays]


def keep(graph: fx.Graph, places: Collection[int]) -> None:
    """Mark collectives, by their places, that stay whether this rank needs them or not."""
    for i, node in enumerate(shared_bodies.inlined_collectives(graph)):
        if i in places:
            node.meta[KEPT] = True


def _needed(graph: fx.Graph) -> set[fx.Node]:
    lie, read, found = memories(graph), set[fx.Node](), set[fx.Node]()  # read: memory, known by the node that made it
    for node in reversed(list(graph.nodes)):
        used = not found.isdisjoint(node.users) or KEPT in node.meta
        if node.op != "call_function" or used or _shows(node, lie, read):
            found.add(node)
            read.update(*(lie[x] for x in node.all_input_nodes))
    return found


def _shows(node: fx.Node, lie: dict[fx.Node, frozenset[fx.Node]], read: set[fx.Node]) -> bool:
    """Whether a call does something that can be seen besides giving its result."""
    if isinstance(node.target, Step) and node.target.effect:
        return True
    return any(root in read or root.op == "placeholder" for x in written(node) for root in lie[x])
