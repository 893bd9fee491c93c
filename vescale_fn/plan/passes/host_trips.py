"""When copies to the memory of the host begin and are waited for, so that they run beside what is computed.

One copy at a time runs each way. A value is sent as soon as it is there. What computes waits for the copy where it has come to
an end by prediction, or where its memory is needed. A value is called back so early that it is there in time, if there is room
for it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.costs import Clock


@dataclass
class Trip:
    """A value that goes to the host and comes back. Events are known by their places.

    Attributes:
        memory: of the value.
        bytes: how many they are.
        seconds: that a copy takes.
        made, last: the events that make it, and that need it last before it leaves.
        use: the event that needs it back.
        leaves, comes: the events before which its memory is free, and before which it is called back.
    """

    memory: int
    bytes: int
    seconds: float
    made: int
    last: int
    use: int
    leaves: int = 0
    comes: int = 0


def arrange(trips: Sequence[Trip], live: list[int], seconds: Sequence[float], limit: int) -> None:
    """Find out when values leave and come.

    Args:
        trips: what goes, each as short a time on the device as can be.
        live: the bytes that are alive at each event, if it is like that; changed to what is alive in the end.
        seconds: that each event takes.
        limit: of the bytes.
    """
    start = [*itertools.accumulate(seconds, initial=0.0)]
    free = late = 0.0  # when the next copy can begin; how long has been waited
    for trip in sorted(trips, key=lambda trip: trip.made):
        free = max(free, start[trip.made + 1] + late) + trip.seconds
        at = trip.last + 1
        while at < trip.use and start[at] + late < free and live[at] + trip.bytes <= limit:
            live[at] += trip.bytes
            at += 1
        trip.leaves = at
        late += max(0.0, free - start[at] - late)
    due = start[-1]
    for trip in sorted(trips, key=lambda trip: -trip.use):
        at, begin = trip.use, min(due, start[trip.use]) - _EARLY * trip.seconds
        while at > trip.leaves and start[at] > begin and live[at - 1] + trip.bytes <= limit:
            at -= 1
            live[at] += trip.bytes
        trip.comes, due = at, max(begin, start[at])


_EARLY = 1.2  # of the time that a copy takes by prediction


def total(trips: Sequence[Trip], seconds: Sequence[float], call: float) -> float:
    """The seconds that all events take, with what is waited for copies.

    Args:
        trips: what goes.
        seconds: that each event takes.
        call: that it takes to begin a copy.
    """
    clock, at = Clock(call), defaultdict[int, list[Any]](list)
    for trip in sorted(trips, key=lambda trip: trip.made):
        at[trip.made + 1].append((clock.begin, trip.memory, trip.seconds, True))
    for trip in sorted(trips, key=lambda trip: trip.use):
        at[trip.leaves].append((clock.wait, trip.memory, True))
        at[trip.comes].append((clock.begin, trip.memory, trip.seconds, False))
        at[trip.use].append((clock.wait, trip.memory, False))
    done = 0  # events, added up one by one: `sum` rounds differently from Python 3.12 on
    for event in sorted(at):
        clock.now = functools.reduce(operator.add, seconds[done:event], clock.now)
        for do, *what in at[event]:
            do(*what)
        done = event
    return functools.reduce(operator.add, seconds[done:], clock.now)
