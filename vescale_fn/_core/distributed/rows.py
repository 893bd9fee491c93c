"""The blocks of simulated ranks that are recorded as one: they lie alike in memory, and one tensor stands for all."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

Holders = tuple[int, ...]  # for each rank, which of several values it has, in the order of the ranks


class RankRow(Sequence[torch.Tensor]):
    """The blocks of all ranks, as a sequence of one tensor for each.

    Args:
        one: what stands for them: what is done with it is done with each.
        holders: which ranks hold the same.
        maker: made it, and makes others (``row``, ``own``), and what stands for one rank's block alone (``alone``).
    """

    def __init__(self, one: torch.Tensor, holders: Holders, maker: Any) -> None:
        self.one, self.holders, self._maker = one, holders, maker
        self._made: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.holders)

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[i] for i in range(*rank.indices(len(self)))]
        number = self.holders[rank]
        if number not in self._made:
            self._made[number] = self._maker.alone(self.one) if any(self.holders) else self.one
        return self._made[number]

    def own(self) -> RankRow:
        """The same, of which each rank has one of its own."""
        return self._maker.own(self.one)

    def like(self, one: torch.Tensor) -> RankRow:
        """The row for which another tensor stands, of which the same ranks hold the same."""
        return self._maker.row(one, self.holders)


def row_of(local: Any) -> RankRow | None:
    """The row that a local value is, None where it is none."""
    row = getattr(local, "blocks", None)
    return row if type(row) is RankRow else None


def numbered(keys: Iterable[Hashable]) -> Holders:
    """Which ranks have equal keys."""
    seen: dict[Any, int] = {}
    return tuple([seen.setdefault(key, len(seen)) for key in keys])


@functools.lru_cache(maxsize=4096)
def together(columns: frozenset[Holders]) -> Holders:
    """Which ranks hold the same of several things."""
    return next(iter(columns)) if len(columns) == 1 else numbered(zip(*columns, strict=True))
