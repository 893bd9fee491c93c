"""save: a tree into a folder, each byte once, by all ranks at once, complete or not at all.

Three steps: the ranks agree on what there is and on who writes what; each writes its own file; the first one writes what
the checkpoint says of itself and gives the folder its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._core.arrays.array import mesh_of, place, spec_of
from .._core.base import context
from .._core.base.errors import CheckpointError
from .._core.base.fingerprint import fingerprint
from .._core.base.front_door import public
from .._core.base.messages import report
from . import all_ranks, atomic_folder, chunks, manifest, paths, shard_files
from .async_save import Saving, finish_last, start
from .leaf_kinds import Leaf, leaves_of, same_on_all_ranks
from .names import named, outline
from .stored_leaves import Chunk, Stored, uncollected


@public("save")
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

    Of an older checkpoint only its own files go; others in its folder stay. A folder that is no checkpoint of vescale_fn, or
    holds checkpoints of its own, is not replaced.

    Raises:
        CheckpointError: leaves that cannot be stored, trees that differ between ranks, a folder that cannot be written or
            is not replaced, another process or thread that is writing there; on all ranks alike. What was saved before is
            still there.

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
    with uncollected():
        return _save(paths.as_path(path, "save"), tree_, background)


def _save(path: Path, tree_: Any, background: bool) -> Saving | None:
    job, mine, leaves, held = _planned(path, tree_)
    try:
        if not background:
            return job.write(all_ranks.all_ranks("save"), lambda: _items(mine, leaves, held))
        apart, copies = all_ranks.all_ranks("save", background=True), _copied(mine, leaves, held)
        return start(job.path, job.hand_over, lambda: job.write(apart, copies))
    except BaseException:
        job.close()
        raise


class _Part(NamedTuple):
    """A box of a leaf, or a whole Python value."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int


_Held = dict[str, dict[tuple[int, ...], chunks.Piece]]  # of each tensor, by their offsets


class _Share(NamedTuple):
    """What one rank is to write, and where."""

    folder: Path
    parts: list[_Part]


_Said = list[tuple[str, str, str]]  # of each leaf its name, its path, and what must be the same on all ranks


@dataclass(frozen=True)
class _Job:
    """A save on which all ranks agree. It holds no values: in the background it outlives them."""

    path: Path
    folder: Path  # what `path` is called while it is being written
    writing: atomic_folder.Writing | None  # on the first rank
    shape: Any  # the outline of the tree
    leaves: tuple[Stored, ...]  # still without pieces
    keys: dict[str, tuple[str, ...]]  # their names in parts
    saved_by: dict[str, Any]  # the fingerprint of this process

    def write(self, crew: all_ranks.Crew, items: Callable[[], Sequence[shard_files.Item]]) -> None:
        """Write what `items` gives, and finish the checkpoint when all ranks have."""

        def complete(written: list[shard_files.Written]) -> list[None]:
            assert self.writing is not None
            chunks: dict[str, list[Chunk]] = {}
            for each in written:
                for name, chunk in each.chunks:
                    chunks.setdefault(name, []).append(chunk)
            files = {name: size for each in written for name, size in each.files.items()}
            leaves = [one._replace(chunks=tuple(sorted(chunks[one.name]))) for one in self.leaves]
            with paths.failing("save", self.path), uncollected():
                manifest.write(self.folder, leaves, self.shape, files, self.keys, self.saved_by)
            self.writing.finish()
            return [None] * crew.size

        def mine() -> shard_files.Written:
            return shard_files.write(self.folder, self.path, crew.rank, items(), "save")

        try:
            all_ranks.step(crew, "save", mine, complete)
        finally:
            self.close()

    def hand_over(self) -> bool:
        """Let the thread that calls this write it; False if it has been closed."""
        return self.writing is None or self.writing.hand_over()

    def close(self) -> None:
        """Remove what is not finished, and let others write; no more where another thread writes it."""
        if self.writing is not None:
            self.writing.close()


def _planned(path: Path, tree_: Any) -> tuple[_Job, Sequence[_Part], dict[str, Leaf], _Held]:
    """The save, what this rank is to write, of which leaves, and the pieces of them that it has; on the disk there is an
    empty folder then."""
    crew, found, shape = all_ranks.all_ranks("save"), dict[str, Leaf](), list[Any]()
    held: _Held = {}
    begun = list[atomic_folder.Writing]()

    def propose() -> tuple[_Said, list[_Part]]:
        if context.body() is not None:
            raise CheckpointError(
                report(
                    "save",
                    "this is the body of a shard_map, which has one rank's blocks",
                    fix="return the values, and save them outside",
                )
            )
        every, _ = named(tree_, "save", "tree")
        shape.append(outline(tree_, iter([one.name for one in every])))
        found.update((leaf.name, leaf) for leaf in leaves_of(every, "save"))
        said = [(leaf.name, leaf.path, same_on_all_ranks(leaf)) for leaf in found.values()] if crew.size > 1 else []
        parts = list[_Part]()
        for leaf in found.values():
            if not leaf.is_tensor:
                parts.append(_Part(leaf.name, (), (), 0))
                continue
            held[leaf.name] = _pieces(leaf.stored)
            parts += [
                _Part(leaf.name, piece.offsets, piece.sizes, piece.tensor.nbytes) for piece in held[leaf.name].values()
            ]
        return [("", "path", path.name), *said], parts

    def share_out(proposals: list[tuple[_Said, list[_Part]]]) -> list[_Share]:
        _check_same([said for said, _ in proposals])
        shares = _shared_out([parts for _, parts in proposals])
        begun.append(atomic_folder.begin(path, "save"))
        return [_Share(begun[0].folder, parts) for parts in shares]

    try:
        mine = all_ranks.step(crew, "save", propose, share_out)
    except BaseException:
        for each in begun:
            each.close()
        raise
    leaves = tuple(
        Stored(leaf.name, leaf.kind, leaf.stored.dtype, tuple(leaf.stored.shape), ())
        if leaf.is_tensor
        else Stored(leaf.name, leaf.kind, None, None, ())
        for leaf in found.values()
    )
    keys = {leaf.name: leaf.keys for leaf in found.values()}
    job = _Job(path, mine.folder, begun[0] if begun else None, shape[0], leaves, keys, fingerprint())
    return job, mine.parts, found, held


def _pieces(x: Any) -> dict[tuple[int, ...], chunks.Piece]:
    """The pieces that this process has of a tensor, by their offsets."""
    if not chunks.is_plain(x):
        x = place(x, mesh_of(x), spec_of(x), "save")  # of a raw DTensor an array
    return {piece.offsets: piece for piece in chunks.held(x)}


def _shared_out(proposals: Sequence[Sequence[_Part]]) -> list[list[_Part]]:
    """What each rank writes: each part once, by that rank of those that hold it which has the least to write so far."""
    holders: dict[_Part, list[int]] = {}
    for rank, parts in enumerate(proposals):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    shares: list[list[_Part]] = [[] for _ in proposals]
    loads = [0] * len(proposals)
    for part, ranks in sorted(holders.items(), key=lambda each: len(each[1])):  # first those that leave no choice
        rank = min(ranks, key=loads.__getitem__)
        loads[rank] += part.nbytes
        shares[rank].append(part)
    return shares


def _items(mine: Sequence[_Part], leaves: dict[str, Leaf], held: _Held) -> list[shard_files.Item]:
    """What this rank writes, with its data. Adds up what is unreduced, which all ranks do together."""
    held = held | _added_up(leaves)
    return [
        shard_files.Item(
            name, leaves[name].path, offsets, sizes, held[name][offsets].tensor if name in held else leaves[name].stored
        )
        for name, offsets, sizes, _ in mine
    ]


def _added_up(leaves: dict[str, Leaf]) -> _Held:
    """The pieces of the tensors that are unreduced, added up."""
    arrays = {name: leaf.stored for name, leaf in leaves.items() if leaf.is_tensor and not chunks.is_plain(leaf.stored)}
    unreduced = {name: x for name, x in arrays.items() if spec_of(x).unreduced}
    return {name: _pieces(x) for name, x in chunks.added_up(unreduced, "save").items()}


def _copied(mine: Sequence[_Part], leaves: dict[str, Leaf], held: _Held) -> Callable[[], Sequence[shard_files.Item]]:
    """The same for later, copied now. Where that fails, on this rank alone perhaps, all hear of it together."""
    failure: Exception | None = None
    copies: list[shard_files.Item] = []
    try:
        copies += [item._replace(data=_copy(item.data)) for item in _items(mine, leaves, held)]
    except Exception as error:
        failure = error

    def later() -> Sequence[shard_files.Item]:
        if failure is not None:
            raise failure
        return copies

    return later


def _copy(x: Any) -> Any:
    return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x


def _check_same(said: list[_Said]) -> None:
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
        raise CheckpointError(
            report(
                "save",
                "the ranks must bring the same tree",
                failures,
                "the same on all ranks; what differs by rank as one array: vfn.from_local(lambda coord: ..., mesh, P(...))",
            )
        )
