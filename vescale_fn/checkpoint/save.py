"""save: a tree into a folder, each byte once, by all ranks at once, complete or not at all.

Three steps: the ranks agree on what there is and on who writes what (torch's own planner shares it out); each writes its
own file; the first one writes what the checkpoint says of itself and gives the folder its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultSavePlanner,
    Metadata,
    SavePlan,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from .. import context
from ..array import is_array, mesh_of, moved_together, place, spec_of
from ..errors import CheckpointError, report
from ..spec import P
from . import folders, pieces, replacing, stored, together, writing
from .background import Saving, finish_last, start
from .kinds import Leaf, fingerprint, leaves_of
from .names import named, outline


def save(path: str | os.PathLike[str], tree_: Any, *, background: bool = False) -> Saving | None:
    """Save a tree: a folder that `load` brings back on any mesh, on any number of processes, or plain.

    The folder appears complete or not at all, and takes the place of an older checkpoint in the moment in which it is
    complete. Each piece is written once, by one of the ranks that hold it, and all ranks write at the same time. It is a
    checkpoint of `torch.distributed.checkpoint`, under the names of the leaves (``params.blocks.0.w``), with checksums.

    Args:
        path: the folder to make; all ranks of the process group make this call, with the same path, on a file system
            that they share.
        tree_: any tree of tensors, arrays, keys, numpy arrays and numbers, Python numbers, strings, bytes and None, the
            same on all ranks. What is unreduced is added up first.
        background: return as soon as the values have been copied, and write meanwhile. Whatever happens to the values
            afterwards, the copy is what is saved.

    Returns:
        With ``background=True`` a `Saving`, with `wait()` and `done()`; else None. The next save waits for it, and raises
        what it failed with if nobody has waited.

    Raises:
        CheckpointError: leaves that cannot be stored, trees that differ between ranks, a folder that cannot be written;
            on all ranks alike. What was saved before is still there.

    Source: `torch.distributed.checkpoint.save` and `async_save`; Orbax.

    >>> import tempfile, torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> folder = tempfile.mkdtemp()
    >>> with vfn.simulate(4):
    ...     w = vfn.shard(torch.arange(6.0), vfn.make_mesh((4,), ("dp",)), P("dp"))
    ...     vfn.save(folder + "/last", {"w": w, "step": 3, "key": vfn.random.key(0)})
    >>> vfn.load(folder + "/last")
    {'key': Key([0, 0], threefry2x32), 'step': 3, 'w': tensor([0., 1., 2., 3., 4., 5.])}
    """
    finish_last()
    job, mine, leaves = _planned(folders.as_path(path, "save"), tree_)
    try:
        if not background:
            return job.write(together.all_ranks("save"), lambda: _items(mine, leaves))
        apart, copies = together.all_ranks("save", background=True), _copied(mine, leaves)
        return start(job.path, lambda: job.write(apart, copies))
    except BaseException:
        job.close()
        raise


@dataclass(frozen=True)
class _Job:
    """A save on which all ranks agree. It holds no values: in the background it outlives them."""

    path: Path
    folder: Path  # what `path` is called while it is being written
    writing: replacing.Writing | None  # on the first rank
    shape: Any  # the outline of the tree
    kinds: dict[str, str]  # of each leaf
    metadata: Metadata | None  # on the first rank

    def write(self, crew: together.Crew, items: Callable[[], Sequence[writing.Item]]) -> None:
        """Write what `items` gives, and finish the checkpoint when all ranks have."""

        def complete(written: list[writing.Written]) -> list[None]:
            assert self.metadata is not None
            assert self.writing is not None
            self.metadata.storage_data = {index: at for each in written for index, at in each.places.items()}
            sums = tuple(one for each in written for one in each.sums)
            files = {name: size for each in written for name, size in each.files.items()}
            with folders.failing("save", self.path):
                stored.write(self.folder, self.metadata, stored.Manifest(self.shape, self.kinds, files, sums))
            self.writing.finish()
            return [None] * crew.size

        def mine() -> writing.Written:
            return writing.write(self.folder, self.path, crew.rank, items(), "save")

        try:
            together.step(crew, "save", mine, complete)
        finally:
            self.close()

    def close(self) -> None:
        """Remove what is not finished, and let others write."""
        if self.writing is not None:
            self.writing.close()


def _planned(path: Path, tree_: Any) -> tuple[_Job, tuple[WriteItem, ...], dict[str, Leaf]]:
    """The save, what this rank is to write, and of which leaves; on the disk there is an empty folder then."""
    crew, metadata, found, shape = together.all_ranks("save"), list[Metadata](), dict[str, Leaf](), list[Any]()
    begun = list[replacing.Writing]()

    def propose() -> tuple[list[tuple[str, str, str]], SavePlan]:
        if context.body() is not None:
            raise CheckpointError(report("save", "this is the body of a shard_map, which has one rank's blocks",
                                         fix="return the values, and save them outside"))  # fmt: skip
        every, _ = named(tree_, "save", "tree")
        shape.append(outline(tree_, iter([one.name for one in every])))
        found.update((leaf.name, leaf) for leaf in leaves_of(every, "save"))
        items = [item for leaf in found.values() for item in _write_items(leaf)]
        said = [(leaf.name, leaf.path, fingerprint(leaf)) for leaf in found.values()]
        return [("", "path", path.name), *said], SavePlan(items)

    def share_out(proposals: list[tuple[list[tuple[str, str, str]], SavePlan]]) -> list[_Share]:
        _check_same([said for said, _ in proposals])
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        plans, made = planner.create_global_plan([plan for _, plan in proposals])
        made.planner_data = {leaf.name: leaf.keys for leaf in found.values()}
        metadata.append(made)
        begun.append(replacing.begin(path, "save"))
        return [_Share(begun[0].folder, tuple(plan.items)) for plan in plans]

    try:
        mine = together.step(crew, "save", propose, share_out)
    except BaseException:
        for each in begun:
            each.close()
        raise
    kinds = {leaf.name: leaf.kind for leaf in found.values()}
    first = (begun[0], metadata[0]) if begun else (None, None)
    return _Job(path, mine.folder, first[0], shape[0], kinds, first[1]), mine.items, found


class _Share(NamedTuple):
    """What one rank is to write, and where."""

    folder: Path
    items: tuple[WriteItem, ...]


def _write_items(leaf: Leaf) -> list[WriteItem]:
    """What this process could write of a leaf."""
    if not leaf.is_tensor:
        return [WriteItem(MetadataIndex(leaf.name), WriteItemType.BYTE_IO)]
    x = leaf.stored
    if is_array(x):
        x = place(x, mesh_of(x), spec_of(x), "save")  # of a raw DTensor an array
    size, properties = torch.Size(x.shape), TensorProperties(dtype=x.dtype)
    return [
        WriteItem(
            MetadataIndex(leaf.name, torch.Size(piece.offsets)),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)), properties, size
            ),
        )
        for piece in pieces.held(x)
    ]


def _items(mine: Sequence[WriteItem], leaves: dict[str, Leaf]) -> list[writing.Item]:
    """What this rank writes, with its data. Adds up what is unreduced, which all ranks do together."""
    ready = _added_up(leaves)
    held: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    out = []
    for item in mine:
        name, leaf = item.index.fqn, leaves[item.index.fqn]
        if name not in held:
            held[name] = {p.offsets: p.tensor for p in pieces.held(ready[name])} if leaf.is_tensor else {}
        data = leaf.stored if item.index.offset is None else held[name][tuple(item.index.offset)]
        out.append(writing.Item(item.index, leaf.path, data))
    return out


def _added_up(leaves: dict[str, Leaf]) -> dict[str, Any]:
    """The tensors to store, with what is unreduced added up: one collective for all that lie alike."""
    ready = {name: leaf.stored for name, leaf in leaves.items() if leaf.is_tensor}
    for name, x in ready.items():
        if is_array(x):
            ready[name] = place(x, mesh_of(x), spec_of(x), "save")
    parts = [name for name, x in ready.items() if is_array(x) and spec_of(x).unreduced]
    whole = moved_together([ready[name] for name in parts], [P(*spec_of(ready[name])) for name in parts], "save")
    return ready | dict(zip(parts, whole, strict=True))


def _copied(mine: Sequence[WriteItem], leaves: dict[str, Leaf]) -> Callable[[], Sequence[writing.Item]]:
    """The same for later, copied now. Where that fails, on this rank alone perhaps, all hear of it together."""
    failure: Exception | None = None
    copies: list[writing.Item] = []
    try:
        copies += [item._replace(data=_copy(item.data)) for item in _items(mine, leaves)]
    except Exception as error:
        failure = error

    def later() -> Sequence[writing.Item]:
        if failure is not None:
            raise failure
        return copies

    return later


def _copy(x: Any) -> Any:
    return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x


def _check_same(said: list[list[tuple[str, str, str]]]) -> None:
    """Raise unless all ranks bring the same tree."""
    first, failures = {name: (path, what) for name, path, what in said[0]}, []
    for rank, theirs in enumerate(said[1:], 1):
        other = {name: (path, what) for name, path, what in theirs}
        for name in dict.fromkeys((*first, *other)):
            path = (first.get(name) or other[name])[0]
            here, there = (found[name][1] if name in found else "nothing" for found in (first, other))
            if here != there:
                failures.append(f"{path}: rank 0 has {here}, rank {rank} has {there}")
    if failures:
        raise CheckpointError(report(
            "save", "the ranks must bring the same tree", failures,
            "the same on all ranks; what differs by rank as one array: vfn.from_local(lambda coord: ..., mesh, P(...))"
        ))  # fmt: skip
