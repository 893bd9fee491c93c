"""The meshes that are worth trying for some ranks, and the best layouts over several of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..._core.base.errors import MeshError
from ..._core.base.messages import report, short
from .highs import Deadline, OutOfTime
from .search import FoundLayouts, NothingFits, search, structure_of


def mesh_shapes(ranks: int, nodes: int = 1, names: Sequence[str] = ("dp", "tp")) -> list[dict[str, int]]:
    """The meshes of two axes, or one, that are worth trying: the inner axis stays in a node.

    Args:
        ranks: all of them.
        nodes: on which they lie.
        names: of the outer axis and of the inner one.

    Raises:
        MeshError: no positive numbers, or nodes that do not have as many ranks each.

    >>> mesh_shapes(16, nodes=2)
    [{'dp': 16}, {'dp': 8, 'tp': 2}, {'dp': 4, 'tp': 4}, {'dp': 2, 'tp': 8}]
    """
    if type(ranks) is not int or type(nodes) is not int or min(ranks, nodes) < 1 or ranks % nodes:
        what = f"{short(ranks)} ranks do not lie on {short(nodes)} nodes, as many on each"
        raise MeshError(report("mesh_shapes", what))
    outer, inner = names
    inside = [n for n in range(2, ranks // nodes + 1) if (ranks // nodes) % n == 0]
    shapes = [{outer: ranks}, *({outer: ranks // n, inner: n} for n in inside if n < ranks)]
    return [*shapes, {inner: ranks}] if nodes == 1 and ranks > 1 else shapes


def searched(
    recording: Any,
    meshes: Iterable[Mapping[str, int]],
    hardware: Any,
    memory: float | None = None,
    fixed: Mapping[int, Any] | None = None,
    candidates: int = 6,
    seconds: float = 60.0,
) -> list[FoundLayouts]:
    """The best layouts on any of these meshes, by prediction, the best first: that of each mesh, and the best others,
    `candidates` in all. Arguments as of `search`.

    Raises:
        NothingFits: on any of them.
        OutOfTime: the solver found nothing in the time that it had.
    """
    found, failures = list[FoundLayouts](), list[str]()
    step, deadline = structure_of(recording), Deadline(seconds)
    late: OutOfTime | None = None
    for mesh in meshes:
        try:
            found += search(step, mesh, hardware, memory, fixed, candidates, seconds=deadline)
        except NothingFits as error:
            failures.append(str(error))
        except OutOfTime as error:
            late = error
            break
    if not found:
        raise late or NothingFits("\n".join(failures))
    order = sorted(found, key=lambda one: (one.seconds, math.prod(one.layouts.mesh.values()), str(one.layouts.mesh)))
    firsts = {str(one.layouts.mesh): one for one in reversed(order)}
    kept = [one for one in order if one is firsts[str(one.layouts.mesh)]][:candidates]
    kept += [one for one in order if one not in kept][: candidates - len(kept)]
    return [one for one in order if any(one is other for other in kept)]
