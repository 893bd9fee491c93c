"""Timelines as text, and as a drawing in which forward, backward and idle times have colours."""

from __future__ import annotations

import html
from collections.abc import Sequence

from .actions import Action, Task, actions_of
from .timed_task import TimedTask

COLOURS = {"F": "#4e79a7", "B": "#f28e2b", "W": "#59a14f", "BW": "#e15759"}
_MEANING = {
    "F": "F, forward",
    "B": "B, gradient of inputs",
    "W": "W, gradient of parameters",
    "BW": "BW, both",
}


def text(rows: Sequence[Sequence[TimedTask]]) -> str:
    """A line for each rank and a column for the time of the shortest task; ``-`` continues a task, ``.`` is idle."""
    timed = [task for row in rows for task in row]
    unit = min((t.end - t.start for t in timed if t.end > t.start), default=1)
    begin = min((t.start for t in timed), default=0)
    columns = round((max((t.end for t in timed), default=0) - begin) / unit)
    whole = any(len({action.stage for t in row for action in actions_of(t.task)}) > 1 for row in rows)
    width = max((len(_label(t.task, whole)) for t in timed), default=1)
    lines = []
    for rank, row in enumerate(rows):
        cells = ["."] * columns
        for t in row:
            first, last = round((t.start - begin) / unit), round((t.end - begin) / unit)
            cells[first:last] = [_label(t.task, whole), *["-"] * (last - first - 1)][: last - first]
        lines.append(f"rank {rank}: {' '.join(cell.ljust(width) for cell in cells)}".rstrip(" ."))
    return "\n".join(lines)


def _label(task: Task, whole: bool) -> str:
    """A task in short: with its stage where a rank has several."""
    return "&".join(str(a) if whole else f"{a.kind}{a.microbatch}" for a in actions_of(task))


def svg(rows: Sequence[Sequence[TimedTask]], width: float = 900.0, height: float = 26.0) -> str:
    """A row for each rank with a rectangle for each task; grey is idle. Hovering names the task and its times."""
    timed = [t for row in rows for t in row]
    begin, end = min((t.start for t in timed), default=0), max((t.end for t in timed), default=0)
    left, top, scale = 60.0, 26.0, width / max(end - begin, 1e-12)
    stages = {
        stage: k for row in rows for k, stage in enumerate(sorted({a.stage for t in row for a in actions_of(t.task)}))
    }
    parts = []
    for rank, row in enumerate(rows):
        y = top + rank * (height + 4)
        parts.append(f"<text x='{left - 8}' y='{y + height / 2 + 4}' text-anchor='end'>rank {rank}</text>")
        parts.append(_rect(left, y, width, height, "#e4e4e4", 1, ""))
        for t in row:
            actions = actions_of(t.task)
            x, w, h = left + (t.start - begin) * scale, (t.end - t.start) * scale, height / len(actions)
            told = f"{t.task}: {t.start:.6g} to {t.end:.6g}"
            for k, action in enumerate(actions):
                shade = max(0.45, 1 - 0.3 * stages[action.stage])  # later chunks are paler
                parts.append(_rect(x, y + k * h, w, h, COLOURS[action.kind], shade, told))
                parts.append(_number(action, x + w / 2, y + (k + 0.5) * h + 3.5, w))
    bottom = top + len(rows) * (height + 4)
    parts.append(f"<text x='{left}' y='{bottom + 12}'>{begin:.6g}</text>")
    parts.append(f"<text x='{left + width}' y='{bottom + 12}' text-anchor='end'>{end:.6g}</text>")
    used = {action.kind for t in timed for action in actions_of(t.task)}
    legend = [(COLOURS[kind], _MEANING[kind]) for kind in COLOURS if kind in used] + [("#e4e4e4", "idle")]
    for k, (colour, meaning) in enumerate(legend):
        parts.append(_rect(left + 170 * k, 6, 12, 12, colour, 1, ""))
        parts.append(f"<text x='{left + 170 * k + 16}' y='16'>{meaning}</text>")
    size = f"width='{left + width + 10:.0f}' height='{bottom + 20:.0f}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-family='sans-serif' font-size='11'>{''.join(parts)}</svg>"
    )


def html_text(rows: Sequence[Sequence[TimedTask]], below: str) -> str:
    """The drawing, and a text below it."""
    return f"{svg(rows)}<pre>{html.escape(below)}</pre>"


def _rect(x: float, y: float, width: float, height: float, colour: str, shade: float, told: str) -> str:
    title = f"<title>{html.escape(told)}</title>" if told else ""
    place = f"x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}'"
    edge = " stroke='white' stroke-width='0.5'" if told else ""
    return f"<rect {place} fill='{colour}' fill-opacity='{shade:.2f}'{edge}>{title}</rect>"


def _number(action: Action, x: float, y: float, width: float) -> str:
    """The microbatch of a task, where there is room for it."""
    if width < 7 * len(str(action.microbatch)):
        return ""
    return f"<text x='{x:.2f}' y='{y:.2f}' text-anchor='middle' fill='white' pointer-events='none'>{action.microbatch}</text>"
