"""After each step a process keeps its share of the state in memory, and a neighbour elsewhere does too, while the next runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._core.base.errors import CheckpointError
from .._core.base.messages import report
from . import memory_files
from .memory_files import File
from .shares import Share

DIGEST = 32  # bytes


def distance(places: Sequence[Any]) -> int:
    """How many places further the neighbour is, so that as many as possible have one elsewhere; 0 where all are in one place.

    >>> distance("abcd"), distance("aabb"), distance("aaaa"), distance("aab")
    (1, 2, 0, 1)
    """
    n = len(places)
    elsewhere = [sum(places[i] != places[(i + d) % n] for i in range(n)) for d in range(n)]
    return elsewhere.index(max(elsewhere))


class Copies:
    """The copies that the processes of one life keep, each in its folder.

    At any moment there is a step of which every process has covered its own copy and that of its neighbour: a file is
    written over only when all have done so for the step after it.

    Args:
        folder: of this process.
        group: of gloo's, of all of them; None where there is one.
        places: of each, what is lost together.
        life: what these processes are called, as others may have been before.
    """

    def __init__(self, folder: Path, group: Any, places: Sequence[Any], life: str, buddies: bool) -> None:
        self._folder, self._group, self._life = folder, group, life
        self._size, self._rank = (dist.get_world_size(group), dist.get_rank(group)) if group else (1, 0)
        d = distance(places) if buddies else 0
        self._to, self._source = (self._rank + d) % self._size, (self._rank - d) % self._size
        self._own, self._kept = self._files(self._rank), self._files(self._source) if d else ()
        self._later: _Thread | None = None
        self._form: Any = None
        self._whole = 0

    def _files(self, rank: int) -> tuple[File, ...]:
        return tuple(File(self._folder, self._life, rank, self._size, turn) for turn in (0, 1))

    def keep(self, step: int, state: Any) -> None:
        """Keep a copy of the state after so many steps. It is complete when this is called again, or `wait`."""
        share = Share(state, "elastic")
        self._check(share)
        self.wait()
        sizes = self._sizes(share.nbytes)  # now the copies of the step before are complete everywhere
        if self._whole == 1:
            memory_files.remove(self._folder, self._life)
        self._whole += 1
        turn = step % 2
        image = self._own[turn].uncovered(share.nbytes)
        share.write(image)
        arriving = self._kept[turn].uncovered(sizes[self._source]) if self._kept else None
        self._later = _Thread(lambda: self._complete(step, image, arriving))

    def _check(self, share: Share) -> None:
        self._form = self._form or share.table.form
        if share.table.form != self._form:
            (before, values), (now, other) = self._form, share.table.form
            differ = sorted({part[0] for part in {*before} ^ {*now}} | {name for name, _ in {*values} ^ {*other}})
            what = "step must return a state like that which it was given"
            raise CheckpointError(report("elastic", what, [f"{name} is another" for name in differ[:8]]))

    def _sizes(self, nbytes: int) -> list[int]:
        if self._group is None:
            return [nbytes]
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        dist.all_gather(found, torch.tensor([nbytes]), group=self._group)
        return [int(x) for x in found]

    def _complete(self, step: int, image: torch.Tensor, arriving: torch.Tensor | None) -> None:
        own = self._own[step % 2]
        digest = own.digest(step)
        own.cover(step, digest)
        if arriving is None:
            return
        theirs = torch.empty(DIGEST, dtype=torch.uint8)
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        begun = [
            work
            for tag, (given, taken) in enumerate([(mine, theirs), (image, arriving)])
            for work in (
                dist.isend(given, group=self._group, group_dst=self._to, tag=tag),
                dist.irecv(taken, group=self._group, group_src=self._source, tag=tag),
            )
        ]
        for work in begun:
            assert work is not None
            work.wait()
        self._kept[step % 2].cover(step, bytes(theirs.tolist()))

    def wait(self) -> None:
        """Wait until the copies that this process keeps are complete; raise what they failed with."""
        later, self._later = self._later, None
        if later is not None:
            later.result()

    def remove(self) -> None:
        """Remove them all, once every process is done."""
        self.wait()
        self._sizes(0)
        memory_files.remove(self._folder)


class _Thread(threading.Thread):
    """Does something meanwhile; a process that ends does not wait for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="copies of the state", daemon=True)
        self._work, self._error = work, None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error: BaseException | None = error

    def result(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error
