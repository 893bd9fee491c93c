"""load: leaves from a checkpoint or a plain file to where they are wanted, each rank reading what it holds."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .._core import torch_internals
from .._core.base import context, source_lines, tree
from .._core.base.errors import CheckpointError, SpecError
from .._core.base.fingerprint import differences, fingerprint
from .._core.base.front_door import public
from .._core.base.messages import report
from . import all_ranks, atomic_folder, paths, single_files, targets
from .async_save import finish_last
from .names import filled, named, rebuilt
from .sources import Folder, Source
from .stored_leaves import uncollected
from .targets import Target


@public("load")
def load(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    mesh: Any = None,
    spec: Any = None,
    partial: bool = False,
    exact: bool | None = None,
) -> Any:
    """Load what `save`, `export_weights` or `torch.distributed.checkpoint` has written, laid out as is wanted here.

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
        exact: raise where the `fingerprint` of what saved it is another than here, or is not known: a run that goes on
            would not have the bits that it would have had. False: do not compare. By default there is a warning where
            a run under `deterministic` has saved it, and nothing else.

    Raises:
        CheckpointError: there is no checkpoint, a damaged one, or one of another tree, other shapes or dtypes; with the
            leaves it is about, on all ranks alike. With ``exact=True`` another fingerprint.
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
    crew = all_ranks.all_ranks("load")
    for _ in range(ATTEMPTS):
        with uncollected():
            done = _attempt(crew, path, like, mesh, spec, partial, exact)
        if done is not None:
            put_together, values, made, warning = done
            if warning and crew.rank == 0:
                source_lines.warn(warning)
            return put_together(values | {one.target.name: targets.finished(one) for one in made})
    raise CheckpointError(
        report(
            "load",
            f"{path} was replaced by another checkpoint while it was being loaded",
            [f"{ATTEMPTS} times"],
            "load while nobody saves there",
        )
    )


ATTEMPTS = 10  # to load what other processes replace meanwhile
_Loaded = tuple[Callable[[dict[str, Any]], Any], dict[str, Any], list[targets.Made], str]


def _attempt(
    crew: all_ranks.Crew, path: Any, like: Any, mesh: Any, spec: Any, partial: bool, exact: bool | None
) -> _Loaded | None:
    """What puts the leaves together, the values, the tensors, and a warning; None where another checkpoint took the place
    meanwhile."""
    prepared = list[tuple[Source, list[Target], Callable[[dict[str, Any]], Any], str]]()
    read = list[tuple[dict[str, Any], list[targets.Made]]]()

    def prepare() -> str:
        if context.body() is not None or torch_internals.is_recorded():
            inside = "vfn.jit is recording" if context.body() is None else "this is the body of a shard_map"
            raise CheckpointError(report("load", inside, fix="load outside, and give the function what is loaded"))
        if mesh is not None and spec is None:
            raise SpecError(report("load", "a mesh is given, but no spec", fix="spec=vfn.P(...), or a tree of them"))
        source = opened(paths.as_path(path, "load"))
        warning = _compared(source, exact)
        wanted, put_together = _wanted(source, like, mesh, spec)
        targets.check(wanted, source.entries, str(source.path), partial or like is None, "load")
        prepared.append((source, wanted, put_together, warning))
        return source.stamp

    def fill() -> bool:
        source, wanted, *_ = prepared[0]
        try:
            read.append(_read(source, wanted))
        except CheckpointError:
            if not source.mark.changed():
                raise
            return False
        return True

    if not all_ranks.step(crew, "load", prepare, lambda stamps: [len(set(stamps)) == 1] * crew.size):
        return None
    if not all_ranks.step(crew, "load", fill, lambda filled: [all(filled)] * crew.size):
        return None
    return prepared[0][2], *read[0], prepared[0][3]


def _compared(source: Source, exact: bool | None) -> str:
    """What is to be said of a checkpoint whose fingerprint is another than that of this process; raises if it is to be `exact`.

    Saved on fewer threads, or on another processor, a checkpoint is as good: only a run under `deterministic` promises
    bits, and there what differs means that they will.
    """
    saved = source.fingerprint
    if exact is False or not (exact or (saved or {}).get("virtual")):
        return ""
    found = ["it does not say by what"] if saved is None else differences(saved, fingerprint())
    text = report(
        "load",
        f"the bits of what goes on from {source.path} may be others than those of the run that saved it",
        found,
        "the same versions, kind of processor and settings; or exact=False" if found else "",
    )
    if found and exact:
        raise CheckpointError(text)
    return text if found else ""


def _read(source: Source, wanted: Sequence[Target]) -> tuple[dict[str, Any], list[targets.Made]]:
    """The Python values, and the tensors with what is stored in them."""
    values = source.values([one.name for one in wanted if one.shape is None])
    _check_values(wanted, values)
    made = [targets.made(one) for one in wanted if one.shape is not None]
    source.fill({one.target.name: one.parts for one in made if one.parts})
    return values, made


def opened(path: Path, where: str = "load") -> Source:
    """What is stored there, in whatever form."""
    while True:
        folder = atomic_folder.found(path)
        marks = [paths.Mark(file) for file in (folder / paths.METADATA, path / single_files.INDEX)]
        try:
            return _opened(path, folder, where)
        except CheckpointError:
            if not any(mark.changed() for mark in marks) and atomic_folder.found(path) == folder:
                raise  # else another checkpoint has taken its place meanwhile


def _opened(path: Path, folder: Path, where: str) -> Source:
    if (folder / paths.METADATA).is_file():
        return Folder(path, folder, where)
    source = single_files.opened(path, where)
    if source is not None:
        return source
    if not path.exists():
        raise CheckpointError(report(where, f"there is nothing at {path}", _neighbours(path)))
    parts = sorted(file.name for file in path.glob("__*_*.distcp"))
    inside = sorted(file.parent.name for file in path.glob(f"*/{paths.METADATA}"))
    what = [f"{paths.METADATA} is missing, which says what is in {', '.join(parts[:3])}"] if parts else []
    what += [f"there are checkpoints in it: {', '.join(inside[:8])}"] if inside else []
    raise CheckpointError(
        report(where, f"{path} is no checkpoint", what, "a folder made by vfn.save, a .pt file or .safetensors files")
    )


def _neighbours(path: Path) -> list[str]:
    if not path.parent.is_dir():
        return [f"there is no folder {path.parent}"]
    found = sorted(each.name for each in path.parent.iterdir() if not each.name.startswith("."))
    return [
        f"{path.parent} has {', '.join(found[:8])}{', ...' * (len(found) > 8)}" if found else f"{path.parent} is empty"
    ]


def _wanted(source: Source, like: Any, mesh: Any, spec: Any) -> tuple[list[Target], Callable[[dict[str, Any]], Any]]:
    """The leaves to load, and what puts them together by their names."""
    if like is None:
        shape = source.shape
        found = [targets.of_entry(name, entry) for name, entry in source.entries.items()]
        put_together = dict if shape is None else functools.partial(_as_saved, shape)
    else:
        leaves, treedef = named(like, "load", "like")
        both = [targets.of_like(one) for one in leaves]
        if failures := [one for one in both if isinstance(one, str)]:
            raise CheckpointError(report("load", "like has leaves that cannot be loaded", failures))
        found = [one for one in both if isinstance(one, Target)]
        put_together = functools.partial(_as_like, treedef, [one.name for one in leaves])
    if spec is not None:
        places = put_together({one.name: _Leaf(one) for one in found})
        specs = tree.broadcast(spec, places, "load", "spec", "tree" if like is None else "like")
        found = targets.laid_out([each.target for each in tree.leaves(places)], specs, mesh, "load")
    return found, put_together


def _as_saved(shape: Any, leaves: dict[str, Any]) -> Any:
    return filled(shape, leaves.__getitem__)


def _as_like(treedef: Any, names: Sequence[str], leaves: dict[str, Any]) -> Any:
    return rebuilt(treedef, [leaves[name] for name in names])


class _Leaf:
    """A leaf in a tree in which nothing else counts as one."""

    def __init__(self, target: Target) -> None:
        self.target = target


def _check_values(wanted: Sequence[Target], values: dict[str, Any]) -> None:
    """Where the checkpoint does not say what kinds of values it has, their types are seen only now."""
    failures = [
        f"{one.path} is {one.kind} in like, but {type(values[one.name]).__name__} in the checkpoint"
        for one in wanted
        if one.shape is None and one.kind not in (None, type(values[one.name]).__name__)
    ]
    if failures:
        raise CheckpointError(report("load", "values are of other types", failures, "a like of what was saved"))
