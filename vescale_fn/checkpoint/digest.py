"""digest: one sha256 of the bits of a whole tree, the same however it lies."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._core import torch_internals
from .._core.arrays.array import is_array, mesh_of, spec_of
from .._core.base import context, tree
from .._core.base.errors import CheckpointError, DivergenceError
from .._core.base.front_door import public
from .._core.base.messages import report
from .._core.distributed import collectives
from .._core.distributed.communicator import Communicator, coordinates
from .._core.distributed.mesh import communicator_of
from .._core.distributed.places import is_elsewhere, place_of, whole_mesh
from .._core.sharding.index_map import axes_of, local_indices
from .._core.sharding.spec import split_axes
from . import block_sums, chunks
from .leaf_kinds import Leaf, leaves_of, same_on_all_ranks
from .names import named, outline


@public("digest")
def digest(tree_: Any) -> str:
    """A sha256 of a tree's bits: the same on every mesh, under every spec, on one device.

    Equal are what `save` would store and `load` bring back equal: the shape of the tree, with the names of its leaves, and of
    each leaf its kind, dtype, shape and bits. NaNs with other bits differ, and so do 0.0 and -0.0. The order of a
    dictionary's keys is no part of it.

    Nothing is gathered: each rank reads what it holds, and the ranks add up 32 bytes for each MiB of the whole value. What
    is unreduced is added up first, which moves it. Ranks that hold copies of the same part compare what they make of them.

    How strong: the hash is a sha256 of checksums, and these are sums, because ranks may hold any part of a block. Values that
    differ by an accident, whichever, get one digest with a probability of 2**-128 at most. Someone who wants to can make
    values that do: it tells of errors, and not of attacks (`checkpoint/block_sums.py` has the formula).

    Args:
        tree_: what `save` takes: any tree of tensors, arrays, keys, numpy arrays and numbers, Python numbers, strings,
            bytes and None. Where there are arrays in it, all ranks of their mesh make this call, with the same tree;
            else nobody is asked.

    Returns:
        64 hexadecimal digits.

    Raises:
        CheckpointError: leaves that cannot be stored; under `jit`, or in the body of a `shard_map`.
        DivergenceError: the trees differ between ranks, or copies of one value do; on all ranks alike.

    Source: LtHash (Bellare and Micciancio 1997) for hashes that add up; Merkle trees.

    >>> import torch, vescale_fn as vfn
    >>> tree = {"w": torch.arange(6.0), "step": 3}
    >>> vfn.digest(tree)[:16]
    '42e8da07978834f0'
    >>> with vfn.simulate(4):
    ...     w = vfn.shard(tree["w"], vfn.make_mesh((4,), ("dp",)), vfn.P("dp"))
    ...     vfn.digest({"w": w, "step": 3}) == vfn.digest(tree)
    True
    """
    if context.body() is not None or torch_internals.is_recorded():
        inside = "vfn.jit is recording" if context.body() is None else "this is the body of a shard_map"
        raise CheckpointError(report("digest", inside, fix="the digest of what the function returns, outside of it"))
    try:
        leaves = leaves_of(named(tree_, "digest", "tree")[0], "digest")
    except CheckpointError as error:
        array = next(filter(is_array, tree.leaves(tree_)), None)
        if array is not None:  # on its mesh the others wait
            _same_trees(whole_mesh(mesh_of(array)), {_LEAVES: str(error).splitlines()[0]}, error)
        raise
    hashes = dict[str, str]()
    lying: dict[Any, dict[str, Leaf]] = {}
    for leaf in leaves:
        if not leaf.is_tensor:
            hashes[leaf.name] = _hash(leaf, _bytes(leaf.stored))
        elif chunks.is_plain(leaf.stored):
            whole = chunks.held(leaf.stored)
            hashes[leaf.name] = _of_tensor(leaf, block_sums.of_pieces(whole, leaf.stored))
        else:
            lying.setdefault(mesh_of(leaf.stored), {})[leaf.name] = leaf
    shape = _sorted(outline(tree_, iter([leaf.name for leaf in leaves])))
    for mesh, arrays in lying.items():
        communicator = communicator_of(whole_mesh(mesh))
        communicator.check_takes_part()
        _same_trees(
            whole_mesh(mesh),
            {_LEAVES: "leaves that have bits"} | {leaf.path: same_on_all_ranks(leaf) for leaf in leaves},
        )
        by_rank = _on_mesh(mesh, arrays) if place_of(mesh) is None else _at_place(mesh, arrays, communicator)
        paths = {leaf.name: leaf.path for leaf in leaves}
        rows = [{paths[name]: each[:16] for name, each in (hashes | mine).items()} for mine in by_rank]
        _compare(communicator, rows, "ranks hold different copies of a value")
        hashes |= by_rank[0]
    return _sha256("vescale_fn tree 1", shape, *(f"{name} {hashes[name]}" for name in sorted(hashes)))


def _sha256(*parts: str | bytes) -> str:
    made = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        made.update(len(data).to_bytes(8, "little") + data)
    return made.hexdigest()


def _hash(leaf: Leaf, data: bytes) -> str:
    return _sha256(leaf.kind, leaf.type_text if leaf.is_tensor else "", data)


def _of_tensor(leaf: Leaf, sums: torch.Tensor) -> str:
    return _hash(leaf, sums.cpu().contiguous().view(-1).numpy().tobytes())


def _bytes(value: Any) -> bytes:
    """A Python value's bits: of a float those in memory, so that a NaN keeps its own."""
    if isinstance(value, (float, complex)):
        return struct.pack("<dd", value.real, value.imag)
    if isinstance(value, int):
        return hex(value).encode()  # of any size
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def _sorted(shape: Any) -> str:
    """The outline of a tree as text, with the entries of dictionaries in the order of their keys."""
    if isinstance(shape, str):
        return json.dumps(shape)
    ((kind, inner),) = shape.items()
    if kind == "dict":
        return f"{{{','.join(sorted(f'{json.dumps(key)}:{_sorted(x)}' for key, x in inner))}}}"
    return f"{kind}[{','.join(map(_sorted, inner))}]"


def _on_mesh(mesh: Any, leaves: Mapping[str, Leaf]) -> list[dict[str, str]]:
    """For each rank that this process plays, the hashes of these arrays. The ranks that share one add up its checksums, those
    of all arrays that lie over the same axes at once."""
    communicator, axes, together = communicator_of(mesh), axes_of(mesh), dict[tuple[str, ...], list[str]]()
    arrays = chunks.added_up({name: leaf.stored for name, leaf in leaves.items()}, "digest")
    for name, x in arrays.items():
        used = {axis for row in split_axes(spec_of(x), x.ndim) for axis in row}
        together.setdefault(tuple(axis for axis in axes if axis in used), []).append(name)
    found: list[dict[str, str]] = [{} for _ in communicator.ranks]
    for over, names in together.items():
        shares = [_shares(communicator, arrays[name], over) for name in names]
        joined = communicator.each(lambda _, *each: torch.cat(each), *shares, key=lambda rank: None)
        sizes = [block_sums.count(arrays[name]) for name in names]
        hashed = dict[int, dict[str, str]]()
        for row, total in zip(found, communicator.parts(collectives.all_reduce(joined, mesh, over, "digest"))):
            if id(total) not in hashed:  # several ranks may share it
                parts = zip(names, total.split(sizes), strict=True)
                hashed[id(total)] = {name: _of_tensor(leaves[name], part) for name, part in parts}
            row.update(hashed[id(total)])
    return found


def _at_place(mesh: Any, leaves: Mapping[str, Leaf], communicator: Communicator) -> list[dict[str, str]]:
    """The same of arrays at a place: those who have them tell the others."""
    mine = {} if is_elsewhere(mesh) else _on_mesh(mesh, leaves)[0]
    rows = [row for (row,) in communicator.everyone([[mine] * len(communicator.ranks)], "digest") if row]
    return [mine or rows[0]] * len(communicator.ranks)


def _shares(communicator: Communicator, x: Any, over: Sequence[str]) -> Any:
    """The shares that each rank's block of an array has in its checksums, as a local value."""
    mesh, spec, shape = communicator.mesh, spec_of(x), tuple(x.shape)

    def of_block(rank: int, block: torch.Tensor) -> torch.Tensor:
        where = local_indices(shape, axes_of(mesh), spec, coordinates(mesh, rank))
        return block_sums.of_pieces(chunks.cut(block, where), x)

    place = lambda rank: tuple(coordinates(mesh, rank)[axis] for axis in over)
    return communicator.each(of_block, torch_internals.local(x), key=place)


_LEAVES = "all in all"


def _same_trees(mesh: Any, said: Mapping[str, str], error: Exception | None = None) -> None:
    """Raise unless all ranks bring the same tree: `error`, where there is one here."""
    communicator = communicator_of(mesh)
    try:
        _compare(communicator, [said] * len(communicator.ranks), "the ranks must bring the same tree")
    except DivergenceError as different:
        raise error or different from None


def _compare(communicator: Communicator, rows: Sequence[Mapping[str, str]], what: str) -> None:
    """Raise, on all ranks alike, unless all ranks have the same text for each path; `rows` are of those played here."""
    short = [_sha256(*(f"{path} {said}" for path, said in row.items())) for row in rows]
    if len({each for (each,) in communicator.everyone([short], "digest")}) == 1:
        return
    first, *others = [row for (row,) in communicator.everyone([rows], "digest")]
    failures = [
        f"{path}: rank 0 has {first.get(path, 'nothing')}, rank {rank} has {other.get(path, 'nothing')}"
        for rank, other in enumerate(others, 1)
        for path in dict.fromkeys((*first, *other))
        if first.get(path) != other.get(path)
    ]
    fix = "vfn.debug() to see where they part; what is to differ by rank as one array: vfn.from_local(...)"
    raise DivergenceError(report("digest", what, failures[:8], fix))
