"""Images in files that lie in memory: they outlive the process that wrote them, and it may have ended at any moment.

A file begins with a lid, which is written last and taken off first: the step, the length, and a sha256 of both and the image.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import stat
import struct
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from .._core.base.errors import CheckpointError
from .._core.base.messages import report
from .._core.distributed.restarts import IN_MEMORY, is_alive, process_name
from .._core.distributed.worker import FOLDER, SESSION
from .shares import Table, opened

_LID = struct.Struct("<8sQQ32s8x")
_MAGIC = b"vfn copy"
_NAME = re.compile(r"([0-9a-f]+)\.(\d+)-of-(\d+)\.([01])")


class Copy(NamedTuple):
    """The copy of what one process held after a step."""

    life: str  # of processes that were started together
    rank: int
    size: int  # how many there were
    step: int
    path: str
    digest: bytes

    def verified(self) -> bool:
        """Whether the image is what its lid says."""
        return _digest(self.step, mapped(Path(self.path))[_LID.size :]) == self.digest

    def opened(self) -> tuple[Table, torch.Tensor]:
        """What is in it."""
        return opened(mapped(Path(self.path))[_LID.size :])


class File:
    """A file for the image of a process's share: two take turns, as one is whole while the other is written."""

    def __init__(self, folder: Path, life: str, rank: int, size: int, turn: int) -> None:
        self.path = folder / f"{life}.{rank}-of-{size}.{turn}"
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def uncovered(self, nbytes: int) -> torch.Tensor:
        """So many bytes of it, to be written; what was in it is no image any more."""
        if self._bytes.numel() != _LID.size + nbytes:
            self.path.unlink(missing_ok=True)
            self._bytes = _made(self.path, _LID.size + nbytes)
        self._bytes[: _LID.size] = 0
        return self._bytes[_LID.size :]

    def cover(self, step: int, digest: bytes) -> None:
        """Say that the image is whole."""
        lid = _LID.pack(_MAGIC, step, self._bytes.numel() - _LID.size, digest)
        self._bytes[: _LID.size] = torch.frombuffer(bytearray(lid), dtype=torch.uint8)

    def digest(self, step: int) -> bytes:
        """Of the image after this step."""
        return _digest(step, self._bytes[_LID.size :])


def _digest(step: int, image: torch.Tensor) -> bytes:
    made = hashlib.sha256(struct.pack("<QQ", step, image.numel()))
    made.update(image.numpy().data)
    return made.digest()


def _made(path: Path, nbytes: int) -> torch.Tensor:
    try:
        end = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(end, 0, nbytes)  # a write beyond what there is would end the process
        finally:
            os.close(end)
    except OSError as error:
        path.unlink(missing_ok=True)
        fix = "a larger one, memory=... elsewhere, or buddies=False, which keeps a copy less"
        what = f"{path.parent} has no room for {nbytes:,} bytes of the state"
        raise CheckpointError(report("elastic", what, [str(error)], fix)) from None
    return mapped(path)


def mapped(path: Path) -> torch.Tensor:
    """The bytes of a file, as they are in memory."""
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


class _Runs:
    """How many runs this process has begun: a program may have one after the other, and copies are of one of them."""

    begun = 0


os.register_at_fork(after_in_child=lambda: setattr(_Runs, "begun", 0))


def folder_of(memory: str | os.PathLike[str] | None) -> Path | None:
    """This process's folder in `memory` for the copies of a run that it begins; None where nobody would start it again."""
    _Runs.begun += 1
    session, place, parent = os.environ.get(SESSION), memory, process_name(os.getppid())
    if session is not None:
        place = memory or os.environ[FOLDER]
        if not session.startswith(f"{parent}-"):  # another's, who has started who started this process
            return None
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent starts the processes of its machine, again and again
        session = f"{parent}-torchrun"
    else:
        return None
    base = Path(place or (IN_MEMORY if os.path.isdir(IN_MEMORY) else tempfile.gettempdir()))
    name = f"vescale_fn-{os.getuid()}"
    base.mkdir(parents=True, exist_ok=True)
    for old in base.glob(f"{name}-*"):
        if not is_alive("-".join(old.name.removeprefix(f"{name}-").split("-")[:2])):
            shutil.rmtree(old, ignore_errors=True)  # whoever would have gone on from it is gone
    folder = base / f"{name}-{session}-{_Runs.begun}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise CheckpointError(report("elastic", f"{folder} is somebody else's", fix="memory=..., a folder of your own"))
    return folder.resolve()


def identity(folder: Path) -> tuple[str, str]:
    """What tells a folder from those of the same name on other machines."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(folder)
    return socket.gethostname(), str(folder)


def copies_in(folder: Path) -> list[Copy]:
    """The copies that have a lid, in the order of their names."""
    found = []
    for path in sorted(folder.iterdir()):
        named = _NAME.fullmatch(path.name)
        with contextlib.suppress(OSError, struct.error):  # it is being removed, or has no room for a lid
            if named is None:
                continue
            with open(path, "rb") as file:
                magic, step, nbytes, digest = _LID.unpack(file.read(_LID.size))
            if magic == _MAGIC and path.stat().st_size == _LID.size + nbytes:
                found.append(Copy(named[1], int(named[2]), int(named[3]), step, str(path), digest))
    return found


def remove(folder: Path, keep: str = "") -> None:
    """Remove the copies of all lives but this one, and the folder when it is empty."""
    with contextlib.suppress(OSError):  # another process beside this one has
        for path in folder.iterdir():
            named = _NAME.fullmatch(path.name)
            if named is not None and named[1] != keep:
                path.unlink(missing_ok=True)
        folder.rmdir()
