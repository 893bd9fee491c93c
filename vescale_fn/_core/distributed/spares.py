"""Of the processes that there are, as many as can play the ranks of `deterministic`; the others wait, as spares."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from .. import torch_internals
from . import environment, ranks
from .worker import FOLDER, LONGEST, time_of

DONE = "vescale_fn/done"


def most_usable(virtual: int, processes: int) -> int:
    """The largest number of processes, of those that there are, of which each plays as many of the ranks.

    >>> [most_usable(8, n) for n in (1, 2, 3, 7, 8, 9)]
    [1, 2, 2, 4, 8, 8]
    """
    return max(n for n in range(1, processes + 1) if virtual % n == 0)


class Spare:
    """A process that waits until the others are done."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def wait(self) -> None:
        """Wait. Where processes are lost, whoever started this one ends it, and starts it again, perhaps as no spare. `launch`
        that is told to end tells all: those that play the ranks are to finish their step before it hears of one that has ended.
        """
        if os.environ.get(FOLDER) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._store.wait([DONE], time_of(LONGEST))


class Players:
    """The processes that play the ranks, this one among them."""

    def __init__(self, store: Any = None) -> None:
        self._store = store

    def done(self) -> None:
        """Let the spares go; called by every process once all are done."""
        if self._store is not None and dist.get_rank() == 0:
            self._store.set(DONE, "")


def joined(virtual: int) -> Players | Spare:
    """Join the process group of those that play: that which is there or which the environment describes, if all of it can."""
    started = None if ranks.has_process_group() else environment.world()
    count = dist.get_world_size() if ranks.has_process_group() else started.size if started else 1
    usable = most_usable(virtual, count)
    if usable == count:
        ranks.ensure_process_group()
        return Players()
    rank, _ = ranks.ensure_process_group()
    store, backend = torch_internals.default_store(), dist.get_backend()
    most, device = torch_internals.group_timeout(), ranks.device_type()
    dist.destroy_process_group()
    if rank >= usable:
        return Spare(store)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("vescale_fn/players", store),
        rank=rank,
        world_size=usable,
        timeout=time_of(most),
        device_id=torch.device(device, torch.cuda.current_device()) if device == "cuda" else None,
    )
    return Players(store)
