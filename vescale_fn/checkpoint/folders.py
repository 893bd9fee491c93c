"""Folders that appear complete or not at all: written beside, flushed to the disk, renamed.

While `name` is being written it is called `.name.saving`; an older one gives way as `.name.replaced`, which counts as
`name` until the new one is in its place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, described, report

METADATA = ".metadata"  # the file by which torch.distributed.checkpoint knows its folders


def as_path(path: Any, where: str) -> Path:
    """What a user gave as a path."""
    if not isinstance(path, (str, os.PathLike)) or isinstance(path, bytes):
        raise CheckpointError(report(where, f"path must be a path, but it is {described(path)}",
                                     fix=f'vfn.{where}("checkpoints/last", ...)'))  # fmt: skip
    if "://" in os.fspath(path):
        raise CheckpointError(report(where, f"path={os.fspath(path)!r} is no path of a file system",
                                     fix="a folder that is mounted here; copy it elsewhere afterwards"))  # fmt: skip
    return Path(os.path.abspath(path))


def _beside(path: Path, word: str) -> Path:
    return path.with_name(f".{path.name}.{word}")


def unfinished(path: Path) -> Path:
    """What `path` is called while it is being written."""
    return _beside(path, "saving")


def begin(path: Path, where: str) -> None:
    """Make the folder in which `path` will be written, after removing what an interrupted save has left."""
    with failing(where, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_what_is_no_checkpoint(path, where)
        if not path.exists() and _beside(path, "replaced").exists():  # it was interrupted between two renames
            _beside(path, "replaced").rename(path)
        for word in "replaced", "removed":
            _remove(_beside(path, word))
        _remove(unfinished(path))
        unfinished(path).mkdir()


def finish(path: Path, where: str) -> None:
    """Give the folder that `begin` made its name; it takes the place of an older one."""
    with failing(where, path):
        flush_folder(unfinished(path))
        if path.exists():
            path.rename(_beside(path, "replaced"))
        unfinished(path).rename(path)
        flush_folder(path.parent)
        _remove(_beside(path, "replaced"))


def found(path: Path) -> Path:
    """Where the checkpoint called `path` lies: a save that was interrupted between two renames has left the older one."""
    replaced = _beside(path, "replaced")
    return replaced if not path.exists() and replaced.exists() else path


def remove(path: Path) -> None:
    """Remove a checkpoint: in one moment it is gone, and its files soon after."""
    gone = _beside(path, "removed")
    _remove(gone)
    found(path).rename(gone)
    _remove(gone)


def sweep(path: Path) -> None:
    """Remove what an interrupted save or removal of `path` has left, while no save goes on there."""
    for word in ("saving", "removed", *(["replaced"] if path.exists() else [])):
        _remove(_beside(path, word))


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _refuse_what_is_no_checkpoint(path: Path, where: str) -> None:
    """What is not ours is not replaced."""
    if path.is_dir() and (any(path.glob(f"*{METADATA}")) or not any(path.iterdir())):
        return
    if path.exists():
        kind = "folder that is no checkpoint" if path.is_dir() else "file"
        raise CheckpointError(
            report(where, f"{path} is a {kind}, and is left as it is", fix="another path, or remove it")
        )


def flush_folder(path: Path) -> None:
    """Bring to the disk which files a folder has."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot, and need not
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def failing(where: str, path: Path, what: str = "") -> Iterator[None]:
    """Turn what the operating system says of files into a CheckpointError."""
    verb = {"load": "read"}.get(where, "written")
    try:
        yield
    except OSError as error:
        name = f": {error.filename}" if error.filename and Path(error.filename) != path else ""
        raise CheckpointError(report(
            where, f"{path} cannot be {verb}{f', at {what}' if what else ''}",
            [f"{error.strerror or error}{name}"], _WAYS.get(error.errno or 0, "") if verb == "written" else ""
        )) from error  # fmt: skip


_UNTOUCHED = "what was saved there before is untouched"
_WAYS = {
    errno.ENOSPC: f"make room on the disk and save again; {_UNTOUCHED}",
    errno.EDQUOT: f"make room on the disk and save again; {_UNTOUCHED}",
    errno.EFBIG: f"raise the limit on the size of a file and save again; {_UNTOUCHED}",
    errno.EACCES: "a folder that this user may write to",
    errno.EPERM: "a folder that this user may write to",
    errno.EROFS: "a folder that this user may write to",
}
