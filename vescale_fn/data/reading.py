"""Which samples each step has, and how a rank's rows of them are read: what workers are sent."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from .._core.base.errors import DataError
from .._core.base.messages import report
from . import own_generators
from .feistel import MASK, of_epoch, seed, shuffled

LAST = ("rollover", "discard", "keep")  # what becomes of the end of an epoch
Sample = tuple[int, int]  # an epoch, and an index into the data set


class SampleOrder(NamedTuple):
    """The order in which the samples come.

    Attributes:
        n: how many there are.
        size: of a batch.
        key: the bits of a key.
        shuffle: whether each epoch has an order of its own.
        last: what becomes of the end of an epoch.
    """

    n: int
    size: int
    key: tuple[int, int]
    shuffle: bool
    last: str

    def rows(self, step: int) -> int:
        """How many samples the batch of a step has."""
        per_epoch = -(-self.n // self.size)
        ends = self.last == "keep" and step % per_epoch == per_epoch - 1
        return self.n - (per_epoch - 1) * self.size if ends else self.size

    def samples(self, step: int, rows: Sequence[int]) -> list[Sample]:
        """Those in some rows of the batch of a step."""
        if self.last == "rollover":
            found = [divmod(step * self.size + row, self.n) for row in rows]
        else:
            per_epoch = self.n // self.size if self.last == "discard" else -(-self.n // self.size)
            epoch, at = divmod(step, per_epoch)
            found = [(epoch, at * self.size + row) for row in rows]
        return [sample for epoch, row in groupby(found, lambda one: one[0]) for sample in self._in_order(epoch, row)]

    def _in_order(self, epoch: int, places: Iterator[Sample]) -> Iterator[Sample]:
        at = torch.tensor([place for _, place in places])
        at = shuffled(of_epoch(self.key, epoch), at, self.n) if self.shuffle else at
        return ((epoch, index) for index in at.tolist())


class RowReader(Dataset[Any]):
    """Of each step, the rows that the ranks played here need.

    Args:
        dataset: what is read.
        order: in which order.
        collate: makes one tree of a list of samples.
        row_sets: by the number of rows of a batch, the different sets of them that ranks here need.
    """

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder,
        collate: Callable[[list[Any]], Any],
        row_sets: Mapping[int, Sequence[Sequence[int]]],
    ) -> None:
        self.dataset, self.order, self.collate, self.row_sets = dataset, order, collate, row_sets
        self._draws = False  # whether reading several rows by one call has drawn

    @functools.cached_property
    def _own(self) -> list[Any]:
        """The generators that the data set and `collate` have of their own, in this process."""
        return own_generators.found_in(self.dataset, self.collate)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_own"}

    def __getitem__(self, step: int) -> list[Any]:
        return self.read(step, self.row_sets[self.order.rows(step)])

    def read(self, step: int, row_sets: Sequence[Sequence[int]]) -> list[Any]:
        """What `collate` makes of each of these sets of rows."""
        with _generators_kept(self._own):
            every = self.order.rows(step)
            return [self._collated(self.order.samples(step, rows), len(rows) == every) for rows in row_sets]

    def _collated(self, samples: Sequence[Sample], whole: bool) -> Any:
        seeds = [seed(of_epoch(self.order.key, epoch), index) for epoch, index in samples]
        found = self._together([index for _, index in samples])
        if found is None:
            found = []
            for (_, index), number in zip(samples, seeds):
                self._seed(number)
                found += self.dataset.__getitems__([index]) if self._draws else [self.dataset[index]]
        self._seed(seeds[0] ^ 1)
        before = self._drawn()
        batch = self.collate(found)
        if not whole and self._drawn() != before:  # of all samples it would draw otherwise
            what = (
                "collate_fn draws random numbers, but it has a rank's samples alone, whose number depends on the mesh"
            )
            fix = "draw while a sample is read, in dataset[i], or of the batch, with vfn.random and a key of the step"
            raise DataError(
                report("data.batches", what, fix=f"{fix}; or spec=vfn.P(), which gives every rank all samples")
            )
        return batch

    def _together(self, indices: list[int]) -> list[Any] | None:
        """The samples by one call; None where a data set has none for that, or draws there, which no other rows must change."""
        if self._draws or not getattr(self.dataset, "__getitems__", None):
            return None
        before = self._drawn()
        found = self.dataset.__getitems__(indices)
        self._draws = self._drawn() != before
        return None if self._draws else found

    def _seed(self, number: int) -> None:
        """Seed the generators that are drawn from: torch's of the CPU, numpy's and Python's, and own ones."""
        torch.default_generator.manual_seed(number)
        np.random.seed(number & MASK)
        random.seed(number)
        for i, own in enumerate(self._own, 1):
            own_generators.seed(own, number + i)

    def _drawn(self) -> Any:
        """How far the generators are."""
        _, key, *rest = np.random.get_state()
        ours = torch.get_rng_state().numpy().tobytes(), key.tobytes(), rest, random.getstate()  # type: ignore[union-attr]
        return ours, own_generators.places(self._own)


@contextlib.contextmanager
def _generators_kept(own: list[Any]) -> Iterator[None]:
    """Have the generators go on behind the block as if nothing had been drawn; those of a worker are nobody else's."""
    if get_worker_info() is not None:
        yield
        return
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate(), own_generators.kept(own)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])
        own_generators.put_back(own, kept[3])
