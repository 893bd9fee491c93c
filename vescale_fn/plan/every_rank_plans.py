"""The plans of all ranks of an abstract mesh, for a file: one for those that do the same with numbers of their own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._core.arrays.array import Array
from .._core.base import no_values
from .._core.base.errors import TransformError
from .._core.base.messages import mesh_text, report
from .._core.base.source_lines import quoted, warn
from .._core.distributed.abstract_mesh import AbstractMesh
from .._core.distributed.communicator import coordinates, groups
from .._core.distributed.mesh import root
from .._core.sharding.index_map import axes_of, local_shape
from .._core.sharding.layout import contiguous_stride, layout
from .._core.torch_internals import spec as spec_of
from .ir.graph import Pass
from .ir.nested import all_collectives
from .ir.per_rank import RanksDiffer
from .lowered import Origin
from .passes.budget import Budget
from .passes.dce import keep, needed_collectives
from .plan import Plan
from .tracing import leaves as leaves_
from .tracing.every_rank import EveryRank
from .tracing.rank_consensus import Stage, stage
from .tracing.rank_consensus import meshes as meshes_of
from .tracing.trace import Recorded
from .tracing.traced_float import difference, same_values


class OfRanks(NamedTuple):
    """A plan, and for which ranks it is; `every` knows the numbers of each."""

    plan: Plan
    every: EveryRank


def abstract_mesh_of(origin: Origin) -> AbstractMesh | None:
    """The abstract mesh that a plan was made for; None where it is for real ranks, or one device."""
    recorded: Recorded = origin.plan.recorded
    known = meshes_of(origin.call.leaves, recorded.graph, recorded)
    found = list(dict.fromkeys(map(root, (*origin.meshes, *known))))
    abstract = [mesh for mesh in found if isinstance(mesh, AbstractMesh)]
    if len(abstract) > 1:
        named = " and the ".join(mesh_text(axes_of(mesh)) for mesh in abstract)
        raise TransformError(report("save_plan", f"a plan on several abstract meshes, the {named}, cannot be saved"))
    return abstract[0] if abstract else None


def every_rank(origin: Origin, mesh: AbstractMesh, name: str, most: int) -> list[OfRanks]:
    """The plans of all ranks of a mesh, so many at most.

    Raises:
        TransformError: the ranks need more plans, or do something that only recording each of them would show.
    """
    found: list[tuple[OfRanks, Recorded]] = []
    todo = list(range(mesh.mesh.numel()))
    while todo:
        if len(found) == most:
            what = (
                f"the ranks of the {mesh_text(axes_of(mesh))} need more than {most} plan{'s' * (most != 1)} of {name}"
            )
            fix = f"most={2 * most}: each plan is recorded twice, and stands in the file"
            raise TransformError(report("save_plan", what, [_place(mesh, rank) for rank in todo[:4]], fix))
        shapes = {rank: _shapes(origin.call.leaves, rank) for rank in todo}
        every = EveryRank(mesh, [rank for rank in todo if shapes[rank] == shapes[todo[0]]])
        recorded, plan = _recorded(origin, every)
        every.narrow(recorded.graph)
        _check(origin, every, recorded, name)
        found.append((OfRanks(plan, every), recorded))
        todo = [rank for rank in todo if rank not in every.together]
    _improve([made for made, _ in found], list(origin.passes), mesh, name)
    for _, recorded in found:
        recorded.end()
    return [made for made, _ in found]


def _recorded(origin: Origin, every: EveryRank) -> tuple[Recorded, Plan]:
    with every.recording():
        call = copy.copy(origin.call)
        call.leaves = [_as_on(leaf, every.ranks[0]) for leaf in call.leaves]
        return origin.traced(call)


def _check(origin: Origin, every: EveryRank, recorded: Recorded, name: str) -> None:
    """Raise where what the last of the ranks records by itself is not what it has in the plan for all."""
    rank = every.together[-1]
    if rank == every.ranks[0]:
        return
    alone = EveryRank(every.mesh, [rank])
    other, _ = _recorded(origin, alone)
    other.end()
    node = difference(recorded.graph, other.graph, len(every.together) - 1)
    tables, alones = every.tables(recorded.constants), alone.tables(other.constants)
    same = len(tables) == len(alones) and all(
        one is other or (one is not None and other is not None and same_values(one[-1], other[0]))
        for one, other in zip(tables, alones)
    )
    if node is not None or not same:
        line = "" if node is None else node.meta.get("line", "")
        what = f"{_place(every.mesh, rank)} does something in {name} that does not follow from its place alone"
        raise TransformError(report("save_plan", what, [f"at {quoted(line)}"] if line else []))


def _place(mesh: Any, rank: int) -> str:
    return f"the rank at {', '.join(f'{name}={i}' for name, i in coordinates(mesh, rank).items())}"


def _shapes(leaves: Sequence[Any], rank: int) -> list[Any]:
    return [_block(leaf, rank) for leaf in leaves if isinstance(leaf, Array)]


def _block(leaf: Array, rank: int) -> tuple[int, ...]:
    spec = spec_of(leaf)
    return local_shape(tuple(leaf.shape), axes_of(spec.mesh), layout(spec), coordinates(spec.mesh, rank))


def _as_on(leaf: Any, rank: int) -> Any:
    """An argument as a rank has it."""
    if not isinstance(leaf, Array):
        return leaf
    shape, stride = _block(leaf, rank), spec_of(leaf).tensor_meta.stride  # type: ignore[union-attr]

    def block(x: Any) -> Any:
        made = no_values.empty(shape, contiguous_stride(shape), x.dtype, x.device)
        return no_values.empty(shape, leaves_.in_order(made, stride), x.dtype, x.device)

    return leaves_.with_tensors(leaf, block)


def _improve(found: Sequence[OfRanks], passes: list[Pass], mesh: Any, name: str) -> None:
    """Make the plans by passes after which the collectives of all ranks meet."""
    needed = [set(needed_collectives(made.plan.recorded.graph)) for made in found]
    if any(one != needed[0] for one in needed):  # what one rank needs stays on all
        for made in found:
            keep(made.plan.recorded.graph, set().union(*needed))
    while True:
        stages = [_stages(made, passes) for made in found]
        least = min(map(len, stages))
        parted = next((i for i in range(least) if not _meet(found, [of_one[i] for of_one in stages], mesh)), None)
        if parted is None and least > len(passes):
            return
        if parted == 0:
            raise TransformError(
                report("save_plan", f"the ranks of the mesh record collectives of {name} that do not meet")
            )
        place = least - 1 if parted is None else parted - 1
        budget = passes[place]
        if isinstance(budget, Budget) and budget.collectives:
            passes[place] = budget.without_collectives()
            continue
        left_out = passes.pop(place)
        called = getattr(left_out, "__name__", None) or repr(left_out)
        what = f"after the pass `{called}` the plans of {name} would differ between ranks, so they are made without it"
        warn(report("save_plan", f"{what}: values are right, it may be slower"))


def _stages(made: OfRanks, passes: Sequence[Pass]) -> list[tuple[Stage, list[Any]]]:
    """The collectives of a plan, and after each pass; up to one that would have to do different things on its ranks."""
    found: list[tuple[Stage, list[Any]]] = []
    try:
        made.plan.improve(
            passes, lambda graph: found.append((stage(graph), [node.target for node, *_ in all_collectives(graph)]))
        )
    except RanksDiffer:
        pass
    return found


def _meet(found: Sequence[OfRanks], stages: Sequence[tuple[Stage, list[Any]]], mesh: Any) -> bool:
    """Whether all ranks issue the same collectives in one order, with blocks of one size in each group."""
    if len({one.order for one, _ in stages}) > 1:
        return False
    of_rank = {rank: i for i, made in enumerate(found) for rank in made.every.together}
    asked: set[Any] = set()
    for row, target in zip(zip(*(one.rows for one, _ in stages)), stages[0][1], strict=True):
        sizes = tuple(size for one in row for _, size in one.groups)  # each plays one rank, in one group
        if len(set(map(repr, sizes))) > 1 and (target.axes, repr(sizes)) not in asked:
            asked.add((target.axes, repr(sizes)))
            for members in groups(mesh, target.axes):
                if len({repr(sizes[of_rank[rank]]) for rank in members}) > 1:
                    return False
    return True
