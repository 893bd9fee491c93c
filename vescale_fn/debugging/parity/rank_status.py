"""What each rank says of itself, told through the store of the process group.

No collective: others may still be in one of the user's program, which a rank that failed in it will never join.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ..._core import torch_internals
from ..._core.distributed.mesh import communicator_of

PATIENCE = 5.0  # seconds, for which those that can still speak are waited for, once a rank has told of a problem
PAUSE = 0.002, 0.05  # seconds between two looks: the first, the longest
_calls: dict[str, Iterator[int]] = {}  # for each set of ranks, of which all make the same


def said_by_all(mine: str, mesh: Any) -> list[str | None]:
    """What each rank of the mesh says: "" where all is well.

    None is of a rank that said nothing: for so long after another told of a problem, or within the timeout of the
    process group.
    """
    ranks = communicator_of(mesh).processes()
    if not ranks:
        return [mine] * mesh.size()
    together = ",".join(map(str, sorted(ranks)))
    store, call, said = (
        torch_internals.default_store(),
        next(_calls.setdefault(together, itertools.count())),
        dict[int, str](),
    )
    key = f"vescale_fn says {call} among {together} of"
    store.set(f"{key} {dist.get_rank()}", f".{mine}")  # some stores cannot hold nothing at all
    pause, end = PAUSE[0], time.monotonic() + torch_internals.group_timeout()
    told = False
    while True:
        for rank in ranks:
            if rank not in said and store.check([f"{key} {rank}"]):
                said[rank] = store.get(f"{key} {rank}").decode()[1:]
        if len(said) == len(ranks) or time.monotonic() > end:
            break
        if any(said.values()) and not told:
            told, end = True, min(end, time.monotonic() + PATIENCE)
        time.sleep(pause)
        pause = min(2 * pause, PAUSE[1])
    if len(said) == len(ranks):  # so all have read what was said before
        store.delete_key(f"vescale_fn says {call - 1} among {together} of {dist.get_rank()}")
    return [said.get(rank) for rank in ranks]
