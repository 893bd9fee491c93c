"""The meshes that are worth trying for some ranks, and the best layouts over several of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..._core.base.errors import MeshError
from ..._core.base.messages import mesh_text, report, short
from ...plan.ir.memory_use import bytes_text
from ...plan.uncollected import uncollected
from .again import add_repeats
from .best import SECONDS, NothingFits, floor
from .highs import Deadline, OutOfTime
from .program import program
from .search import FoundLayouts, on_mesh, structure_of

_HOPELESS = 1.1  # times as long as another mesh takes, by what calls alone take


def mesh_shapes(
    ranks: int, nodes: int = 1, names: Sequence[str] = ("dp", "tp"), pipeline: str | None = None
) -> list[dict[str, int]]:
    """The meshes that are worth trying, of as many axes as there are names or fewer: the innermost axis stays in a node.

    Args:
        ranks: all of them.
        nodes: on which they lie.
        names: of the axes, the outermost first. Three make the search of each mesh several times as long.
        pipeline: the axis of a pipeline, outside of all others: behind the meshes without it those that have it, fewer stages
            first.

    Raises:
        MeshError: no positive numbers, or nodes that do not have as many ranks each; an axis of two names.

    >>> mesh_shapes(16, nodes=2)
    [{'dp': 16}, {'dp': 8, 'tp': 2}, {'dp': 4, 'tp': 4}, {'dp': 2, 'tp': 8}]
    >>> [tuple(x.values()) for x in mesh_shapes(16, nodes=4, names=("dp", "fsdp", "tp"))]
    [(16,), (8, 2), (4, 4), (2, 8), (8, 2), (4, 2, 2), (2, 4, 2), (4, 4), (2, 2, 4)]
    >>> mesh_shapes(4, names=("dp",), pipeline="pp")
    [{'dp': 4}, {'pp': 2, 'dp': 2}, {'pp': 4}]
    """
    if pipeline in names:
        raise MeshError(report("mesh_shapes", f"the axis {pipeline!r} of the pipeline is among names={short(names)}"))
    if type(ranks) is not int or type(nodes) is not int or min(ranks, nodes) < 1 or ranks % nodes:
        what = f"{short(ranks)} ranks do not lie on {short(nodes)} nodes, as many on each"
        raise MeshError(report("mesh_shapes", what))
    shapes = _shapes(ranks, ranks // nodes, names)
    for stages in range(2, ranks + 1) if pipeline is not None else ():
        if ranks % stages == 0:
            rest = [{}] if stages == ranks else _shapes(ranks // stages, ranks // nodes, names)
            shapes += [{pipeline: stages, **shape} for shape in rest]
    return shapes


def _shapes(ranks: int, of_node: int, names: Sequence[str]) -> list[dict[str, int]]:
    """Those of some ranks next to each other, so many of them on each node."""
    *outer, inner = names
    inside = [n for n in range(1, min(ranks, of_node) + 1) if ranks % n == of_node % n == 0]
    shapes = list[dict[str, int]]()
    for n in inside if outer else [ranks]:
        last = {inner: n} if n > 1 else {}
        if n == ranks:  # alone
            shapes += [last] * (of_node % ranks == 0 and ranks > 1 or not outer)
        else:
            shapes += [{**dict(zip(outer, sizes)), **last} for sizes in _factors(ranks // n, len(outer))]
    return shapes or [{names[0]: ranks}]


def _factors(count: int, most: int) -> list[tuple[int, ...]]:
    """The products of up to so many numbers above 1 that are this count, fewer ones first."""
    found = [(count,)]
    for n in range(count - 1, 1, -1) if most > 1 else ():
        if count % n == 0:
            found += [(n, *rest) for rest in _factors(count // n, most - 1)]
    return sorted(found, key=len)


@uncollected()
def searched(
    recording: Any,
    meshes: Sequence[Mapping[str, int]],
    hardware: Any,
    memory: float | None = None,
    fixed: Mapping[int, Any] | None = None,
    candidates: int = 6,
    seconds: float = SECONDS,
    left_out: list[str] | None = None,
    again: bool = False,
) -> list[FoundLayouts]:
    """The best layouts on any of these meshes, by prediction, the best first: that of each mesh, and the best others,
    `candidates` in all. Arguments as of `search`; to `left_out` is added which meshes were not searched, and why.

    Calls take at least as long as the fastest option of each takes, and hold as much as its smallest does. Where that is more
    than there is memory, or much slower than what was found on another mesh, a mesh is left out.

    Raises:
        NothingFits: on any of them.
        OutOfTime: the solver found nothing in the time that it had.
    """
    found, failures = list[FoundLayouts](), list[str]()
    step, deadline = structure_of(recording), Deadline(seconds)
    late: OutOfTime | None = None
    left_out = [] if left_out is None else left_out
    for mesh in meshes:
        made = program(step, mesh, hardware, fixed, memory is None)
        add_repeats(made, again)
        least, held_ = floor(made)
        fastest = min((one.seconds for one in found), default=math.inf)
        if not deadline.left and found:
            left_out.append(f"{mesh_text(mesh)}: time was over")
        elif memory is not None and held_ > memory and len(meshes) > 1:
            what = f"any layout on the {mesh_text(mesh)} needs at least {bytes_text(int(held_))}"
            failures.append(report("auto", what, fix="more memory, more ranks, or vfn.remat around layers"))
            left_out.append(f"{mesh_text(mesh)}: any layout needs at least {bytes_text(int(held_))}")
        elif least > _HOPELESS * fastest:
            left_out.append(f"{mesh_text(mesh)}: calls alone take {least / fastest:.2f} times what another mesh takes")
        else:
            try:
                found += on_mesh(made, memory, candidates, deadline)
            except NothingFits as error:
                failures.append(str(error))
                left_out.append(f"{mesh_text(mesh)}: nothing was found that fits in the memory")
            except OutOfTime as error:
                late = late or error
                left_out.append(f"{mesh_text(mesh)}: time was over")
    if not found:
        raise late or NothingFits("\n".join(failures))
    order = sorted(found, key=lambda one: (one.seconds, math.prod(one.layouts.mesh.values()), str(one.layouts.mesh)))
    firsts = {str(one.layouts.mesh): one for one in reversed(order)}
    kept = [one for one in order if one is firsts[str(one.layouts.mesh)]][:candidates]
    kept += [one for one in order if one not in kept][: candidates - len(kept)]
    return [one for one in order if any(one is other for other in kept)]
