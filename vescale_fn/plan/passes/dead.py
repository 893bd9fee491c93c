"""Calls whose results nothing needs are left out, writes into memory that nothing reads afterwards among them.

What does something besides giving a result stays. A write counts by the memory that it changes, since one rank may write into
what a collective gave where another one writes into a copy: both find that the collective is not needed, or that it is.
"""

from __future__ import annotations

from torch import fx

from ..graph import Step, copied, memories, written


def dead(graph: fx.Graph) -> fx.Graph:
    """The graph without the calls that nothing needs."""
    graph = copied(graph)
    lie, read = (
        memories(graph),
        set[fx.Node](),
    )  # read: the memory that later calls need, known by the node that made it
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _shows(node, lie, read):
            graph.erase_node(node)
        else:
            read.update(*(lie[x] for x in node.all_input_nodes))
    return graph


def _shows(node: fx.Node, lie: dict[fx.Node, frozenset[fx.Node]], read: set[fx.Node]) -> bool:
    """Whether a call does something that can be seen besides giving its result."""
    if isinstance(node.target, Step) and node.target.effect:
        return True
    return any(root in read or root.op == "placeholder" for x in written(node) for root in lie[x])
