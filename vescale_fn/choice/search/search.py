"""Searches for the best layouts of a traced step on a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...plan.uncollected import uncollected
from .again import add_repeats
from .best import SECONDS, Best, best
from .described import source
from .highs import Deadline
from .in_pairs import best_in_pairs
from .layouts import CallLayout, Layouts
from .moves import spec_of_dims
from .options import PARTIAL, Layout, is_plain
from .program import Program, program
from .replaced import replaced
from .structure import Structure, structure


@dataclass(frozen=True)
class FoundLayouts:
    """A layout of a step, with its predicted cost.

    Attributes:
        layouts: the layouts of all values and calls of the step.
        seconds: the time of a step.
        compute: the part of it that calls take.
        bytes: the peak memory of a rank.
        relaxed: whether the linear relaxation gave this layout, without branching.
        proven: whether no layout is better, by prediction; time may have been too short to tell. For layouts after the first:
            no better one in which the same argument is laid out differently from the first.
        least: a lower bound on the seconds of all layouts on this mesh, by prediction.
        within: the share of its time by which the best layout that was found may miss the optimum; 0 where it is proven.
    """

    layouts: Layouts
    seconds: float
    compute: float
    bytes: float
    relaxed: bool
    proven: bool = True
    least: float = 0.0
    within: float = 0.0


@uncollected()
def search(
    recording: Any,
    mesh: Mapping[str, int],
    hardware: Any,
    memory: float | None = None,
    fixed: Mapping[int, Any] | None = None,
    candidates: int = 6,
    ties: Mapping[int, int] | None = None,
    seconds: float | Deadline = SECONDS,
    again: bool = False,
) -> list[FoundLayouts]:
    """The best layouts of a step, by prediction, the best first.

    Args:
        recording: the traced step, or its structure.
        mesh: the axes with their sizes.
        hardware: gives the time of calls and collectives.
        memory: the bytes that a rank may hold; None: no limit, so that a moved value is kept until its last read.
        fixed: the specs of inputs, by number, that must be kept.
        candidates: the most layouts to find: the best one, and others that each lay out a large argument differently.
        ties: the input that each result replaces, by the result's number; None: as `replaced` finds them.
        seconds: the time for all solves together, or a deadline. When it ends, what was found by then is the answer.
        again: whether products of the forward pass may be recomputed, to save memory.

    Raises:
        NothingFits: no layout fits in the memory.
        OutOfTime: the solver found nothing in the time that it had.
    """
    step = recording if isinstance(recording, Structure) else structure_of(recording, ties)
    made = program(step, mesh, hardware, fixed, memory is None)
    add_repeats(made, again)
    deadline = seconds if isinstance(seconds, Deadline) else Deadline(seconds)
    return on_mesh(made, memory, candidates, deadline)


def on_mesh(made: Program, memory: float | None, candidates: int, deadline: Deadline) -> list[FoundLayouts]:
    """The best layouts of a program, as in `search`."""
    several = sum(size > 1 for size in made.moves.axes.values()) > 2
    found = (best_in_pairs if several else best)(made, memory, candidates, deadline)
    return [_found(made, one, found[0]) for one in found]


def structure_of(recording: Any, ties: Mapping[int, int] | None = None) -> Structure:
    """The structure of a traced step, which is the same on all meshes.

    Args:
        recording: the traced step.
        ties: the input that each result replaces, by the result's number; None: as `replaced` finds them.
    """
    return structure(recording, replaced(recording) if ties is None else ties)


def _found(made: Program, one: Best, first: Best) -> FoundLayouts:
    compute = sum(site.count * site.options[k].seconds for site, k in zip(made.sites, one.chosen))
    within = 0.0 if first.proven else 1 - first.least / first.seconds
    layouts = layouts_of(made, one.chosen)
    return FoundLayouts(layouts, one.seconds, compute, one.bytes, one.relaxed, one.proven, first.least, within)


def layouts_of(made: Program, chosen: Sequence[int]) -> Layouts:
    """The layouts of all values and calls, by the options that were chosen."""
    axes, step = made.moves.axes, made.step
    calls, lies, inputs, wanted = dict[str, CallLayout](), dict[Any, Any](), dict[Any, Any](), _of_views(made, chosen)
    known: dict[
        Any, tuple[CallLayout, list[Layout]]
    ] = {}  # by class and layouts of the operands: few, as equal layers share them
    for x in step.calls:
        n = step.classes[x.node]
        before = wanted[x.node] if x.node in wanted else [lies[y] for y in x.operands]
        key = n, *before
        if key not in known:
            known[key] = _lying(made, chosen, n, before)
        call, gives = known[key]
        lies.update({(x.node, part): layout for part, layout in enumerate(gives)})
        if x.is_input:
            inputs[x.node] = call.outs[0] if call.outs else None
        else:
            calls[x.node.name] = call
    outputs = list[Any]()
    for r, node in enumerate(step.results):
        if r in step.ties:
            outputs.append(inputs[step.inputs[step.ties[r]]])
        elif r in step.result_sites:
            node, part = source(node)
            site = made.sites[step.result_sites[r]]
            dims = step.dims[step.classes[node]][1][part]
            lie = site.options[chosen[site.number]].ins[0]
            assert dims is not None
            assert lie is not None
            outputs.append(spec_of_dims(dims.sizes, dims.dims, lie, axes))
        else:
            outputs.append(None)
    return Layouts(dict(axes), tuple(inputs[node] for node in step.inputs), calls, tuple(outputs), made.keeps)


def _of_views(made: Program, chosen: Sequence[int]) -> dict[Any, list[Layout]]:
    """For each renaming view whose readers all want it in one layout, the layout that its operand is to have: then the viewed
    value is moved, once for all of them, and kept. Where that is not possible, the view itself is moved."""
    step, wants, found = made.step, dict[Any, set[Layout]](), dict[Any, list[Layout]]()
    known, shown = dict[Any, bool](), {source(node)[0] for node in step.results if node is not None}
    for x in reversed(step.calls) if made.keeps else ():
        n = step.classes[x.node]
        if (view := step.through.get(n)) is None:
            number = step.number[n]
            given: Sequence[Layout | None] = made.sites[number].options[chosen[number]].ins
        elif len(lies := wants.get(x.node, ())) == 1 and x.node not in shown:
            goal = next(iter(lies))
            given = [tuple(view[k] if k >= 0 else k for k in goal)]
            if (n, goal) not in known:
                known[n, goal] = PARTIAL not in goal and is_plain(step.dims[n][0][0], given[0], made.moves.axes)
            if not known[n, goal]:
                continue
            found[x.node] = [*given]
        else:
            continue
        for (y, part), lies in zip(x.operands, given, strict=True):
            if lies is not None and not part:
                wants.setdefault(y, set()).add(lies)
    return found


def _lying(made: Program, chosen: Sequence[int], n: int, before: list[Any]) -> tuple[CallLayout, list[Layout]]:
    """The layout of a call of this class whose operands have the layouts `before`, and the layouts of its results, by atom."""
    named = lambda d, layout: spec_of_dims(d.sizes, d.dims, layout, made.moves.axes)
    ins, outs = made.step.dims[n]
    if (view := made.step.through.get(n)) is not None:
        gives: list[Layout] = [tuple(view.index(k) if k >= 0 else k for k in before[0])]
    else:
        number = made.step.number[n]
        option = made.sites[number].options[chosen[number]]
        before = [old if new is None else new for old, new in zip(before, option.ins)]
        gives = list(option.outs)
    specs = [named(d, layout) for d, layout in zip(outs, gives, strict=True) if d is not None]
    return CallLayout(tuple(map(named, ins, before)), tuple(specs)), gives
