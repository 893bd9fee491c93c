"""Ranks agree on what each of them recorded, before the first replay: the collectives of their plans must meet."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from .. import wire
from ..array import mesh_of
from ..errors import DivergenceError, RecordError, VfnError, dtype_text, report
from ..lines import quoted
from ..mesh import axes_of, is_simulated
from .graph import collectives, value


def agree(name: str, leaves: Iterable[Any], graph: fx.Graph | None, reason: str, error: VfnError | None) -> str:
    """Tell the other ranks what came of recording a function here, and hear what came of it there.

    Nothing travels where neither an argument nor a collective names a mesh of several processes.

    Args:
        name: the function's.
        leaves: of its arguments.
        graph: what was recorded, perhaps in part.
        reason: why the function cannot be recorded on this rank; "" where it can be.
        error: what recording raised on this rank.

    Returns:
        Why it cannot be recorded, on this rank or on another one; "" where it is recorded on all.

    Raises:
        RecordError: recording raised on another rank, and not here.
        DivergenceError: the ranks recorded different collectives.
    """
    calls = [] if graph is None else collectives(graph)
    found = [mesh for x in leaves if isinstance(x, torch.Tensor) and (mesh := mesh_of(x)) is not None]
    found += [node.target.mesh for node in calls]  # type: ignore[union-attr]
    mesh = next(iter(found), None)
    if mesh is None or is_simulated(mesh) or wire.group_size(mesh, tuple(axes_of(mesh))) == 1 or _talks_to_nobody():
        return reason
    said = reason, "" if error is None else str(error), [_said(node) for node in calls]
    by_rank = [row[0] for row in wire.everyone([[said]], mesh, "jit")]
    if error is not None:
        return reason
    for rank, (_, raised, _) in enumerate(by_rank):
        if raised:
            raise RecordError(
                report("jit", f"recording {name} raised on rank {rank}, and not here", [raised.splitlines()[0]])
            )
    for rank, (why, _, _) in enumerate(by_rank):
        if why:
            return reason or f"on rank {rank} {why}"
    for rank, (_, _, theirs) in enumerate(by_rank):
        for i, (one, other) in enumerate(zip_longest(by_rank[0][2], theirs, fillvalue=("none", ""))):
            if one[0] != other[0]:
                raise DivergenceError(report(
                    "jit", f"ranks recorded different collectives for {name}; the first that differs is number {i + 1}",
                    [f"rank 0: {', at '.join(filter(None, one))}", f"rank {rank}: {', at '.join(filter(None, other))}"],
                    "the same program on every rank; `if rank == 0` only around what moves nothing"))  # fmt: skip
    return ""


def _said(node: fx.Node) -> tuple[str, str]:
    """What the ranks of a group must have alike of a collective, since shapes may differ between groups; and its line."""
    collective: Any = node.target
    given = node.args[0]
    one = value(given[0] if isinstance(given, (list, tuple)) else given)  # type: ignore[arg-type]
    line = node.meta.get("line", "")
    what = f"{collective.kind} over {','.join(collective.axes)} of {dtype_text(one.dtype)}"
    return what, quoted(line) if line else ""


def _talks_to_nobody() -> bool:
    """Whether the process group is torch's fake one, which stands for ranks that are not there."""
    return not dist.is_initialized() or dist.get_backend() == "fake"
