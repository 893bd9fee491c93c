"""Folders that appear complete or not at all: written beside, flushed to the disk, renamed, by one writer at a time.

While `name` is being written it is called `.name.saving-...`; an older one gives way as `.name.replaced-...`, which counts
as `name` until the new one is in its place, and goes as `.name.removed-...`. Of a folder only those files are removed that
its manifest lists; other files go over into the new checkpoint, and links are not followed.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from .._core.base.errors import CheckpointError
from .._core.base.messages import report
from . import locks, manifest
from .locks import all_beside, beside
from .paths import METADATA, failing, flush_folder

_WORDS = "saving", "replaced", "removed"
_HIDDEN = re.compile(rf"\..*\.({'|'.join(_WORDS)}|lock)(-[0-9a-f]+)?")


class Writing:
    """A folder that is being written, and will be called `path`."""

    def __init__(self, path: Path, where: str, lock: locks.Lock) -> None:
        self.path, self._where, self._lock = path, where, lock
        self.folder = beside(path, "saving")

    def finish(self) -> None:
        """Give the folder its name; it takes the place of an older one."""
        with failing(self._where, self.path):
            flush_folder(self.folder)
            self._lock.check(self._where)
            old = beside(self.path, "replaced")
            replaces = os.path.lexists(self.path)
            if replaces:
                os.rename(self.path, old)
            try:
                os.rename(self.folder, self.path)
            except OSError:
                if replaces:
                    with contextlib.suppress(OSError):
                        os.rename(old, self.path)
                raise
            flush_folder(self.path.parent)
            if replaces:
                _retire(old, self.path)

    def hand_over(self) -> bool:
        """Let the thread that calls this finish or close it; False if it has been closed."""
        return self._lock.hand_over()

    def close(self) -> None:
        """Remove the folder if it has not got its name, and let others write. Once is enough."""
        if self._lock.keep():
            with contextlib.suppress(OSError):
                _discard(self.folder)
            self._lock.release()


def begin(path: Path, where: str) -> Writing:
    """Make the folder in which `path` will be written, after removing what an interrupted save has left."""
    with failing(where, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = locks.acquire(path, where)
        try:
            _tidy(path)
            _refuse_what_is_not_ours(path, where)
            made = Writing(path, where, lock)
            made.folder.mkdir()
        except BaseException:
            lock.release()
            raise
        return made


def found(path: Path) -> Path:
    """Where the checkpoint called `path` lies: a save that was interrupted between two renames has left the older one."""
    replaced = [] if os.path.lexists(path) else all_beside(path, "replaced")
    return replaced[-1] if replaced else path


def remove(path: Path, where: str) -> bool:
    """Remove a checkpoint: in one moment it is gone, and its files soon after; other files in its folder stay. False for
    one of another program, a damaged one and a link, which stay as they are."""
    with locks.locked(path, where):
        _tidy(path)
        ours = not path.is_symlink() and manifest.files_of(path) is not None
        if ours:
            _retire(path, path)
        return ours


def sweep(path: Path, where: str) -> None:
    """Remove what an interrupted save or removal of `path` has left."""
    with locks.locked(path, where):
        _tidy(path)


def _tidy(path: Path) -> None:
    """Finish what others began; this process has the lock."""
    replaced = all_beside(path, "replaced")
    if replaced and not os.path.lexists(path):  # it was interrupted between two renames
        os.rename(replaced.pop(), path)
    for each in (*replaced, *all_beside(path, "removed")):
        _retire(each, path)
    for each in all_beside(path, "saving"):
        _discard(each)
    locks.sweep(path)


def _retire(old: Path, path: Path) -> None:
    """Remove a checkpoint's own files; what else its folder has goes over to `path`."""
    gone = beside(path, "removed")
    os.rename(old, gone)
    _discard(gone)
    if not gone.is_dir():
        return
    if not os.path.lexists(path):
        os.rename(gone, path)
    if not path.is_dir() or path.is_symlink():
        return
    for name in os.listdir(gone) if gone.is_dir() else ():
        if not os.path.lexists(path / name):
            os.rename(gone / name, path / name)
    with contextlib.suppress(OSError):  # it has files of names that `path` has too, and keeps them
        os.rmdir(gone)


def _discard(folder: Path) -> None:
    """Remove a checkpoint's own files, and the folder if nothing else is in it. The manifest, which lists them, goes last."""
    if folder.is_symlink() or not folder.is_dir():
        return
    listed = manifest.files_of(folder)
    names = set(os.listdir(folder))
    own = {name for name in names if manifest.is_name_of_ours(name)} if listed is None else listed & names
    for name in sorted(own, key=lambda name: name == manifest.MANIFEST):
        if not (folder / name).is_dir() or (folder / name).is_symlink():
            os.unlink(folder / name)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _refuse_what_is_not_ours(path: Path, where: str) -> None:
    """Only a checkpoint of ours is replaced, and an empty folder."""
    if not os.path.lexists(path):
        return
    failures = list[str]()
    if path.is_symlink():
        kind, failures = "link", [f"it leads to {os.readlink(path)}"]
    elif not path.is_dir():
        kind = "file"
    else:
        names = sorted(os.listdir(path))
        own = manifest.files_of(path)
        inside = [name for name in names if _HIDDEN.fullmatch(name) or (path / name / METADATA).is_file()]
        unknown = [name for name in names if own is not None and name not in own and manifest.is_name_of_ours(name)]
        if not names or (own is not None and not inside and not unknown):
            return
        kind = "folder that is no checkpoint of vescale_fn"
        if inside:
            kind, failures = "folder of checkpoints", [f"in it there are {', '.join(inside[:8])}"]
        elif unknown:
            kind, failures = (
                "checkpoint with files of another one",
                [f"its manifest does not list {', '.join(unknown[:8])}"],
            )
        elif (path / manifest.MANIFEST).exists():
            kind, failures = "damaged checkpoint", ["its manifest cannot be read, or another program has written to it"]
    raise CheckpointError(
        report(where, f"{path} is a {kind}, and is left as it is", failures, "another path, or remove it")
    )
