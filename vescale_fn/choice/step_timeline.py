"""When a step computes, waits and communicates, by prediction: as text, as a drawing, and as a trace to open in Perfetto."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .._core.base.messages import count_text
from ..plan.ir.memory_use import place
from .price_streams import COMPUTE, WAITING, Event
from .price_text import time_text

_CHARACTERS = 72  # of a stream, as text
_LEFT, _WIDTH, _HEIGHT = 90.0, 800.0, 22.0  # pixels
_COLOURS = {"computing": "#4e79a7", "waiting": "#e15759", "collectives": "#59a14f", "copies": "#f28e2b"}


class StepTimeline:
    """What a step does when: one stream computes, and waits; beside it collectives travel, a stream for the axes of each.

    Args:
        name: of the step.
        mesh: its axes, as text.
        hardware: its name.
        events: in any order.
    """

    def __init__(self, name: str, mesh: str, hardware: str, events: Iterable[Event]) -> None:
        self.name, self.mesh, self.hardware = name, mesh, hardware
        self.events = tuple(sorted(events, key=lambda one: one.begin))

    @property
    def seconds(self) -> float:
        """When the last one ends."""
        return max((one.end for one in self.events), default=0.0)

    @property
    def streams(self) -> dict[str, list[Event]]:
        """The events of each stream, that of computing first."""
        found: dict[str, list[Event]] = {COMPUTE: []}
        for one in self.events:
            found.setdefault(one.stream, []).append(one)
        return found

    def text(self, characters: int = _CHARACTERS) -> str:
        """A row of characters for each stream: ``#`` computes, ``.`` waits, ``=`` travels."""
        streams = self.streams
        width = max(map(len, streams))
        rows = [
            f"  {stream:<{width}}  |{_row(events, self.seconds, characters)}| {_said(events, self.seconds)}"
            for stream, events in streams.items()
        ]
        end = time_text(self.seconds)
        head = f"{self.name} on {self.mesh}, {self.hardware}: {end} predicted (# computes, . waits, = travels)"
        return "\n".join([head, *rows, f"  {'':<{width}}  0{end:>{characters + 1}}"])

    __repr__ = text

    def html(self) -> str:
        """A drawing, in which pointing at something says what it is."""
        streams, scale = self.streams, _WIDTH / max(self.seconds, 1e-12)
        parts = list(_legend(streams))
        for n, (stream, events) in enumerate(streams.items()):
            top = 26 + n * (_HEIGHT + 6)
            said = html.escape(stream)
            parts.append(f"<text x='{_LEFT - 8}' y='{top + 15}' text-anchor='end' fill='currentColor'>{said}</text>")
            parts.append(
                f"<rect x='{_LEFT}' y='{top}' width='{_WIDTH}' height='{_HEIGHT}' fill='currentColor' opacity='.08'/>"
            )
            for begin, end, kind, told in _blocks(events, scale):
                at, wide = _LEFT + begin * scale, max((end - begin) * scale, 0.4)
                parts.append(
                    f"<rect x='{at:.1f}' y='{top}' width='{wide:.1f}' height='{_HEIGHT}' fill='{_COLOURS[kind]}'>"
                    f"<title>{html.escape(told)}</title></rect>"
                )
        bottom = 26 + len(streams) * (_HEIGHT + 6) + 10
        end = html.escape(time_text(self.seconds))
        parts.append(f"<text x='{_LEFT}' y='{bottom}' fill='currentColor'>0</text>")
        parts.append(f"<text x='{_LEFT + _WIDTH}' y='{bottom}' text-anchor='end' fill='currentColor'>{end}</text>")
        size = f"viewBox='0 0 {_LEFT + _WIDTH + 10:.0f} {bottom + 8:.0f}' style='max-width:{_LEFT + _WIDTH + 10:.0f}px'"
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='100%' {size} font-family='sans-serif' font-size='12'>"
            f"{''.join(parts)}</svg>"
        )

    _repr_html_ = html

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the events to a JSON file in the trace format of Chrome, which https://ui.perfetto.dev opens."""
        streams = {stream: n for n, stream in enumerate(self.streams)}
        named = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": n, "args": {"name": stream}}
            for stream, n in streams.items()
        ]
        shown = [
            {
                "ph": "X",
                "name": one.name,
                "pid": 0,
                "tid": streams[one.stream],
                "ts": one.begin * 1e6,
                "dur": (one.end - one.begin) * 1e6,
                "args": {"line": one.line},
            }
            for one in self.events
        ]
        what = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"{self.name} on {self.mesh}, predicted"}}
        Path(path).write_text(json.dumps({"traceEvents": [what, *named, *shown]}))


def _kind(one: Event) -> str:
    if one.stream == COMPUTE:
        return "waiting" if one.name.startswith(WAITING) else "computing"
    return "copies" if one.name == "copy" else "collectives"


_MARKS = {"computing": "#", "waiting": ".", "collectives": "=", "copies": "="}


def _row(events: Sequence[Event], seconds: float, characters: int) -> str:
    """Of each stretch of time what takes most of it; a space where that is nothing."""
    if not seconds:
        return " " * characters
    step, shares = seconds / characters, [dict[str, float]() for _ in range(characters)]
    for one in events:
        for i in range(int(one.begin / step), min(characters, int(one.end / step) + 1)):
            inside = min(one.end, (i + 1) * step) - max(one.begin, i * step)
            shares[i][_MARKS[_kind(one)]] = shares[i].get(_MARKS[_kind(one)], 0.0) + max(inside, 0.0)
    idle = [step - sum(share.values()) for share in shares]
    return "".join(max({" ": rest, **share}.items(), key=lambda one: one[1])[0] for rest, share in zip(idle, shares))


def _said(events: Sequence[Event], seconds: float) -> str:
    """How long a stream is busy, and with how much."""
    busy = sum(one.end - one.begin for one in events if _kind(one) != "waiting")
    counts: dict[str, int] = {}
    for one in events:
        if _kind(one) != "computing":
            counts[one.name] = counts.get(one.name, 0) + 1
    if events and events[0].stream == COMPUTE:
        return f"{time_text(busy)}, {100 * busy / max(seconds, 1e-12):.0f} %"
    most = sorted(counts.items(), key=lambda one: -one[1])[:2]
    more = "".join(f", {count_text(n, name.replace('_', '-'))}" for name, n in most)
    return f"{time_text(busy)}{more}"


def _legend(streams: Iterable[str]) -> Iterator[str]:
    kinds = [kind for kind in _COLOURS if kind != "copies" or any("host" in stream for stream in streams)]
    for n, kind in enumerate(kinds):
        at = _LEFT + 110 * n
        yield f"<rect x='{at}' y='4' width='12' height='12' fill='{_COLOURS[kind]}'/>"
        yield f"<text x='{at + 17}' y='14' fill='currentColor'>{kind}</text>"


def _blocks(events: Sequence[Event], scale: float) -> Iterator[tuple[float, float, str, str]]:
    """What is drawn of a stream: begin, end, kind, words; what is too small to be seen by itself is drawn together."""
    small: list[Event] = []
    for one in events:
        joins = small and _kind(small[0]) == _kind(one) and (one.begin - small[-1].end) * scale < 0.2
        if small and not (joins and (one.end - small[0].begin) * scale < 1):
            yield _block(small)
            small = []
        small.append(one)
    if small:
        yield _block(small)


def _block(some: Sequence[Event]) -> tuple[float, float, str, str]:
    first, took = some[0], sum(one.end - one.begin for one in some)
    where = f"\n{place(first.line)}" if first.line else ""
    what = first.name if len(some) == 1 else count_text(len(some), "call")
    return first.begin, some[-1].end, _kind(first), f"{what}: {time_text(took)}{where}"
