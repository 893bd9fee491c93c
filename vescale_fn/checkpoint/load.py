"""load: leaves from a checkpoint or a plain file to where they are wanted, each rank reading what it holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optree

from .. import tree
from ..errors import CheckpointError, SpecError, report
from . import folders, plain_files, targets, together
from .background import finish_last
from .names import filled, named, rebuilt
from .sources import Folder, Source
from .targets import Target


def load(
    path: str | os.PathLike[str], like: Any = None, *, mesh: Any = None, spec: Any = None, partial: bool = False
) -> Any:
    """Load what `save`, `export` or `torch.distributed.checkpoint` has written, laid out as is wanted here.

    Each rank reads the pieces that it holds, whatever the mesh, the specs and the number of processes were when they were
    written, and no whole value is made on the way. Everything is checked before any value is read: the tree, shapes, dtypes
    and files; and with what is read its checksum.

    Args:
        path: a folder that `save` or `torch.distributed.checkpoint` made; a file of `torch.save`; a file of safetensors, or
            a folder of them with or without an index. All ranks of the process group make this call.
        like: the tree to load, by example: an array is loaded as an array that lies the same, a plain tensor as a whole
            plain tensor on the same device, a key as a key. Its values are not looked at, and are left as they are: a leaf
            may be on the meta device, or anything with a shape and a dtype. By default all that there is, plain, in the
            lists, tuples and dictionaries that were saved.
        mesh: where to lay the leaves out; by default the current mesh.
        spec: how they lie, a `P` or a prefix tree of `like`; by default as in `like`.
        partial: pass over what `like` has not.

    Raises:
        CheckpointError: there is no checkpoint, a damaged one, or one of another tree, other shapes or dtypes; with the
            leaves it is about, on all ranks alike.
        SpecError: specs that do not fit.

    Source: `torch.distributed.checkpoint.load`; Orbax.

    >>> import tempfile, torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> folder = tempfile.mkdtemp()
    >>> vfn.save(folder + "/last", {"w": torch.arange(6.0), "step": 3})
    >>> with vfn.simulate(4), vfn.use_mesh(vfn.make_mesh((4,), ("dp",))):
    ...     tree = vfn.load(folder + "/last", {"w": torch.empty(6, device="meta"), "step": 0}, spec=P("dp"))
    >>> print(tree["w"], tree["step"])
    Array f32[6@dp] on mesh (dp=4)
    tensor([0., 1., 2., 3., 4., 5.]) 3
    """
    finish_last(tell=False)  # which may be the save of what is to be loaded
    crew = together.all_ranks("load")
    plan: list[tuple[Source, list[Target], Any]] = []

    def prepare() -> None:
        if mesh is not None and spec is None:
            raise SpecError(report("load", "a mesh is given, but no spec", fix="spec=vfn.P(...), or a tree of them"))
        source = opened(folders.as_path(path, "load"))
        wanted, treedef = _wanted(source, like, mesh, spec)
        targets.check(wanted, source.entries, str(source.path), partial or like is None, "load")
        plan.append((source, wanted, treedef))

    def read() -> list[Any]:
        source, wanted, _ = plan[0]
        values = source.values([one.name for one in wanted if one.shape is None])
        made = [targets.made(one) for one in wanted if one.shape is not None]
        source.fill({one.target.name: one.parts for one in made if one.parts})
        _check_values(wanted, values)
        ready.append({**values, **{one.target.name: one for one in made}})
        return []

    ready: list[dict[str, Any]] = []
    for what in prepare, read:
        together.step(crew, "load", what, lambda _: [None] * crew.size)
    _, wanted, treedef = plan[0]
    leaves = {}
    for one in wanted:
        leaves[one.name] = targets.finished(ready[0][one.name]) if one.shape is not None else ready[0][one.name]
    if callable(treedef):
        return treedef(leaves)
    return rebuilt(treedef, [leaves[one.name] for one in wanted])


def opened(path: Path, where: str = "load") -> Source:
    """What lies there, whatever its form."""
    folder = folders.found(path)
    if (folder / folders.METADATA).is_file():
        return Folder(path, folder, where)
    source = plain_files.opened(path, where)
    if source is not None:
        return source
    if not path.exists():
        raise CheckpointError(report(where, f"there is nothing at {path}", _neighbours(path)))
    parts = sorted(file.name for file in path.glob("__*_*.distcp"))
    inside = sorted(file.parent.name for file in path.glob(f"*/{folders.METADATA}"))
    what = [f"{folders.METADATA} is missing, which says what is in {', '.join(parts[:3])}"] if parts else []
    what += [f"there are checkpoints in it: {', '.join(inside[:8])}"] if inside else []
    raise CheckpointError(report(where, f"{path} is no checkpoint", what,
                                 "a folder made by vfn.save, a .pt file or .safetensors files"))  # fmt: skip


def _neighbours(path: Path) -> list[str]:
    if not path.parent.is_dir():
        return [f"there is no folder {path.parent}"]
    found = sorted(each.name for each in path.parent.iterdir() if not each.name.startswith("."))
    return [
        f"{path.parent} has {', '.join(found[:8])}{', ...' * (len(found) > 8)}" if found else f"{path.parent} is empty"
    ]


def _wanted(source: Source, like: Any, mesh: Any, spec: Any) -> tuple[list[Target], Any]:
    """The leaves to load, and what puts them together."""
    if like is None:
        found = [targets.of_entry(name, entry) for name, entry in source.entries.items()]
        shape = source.shape

        def together_(leaves: dict[str, Any]) -> Any:
            return leaves if shape is None else filled(shape, leaves.__getitem__)

        if spec is not None:
            places = {one.name: _Leaf(one) for one in found}
            specs = _specs(spec, together_(places), "tree")
            found = targets.laid_out([each.target for each, _ in specs], [s for _, s in specs], mesh, "load")
        return found, together_
    leaves, treedef = named(like, "load", "like")
    found, failures = [], []
    for one in leaves:
        target = targets.of_like(one)
        (failures if isinstance(target, str) else found).append(target)
    if failures:
        raise CheckpointError(report("load", "like has leaves that cannot be loaded", failures))
    if spec is not None:
        specs = [s for _, s in _specs(spec, rebuilt(treedef, [_Leaf(one) for one in found]), "like")]
        found = targets.laid_out(found, specs, mesh, "load")
    return found, treedef


class _Leaf:
    """A leaf in a tree in which nothing else counts as one."""

    def __init__(self, target: Target) -> None:
        self.target = target


def _specs(spec: Any, places: Any, name: str) -> list[tuple[_Leaf, Any]]:
    return list(zip(optree.tree_leaves(places), tree.broadcast(spec, places, "load", "spec", name), strict=True))


def _check_values(wanted: Sequence[Target], values: dict[str, Any]) -> None:
    """Where the checkpoint does not say what kinds of values it has, their types are seen only now."""
    failures = [f"{one.path} is {one.kind} in like, but {type(values[one.name]).__name__} in the checkpoint"
                for one in wanted if one.shape is None and one.kind not in (None, type(values[one.name]).__name__)]  # fmt: skip
    if failures:
        raise CheckpointError(report("load", "values are of other types", failures, "a like of what was saved"))
