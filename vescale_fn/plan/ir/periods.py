"""Where a row of labels repeats itself."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_WINDOW = 4  # labels by which a place is known again
_LIKELY = 16  # periods that are tried


class Span(NamedTuple):
    """Where labels repeat themselves: from `start` to `stop`, each is the one `period` before it."""

    start: int
    stop: int
    period: int


def spans(labels: Sequence[int], many: int, smallest: int) -> Iterator[Span]:
    """Where at least `smallest` labels are repeated at least `many` times; of what overlaps, the longest span.

    >>> list(spans([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 8], 3, 2))
    [Span(start=1, stop=11, period=3)]
    """
    rest = list(labels)
    while True:
        runs = (run for period in _periods(rest, many, smallest) for run in _runs(rest, period))
        best = max(runs, key=lambda run: (run.stop - run.start, -run.period), default=Span(0, 0, 1))
        if best.stop - best.start < many * best.period:
            return
        yield best
        rest[best.start : best.stop] = range(-1 - best.start, -1 - best.stop, -1)  # equal to no other


def _periods(labels: list[int], many: int, smallest: int) -> list[int]:
    """The distances in which labels are found again most often."""
    last, gaps = dict[Any, int](), Counter[int]()
    for i, window in enumerate(zip(*(labels[i:] for i in range(_WINDOW)))):
        gaps[i - last.get(window, i)] += 1
        last[window] = i
    likely = (gap for gap, count in gaps.most_common() if gap >= smallest and count >= many - 1)
    return list(itertools.islice(likely, _LIKELY))


def _runs(labels: list[int], period: int) -> Iterator[Span]:
    start = 0
    for same, run in itertools.groupby(map(operator.eq, labels, labels[period:])):
        stop = start + sum(1 for _ in run)
        if same:
            yield Span(start, stop + period, period)
        start = stop
