"""Prices as a page shows them: bars of time and of memory."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from ..plan.ir.memory_use import bytes_text, place

_COMPUTE, _EXPOSED, _BUBBLE, _BYTES = "#4e79a7", "#e15759", "#bab0ac", "#f28e2b"
_WIDTH = 220.0  # of the longest bar
# Jupyter aligns cells to the right
_CELL = 'style="text-align:left;vertical-align:middle;padding:1px 8px;max-width:300px;overflow-wrap:anywhere"'


def html_text(lines: Iterable[Any], text: str, shown: int = 12) -> str:
    """Time and memory by line, and the tables."""
    some = list(lines)[:shown]
    longest, most = max((x.seconds for x in some), default=0.0), max((x.bytes for x in some), default=0)
    rows = []
    for one in some:
        time = _bar([(one.compute, _COMPUTE), (one.exposed, _EXPOSED)], longest, f"{one.seconds * 1e3:.3g} ms")
        rows.append((place(one.line), time, _bar([(one.bytes, _BYTES)], most, bytes_text(one.bytes))))
    return _table("line", rows) + _pre(text)


def side_by_side(prices: Sequence[Any], text: str) -> str:
    """Time and memory of each of some prices, and the table."""
    longest, most = max(one.seconds for one in prices), max(one.peak for one in prices)
    rows = []
    for one in prices:
        parts = [(one.compute, _COMPUTE), (one.exposed, _EXPOSED), (one.bubble, _BUBBLE)]
        time = _bar(parts, longest, f"{one.seconds * 1e3:.3g} ms")
        rows.append((one.name, time, _bar([(one.peak, _BYTES)], most, bytes_text(one.peak))))
    return _table("layout", rows) + _pre(text)


def _bar(parts: Sequence[tuple[float, str]], whole: float, said: str) -> str:
    spans = [
        f'<span style="display:inline-block;height:12px;background:{colour};width:{_WIDTH * x / whole:.1f}px"></span>'
        for x, colour in parts
        if whole > 0
    ]
    return f'<span style="white-space:nowrap" title="{html.escape(said)}">{"".join(spans)} {html.escape(said)}</span>'


def _table(what: str, rows: Sequence[tuple[str, str, str]]) -> str:
    colours = ((_COMPUTE, "compute"), (_EXPOSED, "exposed"), (_BUBBLE, "bubble"), (_BYTES, "memory"))
    legend = " ".join(f'<span style="color:{colour}">&#9632;</span> {name}' for colour, name in colours)
    titles = "".join(f"<th {_CELL}>{title}</th>" for title in (what, "time", "memory"))
    body = "".join(
        f"<tr><td {_CELL}>{html.escape(name)}</td><td {_CELL}>{time}</td><td {_CELL}>{size}</td></tr>"
        for name, time, size in rows
    )
    return f'<div>{legend}</div><table style="font-size:12px"><tr>{titles}</tr>{body}</table>'


def _pre(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"
