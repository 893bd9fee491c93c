"""A pipelined function's plan: a step recorded for one part of the batch, cut, and run by a schedule."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from .._core import torch_internals
from .._core.arrays.along_axis import AlongAxis
from .._core.arrays.array import is_array, wrap
from .._core.base import source_lines
from .._core.base.errors import DivergenceError, TransformError
from .._core.base.messages import report
from .._core.distributed import collectives
from .._core.distributed.collectives import Collective
from .._core.distributed.edges import edge_group
from .._core.distributed.mesh import communicator_of
from .._core.sharding.spec import P
from .cut_choice import chosen
from .ir.graph import output
from .ir.nested import all_collectives, bodies_of, everywhere
from .passes.functionalize_writes import writes
from .signature import JitCall
from .stage_runs import Between, Here, StageRun, edges, split
from .stages import CutStep, F, Stages, filled
from .tasks import Task, tasks_of
from .tracing import leaves as leaves_
from .tracing.guards import Captured
from .tracing.leaves import Result
from .tracing.rank_consensus import agree, stage
from .tracing.rank_inputs import brought
from .tracing.rank_notes import RecordingNotes
from .tracing.recorder import Unrecordable
from .tracing.trace import Recorded, trace_with_cuts

Means = Callable[[Sequence[Any], Sequence[Any]], list[Any]]  # of sums, each in the dtype of another tensor


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

    Attributes:
        stages: the tasks.
        tasks: those of the stages that this process plays, as functions.
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
    ) -> None:
        self.along, self.schedule, self.name = along, schedule, name
        self.varying, self._parameters = frozenset(varying), len(homes)
        recorded = self._agreed(call)
        how = f"{schedule.placement} {schedule.order} {homes} {varying} {gradients} {cuts}"
        self.digest = self._same([*_calls(recorded.graph), (f"a schedule, or arguments, of digest {_digest(how)}", "")])
        self.captured = Captured(call.f, filter(leaves_.is_object, call.leaves))  # with what it keeps of its first run
        graph = filled(everywhere(writes, recorded.graph))
        self._taking = [(i, take) for i, leaf in enumerate(call.leaves) if (take := _taking(leaf)) is not None]
        inputs = [x for x in graph.nodes if x.op == "placeholder"]
        self.places: list[tuple[int, list[fx.Node]]] = []  # of a leaf, the inputs that are its plain tensors
        at = 0
        for i, _ in self._taking:
            leaf = call.leaves[i]
            size = 1 if leaves_.is_number(leaf) else leaves_.count_of(leaf)
            self.places.append((i, inputs[at : at + size]))
            at += size
        self.constants = dict(zip(inputs[at:], recorded.constants, strict=True))
        self._constant_types = [(x, node.meta["val"]) for node, x in self.constants.items()]
        self.versions = [(x, torch_internals.version(x)) for x in recorded.read]
        self.out_def, self.results = recorded.out_def, recorded.results
        self._check_results(call.f)
        self.graph = graph
        self._check_meshes(graph)
        step = self._step(graph, gradients)
        self.homes, self._first = homes, len(self.results) - gradients
        held = {x: home for i, xs in self.places if i < len(homes) and (home := homes[i]) is not None for x in xs}
        self.stages = chosen(step, recorded.cuts, cuts, schedule.placement, held)
        self.digest = 1 + self.digest + self._same([(f"stages of digest {_digest(_sides(graph, self.stages))}", "")])
        self._check_homes(names)
        self._make_tasks(gradients > 0)
        recorded.end()

    # --- making it --------------------------------------------------------------------------------------------------

    def _make_tasks(self, gradients: bool) -> None:
        """The order of the tasks, those of this process as functions, and how it is connected with others."""
        along, placement = self.along, self.schedule.placement
        self.order = [
            (rank, action)
            for rank, task in self.schedule.check(blocking=False)  # a send waits for nothing
            for one in _actions(task)
            for action in one
            if gradients or action[0] == F
        ]
        mine = {s for s, rank in enumerate(placement) if along.all_here or rank == along.me}
        self.tasks: dict[int, dict[str, Task]] = {s: tasks_of(self.stages, s) for s in sorted(mine)}
        self._needed = {x for own in self.tasks.values() for task in own.values() for x in task.inputs}
        self._needed.update(self.stages.values, (term.node for terms in self.stages.parts for term in terms))
        self._groups: dict[tuple[int, int], Any] = {}
        if not along.all_here:
            for pair in edges(self.stages, placement):
                self._groups[pair] = edge_group(along.mesh, along.axis, *pair, dist.group.WORLD)

    def _agreed(self, call: JitCall) -> Recorded:
        """The recording, which all ranks have compared."""
        mesh = None if self.along.all_here else self.along.mesh
        notes = RecordingNotes(call.f)
        recorded, graph, reason, failure, used, stages = None, None, "", None, [], []
        try:
            recorded = trace_with_cuts(call.function, call.leaves, call.names(), call.treedef)
            graph = recorded.graph
            if recorded.guards:
                reason = "it reads a truth value in Python"
            if mesh is not None:
                used = brought(recorded, call.leaves, call.names(), mesh)
                stages = [stage(graph)]
        except Unrecordable as why:
            reason = why.reason if why.line == "?" else f"{why.reason}, at {source_lines.quoted(why.line)}"
        except Exception as error:
            failure = error
        verdict = agree(self.name, mesh, graph, stages, [], used, False, reason, "", failure, notes)
        if failure is not None:
            raise failure
        if verdict.reason:
            fix = "vfn.cond or torch.where for `if`, vfn.while_loop for `while`, tensors for numbers"
            raise TransformError(report("pipeline", f"{self.name} cannot be recorded", [verdict.reason], fix))
        assert recorded is not None
        return recorded

    def _check_results(self, f: Any) -> None:
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

    def _step(self, graph: fx.Graph, gradients: int) -> CutStep:
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
                    where.append(("gradient", len(grads), 0))
                    grads.append((nodes[place], i - first))
            self.where.append(where)
        self.like = [nodes[made.places[0]].meta["val"] for made in self.results]
        of_parameters = {x: i for i, xs in self.places for x in xs if i < self._parameters}
        batch = frozenset(x for i, xs in self.places for x in xs if i in self.varying)
        return CutStep(graph, values, grads, of_parameters, batch)

    def _same(self, said: Sequence[tuple[str, str]]) -> int:
        """A digest of what all ranks have; or raise where those along the axis say different things: (what, line)."""
        if self.along.all_here:
            return 0
        everyone = functools.partial(communicator_of(self.along.mesh).everyone, why="pipeline")
        digests = [row[0] for row in everyone([[_digest([what for what, _ in said])]])]
        apart = [(line[0], rank) for line in self.along.lines for rank in line if digests[rank] != digests[line[0]]]
        if apart:
            by_rank = [row[0] for row in everyone([[list(said)]])]
            calls = zip_longest(*(by_rank[rank] for rank in apart[0]), fillvalue=("none", ""))
            differing = next(pair for pair in calls if pair[0][0] != pair[1][0])
            shown = [f"rank {at}: {', at '.join(filter(None, one))}" for at, one in zip(apart[0], differing)]
            what = f"ranks along {self.along.axis!r} recorded different calls for {self.name}; the first that differs"
            fix = "the same program on every rank: each runs a part of it"
            raise DivergenceError(report("pipeline", what, shown, fix))
        return int(_digest(digests), 16) >> 2

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

    def changed(self) -> bool:
        """Whether what the function closes over has changed since."""
        types = any(x.shape != like.shape or x.dtype is not like.dtype for x, like in self._constant_types)
        versions = any(torch_internals.version(x) != version for x, version in self.versions)
        return types or versions or bool(self.captured.changed())

    # --- running it -------------------------------------------------------------------------------------------------

    def __call__(self, parts: Sequence[Sequence[Any]], means: Means) -> list[Any]:
        """The results, on the mesh without the axis.

        Args:
            parts: for each part of the batch all leaves of the arguments.
            means: of the sums over the parts.
        """
        leaves = parts[0]
        take = dict(self._taking)
        fixed = dict(self.constants)
        own: list[dict[fx.Node, Any]] = [{} for _ in parts]
        for i, nodes in self.places:
            if self._needed.isdisjoint(nodes):
                continue  # of another stage's parameters
            if i not in self.varying:
                fixed.update(zip(nodes, take[i](leaves[i]), strict=True))
            else:
                for part, values in zip(own, parts, strict=True):
                    part.update(zip(nodes, take[i](values[i]), strict=True))
        placement, along = self.schedule.placement, self.along
        along.begin()
        if along.all_here:
            post: Any = Here()
        else:
            rows = [[action for rank, action in self.order if rank == place] for place in range(along.size)]
            post = Between(self.stages, placement, rows, along.me, along.ranks, self._groups)
        run = StageRun(self.stages, self.tasks, fixed, own, post)
        for rank, action in self.order:
            if along.all_here or rank == along.me:
                run.action(*action)
        found = self._gathered(run.finish().sums, means)
        along.end()
        return found

    def _gathered(self, sums: dict[Any, torch.Tensor], means: Means) -> list[Any]:
        """The results, of the sums that this process has."""
        owners = [self._owner(where[0]) for where in self.where]
        mine = [i for i, owner in enumerate(owners) if self.along.all_here or owner == self.along.me]
        totals = [_assembled(self.results[i], [sums[name] for name in self.where[i]]) for i in mine]
        found = dict(zip(mine, means(totals, [self.like[i] for i in mine]), strict=True))
        return [self._everywhere(i, found.get(i), owner) for i, owner in enumerate(owners)]

    def _owner(self, name: tuple[Any, ...]) -> int:
        """The place of the rank that has a result."""
        at = self.stages.at[name[1]] if name[0] == "value" else self.stages.parts[name[1]][0].stage
        return self.schedule.placement[at]

    def _everywhere(self, i: int, found: Any, owner: int) -> Any:
        """A result that one rank along the axis has, on all that are to have it; None on the others."""
        if self.along.all_here or self.along.size == 1:
            return found
        made, like = self.results[i], self.like[i]
        home = None if i < self._first else self.homes[i - self._first]
        if home == (owner,):
            return found
        if found is None:
            local = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        else:
            local = torch_internals.local(found) if is_array(found) else found
        why = "pipeline: a result of one stage, on all ranks"
        local = collectives.broadcast(local.contiguous(), self.along.mesh, (self.along.axis,), owner, why)
        if home is not None and self.along.me not in home:
            return None
        if made.spec is None:
            return local
        lies = P(*made.lies) if made.lies.unreduced else made.lies
        return wrap(local, made.spec.mesh, lies, made.spec.tensor_meta.shape)


def check_alike(leaves: Sequence[Any]) -> None:
    """Raise where a leaf of the parts of the batch is not the same in all of them: the first one is recorded."""
    if len(set(map(leaves_.signature, leaves))) > 1:
        said = list(dict.fromkeys(map(leaves_.described, leaves)))
        raise TransformError(report("pipeline", "parts of the batch differ in shape or layout", said))


def _taking(leaf: Any) -> Callable[[Any], list[Any]] | None:
    return (lambda x: [float(x)]) if leaves_.is_number(leaf) else leaves_.taking(leaf)


def _assembled(made: Result, blocks: Sequence[torch.Tensor]) -> Any:
    """A sum as the result that it is of."""
    if made.spec is None:
        return blocks[0]
    blocks = [x.contiguous() for x in blocks]
    local = leaves_.of_ranks(blocks, made.spec) if made.simulated else blocks[0]
    return wrap(local, made.spec.mesh, made.lies, made.spec.tensor_meta.shape)


def _actions(task: Any) -> Iterator[list[tuple[str, int, int]]]:
    """The tasks (kind, stage, part) of an entry of a schedule's row."""
    for kind, stage_, part in (task,) if isinstance(task[0], str) else task:
        yield [(one, stage_, part) for one in split(kind)]


def _calls(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """What ranks compare of a recording, with the user's lines."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        target: Any = node.target
        if isinstance(target, Collective):
            what = f"{target.kind} {target.axes} {target.params}"
        else:
            what = getattr(target, "__name__", None) or str(target)
        given: Any = "" if node.op in ("placeholder", "output") else (node.args, node.kwargs)
        args = fx.map_arg(given, lambda x: f"%{number[x]}")
        line = node.meta.get("line", "")
        said = (node.op, what, args, _shown(node.meta.get("val")))
        yield " ".join(map(str, filter(None, said))), source_lines.quoted(line) if line else ""
        for body in bodies_of(node):
            yield from _calls(body)


def _sides(graph: fx.Graph, stages: Stages) -> list[Any]:
    """What ranks compare of how a recording is cut."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    return [[(key, [number[x] for x in nodes]) for key, nodes in of.items()] for of in (stages.tasks, stages.messages)]


def _digest(x: Any) -> str:
    return hashlib.blake2b(repr(x).encode(), digest_size=8).hexdigest()


def _shown(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return f"{tuple(val.shape)} {val.stride()} {val.dtype}"
    return str(list(map(_shown, val))) if isinstance(val, (list, tuple)) else type(val).__name__
