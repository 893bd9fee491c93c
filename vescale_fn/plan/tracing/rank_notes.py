"""A rank on which a recording failed before any mesh was seen, as of a function whose arguments are no arrays, cannot meet the
others to say so: it leaves a note in the store of the process group, and they look for one before they meet."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..._core import torch_internals
from ..._core.distributed.ranks import talks_to_nobody, world

PATIENCE = (
    5.0  # seconds to wait for a note or for all to come; then they meet, as that notices processes that have ended
)
SOON, LATER = 0.001, 0.05  # between two looks

# for each process group of all processes how often this one has recorded a function, and met some processes
_counts: WeakKeyDictionary[Any, Counter[Any]] = WeakKeyDictionary()


class Note(NamedTuple):
    """What a process says of a recording that failed there.

    Attributes:
        process: its rank of the world.
        reason: why the function is to run as written.
        raised: what the function, or its recording, raised instead.
    """

    process: int
    reason: str
    raised: str


class RecordingNotes:
    """The notes of one recording of a function, which is known on all processes by its name and by how many there were."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self._alone = talks_to_nobody()
        if self._alone:
            return
        name = f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', type(f).__qualname__)}"
        self._counts = _counts.setdefault(world(), Counter())
        self._counts[name] += 1
        self._key = f"vescale_fn recording {self._counts[name]} of {name}"

    def leave(self, reason: str, raised: str) -> None:
        """Say on this process, to whoever waits for it, what came of the recording."""
        if not self._alone:
            store = torch_internals.default_store()
            store.set(f"{self._key}: {dist.get_rank()}", json.dumps((reason, raised)))
            store.set(f"{self._key}: some", "1")

    def found(self, processes: Sequence[int]) -> Note | None:
        """Wait until all `processes`, this one among them, have come here; or a note of one of them, which will not come."""
        if self._alone or len(processes) < 2:
            return None
        store, members = torch_internals.default_store(), tuple(processes)
        self._counts[members] += 1
        # the second way serves where ranks record unlike functions, which they are told when they have met
        ways = f"{self._key} by {members}", f"vescale_fn meeting {self._counts[members]} of {members}"
        for way in ways:
            if store.add(way, 1) == len(members):
                store.set(f"{way}: all", "1")
        pause, end = SOON, time.monotonic() + PATIENCE
        while not any(store.check([f"{way}: all"]) for way in ways) and time.monotonic() < end:
            if store.check([f"{self._key}: some"]):
                for process in members:
                    if store.check([key := f"{self._key}: {process}"]):
                        return Note(process, *json.loads(store.get(key)))
            time.sleep(pause)
            pause = min(2 * pause, LATER)
        return None
