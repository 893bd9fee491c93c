"""The tasks of a pipeline's stages as functions: what each takes, what it gives, and what is let go after it."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .ir import inplace
from .ir.graph import output, value
from .ir.memory_aliases import memories
from .ir.nested import extracted
from .stages import BW, ORDER, PRE, B, F, Stages, W
from .task_bodies import TaskBodies, TaskBody


@dataclass
class Task:
    """A task of a stage.

    Attributes:
        inputs: the values that it takes: inputs of the step, what earlier tasks of the stage kept, and what has arrived.
        outputs: the values that it makes for later tasks of the stage, for other stages, and as results.
        last: the values that the stage needs no more when it has run.
        dies: of these the inputs that it needs no more while it runs, when it has used them.
        body: what it computes; None where there is nothing to compute.
    """

    inputs: list[fx.Node]
    outputs: list[fx.Node]
    last: list[fx.Node]
    dies: frozenset[fx.Node]
    body: TaskBody | None

    @property
    def graph(self) -> fx.Graph | None:
        """From the inputs to the outputs; None where there is nothing to compute."""
        return None if self.body is None else self.body.graph

    @functools.cached_property
    def run(self) -> Callable[[list[Any]], tuple[Any, ...]] | None:
        """Takes the list of the inputs, which it empties, and gives the outputs; None where there is nothing to compute."""
        return None if self.body is None else self.body.run

    def has_alone(self, values: Sequence[fx.Node]) -> bool:
        """Whether the task makes all of these, each in one piece of memory where no other output lies."""
        if self.graph is None or not {*values} <= {*self.outputs} or len({*values}) < len(values):
            return False
        given: Any = output(self.graph).args[0]
        lie, made = memories(self.graph), dict(zip(self.outputs, given, strict=True))
        lying = Counter(piece for x in given for piece in lie[x])
        for x in map(made.__getitem__, values):
            pieces = lie[x]
            if len(pieces) != 1 or not inplace.is_dense(value(x)):
                return False
            if any(lying[piece] > 1 or piece.maker.op == "placeholder" for piece in pieces):
                return False
        return True


def tasks_of(stages: Stages, stage: int, used: Container[str], bodies: TaskBodies) -> dict[str, Task]:
    """The tasks of a stage, by their kind, of those kinds that are `used`; `bodies` are those of others."""
    apart = {} if BW in used and B not in used else _in_a_row(stages, stage, ORDER, bodies)
    return {**_in_a_row(stages, stage, (PRE, F, BW), bodies), **apart} if BW in used else apart


def _in_a_row(stages: Stages, stage: int, order: Sequence[str], bodies: TaskBodies) -> dict[str, Task]:
    """The tasks of a stage that runs these kinds, in this order."""
    calls = {kind: stages.calls(kind, stage) for kind in order}
    made = {node: kind for kind in order for node in calls[kind]}
    shown = _shown(stages, stage, order)
    # the tasks with which a value must still be there
    uses: dict[fx.Node, set[str]] = defaultdict(set, {x: {*kinds} for x, kinds in shown.items()})
    takes: dict[str, list[fx.Node]] = {}
    for kind, nodes in calls.items():
        own = set(nodes)
        takes[kind] = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in own))
        for x in takes[kind]:
            uses[x].add(kind)
    found = {}
    for kind, nodes in calls.items():
        outputs = [x for x in nodes if x in uses]
        last = [x for x, kinds in uses.items() if max(kinds, key=order.index) == kind and _is_let_go(x, made)]
        dies = frozenset(x for x in last if x in takes[kind] and kind not in shown[x])
        body = bodies.of(extracted(nodes, takes[kind], outputs), f"{kind}{stage}") if nodes else None
        found[kind] = Task(takes[kind], outputs, last, dies, body)
    return found


def _shown(stages: Stages, stage: int, order: Sequence[str]) -> dict[fx.Node, set[str]]:
    """The tasks of a stage, among those of `order`, behind which each value is sent, or added up."""
    found: dict[fx.Node, set[str]] = defaultdict(set)
    for (kind, source, _, _), nodes in stages.messages.items():
        for x in nodes if source == stage else ():
            found[x].add(kind if kind in order else BW)
    for x, at in zip(stages.values, stages.at, strict=True):
        if at == stage:
            found[x].add(F)
    for term in (term for terms in stages.parts for term in terms if term.stage == stage):
        found[term.node].add(W if W in order else BW)
    return found


def _is_let_go(x: fx.Node, made: dict[fx.Node, str]) -> bool:
    """Whether a value is of one part of the batch: others stay for the step."""
    return x.op != "placeholder" and made.get(x) != PRE
