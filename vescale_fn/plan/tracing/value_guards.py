"""Guards: a truth value of whole numbers that a function reads in Python (``if mask.all()``) chooses between plans.

What a mask, ids or lengths decide can be computed before a call: the few ops that lead from the arguments to the truth value
are run by themselves, collectives included, while the function is recorded and before each replay. A call whose arguments give
another answer has another plan. A truth value of floats (``if loss > 0``) is left out: it may cost as much as the function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..execution.codegen import generate
from ..ir.graph import Step, changed, value
from . import leaves as leaves_

READS = 16  # of one recording
PLANS = 8  # for arguments of the same types
_NODES = 256  # that lead to one truth value


class Guard:
    """What computes a truth value of the arguments.

    Args:
        node: what gives it, in a recording that is going on.
        constants: by its placeholder, each tensor that the function closes over.

    Attributes:
        value: what it was while the function was recorded.
    """

    value: bool

    def __init__(self, node: fx.Node, constants: Mapping[fx.Node, torch.Tensor]) -> None:
        graph, copies = fx.Graph(), {}
        self._given: list[int | torch.Tensor] = []
        placeholders = [x for x in node.graph.nodes if x.op == "placeholder"]
        for x in _ancestors(node):
            if x.op == "placeholder":
                self._given.append(constants[x] if x in constants else placeholders.index(x))
            copies[x] = graph.node_copy(x, copies.__getitem__)
        out = graph.output((copies[node],))
        out.meta["val"] = None
        self._run = generate(graph, "guard").run

    def __call__(self, given: Sequence[Any]) -> bool:
        """The truth value, where `given` are the plain tensors and floats of the arguments."""
        (out,) = self._run([given[x] if isinstance(x, int) else x for x in self._given])
        return bool(out)


def can_guard(node: fx.Node) -> bool:
    """Whether what a node gives is a truth value that whole numbers among the arguments decide."""
    x = value(node)
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.bool:
        return False
    nodes = _ancestors(node)
    given = [value(x) for x in nodes if x.op == "placeholder"]
    if len(nodes) > _NODES or not all(isinstance(x, torch.Tensor) and _is_whole(x) for x in given):
        return False
    return changed(node.graph).isdisjoint(nodes) and not any(
        isinstance(x.target, Step) and x.target.effect for x in nodes
    )


def _is_whole(x: torch.Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.device.type != "meta"


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """What leads to a node, and the node itself, in the order of the graph."""
    found, open_ = {node}, [node]
    while open_:
        new = [x for x in open_.pop().all_input_nodes if x not in found]
        found.update(new)
        open_ += new
    return [x for x in node.graph.nodes if x in found]


@dataclass
class Fork:
    """A guard, and what there is for its answers: a plan, None (the function runs as written), or another fork."""

    guard: Guard
    branches: dict[bool, Any] = field(default_factory=dict)


def chosen(entry: Any, leaves: Sequence[Any], missing: Any) -> Any:
    """What there is for arguments with these leaves."""
    given = None
    while entry.__class__ is Fork:
        given = plain(leaves) if given is None else given
        entry = entry.branches.get(entry.guard(given), missing)
    return entry


def grown(entry: Any, guards: Sequence[Guard], plan: Any) -> Any:
    """What there is, and a plan that was recorded besides, with the guards that led to it."""
    if not guards:
        return plan
    branches = dict(entry.branches) if entry.__class__ is Fork else {}
    branches[guards[0].value] = grown(branches.get(guards[0].value), guards[1:], plan)
    found = Fork(guards[0], branches)
    return found if _size(found) <= PLANS else None


def _size(entry: Any) -> int:
    return sum(map(_size, entry.branches.values())) if entry.__class__ is Fork else 1


def plain(leaves: Sequence[Any]) -> list[Any]:
    """The plain tensors and the floats in leaves, as a plan takes them."""
    return [x for leaf in leaves for x in ([float(leaf)] if leaves_.is_number(leaf) else leaves_.plain_of(leaf))]
