"""Layouts whose plans need more memory than there is, held to it as by `jit`: values are computed again, or wait on the host.

That a layout that is fast but large computes a little again is often faster than one that is split further. It takes a while to
find out, so that only those are tried that may be the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .search.best import NothingFits
from .search.highs import OutOfTime

# Layouts, and how many where none has fitted by then: the pass that holds a plan to a memory takes tens of recordings.
_TRIES, _MOST = 2, 4


def with_repeats(solve: Callable[..., Sequence[Any]], memory: float | None) -> Sequence[Any]:
    """What a search finds within a memory, and besides the best that it finds where products may be computed again; or, where
    nothing fits without, as many as it was asked for.

    Raises:
        NothingFits: neither.
    """
    if memory is None:
        return solve(memory=None)
    try:
        found = solve(memory=memory)
    except NothingFits:
        return solve(memory=memory, again=True)
    try:
        return [*found, *solve(memory=memory, again=True, candidates=1)]
    except (NothingFits, OutOfTime):
        return found


class Holding:
    """Holds layouts to a memory, so many of them.

    Args:
        memory: the most bytes that a rank may need; None: any.
        held_to: of a layout with the price of its plan, and a number of bytes, the same with the price of a plan that needs no
            more; None where there is none.
    """

    def __init__(self, memory: float | None, held_to: Callable[[Any, int], Any]) -> None:
        self.memory, self._held_to, self._tried = memory, held_to, list[Any]()

    def some_of(self, found: list[Any]) -> None:
        """Of the layouts that do not fit, first the fastest and then the smallest, if they are faster than what fits: each that
        can be held to the memory takes its own place."""
        while self.memory is not None:
            best = min((one.price.seconds for one in found if one.fits), default=float("inf"))
            if len(self._tried) >= (_MOST if best == float("inf") else _TRIES):
                return
            over = [one for one in found if not one.fits and one not in self._tried and one.price.seconds < best]
            if not over:
                return
            smallest = bool(self._tried) and best == float("inf")
            one = min(over, key=lambda one: (one.price.peak if smallest else 0, one.price.seconds))
            self._tried.append(one)
            if (held := self._held_to(one, int(self.memory))) is not None and held.fits:
                found[found.index(one)] = held
