"""Offsets for buffers of known lifetimes in one block of memory that is as small as can be found.

First the buffers are placed one after the other, in a few orders. What that leaves above the lower bound (the most that is
alive at once) the exact search in `packing.c` tries to take away: over several orders of preference, each for a short while
and then for longer, as it either finds a packing soon or not for very long. Nothing depends on the time it takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...random.backends.c_library import library

_BUFFER = np.dtype([("first", np.int32), ("last", np.int32), ("size", np.int64)], align=True)
_PACKED, _IMPOSSIBLE = 1, 0
_MOST = 2000  # buffers, for the search: it takes memory for each pair
_WORK = 1_000_000_000  # what all searches for one capacity may look at, roughly a second


@dataclass(frozen=True)
class Packing:
    """Where buffers lie.

    Attributes:
        offsets: int64 [buffers], in bytes.
        height: in bytes, of the block.
        least: a lower bound of it: the most that is alive at one moment.
    """

    offsets: np.ndarray
    height: int
    least: int


def pack(
    first: Iterable[int], last: Iterable[int], size: Iterable[int], capacity: int | None = None, work: int = _WORK
) -> Packing:
    """Offsets for buffers, so that no two that are alive at one moment overlap.

    Args:
        first, last: [buffers], when each is alive, both inclusive.
        size: [buffers], in bytes.
        capacity: in bytes, the height that is enough. None: as little as can be found.
        work: how much the search may look at for each of the capacities that it tries; about as many nanoseconds.
    """
    given = np.array([*zip(first, last, size, strict=True)], np.int64).reshape(-1, 3)
    buffers, moments = _at_moments(given)
    alive = _alive(buffers, moments)
    least = int(alive.max(initial=0))
    orders = _Orders(buffers, given[:, 1] - given[:, 0] + 1, alive)
    tried = [(*_best_fit(buffers[order]), order) for order in orders.all]
    packed, height, order = min(tried, key=lambda one: one[1])
    best = np.zeros_like(packed)
    best[order] = packed
    if library is None or len(given) > _MOST or work <= 0:
        return Packing(best, height, least)
    wanted = sorted({least, least + least // 500, least + least // 100}) if capacity is None else [capacity]
    for height_wanted in wanted:
        if height_wanted >= height:
            break
        offsets = _searched(buffers, moments, height_wanted, orders, work)
        if offsets is not None:
            return Packing(offsets, int((offsets + buffers["size"]).max()), least)
    return Packing(best, height, least)


def _at_moments(given: np.ndarray) -> tuple[np.ndarray, int]:
    """The buffers, with lifetimes counted in the maximal sets of them that are alive together, and how many there are."""
    events = sorted(itertools.chain(((a, 0) for a, _, _ in given.tolist()), ((b, 1) for _, b, _ in given.tolist())))
    peaks = np.array([time for (_, before), (time, ends) in itertools.pairwise(events) if ends > before], np.int64)
    buffers = np.zeros(len(given), _BUFFER)
    buffers["first"] = np.searchsorted(peaks, given[:, 0], "left")
    buffers["last"] = np.searchsorted(peaks, given[:, 1], "right") - 1
    buffers["size"] = given[:, 2]
    return buffers, len(peaks)


def _alive(buffers: np.ndarray, moments: int) -> np.ndarray:
    """How many bytes are alive at each moment."""
    change = np.zeros(moments + 1, np.int64)
    np.add.at(change, buffers["first"], buffers["size"])
    np.subtract.at(change, buffers["last"] + 1, buffers["size"])
    return np.cumsum(change)[:moments]


class _Orders:
    """Orders in which buffers are preferred: by how crowded their moments are, how long they live, how large they are.

    Attributes:
        keys: of each order three rows [buffers], the most important first; the larger are preferred.
        crowded: of each order, which row says how crowded a buffer's moments are.
        all: the buffers in each of these orders, and in some that are only good for placing them one after the other.
    """

    def __init__(self, buffers: np.ndarray, lifetime: np.ndarray, alive: np.ndarray) -> None:
        size, moments = buffers["size"], (buffers["last"] - buffers["first"] + 1).astype(np.int64)
        crowded = np.array(
            [alive[a : b + 1].max(initial=0) for a, b in zip(buffers["first"], buffers["last"])], np.int64
        )
        area, room = lifetime * size, moments * size
        orders = [
            (lifetime, area, crowded),
            (crowded, area, lifetime),
            (crowded, lifetime, area),
            (crowded, lifetime, moments),
            (room, area, crowded),
            (crowded, room, lifetime),
            (crowded, moments, room),
        ]
        self.crowded = [next(i for i, key in enumerate(keys) if key is crowded) for keys in orders]
        self.keys = [np.array(keys, np.int64) for keys in orders]
        more = [(area, lifetime), (lifetime, size), (size, lifetime), (room, lifetime)]
        self.all = [np.lexsort([-key for key in reversed(keys)]) for keys in [*orders, *more]]


def _best_fit(buffers: np.ndarray) -> tuple[np.ndarray, int]:
    """Offsets of buffers that are placed in this order, each in the tightest gap; and how high they lie."""
    buffers = np.ascontiguousarray(buffers)
    offsets, scratch = np.zeros(len(buffers), np.int64), np.zeros(len(buffers) + 1, np.int64)
    if library is not None:
        height = library.vfn_best_fit(len(buffers), buffers.ctypes.data, offsets.ctypes.data, scratch.ctypes.data)
        return offsets, int(height)
    for i, (first, last, size) in enumerate(buffers.tolist()):
        together = (buffers["first"][:i] <= last) & (buffers["last"][:i] >= first)
        below = offsets[:i][together]
        order = np.argsort(below, kind="stable")
        starts = below[order]
        tops = np.maximum.accumulate([0, *(starts + buffers["size"][:i][together][order])])
        gaps = starts - tops[:-1]
        fitting = np.where(gaps >= size, gaps, np.iinfo(np.int64).max)
        offsets[i] = tops[int(fitting.argmin())] if (gaps >= size).any() else tops[-1]
    return offsets, int((offsets + buffers["size"]).max(initial=0))


def _searched(buffers: np.ndarray, moments: int, capacity: int, orders: _Orders, work: int) -> np.ndarray | None:
    """Offsets below a capacity; None where there are none, or none was found."""
    count = len(buffers)
    left = max(work // (count + int((buffers["last"] - buffers["first"] + 1).sum())), 1)  # what one visit looks at
    offsets = np.zeros(count, np.int64)
    for turn in itertools.count():
        for keys, crowded in zip(orders.keys, orders.crowded):
            visits = min(1000 << turn, left)
            answer = library.vfn_offsets(
                count, buffers.ctypes.data, keys.ctypes.data, crowded, moments, capacity, visits, offsets.ctypes.data
            )
            if answer == _PACKED:
                return offsets
            left -= visits
            if answer == _IMPOSSIBLE or left <= 0:
                return None
    raise AssertionError("the orders go on for ever")
