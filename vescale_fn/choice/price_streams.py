"""When the calls of a plan run, by prediction: computing on one stream, and beside it collectives, one after the other on each
link, and copies to the host.

A collective that was begun (`overlap`, `prefetch`) travels while others compute, up to the call that waits for it; what is
waited for there is exposed. Any other collective is waited for where it stands.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from .._core.distributed.collectives import Collective, Start
from .._core.sharding.index_map import axes_of
from ..hardware import Hardware
from ..plan.ir import graph as plan
from ..plan.ir import host_copies
from ..plan.ir.branches import Branches
from ..plan.ir.collective_nodes import size
from ..plan.ir.loop import Loop, loop_of
from ..plan.ir.mapped import Mapped
from ..plan.ir.nested import Nested, ends
from ..plan.ir.rotated_loop import Rotated
from ..plan.ir.row_by_row import goes_through
from ..plan.ir.work import FUNCTIONS, GATHERS, tensors, work
from ..plan.passes.overlap import is_wait

_OUT, _BACK = "to the host", "from the host"
COMPUTE, WAITING = "compute", "waiting"  # what the first stream does; other streams are those of axes, and of copies
_WRITTEN_OUT = 4000  # events of a loop's other iterations that are listed one by one


class Arrival(NamedTuple):
    """When what is on its way arrives, and over what: the names of axes, or which way to the host."""

    at: float
    over: str


Begun = Arrival | None  # None for what is there


class Event(NamedTuple):
    """What a stream does from one moment to another, in seconds: a call, or waiting, and of which of the user's lines."""

    stream: str
    name: str
    line: str
    begin: float
    end: float


@dataclass
class Times:
    """Seconds, and how many calls."""

    compute: float = 0.0
    exposed: float = 0.0
    communication: float = 0.0
    calls: int = 0

    def add(self, other: Times, times: int = 1) -> None:
        """Add others, so often."""
        self.compute += times * other.compute
        self.exposed += times * other.exposed
        self.communication += times * other.communication
        self.calls += times * other.calls


@dataclass
class PassingTime:
    """What has passed.

    Args:
        hardware: that computes and sends.
        mesh: the sizes of all axes, for ranks lie row-major in that, wherever a part of it communicates.

    Attributes:
        now: how long it has computed and waited.
        lines: what the user's lines took of that.
        free: when each link, and each way to the host, is free again.
        waits: how long it waited for what came over which axes.
        events: what each stream did, in the order in which it began.
    """

    hardware: Hardware
    mesh: Mapping[str, int]
    now: float = 0.0
    lines: dict[str, Times] = field(default_factory=dict[str, Times])
    free: dict[Any, float] = field(default_factory=dict[Any, float])
    waits: dict[str, float] = field(default_factory=dict[str, float])
    events: list[Event] = field(default_factory=list[Event])

    def run(self, graph: fx.Graph, given: Sequence[Begun] = ()) -> list[Begun]:
        """All calls of a graph, in order.

        Args:
            given: of its placeholders when those arrive that are on their way.

        Returns:
            The same of its results.
        """
        places, outs = ends(graph)
        begun: dict[Any, Arrival] = {x: at for x, at in zip(places, given) if at is not None}
        for node in plan.calls(graph):
            self.call(node, begun)
        return [begun.get(x) for x in outs]

    def call(self, node: fx.Node, begun: dict[Any, Arrival]) -> None:
        """One call; `begun`: of what is on its way when it arrives."""
        if node.target is operator.getitem and node.args[0] in begun:
            begun[node] = begun[node.args[0]]
        elif isinstance(node.target, Nested):
            self._nested(node)
        elif isinstance(node.target, Start):
            begun[node] = self._sent(node)
        elif isinstance(node.target, Collective):
            self._waited(node, self._sent(node))
        elif is_wait(node):
            self._waited(node, begun[node.args[0]])
        elif (copy := host_copies.runs(node)) is not None:
            self._copied(node, copy, begun)
        else:
            self._computed(node, seconds(node, self.hardware))

    def passes(self, time: float, lines: Mapping[str, Times]) -> None:
        """What was gone through alone: as much time, and as much of each line."""
        self.now += time
        for line, times in lines.items():
            self.lines.setdefault(line, Times()).add(times)

    def computes(self, line: str, time: float) -> None:
        """A computation of a line."""
        self.passes(time, {line: Times(compute=time)})

    def receives(self, line: str, sent: float, arrives: float) -> None:
        """A message that is waited for: until it is `sent` this rank has nothing to do, then it is exposed."""
        ready = max(self.now, sent)
        exposed = max(0.0, arrives - ready)
        self.now = ready + exposed
        self.lines.setdefault(line, Times()).add(Times(exposed=exposed, communication=exposed, calls=1))

    def _line(self, node: fx.Node) -> Times:
        return self.lines.setdefault(node.meta.get("line", "") or "?", Times())

    def _computed(self, node: fx.Node, time: float) -> None:
        times = self._line(node)
        times.compute += time
        times.calls += node.target is not operator.getitem
        if time:
            self.events.append(
                Event(COMPUTE, plan.name_of(node) or node.name, _line_of(node), self.now, self.now + time)
            )
        self.now += time

    def _sent(self, node: fx.Node) -> Arrival:
        """When a collective that begins here ends: after those before it on the same link."""
        target: Any = node.target
        sizes = self.mesh if set(target.axes) <= set(self.mesh) else axes_of(target.mesh)
        time = self.hardware.collective(target.kind, size(node), sizes, target.axes)
        link = self.hardware.link(sizes, target.axes)
        begin, over = max(self.now, self.free.get(link, 0.0)), ",".join(target.axes)
        end = self.free[link] = begin + time
        times = self._line(node)
        times.communication += time
        times.calls += 1
        self.events.append(Event(over, target.kind, _line_of(node), begin, end))
        return Arrival(end, over)

    def _waited(self, node: fx.Node, coming: Arrival) -> None:
        time = coming.at - self.now
        if time > 0:
            self._line(node).exposed += time
            self.waits[coming.over] = self.waits.get(coming.over, 0.0) + time
            self.events.append(Event(COMPUTE, f"{WAITING} for {coming.over}", _line_of(node), self.now, coming.at))
            self.now = coming.at

    def _copied(self, node: fx.Node, copy: Any, begun: dict[Any, Arrival]) -> None:
        """A copy to the host, or back."""
        if copy in (host_copies.offload, host_copies.fetch):
            way, value = (_OUT, node.all_input_nodes[0]) if copy is host_copies.offload else (_BACK, node)
            begin = max(self.now, self.free.get(way, 0.0))
            end = self.free[way] = begin + plan.nbytes(plan.value(value)) / self.hardware.host
            begun[node] = Arrival(end, way)
            self.events.append(Event(way, "copy", _line_of(node), begin, end))
        elif (coming := begun.get(node.args[0])) is not None:
            self._waited(node, coming)

    def _nested(self, node: fx.Node) -> None:
        target: Any = node.target
        if isinstance(target, Loop):
            self._loop(loop_of(node))
        elif isinstance(target, Mapped):
            self._mapped(node)
        elif isinstance(target, Branches):
            self._slowest(target.bodies)
        else:  # a shared body; of a loop of unknown length, one iteration
            for body in target.bodies:
                self.run(body)

    def _loop(self, loop: Loop) -> None:
        """The first iterations, and the others as the last of these."""
        ahead = loop.bodies[0] if isinstance(loop, Rotated) and loop.begins else None
        behind = loop.bodies[-1] if isinstance(loop, Rotated) and loop.late else None
        width = len(ends(loop.body)[0]) - loop.begun
        coming = [] if ahead is None else self.run(ahead)
        left: list[Begun] = []
        shown = min(loop.length, 3)
        for i in range(shown):
            before, listed = self._copy(), len(self.events)
            here, late = coming, left
            if ahead is not None and i + 1 < loop.length:
                coming = self.run(ahead)
            outs = self.run(loop.body, [*[None] * width, *here])
            left = outs[loop.carry + len(loop.keeps) :]
            if behind is not None and i:
                self._run_late(loop, behind, late)
            if i == shown - 1 and loop.length > shown:
                left = self._repeat(before, loop.length - shown, left, self.events[listed:])
        if behind is not None and shown:
            self._run_late(loop, behind, left)

    def _run_late(self, loop: Any, behind: fx.Graph, left: Sequence[Begun]) -> None:
        self.run(behind, [*[None] * len(loop.totals), *left])

    def _mapped(self, node: fx.Node) -> None:
        """A formula of one leaf over many: its calls take all of them at once, or go through them, each a call of its own."""
        target: Any = node.target
        for call in plan.calls(target.bodies[0]):
            times = target.rows if goes_through(call) else 1
            self._computed(call, times * seconds(call, self.hardware, target.at_once(node) / times))

    def _slowest(self, bodies: Sequence[fx.Graph]) -> None:
        """Of branches the one that takes longest."""
        found: list[PassingTime] = []
        for body in bodies:
            found.append(self._copy())
            found[-1].run(body)
        slowest = max(found, key=lambda one: one.now)
        self.now, self.lines, self.free, self.waits = slowest.now, slowest.lines, slowest.free, slowest.waits
        self.events += slowest.events

    def _copy(self) -> PassingTime:
        lines = {line: Times(**vars(times)) for line, times in self.lines.items()}
        return PassingTime(self.hardware, self.mesh, self.now, lines, dict(self.free), dict(self.waits))

    def _repeat(
        self, before: PassingTime, times: int, under_way: Sequence[Begun], events: Sequence[Event]
    ) -> list[Begun]:
        """What has passed since, these events among it, passes again, so often."""
        for line, here in self.lines.items():
            was = before.lines.get(line, Times())
            gone = Times(
                here.compute - was.compute,
                here.exposed - was.exposed,
                here.communication - was.communication,
                here.calls - was.calls,
            )
            here.add(gone, times)
        for over, waited in self.waits.items():
            self.waits[over] = waited + times * (waited - before.waits.get(over, 0.0))
        once = self.now - before.now
        later = times * once
        if times * len(events) <= _WRITTEN_OUT:
            shifts = [(i + 1) * once for i in range(times)]
            again = [one._replace(begin=one.begin + by, end=one.end + by) for by in shifts for one in events]
        else:
            line = events[0].line if events else ""
            again = [Event(COMPUTE, f"{times} more iterations", line, self.now, self.now + later)]
        self.events += again
        self.now += later
        self.free = {link: end + later for link, end in self.free.items()}
        return [None if coming is None else coming._replace(at=coming.at + later) for coming in under_way]


def _line_of(node: fx.Node) -> str:
    return node.meta.get("line") or ""


def seconds(node: fx.Node, hardware: Hardware, rows: float = 1.0) -> float:
    """The seconds of a call that computes; of one of `rows` leaves at once."""
    if plan.viewed(node) and not plan.written(node):
        return 0.0 if node.target is operator.getitem else hardware.view
    todo = work(node)
    if todo.product is not None:
        n, m, k, batch = todo.product
        return hardware.matmul(n, m, k, batch, todo.dtype)
    moved = todo.moved
    if plan.name_of(node) in GATHERS:
        moved = 2 * plan.nbytes(plan.value(node))
    made = rows * sum(x.numel() for x in tensors(plan.value(node))) if plan.name_of(node) in FUNCTIONS else 0.0
    busy = hardware.compute(todo.flops, todo.dtype, rows * moved)
    return max(busy, rows * todo.drawn / hardware.draws, made / hardware.functions)
