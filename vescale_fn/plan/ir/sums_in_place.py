"""Sums over ranks that are made in the memory of what is summed, where nothing else needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..._core.distributed.abstract_mesh import Abstract
from ..._core.distributed.collectives import Collective
from ..._core.distributed.mesh import communicator_of
from ..._core.distributed.process_group import ProcessGroup
from .graph import value
from .memory_aliases import dies


def may_be_in_place(node: fx.Node) -> bool:
    """Whether a call is a sum that each rank could make over what it gives; one that has only begun is made in a copy."""
    sum_ = node.target
    if type(sum_) is not Collective or (sum_.kind, sum_.params) != ("all_reduce", ("sum",)):
        return False
    v = value(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if not isinstance(v, torch.Tensor) or not v.dtype.is_floating_point or not v.is_contiguous():
        return False
    return isinstance(communicator_of(sum_.mesh), (ProcessGroup, Abstract))


def is_in_place(node: fx.Node, last: dict[Any, fx.Node], lie: Any) -> bool:
    """Whether it is made so.

    Args:
        last, lie: where the values of the graph lie, and what needs each memory last (`memory_aliases`).
    """
    if not may_be_in_place(node):
        return False
    x: Any = node.args[0]
    return all(memory.maker.op != "placeholder" for memory in lie[x]) and dies(x, node, last, lie)
