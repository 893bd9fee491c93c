"""Recordings and searches without collections of garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from .._core.base import context


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for garbage less often the more there is, but a recording makes so much, all in use, that looking took a
    quarter of its time: within the block it does not, and what the block has made it takes for old. Searches, too, whose
    structures are as many objects, take half of the time so."""
    again = context.Restored(lambda was: gc.enable() if was else None, gc.isenabled())
    with again, again:
        gc.disable()
        yield
        _grown_old()


_RECORDINGS = 4  # between two collections of all that is old
_last_full = [-1, 0]  # how many there had been, and how many recordings since


def _grown_old() -> None:
    """Take all objects for old, as if two collections had found them in use. What is garbage among them waits for a collection
    of the old ones, which Python starts by the number of those that grow old in its way: so some recordings do."""
    full = gc.get_stats()[-1]["collections"]
    if full != _last_full[0]:
        _last_full[:] = full, 0
    _last_full[1] += 1
    if _last_full[1] <= _RECORDINGS and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
