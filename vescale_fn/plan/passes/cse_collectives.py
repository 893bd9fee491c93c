"""A collective on the same value is carried out once.

Every rank must find the same pairs, or one would wait for a collective that another has left out; and a rank sees its own
block only. So two values are the same here where the program says so on every rank: by the same operators on the same
values, without sizes and other numbers, which may happen to be equal on one rank. It comes before the passes that look at a
rank's sizes.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from ..._core.distributed.collectives import Collective
from ..ir.collective_nodes import source
from ..ir.graph import KEPT, collectives, copied, has_effect, is_aten, name_of
from ..ir.rewriting import Rewriting

_DIMS = ("t", "transpose", "permute")  # their numbers are dims
_SAME = ("detach", "alias", "lift_fresh")
_WORDS = (type(None), bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def once(graph: fx.Graph) -> fx.Graph:
    """The graph with one collective for equal ones."""
    if max(Counter(node.target for node in collectives(graph)).values(), default=0) < 2:
        return copied(graph)
    work = Rewriting(graph)
    first: dict[Any, fx.Node] = {}  # by what is said of a value, the node that gave it first
    same: dict[fx.Node, fx.Node] = {}  # to each node, that one
    for node in list(work.graph.nodes):
        said = _said(work, node, same)
        same[node] = same[said] if isinstance(said, fx.Node) and said is not node else first.setdefault(said, node)
        if same[node] is not node and (isinstance(node.target, Collective) or source(node) is not None):
            same[node].meta.update((k, node.meta[k]) for k in (KEPT,) if k in node.meta)
            work.replace(node, same[node])
    return work.graph


def _said(work: Rewriting, node: fx.Node, same: dict[fx.Node, fx.Node]) -> Any:
    """What is equal for values that are the same on every rank; the node itself where nothing is known."""
    if work.fixed and not work.fixed.isdisjoint((node, *node.all_input_nodes)):
        return node
    if node.target is operator.getitem:
        whole, part = node.args
        return operator.getitem, same[whole], part, node.meta.get("again")  # type: ignore[index]
    if not (is_aten(node) or isinstance(node.target, Collective)) or has_effect(node):
        return node
    if is_aten(node) and torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return node
    name = name_of(node)
    if name in _SAME:
        return node.args[0]
    numbers = name in _DIMS
    try:
        args, kwargs = _words(node.args, numbers, same), _words(tuple(node.kwargs.items()), numbers, same)
    except _Unknown:
        return node
    return node.target, args, kwargs, node.meta.get("again")


def _words(x: Any, numbers: bool, same: dict[fx.Node, fx.Node]) -> Any:
    """Arguments that are the same on every rank, as they can be compared."""
    if isinstance(x, fx.Node):
        return same[x]
    if isinstance(x, (list, tuple)):
        return tuple(_words(each, numbers, same) for each in x)
    if isinstance(x, _WORDS) or (numbers and isinstance(x, int)):
        return type(x), x
    raise _Unknown


class _Unknown(Exception):
    """An argument that may differ by rank."""
