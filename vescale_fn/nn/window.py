"""Which keys a query sees by position: a causal mask or a sliding window, over tokens that ranks share in any order."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .zigzag import runs

Runs = list[tuple[int, int]]  # first and last of neighbouring positions


@dataclass(frozen=True)
class Window:
    """The query at position i sees keys from ``i - left`` to ``i + right``; None is no limit."""

    left: int | None = None
    right: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether all keys are seen."""
        return self.left is None and self.right is None

    def sees(self, here: Any, there: Any) -> Any:
        """bool [T, S], from the positions of T queries and S keys; None if all are seen."""
        if self.is_open:
            return None
        ahead = there - here.unsqueeze(1)
        before = None if self.left is None else ahead >= -self.left
        after = None if self.right is None else ahead <= self.right
        return after if before is None else before if after is None else before & after

    def meets(self, queries: Runs, keys: Runs) -> bool:
        """Whether any of these queries sees any of these keys."""
        return any(
            (self.left is None or end - first >= -self.left) and (self.right is None or start - last <= self.right)
            for first, last in queries
            for start, end in keys
        )


def window_of(window: Any, causal: bool) -> Window:
    """The `Window` of the public arguments: a checked `window`, narrowed by `causal`."""
    left, right = (window, window) if window is None or isinstance(window, int) else window
    left, right = (None if side == -1 else side for side in (left, right))
    return Window(left, 0 if causal else right)


@functools.lru_cache(maxsize=64)
def positions_on_ranks(counts: tuple[int, ...], zigzag: int) -> tuple[np.ndarray, ...]:
    """The positions of each rank's tokens, of which it has as many as `counts` says."""
    length = sum(counts)
    order = np.concatenate([np.arange(*run) for run in (runs(length, zigzag) if zigzag else [(0, length)])])
    return tuple(np.split(order, np.cumsum(counts)[:-1]))


def filled(parts: tuple[np.ndarray, ...], value: int) -> np.ndarray:
    """[n, the longest part], with `value` after the shorter ones."""
    longest = max(map(len, parts))
    return np.stack([np.pad(part, (0, longest - len(part)), constant_values=value) for part in parts])


@functools.lru_cache(maxsize=64)
def ring_steps(window: Window, here: tuple[int, ...], there: tuple[int, ...], zigzag: int) -> tuple[int, ...]:
    """After how many turns of a ring some rank has keys that one of its queries sees; 0, its own keys, always counts."""
    n = len(here)
    queries, keys = ([_runs(part) for part in positions_on_ranks(counts, zigzag)] for counts in (here, there))
    return (0, *(s for s in range(1, n) if any(window.meets(queries[r], keys[(r - s) % n]) for r in range(n))))


def _runs(positions: np.ndarray) -> Runs:
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(run[0]), int(run[-1])) for run in np.split(positions, cuts) if len(run)]


def tensor_of(table: np.ndarray, device: Any) -> torch.Tensor:
    """A table as a tensor that is the same on all ranks, in a `shard_map` body too."""
    return torch.from_numpy(np.ascontiguousarray(table)).to(device)
