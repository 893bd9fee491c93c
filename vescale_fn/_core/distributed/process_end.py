"""The end of a process that has a process group of gloo's: first its threads let go of what they hold.

Such a thread drops a collective's tensors some time after the result is there, and takes Python's lock for that. Where the
interpreter is being taken down by then, Python (before 3.14) ends the thread in the middle of C++, and that aborts the process:
"terminate called without an active exception". A run that is complete would count as failed. `dist.destroy_process_group` does
not wait for the threads of a group that anything still holds, as each mesh does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from .. import torch_internals

MOST = 2.0  # seconds; a thread that computes for longer is not waited for
LOOKS = 3  # one may see a thread wait that only waits for Python's lock, which this one has while it looks


def _at_work() -> Iterator[bool]:
    """Of each thread of gloo's whether it does something, and does not only wait for a collective."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            with open(f"/proc/self/task/{thread}/stat") as file:
                name, _, now = file.read().partition("(")[2].rpartition(") ")
            if name == torch_internals.GLOO_THREAD:
                yield now[0] != "S"


def let_go() -> None:
    """Wait until no thread of gloo's is at work, some milliseconds as a rule; for none that waits for another process."""
    if not os.path.isdir("/proc/self/task"):
        return
    late, idle = time.monotonic() + MOST, 0
    while idle < LOOKS and (found := [*_at_work()]) and time.monotonic() < late:
        idle = 0 if any(found) else idle + 1
        time.sleep(0.001)  # without Python's lock, so that a thread may take it
