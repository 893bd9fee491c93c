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

from .._core.sharding.layout import contiguous_stride
from ..schedules import Timeline
from ..schedules.actions import actions_of
from .ir import memory_aliases
from .ir.graph import nbytes, output, value
from .ir.memory_use import bytes_text, memory
from .stage_runs import TERM, Name, StageRun, StageTasks, edges, names_from, names_of_terms, nodes_of, taken
from .staged import Staged
from .stages import PRE, Stages
from .tasks import Task

KINDS: Sequence[str] = ("arguments", "once", "kept", "gradients", "messages", "in a task")
ARGUMENTS, ONCE, KEPT, GRADIENTS, MESSAGES, WITHIN = KINDS


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


def memory_of(staged: Staged, homes: Sequence[Iterable[int]], timeline: Timeline) -> PipelineMemory:
    """The memory of a step.

    Args:
        staged: its plan.
        homes: for each parameter the ranks that have it.
        timeline: when each task runs.
    """
    schedule = staged.schedule
    order = list(_in_time(schedule.check(blocking=False), timeline))
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
        results = [HeldPiece(holds, size, GRADIENTS) for size in _results(staged, homes, rank)]
        rows[rank].append(MemoryMoment("results", end, end, holds.top, dict(holds.now)))
        del totals, results
    return PipelineMemory(tuple(map(tuple, rows)), before, tuple(post.holds.most for post in posts))


def _runs(staged: Staged, homes: Sequence[Iterable[int]], posts: Sequence[_Post]) -> list[StageRun]:
    """The step of each rank."""
    stages, runs = staged.stages, []
    tasks, made = dict(enumerate(staged.all_tasks)), dict[Any, _Gives]()
    gradients = {term.node for terms in stages.parts for term in terms}
    for rank, post in enumerate(posts):
        mine = {s: tasks[s] for s, at in enumerate(staged.schedule.placement) if at == rank}
        used = {x for of in mine.values() for task in of.values() for x in task.inputs}
        fixed, parts = _inputs(staged, homes, post.holds, rank, used, post.given)
        own: Any = {
            s: {kind: _Sized(task, kind, post.holds, made, gradients) for kind, task in of.items()}
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


# --- what is held -----------------------------------------------------------------------------------------------------


class Holds:
    """The bytes that a rank holds: now, at most since `begin`, and where they are most by what they are."""

    def __init__(self) -> None:
        self.now = dict.fromkeys(KINDS, 0)
        self.most = dict(self.now)
        self.total = self.top = self._peak = 0

    def begin(self) -> None:
        self.top = self.total

    def add(self, kind: str, size: int) -> None:
        """More bytes, or fewer."""
        self.now[kind] += size
        self.total += size
        if self.total > self.top:
            self.top = self.total
            if self.top > self._peak:
                self._peak, self.most = self.top, dict(self.now)


class HeldPiece:
    """A piece of memory, which is held as long as something refers to it."""

    __slots__ = ("bytes", "holds", "kind")

    def __init__(self, holds: Holds, size: int, kind: str) -> None:
        self.holds, self.bytes, self.kind = holds, size, kind
        holds.add(kind, size)

    def become(self, kind: str) -> None:
        self.holds.add(self.kind, -self.bytes)
        self.kind = kind
        self.holds.add(kind, self.bytes)

    def __del__(self) -> None:
        self.holds.add(self.kind, -self.bytes)


class SizedValue:
    """A value of which the size is known, and in which pieces of memory it lies; gradients are added as tensors are."""

    __slots__ = ("dtype", "holds", "pieces", "size")

    def __init__(self, holds: Holds, dtype: Any, size: int, pieces: Sequence[HeldPiece]) -> None:
        self.holds, self.dtype, self.size, self.pieces = holds, dtype, size, pieces

    def to(self, dtype: torch.dtype) -> SizedValue:
        return self if dtype == self.dtype else self._new(dtype)

    def __add__(self, other: SizedValue) -> SizedValue:
        return self._new(torch.promote_types(self.dtype, other.dtype))

    def add_(self, other: SizedValue) -> SizedValue:
        return self

    def _new(self, dtype: torch.dtype) -> SizedValue:
        size = self.size // self.dtype.itemsize * dtype.itemsize
        return SizedValue(self.holds, dtype, size, [HeldPiece(self.holds, size, GRADIENTS)])


def _value(holds: Holds, val: Any, pieces: Sequence[HeldPiece]) -> SizedValue:
    return SizedValue(holds, getattr(val, "dtype", None), nbytes(val), pieces)


# --- a step with sizes ------------------------------------------------------------------------------------------------


class _Gives:
    """What a task makes, and what it needs while it runs.

    Args:
        graph: of its calls.
        mortal: the places of the inputs that are let go while it runs.

    Attributes:
        within: the bytes that it holds at most besides its inputs.
        sizes: of the memory that it makes and gives.
        outputs: of each output its value, the places of the inputs in whose memory it may lie, and those among `sizes`.
    """

    def __init__(self, graph: fx.Graph, mortal: frozenset[int]) -> None:
        given = {x: i for i, x in enumerate(x for x in graph.nodes if x.op == "placeholder")}
        use, lie = memory(graph, frozenset(x for x, i in given.items() if i in mortal)), memory_aliases.memories(graph)
        self.within = use.peak - use.arguments
        pieces: dict[Any, int] = {}
        self.sizes: list[int] = []
        self.outputs: list[tuple[Any, list[int], list[int]]] = []
        for x in output(graph).args[0]:  # type: ignore[union-attr]
            old = [given[piece.maker] for piece in lie[x] if piece.maker in given]  # type: ignore[index]
            new = [piece for piece in lie[x] if piece.maker not in given]  # type: ignore[index]
            for piece in new:
                if piece not in pieces:
                    pieces[piece] = len(self.sizes)
                    self.sizes.append(piece.bytes)
            self.outputs.append((value(x), old, [pieces[piece] for piece in new]))  # type: ignore[arg-type]


class _Sized:
    """A task that is run with sizes."""

    def __init__(self, task: Task, kind: str, holds: Holds, made: dict[Any, _Gives], gradients: set[fx.Node]) -> None:
        self.inputs, self.outputs, self.last, self.dies = task.inputs, task.outputs, task.last, task.dies
        self.run = None
        if (graph := task.graph) is not None:
            self._graph, self._holds, self._made = graph, holds, made
            self._kinds = [ONCE if kind == PRE else GRADIENTS if x in gradients else KEPT for x in task.outputs]
            self.run = self._run

    def _run(self, given: list[SizedValue]) -> list[SizedValue]:
        key = self._graph, self._mortal(given)
        if key not in self._made:
            self._made[key] = _Gives(*key)
        holds, gives = self._holds, self._made[key]
        holds.add(WITHIN, gives.within)
        holds.add(WITHIN, -gives.within)
        pieces: list[HeldPiece | None] = [None] * len(gives.sizes)
        lent = {i: given[i].pieces for _, old, _ in gives.outputs for i in old}
        given.clear()
        found = []
        for kind, (val, old, new) in zip(self._kinds, gives.outputs, strict=True):
            for i in new:
                pieces[i] = pieces[i] or HeldPiece(holds, gives.sizes[i], kind)
            lies = [piece for i in old for piece in lent[i]] + [pieces[i] for i in new]
            found.append(_value(holds, val, lies))  # type: ignore[arg-type]
        return found

    def _mortal(self, given: list[SizedValue]) -> frozenset[int]:
        """The places of the inputs with which memory is let go while the task runs: of several that lie in a piece the one that
        is used last, if none of them stays."""
        lying: dict[int, list[int]] = {}
        for i, x in enumerate(given):
            for piece in x.pieces:
                lying.setdefault(id(piece), []).append(i)
        dies = [x in self.dies for x in self.inputs]
        last = [max(x.users, default=x) for x in self._graph.nodes if x.op == "placeholder"]
        alive = {i for places in lying.values() if not all(map(dies.__getitem__, places)) for i in places}
        alive |= {i for places in lying.values() for i in places if i != max(places, key=last.__getitem__)}
        return frozenset(i for i, one in enumerate(dies) if one and i not in alive)


class _Post:
    """A rank's messages: it receives one ahead, and holds what it sends until it hears that the other rank has it."""

    def __init__(self, stages: Stages, placement: Sequence[int], me: int, rows: Sequence[Sequence[Any]]) -> None:
        self.stages, self.placement, self.me, self.holds = stages, placement, me, Holds()
        self.given: list[HeldPiece] = []
        self.here: dict[Name, list[SizedValue]] = {}
        self.arriving: dict[int, dict[Name, list[SizedValue]]] = {}
        self.expected: dict[int, deque[Name]] = {}
        self.leaving: dict[int, deque[list[SizedValue]]] = {}
        self.sent: Counter[int] = Counter()
        for source, target in edges(stages, placement):
            if target == me:
                names = [name for action in rows[source] for name in names_from(stages, *action)]
                names += names_of_terms(stages)
                mine = [x for x in names if (placement[x.source], placement[x.target]) == (source, target)]
                self.expected[source], self.arriving[source] = deque(mine), {}
                self._begin(source)
            if source == me:
                self.leaving[target] = deque()
        self.taken = {
            name: count for other in self.leaving for name, count in taken(stages, placement, rows[other], me)
        }

    def _begin(self, source: int) -> None:
        if self.expected[source]:
            name = self.expected[source].popleft()
            self.arriving[source][name] = [self._buffer(name, x.meta["val"]) for x in nodes_of(self.stages, name)]

    def _buffer(self, name: Name, val: torch.Tensor) -> SizedValue:
        dtype = val.dtype if name.made != TERM else torch.promote_types(val.dtype, torch.float32)
        shape = [1 if stride == 0 else n for n, stride in zip(val.shape, val.stride(), strict=True)]
        size = torch.Size(shape).numel() * dtype.itemsize
        return SizedValue(self.holds, dtype, val.numel() * dtype.itemsize, [HeldPiece(self.holds, size, MESSAGES)])

    def send(self, name: Name, values: list[SizedValue]) -> None:
        to = self.placement[name.target]
        if to == self.me:
            self.here[name] = values
            return
        self.leaving[to].append(values)
        self.sent[to] += 1

    def take(self, name: Name) -> list[SizedValue]:
        source = self.placement[name.source]
        if source == self.me:
            return self.here.pop(name)
        arriving = self.arriving[source]
        while name not in arriving:
            self._begin(source)
        if len(arriving) == 1:
            self._begin(source)
        values = arriving.pop(name)
        for piece in (piece for x in values for piece in x.pieces):
            piece.become(KEPT)
        while name in self.taken and self.sent[source] - len(self.leaving[source]) < self.taken[name]:
            self.leaving[source].popleft()
        return values

    def finish(self) -> None:
        self.leaving.clear()


def _inputs(
    staged: Staged, homes: Sequence[Iterable[int]], holds: Holds, rank: int, used: set[fx.Node], held: list[HeldPiece]
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
            found = _value(holds, val, [held[-1], HeldPiece(holds, copied, ARGUMENTS)])
            for of in parts if i in staged.varying else (fixed,):
                of[x] = found
    return fixed, parts


def _results(staged: Staged, homes: Sequence[Iterable[int]], rank: int) -> Iterator[int]:
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
