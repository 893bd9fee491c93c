"""A pipelined function's plan as a drawing, and as a trace: when each rank runs what, and what each holds meanwhile."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence

from ..schedules import Timeline, drawing, files
from .ir.memory_use import bytes_text
from .pipeline_memory import KINDS, MemoryMoment, PipelineMemory

COLOURS = dict(zip(KINDS, ("#4e79a7", "#76b7b2", "#f28e2b", "#59a14f", "#edc948", "#e15759"), strict=True))
_LEFT, _WIDTH, _HEIGHT = 60.0, 900.0, 44.0  # as the timeline above it has them


def html_text(timeline: Timeline, memory: PipelineMemory, below: str) -> str:
    """Both drawings, and a text below them."""
    return f"{drawing.svg(timeline.rows, _WIDTH)}<br>{svg(timeline, memory)}<pre>{html.escape(below)}</pre>"


def svg(timeline: Timeline, memory: PipelineMemory) -> str:
    """What each rank holds against time, by what it is; hovering says how much it is at most."""
    begin = min((row[0].start for row in timeline.rows if row), default=0.0)
    scale, most = _WIDTH / max(timeline.makespan, 1e-12), max(memory.peaks)
    parts = []
    for k, kind in enumerate(KINDS):
        parts.append(f"<rect x='{_LEFT + 130 * k}' y='6' width='12' height='12' fill='{COLOURS[kind]}'/>")
        parts.append(f"<text x='{_LEFT + 130 * k + 16}' y='16'>{kind}</text>")
    rows = zip(memory.rows, memory.before, memory.peaks, strict=True)
    for rank, (row, before, peak) in enumerate(rows):
        bottom = 26.0 + (rank + 1) * (_HEIGHT + 6) - 6
        y = lambda size, bottom=bottom: bottom - _HEIGHT * size / max(most, 1)
        told = f"<title>rank {rank}: {bytes_text(peak)} at most</title>"
        parts.append(f"<text x='{_LEFT - 8}' y='{bottom - 18:.1f}' text-anchor='end'>rank {rank}</text>")
        parts.append(f"<text x='{_LEFT - 8}' y='{bottom - 4:.1f}' text-anchor='end'>{bytes_text(peak)}</text>")
        for upto in range(len(KINDS), 0, -1):  # what is below is drawn over it
            steps = list(_steps(before, row, KINDS[:upto]))
            points = [f"{_LEFT + (at - begin) * scale:.1f},{y(size):.1f}" for at, size in steps]
            corners = f"{_LEFT:.1f},{bottom} {' '.join(points)} {_LEFT + _WIDTH:.1f},{bottom}"
            parts.append(f"<polygon points='{corners}' fill='{COLOURS[KINDS[upto - 1]]}'>{told}</polygon>")
    size = f"width='{_LEFT + _WIDTH + 10:.0f}' height='{26 + len(memory.rows) * (_HEIGHT + 6):.0f}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-family='sans-serif' font-size='11'>{''.join(parts)}</svg>"
    )


def _steps(
    before: Mapping[str, int], row: Sequence[MemoryMoment], kinds: Sequence[str]
) -> Iterator[tuple[float, float]]:
    """Corners of what is held of some kinds: while a task runs, of all kinds its peak, and else what there is behind it."""
    held = sum(before[kind] for kind in kinds)
    for moment in row:
        inside = moment.peak if len(kinds) == len(KINDS) else held
        yield from ((moment.start, held), (moment.start, inside), (moment.end, inside))
        held = sum(moment.after[kind] for kind in kinds)
        yield moment.end, held


def trace_text(timeline: Timeline, memory: PipelineMemory) -> str:
    """The events of a timeline in seconds, with what each rank holds behind each task as counters."""
    trace = json.loads(files.trace_text(timeline.rows, 1.0))
    for rank, row in enumerate(memory.rows):
        for moment in row:
            event = {"ph": "C", "name": "memory, bytes", "pid": rank, "tid": 0, "ts": moment.end * 1e6}
            trace["traceEvents"].append({**event, "args": dict(moment.after)})
    return json.dumps(trace)
