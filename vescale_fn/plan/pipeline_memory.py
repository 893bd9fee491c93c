"""What each rank of a pipeline holds at each task of its schedule: a step that is run with sizes in the place of values.

The step is the one that runs with values (`StageRun`), for all ranks in the order of time, with tasks that give sizes: what is
kept, sent and added up is let go where values are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from .._core.distributed.parcels import Lies, Parcel, is_dense
from .._core.sharding.layout import contiguous_stride
from ..schedules import Timeline
from ..schedules.actions import actions_of
from .ir.graph import nbytes, output, value
from .ir.memory_use import bytes_text
from .sized_tasks import (
    ARGUMENTS,
    GRADIENTS,
    KEPT,
    KINDS,
    MESSAGES,
    HeldPiece,
    Holds,
    SizedTask,
    SizedValue,
    TaskMemory,
)
from .stage_runs import MessageRoutes, Name, StageRun, StageTasks
from .stages import Stages


class MemoryMoment(NamedTuple):
    """A task of a rank: when it runs, the most bytes that the rank holds meanwhile, and behind it, by what they are."""

    task: str
    start: float
    end: float
    peak: int
    after: Mapping[str, int]


@dataclass(frozen=True, repr=False)
class PipelineMemory:
    """The bytes that each rank of a pipeline is predicted to hold in a step, by its place on the axis; it prints as a table.

    On a simulated mesh all ranks at a coordinate count together, as one process plays them.

    Attributes:
        rows: of each rank its moments, in order: its tasks, and at last "results", the means of what was added up.
        before: what each holds when its first task begins, by what it is: "arguments", its parameters and the batch; "once",
            what is computed of parameters alone; "kept" for later tasks; "gradients"; "messages" before they are taken; and
            "in a task", what that makes for itself.
        held: what each holds where it holds most.
    """

    rows: tuple[tuple[MemoryMoment, ...], ...]
    before: tuple[Mapping[str, int], ...]
    held: tuple[Mapping[str, int], ...]

    @property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes that each rank holds at once."""
        return tuple(sum(held.values()) for held in self.held)

    def text(self) -> str:
        """The table."""
        lines = ["rank       peak  of which " + " ".join(f"{kind:>10}" for kind in KINDS) + "   reached in"]
        for rank, (peak, held, row) in enumerate(zip(self.peaks, self.held, self.rows, strict=True)):
            sizes = " ".join(f"{bytes_text(held[kind]):>10}" for kind in KINDS)
            at = next((moment.task for moment in row if moment.peak == peak), "the begin")
            lines.append(f"{rank:4} {bytes_text(peak):>10}           {sizes}   {at}")
        return "\n".join(lines)

    __repr__ = text


def memory_of(staged: Any, homes: Sequence[Iterable[int]], timeline: Timeline, means: bool = True) -> PipelineMemory:
    """The memory of a step.

    Args:
        staged: its plan, a `Staged`.
        homes: for each parameter the ranks that have it.
        timeline: when each task runs.
        means: whether it makes the means of what it adds up; else it gives the sums, of which a plan around it makes these.
    """
    schedule = staged.schedule
    runs_here = set(staged.order)  # without gradients the forward tasks alone
    order = [one for one in _in_time(schedule.check(blocking=False), timeline) if one[:2] in runs_here]
    of_ranks = [[action for rank, action, *_ in order if rank == at] for at in range(schedule.ranks)]
    posts = [_Post(staged.stages, schedule.placement, rank, of_ranks) for rank in range(schedule.ranks)]
    runs = _runs(staged, homes, posts)
    rows: list[list[MemoryMoment]] = [[] for _ in posts]
    before = tuple(dict(post.holds.now) for post in posts)
    for rank, action, start, end in order:
        holds = posts[rank].holds
        holds.begin()
        runs[rank].action(*action)
        rows[rank].append(MemoryMoment("{1}{0}{2}".format(*action), start, end, holds.top, dict(holds.now)))
    end = timeline.rows[0][0].start + timeline.makespan
    for rank, run in enumerate(runs):
        holds = posts[rank].holds
        holds.begin()
        totals = run.finish()
        sizes = _results(staged, homes, rank) if means else ()
        results = [HeldPiece(holds, size, GRADIENTS) for size in sizes]
        rows[rank].append(MemoryMoment("results", end, end, holds.top, dict(holds.now)))
        del totals, results
    return PipelineMemory(tuple(map(tuple, rows)), before, tuple(post.holds.most for post in posts))


def _runs(staged: Any, homes: Sequence[Iterable[int]], posts: Sequence[_Post]) -> list[StageRun]:
    """The step of each rank."""
    stages, runs = staged.stages, []
    tasks, made = dict(enumerate(staged.all_tasks)), dict[Any, TaskMemory]()
    gradients = {term.node for terms in stages.parts for term in terms}
    for rank, post in enumerate(posts):
        mine = {s: tasks[s] for s, at in enumerate(staged.schedule.placement) if at == rank}
        used = {x for of in mine.values() for task in of.values() for x in task.inputs}
        fixed, parts = _inputs(staged, homes, post.holds, rank, used, post.given)
        own: Any = {
            s: {kind: SizedTask(task, kind, post.holds, made, gradients) for kind, task in of.items()}
            for s, of in mine.items()
        }
        runs.append(StageRun(StageTasks(stages, own), fixed, parts, post))  # type: ignore[arg-type]
    return runs


def _in_time(
    order: Sequence[tuple[int, Any]], timeline: Timeline
) -> Iterator[tuple[int, tuple[str, int, int], float, float]]:
    """The tasks of a step in the order of time: (rank, task, start, end)."""
    times = {timed.task: timed for row in timeline.rows for timed in row}
    for rank, task in sorted(order, key=lambda one: times[one[1]].start):  # in `order` none comes before what it needs
        _, start, end = times[task]
        for action in actions_of(task):
            yield rank, action, start, end


# --- what it is given, sends and gives ----------------------------------------------------------------------------------


class _Post:
    """A rank's messages: it receives one ahead, and holds what it sends until it hears that the other rank has it."""

    def __init__(self, stages: Stages, placement: Sequence[int], me: int, rows: Sequence[Sequence[Any]]) -> None:
        self.routes, self.me, self.holds = MessageRoutes(stages, placement, rows, me, {}), me, Holds()
        self.given: list[HeldPiece] = []
        self.here: dict[Name, list[SizedValue]] = {}
        self.expected = {source: iter(names) for source, names in self.routes.incoming.items()}
        self.arriving: dict[int, dict[Name, tuple[Parcel, list[HeldPiece]]]] = {source: {} for source in self.expected}
        self.leaving: dict[int, deque[list[Any]]] = {target: deque() for target in self.routes.outgoing}
        self.sent: Counter[int] = Counter()
        for source in self.expected:
            self._begin(source)

    def _begin(self, source: int) -> None:
        for name, parcel in self.expected[source]:
            self.arriving[source][name] = parcel, [HeldPiece(self.holds, size, MESSAGES) for size in parcel.sizes]
            return

    def send(self, name: Name, values: list[SizedValue]) -> None:
        if name not in self.routes.ways:
            self.here[name] = values
            return
        to, parcel = self.routes.ways[name]
        alone = [len(row) == 1 and is_dense(parcel.lies[row[0]]) for row in parcel.rows]  # no copy is made to be sent
        rows = zip(parcel.rows, parcel.sizes, alone, strict=True)
        self.leaving[to].append([values[row[0]] if one else HeldPiece(self.holds, n, MESSAGES) for row, n, one in rows])
        self.sent[to] += 1

    def take(self, name: Name) -> list[SizedValue]:
        source, taken = self.routes.placement[name.source], self.routes.taken
        if source == self.me:
            return self.here.pop(name)
        arriving = self.arriving[source]
        while name not in arriving:
            self._begin(source)
        if len(arriving) == 1:
            self._begin(source)
        parcel, rooms = arriving.pop(name)
        pieces: dict[int, HeldPiece] = {}
        for row, piece in zip(parcel.rows, rooms, strict=True):
            piece.become(KEPT)
            pieces.update(dict.fromkeys(row, piece))
        while name in taken and self.sent[source] - len(self.leaving[source]) < taken[name]:
            self.leaving[source].popleft()
        return [self._arrived(one, pieces.get(i)) for i, one in enumerate(parcel.lies)]

    def _arrived(self, lies: Lies, piece: HeldPiece | None) -> SizedValue:
        """A value that has come in this piece, where it has elements."""
        if piece is not None and not is_dense(lies):  # it is laid out again
            piece = HeldPiece(self.holds, sum(Parcel([lies]).sizes), KEPT)
        size = torch.Size(lies.shape).numel() * lies.dtype.itemsize
        return SizedValue(self.holds, lies.dtype, size, [] if piece is None else [piece])

    def finish(self) -> None:
        self.leaving.clear()


def _inputs(
    staged: Any, homes: Sequence[Iterable[int]], holds: Holds, rank: int, used: set[fx.Node], held: list[HeldPiece]
) -> tuple[dict[fx.Node, SizedValue], list[dict[fx.Node, SizedValue]]]:
    """What a rank is given: what all parts of the batch share, and what each has; and in `held` what others hold, too. Parts of
    an array are copied, where they are `used`, for their rows to lie side by side."""
    fixed: dict[fx.Node, SizedValue] = {}
    parts: list[dict[fx.Node, SizedValue]] = [{} for _ in range(staged.schedule.microbatches)]
    for i, nodes in [*staged.places, (-1, [*dict(staged.constants)])]:
        for x in nodes:
            val, count = x.meta["val"], len(parts) if i in staged.varying else 1
            there = count * nbytes(val) if i < 0 or i >= len(homes) or rank in homes[i] else 0
            copied = there if count > 1 and x in used and val.stride() == contiguous_stride(val.shape) else 0
            held.append(HeldPiece(holds, there, ARGUMENTS))
            found = SizedValue.of(holds, val, [held[-1], HeldPiece(holds, copied, ARGUMENTS)])
            for of in parts if i in staged.varying else (fixed,):
                of[x] = found
    return fixed, parts


def _results(staged: Any, homes: Sequence[Iterable[int]], rank: int) -> Iterator[int]:
    """The bytes of what a rank makes of the sums that it has, each beside them: the mean, in its dtype, reduced; and of what
    comes from other ranks."""
    nodes: Any = output(staged.graph).args[0]
    stages, of_gradients = staged.stages, iter(homes)
    for made, where in zip(staged.results, staged.where, strict=True):
        has = rank in next(of_gradients) if where[0][0] == "gradient" else True
        for place, name in zip(made.places, where, strict=True):
            val = value(nodes[place])
            at = stages.at[name[1]] if name[0] == "value" else stages.parts[name[1]][0].stage
            if staged.schedule.placement[at] == rank:
                wide = torch.promote_types(val.dtype, torch.float32)
                yield val.numel() * wide.itemsize
                yield nbytes(val) * ((wide != val.dtype) + 2 * bool(made.lies.unreduced))  # packed, and added up
            elif has:
                yield nbytes(val)
