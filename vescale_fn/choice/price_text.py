"""Seconds, differences, and tables, as text."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.ir.memory_use import bytes_text


def time_text(seconds: float) -> str:
    """A time, to three figures.

    >>> time_text(0.4124), time_text(1e-5), time_text(0.0)
    ('412 ms', '10 us', '0')
    """
    if not seconds:
        return "0"
    unit, scaled = (
        ("s", seconds) if seconds >= 1 else ("ms", seconds * 1e3) if seconds >= 1e-3 else ("us", seconds * 1e6)
    )
    return f"{scaled:.3g} {unit}" if scaled < 999.5 else f"{scaled:.0f} {unit}"


def signed(seconds: float) -> str:
    """A time that is added to another.

    >>> signed(0.002), signed(-0.002), signed(1e-12)
    ('+2 ms', '-2 ms', '0')
    """
    if abs(seconds) < 1e-9:  # what is left of sums in another order
        return "0"
    return f"{'+' if seconds > 0 else '-'}{time_text(abs(seconds))}"


def more_bytes(count: float) -> str:
    """Bytes that are added to others.

    >>> more_bytes(3 << 20), more_bytes(-1024), more_bytes(0)
    ('+3.00 MiB', '-1.00 KiB', '0')
    """
    return "0" if not round(count) else f"{'+' if count > 0 else '-'}{bytes_text(round(abs(count)))}"


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0, right: int | None = None) -> list[str]:
    """A table as lines: the columns up to `left`, and from `right` on, begin at the left, the others end at the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    ranged = lambda i, text: (
        text.ljust(widths[i]) if i < left or (right is not None and i >= right) else text.rjust(widths[i])
    )
    return ["  " + "  ".join(ranged(i, text) for i, text in enumerate(row)).rstrip() for row in [head, *rows]]
