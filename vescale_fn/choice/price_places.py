"""What a step costs whose ranks do different things: the stages of a pipeline, values at coordinates of an axis."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from .._core.distributed.comm_log import CommLog
from ..debugging.needless_moves import needless
from ..hardware import Hardware
from ..plan.ir.graph import calls
from ..plan.ir.memory_use import MemoryUse
from ..plan.ir.nested import collectives_in
from ..plan.lowered import Lowered
from ..plan.plan import Plan
from ..plan.stage_results import piped_call, piped_calls
from .price_report import Price, Traffic, by_axis, lines_of, traffic_of
from .price_stages import PipedTime, StagePrice, costed
from .price_streams import Arrival, PassingTime, Times
from .repeated import ComputedAgain, repeated


@dataclass(frozen=True)
class RankPrice:
    """What a step costs the ranks at one place.

    Attributes:
        at: their coordinates on the axes of places.
        compute, exposed: as of a `Price`.
        bubble: seconds in which they wait for ranks elsewhere: for what these have not made yet, and for the end of the step.
        lines: by line what it takes.
        traffic, comms, memory, repeated: as of a `Price`.
    """

    at: Mapping[str, int]
    compute: float
    exposed: float
    bubble: float
    lines: Mapping[str, Times]
    traffic: tuple[Traffic, ...]
    comms: CommLog
    memory: MemoryUse
    repeated: ComputedAgain

    @property
    def peak(self) -> int:
        """The most bytes that each needs at once."""
        return self.memory.peak

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes by axis, as `comm_log` counts them."""
        return by_axis(self.traffic, "bytes")

    @property
    def calls(self) -> dict[str, int]:
        """How many collectives and messages by axis."""
        return by_axis(self.traffic, "calls")


def priced_by_place(
    lowered: Lowered, plan: Plan, hardware: Hardware, mesh: Mapping[str, int], again: Callable[..., Price] | None
) -> Price:
    """The price of a plan of which ranks leave different things out; the arguments are those of `priced`."""
    ranks, stages = _of_each(lowered.name, plan, hardware, mesh)
    busiest = max(ranks, key=lambda one: one.compute)
    most = max(ranks, key=lambda one: one.peak).memory
    return Price(
        lowered.name,
        dict(mesh),
        hardware,
        busiest.compute,
        busiest.exposed,
        busiest.bubble,
        lines_of(busiest.lines, most),
        busiest.traffic,
        busiest.comms,
        most,
        most.peak,
        needless(busiest.comms),
        again,
        busiest.repeated,
        ranks,
        stages,
    )


def _of_each(
    name: str, plan: Plan, hardware: Hardware, mesh: Mapping[str, int]
) -> tuple[tuple[RankPrice, ...], tuple[StagePrice, ...]]:
    """What the step costs at each place, and what the tasks of stages take."""
    plans = [Lowered(_holding(graph, at), name) for at, graph in plan.at_places]
    streams = [PassingTime(hardware, mesh) for _ in plans]
    rows = [costed(one, hardware, mesh) for one in plans]
    stages: tuple[StagePrice, ...] = ()
    todo, begun = [calls(one.graph) for one in plans], [dict[Any, Arrival]() for _ in plans]
    more = [0] * len(plans)  # rows of pipelines before
    ran = [Counter({one.graph: 1}) for one in plans]
    for _ in piped_calls(plans[0].graph):
        here = list(map(_passed, streams, todo, begun))
        piped = PipedTime(here[0].target.run.staged, streams, here[0].meta.get("line", "") or "?")
        stages += piped.stages
        for i, (node, own) in enumerate(zip(here, piped.rows, strict=True)):
            at = more[i] + _before(node)
            rows[i][at:at] = own
            more[i] += len(own)
            ran[i] += piped.ran[i]
    for one, rest, under_way in zip(streams, todo, begun):
        assert _passed(one, rest, under_way) is None
    end, found = max(one.now for one in streams), []
    for (at, _), one, one_rows, of, graphs in zip(plan.at_places, streams, rows, plans, ran):
        compute, exposed = (sum(getattr(x, what) for x in one.lines.values()) for what in ("compute", "exposed"))
        log = CommLog()
        for record, _ in one_rows:
            log.append(record)
        bubble = max(0.0, end - compute - exposed)
        again = repeated(graphs, hardware)
        found.append(RankPrice(at, compute, exposed, bubble, one.lines, traffic_of(one_rows), log, of.memory(), again))
    return tuple(found), stages


def _holding(graph: fx.Graph, at: Mapping[str, int]) -> fx.Graph:
    """What the ranks at a place run, whose pipelines hold what they do there, not what they do where that is most."""
    for node in piped_calls(graph):
        step: Any = node.target
        holds = functools.partial(step.run.held.__getitem__, at[step.run.staged.along.axis])
        node.target = replace(step, holds=holds)
    return graph


def _passed(stream: PassingTime, todo: Iterator[fx.Node], begun: dict[Any, Arrival]) -> Any:
    """Go on to the next pipeline, or to the end."""
    for node in todo:
        if piped_call(node) is not None:
            return node
        stream.call(node, begun)
    return None


def _before(node: fx.Node) -> int:
    """How many collectives of a graph run before a call."""
    first = itertools.takewhile(lambda one: one is not node, calls(node.graph))
    return sum(times for one in first for _, times, _ in collectives_in(one))
