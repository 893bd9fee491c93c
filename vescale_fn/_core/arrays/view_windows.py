"""Which part of a rank's block a view of an array shows: arithmetic on the view's sizes and strides, without communication.

A view of a whole array is told by its sizes, strides and offset. Taken apart into the strides of the array's own dims they
say, for each dim of the view, along which dims of the array it goes, from where and in which steps; so a rank knows which of
its elements the view shows, and a write into the view can be carried out on these.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..sharding.index_map import index_runs


class Walk(NamedTuple):
    """Along which dims of the array a dim of the view goes, and in which steps; nowhere, for one of size 1."""

    size: int
    steps: dict[int, int]


class ViewWindow(NamedTuple):
    """What a view shows of an array of `shape`: where it begins, and how its dims go on."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    walks: tuple[Walk, ...]

    def alike(self, k: int) -> int | None:
        """The dim of the array that dim `k` of the view is, all of it and in order."""
        for d, step in self.walks[k].steps.items():
            if len(self.walks[k].steps) == 1 and step == 1 and self.walks[k].size == self.shape[d]:
                return d
        return None


class WindowPiece(NamedTuple):
    """A rectangle of a view that lies in one rank's block."""

    shown: ViewWindow
    spans: tuple[slice, ...]  # for each dim of the view, which of it; all where the dim is split as the array's
    at: tuple[slice, ...]  # for each dim of the array, where in the block

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The elements of the block, as a view of it."""
        x, labels = block[self.at], list(range(block.ndim))
        for k, walk in enumerate(self.shown.walks):
            if len(walk.steps) == 2:
                a, b = walk.steps
                x = x.diagonal(0, labels.index(a), labels.index(b))
                labels = [d for d in labels if d not in (a, b)] + [-1 - k]
        kept = [
            next(iter(walk.steps)) if len(walk.steps) == 1 else -1 - k
            for k, walk in enumerate(self.shown.walks)
            if walk.steps
        ]
        for place in reversed(range(len(labels))):
            if labels[place] not in kept:
                x = x.select(place, 0)
                del labels[place]
        x = x.permute([labels.index(d) for d in kept])
        for k, walk in enumerate(self.shown.walks):
            if not walk.steps:
                x = x.unsqueeze(k)
        return x


class Place(NamedTuple):
    """Where a view of an array is in memory, on one device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def shown_by(view: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> ViewWindow | None:
    """What a view shows of an array of this shape and these strides; None where that cannot be told dim by dim.

    Args:
        view: a tensor without values whose storage stands for the array's.
    """
    dims = sorted((d for d, size in enumerate(shape) if size > 1), key=lambda d: -strides[d])
    if any(strides[a] < strides[b] * shape[b] for a, b in itertools.pairwise(dims)) or any(
        not strides[d] for d in dims
    ):
        return None  # elements overlap
    apart = functools.partial(_by_dims, dims=dims, strides=strides)
    start, walks = apart(int(view.storage_offset())), []
    last = dict(start)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        steps = apart(stride) if size > 1 else {}
        if size > 1 and (not steps or len(steps) > 2 or any(d in steps for walk in walks for d in walk.steps)):
            return None
        for d, step in steps.items():
            last[d] = last.get(d, 0) + (size - 1) * step
        walks.append(Walk(size, steps))
    if -1 in last or any(n >= shape[d] for d, n in last.items()):
        return None  # a dim of the view goes on from one row of the array to the next
    return ViewWindow(tuple(shape), tuple(start.get(d, 0) for d in range(len(shape))), tuple(walks))


def _by_dims(distance: int, dims: Sequence[int], strides: Sequence[int]) -> dict[int, int]:
    """A distance in memory as steps along these dims, the largest stride first; -1: what is left over, alone."""
    found = {}
    for d in dims:
        found[d], distance = divmod(distance, strides[d])
    return {d: n for d, n in found.items() if n} if not distance else {-1: distance}


@functools.lru_cache(maxsize=4096)
def overlap(one: Place, other: Place) -> bool:
    """Whether two views of one memory have some elements in common, and are not the same view of it."""
    views = [[(n, s) for n, s in zip(place.shape, place.stride) if n > 1] for place in (one, other)]
    ends = [place.offset + sum((n - 1) * s for n, s in dims) + 1 for place, dims in zip((one, other), views)]
    if 0 in one.shape or 0 in other.shape or one.offset >= ends[1] or other.offset >= ends[0]:
        return False
    if views[0] == views[1] and one.offset == other.offset:
        return False
    first = min(one.offset, other.offset)
    # numpy, as an op of torch would be seen by a recording
    memory = np.zeros(max(ends) - first, dtype=bool)
    as_strided = np.lib.stride_tricks.as_strided
    as_strided(memory[one.offset - first :], one.shape, one.stride)[...] = True
    return bool(as_strided(memory[other.offset - first :], other.shape, other.stride).any())


def pieces(shown: ViewWindow, held: Sequence[range | list[int]], whole: Sequence[int]) -> Iterator[WindowPiece]:
    """The rectangles of a view that lie in a block.

    Args:
        shown: what the view shows.
        held: for each dim of the array, which of its indices the block has.
        whole: the dims of the view that are split as the array's: of these the block has all that it needs.
    """
    alike = {shown.alike(k) for k in whole}
    runs = [[(0, 0, len(row))] if d in alike else list(index_runs(row)) for d, row in enumerate(held)]
    for block in itertools.product(*runs):
        spans: list[slice] = []
        at = [slice(place + s - first, place + s - first + 1) for s, (first, place, _) in zip(shown.start, block)]
        if any(
            not 0 <= s - first < n
            for d, (s, (first, _, n)) in enumerate(zip(shown.start, block))
            if not any(d in walk.steps for walk in shown.walks)
        ):
            continue
        for k, walk in enumerate(shown.walks):
            if k in whole or not walk.steps:
                spans.append(slice(None))
                at = [slice(None) if d in walk.steps else one for d, one in enumerate(at)]
                continue
            low, high = 0, walk.size
            for d, step in walk.steps.items():
                first, _, n = block[d]
                low = max(low, -(-(first - shown.start[d]) // step))
                high = min(high, -(-(first + n - shown.start[d]) // step))
            high = max(low, high)
            spans.append(slice(low, high))
            for d, step in walk.steps.items():
                first, place, _ = block[d]
                begin = place + shown.start[d] + low * step - first
                at[d] = slice(begin, begin + (high - low - 1) * step + 1, step) if high > low else slice(0, 0)
        if all(one.stop is None or one.stop > one.start for one in spans):
            yield WindowPiece(shown, tuple(spans), tuple(at))
