"""Paths as users give them, folders on the disk, and what the operating system says where it refuses something."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._core.base.errors import CheckpointError
from .._core.base.messages import described, report

METADATA = ".metadata"  # the file by which torch.distributed.checkpoint knows its folders


def as_path(path: Any, where: str) -> Path:
    """What a user gave as a path."""
    if not isinstance(path, (str, os.PathLike)) or isinstance(path, bytes):
        raise CheckpointError(
            report(
                where, f"path must be a path, but it is {described(path)}", fix=f'vfn.{where}("checkpoints/last", ...)'
            )
        )
    if "://" in os.fspath(path):
        raise CheckpointError(
            report(
                where,
                f"path={os.fspath(path)!r} is no path of a file system",
                fix="a folder that is mounted here; copy it elsewhere afterwards",
            )
        )
    return Path(os.path.abspath(path))


class Mark:
    """A file by which one notices that something else has taken the place of what was opened."""

    def __init__(self, file: Path) -> None:
        self._file, self._was = file, _identity(file)

    def changed(self) -> bool:
        """Whether it is another file now, or gone."""
        return _identity(self._file) != self._was


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


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
        raise CheckpointError(
            report(
                where,
                f"{path} cannot be {verb}{f', at {what}' if what else ''}",
                [f"{error.strerror or error}{name}"],
                _WAYS.get(error.errno or 0, "") if verb == "written" else "",
            )
        ) from error


_UNTOUCHED = "what was saved there before is untouched"
_WAYS = {
    errno.ENOSPC: f"make room on the disk and save again; {_UNTOUCHED}",
    errno.EDQUOT: f"make room on the disk and save again; {_UNTOUCHED}",
    errno.EFBIG: f"raise the limit on the size of a file and save again; {_UNTOUCHED}",
    errno.EACCES: "a folder that this user may write to",
    errno.EPERM: "a folder that this user may write to",
    errno.EROFS: "a folder that this user may write to",
}
