"""Ranks compare what they have recorded for a pipeline, and how that is cut, before they connect."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .._core.arrays.along_axis import AlongAxis
from .._core.base import source_lines
from .._core.base.errors import DivergenceError, TransformError
from .._core.base.messages import report
from .._core.distributed.collectives import Collective
from .._core.distributed.mesh import communicator_of
from .ir.nested import bodies_of
from .signature import JitCall
from .stages import Stages
from .tracing.rank_consensus import Stage, agree, parted, stage
from .tracing.rank_inputs import brought
from .tracing.rank_notes import RecordingNotes
from .tracing.recorder import Unrecordable
from .tracing.trace import Recorded, trace_with_cuts

_OF_VALUES = "vfn.cond or torch.where for `if`, vfn.while_loop for `while`, tensors for numbers"
# transformers' own words for the experts that have tokens, over which Python loops
_OF_EXPERTS = (
    'experts_implementation="batched_mm" in the config of the model, whose "eager" experts are a loop over values'
)


class Consensus:
    """What comes of recording a function for a pipeline here, and what the other ranks say of it.

    Args:
        name: of the function.
        along: the mesh and its axis.
        call: of the function with one part of the batch.
        within: whether another recording is at work: its ranks compare what comes of it, so that what raises here reaches the
            others, and what was recorded is compared before it first runs.

    Raises:
        TransformError: it cannot be recorded, here or on another rank.
    """

    def __init__(self, name: str, along: AlongAxis, call: JitCall, within: bool) -> None:
        self.name, self.along = name, along
        self.mesh = None if along.all_here else along.mesh
        self._within = within
        self._said: list[tuple[Sequence[tuple[str, str]], str]] = []
        recorded, reason, failure, used = None, "", None, []
        notes = None if within else RecordingNotes(call.f)
        try:
            recorded = trace_with_cuts(call.function, call.leaves, call.names(), call.treedef)
            if recorded.guards:
                reason = "it reads a truth value in Python"
            if self.mesh is not None and not within:
                used = brought(recorded, call.leaves, call.names(), self.mesh)
        except Unrecordable as why:
            reason = why.reason if why.line == "?" else f"{why.reason}, at {source_lines.quoted(why.line)}"
        except Exception as error:
            failure = error
        if notes is not None:
            reason = self._agreed(recorded, used, reason, failure, notes)
        if failure is not None:
            raise failure
        if reason:
            fix = _OF_EXPERTS if "expert_hit" in reason else _OF_VALUES
            raise TransformError(report("pipeline", f"{name} cannot be recorded", [reason], fix))
        assert recorded is not None
        self.recorded: Recorded = recorded

    def _agreed(self, recorded: Recorded | None, used: Any, reason: str, failure: Any, notes: RecordingNotes) -> str:
        graph = None if recorded is None else recorded.graph
        stages = [] if self.mesh is None or graph is None else [stage(graph)]
        return agree(self.name, self.mesh, graph, stages, [], used, False, reason, "", failure, notes).reason

    def say(self, said: Sequence[tuple[str, str]], of_all: str) -> None:
        """Note what all ranks along the axis are to have alike, (what, line), and what all ranks of the mesh are."""
        self._said.append((said, of_all))

    def greatest(self, mine: Sequence[float]) -> list[float]:
        """The greatest of each of some numbers, of all ranks of the mesh.

        Raises:
            TransformError: within another recording, whose ranks do not talk.
        """
        if self.mesh is None:
            return list(mine)
        if self._within:
            what = 'with schedule="auto" ranks look for a schedule together, which they cannot in a vfn.jit'
            fix = "piped.specs(...) or piped.plan(...) before it, which find one; or costs=vfn.schedules.Costs(...)"
            raise TransformError(report("pipeline", what, fix=fix))
        return [max(column) for column in zip(*self._everyone(list(mine)), strict=True)]

    def heard(self) -> int:
        """A digest of what has been said since, the same on all ranks; or raise where ranks say other things."""
        found = sum(itertools.starmap(self._same, self._said))
        self._said = []  # what ranks differ in is compared again
        return found

    def caught_up(self, f: Any) -> None:
        """Compare what was recorded within another recording."""
        if self.mesh is not None:
            used = self.recorded.ledger.told(communicator_of(self.mesh).processes())
            self._agreed(self.recorded, used, "", None, RecordingNotes(f))

    def meet(self, tasks: Sequence[Stage]) -> bool:
        """Whether the collectives of tasks, of which all ranks have all, are the same on those that carry them out."""
        if self.mesh is None:
            return True
        return parted(self._everyone([(one.order, one.groups) for one in tasks])) is None

    def _everyone(self, mine: Any) -> list[Any]:
        """What each rank of the mesh has to say; asked by all."""
        communicator = communicator_of(self.mesh)
        return [row[0] for row in communicator.everyone([[mine] * len(communicator.ranks)], "pipeline")]

    def _same(self, said: Sequence[tuple[str, str]], of_all: str) -> int:
        if self.mesh is None:
            return 0
        digests, texts = zip(*self._everyone((digest([what for what, _ in said]), of_all)), strict=True)
        if (other := next((rank for rank, text in enumerate(texts) if text != texts[0]), None)) is not None:
            shown = [f"rank {rank}: {texts[rank]}" for rank in (0, other)]
            fix = "the same arguments of vfn.pipeline on every rank, and cuts=[...] where their blocks differ in size"
            raise DivergenceError(report("pipeline", f"ranks do not cut or run {self.name} alike", shown, fix))
        apart = [(line[0], rank) for line in self.along.lines for rank in line if digests[rank] != digests[line[0]]]
        if apart:
            by_rank = self._everyone(list(said))
            calls = itertools.zip_longest(*(by_rank[rank] for rank in apart[0]), fillvalue=("none", ""))
            differing = next(pair for pair in calls if pair[0][0] != pair[1][0])
            shown = [f"rank {at}: {', at '.join(filter(None, one))}" for at, one in zip(apart[0], differing)]
            what = f"ranks along {self.along.axis!r} recorded different calls for {self.name}; the first that differs"
            fix = "the same program on every rank: each runs a part of it"
            raise DivergenceError(report("pipeline", what, shown, fix))
        return int(digest(digests), 16) >> 2


def calls_of(graph: fx.Graph) -> Iterator[tuple[str, str]]:
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
            yield from calls_of(body)


def sides_of(graph: fx.Graph, stages: Stages) -> list[Any]:
    """What ranks compare of how a recording is cut."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    return [[(key, [number[x] for x in nodes]) for key, nodes in of.items()] for of in (stages.tasks, stages.messages)]


def digest(x: Any) -> str:
    """Of anything that prints alike on all ranks."""
    return hashlib.blake2b(repr(x).encode(), digest_size=8).hexdigest()


def _shown(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return f"{tuple(val.shape)} {val.stride()} {val.dtype}"
    return str(list(map(_shown, val))) if isinstance(val, (list, tuple)) else type(val).__name__
