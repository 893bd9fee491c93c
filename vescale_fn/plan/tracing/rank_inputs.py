"""The inputs of a recording that must be equal on all ranks, collected for the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._core import torch_internals
from ..._core.base import tables
from ..._core.base.source_lines import quoted, user_line
from ..._core.distributed import collectives
from ..._core.distributed.mesh import communicator_of
from ..._core.distributed.replicated_uses import Row
from ..._core.local_types import replica_check
from ..._core.sharding.layout import text
from . import leaves as leaves_
from .trace import Recorded


def brought(recorded: Recorded, leaves: Sequence[Any], names: Sequence[str], mesh: Any) -> list[Row]:
    """The inputs of a recorded function that all ranks of `mesh` are to have alike, and the numbers in it.

    These are Python numbers and strings, and the plain tensors that meet arrays in it, or of which something is made that does.
    """
    line = quoted(user_line())
    rows: list[Row] = [
        (name, line, [], [repr(x)]) for name, x in zip(names, leaves) if isinstance(x, (bool, int, float, complex, str))
    ]
    todo = [node for node in recorded.graph.nodes if "alike" in node.meta]
    needed = set(todo)
    while todo:
        node = todo.pop()
        if not isinstance(node.target, collectives.Collective):  # what arrives is the same on all ranks that took part
            new = [x for x in node.all_input_nodes if x not in needed]
            needed.update(new)
            todo += new
    places: list[tuple[str, Any]] = []
    for name, leaf in zip(names, leaves, strict=True):
        count = 1 if leaves_.is_number(leaf) else len(leaves_.plain_of(leaf))
        places += [(name, leaf)] * count
    places += [(f"tensor {i} that it closes over, {text(x)},", x) for i, x in enumerate(recorded.constants)]
    for node, (name, x) in zip(recorded.inputs, places):
        if (
            node in needed
            and isinstance(x, torch.Tensor)
            and torch_internals.is_bare(x)
            and tables.numbers(x) is None  # follows from the layouts, and may differ from rank to rank
            and (bits := replica_check.bits(x))
        ):
            rows.append((name, line, [], [bits]))
    return rows + recorded.ledger.told(communicator_of(mesh).processes())
