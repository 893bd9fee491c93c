"""The tasks of a pipeline's stages as functions: what each takes, what it gives, and what is let go after it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from .execution.codegen import generate
from .ir.nested import extracted
from .stages import ORDER, PRE, F, Stages, W


@dataclass
class Task:
    """A task of a stage.

    Attributes:
        inputs: the values that it takes: inputs of the step, what earlier tasks of the stage kept, and what has arrived.
        outputs: the values that it makes for later tasks of the stage, for other stages, and as results.
        last: the values that the stage needs no more when it has run.
        name: of the task.
        graph: of its calls, from the inputs to the outputs; None where there is nothing to compute.
    """

    inputs: list[fx.Node]
    outputs: list[fx.Node]
    last: list[fx.Node]
    name: str
    graph: fx.Graph | None

    @functools.cached_property
    def run(self) -> Callable[[list[Any]], tuple[Any, ...]] | None:
        """Takes the list of the inputs, which it empties, and gives the outputs; None where there is nothing to compute."""
        return None if self.graph is None else generate(self.graph, self.name).run


def tasks_of(stages: Stages, stage: int) -> dict[str, Task]:
    """The tasks of a stage, by their kind."""
    made = {node: kind for kind in ORDER for node in stages.tasks[kind, stage]}
    uses: dict[fx.Node, set[str]] = defaultdict(set)  # the tasks after which a value may still be there
    for (kind, source, _, _), nodes in stages.messages.items():
        for x in nodes if source == stage else ():
            uses[x].add(kind)
    for x, at in zip(stages.values, stages.at, strict=True):
        if at == stage:
            uses[x].add(F)
    for x in (part.node for parts in stages.parts for part in parts if part.stage == stage):
        uses[x].add(W)
    takes: dict[str, list[fx.Node]] = {}
    for kind in ORDER:
        own = set(stages.tasks[kind, stage])
        takes[kind] = list(
            dict.fromkeys(x for node in stages.tasks[kind, stage] for x in node.all_input_nodes if x not in own)
        )
        for x in takes[kind]:
            uses[x].add(kind)
    found = {}
    for kind in ORDER:
        nodes = stages.tasks[kind, stage]
        outputs = [x for x in nodes if x in uses]
        last = [x for x, kinds in uses.items() if max(kinds, key=ORDER.index) == kind and _is_let_go(x, made)]
        graph = extracted(nodes, takes[kind], outputs) if nodes else None
        found[kind] = Task(takes[kind], outputs, last, f"{kind}{stage}", graph)
    return found


def _is_let_go(x: fx.Node, made: dict[fx.Node, str]) -> bool:
    """Whether a value is of one part of the batch: others stay for the step."""
    return x.op != "placeholder" and made.get(x) != PRE
