"""Running a pipeline's tasks in the order of a schedule: what is kept between them, sent, received and added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from .._core import torch_internals
from .._core.distributed.edges import Inbox, Lies, Outbox
from .stages import PRE, B, F, Stages, W
from .tasks import Task

_ADD: Any = torch_internals.on_lists("add_")
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


def nodes_of(stages: Stages, name: Name) -> list[fx.Node]:
    """The values of a message."""
    if name.made != TERM:
        return stages.messages[name[:4]]
    return [stages.parts[name.part[0]][name.part[1]].node]


def edges(stages: Stages, placement: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of ranks between which something travels, in one order on all ranks."""
    pairs = {(placement[source], placement[target]) for _, source, _, target in stages.messages}
    pairs |= {(placement[x.source], placement[x.target]) for x in names_of_terms(stages)}
    return sorted(pair for pair in pairs if pair[0] != pair[1])


class Totals:
    """Sums over the parts of the batch, which are added in their order whatever the schedule is; in float32 at least.

    Attributes:
        sums: by name.
    """

    def __init__(self) -> None:
        self.sums: dict[Any, Any] = {}
        self._next: dict[Any, int] = {}
        self._early: dict[tuple[Any, int], list[Any]] = {}

    def add(self, names: Sequence[Any], part: int, xs: list[Any]) -> None:
        """Add what a part has of all that one task gives."""
        first = names[0]
        place = self._next.get(first, 0)
        if part != place:
            self._early[first, part] = xs
            return
        while xs:
            self._add(names, place, xs)
            place += 1
            xs = self._early.pop((first, place), [])
        self._next[first] = place

    def _add(self, names: Sequence[Any], place: int, xs: list[Any]) -> None:
        if place == 0:
            sums = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in xs]
        elif place == 1:  # from here on the sums have memory of their own
            sums = [self.sums[name] + x for name, x in zip(names, xs)]
        else:
            sums = [self.sums[name] for name in names]
            if isinstance(sums[0], torch.Tensor):
                _ADD(sums, xs)
            else:  # what stands for tensors
                sums = [total.add_(x) for total, x in zip(sums, xs)]
        self.sums.update(zip(names, sums, strict=True))


class _Steps:
    """What running a task of a stage is, for any part of the batch.

    Args:
        run: the step of which it is a part.
        kind, stage: of the task.
    """

    def __init__(self, run: StageRun, kind: str, stage: int) -> None:
        self.task, stages = run.tasks[stage][kind], run.stages
        self.takes, self.sends = names_to(stages, kind, stage, -1), names_from(stages, kind, stage, -1)
        self.once = once = run.once[stage]
        self.given = [once.get(x) for x in self.task.inputs]
        self.own = [(i, x, x in self.task.dies) for i, x in enumerate(self.task.inputs) if x not in once]
        totals: list[tuple[Any, fx.Node]] = []
        if kind == F:
            totals = [(("value", i), x) for i, (x, at) in enumerate(zip(stages.values, stages.at)) if at == stage]
        elif kind == W:
            terms = [(("gradient", i, j), term) for i, of in enumerate(stages.parts) for j, term in enumerate(of)]
            totals = [(name, term.node) for name, term in terms if term.stage == stage]
        self.names, self.adds = [name for name, _ in totals], [x for _, x in totals]

    def __call__(self, run: StageRun, kept: dict[fx.Node, Any], part: int) -> None:
        for name in self.takes:
            kept.update(zip(run.stages.messages[name[:4]], run.post.take(name._replace(part=part)), strict=True))
        task, batch = self.task, run.parts[part]
        if task.run is not None:
            given = self.given.copy()
            for i, x, dies in self.own:
                given[i] = batch[x] if x in batch else kept.pop(x) if dies else kept[x]
            kept.update(zip(task.outputs, task.run(given), strict=True))
        find = lambda x: kept[x] if x in kept else batch[x] if x in batch else self.once[x]
        for name in self.sends:
            run.post.send(name._replace(part=part), list(map(find, run.stages.messages[name[:4]])))
        if self.adds:
            run.totals.add(self.names, part, list(map(find, self.adds)))
        for x in task.last:
            kept.pop(x, None)


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
        self.parts = parts
        self.once: dict[int, dict[fx.Node, Any]] = {}  # what is the same for all parts
        for stage, own in tasks.items():
            pre, self.once[stage] = own[PRE], {**fixed}
            if pre.run is not None:
                self.once[stage].update(zip(pre.outputs, pre.run([fixed[x] for x in pre.inputs]), strict=True))
        self._steps = {(kind, stage): _Steps(self, kind, stage) for stage in tasks for kind in (F, B, W)}

    def action(self, kind: str, stage: int, part: int) -> None:
        """Run a task."""
        self._steps[kind, stage](self, self.kept.setdefault((stage, part), {}), part)

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
        self.parts, self.once, self._steps = (), {}, {}  # nothing needs what was given
        return self.totals


def split(kind: str) -> tuple[str, ...]:
    """The tasks that an action of a schedule is."""
    return (B, W) if kind == "BW" else (kind,)
