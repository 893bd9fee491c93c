"""A pipelined function's plan: a step recorded for one part of the batch, cut, and run by a schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from .._core import torch_internals
from .._core.arrays.along_axis import AlongAxis
from .._core.base import context, source_lines
from .._core.base.errors import TransformError
from .._core.base.messages import report
from .._core.distributed.abstract_mesh import AbstractMesh
from .._core.distributed.edges import End, edge_group
from .._core.distributed.parcels import Lies
from .._core.sharding.layout import contiguous_stride
from ..schedules import Schedule
from ..schedules.actions import actions_of
from .auto_schedule import found_for
from .cut_choice import CutPieces, Within, chosen
from .ir.calls_of_rank import calls_of_rank
from .ir.graph import output
from .ir.memory_limit import MemoryLimit
from .ir.nested import all_collectives, everywhere
from .message_log import Logged, Messages
from .passes.functionalize_writes import writes
from .pipeline_memory import memory_of
from .signature import JitCall
from .stage_consensus import Consensus, calls_of, digest, sides_of
from .stage_runs import Between, Here, MessageRoutes, StageRun, StageTasks, edges
from .stages import BW, CutStep, F, Stages, W, cut_into, filled
from .task_bodies import TaskBodies
from .tasks import Task, tasks_of
from .tracing import leaves as leaves_
from .tracing.guards import Captured
from .tracing.leaves import Result
from .tracing.traced_float import Number


class Staged:
    """The plan of a pipelined function.

    Args:
        call: of the function with one part of the batch, on the mesh without the axis.
        varying: the places of the leaves that differ from part to part.
        gradients: of how many leaves, the first ones, the function gives the gradients, too, as its last results.
        names: of the parameters, the first leaves.
        homes: of each parameter the coordinates on the axis that have it; None for all.
        along: the mesh and its axis.
        schedule: which rank runs what when.
        cuts: which cuts are used.
        name: of the function.
        gathers: how often parameters are gathered (`CutStep`).
        within: whether another recording is at work, of which a step will be a call: ranks compare this plan, and connect,
            when it first runs (`connect`).
        auto: whether a faster schedule is looked for when the stages are known, with each on the same rank.
        runs: whether it has tasks; else it says alone how the function is cut.
        memory: that a rank may hold at most, by prediction, each parameter being where it is used; None for any.

    Attributes:
        totals: what it gives, the sums over the parts: of each plain tensor how it lies.
        said: a digest of the recording, and of how it is to run.
        owners: for each of these the place on the axis of the rank that has it.
        results: of which these are the plain tensors.
        stages: the tasks.
        all_tasks: those of each stage.
        tasks: those of the stages that this process plays.
        digest: of the plan, a positive number below 2**63: on real ranks the same on all of them.
        out_def: the tree of the results.
    """

    def __init__(
        self,
        call: JitCall,
        varying: Sequence[int],
        gradients: int,
        names: Sequence[str],
        homes: Sequence[tuple[int, ...] | None],
        along: AlongAxis,
        schedule: Any,
        cuts: Any,
        name: str,
        gathers: str,
        within: bool = False,
        auto: bool = False,
        runs: bool = True,
        memory: MemoryLimit | None = None,
    ) -> None:
        self.along, self.schedule, self.name = along, schedule, name
        self.varying, self._parameters, self._within = frozenset(varying), len(homes), within
        self._tasks_of: tuple[Any, Any] = None, None  # the stages and the schedule whose tasks there are
        self._consensus = Consensus(name, along, call, within)
        recorded = self._consensus.recorded
        how = f"{schedule.placement} {schedule.order} {homes} {varying} {gradients} {cuts} {gathers} {memory}"
        said = [*calls_of(recorded.graph), (f"a schedule, or arguments, of digest {digest(how)}", "")]
        self.said = digest([what for what, _ in said])
        self._consensus.say(said, f"cuts={cuts!r}, gather={gathers!r}, and the rest of digest {digest(how)}")
        self.digest = 0 if within else self._consensus.heard()
        self.f = call.f
        self.captured = Captured(call.f, filter(leaves_.is_object, call.leaves))  # with what it keeps of its first run
        graph = filled(everywhere(writes, recorded.graph))
        self._take_inputs(call, graph)
        self.versions = [(x, torch_internals.version(x)) for x in recorded.read]
        self.read, self.out_def, self.results = recorded.read, recorded.out_def, recorded.results
        self._check_results()
        self.graph = graph
        self._check_meshes(graph)
        self._cut = step = self._step(graph, gradients, gathers)
        self.homes = homes
        held = {x: home for i, xs in self.places if i < len(homes) and (home := homes[i]) is not None for x in xs}
        agreed = list if within else self._consensus.greatest  # of ranks whose blocks are of different sizes
        limit = None
        if memory is not None:
            limit = Within(memory.of(0), memory.asked, functools.partial(self._peaks, gradients > 0))
        self.stages = chosen(step, recorded.cuts, cuts, schedule, held, agreed, limit)
        sides = [(f"stages of digest {digest(sides_of(graph, self.stages))}", "")]
        self._consensus.say(sides, f"the cuts {sorted(self.stages.behind)}")
        self.digest += 0 if within else 1 + self._consensus.heard()
        self._check_homes(names)
        if auto:
            self.schedule = self._found(gradients > 0, limit)
        self._note_totals(graph)
        if runs:
            self._make_tasks(gradients > 0)
            if within:
                self._settle(False)
            else:
                self._connect()
        recorded.end()

    # --- making it --------------------------------------------------------------------------------------------------

    def _peaks(self, gradients: bool, stages: Stages) -> Sequence[int]:
        """The most bytes that each rank is predicted to hold, with these stages."""
        self.stages = stages
        self._make_tasks(gradients)
        self._settle(not self._within)
        return memory_of(self, self.uses(), self.schedule.simulate()).peaks

    def _found(self, gradients: bool, within: Within | None) -> Schedule:
        """A fast schedule for the stages, within a limit on memory if the one that there is was."""
        first, of_all = self.schedule, self._consensus.greatest
        for limits in (min(first.ranks, first.microbatches), first.simulate().in_flight):
            self.schedule = found_for(self.graph, self.stages, first.ranks, first.microbatches, of_all, limits)
            if within is None or max(of_all(self._peaks(gradients, self.stages))) <= within.bytes:
                return self.schedule
        return first

    def _make_tasks(self, gradients: bool) -> None:
        """The order of the tasks, those of this process as functions, and how it is connected with others."""
        if self._tasks_of[0] is self.stages and self._tasks_of[1] is self.schedule:
            return
        self._tasks_of = self.stages, self.schedule
        along, placement = self.along, self.schedule.placement
        self.order = [
            (rank, action)
            for rank, task in self.schedule.check(blocking=False)  # a send waits for nothing
            for action in actions_of(task)
            if gradients or action.kind == F
        ]
        self._mine = [action for place, action in self.order if along.plays(place)]
        self.bodies = TaskBodies()
        used = [{action.kind for _, action in self.order if action.stage == s} for s in range(self.stages.count)]
        self.all_tasks = [tasks_of(self.stages, s, kinds, self.bodies) for s, kinds in enumerate(used)]
        mine = [s for s, place in enumerate(placement) if along.plays(place)]
        self.tasks: dict[int, dict[str, Task]] = {s: self.all_tasks[s] for s in mine}
        self._needed = {x for own in self.tasks.values() for task in own.values() for x in task.inputs}
        self._needed.update(self.stages.values, (term.node for terms in self.stages.parts for term in terms))

    def _settle(self, asks: bool) -> None:
        """Find what the tasks come to: without the passes where ranks, if one `asks` them, would not meet behind these; and
        which have their gradients in memory of their own."""
        meets = [task.body.meets for of in self.all_tasks for task in of.values() if task.body is not None]
        if asks and not self._consensus.meet(meets):
            self.bodies.give_back()
        self.stages.alone.clear()
        gradients = [(term.node, term.stage) for terms in self.stages.parts for term in terms]
        for s, of in enumerate(self.all_tasks):
            own = [x for x, at in gradients if at == s]
            self.stages.alone.update((kind, s) for kind, task in of.items() if kind in (W, BW) and task.has_alone(own))

    def _take_inputs(self, call: JitCall, graph: fx.Graph) -> None:
        """Find what a step takes: the plain tensors of its leaves, and what the function closes over."""
        self._take = {i: take for i, leaf in enumerate(call.leaves) if (take := _taking(leaf)) is not None}
        nodes = [x for x in graph.nodes if x.op == "placeholder"]
        self.places: list[tuple[int, list[fx.Node]]] = []  # of a leaf, the inputs that are its plain tensors
        at = 0
        for i in self._take:
            leaf = call.leaves[i]
            size = 1 if leaves_.is_number(leaf) else leaves_.count_of(leaf)
            self.places.append((i, nodes[at : at + size]))
            at += size
        self.constants = list(zip(nodes[at:], self._consensus.recorded.constants, strict=True))
        self._constant_types = [(x, node.meta["val"]) for node, x in self.constants]

    def _note_totals(self, graph: fx.Graph) -> None:
        """Note what a step gives."""
        nodes: Any = output(graph).args[0]
        self.totals: list[Lies] = []
        self.owners: list[int] = []
        for made, where in zip(self.results, self.where, strict=True):
            for place, name in zip(made.places, where, strict=True):
                val = nodes[place].meta["val"]
                dtype = torch.promote_types(val.dtype, torch.float32)
                self.totals.append(Lies(tuple(val.shape), contiguous_stride(val.shape), dtype, val.device))
                self.owners.append(self._owner(name))

    def _owner(self, name: tuple[Any, ...]) -> int:
        """The place of the rank that has a result."""
        at = self.stages.at[name[1]] if name[0] == "value" else self.stages.parts[name[1]][0].stage
        return self.schedule.placement[at]

    def _connect(self) -> None:
        along = self.along
        self._settle(True)
        self._run = StageTasks(self.stages, self.tasks)
        if along.all_here:
            return
        players, ends = [along.players[place] for place in self.schedule.placement], dict[tuple[int, int], End]()
        for pair in edges(self.stages, players):
            group = edge_group(along.mesh, along.axis, *pair, dist.group.WORLD)
            if along.me in pair:
                ends[pair] = End.of(group, along.ranks[pair[pair[0] == along.me]])
        rows: list[list[Any]] = [[] for _ in range(1 + max(along.players))]
        for place, action in self.order:
            rows[along.players[place]].append(action)
        self._routes = MessageRoutes(self.stages, players, rows, along.me, ends)

    def connect(self) -> None:
        """Compare with other ranks what was recorded within another recording, and connect with them."""
        if not self.digest:
            self._consensus.caught_up(self.f)
            self.digest = 1 + self._consensus.heard()
            self._connect()

    def _check_results(self) -> None:
        wrong = [made for made in self.results if not isinstance(made, Result)]
        if wrong:
            what = f"{self.name} gives back what it was given, or a value that is none of its own"
            raise TransformError(report("pipeline", what, fix="results that are computed of the batch"))

    def _check_meshes(self, graph: fx.Graph) -> None:
        """Raise for what is on the whole mesh, of which each rank along the axis would do a part by itself."""
        along = self.along
        over = [node for node, *_ in all_collectives(graph) if along.axis in node.target.axes]  # type: ignore[union-attr]
        other = [made for made in self.results if made.spec is not None and made.spec.mesh != along.rest]
        if over or other:
            line = over[0].meta.get("line", "") if over else ""
            what = f"{self.name} uses arrays on the mesh with the axis {along.axis!r} that it is not given as arguments"
            fix = "all arrays as arguments, those that are no batch by keyword"
            raise TransformError(report("pipeline", what, [f"at {source_lines.quoted(line)}"] if line else [], fix))

    def _step(self, graph: fx.Graph, gradients: int, gathers: str) -> CutStep:
        nodes: Any = output(graph).args[0]
        values: list[fx.Node] = []
        grads: list[tuple[fx.Node, int]] = []
        self.where: list[list[tuple[Any, ...]]] = []  # of each result the names of its sums
        first = len(self.results) - gradients
        for i, made in enumerate(self.results):
            where = []
            for place in made.places:
                if i < first:
                    where.append(("value", len(values)))
                    values.append(nodes[place])
                else:
                    where.append(("gradient", len(grads), 0))  # what the first of its terms becomes
                    grads.append((nodes[place], i - first))
            self.where.append(where)
        self.like = [nodes[made.places[0]].meta["val"] for made in self.results]
        of_parameters = {x: i for i, xs in self.places for x in xs if i < self._parameters}
        batch = frozenset(x for i, xs in self.places for x in xs if i in self.varying)
        return CutStep(graph, values, grads, of_parameters, batch, gathers, self._of_ranks(nodes))

    def _of_ranks(self, nodes: Sequence[fx.Node]) -> list[set[fx.Node]]:
        """The calls of each rank that this process plays, where another number of processes would play others."""
        found: list[set[fx.Node]] = []
        for at in range(len(self.along.played)) if self.along.by_tree else ():
            own = []
            for made in self.results:
                holders = range(len(made.places)) if made.spec is None else leaves_.first_holders(made.spec)
                own.append(nodes[made.places[list(dict.fromkeys(holders)).index(holders[at % len(holders)])]])
            found.append(calls_of_rank(at, own))
        return found

    def uses(self) -> list[set[int]]:
        """For each parameter the coordinates on the axis whose stages use it."""
        found: dict[fx.Node, set[int]] = {}
        for (_, s), nodes in self.stages.tasks.items():
            for x in (x for node in nodes for x in node.all_input_nodes if x.op == "placeholder"):
                found.setdefault(x, set()).add(self.schedule.placement[s])
        of_leaf = {i: set().union(*(found.get(x, ()) for x in nodes)) for i, nodes in self.places}
        return [of_leaf.get(i, set()) for i in range(self._parameters)]

    def _check_homes(self, names: Sequence[str]) -> None:
        """Raise where a stage uses a parameter that its rank does not have."""
        said = []
        for name, home, used in zip(names, self.homes, self.uses(), strict=True):
            if home is not None and not used <= set(home):
                where = ", ".join(map(str, sorted(used)))
                said.append(f"{name} is at {self.along.axis}={','.join(map(str, home))}, and used at {where}")
        if said:
            fix = "specs = vfn.pipeline(...).specs(params, *batch); vfn.with_sharding(params, specs)"
            raise TransformError(report("pipeline", "a stage uses parameters that its rank does not have", said, fix))

    def pieces(self, everywhere: bool) -> CutPieces:
        """What is known of its pieces, of those between all cuts, or between those that it uses."""
        return CutPieces.of(self._cut, cut_into(self._cut, lambda number: True) if everywhere else self.stages)

    @property
    def stands_alone(self) -> bool:
        """Whether what the function closes over are no values of another recording."""
        return not any(hasattr(x, "_plan_recorder") for x, _ in self._constant_types)

    def changed(self) -> bool:
        """Whether what the function closes over has changed since."""
        types = any(x.shape != like.shape or x.dtype is not like.dtype for x, like in self._constant_types)
        versions = any(torch_internals.version(x) != version for x, version in self.versions)
        return types or versions or bool(self.captured.changed())

    # --- running it -------------------------------------------------------------------------------------------------

    def taken(self, parts: Sequence[Sequence[Any]], every: bool = False) -> list[tuple[int | None, fx.Node, Any]]:
        """What a step is given: each input with the part of the batch that it is of, None for all.

        Args:
            parts: for each part of the batch all leaves of the arguments.
            every: also the parameters of stages that other ranks have.
        """
        found: list[tuple[int | None, fx.Node, Any]] = [(None, *pair) for pair in self.constants]
        for i, nodes in self.places:
            if not every and self._needed.isdisjoint(nodes):
                continue
            for part, leaves in enumerate(parts if i in self.varying else parts[:1]):
                taken = self._take[i](leaves[i])
                found += [(part if i in self.varying else None, *pair) for pair in zip(nodes, taken, strict=True)]
        return found

    def __call__(self, given: Iterable[tuple[int | None, fx.Node, Any]], count: int) -> list[torch.Tensor | None]:
        """A step: the sums over the parts of the batch, of which other ranks have those that are None."""
        fixed: dict[fx.Node, Any] = {}
        own: list[dict[fx.Node, Any]] = [{} for _ in range(count)]
        for part, node, x in given:
            (fixed if part is None else own[part])[node] = x
        along = self.along
        along.begin()
        post: Any = Here(self.stages if along.by_tree else None)
        post = post if along.all_here else Between(self._routes, post)
        if logs := context.logs():
            messages = Messages(self.stages, self.schedule.placement, along.axis)
            post = Logged(post, messages, logs, receives=not along.all_here)
        run = StageRun(self._run, fixed, own, post)
        for action in self._mine:
            run.action(*action)
        sums = run.finish().sums
        along.end()
        return [None if (x := sums.get(name)) is None else x.contiguous() for where in self.where for name in where]


def check_runs(mesh: Any) -> None:
    """Raise for a mesh on which stages can be planned, but not run."""
    if isinstance(mesh, AbstractMesh):
        fix = "vfn.price(step, ...), or piped.plan(params, *batch), says beforehand what a step takes; vfn.make_mesh, to run it"
        raise TransformError(report("pipeline", "stages do not run on an abstract mesh", fix=fix))


def check_alike(leaves: Sequence[Any]) -> None:
    """Raise where a leaf of the parts of the batch is not the same in all of them: the first one is recorded."""
    if len(set(map(leaves_.signature, leaves))) > 1:
        said = list(dict.fromkeys(map(leaves_.described, leaves)))
        raise TransformError(report("pipeline", "parts of the batch differ in shape or layout", said))


def _taking(leaf: Any) -> Callable[[Any], list[Any]] | None:
    return _number if leaves_.is_number(leaf) else leaves_.taking(leaf)


def _number(x: float) -> list[float]:
    return [x if isinstance(x, Number) else float(x)]  # of which a recording at work would be asked
