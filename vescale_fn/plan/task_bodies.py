"""The graphs of a pipeline's tasks, improved by the passes of plans: once for all stages that do the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from .._core.base import context
from .._core.distributed.collectives import Collective
from .execution.codegen import generate
from .ir.graph import KEPT, Step, copied, output
from .ir.nested import all_collectives, everywhere, taken_back
from .passes.equal_parts import equal_parts
from .passes.kept_calls import kept
from .pipeline import PASSES, beside_computing
from .tracing.rank_consensus import Stage, stage

OF_TASKS = tuple(one for one in PASSES if one not in (equal_parts, kept))  # whose calls of parts others look through


class TaskBody:
    """What tasks of some stages compute.

    Args:
        graph: from their inputs to their outputs, as recorded.
        name: of the first of them.

    Attributes:
        graph: improved.
        meets: its collectives, as ranks compare them.
    """

    def __init__(self, graph: fx.Graph, name: str) -> None:
        self.name, self.recorded = name, graph
        for node, *_ in all_collectives(graph):
            node.meta[KEPT] = True  # a rank whose block is empty takes part as well
        self.graph = improved(graph)
        if list(map(_lies, _results(self.graph))) != list(map(_lies, _results(graph))):  # others are recorded for these
            self.graph = graph
        self.meets: Stage = stage(self.graph)

    @functools.cached_property
    def run(self) -> Callable[[list[Any]], tuple[Any, ...]]:
        """Takes the list of the inputs, which it empties, and gives the outputs."""
        return generate(self.graph, self.name).run


def _results(graph: fx.Graph) -> list[Any]:
    return [x.meta["val"] for x in output(graph).args[0]]  # type: ignore[union-attr]


def improved(graph: fx.Graph) -> fx.Graph:
    """What the passes make of the graph of a task."""
    graph = copied(graph)
    for improve in beside_computing(OF_TASKS) if context.devices() == "cuda" else OF_TASKS:
        graph = everywhere(improve, graph)
    return taken_back(graph)


class TaskBodies:
    """One body for all tasks that are equal."""

    def __init__(self) -> None:
        self._known: dict[Hashable, TaskBody] = {}

    def of(self, graph: fx.Graph, name: str) -> TaskBody:
        """The body of a task that has this graph."""
        key = said(graph)
        if key not in self._known:
            self._known[key] = TaskBody(graph, name)
        return self._known[key]

    def give_back(self) -> None:
        """Do without the passes, after which ranks would not meet."""
        for body in self._known.values():
            body.graph = body.recorded


# --- equal graphs -----------------------------------------------------------------------------------------------------


def said(graph: fx.Graph) -> Hashable:
    """Equal for graphs that do the same in the same lines, with values that lie alike."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    again: dict[Any, int] = {}  # which repetition it is, counted in this graph
    found: list[Hashable] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            found.append(_lies(node.meta["val"]))
            continue
        repeats = node.meta.get("again")
        repeats = None if repeats is None else again.setdefault(repeats, len(again))
        made = _lies(node.meta["val"]), node.meta.get("line", ""), repeats, node.meta.get("alike")
        found.append((_target(node.target), _argument(node.args, number), _argument(node.kwargs, number), *made))
    return tuple(found)


def _target(target: Any) -> Hashable:
    if isinstance(target, Collective):
        return target, target.elements, target.padded
    run = target.run if isinstance(target, Step) else None
    if type(target) is Step and isinstance(run, functools.partial) and not run.args:
        try:
            hash(given := tuple(sorted(run.keywords.items())))
        except TypeError:
            return target
        return target.name, run.func, _argument(given, {}), target.effect, target.writes, target.views, target.into
    return target


def _argument(x: Any, number: dict[fx.Node, int]) -> Hashable:
    if isinstance(x, fx.Node):
        return "%", number[x]
    if isinstance(x, dict):
        return tuple((key, _argument(value, number)) for key, value in x.items())
    if isinstance(x, (list, tuple)):
        return isinstance(x, list), *(_argument(one, number) for one in x)
    if isinstance(x, slice):
        return "slice", _argument((x.start, x.stop, x.step), number)
    return (type(x), repr(x)) if isinstance(x, (int, float, complex)) else x


def _lies(val: Any) -> Hashable:
    if isinstance(val, torch.Tensor):
        return val.shape, val.stride(), val.dtype, val.device, val.is_conj(), val.is_neg()
    return tuple(map(_lies, val)) if isinstance(val, (list, tuple)) else type(val)
