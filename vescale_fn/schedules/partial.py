"""Schedules task by task: what has run, what can run next and when, and how long the whole takes at least."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .actions import Action, Kind
from .costs import StageCosts

_KINDS: tuple[Kind, ...] = ("F", "B", "W")
F, B, W = range(3)


class Candidate(NamedTuple):
    """A task that could be the next of its rank."""

    end: float
    start: float
    kind: int
    stage: int


@dataclass(frozen=True)
class Problem:
    """Stages on ranks, m microbatches, what stages cost, and how many chunks each rank may hold.

    All microbatches cost the same, so each stage runs them in ascending order: any other order can be relabelled.
    """

    placement: tuple[int, ...]
    m: int
    costs: StageCosts
    limits: tuple[int, ...]

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """The stages of each rank."""
        return [[s for s, where in enumerate(self.placement) if where == rank] for rank in range(len(self.limits))]

    @cached_property
    def times(self) -> list[tuple[float, ...]]:
        """How long each stage takes, by kinds."""
        return [self.costs.kinds[kind] for kind in _KINDS]

    @cached_property
    def after_last_b(self) -> list[float]:
        """For each stage, how long it takes at least from the end of its last B to that of the last W of stage 0."""
        tails = [self.times[W][0]]
        for s in range(1, len(self.placement)):
            tails.append(tails[-1] - self.times[W][0] + self.way(s, s - 1) + self.times[B][s - 1] + self.times[W][0])
        return tails

    def way(self, s: int, other: int) -> float:
        """How long a value takes from one stage to the next."""
        return 0 if self.placement[s] == self.placement[other] else self.costs.p2p[min(s, other)]


class Partial:
    """The beginning of a schedule."""

    __slots__ = ("arrived", "bound", "counts", "free", "held", "inputs", "last", "left", "problem", "ready")

    def __init__(self, problem: Problem) -> None:
        n, p = len(problem.placement), len(problem.limits)
        self.problem = problem
        self.counts = [[0] * n for _ in _KINDS]  # of each kind and stage, how many have run
        self.free: list[float] = [0] * p  # until when each rank is busy
        self.held = [0] * p  # chunks
        self.left = [sum(problem.m * times[s] for times in problem.times for s in own) for own in problem.stages_of]
        # when the inputs are there of the F and B of each stage that have not run
        self.inputs: list[list[tuple[float, ...]]] = [[()] * n, [()] * n]
        self.inputs[F][0] = (0,) * problem.m
        self.arrived: list[list[float]] = [[0] * n, [0] * n]  # the last one of them
        self.last: tuple[Action, Partial] | None = None
        self.ready = [self.candidates(rank) for rank in range(p)]
        self.bound: float = 0

    def candidates(self, rank: int) -> list[Candidate]:
        """What a rank can run next, as far as its inputs are known.

        F waits where the oldest microbatch of the rank could not be finished any more within the limit.
        """
        problem, (f, b, w) = self.problem, self.counts
        free, found = self.free[rank], []
        own = problem.stages_of[rank]
        room = problem.limits[rank] - self.held[rank]
        oldest = min(w[s] for s in own)  # microbatch
        for s in own:
            if self.inputs[F][s] and f[s] < problem.m:
                missing = sum(f[other] <= oldest for other in own)
                if room > missing or (room == missing and f[s] <= oldest):
                    start = max(free, self.inputs[F][s][0])
                    found.append(Candidate(start + problem.times[F][s], start, F, s))
            if self.inputs[B][s]:
                start = max(free, self.inputs[B][s][0])
                found.append(Candidate(start + problem.times[B][s], start, B, s))
            if w[s] < b[s]:
                found.append(Candidate(free + problem.times[W][s], free, W, s))
        return found

    def then(self, candidate: Candidate) -> Partial:
        """This beginning with one more task."""
        problem, (end, _, kind, s) = self.problem, candidate
        rank = problem.placement[s]
        new: Partial = object.__new__(Partial)
        new.problem = problem
        new.last = Action(_KINDS[kind], s, self.counts[kind][s]), self
        new.counts = [*self.counts]
        new.counts[kind] = _with(self.counts[kind], s, self.counts[kind][s] + 1)
        new.free = _with(self.free, rank, end)
        new.left = _with(self.left, rank, self.left[rank] - problem.times[kind][s])
        new.held, new.inputs, new.arrived = self.held, self.inputs, self.arrived
        changed = {rank}
        if kind == W:
            new.held = _with(self.held, rank, self.held[rank] - 1)
        else:
            new.inputs = [*self.inputs]
            new.inputs[kind] = _with(self.inputs[kind], s, self.inputs[kind][s][1:])
            if kind == F:
                new.held = _with(self.held, rank, self.held[rank] + 1)
            to, gets = (s + 1, F) if kind == F and s + 1 < len(problem.placement) else (s - 1 if kind == B else s, B)
            if to >= 0:
                there = end if to == s else max(end, self.arrived[gets][to]) + problem.way(s, to)
                new.inputs[gets] = _with(new.inputs[gets], to, (*new.inputs[gets][to], there))
                new.arrived = [*self.arrived]
                new.arrived[gets] = _with(self.arrived[gets], to, there)
                changed.add(problem.placement[to])
        new.ready = [*self.ready]
        for r in changed:
            new.ready[r] = new.candidates(r)
        new.bound = new.least_time()
        return new

    def least_time(self) -> float:
        """How long the whole takes at least."""
        problem, most = self.problem, 0.0
        for rank, own in enumerate(problem.stages_of):
            free = self.free[rank]
            if self.left[rank]:
                if self.ready[rank]:
                    free = max(free, min(candidate.start for candidate in self.ready[rank]))
                most = max(most, free + self.left[rank])
                b = [problem.m - self.counts[B][s] for s in own]
                tail = min((problem.after_last_b[s] for s, count in zip(own, b) if count), default=0)
                both = sum(
                    count * problem.times[B][s] + (problem.m - self.counts[F][s]) * problem.times[F][s]
                    for s, count in zip(own, b)
                )
                most = max(most, free + both + tail)
            else:
                most = max(most, free)
        return most

    def next_tasks(self) -> list[Candidate]:
        """Tasks of which one comes next in some schedule that is as good as any that begins like this.

        Of the task that could end first, and of those of its rank that could begin before then, one is the next of its rank.

        Source: Giffler and Thompson, Algorithms for solving production-scheduling problems, 1960.
        """
        first = min((candidate for ready in self.ready for candidate in ready), default=None)
        if first is None:
            return []
        rank = self.problem.placement[first.stage]
        return [c for c in self.ready[rank] if c.start < first.end or c is first]

    def key(self) -> object:
        """Equal for beginnings that go on alike: what has run, and when ranks are free and inputs there."""
        return tuple(map(tuple, self.counts)), tuple(self.free), tuple(map(tuple, self.inputs))

    def rows(self) -> list[list[Action]]:
        """What each rank has run, in order."""
        rows: list[list[Action]] = [[] for _ in self.free]
        node = self.last
        while node is not None:
            rows[self.problem.placement[node[0].stage]].append(node[0])
            node = node[1].last
        return [row[::-1] for row in rows]


def _with(values: list, i: int, value: object) -> list:
    """A list with another entry."""
    changed = values.copy()
    changed[i] = value
    return changed
