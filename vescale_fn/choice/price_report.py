"""What a price says: its figures, as tables and side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._core.base.errors import SpecError, TransformError
from .._core.base.messages import described, mesh_text, report
from .._core.distributed.comm_log import CommLog
from ..debugging.needless_moves import Needless
from ..hardware import Hardware
from ..plan.ir.memory_use import ARGUMENTS, MemoryUse, bytes_text, place
from . import price_drawing
from .price_streams import Event
from .price_text import columns, time_text
from .repeated import ComputedAgain
from .step_timeline import StepTimeline

_SHOWN = 10  # lines of a table


@dataclass(frozen=True)
class LinePrice:
    """What one of the user's lines costs: calls, collectives among them; seconds of computing, of waiting for collectives, of
    collectives whether waited for or not; bytes that it has made and that are alive where the most is."""

    line: str
    calls: int
    compute: float
    exposed: float
    communication: float
    bytes: int

    @property
    def seconds(self) -> float:
        """How long it computes and waits."""
        return self.compute + self.exposed


@dataclass(frozen=True)
class Traffic:
    """What one kind of collective sends over an axis, or several: calls, bytes on a rank as `comm_log` counts them, seconds."""

    axis: str
    op: str
    calls: int
    bytes: int
    seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class Price:
    """What a step costs in a layout, by prediction; made by `price`. It prints as a table, and is drawn in a notebook.

    Attributes:
        name: of the step.
        mesh: the sizes of its axes.
        hardware: that it was priced for.
        compute: seconds of computing.
        exposed: seconds in which nothing is computed, as what is needed next still travels.
        bubble: seconds of a pipeline in which the ranks that compute longest wait for other stages.
        lines: what the user's lines cost, the longest first.
        traffic: what goes over the axes, by kind of collective.
        comms: all collectives in order, as `comm_log` lists them in a run.
        memory: of one rank, over the calls.
        peak: the most bytes that a rank needs at once, arguments included, and what gloo copies while it sends.
        needless: the moves that another layout would avoid.
        repeated: what is computed again instead of being kept, and what waits on the host.
        ranks: of a step with a pipeline, or with values at coordinates of an axis, what it costs the ranks at each of them, a
            `RankPrice`. Then time, lines, traffic and comms above are those of the ranks that compute longest, and the memory
            is that of those which need most.
        stages: of a pipeline, what the tasks of each stage take, a `StagePrice`.
        exposed_by_axis: the seconds of `exposed` by what is waited for: ``"dp"``, ``"dp,tp"``, ``"from the host"``.
        events: what computes and what travels when; `timeline` draws them.
    """

    name: str
    mesh: dict[str, int]
    hardware: Hardware
    compute: float
    exposed: float
    bubble: float
    lines: tuple[LinePrice, ...]
    traffic: tuple[Traffic, ...]
    comms: CommLog
    memory: MemoryUse
    peak: int
    needless: Needless
    _again: Callable[..., Price] | None = field(default=None, repr=False)
    repeated: ComputedAgain = field(default=ComputedAgain({}, {}, 0), repr=False)
    ranks: tuple[Any, ...] = ()
    stages: tuple[Any, ...] = ()
    exposed_by_axis: dict[str, float] = field(default_factory=dict[str, float])
    events: tuple[Event, ...] = ()

    @property
    def seconds(self) -> float:
        """How long a step takes."""
        return self.compute + self.exposed + self.bubble

    @property
    def communication(self) -> float:
        """Seconds of all collectives, those that others are computed beside too."""
        return sum(row.seconds for row in self.traffic)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes on one rank by axis (``"dp"``, ``"dp,tp"``), as `comm_log` counts them: the larger of input and output."""
        return self._by_axis("bytes")

    @property
    def calls(self) -> dict[str, int]:
        """How many collectives by axis."""
        return self._by_axis("calls")

    def _by_axis(self, what: str) -> dict[str, int]:
        return by_axis(self.traffic, what)

    @property
    def fits(self) -> bool:
        """Whether a device has that much."""
        return self.peak <= self.hardware.memory

    def timeline(self) -> StepTimeline:
        """When the step computes and when it waits, and what travels over which axes meanwhile; `trace` writes it to a file.

        Raises:
            TransformError: it has a pipeline, whose ranks do different things.
        """
        if self.ranks:
            fix = "the schedule's, vfn.pipeline(loss, ...).plan(params, batch).timeline(); price.ranks has what each rank takes"
            raise TransformError(report("price.timeline", "each rank of a pipeline has a timeline of its own", fix=fix))
        return StepTimeline(self.name, mesh_text(self.mesh), self.hardware.name, self.events)

    def compare(self, *others: Any, mesh: Any = None, hardware: Any = None, **named: Any) -> Prices:
        """The same step in other layouts, beside this one.

        Args:
            others: specs, each as for `price`, or other prices.
            named: the same, with names for the table.
            mesh, hardware: of the specs; by default those of this price. On another mesh the hardware is H100s of as many nodes
                as that needs, where it is not said.

        >>> import torch, vescale_fn as vfn
        >>> from vescale_fn import P
        >>> x, w = vfn.ShapeDtype((4096, 1024), torch.bfloat16), vfn.ShapeDtype((1024, 1024), torch.bfloat16)
        >>> price = vfn.price(lambda x, w: x @ w, x, w, specs=(P("tp"), P()), mesh={"tp": 8})
        >>> columns, summed = price.compare((P("tp"), P(None, "tp")), summed=(P(None, "tp"), P("tp")))[1:]
        >>> columns.bytes, summed.bytes
        ({'tp': 2097152}, {})
        """
        rows: list[Price] = [replace(self, name="this")]
        for name, other in [*((f"other {i + 1}", x) for i, x in enumerate(others)), *named.items()]:
            if not isinstance(other, Price):
                if self._again is None:
                    what = f"{name} is {described(other)}, and this price does not know its step"
                    raise SpecError(report("price.compare", what, fix="the price of that: vfn.price(step, ...)"))
                other = self._again(other, mesh, hardware)
            rows.append(replace(other, name=name))
        return Prices(tuple(rows))

    def text(self, lines: int = _SHOWN) -> str:
        """The table.

        Args:
            lines: how many of the user's lines it shows.
        """
        waits = f"exposed communication {time_text(self.exposed)} of {time_text(self.communication)}"
        more = f", bubble {time_text(self.bubble)}" if self.bubble else ""
        limit = "" if self.fits else ", MORE THAN THERE IS"
        out = [
            f"{self.name} on {mesh_text(self.mesh)}, {self.hardware.name}: {time_text(self.seconds)} predicted",
            f"  compute {time_text(self.compute)}, {waits}{more}",
            f"  memory {bytes_text(self.peak)} of {bytes_text(int(self.hardware.memory))} at most{limit}",
        ]
        out += [f"  {told}"] if (told := self.repeated.text()) else []
        if self.ranks:
            out += [
                "",
                *_columns(["ranks", "compute", "exposed", "bubble", "peak"], list(map(_of_rank, self.ranks)), left=1),
            ]
        if self.stages:
            out += ["", *_columns(["stage", "rank", "once", "F", "B", "W", "sends"], list(map(_of_stage, self.stages)))]
        if self.traffic:
            rows = [
                [row.axis, row.op, str(row.calls), bytes_text(row.bytes), time_text(row.seconds)]
                for row in self.traffic
            ]
            out += ["", *columns(["axis", "collective", "calls", "bytes", "time"], rows, left=2)]
        if shown := self.lines[:lines]:
            rows = [
                [time_text(one.compute), time_text(one.exposed), bytes_text(one.bytes), place(one.line)]
                for one in shown
            ]
            if rest := self.lines[lines:]:
                sums = [time_text(sum(one.compute for one in rest)), time_text(sum(one.exposed for one in rest))]
                rows.append([*sums, bytes_text(sum(one.bytes for one in rest)), f"{len(rest)} other lines"])
            out += ["", *columns(["compute", "exposed", "at the peak", "line"], rows, right=3)]
        if len(self.needless):
            out += ["", repr(self.needless)]
        return "\n".join(out)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return price_drawing.html_text(self.lines, self.text())


class Prices(Sequence[Price]):
    """Prices side by side: what ``price.compare(...)`` returns. The first is what the others are compared with."""

    def __init__(self, rows: tuple[Price, ...]) -> None:
        self._rows = rows

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Price]:
        return iter(self._rows)

    def __repr__(self) -> str:
        axes = list(dict.fromkeys(axis for one in self for axis in one.bytes))
        head = ["", "time", "compute", "exposed", "bubble", "peak", *(f"over {axis}" for axis in axes), "/ first"]
        rows = []
        for one in self:
            times = [time_text(x) for x in (one.seconds, one.compute, one.exposed, one.bubble)]
            peak = bytes_text(one.peak) + ("" if one.fits else " !")
            sent = [bytes_text(one.bytes.get(axis, 0)) for axis in axes]
            rows.append([one.name, *times, peak, *sent, f"{one.seconds / max(self[0].seconds, 1e-12):.2f}"])
        out = columns(head, rows, left=1)
        return "\n".join([*out, *(["! more than a device has"] if not all(one.fits for one in self) else [])])

    def _repr_html_(self) -> str:
        return price_drawing.side_by_side(self, repr(self))


def _time(seconds: float) -> str:
    """A time, to three figures: ``412 ms``."""
    unit, scaled = (
        ("s", seconds) if seconds >= 1 else ("ms", seconds * 1e3) if seconds >= 1e-3 else ("us", seconds * 1e6)
    )
    return f"{scaled:.3g} {unit}" if scaled < 1000 else f"{scaled:.0f} {unit}"


def _of_rank(one: Any) -> list[str]:
    """What the ranks at a place have to do, as a row."""
    return [
        ", ".join(f"{axis}={i}" for axis, i in one.at.items()),
        *map(_time, (one.compute, one.exposed, one.bubble)),
        bytes_text(one.peak),
    ]


def _of_stage(one: Any) -> list[str]:
    """A stage, as a row."""
    times = {"B": one.seconds.get("BW", 0.0), **one.seconds}
    sends = bytes_text(sum(one.sends.values())) if one.sends else ""
    return [
        str(one.stage),
        str(one.rank),
        *(_time(times[kind]) if kind in times else "" for kind in ("PRE", "F", "B", "W")),
        sends,
    ]


def by_axis(traffic: Sequence[Traffic], what: str) -> dict[str, int]:
    """Calls, or bytes, by axis."""
    found: dict[str, int] = {}
    for row in traffic:
        found[row.axis] = found.get(row.axis, 0) + getattr(row, what)
    return found


def traffic_of(rows: Iterable[tuple[Any, float]]) -> tuple[Traffic, ...]:
    """What goes over each of the axes, by kind, the most bytes first: of records with the seconds that each takes."""
    found: dict[tuple[str, str], list[float]] = {}
    for record, seconds in rows:
        row = found.setdefault((record.axis, record.op), [0, 0, 0.0])
        for i, more in enumerate((1, record.bytes, seconds)):
            row[i] += more
    out = [Traffic(axis, op, int(calls), int(bytes_), time) for (axis, op), (calls, bytes_, time) in found.items()]
    return tuple(sorted(out, key=lambda row: (-row.bytes, row.axis, row.op)))


def lines_of(times: Mapping[str, Any], memory: MemoryUse) -> tuple[LinePrice, ...]:
    """What the user's lines take and hold, the longest first."""
    held = {one.line: one.bytes for one in memory.held}
    lines = [
        LinePrice(line, one.calls, one.compute, one.exposed, one.communication, held.pop(line, 0))
        for line, one in times.items()
    ]
    lines += [LinePrice(line, 0, 0.0, 0.0, 0.0, bytes_) for line, bytes_ in held.items() if line != ARGUMENTS]
    return tuple(sorted(lines, key=lambda one: -one.seconds))


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0, right: int | None = None) -> list[str]:
    """A table as lines: the columns up to `left`, and from `right` on, begin at the left, the others end at the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    ranged = lambda i, text: (
        text.ljust(widths[i]) if i < left or (right is not None and i >= right) else text.rjust(widths[i])
    )
    return ["  " + "  ".join(ranged(i, text) for i, text in enumerate(row)).rstrip() for row in [head, *rows]]
