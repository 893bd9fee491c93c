"""Element-by-element calls that write over an argument which nothing needs any more."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..._core import torch_internals
from ..ir import graph as plan
from ..ir import inplace, memory_aliases
from ..ir.graph import DONATED
from ..ir.mapped import mapped, own
from ..ir.rank_runs import Ownership
from .donate import hand_over

# These read a row before they write it, on the CPU: they may write over their first argument, though not by torch's promise.
# Only where all lies in order: into memory of another order torch writes wrong numbers.
_BY_ROWS = {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"}


def reuse(graph: fx.Graph) -> fx.Graph:
    """Let results take the memory of arguments that die: no new memory for most of what is computed element by element.

    Only memory that the plan has made is written over, or that of a donated argument.
    """
    graph = plan.copied(graph)
    lie, kept = memory_aliases.memories(graph), plan.changed(graph)
    last = memory_aliases.last_uses(graph, lie)
    for node, target in mapped(graph):
        alone = own(node, lie)
        free = lambda x, node=node, alone=alone: x not in kept and _is_free(x, node, lie, last) and alone(x)
        columns = [i for i, column in enumerate(target.lists(node)) if all(map(free, column))]
        node.target = target.over(columns, reuse) if columns else target
    ownership = Ownership(graph, lie)
    for node in torch_internals.calls_of(graph, _may_write_anew):
        if node in kept or not _writes_anew(node):
            continue
        for x in filter(lambda x, node=node: ownership.may_write(x, node), _targets(node)):
            if _dies(x, node, lie, last, kept) and (call := inplace.written_into(node, x)) is not None:
                node.target, node.args, node.kwargs = call
                break
    hand_over(graph)
    return graph


def _may_write_anew(target: Any) -> bool:
    op = plan.operator_of_target(target)
    return op is not None and (op.pointwise or op.name in _BY_ROWS)


def _writes_anew(node: fx.Node) -> bool:
    if plan.name_of(node) in _BY_ROWS:
        return plan.value(node).device.type == "cpu" and all(
            plan.value(x).is_contiguous() for x in node.all_input_nodes
        )
    return True


def _targets(node: fx.Node) -> list[fx.Node]:
    """The arguments that the result could be written over: the first first, since that is the shortest call."""
    given = node.args[:1] if plan.name_of(node) in _BY_ROWS else node.args
    return [
        x for x in dict.fromkeys(given) if isinstance(x, fx.Node) and inplace.alike(plan.value(x), plan.value(node))
    ]


def _dies(x: fx.Node, node: fx.Node, lie: Any, last: Any, kept: Any) -> bool:
    """Whether nothing but this call needs anything in the memory of `x`, all of which `x` is, and the plan may write there."""
    if x in kept or not _is_free(x, node, lie, last):
        return False
    return not any(lie[y] & lie[x] for y in node.all_input_nodes if y is not x)


def _is_free(x: fx.Node, node: fx.Node, lie: Any, last: Any) -> bool:
    """Whether nothing needs what lies in the memory of `x` after a call, and the plan may write there."""
    ours = all(m.maker.op != "placeholder" or DONATED in m.maker.meta for m in lie[x])
    return ours and memory_aliases.dies(x, node, last, lie)
