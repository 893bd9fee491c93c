"""The best layouts of a recorded step on a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..._core.base.errors import VfnError
from ..._core.base.messages import report
from ...plan.ir.memory_use import bytes_text
from .described import source
from .held import HeldBytes, held
from .layouts import CallLayout, Layouts
from .moves import spec_of_dims
from .options import Layout
from .program import Program, program
from .solver import Choices, OutOfTime
from .structure import structure

_ROUNDS = 12  # moments at which memory is bounded, one after the other
_OTHER = 0.01  # of the bytes of the arguments: what the next best layouts place differently at least


class NothingFits(VfnError):
    """No layout needs as little memory as there is."""


@dataclass(frozen=True)
class FoundLayouts:
    """Layouts with what they take, by prediction.

    Attributes:
        layouts: of the step.
        seconds: of a step.
        compute: the part of it that calls take.
        bytes: the most that a rank holds.
        relaxed: whether the linear relaxation gave it, without a branch.
    """

    layouts: Layouts
    seconds: float
    compute: float
    bytes: float
    relaxed: bool


def search(
    recording: Any,
    mesh: Mapping[str, int],
    hardware: Any,
    memory: float | None = None,
    fixed: Mapping[int, Any] | None = None,
    candidates: int = 6,
    ties: Mapping[int, int] | None = None,
    seconds: float = 60.0,
) -> list[FoundLayouts]:
    """The best layouts of a step, by prediction, the best first.

    Args:
        recording: of the step.
        mesh: axes with their sizes.
        hardware: what calls and collectives take.
        memory: bytes that a rank may hold; None: any.
        fixed: of inputs, by number, the specs that are given.
        candidates: how many layouts, which lie differently by at least a hundredth of the arguments' bytes.
        ties: of results, by number, the input that each replaces; None: found by shape, in order.
        seconds: the most that a solution may take.

    Raises:
        NothingFits: in the memory.
        VfnError: the solver found nothing in the time that it had.
    """
    step = structure(recording, replaced(recording) if ties is None else ties)
    made = program(step, mesh, hardware, fixed)
    return [_found(recording, made, *one) for one in best(made, memory, candidates, seconds)]


def best(
    made: Program, memory: float | None, candidates: int = 1, seconds: float = 60.0
) -> list[tuple[list[int], float, float, bool]]:
    """The best choices of a program: options by site, seconds, bytes, and whether the relaxation gave them.

    Raises:
        NothingFits: in the memory.
        VfnError: the solver found nothing in the time that it had.
    """
    choices, holds = Choices(made), held(made)
    found: list[tuple[list[int], float, float, bool]] = []
    while len(found) < candidates:
        try:
            one = _fitting(choices, holds, memory, seconds)
        except OutOfTime:
            if found:
                break
            raise
        if one is None:
            break
        found.append(one)
        inputs = _large_inputs(made)
        choices.forbid(one[0], inputs or range(len(made.sites)))
    if not found:
        raise NothingFits(report("auto", *_does_not_fit(made, holds, memory or 0.0, seconds)))
    return found


def _fitting(
    choices: Choices, holds: HeldBytes, memory: float | None, seconds: float
) -> tuple[list[int], float, float, bool] | None:
    """The best choices that fit: where too much is held at a moment, that moment is bounded, and all is solved again."""
    for _ in range(_ROUNDS):
        chosen, cost, relaxed = choices.solve(seconds)
        if chosen is None:
            return None
        moments = holds.by_moment(chosen)
        peak = float(moments.max())
        if memory is None or peak <= memory:
            return chosen, cost, peak, relaxed
        choices.bound(*holds.row(int(moments.argmax())), memory)
    return None


def _large_inputs(made: Program) -> list[int]:
    """The sites of arguments that are at least a hundredth of all."""
    inputs = [site for site in made.sites if site.of is not None and site.of.is_input and site.outs[0] is not None]
    sizes = {
        site.number: site.count * float(np.prod(site.outs[0].sizes)) * site.of.outs[0].element_size()  # type: ignore[union-attr]
        for site in inputs
    }
    return [n for n, size in sizes.items() if size >= _OTHER * sum(sizes.values())]


def _does_not_fit(made: Program, holds: HeldBytes, memory: float, seconds: float) -> tuple[str, list[str], str]:
    """By how much the least that is held exceeds the memory."""
    least = Choices(made)
    least.cost = [0.0] * len(least.cost)
    peak = float("inf")
    chosen: list[int] | None = None
    for _ in range(4):
        chosen, _, _ = least.solve(seconds)
        if chosen is None:
            break
        moments = holds.by_moment(chosen)
        if moments.max() >= peak:
            break
        peak = float(moments.max())
        options, moves = holds.row(int(moments.argmax()))
        for (n, k), size in options.items():
            for column in least.columns.get((n, k), ()):
                least.cost[column] += size * 1e-12
        for key, size in moves.items():
            if key in least.moved:
                least.cost[least.moved[key]] += size * 1e-12
    what = f"no layout on {dict(made.moves.axes)} needs as little as {bytes_text(int(memory))}"
    rows = [f"the least that was found is {bytes_text(int(peak))}, {bytes_text(int(peak - memory))} more"]
    return what, rows, f"memory={bytes_text(int(peak))!r}, more ranks, or vfn.remat around layers"


def replaced(recording: Any) -> dict[int, int]:
    """Of results the inputs that they replace: those of the same shapes and dtypes, in the same order."""
    kinds = [
        (tuple(x.meta["val"].shape), x.meta["val"].dtype) if _is_tensor(x) else None for x in recording.placeholders
    ]
    found, at = dict[int, int](), 0
    for r, made in enumerate(recording.results):
        if made is None or not _is_tensor(made) or not made.meta["val"].ndim:
            continue
        kind = tuple(made.meta["val"].shape), made.meta["val"].dtype
        place = next((i for i in range(at, len(kinds)) if kinds[i] == kind), None)
        if place is not None and kind[1].is_floating_point:
            found[r], at = place, place + 1
    return found


def _is_tensor(node: Any) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _found(
    recording: Any, made: Program, chosen: Sequence[int], seconds: float, peak: float, relaxed: bool
) -> FoundLayouts:
    compute = sum(site.count * site.options[k].seconds for site, k in zip(made.sites, chosen))
    return FoundLayouts(layouts_of(recording, made, chosen), seconds, compute, peak, relaxed)


def layouts_of(recording: Any, made: Program, chosen: Sequence[int]) -> Layouts:
    """The layouts that options mean."""
    axes, step = made.moves.axes, made.step
    calls, lies, inputs = dict[str, CallLayout](), dict[Any, Any](), dict[Any, Any]()
    known: dict[
        Any, tuple[CallLayout, list[Layout]]
    ] = {}  # by class, and how the operands lie: as few as there are layers
    for x in step.calls:
        n = step.classes[x.node]
        key = n, *(lies[y] for y in x.operands)
        if key not in known:
            known[key] = _lying(made, chosen, n, [*key[1:]])
        call, gives = known[key]
        lies.update({(x.node, part): layout for part, layout in enumerate(gives)})
        if x.is_input:
            inputs[x.node] = call.outs[0] if call.outs else None
        else:
            calls[x.node.name] = call
    outputs = list[Any]()
    for r, node in enumerate(recording.results):
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
    return Layouts(dict(axes), tuple(inputs[node] for node in step.inputs), calls, tuple(outputs))


def _lying(made: Program, chosen: Sequence[int], n: int, before: list[Any]) -> tuple[CallLayout, list[Layout]]:
    """The layout of a call of a class whose operands lie so, and of the atoms of what it gives."""
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
