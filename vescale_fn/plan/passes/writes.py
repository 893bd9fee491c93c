"""A write into a value that nothing else shares memory with becomes a new value.

What is written in place stays where it is in all other passes; a new value they can move, merge and leave out. Where memory can
be used again is found at the end (`reuse`), for all values.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from ... import _torch
from ..graph import calls, copied, is_aten, memories, value, written
from ..rewriting import computed


def writes(graph: fx.Graph) -> fx.Graph:
    """The graph with new values for writes, where nobody can tell."""
    graph = copied(graph)
    lie = memories(graph)
    shared = Counter(root for node in graph.nodes if not _is_write(node) for root in lie[node])
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(calls(graph)):
        if not _is_write(node):
            continue
        target, x = _torch.out_of_place(node.target), node.args[0]
        if target is None or not isinstance(x, fx.Node) or x.op == "placeholder" or lie[x] != {x} or shared[x] != 1:
            continue
        val = computed(target, node.args, node.kwargs)
        if not _alike(val, value(x)):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(target, node.args, dict(node.kwargs))
        new.meta.update(node.meta, val=val)
        place[new], lie[new], shared[new] = place[node], frozenset((new,)), 1
        node.replace_all_uses_with(new)
        x.replace_all_uses_with(new, lambda user, after=place[node], new=new: place[user] > after)
        graph.erase_node(node)
    return graph


def _is_write(node: fx.Node) -> bool:
    """Whether a call writes its first argument in place, and gives it back."""
    return is_aten(node) and node.args[:1] == tuple(written(node))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
