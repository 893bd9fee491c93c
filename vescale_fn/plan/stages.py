"""A recorded step, cut into the tasks of a pipeline's stages: pure functions of graphs.

What is forward (what the value depends on) belongs to the stage of the last cut above it. What is backward belongs to the stage
that the cotangents above it have entered. What depends on no cut goes wherever it is used: of the parameters alone once a step
(PRE), of the batch alone in each stage that uses it. Of a stage's backward calls, B has those that another stage waits for, W
the rest.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from .._core.base.errors import TransformError
from .._core.base.messages import report
from .._core.base.source_lines import quoted
from .._core.distributed.collectives import Collective
from .ir.cuts import CROSSES, CUT, UNCUT
from .ir.graph import calls, copied, has_effect, name_of, operator_of
from .ir.nested import bodies_of, reached

PRE, F, B, W, BW = "PRE", "F", "B", "W", "BW"  # the last one is B and W in one
ORDER = (PRE, F, B, W)  # in which a stage runs them
_ADD, _FULL = torch.ops.aten.add.Tensor, torch.ops.aten.full.default
_INSTEAD = "vfn.optim.microbatches(f, m)"
_FILLED = {"ones_like": 1, "zeros_like": 0}


class StageCall(NamedTuple):
    """A call of the recording, made at a stage; one that costs little may be made at several."""

    node: fx.Node
    stage: int


class Term(NamedTuple):
    """A term of a result: the others are made at other stages."""

    node: fx.Node
    stage: int


@dataclass
class CutStep:
    """What is to be cut.

    Attributes:
        graph: of the step for one part of the batch.
        values: nodes that are the value of the function and what else it gives.
        gradients: nodes, each with the parameter's number whose gradient, or a rank's block of it, it is.
        parameters: the inputs that belong to a parameter, with its number.
        batch: the inputs that differ from part to part.
        gathers: how often parameters are gathered: once a "step"; or by each task of each "microbatch" that uses them.
        of_ranks: the calls of each rank, where processes play several: what is decided is not to depend on how many.
    """

    graph: fx.Graph
    values: Sequence[fx.Node]
    gradients: Sequence[tuple[fx.Node, int]]
    parameters: dict[fx.Node, int]
    batch: frozenset[fx.Node]
    gathers: str = "step"
    of_ranks: Sequence[Container[fx.Node]] = ()


@dataclass
class Stages:
    """A step cut into tasks.

    Attributes:
        count: how many stages there are.
        tasks: the calls of each task, (kind, stage), in the order of the recording.
        messages: what one stage sends to another for one of its tasks: (kind, from, task, to) -> nodes, in order.
        parts: for each gradient the terms of which it is the sum, the stage's first.
        values: the nodes that are the value of the function and what else it gives.
        at: the stage of each of the values.
        behind: the stage behind each cut that is used, by the cut's number.
        batch: the inputs that differ from part to part.
        alone: the tasks, (kind, stage), whose gradients lie in memory that nothing else needs.
    """

    count: int
    values: Sequence[fx.Node]
    batch: frozenset[fx.Node]
    tasks: dict[tuple[str, int], list[fx.Node]] = field(default_factory=dict)
    messages: dict[tuple[str, int, str, int], list[fx.Node]] = field(default_factory=dict)
    parts: list[list[Term]] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    behind: dict[int, int] = field(default_factory=dict)
    alone: set[tuple[str, int]] = field(default_factory=set)

    def calls(self, kind: str, stage: int) -> list[fx.Node]:
        """The calls of a task."""
        if kind != BW:
            return self.tasks[kind, stage]
        return sorted({*self.tasks[B, stage], *self.tasks[W, stage]})

    @functools.cached_property
    def sent(self) -> dict[tuple[str, int], list[tuple[str, int, str, int]]]:
        """The messages of each task."""
        return self._messages(slice(0, 2))

    @functools.cached_property
    def taken(self) -> dict[tuple[str, int], list[tuple[str, int, str, int]]]:
        """The messages to each task."""
        return self._messages(slice(2, 4))

    def _messages(self, end: slice) -> dict[Any, list[Any]]:
        found: dict[Any, list[Any]] = {}
        for key in self.messages:
            found.setdefault(key[end], []).append(key)
        return found

    def counts(self) -> dict[str, int]:
        """How many calls each task has: ``{"F0": 12, ...}``."""
        return {f"{kind}{stage}": len(nodes) for (kind, stage), nodes in sorted(self.tasks.items()) if nodes}


def filled(graph: fx.Graph) -> fx.Graph:
    """The graph in which what is only filled like another value, the seed of a gradient, depends on none."""
    graph = copied(graph)
    for node in list(calls(graph)):
        number = _FILLED.get(name_of(node))
        val = node.meta["val"]
        if number is not None and isinstance(val, torch.Tensor) and val.is_contiguous():
            with graph.inserting_before(node):
                how = {"dtype": val.dtype, "device": val.device}
                made = graph.call_function(_FULL, (list(val.shape), number), how)
            made.meta.update(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    return graph


def cut_into(step: CutStep, used: Callable[[int], bool]) -> Stages:
    """The tasks of a step, cut where `used` says so of the number of a cut.

    Raises:
        TransformError: a call with an effect.
    """
    return _Cutting(step, used).run()


class _Cutting:
    def __init__(self, step: CutStep, used: Callable[[int], bool]) -> None:
        self.step, self.used = step, used
        self.nodes = list(calls(step.graph))
        self.stage: dict[fx.Node, int] = {}  # of what follows from a cut, or from batch and parameters
        self.entered: dict[fx.Node, int] = {}  # of what follows from a cotangent that came through a cut: its stage
        self.forward = reached(step.values)
        self.of_batch = set(step.batch)
        self.of_parameters = {x for x in step.graph.nodes if x.op == "placeholder" and _is_weight(x, step.batch)}
        self.sites: dict[fx.Node, tuple[int, ...]] = {}  # the stages where a call is made
        self.kinds: dict[StageCall, str] = {}
        self.behind: dict[int, int] = {}  # the stage behind each cut
        self.crossing: dict[int, list[fx.Node]] = defaultdict(list)  # the values that each marks
        for node in self.nodes:
            if node.target is CUT:
                self.crossing[node.meta[CROSSES]].append(node)

    def run(self) -> Stages:
        self._check()
        self._place()
        self.gradients = self._taken_apart()
        results = [*self.step.values, *(node for parts in self.gradients for node in parts)]
        self.live = {x for x in reached(results) if x.op == "call_function"}
        self.count = 1 + max((self.stage[x] for x in self.live if x in self.stage), default=0)
        stages = Stages(self.count, self.step.values, self.step.batch, behind=self.behind)
        self._find_sites({x for x in results if x.op == "call_function"})
        self._find_kinds()
        self._fill(stages)
        stages.at = [self._home(x) for x in self.step.values]
        stages.parts = [
            sorted((Term(x, self._home(x)) for x in parts), key=lambda part: part.stage) for parts in self.gradients
        ]
        return stages

    def _check(self) -> None:
        for node in self.nodes:
            if name_of(node) == "as_strided" and node.all_input_nodes[0] in self.step.batch:
                self._check_memory(node)
            for call in _with_effects(node):
                line = call.meta.get("line", "") or node.meta.get("line", "")
                what = f"{getattr(call.target, '__name__', call.target)} does something besides giving a value"
                fix = "without it"
                if operator_of(call) is not None:
                    what = "a value is written in place through a view of it, or where another value has its memory"
                    fix = "with a new value: torch.where, torch.cat, index_put"
                where = [f"at {quoted(line)}"] if line else []
                raise TransformError(report("pipeline", what, where, f"{_INSTEAD}; or the function {fix}"))

    # --- where each call belongs ------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Find the stage of each call that has one; the others are made where they are used."""
        for node in self.nodes:
            inputs = node.all_input_nodes
            if node.target is operator.getitem:  # belongs to what it is taken out of
                self._copy_flags(node, inputs[0])
                continue
            for known in (self.of_batch, self.of_parameters):
                if not known.isdisjoint(inputs):
                    known.add(node)
            stage = self._forward(node) if node in self.forward or node.target is CUT else self._backward(node)
            if stage is not None:
                self.stage[node] = stage

    def _forward(self, node: fx.Node) -> int | None:
        """The stage of a forward call."""
        if node.target is CUT and self.used(number := node.meta[CROSSES]):
            if number not in self.behind:  # of all leaves of what is cut
                given = [x for other in self.crossing[number] for x in other.all_input_nodes]
                self.behind[number] = 1 + max((self.stage[x] for x in given if x in self.stage), default=0)
            return self.behind[number]
        known = [self.stage[x] for x in node.all_input_nodes if x in self.stage]
        return max(known) if known else 0 if node in self.of_batch and node in self.of_parameters else None

    def _backward(self, node: fx.Node) -> int | None:
        """The stage of a backward call."""
        through = [self.entered[x] for x in node.all_input_nodes if x in self.entered]
        if node.target is UNCUT and self.used(number := node.meta[CROSSES]):
            through = [self.behind[number] - 1]
        if through:
            self.entered[node] = min(through)
            return self.entered[node]
        return max((self.stage[x] for x in node.all_input_nodes if x in self.stage), default=None)

    def _copy_flags(self, node: fx.Node, whole: fx.Node) -> None:
        for known in (self.of_batch, self.of_parameters, self.forward):
            if whole in known:
                known.add(node)
        for stages in (self.stage, self.entered):
            if whole in stages:
                stages[node] = stages[whole]

    def _taken_apart(self) -> list[list[fx.Node]]:
        """The terms of each gradient of a parameter that several stages use."""
        uses = self._uses()
        return [list(self._terms(node)) if len(uses[number]) > 1 else [node] for node, number in self.step.gradients]

    def _uses(self) -> dict[int, set[int]]:
        """The stages whose forward calls use each parameter."""
        at: dict[fx.Node, set[int]] = defaultdict(set)
        for node in reversed(self.nodes):
            if node in self.forward:
                stages = {self.stage[node]} if node in self.stage else at[node]
                for x in node.all_input_nodes:
                    if x not in self.stage:
                        at[x] |= stages
        found: dict[int, set[int]] = defaultdict(set)
        for node, number in self.step.parameters.items():
            found[number] |= at[node]
        return found

    def _terms(self, node: fx.Node) -> Iterator[fx.Node]:
        """What a gradient is the sum of, where the terms are of different stages."""
        if node.target is _ADD and len(node.users) == 1 and not node.kwargs:
            terms = node.args
            backward = all(isinstance(x, fx.Node) and x not in self.forward and x in self.stage for x in terms)
            if backward and len({self.stage[x] for x in terms}) > 1 and all(map(_alike, terms, (node, node))):  # type: ignore
                for x in terms:
                    yield from self._terms(x)  # type: ignore[arg-type]
                return
        yield node

    # --- where it is made -------------------------------------------------------------------------------------------

    def _home(self, node: fx.Node) -> int:
        """The stage that has a result."""
        if node in self.stage:
            return self.stage[node]
        return self.sites.get(node, (0,))[0]

    def _find_sites(self, results: set[fx.Node]) -> None:
        for node in reversed(self.nodes):
            if node not in self.live:
                continue
            users = {s for x in node.users if x in self.live for s in self.sites[x]}
            home = self.stage.get(node)
            if home is None:  # wherever it is used
                self.sites[node] = tuple(sorted(users)) or ((self.count - 1,) if node in self.forward else (0,))
            elif node in self.forward or node in self.entered:
                self.sites[node] = (home,)
            else:  # it waits for no cotangent: a stage behind, which the cotangents come through before, makes it itself
                sites = {max(home, s) for s in users} | ({home} if node in results or not users else set())
                self.sites[node] = tuple(sorted(sites))

    def source(self, x: fx.Node, stage: int) -> StageCall:
        """The call that makes what a stage uses."""
        return StageCall(x, stage if stage in self.sites[x] else self._home(x))

    def inputs(self, call: StageCall) -> list[StageCall]:
        """The calls that make what a call is given."""
        return [self.source(x, call.stage) for x in call.node.all_input_nodes if x.op == "call_function"]

    def _find_kinds(self) -> None:
        every = [StageCall(node, s) for node in self.nodes if node in self.live for s in self.sites[node]]
        values, kinds = set(self.step.values), self.kinds
        for call in reversed(every):
            node = call.node
            if node in self.stage:
                kinds[call] = F if node in self.forward else W
            elif node not in self.of_batch:
                kinds[call] = PRE
            else:  # of the batch alone: forward if that needs it
                kinds.setdefault(call, F if node in values else W)
            if kinds[call] == F:
                for made in self.inputs(call):
                    kinds[made] = F
        todo = [made for call in every for made in self.inputs(call) if kinds[made] == W and made.stage != call.stage]
        while todo:
            call = todo.pop()
            if kinds[call] == W:
                kinds[call] = B
                todo += self.inputs(call)
        for call in every:  # several results of one call stay together
            if call.node.target is operator.getitem:
                whole = self.source(call.node.all_input_nodes[0], call.stage)
                if kinds[whole] != kinds[call]:
                    kinds[call] = kinds[whole]
        self.every = every
        self.again = self._made_again()

    def _made_again(self) -> dict[StageCall, set[str]]:
        """The tasks that make what is gathered of parameters, and what follows of it alone, each for itself."""
        gathered: set[fx.Node] = set()
        for node in self.nodes if self.step.gathers == "microbatch" else ():
            alone = node not in self.stage and node in self.of_parameters and node not in self.of_batch
            if alone and (isinstance(node.target, Collective) or not gathered.isdisjoint(node.all_input_nodes)):
                gathered.add(node)
        found: dict[StageCall, set[str]] = {}
        for call in reversed(self.every):
            for made in self.inputs(call):
                if made.node in gathered:
                    found.setdefault(made, set()).update(found.get(call) or {self.kinds[call]})
        return found

    def _fill(self, stages: Stages) -> None:
        stages.tasks = {(kind, s): [] for s in range(self.count) for kind in ORDER}
        sent: dict[tuple[fx.Node, int], str] = {}  # (value, user's stage) -> the task that it arrives for
        wanted: list[tuple[StageCall, str, int]] = []
        for call in self.every:
            kind = self.kinds[call]
            for task in self.again.get(call, (kind,)):
                stages.tasks[task, call.stage].append(call.node)
            for made in self.inputs(call):
                if made.stage != call.stage:
                    self._check_memory(call.node)
                    task = F if kind == F else B
                    if sent.get((made.node, call.stage)) != F:
                        sent[made.node, call.stage] = task
                    wanted.append((made, task, call.stage))
        for made, task, to in dict.fromkeys(wanted):
            if sent[made.node, to] == task:
                self._check_message(made, task, to)
                stages.messages.setdefault((self.kinds[made], made.stage, task, to), []).append(made.node)
        place = {node: i for i, node in enumerate(self.nodes)}
        for nodes in stages.messages.values():
            nodes.sort(key=place.__getitem__)

    def _check_memory(self, node: fx.Node) -> None:
        """Raise for a call that depends on where a value lies in memory, which is not told with it."""
        if name_of(node) == "as_strided":
            line = node.meta.get("line", "")
            what = "a view by strides, of what another stage or the batch gives"
            raise TransformError(
                report("pipeline", what, [f"at {quoted(line)}"] if line else [], ".contiguous() before it")
            )

    def _check_message(self, made: StageCall, task: str, to: int) -> None:
        """Raise for what cannot be sent: no schedule would have it in time, or it is no tensor."""
        kind, val = self.kinds[made], made.node.meta["val"]
        in_time = (kind == F and (task == B or made.stage < to)) or (kind == B and task == B and made.stage > to)
        if isinstance(val, torch.Tensor) and val.layout is not torch.strided:
            line = made.node.meta.get("line", "")
            what = f"a sparse tensor goes from stage {made.stage} to stage {to}"
            raise TransformError(
                report("pipeline", what, [f"at {quoted(line)}"] if line else [], "x.to_dense() before the cut")
            )
        if not in_time or not isinstance(val, torch.Tensor):
            line = made.node.meta.get("line", "")
            what = f"stage {to} needs a value of stage {made.stage} that cannot be sent to it"
            raise TransformError(report("pipeline", what, [f"at {quoted(line)}"] if line else [], _INSTEAD))


def _with_effects(node: fx.Node) -> Iterator[fx.Node]:
    """The calls of a node, and in its bodies, that do something besides giving a value. That ranks of a stage communicate is
    none of it: all of them run its calls in one order."""
    for body in bodies_of(node):
        for call in calls(body):
            yield from _with_effects(call)
    if has_effect(node) and not bodies_of(node):
        yield node


def _alike(x: Any, node: fx.Node) -> bool:
    one, other = x.meta["val"], node.meta["val"]
    return one.shape == other.shape and one.dtype == other.dtype


def _is_weight(x: fx.Node, batch: frozenset[fx.Node]) -> bool:
    """Whether an input is like a parameter: the same for all parts of the batch, and no number."""
    return x not in batch and isinstance(x.meta["val"], torch.Tensor) and x.meta["val"].ndim > 0
