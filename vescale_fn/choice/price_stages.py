"""When the tasks of a pipeline run, by prediction: those of each rank one after the other, beside the other ranks'.

A rank waits for what another has not made yet, which is its bubble, and then until the message arrives, which is exposed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from .._core.distributed.collectives import Record
from .._core.sharding.index_map import axes_of
from ..hardware import Hardware
from ..plan.ir.collective_nodes import size
from ..plan.ir.graph import nbytes, value
from ..plan.ir.nested import all_collectives
from ..plan.lowered import Lowered
from ..plan.message_log import Messages
from ..plan.stage_runs import Name, names_from, names_of_terms, names_to
from ..plan.staged import Staged
from ..plan.stages import BW, PRE, F, W
from .price_streams import PassingTime, Times

Rows = list[tuple[Record, float]]  # what a rank communicates, each with the seconds that it takes


@dataclass(frozen=True)
class StagePrice:
    """What the tasks of a stage take.

    Attributes:
        stage: its number.
        rank: the coordinate of the ranks that run it.
        seconds: of computing and of waiting for collectives, by task: "PRE", once a step; for each microbatch "F", and "B" and
            "W", or "BW" where both are one.
        sends: the bytes that one of its ranks sends for a microbatch, by task.
    """

    stage: int
    rank: int
    seconds: Mapping[str, float]
    sends: Mapping[str, int]


class _TaskTime(NamedTuple):
    """How long a task takes, of that each of the user's lines, and what it communicates."""

    seconds: float
    lines: Mapping[str, Times]
    rows: Rows


def costed(lowered: Lowered, hardware: Hardware, mesh: Mapping[str, int]) -> Rows:
    """The collectives of a plan in order, each with the seconds that it takes."""
    log, found = iter(lowered.comms()), Rows()
    for node, times, _ in all_collectives(lowered.graph):
        target: Any = node.target
        sizes = mesh if set(target.axes) <= set(mesh) else axes_of(target.mesh)
        once = hardware.collective(target.kind, size(node), sizes, target.axes)
        found += [(next(log), once) for _ in range(times)]
    return found


class PipedTime:
    """A step of a pipeline, as it passes on all ranks along the axis.

    Args:
        staged: its plan.
        streams: of each coordinate on the axis what has passed before.
        line: the user's, that called it.

    Attributes:
        rows: of each what it communicates, in order.
        ran: of each the graphs of its tasks, with how often each ran.
        stages: what their tasks take.
    """

    def __init__(self, staged: Staged, streams: Sequence[PassingTime], line: str) -> None:
        self.staged, self.streams, self.line = staged, streams, line
        self.hardware, self.mesh = streams[0].hardware, streams[0].mesh
        self.rows: list[Rows] = [Rows() for _ in streams]
        self.ran: list[Counter[fx.Graph]] = [Counter() for _ in streams]
        self._messages = Messages(staged.stages, staged.schedule.placement, staged.along.axis)
        self._tasks: dict[fx.Graph, _TaskTime] = {}
        self._way: dict[tuple[int, int], float] = {}  # when each is free again
        self._sent: dict[Name, tuple[float, float]] = {}  # when a message leaves, and when it arrives
        self._run()
        self.stages = tuple(self._stages())

    def _run(self) -> None:
        stages, placement = self.staged.stages, self.staged.schedule.placement
        for stage, rank in enumerate(placement):
            self._task(rank, PRE, stage)
        for rank, (kind, stage, part) in self.staged.order:
            for name in names_to(stages, kind, stage, part):
                self._take(rank, name)
            self._task(rank, kind, stage)
            self.streams[rank].computes(self.line, self._adds(kind, stage, part))
            for name in names_from(stages, kind, stage, part):
                self._send(rank, name)
        terms = names_of_terms(stages)
        for name in terms:
            self._send(placement[name.source], name)
        for name in terms:
            self._take(placement[name.target], name)

    def _task(self, rank: int, kind: str, stage: int) -> None:
        graph = self.staged.all_tasks[stage][kind].graph
        if graph is None:
            return
        if graph not in self._tasks:
            alone = PassingTime(self.hardware, self.mesh)
            alone.run(graph)
            self._tasks[graph] = _TaskTime(alone.now, alone.lines, costed(Lowered(graph, ""), self.hardware, self.mesh))
        self.streams[rank].passes(*self._tasks[graph][:2])
        self.rows[rank] += self._tasks[graph].rows
        self.ran[rank][graph] += 1

    def _send(self, rank: int, name: Name) -> None:
        row = self._messages.row("send", name)
        if row is None:
            return
        way = rank, self.staged.schedule.placement[name.target]
        leaves = max(self.streams[rank].now, self._way.get(way, 0.0))
        time = self._travels(row)
        self._way[way] = leaves + time
        self._sent[name] = self.streams[rank].now, leaves + time
        self.rows[rank].append((row, time))

    def _take(self, rank: int, name: Name) -> None:
        row = self._messages.row("receive", name)
        if row is not None:
            self.rows[rank].append((row, self._travels(row)))
            self.streams[rank].receives(row.line, *self._sent.pop(name))

    def _travels(self, row: Record) -> float:
        return self.hardware.collective("send", row.bytes, self.mesh, row.axes)

    def _adds(self, kind: str, stage: int, part: int) -> float:
        """The seconds in which what a task gives is added to the sums over the parts."""
        stages = self.staged.stages
        made: list[fx.Node] = []
        if kind == F:
            made = [x for x, at in zip(stages.values, stages.at) if at == stage]
        elif kind in (W, BW):
            made = [term.node for terms in stages.parts for term in terms if term.stage == stage]
        time = 0.0
        for val in map(value, made):
            wide = torch.promote_types(val.dtype, torch.float32)
            moved = nbytes(val) + val.numel() * wide.itemsize * (2 if part else 1)
            if part or wide != val.dtype:
                time += self.hardware.compute(val.numel(), wide, moved)
        return time

    def _stages(self) -> Iterator[StagePrice]:
        for s, rank in enumerate(self.staged.schedule.placement):
            of = {kind: self._tasks.get(task.graph) for kind, task in self.staged.all_tasks[s].items()}  # type: ignore[arg-type]
            times = {kind: 0.0 if found is None else found.seconds for kind, found in of.items()}
            sends = dict[str, int]()
            for kind in times:
                rows = [self._messages.row("send", name) for name in names_from(self.staged.stages, kind, s, 0)]
                sends[kind] = sum(row.bytes for row in rows if row is not None)
            yield StagePrice(s, rank, times, {kind: n for kind, n in sends.items() if n})
