"""`batches`: which rows a batch has follows from the key and the step, and from nothing else.

So there is no state to save: a run that is resumed at step s asks for the batch of step s, whatever the mesh or the number of
processes, and no sample is lost or seen twice. A process reads the rows of the ranks that it plays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from .._core.arrays.array import on_device
from .._core.arrays.placement import from_local, holds, of_blocks
from .._core.base import context, tree
from .._core.base.errors import DataError
from .._core.base.front_door import public
from .._core.base.messages import described, mesh_text, report, short
from .._core.distributed.communicator import coordinates
from .._core.distributed.mesh import communicator_of
from .._core.distributed.places import resolved
from .._core.sharding.index_map import all_hold_some, axes_of, dim_indices
from .._core.sharding.layout import WHOLE, type_text
from .._core.sharding.spec import P, split_axes, validate
from ..random import key_reuse
from ..random.keys import Key, checked
from .feistel import MOST, words
from .reading import LAST, RowReader, SampleOrder

WHERE = "data.batches"


@public(WHERE)
def batches(
    dataset: Any,
    size: int,
    key: Key,
    *,
    mesh: Any = None,
    spec: Any = None,
    shuffle: bool = True,
    last_batch: str = "rollover",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
) -> Batches:
    """Read a data set in batches of which each is a function of the key and the step.

    ``batches(step)`` is the batch of a step, ``batches.starting_at(step)`` goes on from there without end, read ahead by
    workers. Neither depends on what was read before, on the mesh, or on how many processes there are.

    What is drawn while a sample is read (augmentation) follows from the key, the epoch and the sample's index: from the
    generators of torch, numpy and Python, or from such that `dataset` holds itself.

    Args:
        dataset: map-style: `torch.utils.data.Dataset`, `datasets.Dataset`, a list, anything with ``dataset[i]`` and ``len``.
            Where it has ``__getitems__``, a rank's rows are read by one call, or each by its own if that draws.
        size: how many samples a batch has, on all ranks together.
        key: one key: of the permutation, `index_shuffle` by ``vfn.random.fold_in(key, epoch)``, and of what is drawn.
        mesh: on which batches lie; all its ranks make the same calls. By default the current mesh; without one batches
            are plain.
        spec: how they lie, a `P` or a prefix tree of what `collate_fn` gives, whose first entries are the same: the axes
            that split samples. A rank reads its own samples, each leaf's other dims whole, and keeps its part; one at whose
            place (``at``) there is nothing of a batch reads one, whose shapes it needs, and no more. By default P(): every rank
            has all.
        shuffle: in another order each epoch; else as they are.
        last_batch: what becomes of the end of an epoch, where `size` does not divide it. "rollover": the batch goes on with
            the next epoch: every sample once an epoch. "discard": it is left out, other samples each epoch. "keep": a
            smaller batch.
        collate_fn: makes one tree of tensors, whose first dims are the samples, of a list of a rank's samples; torch's
            ``default_collate`` by default. It may draw random numbers where every rank has all samples.
        num_workers, pin_memory, prefetch_factor: as in torch's DataLoader, for `starting_at`.

    Raises:
        DataError: a data set that cannot be indexed; a `collate_fn` that draws, of a part of the samples; a size that leaves a
            rank without samples; a batch that has not the shapes of earlier ones.
        SpecError: a spec that does not fit the mesh or the batch.

    Source: `torch.utils.data.DataLoader` and `DistributedSampler`; `last_batch` is MXNet's; the function of the step is Grain's
    idea.

    >>> import torch, vescale_fn as vfn
    >>> batches = vfn.data.batches(torch.arange(10), 4, vfn.random.key(0))
    >>> len(batches(7)), batches.indices(7).tolist() == batches(7).tolist()
    (4, True)
    >>> epoch = torch.cat([batches.indices(step) for step in range(5)])  # two, in fact
    >>> epoch[:10].sort().values.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    key = checked(key, WHERE, use=key_reuse.FOLD)
    if isinstance(dataset, IterableDataset) or not all(hasattr(dataset, name) for name in ("__getitem__", "__len__")):
        what = f"the data set must be map-style, with dataset[i] and len(dataset), but it is {described(dataset)}"
        fix = "a map-style data set (of datasets, load_dataset(..., streaming=False)), or list(dataset) if it fits in memory"
        raise DataError(report(WHERE, what, ["which samples a step has must not depend on what was read before"], fix))
    n = len(dataset)
    if type(size) is not int or size < 1:
        raise DataError(report(WHERE, f"size must be a positive integer, but it is {described(size)}", fix="size=32"))
    if last_batch not in LAST:
        what = f"last_batch must be {', '.join(map(repr, LAST[:-1]))} or {LAST[-1]!r}, but it is {short(last_batch)}"
        raise DataError(report(WHERE, what, fix="last_batch='rollover', or no such argument"))
    if n == 0 or (last_batch == "discard" and n < size):
        what = f"the data set has {n} samples, of which no batch of {size} can be made with last_batch={last_batch!r}"
        raise DataError(
            report(WHERE, what, fix="a smaller size, or last_batch='rollover'" if n else "a data set with samples")
        )
    mesh, spec = (
        context.current_mesh() if mesh is None else context.checked_mesh(mesh, WHERE),
        P() if spec is None else spec,
    )
    order = SampleOrder(n, size, words(key), bool(shuffle), last_batch)
    options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory, "prefetch_factor": prefetch_factor}
    return Batches(dataset, order, mesh, spec, collate_fn or default_collate, options)


class Batches:
    """What `batches` gives: the batch of each step.

    Attributes:
        steps_per_epoch: how many batches an epoch has; a fraction where they roll over.
    """

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder,
        mesh: Any,
        spec: Any,
        collate: Callable[[list[Any]], Any],
        options: dict[str, Any],
    ) -> None:
        self._order, self._mesh, self._spec, self._options = order, mesh, spec, options
        names = () if mesh is None else _sample_axes(spec, mesh)
        sizes = {order.rows(step) for step in (0, -1)}
        self._sets = {rows: _row_sets(rows, mesh, names) for rows in sizes}
        self._idle = mesh is not None and not _is_held(spec, mesh)
        read = {rows: [] if self._idle else sets for rows, (sets, _) in self._sets.items()}
        self._reader = RowReader(dataset, order, collate, read)
        # by the number of rows: what is read here, and the structure and types of the arrays that ranks have made of it
        self._checked: dict[int, tuple[Any, Any, Any]] = {}

    @property
    def steps_per_epoch(self) -> float:
        order = self._order
        if order.last == "rollover":
            return order.n / order.size
        return order.n // order.size if order.last == "discard" else -(-order.n // order.size)

    def __repr__(self) -> str:
        order = self._order
        return f"batches({order.n} samples, {order.size} a step, last_batch={order.last!r})"

    def __call__(self, step: int) -> Any:
        """The batch of a step, read now."""
        step = _checked_step(step)
        if context.on_one_device():
            return self._reader.read(step, [range(self._order.rows(step))])[0]
        return self._placed(step, self._reader[step])

    def starting_at(self, step: int = 0) -> Iterator[Any]:
        """The batches of this step and those behind it, without end, read ahead by workers."""
        steps = range(_checked_step(step), MOST)
        own = torch.Generator()  # the loader draws a seed for its workers, not from the generator of the program
        found = DataLoader(self._reader, batch_size=None, sampler=steps, generator=own, **self._options)
        return map(self._placed, steps, found)

    def indices(self, step: int) -> torch.Tensor:
        """Which samples the batch of a step has, on all ranks together: int64 [size]."""
        step = _checked_step(step)
        return torch.tensor([index for _, index in self._order.samples(step, range(self._order.rows(step)))])

    def _placed(self, step: int, read: Sequence[Any]) -> Any:
        """The batch of a step, of what has been read of it here."""
        if (mesh := self._mesh) is None:
            return read[0]
        rows, watched = self._order.rows(step), context.watch() is not None
        if self._idle:
            if rows in self._checked and not watched:
                _, structure, types = self._checked[rows]
                return self._arrays(structure, [None] * len(types), types)
            read = self._reader.read(step, self._sets[rows][0])
        flat = [tree.flatten(read[i]) for i in self._sets[rows][1]]
        structure = flat[0][1]
        specs = tree.broadcast(self._spec, read[0], WHERE, "spec", "batch")
        blocks = [self._parts(spec, row) for spec, row in zip(specs, zip(*(leaves for leaves, _ in flat)))]
        seen = [other for _, other in flat], [[(x.shape, x.dtype) for x in row] for row in blocks]
        if rows not in self._checked or watched:
            local = [communicator_of(mesh).joined(row) for row in blocks]
            made = from_local(tree.unflatten(structure, local), mesh, tree.unflatten(structure, specs))
            self._checked[rows] = seen, structure, [(x.shape, x.dtype, s) for x, s in zip(tree.leaves(made), specs)]
            return made
        before, _, types = self._checked[rows]
        if seen != before:
            paths, found = tree.paths(read[0], "batch"), [type_text(*row[0], WHOLE) for row in seen[1]]
            what = f"the batch of step {step} has other leaves, shapes or dtypes than those before it"
            fix = "a collate_fn that pads to one length"
            raise DataError(report(WHERE, what, [f"{path} is {text}" for path, text in zip(paths, found)], fix))
        return self._arrays(structure, blocks, types)

    def _arrays(self, structure: Any, blocks: Sequence[Any], types: Sequence[Any]) -> Any:
        """A batch of the blocks of each leaf, whose types ranks have compared."""
        made = [
            of_blocks(row, shape, dtype, *resolved(self._mesh, spec))
            for row, (shape, dtype, spec) in zip(blocks, types, strict=True)
        ]
        return tree.unflatten(structure, made)

    def _parts(self, spec: P, read: Sequence[Any]) -> list[torch.Tensor]:
        """Of a leaf, the block of each rank played here: what it read, cut along the other dims."""
        found, axes = [], axes_of(self._mesh)
        for rank, x in zip(communicator_of(self._mesh).ranks, read):
            x = torch.as_tensor(x) if isinstance(x, np.ndarray) else x
            if not isinstance(x, torch.Tensor):
                what = f"a batch must consist of tensors, but it has {described(x)}"
                raise DataError(report(WHERE, what, fix="a collate_fn that leaves it out, or makes a tensor of it"))
            at = coordinates(self._mesh, rank)
            for dim, names in enumerate(split_axes(spec, max(x.ndim, len(spec)))):
                if dim and names and dim < x.ndim:
                    x = x[(slice(None),) * dim + (torch.tensor(dim_indices(x.shape[dim], names, axes, at)),)]
            found.append(on_device(x, self._mesh))
        return found


def _sample_axes(spec: Any, mesh: Any) -> tuple[str, ...]:
    """The axes that split samples: of all leaves the same."""
    specs: list[Any] = tree.leaves(spec)
    wrong = [one for one in specs if not isinstance(one, P)]
    first = [] if wrong else list({split_axes(one, max(1, len(one)))[0] for one in specs})
    if len(first) != 1:
        what = "the spec must be a vfn.P, or a tree of some, that split dim 0, the samples, by the same axes"
        raise DataError(report(WHERE, what, [f"it is {short(spec)}"], fix="spec=P('dp')"))
    for at in {one.at for one in specs}:
        validate(P(first[0], at=at), axes_of(mesh), 1, WHERE, "a batch", at=True)
    return first[0]


def _is_held(spec: Any, mesh: Any) -> bool:
    """Whether a rank played here has a part of a batch."""
    coords = [coordinates(mesh, rank) for rank in communicator_of(mesh).ranks]
    return any(holds(one, coord) for one in tree.leaves(spec) for coord in coords)


def _row_sets(rows: int, mesh: Any, names: tuple[str, ...]) -> tuple[list[Sequence[int]], list[int]]:
    """The different sets of rows of a batch that ranks played here have, and which each of them has."""
    if mesh is None:
        return [range(rows)], [0]
    communicator, axes = communicator_of(mesh), axes_of(mesh)
    communicator.check_takes_part()
    if not all_hold_some(rows, names, axes):
        what = (
            f"of a batch of {rows} samples, split by {', '.join(names)} on the {mesh_text(axes)}, some ranks get none"
        )
        raise DataError(report(WHERE, what, fix="a size that all ranks get a part of, and not last_batch='keep'"))
    mine = [tuple(dim_indices(rows, names, axes, coordinates(mesh, rank))) for rank in communicator.ranks]
    sets = list(dict.fromkeys(mine))
    return list(sets), [sets.index(one) for one in mine]


def _checked_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < MOST:
        what = f"the step must be an integer from 0, but it is {described(step)}"
        raise DataError(report(WHERE, what, fix="batches(step), with the number of steps done"))
    return number
