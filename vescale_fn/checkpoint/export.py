"""export_weights: a tree as plain files that need nothing of ours to be read: of torch.save, or of safetensors."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .._core.arrays.array import is_array, whole
from .._core.base.earlier_names import earlier_name
from .._core.base.errors import CheckpointError
from .._core.base.messages import report
from . import all_ranks, paths
from .async_save import finish_last
from .atomic_files import FileSet
from .leaf_kinds import Leaf, leaves_of
from .names import named
from .shard_files import on_cpu
from .single_files import VALUES, safetensors

TORCH = (".pt", ".pth", ".bin")


def export_weights(path: str | os.PathLike[str], tree_: Any, *, max_bytes: int = 5 * 10**9) -> None:
    """Write a tree to plain files, under the names of its leaves (``blocks.0.w``).

    Whole values are put together on the first rank: all of them for a file of torch's, those of one file at a time for
    safetensors. `load` reads these files, laid out on any mesh; so does everybody else. What is no tensor is kept where
    the format has room for it; keys are stored as their numbers, and loaded as keys where ``like`` has a key.

    Args:
        path: what it ends in says what is written. ``.pt``, ``.pth`` or ``.bin``: a dictionary for `torch.load` and
            `load_state_dict`. ``.safetensors``: one such file. Else a folder, as Hugging Face's libraries read it:
            ``model.safetensors``, or several files and ``model.safetensors.index.json``, which take the place of older
            ones all at once; other files in it stay.
        tree_: as for `save`. All ranks of the process group make this call.
        max_bytes: how large one of several files may become.

    Raises:
        CheckpointError: leaves that cannot be stored so, a file that cannot be written, safetensors not installed.

    >>> import tempfile, torch, vescale_fn as vfn
    >>> folder = tempfile.mkdtemp()
    >>> vfn.export_weights(folder + "/model.pt", {"blocks": [{"w": torch.ones(2)}]})
    >>> torch.load(folder + "/model.pt")
    {'blocks.0.w': tensor([1., 1.])}
    """
    finish_last()
    crew, target = all_ranks.all_ranks("export_weights"), paths.as_path(path, "export_weights")
    found: list[Leaf] = []

    def prepare() -> None:
        if target.suffix not in TORCH:
            safetensors("export_weights")
        if _is_file(target) and target.is_dir():
            raise CheckpointError(
                report("export_weights", f"{target} is a folder", fix="a file, or a path without suffix")
            )
        leaves, _ = named(tree_, "export_weights", "tree")
        found.extend(leaves_of(leaves, "export_weights"))
        if target.suffix not in TORCH:
            _check_for_safetensors(found)

    begun = list[FileSet]()

    def begin(_: Any) -> list[None]:
        begun.append(FileSet(target, not _is_file(target), "export_weights"))
        return [None] * crew.size

    try:
        all_ranks.step(crew, "export_weights", prepare, begin)
        tensors = [leaf for leaf in found if leaf.is_tensor]
        values = {leaf.name: leaf.stored for leaf in found if not leaf.is_tensor}
        parts = [tensors] if _is_file(target) else _shared_out(tensors, max_bytes)
        for part in parts:
            data = {leaf.name: x for leaf, x in _whole(part, crew.rank == 0)}
            save = functools.partial(_save, target.suffix in TORCH, data, values)
            all_ranks.same_for_all("export_weights", lambda save=save: begun[0].write(save))
        all_ranks.same_for_all("export_weights", lambda: begun[0].finish(functools.partial(_index, parts)))
    finally:
        for each in begun:
            each.close()


def _is_file(target: Path) -> bool:
    return target.suffix in (*TORCH, ".safetensors")


def _check_for_safetensors(leaves: Sequence[Leaf]) -> None:
    failures = []
    for leaf in leaves:
        if not leaf.is_tensor and leaf.kind in ("complex", "bytes"):
            failures.append(f"{leaf.path} is {leaf.stored!r}")
        if leaf.is_tensor and (leaf.stored.is_complex() and leaf.stored.dtype is not torch.complex64):
            failures.append(f"{leaf.path} is {leaf.type_text}")
    if failures:
        raise CheckpointError(
            report("export_weights", "safetensors has no room for some leaves", failures, "a .pt file, or vfn.save")
        )


def _shared_out(leaves: Sequence[Leaf], most: int) -> list[list[Leaf]]:
    """Which leaves go to which file, in order."""
    parts: list[list[Leaf]] = [[]]
    size = 0
    for leaf in leaves:
        if parts[-1] and size + leaf.stored.nbytes > most:
            parts.append([])
            size = 0
        parts[-1].append(leaf)
        size += leaf.stored.nbytes
    return parts


def _whole(leaves: Sequence[Leaf], here: bool) -> Iterator[tuple[Leaf, torch.Tensor]]:
    """The whole value of each leaf, in memory of its own, where it is wanted; all ranks take part."""
    for leaf in leaves:
        x = whole(leaf.stored, "export_weights") if is_array(leaf.stored) else leaf.stored
        if here:
            yield leaf, on_cpu(x).clone()


def _save(torch_file: bool, data: dict[str, torch.Tensor], values: dict[str, Any], file: Path) -> None:
    if torch_file:
        torch.save(data | values, file)
    else:
        header = {"format": "pt"} | ({VALUES: json.dumps(values)} if values else {})
        safetensors("export_weights").save_file(data, str(file), header)


def _index(parts: Sequence[Sequence[Leaf]], names: Sequence[str]) -> dict[str, Any]:
    """What Hugging Face's libraries read of several files."""
    leaves = [(leaf, name) for name, part in zip(names, parts, strict=True) for leaf in part]
    return {
        "metadata": {"total_size": sum(leaf.stored.nbytes for leaf, _ in leaves)},
        "weight_map": {leaf.name: name for leaf, name in leaves},
    }


export = earlier_name("export", export_weights)
