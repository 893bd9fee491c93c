"""The newest state of which copies are left, wherever they are, put together on the processes that there are now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._core.base.errors import CheckpointError
from .._core.base.messages import report
from . import memory_files
from .memory_files import Copy
from .shares import Filling, ImagePart, Table

Key = tuple[str, tuple[int, ...]]  # of a part: the leaf's name, and where in it


class Found(NamedTuple):
    """A step of which all is left: for each process that there was, who of those of now has its copy."""

    step: int
    life: str
    holders: tuple[tuple[int, ...], ...]


class Survey:
    """What is left, in the folders of all processes; each of which makes this call.

    Args:
        folder: of this process; None: it keeps nothing.
        group: as of `Copies`.
    """

    def __init__(self, folder: Path | None, group: Any) -> None:
        self._group, self._rank = group, dist.get_rank(group) if group else 0
        self._folders: list[Any] = everyone(group, None if folder is None else memory_files.identity(folder))
        beside = [i for i, other in enumerate(self._folders) if other == self._folders[self._rank]]
        mine = [] if folder is None else memory_files.copies_in(folder)
        turn = beside.index(self._rank)  # each reads its share of the copies in the folder
        good = [one for i, one in enumerate(mine) if i % len(beside) == turn and one.verified()]
        rows: list[list[Copy]] = everyone(group, good)
        self._here = {self._place(one): one for other in beside for one in rows[other]}
        self.newest = newest(
            [{self._place(one) for i in self._beside(rank) for one in rows[i]} for rank in range(len(rows))]
        )

    def _beside(self, rank: int) -> list[int]:
        return [i for i, other in enumerate(self._folders) if other == self._folders[rank]]

    @staticmethod
    def _place(one: Copy) -> tuple[int, str, int, int]:
        return one.step, one.life, one.size, one.rank

    def state(self, found: Found, like: Any) -> Any:
        """The state after that step, in the layout of `like`."""
        size = len(found.holders)
        opened = {
            rank: self._here[place].opened()
            for rank in range(size)
            if (place := (found.step, found.life, size, rank)) in self._here
        }
        speaks = {rank: table for rank, (table, _) in opened.items() if found.holders[rank][0] == self._rank}
        tables: dict[int, Table] = {}
        for row in everyone(self._group, speaks):
            tables |= row
        filling = Filling(like, "elastic")
        where = {rank: {part.key: part for part in table.parts} for rank, table in tables.items()}
        lacks = dict[int, list[Key]]()
        ready, asked = dict[Key, torch.Tensor](), set[Key]()
        for key, tensor in filling.pieces():
            if key not in ready and key not in asked:
                has = [rank for rank, parts in where.items() if key in parts]
                if not has or any(_unlike(where[rank][key], tensor) for rank in has):
                    what = "the state that was kept is another than state() gives"
                    raise CheckpointError(report("elastic", what, [f"{key[0]} at {key[1]}"]))
                near = [rank for rank in has if rank in opened]
                if near:
                    ready[key] = where[near[0]][key].of(opened[near[0]][1])
                else:
                    asked.add(key)
                    lacks.setdefault(has[self._rank % len(has)], []).append(key)
        ready |= self._brought(found, lacks, opened, where)
        for key, tensor in filling.pieces():
            tensor.copy_(ready[key])
        return filling.finished(tables[0].values)

    def _brought(
        self,
        found: Found,
        lacks: dict[int, list[Key]],
        opened: dict[int, tuple[Table, torch.Tensor]],
        where: dict[int, dict[Key, ImagePart]],
    ) -> dict[Key, torch.Tensor]:
        """What this process lacks, from those who have it; they get what they lack."""
        asked: list[dict[int, list[Key]]] = everyone(self._group, lacks)
        begun, sent, came = list[Any](), list[torch.Tensor](), dict[int, torch.Tensor]()
        for asking, rows in enumerate(asked):
            for rank, keys in rows.items():
                holder, parts = found.holders[rank][0], [where[rank][key] for key in keys]
                if holder == self._rank:
                    sent.append(torch.cat([part.bytes_in(opened[rank][1]) for part in parts]))
                    begun.append(dist.isend(sent[-1], group=self._group, group_dst=asking, tag=rank))
                elif asking == self._rank:
                    came[rank] = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)
                    begun.append(dist.irecv(came[rank], group=self._group, group_src=holder, tag=rank))
        for work in begun:
            work.wait()
        return {
            key: piece.clone().view(where[rank][key].dtype).view(where[rank][key].sizes)
            for rank, keys in lacks.items()
            for key, piece in zip(keys, came[rank].split([where[rank][key].nbytes for key in keys]), strict=True)
        }


def _unlike(part: Any, tensor: torch.Tensor) -> bool:
    """Whether a part is not of the dtype and shape of what it is to fill."""
    return part.dtype != tensor.dtype or part.sizes != tuple(tensor.shape)


def newest(have: Sequence[set[tuple[int, str, int, int]]]) -> Found | None:
    """The newest step of which there is a copy of all, by what each process has: step, life, processes, and whose of them.

    >>> newest([{(7, "a", 2, 0), (6, "a", 2, 1)}, {(6, "a", 2, 0)}])
    Found(step=6, life='a', holders=((1,), (0,)))
    """
    for step, life, size in sorted({one[:3] for row in have for one in row}, reverse=True):
        holders = tuple(
            tuple(i for i, row in enumerate(have) if (step, life, size, rank) in row) for rank in range(size)
        )
        if all(holders):
            return Found(step, life, holders)
    return None


def everyone(group: Any, mine: Any) -> list[Any]:
    """What each process gives."""
    if group is None:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found
