"""Calls whose results nothing needs are left out. What does something besides giving a result stays."""

from __future__ import annotations

from torch import fx

from ..graph import calls, copied, has_effect


def dead(graph: fx.Graph) -> fx.Graph:
    """The graph without the calls that nothing needs."""
    graph = copied(graph)
    for node in reversed(list(calls(graph))):
        if not node.users and not has_effect(node):
            graph.erase_node(node)
    return graph
