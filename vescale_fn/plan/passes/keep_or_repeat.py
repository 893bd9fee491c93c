"""Which values are kept across a call so that a number of bytes is never exceeded, at the least time for what is made again,
or waited for from the host.

Where there are few choices, all are tried, the fastest first. Else by Lagrange's relaxation: with a price in seconds on each
byte that is alive at some calls, and one on each second of a copy to the host, the best choice is a cheapest cut, in which a
value that is needed is bought, for its bytes by keeping it, for its copies by sending it to the host, or for its seconds by
making it again, with what that takes in turn. The least price of bytes that does is sought, for prices at different calls; what
remains is improved value by value on the true count of bytes and seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..ir.min_cut import MinCut
from .boundary import Keeping, KeptAcross

FEW = 512  # choices, which are all tried
_STEPS = 14  # prices that are tried, each a few times the one before
_HALVINGS = 5
_SWAPS = 4  # values that may each make room for another one
_WORK = 1_000_000  # calls that are counted while a choice is improved, so that a large plan takes no longer
COPIES = (0.05, 0.3, 1.0)  # seconds that a second of a copy costs: what runs beside costs less


class Weighed(NamedTuple):
    """A choice: how long everything takes, the most bytes that are alive, where that is, and what is kept."""

    seconds: float
    peak: int
    at: int
    choice: Keeping


def are_few(boundary: KeptAcross) -> bool:
    """Whether there are so few choices that all can be tried."""
    ways = 1
    for m in boundary.free:
        ways *= 1 + (m in boundary.repeats) + (m in boundary.copies)
        if ways > FEW:
            return False
    return True


def exact(boundary: KeptAcross, limit: int) -> list[Weighed]:
    """All that could be chosen, the fastest first.

    Args:
        boundary: what there is to choose.
        limit: of the bytes besides the arguments, for what is on its way to the host or from it.
    """
    free, found = sorted(boundary.free), list[Weighed]()
    for kept in (frozenset(some) for n in range(len(free) + 1) for some in itertools.combinations(free, n)):
        can = [m for m in free if m not in kept and m in boundary.copies and m in boundary.repeats]
        for sent in (frozenset(some) for n in range(len(can) + 1) for some in itertools.combinations(can, n)):
            found.append(_counted(boundary, Keeping(kept, sent), limit))
    return sorted(found, key=lambda one: (one.seconds, -len(one.choice.kept)))


def searched(boundary: KeptAcross, limit: int) -> tuple[Weighed | None, Weighed]:
    """The fastest choice that was found of at most `limit` bytes, None if none was; and the one of the fewest bytes.

    Args:
        boundary: what there is to choose.
        limit: of the bytes besides the arguments.
    """
    everything = _counted(boundary, Keeping(boundary.free), limit)
    least, best = everything, everything if everything.peak <= limit else None
    tops = {everything.at}
    for _ in range(3):
        for copies in (None, *(COPIES if boundary.copies else ())):
            for one in _priced(boundary, _Prices(boundary, tops, copies), limit):
                least = min(least, one, key=lambda one: (one.peak, one.seconds))
                if one.peak <= limit:
                    best = one if best is None else min(best, one, key=_best)
        if {least.at} <= tops:
            break
        tops = tops | {least.at}
    if best is None:
        least = _lowered(boundary, least, limit)
        best = least if least.peak <= limit else None
    return (None if best is None else _improved(boundary, best, limit)), least


def _best(one: Weighed) -> tuple[Any, ...]:
    return one.seconds, one.peak, one.at, sorted(one.choice.kept), sorted(one.choice.sent)


def _counted(boundary: KeptAcross, choice: Keeping, limit: int) -> Weighed:
    count = boundary.count(choice, limit)
    peak = max(count.live)
    return Weighed(count.seconds, peak, int(count.events.calls[count.live.index(peak)]), choice)


class _Prices:
    """What values cost that are kept or sent to the host.

    Args:
        boundary: what there is to choose.
        tops: the calls at which bytes have a price.
        copies: seconds for each second of a copy; None where nothing that can be computed again is sent.
    """

    def __init__(self, boundary: KeptAcross, tops: set[int], copies: float | None) -> None:
        self.kept, self.sent = dict[int, float](), dict[int, float]()
        for m in boundary.free:
            until = boundary.until[m]
            self.kept[m] = boundary.bytes[m] * sum(boundary.last[m] < at < until for at in tops) / len(tops)
            if m in boundary.copies and (copies is not None or m not in boundary.repeats):
                self.sent[m] = boundary.copies[m] * (copies or 1.0)


def _priced(boundary: KeptAcross, prices: _Prices, limit: int) -> Iterator[Weighed]:
    """The best choices for some prices: each several times the one before, until one does, and then between."""
    low, high, price = 0.0, None, _FIRST
    for _ in range(_STEPS):
        one = _counted(boundary, _cheapest(boundary, prices, price), limit)
        yield one
        if one.peak <= limit:
            high = price
            break
        low, price = price, price * _FACTOR
    for _ in range(_HALVINGS if high is not None else 0):
        price = (low * high) ** 0.5 if low else high / _FACTOR  # type: ignore[operator]
        one = _counted(boundary, _cheapest(boundary, prices, price), limit)
        yield one
        low, high = (low, price) if one.peak <= limit else (price, high)


_FIRST, _FACTOR = 1e-14, 4.0  # seconds for a byte


def _cheapest(boundary: KeptAcross, prices: _Prices, price: float) -> Keeping:
    """What to keep, and what to send, where bytes have a price: a cheapest cut between what there is and what is needed."""
    cut, sent, inf = MinCut(), set[int](), float("inf")
    for call, made, takes in boundary.repeatable():
        again = all(m in boundary.repeats for m in made)
        cut.edge(MinCut.SOURCE, ("call", call), boundary.seconds[call] if again else inf)
        for m in made:
            keep, send = prices.kept[m] * price, prices.sent.get(m, inf)
            sent.update((m,) if send < keep else ())
            cut.edge(("call", call), m, min(keep, send))
        for m in takes:
            cut.edge(m, ("call", call), inf)
    for m in boundary.needed:
        cut.edge(m, MinCut.SINK, inf)
    there = cut.reached()
    bought = frozenset(m for m in boundary.free if m not in there and ("call", boundary.maker[m]) in there)
    return Keeping(bought - sent, bought & sent)


def _lowered(boundary: KeptAcross, one: Weighed, limit: int) -> Weighed:
    """A choice of fewer bytes, value by value: always the change that lowers the peak most."""
    for _ in range(max(1, _WORK // (len(boundary.nodes) * max(len(boundary.free), 1) * 4))):
        if one.peak <= limit:
            break
        others = (other for m in sorted(boundary.free) for other in _others(boundary, one.choice, m))
        found = min(
            (_counted(boundary, other, limit) for other in others), key=lambda one: (one.peak, one.seconds), default=one
        )
        if found.peak >= one.peak:
            break
        one = found
    return one


def _others(boundary: KeptAcross, choice: Keeping, m: int) -> Iterator[Keeping]:
    """What else could be done with one value."""
    kept, sent = choice.kept - {m}, choice.sent - {m}
    if m not in choice.kept:
        yield Keeping(kept | {m}, sent)
    if m in boundary.copies and m not in choice.sent:
        yield Keeping(kept, sent | {m})
    if m in boundary.repeats and (m in choice.kept or m in choice.sent):
        yield Keeping(kept, sent)


def _improved(boundary: KeptAcross, one: Weighed, limit: int) -> Weighed:
    """A faster choice of no more than `limit` bytes, where one value more that is kept, or that for another one, does it; or
    one more that waits on the host."""
    left = max(64, _WORK // len(boundary.nodes))
    cost = {m: boundary.seconds[maker] for m, maker in boundary.maker.items()}
    changed = True

    def counted(choice: Keeping) -> Weighed:
        nonlocal left
        left -= 1
        return _counted(boundary, choice, limit)

    while changed and left > 0:
        changed = False
        for m in sorted(boundary.free - one.choice.kept, key=lambda m: (-cost[m], m)):
            kept, sent = one.choice.kept, one.choice.sent - {m}
            more = counted(Keeping(kept | {m}, sent))
            others = sorted(kept, key=lambda m: (cost[m], -boundary.bytes[m], m)) if more.peak > limit else ()
            swaps = (
                counted(Keeping(kept - {x} | {m}, sent))
                for x in others
                if boundary.bytes[x] >= more.peak - limit and x in boundary.repeats
            )
            away = (
                counted(other)
                for x in (m, *itertools.islice(others, _SWAPS))
                for other in _others(boundary, Keeping(kept | {m} if x != m else kept, sent), x)
                if x in boundary.copies and x in other.sent
            )
            again = [counted(Keeping(kept, sent))] if m in one.choice.sent & boundary.repeats else ()
            for found in (more, *again, *itertools.islice(swaps, _SWAPS), *away):
                if found.peak <= limit and found.seconds < one.seconds:
                    one, changed = found, True
                    break
            if left <= 0:
                break
    return one
