"""Which values are kept across a call so that a number of bytes is never exceeded, at the least time for what is made again.

Where there are few choices, all are tried, the fastest first. Else by Lagrange's relaxation: with a price in seconds on each
byte that is alive at some calls, the best choice is a cheapest cut, in which a value that is needed is bought, for its bytes by
keeping it or for its seconds by making it again, with what that takes in turn. The least price that does is sought, for prices
at different calls; what remains is improved value by value on the true count of bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ..ir.min_cut import MinCut
from .boundary import KeptAcross

FEW = 9  # values, of which all choices are tried
_STEPS = 14  # prices that are tried, each a few times the one before
_HALVINGS = 5
_SWAPS = 4  # values that may each make room for another one
_WORK = 1_000_000  # calls that are counted while a choice is improved, so that a large plan takes no longer


class Weighed(NamedTuple):
    """A choice: how long what is repeated takes, the most bytes that are alive, where that is, and what is kept."""

    seconds: float
    peak: int
    at: int
    kept: frozenset[int]


def exact(boundary: KeptAcross) -> list[frozenset[int]]:
    """All that could be kept, the fastest first."""
    free = sorted(boundary.free)
    kept = [frozenset(some) for n in range(len(free) + 1) for some in itertools.combinations(free, n)]
    return sorted(kept, key=lambda one: (boundary.time(one), -len(one)))


def searched(boundary: KeptAcross, limit: int) -> tuple[Weighed | None, Weighed]:
    """The fastest choice that was found of at most `limit` bytes, None if none was; and the one of the fewest bytes.

    Args:
        boundary: what there is to choose.
        limit: of the bytes besides the arguments.
    """
    everything = _counted(boundary, boundary.free)
    least, best = everything, everything if everything.peak <= limit else None
    tops = {everything.at}
    for _ in range(3):
        for choice in _priced(boundary, _prices(boundary, tops), limit):
            least = min(least, choice, key=lambda one: (one.peak, one.seconds))
            if choice.peak <= limit:
                best = choice if best is None else min(best, choice)
        if {least.at} <= tops:
            break
        tops = tops | {least.at}
    if best is None:
        least = _lowered(boundary, least, limit)
        best = least if least.peak <= limit else None
    return (None if best is None else _improved(boundary, best, limit)), least


def _counted(boundary: KeptAcross, kept: frozenset[int]) -> Weighed:
    live, events = boundary.alive(kept)
    peak = max(live)
    return Weighed(boundary.time(kept), peak, events[live.index(peak)][0], kept)


def _prices(boundary: KeptAcross, tops: set[int]) -> dict[int, float]:
    """What a second's price on each byte that is alive at some calls makes for each value that is kept."""
    prices = {}
    for m in boundary.free:
        until = boundary.until[m]
        prices[m] = boundary.bytes[m] * sum(boundary.last[m] < at < until for at in tops) / len(tops)
    return prices


def _priced(boundary: KeptAcross, prices: dict[int, float], limit: int) -> Iterator[Weighed]:
    """The best choices for some prices: each several times the one before, until one does, and then between."""
    low, high, price = 0.0, None, _FIRST
    for _ in range(_STEPS):
        choice = _counted(boundary, _cheapest(boundary, prices, price))
        yield choice
        if choice.peak <= limit:
            high = price
            break
        low, price = price, price * _FACTOR
    for _ in range(_HALVINGS if high is not None else 0):
        price = (low * high) ** 0.5 if low else high / _FACTOR  # type: ignore[operator]
        choice = _counted(boundary, _cheapest(boundary, prices, price))
        yield choice
        low, high = (low, price) if choice.peak <= limit else (price, high)


_FIRST, _FACTOR = 1e-14, 4.0  # seconds for a byte


def _cheapest(boundary: KeptAcross, prices: dict[int, float], price: float) -> frozenset[int]:
    """The values to keep where bytes have a price: a cheapest cut between what there is and what is needed."""
    cut = MinCut()
    for call, made, takes in boundary.repeatable():
        cut.edge(MinCut.SOURCE, ("call", call), boundary.seconds[call])
        for m in made:
            cut.edge(("call", call), m, prices[m] * price)
        for m in takes:
            cut.edge(m, ("call", call), float("inf"))
    for m in boundary.needed:
        cut.edge(m, MinCut.SINK, float("inf"))
    there = cut.reached()
    return frozenset(m for m in boundary.free if m not in there and ("call", boundary.maker[m]) in there)


def _lowered(boundary: KeptAcross, choice: Weighed, limit: int) -> Weighed:
    """A choice of fewer bytes, value by value: always the change that lowers the peak most."""
    for _ in range(max(1, _WORK // (len(boundary.nodes) * max(len(boundary.free), 1) * 4))):
        if choice.peak <= limit:
            break
        tried = [_counted(boundary, choice.kept ^ {m}) for m in sorted(boundary.free)]
        found = min(tried, key=lambda one: (one.peak, one.seconds), default=choice)
        if found.peak >= choice.peak:
            break
        choice = found
    return choice


def _improved(boundary: KeptAcross, choice: Weighed, limit: int) -> Weighed:
    """A faster choice of no more than `limit` bytes, where one value more that is kept, or that for another one, does it."""
    left = max(64, _WORK // len(boundary.nodes))
    cost = {m: boundary.seconds[maker] for m, maker in boundary.maker.items()}
    changed = True
    while changed and left > 0:
        changed = False
        for m in sorted(boundary.free - choice.kept, key=lambda m: (-cost[m], m)):
            more = _counted(boundary, choice.kept | {m})
            left -= 1
            others = sorted(choice.kept, key=lambda m: (cost[m], -boundary.bytes[m], m)) if more.peak > limit else ()
            tried = (_counted(boundary, more.kept - {x}) for x in others if boundary.bytes[x] >= more.peak - limit)
            for found in (more, *itertools.islice(tried, _SWAPS)):
                if found.peak <= limit and found.seconds < choice.seconds:
                    choice, changed = found, True
                    break
            if left <= 0:
                break
    return choice
