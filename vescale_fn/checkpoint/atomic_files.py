"""Plain files that appear all at once, in the place of older ones: one by a rename, several by that of their index.

Several get names that no file has yet. So the older ones stay whole until the index names the new ones, and are removed
then: those that the older index lists, and no others. What is to go, or to go after an interrupt, is kept as an index
beside it (`.model.safetensors.index.json.removed-...` and `.saving-...`) until that has been done.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import locks
from .locks import all_beside, beside, token
from .paths import failing, flush_folder
from .single_files import ALONE, INDEX, SHARD


class FileSet:
    """The files of one export while it writes them: the file `target`, or some in that folder."""

    def __init__(self, target: Path, is_folder: bool, where: str) -> None:
        self._target, self._where, self._is_folder = target, where, is_folder
        self._folder = target if is_folder else target.parent
        self._main = target / INDEX if is_folder else target  # after which the others are called while they are written
        self._written: list[Path] = []
        with failing(where, target):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = locks.acquire(target, where)
            try:
                locks.sweep(target)
                for leftover in all_beside(self._main, "writing"):
                    leftover.unlink()
            except BaseException:
                self._lock.release()
                raise

    def write(self, save: Callable[[Path], None]) -> None:
        """Write the next file, by a function of its path, and flush it to the disk."""
        file = beside(self._main, "writing")
        self._written.append(file)
        with failing(self._where, self._target):
            try:
                save(file)
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
            except Exception as error:
                if isinstance(error, OSError):
                    raise
                cause = error.__context__ or error.__cause__
                raise cause if isinstance(cause, OSError) else OSError(0, str(error).splitlines()[0]) from error

    def finish(self, index: Callable[[list[str]], Mapping[str, Any]]) -> None:
        """Give all files their names. `index` says what is in them, given their names."""
        with failing(self._where, self._target):
            self._lock.check(self._where)
            if self._is_folder:
                self._finish_folder(index)
            else:
                os.replace(self._written.pop(), self._target)
            flush_folder(self._folder)

    def _finish_folder(self, index: Callable[[list[str]], Mapping[str, Any]]) -> None:
        _tidy(self._folder)
        count, old = len(self._written), self._folder / INDEX
        if count == 1:
            os.replace(self._written.pop(), self._folder / ALONE)
            if old.exists():
                os.replace(old, beside(old, "removed"))
        else:
            mark = ""
            while any(os.path.lexists(self._folder / name) for name in _names(count, mark)):
                mark = f"{token()}-"
            new = beside(old, "saving")
            _write(new, index(_names(count, mark)))
            for file, name in zip(self._written, _names(count, mark), strict=True):
                os.rename(file, self._folder / name)
            self._written.clear()
            flush_folder(self._folder)
            if old.exists():
                _write(beside(old, "removed"), _read(old))
            os.replace(new, old)
            (self._folder / ALONE).unlink(missing_ok=True)
        flush_folder(self._folder)
        _tidy(self._folder)

    def close(self) -> None:
        """Remove what has not got its name, and let others write. Once is enough."""
        for file in self._written:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        self._lock.release()


def _names(count: int, mark: str) -> list[str]:
    return [f"model-{mark}{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def _tidy(folder: Path) -> None:
    """Remove the files of indexes that are no more, or have not come to be."""
    index = folder / INDEX
    kept = _files(index)
    for leftover in (*all_beside(index, "removed"), *all_beside(index, "saving")):
        for name in _files(leftover) - kept:
            if SHARD.fullmatch(name):
                (folder / name).unlink(missing_ok=True)
        leftover.unlink()


def _files(index: Path) -> set[str]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {name for name in _read(index)["weight_map"].values() if isinstance(name, str)}
    return set()


def _read(index: Path) -> Any:
    return json.loads(index.read_bytes())


def _write(file: Path, index: Mapping[str, Any]) -> None:
    with open(file, "w") as handle:
        handle.write(json.dumps(index, indent=2) + "\n")
        handle.flush()
        os.fsync(handle.fileno())
