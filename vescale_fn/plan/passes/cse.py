"""Common subexpressions: a value that is computed twice is computed once, collectives included.

A rank's own part is another value than the same slice taken on every rank, though on one rank the two are equal: all ranks
are to merge the same calls. What `remat` repeats stays repeated: it was to be forgotten in between. Draws are functions of
their keys, and merge.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.distributed.collectives import Collective
from ..ir.graph import Step, has_effect, is_aten
from ..ir.rewriting import Rewriting, key

_EMPTY = ("aten::empty", "aten::new_empty")  # whatever lay there before is no value


def common(graph: fx.Graph) -> fx.Graph:
    """The graph with one call for equal ones."""
    work = Rewriting(graph)
    seen: dict[Any, fx.Node] = {}
    for node in work.calls():
        part = node.target is operator.getitem
        if not (part or _is_function(node)) or (work.fixed and not work.fixed.isdisjoint(node.all_input_nodes)):
            continue
        said: Any = node.args if part else (node.target, key(node.args), key(node.kwargs))
        what = said, node.meta.get("again"), node.meta.get("own")
        try:
            first = seen.setdefault(what, node)
        except TypeError:  # an argument that cannot be compared
            continue
        if first is not node:
            work.replace(node, first)
    return work.graph


def _is_function(node: fx.Node) -> bool:
    """Whether a call gives a value that depends on its arguments alone, and does nothing else."""
    if has_effect(node) or isinstance(node.target, (Step, Collective)):
        return False
    if not is_aten(node):
        return True
    op: Any = node.target
    drawn = torch.Tag.nondeterministic_seeded in op.tags
    return not drawn and not torch_internals.operator_name(op).startswith(_EMPTY)
