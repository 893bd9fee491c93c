"""Running a pipeline's tasks in the order of a schedule: what is kept between them, sent, received and added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from .._core.distributed.edges import Inbox, Lies, Outbox
from .stages import PRE, B, F, Stages, W
from .tasks import Task

TERM = "term"  # of a gradient: summed over the parts of the batch, to be added to another stage's


class Name(NamedTuple):
    """A message: what one task of a stage has for a task of another, of one part of the batch."""

    made: str
    source: int
    used: str
    target: int
    part: Any


class Post(Protocol):
    """How values come from stage to stage."""

    def send(self, name: Name, values: list[Any]) -> None:
        """Hand values over."""
        ...

    def take(self, name: Name) -> list[Any]:
        """Values that have been handed over."""
        ...

    def finish(self) -> None:
        """Wait until all is away."""
        ...


class Here:
    """Between stages that one process plays: nothing travels."""

    def __init__(self) -> None:
        self.held: dict[Name, list[Any]] = {}

    def send(self, name: Name, values: list[Any]) -> None:
        self.held[name] = values

    def take(self, name: Name) -> list[Any]:
        return self.held.pop(name)

    def finish(self) -> None:
        pass


class Between:
    """Between ranks that are processes, each with its stages.

    Args:
        stages: the cut step.
        placement: for each stage the place of its rank.
        rows: for each rank its actions (kind, stage, part), in order, each either F, B or W.
        me: this rank's place.
        ranks: those of the world at these places.
        groups: the process group of each edge that this rank is at.
    """

    def __init__(
        self,
        stages: Stages,
        placement: Sequence[int],
        rows: Sequence[Sequence[tuple[str, int, int]]],
        me: int,
        ranks: Sequence[int],
        groups: dict[tuple[int, int], Any],
    ) -> None:
        self.stages, self.placement, self.me, self.here = stages, placement, me, Here()
        self.inboxes: dict[int, Inbox] = {}
        self.outboxes: dict[int, Outbox] = {}
        for source, target in edges(stages, placement):
            if target == me:
                names = [name for action in rows[source] for name in names_from(stages, *action)]
                names += names_of_terms(stages)
                mine = [x for x in names if (placement[x.source], placement[x.target]) == (source, target)]
                expected = [(name, self._lies(name)) for name in mine]
                self.inboxes[source] = Inbox(groups[source, target], ranks[source], expected)
            if source == me:
                self.outboxes[target] = Outbox(groups[source, target], ranks[target])
        self.taken = {
            name: count for other in self.outboxes for name, count in taken(stages, placement, rows[other], me)
        }
        for inbox in self.inboxes.values():
            inbox.begin()

    def _lies(self, name: Name) -> list[Lies]:
        if name.made != TERM:
            return [Lies.of(x.meta["val"]) for x in self.stages.messages[name[:4]]]
        gradient, term = name.part
        lies = Lies.of(self.stages.parts[gradient][term].node.meta["val"])
        return [lies._replace(dtype=torch.promote_types(lies.dtype, torch.float32))]

    def send(self, name: Name, values: list[Any]) -> None:
        to = self.placement[name.target]
        if to == self.me:
            self.here.send(name, values)
        else:
            self.outboxes[to].send(values, self._lies(name))

    def take(self, name: Name) -> list[Any]:
        source = self.placement[name.source]
        if source == self.me:
            return self.here.take(name)
        values = self.inboxes[source].take(name)
        if name in self.taken:
            self.outboxes[source].arrived(self.taken[name])
        return values

    def finish(self) -> None:
        for outbox in self.outboxes.values():
            outbox.finish()


def names_from(stages: Stages, kind: str, stage: int, part: int) -> list[Name]:
    """The messages that a task sends, in order."""
    return [Name(*key, part) for key in stages.sent.get((kind, stage), ())]


def names_to(stages: Stages, kind: str, stage: int, part: int) -> list[Name]:
    """The messages that a task waits for."""
    return [Name(*key, part) for key in stages.taken.get((kind, stage), ())]


def taken(
    stages: Stages, placement: Sequence[int], row: Sequence[tuple[str, int, int]], me: int
) -> Iterator[tuple[Name, int]]:
    """The messages that a rank sends to me, each with how many of mine it has taken before."""
    count = 0
    for action in row:
        count += sum(placement[name.source] == me for name in names_to(stages, *action))
        yield from ((name, count) for name in names_from(stages, *action) if placement[name.target] == me)


def names_of_terms(stages: Stages) -> list[Name]:
    """The messages after the last task: the terms of gradients, to the stage that has the first one."""
    return [
        Name(TERM, term.stage, TERM, terms[0].stage, (i, j))
        for i, terms in enumerate(stages.parts)
        for j, term in enumerate(terms[1:], 1)
    ]


def edges(stages: Stages, placement: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of ranks between which something travels, in one order on all ranks."""
    pairs = {(placement[source], placement[target]) for _, source, _, target in stages.messages}
    pairs |= {(placement[x.source], placement[x.target]) for x in names_of_terms(stages)}
    return sorted(pair for pair in pairs if pair[0] != pair[1])


class Totals:
    """Sums over the parts of the batch, which are added in their order whatever the schedule is; in float32 at least."""

    def __init__(self) -> None:
        self.sums: dict[Any, torch.Tensor] = {}
        self._next: dict[Any, int] = {}
        self._early: dict[tuple[Any, int], torch.Tensor] = {}

    def add(self, what: Any, part: int, x: torch.Tensor) -> None:
        """Add what a part has."""
        self._early[what, part] = x
        while (x := self._early.pop((what, self._next.get(what, 0)), None)) is not None:  # type: ignore[assignment]
            place = self._next.get(what, 0)
            self._next[what] = place + 1
            if place == 0:
                self.sums[what] = x.to(torch.promote_types(x.dtype, torch.float32))
            elif place == 1:  # from here on the sum has memory of its own
                self.sums[what] = self.sums[what] + x
            else:
                self.sums[what].add_(x)


class StageRun:
    """One step: the tasks of some stages, one after the other.

    Args:
        stages: the cut step.
        tasks: of each stage that is played here.
        fixed: the inputs that all parts of the batch share.
        parts: for each part its own inputs.
        post: how values come from stage to stage.

    Attributes:
        totals: of ``("value", i)``, and of ``("gradient", i, j)`` for the j-th term of the i-th gradient.
    """

    def __init__(
        self,
        stages: Stages,
        tasks: dict[int, dict[str, Task]],
        fixed: dict[fx.Node, Any],
        parts: Sequence[dict[fx.Node, Any]],
        post: Post,
    ) -> None:
        self.stages, self.tasks, self.post, self.totals = stages, tasks, post, Totals()
        self.kept: dict[tuple[int, int], dict[fx.Node, Any]] = {}
        self.shared: dict[int, dict[fx.Node, Any]] = {}
        self.fixed, self.parts = fixed, parts
        for stage, own in tasks.items():
            self.shared[stage] = {}
            self._run(own[PRE], self.shared[stage], fixed)

    def action(self, kind: str, stage: int, part: int) -> None:
        """Run a task."""
        kept = self.kept.setdefault((stage, part), {})
        for name in names_to(self.stages, kind, stage, part):
            kept.update(zip(self.stages.messages[name[:4]], self.post.take(name), strict=True))
        task = self.tasks[stage][kind]
        self._run(task, kept, self.shared[stage], self.parts[part], self.fixed)
        find = lambda x: kept[x] if x in kept else self._found(x, self.shared[stage], self.parts[part], self.fixed)
        for name in names_from(self.stages, kind, stage, part):
            self.post.send(name, [find(x) for x in self.stages.messages[name[:4]]])
        if kind == F:
            for i, (x, at) in enumerate(zip(self.stages.values, self.stages.at, strict=True)):
                if at == stage:
                    self.totals.add(("value", i), part, find(x))
        if kind == W:
            for i, terms in enumerate(self.stages.parts):
                for j, (x, at) in enumerate(terms):
                    if at == stage:
                        self.totals.add(("gradient", i, j), part, find(x))
        for x in task.last:
            kept.pop(x, None)

    def finish(self) -> Totals:
        """Bring the terms of each gradient together, the first stage's first."""
        terms = names_of_terms(self.stages)
        for name in terms:
            if name.source in self.tasks:
                self.post.send(name, [self.totals.sums.pop(("gradient", *name.part))])
        for name in terms:
            if name.target in self.tasks:
                first = "gradient", name.part[0], 0
                self.totals.sums[first] = self.totals.sums[first] + self.post.take(name)[0]
        self.post.finish()
        return self.totals

    def _run(self, task: Task, kept: dict[fx.Node, Any], *others: dict[fx.Node, Any]) -> None:
        if task.run is not None:
            given = [kept[x] if x in kept else self._found(x, *others) for x in task.inputs]
            kept.update(zip(task.outputs, task.run(given), strict=True))

    @staticmethod
    def _found(x: fx.Node, *places: dict[fx.Node, Any]) -> Any:
        return next(place[x] for place in places if x in place)


def split(kind: str) -> tuple[str, ...]:
    """The tasks that an action of a schedule is."""
    return (B, W) if kind == "BW" else (kind,)
