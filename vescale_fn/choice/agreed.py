"""Processes that choose a layout together: all of them get the same one, or an error, whatever happens on one of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .._core.arrays.array import is_array, mesh_of
from .._core.base import context, tree
from .._core.base.errors import DivergenceError, RecordError
from .._core.base.messages import report
from .._core.distributed.abstract_mesh import AbstractMesh
from .._core.distributed.mesh import Mesh, communicator_of
from .._core.distributed.places import whole_mesh
from .._core.distributed.ranks import talks_to_nobody
from .._core.sharding.layout import WHOLE, type_text
from ..plan.ir.graph import value
from .as_written import ways
from .recording import Recording
from .scheduled import Scheduled, chosen_of, scheduled
from .search.layouts import Layouts
from .verified import Verified, priced_as
from .written import WrittenStep


def met_on(mesh: Any, args: Any) -> Any:
    """The mesh of processes on which a choice is made; None where this process chooses alone.

    Args:
        mesh: as `auto` is given it.
        args: of the step.
    """
    given = list(mesh) if isinstance(mesh, (list, tuple)) else [mesh]
    if mesh is None:
        arrays = (x for x in tree.leaves(args) if isinstance(x, torch.Tensor) and is_array(x))
        own = next((mesh_of(x) for x in arrays), None)
        given = [context.current_mesh() if own is None else whole_mesh(own)]
    for one in given:
        if isinstance(one, Mesh) and not isinstance(one, AbstractMesh):
            return None if communicator_of(one).all_here or talks_to_nobody() else one
    return None


def agreed(mesh: Any, name: str, choose: Callable[[], Any]) -> Any:
    """What all ranks choose; where they differ, as where a solver had too little time on one of them, the first rank's choice.

    Args:
        mesh: as of `met_on`.
        name: of the step.
        choose: a `ChosenLayout`, as each rank makes it by itself.

    Raises:
        RecordError: on the other ranks, where it raised on some.
        DivergenceError: the ranks have recorded other calls, or were given other shapes.
    """
    if mesh is None:
        return choose()
    found, failure = None, None
    try:
        found = choose()
    except BaseException as error:  # an interrupt, too: the others would wait for this rank
        failure = error
    rows, parts = ([], None) if found is None else (found.ranked, found.microbatches)
    said = digest([one.layouts for one in rows], [(one.memory, _as_written(found, one)) for one in rows])
    told = _told(mesh, (_said(failure), {} if found is None else _recorded(found), (said, parts)))
    _raise_together(failure, [theirs for theirs, *_ in told], name)
    assert found is not None
    _same_steps([steps for _, steps, _ in told], name)
    if len({one for *_, one in told}) == 1:
        return found
    mine = [(one.name, one.layouts, one.memory, _as_written(found, one)) for one in rows]
    first, count = _told(mesh, (mine, found.microbatches))[0]
    found = next((one for one in (found, *found.in_other_parts) if one.microbatches == count), found)
    try:
        found = found.of([_like(found, *one) for one in first])
    except BaseException as error:
        failure = error
    _raise_together(failure, _told(mesh, _said(failure)), name)
    return found


def _said(failure: BaseException | None) -> str:
    return "" if failure is None else str(failure) or type(failure).__name__


def _raise_together(failure: BaseException | None, told: Sequence[str], name: str) -> None:
    """Raise what was raised here, or that something was on another rank, of which each told what."""
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(told):
        if theirs:
            what = f"choosing a layout of {name} raised on rank {rank}, and not here"
            raise RecordError(report("auto", what, [theirs.splitlines()[0]]), follows=True)


def _recorded(found: Any) -> dict[int | None, str]:
    """Of each number of parts a digest of what was recorded: what the arguments are, and which calls there are."""
    digests = dict[int | None, str]()
    for one in (found, *found.in_other_parts):
        nodes = one.recorded.graph.nodes
        inputs = [(node.name, type_text(x.shape, x.dtype, WHOLE)) for node, x in _tensors(one.recorded)]
        said = inputs, [(node.name, str(node.target)) for node in nodes if node.op == "call_function"]
        digests[one.microbatches] = hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()
    return digests


def _same_steps(told: Sequence[dict[int | None, str]], name: str) -> None:
    """Raise on all ranks where one has recorded something else than the first: a layout would not be of its calls."""
    for rank, theirs in enumerate(told):
        if any(theirs.get(count, step) != step for count, step in told[0].items()):
            what = f"ranks 0 and {rank} have recorded different calls of {name}, or were given other shapes"
            raise DivergenceError(report("auto", what, fix="the same step and the same global shapes on all ranks"))


def _tensors(recorded: Recording) -> list[tuple[Any, torch.Tensor]]:
    found = [(node, value(node)) for node in recorded.placeholders]
    return [(node, x) for node, x in found if isinstance(x, torch.Tensor)]


def check(mesh: Any, layouts: Layouts, name: str) -> None:
    """Raise where the ranks of a mesh have chosen different layouts."""
    if communicator_of(mesh).all_here or talks_to_nobody():
        return
    told = _told(mesh, digest([layouts]))
    if len(set(told)) > 1:
        rank = next(rank for rank, one in enumerate(told) if one != told[0])
        what = f"ranks 0 and {rank} have chosen different layouts for {name}"
        raise DivergenceError(report("auto", what, fix="auto(..., mesh=vfn.make_mesh(...)), on all ranks of it"))


def digest(rows: Sequence[Layouts], held: Sequence[Any] = ()) -> str:
    """A digest of layouts, and of how their plans are made, the same on all ranks that have the same."""
    said: list[Any] = [held]
    said += [(list(one.mesh.items()), one.inputs, sorted(one.calls.items()), one.outputs, one.keeps) for one in rows]
    return hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()


def _as_written(found: Any, one: Verified) -> tuple[Scheduled | None, str | None] | None:
    """Of a layout in which the step runs as it is written: the schedule that was chosen for its pipeline, and a digest of the
    lines that are written in it; None of others."""
    chosen = chosen_of(one.step)
    lines = _lines(one.step) if isinstance(one.step, WrittenStep) else None
    written = one.step is found.recorded.f or chosen is not None or lines is not None
    return (chosen, lines) if written else None


def _lines(step: WrittenStep) -> str:
    """A digest of the lines that are written in a step; of files by their names, as each machine may have them elsewhere."""
    said = sorted((os.path.basename(one.line), repr(one.place[1:]), repr(one.spec)) for one in step.lines)
    return hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()


def _like(
    found: Any, name: str, layouts: Layouts, memory: int | None, written: tuple[Scheduled | None, str | None] | None
) -> Verified:
    """A layout of another rank with its price here."""
    told = digest([layouts], [(memory, written)])
    for one in found.ranked:
        if (one.name, digest([one.layouts], [(one.memory, _as_written(found, one))])) == (name, told):
            return one
    chosen, lines = written or (None, None)
    step = None if written is None else scheduled(found.recorded.f, chosen)
    one = Verified(layouts, None, found.predicted, False, name, memory, step)
    if lines is not None:
        step = next((step for step in ways(found.recorded, one) if _lines(step) == lines), None)
        if step is None:
            what = "rank 0 has written the step with lines that this rank does not come to"
            raise DivergenceError(report("auto", what, fix="the same code on all ranks"))
        one = replace(one, step=step)
    cost = priced_as(found.recorded, layouts, found.hardware, found.donated, memory, one.step)
    return replace(one, price=cost, fits=found.budget is None or cost.peak <= found.budget)


def _told(mesh: Any, what: Any) -> list[Any]:
    """What each rank has to say; asked by all ranks."""
    return [row[0] for row in communicator_of(mesh).everyone([[what]], "auto")]
