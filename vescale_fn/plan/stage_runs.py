"""Running a pipeline's tasks in the order of a schedule: what is kept between them, sent, received and added up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from .._core import torch_internals
from .._core.distributed.edges import End, Inbox, Outbox
from .._core.distributed.parcels import Lies, Parcel, as_arrived
from .stages import BW, PRE, B, F, Stages, W
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
    """Between stages that one process plays: nothing travels.

    Args:
        stages: the cut step, where what is handed over is to lie in memory as if it had come from another process.
    """

    def __init__(self, stages: Stages | None = None) -> None:
        self.held: dict[Name, list[Any]] = {}
        self._stages, self._known = stages, dict[Any, list[Lies]]()

    def send(self, name: Name, values: list[Any]) -> None:
        if self._stages is not None:
            key = name if name.made == TERM else name[:4]
            if key not in self._known:
                self._known[key] = lies_of(self._stages, name)
            values = list(map(as_arrived, values, self._known[key]))
        self.held[name] = values

    def take(self, name: Name) -> list[Any]:
        return self.held.pop(name)

    def finish(self) -> None:
        pass


class MessageRoutes:
    """The messages between a rank and others, as they are known before a step.

    Args:
        stages: the cut step.
        placement: for each stage the place of its rank.
        rows: for each rank its actions (kind, stage, part), in order.
        me: this rank's place.
        ends: of each edge that this rank is at, its end.

    Attributes:
        incoming: by the place that they come from, the messages in order, each with how it travels.
        outgoing: the places to which any goes.
        ways: of each message that leaves this rank, where it goes and how it travels.
        taken: for some that come, how many of this rank's messages the other one has taken when it sends them.
    """

    def __init__(
        self,
        stages: Stages,
        placement: Sequence[int],
        rows: Sequence[Sequence[tuple[str, int, int]]],
        me: int,
        ends: dict[tuple[int, int], End],
    ) -> None:
        self.me, self.placement, self.ends = me, placement, ends
        self._stages, self._parcels = stages, dict[Any, Parcel]()
        self.incoming: dict[int, list[tuple[Name, Parcel]]] = {}
        self.ways: dict[Name, tuple[int, Parcel]] = {}
        self.outgoing: list[int] = []
        terms = names_of_terms(stages)
        for source, target in edges(stages, placement):
            if me in (source, target):
                names = [*(name for action in rows[source] for name in names_from(stages, *action)), *terms]
                over = [x for x in names if (placement[x.source], placement[x.target]) == (source, target)]
                if target == me:
                    self.incoming[source] = [(name, self._parcel(name)) for name in over]
                else:
                    self.outgoing.append(target)
                    self.ways.update((name, (target, self._parcel(name))) for name in over)
        self.taken = {
            name: count for other in self.outgoing for name, count in taken(stages, placement, rows[other], me)
        }

    def _parcel(self, name: Name) -> Parcel:
        key = name if name.made == TERM else name[:4]
        if key not in self._parcels:
            self._parcels[key] = parcel_of(self._stages, name)
        return self._parcels[key]


class Between:
    """Between ranks that are processes, in one step, which begins: each receives a message before it needs it.

    Args:
        routes: what is known of the messages.
        here: between stages of this rank.
    """

    def __init__(self, routes: MessageRoutes, here: Here) -> None:
        ends, me, self.routes, self.here = routes.ends, routes.me, routes, here
        self.inboxes = {source: Inbox(ends[source, me], names) for source, names in routes.incoming.items()}
        self.outboxes = {target: Outbox(ends[me, target]) for target in routes.outgoing}
        for inbox in self.inboxes.values():
            inbox.begin()

    def send(self, name: Name, values: list[Any]) -> None:
        if name in self.routes.ways:
            to, parcel = self.routes.ways[name]
            self.outboxes[to].send(values, parcel)
        else:
            self.here.send(name, values)

    def take(self, name: Name) -> list[Any]:
        source = self.routes.placement[name.source]
        if source == self.routes.me:
            return self.here.take(name)
        values = self.inboxes[source].take(name)
        if name in self.routes.taken:
            self.outboxes[source].arrived(self.routes.taken[name])
        return values

    def finish(self) -> None:
        for outbox in self.outboxes.values():
            outbox.finish()


def names_from(stages: Stages, kind: str, stage: int, part: int) -> list[Name]:
    """The messages that a task sends, in order."""
    return [Name(*key, part) for key in stages.sent.get((B if kind == BW else kind, stage), ())]


def names_to(stages: Stages, kind: str, stage: int, part: int) -> list[Name]:
    """The messages that a task waits for."""
    return [Name(*key, part) for key in stages.taken.get((B if kind == BW else kind, stage), ())]


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


def parcel_of(stages: Stages, name: Name) -> Parcel:
    """How a message travels."""
    return Parcel(lies_of(stages, name))


def lies_of(stages: Stages, name: Name) -> list[Lies]:
    """How the values of a message lie."""
    found = [Lies.of(x.meta["val"]) for x in nodes_of(stages, name)]
    if name.made != TERM:
        return found
    return [lies._replace(dtype=torch.promote_types(lies.dtype, torch.float32)) for lies in found]


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

    def add(self, names: Sequence[Any], part: int, xs: list[Any], ours: bool = False) -> None:
        """Add what a part has of all that one task gives; `ours`: nothing else needs the memory of any of it."""
        first = names[0]
        place = self._next.get(first, 0)
        if part != place:
            self._early[first, part] = xs
            return
        while xs:
            self._add(names, place, xs, ours)
            place += 1
            xs = self._early.pop((first, place), [])
        self._next[first] = place

    def _add(self, names: Sequence[Any], place: int, xs: list[Any], ours: bool) -> None:
        if place == 0:
            sums = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in xs]
        elif place == 1 and not ours:  # from here on the sums have memory of their own
            sums = [self.sums[name] + x for name, x in zip(names, xs)]
        else:
            sums = [self.sums[name] for name in names]
            if isinstance(sums[0], torch.Tensor):
                _ADD(sums, xs)
            else:  # what stands for tensors
                sums = [total.add_(x) for total, x in zip(sums, xs)]
        self.sums.update(zip(names, sums, strict=True))


class _TaskSteps:
    """What running a task of a stage is, for any part of the batch.

    Args:
        stages: the cut step.
        own: the tasks of the stage.
        kind, stage: of the task.
    """

    def __init__(self, stages: Stages, own: Mapping[str, Task], kind: str, stage: int) -> None:
        self.task, self.kind, self.stage, self._stages = own[kind], kind, stage, stages
        once = set(own[PRE].outputs)
        places = [(i, x) for i, x in enumerate(self.task.inputs) if x not in once]
        self._of_parts = [(i, x) for i, x in places if x in stages.batch]
        self._kept = [(i, x, x in self.task.dies) for i, x in places if x.op != "placeholder"]
        self._messages: dict[int, Any] = {}
        totals: list[tuple[Any, fx.Node]] = []
        if kind == F:
            totals = [(("value", i), x) for i, (x, at) in enumerate(zip(stages.values, stages.at)) if at == stage]
        elif kind in (W, BW):
            terms = [(("gradient", i, j), term) for i, of in enumerate(stages.parts) for j, term in enumerate(of)]
            totals = [(name, term.node) for name, term in terms if term.stage == stage]
        self._names, self._added = [name for name, _ in totals], [x for _, x in totals]
        self._ours = (kind, stage) in stages.alone

    def __call__(self, run: StageRun, kept: dict[fx.Node, Any], part: int) -> None:
        task, (takes, sends) = self.task, self._messages.get(part) or self._messages_of(part)
        for name, nodes in takes:
            kept.update(zip(nodes, run.post.take(name), strict=True))
        batch = run.parts[part]
        if task.run is not None:
            given = run.given[self.kind, self.stage].copy()
            for i, x in self._of_parts:
                given[i] = batch[x]
            for i, x, dies in self._kept:
                given[i] = kept.pop(x) if dies else kept[x]
            kept.update(zip(task.outputs, task.run(given), strict=True))
        for name, nodes in sends:
            run.post.send(name, [kept[x] for x in nodes])
        if self._added:
            once = run.once[self.stage]
            find = lambda x: kept[x] if x in kept else batch[x] if x in batch else once[x]
            run.totals.add(self._names, part, list(map(find, self._added)), self._ours)
        for x in task.last:
            kept.pop(x, None)

    def _messages_of(self, part: int) -> Any:
        found = tuple(
            [(name, nodes_of(self._stages, name)) for name in names(self._stages, self.kind, self.stage, part)]
            for names in (names_to, names_from)
        )
        self._messages[part] = found
        return found


class StageTasks:
    """The tasks of some stages, and what running each is: the same in all steps.

    Args:
        stages: the cut step.
        tasks: of each stage that is played here.
    """

    def __init__(self, stages: Stages, tasks: Mapping[int, Mapping[str, Task]]) -> None:
        self.stages, self.tasks = stages, tasks
        self.steps = {
            (kind, s): _TaskSteps(stages, own, kind, s) for s, own in tasks.items() for kind in own if kind != PRE
        }


class StageRun:
    """One step: the tasks of some stages, one after the other.

    Args:
        of: the stages that are played here.
        fixed: the inputs that all parts of the batch share.
        parts: for each part its own inputs.
        post: how values come from stage to stage.

    Attributes:
        totals: of ``("value", i)``, and of ``("gradient", i, j)`` for the j-th term of the i-th gradient.
        once: of each stage what is the same for all parts.
        given: to each task, of what it takes what is the same for all parts.
    """

    def __init__(
        self,
        of: StageTasks,
        fixed: dict[fx.Node, Any],
        parts: Sequence[dict[fx.Node, Any]],
        post: Post,
    ) -> None:
        self.of, self.post, self.totals, self.parts = of, post, Totals(), parts
        self.kept: dict[tuple[int, int], dict[fx.Node, Any]] = {}
        self.once: dict[int, dict[fx.Node, Any]] = {}
        for stage, own in of.tasks.items():
            pre, self.once[stage] = own[PRE], {**fixed}
            if pre.run is not None:
                self.once[stage].update(zip(pre.outputs, pre.run([fixed[x] for x in pre.inputs]), strict=True))
        self.given = {at: list(map(self.once[at[1]].get, steps.task.inputs)) for at, steps in of.steps.items()}

    def action(self, kind: str, stage: int, part: int) -> None:
        """Run a task."""
        self.of.steps[kind, stage](self, self.kept.setdefault((stage, part), {}), part)

    def finish(self) -> Totals:
        """Bring the terms of each gradient together, the first stage's first."""
        terms = names_of_terms(self.of.stages)
        for name in terms:
            if name.source in self.of.tasks:
                self.post.send(name, [self.totals.sums.pop(("gradient", *name.part))])
        for name in terms:
            if name.target in self.of.tasks:
                first = "gradient", name.part[0], 0
                self.totals.sums[first] = self.totals.sums[first] + self.post.take(name)[0]
        self.post.finish()
        self.parts, self.once, self.given = (), {}, {}  # nothing needs what was given
        return self.totals
