"""The table that `torch.fx` keeps of a graph's nodes by what they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def calls_of(graph: fx.Graph, wanted: Callable[[Any], Any]) -> list[fx.Node]:
    """The calls, in order, of what is `wanted`, which is asked once of equal targets."""
    table = graph._find_nodes_lookup_table.table
    found = [nodes for (op, target), nodes in table.items() if op == "call_function" and nodes and wanted(target)]
    return sorted(node for nodes in found for node in nodes)
