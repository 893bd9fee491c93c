"""What simulated ranks get of a collective is memory of their own where something is written into it.

A block that is only sent is handed on as it is, and what all ranks of a group get is there once: a write would be seen by ranks
that do not make it.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from .graph import PLAYED, changed, collectives, viewed
from .nested import bodies_of, nested


def part_memory(graph: fx.Graph) -> None:
    """Let what arrives be copied where it, or what was sent, is written."""
    sent = collectives(graph)
    hot = changed(graph) if sent else ()
    for node in sent:
        if node not in hot or not (PLAYED in node.meta or viewed(node)):
            continue
        parts = [x for x in node.users if x.target is operator.getitem] if isinstance(node.args[0], list) else [node]
        for part in parts:
            with graph.inserting_after(part):
                copy = graph.call_function(torch.ops.aten.clone.default)
            part.replace_all_uses_with(copy)
            copy.args = (part,)
            copy.meta = {key: x for key, x in part.meta.items() if key != PLAYED}
    for body in dict.fromkeys(body for node in nested(graph) for body in bodies_of(node)):
        part_memory(body)
