"""Real text as bytes: the sources of Python's standard library, which every machine has, or any file or folder."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch

import vescale_fn as vfn
from vescale_fn.errors import DataError

# Not the library itself: what was installed beside it, and its tests.
SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
HELD_OUT = 10  # one file in so many is held out, or that part of the bytes where there are few files


def find_files(path: str | None = None) -> list[Path]:
    """The files to read, sorted: the .py files of the standard library, or `path`, or all files below it."""
    root = Path(path).expanduser() if path else Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise DataError(f"{root} does not exist; give --data a file or a folder of text")
    if root.is_file():
        return [root]
    pattern = "*" if path else "*.py"
    found = sorted(file for file in root.rglob(pattern) if file.is_file())
    if not path:
        found = [file for file in found if not SKIP.intersection(file.relative_to(root).parts)]
    if not found:
        raise DataError(f"there are no {pattern} files in {root}; give --data a file or a folder of text")
    return found


def read_text(files: list[Path], smallest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out bytes of the files, as uint8 tensors of at least `smallest` bytes each."""
    texts = [file.read_bytes() for file in files]
    if len(texts) >= HELD_OUT:
        held_out = b"".join(texts[HELD_OUT - 1 :: HELD_OUT])
        train = b"".join(text for i, text in enumerate(texts) if i % HELD_OUT != HELD_OUT - 1)
    else:
        text = b"".join(texts)
        at = len(text) - len(text) // HELD_OUT
        train, held_out = text[:at], text[at:]
    if min(len(train), len(held_out)) < smallest:
        raise DataError(
            f"{len(train)} bytes to train on and {len(held_out)} held out: at least {smallest} of each are needed"
        )
    return _tensor(train), _tensor(held_out)


def _tensor(text: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> torch.Tensor:
    """The `context` bytes from each start and the one after them: int64 [len(starts), context + 1]."""
    return text[starts[:, None] + torch.arange(context + 1, device=starts.device)].long()


def random_batch(key: vfn.random.Key, text: torch.Tensor, size: int, context: int) -> torch.Tensor:
    """Windows at random places: the same for the same key, wherever the program runs."""
    starts = vfn.random.randint(key, (size,), 0, len(text) - context).to(text.device)
    return windows(text, starts, context)


def even_batches(text: torch.Tensor, count: int, size: int, context: int) -> list[torch.Tensor]:
    """`count` batches of windows that are spread evenly over the text."""
    starts = torch.linspace(0, len(text) - context - 1, count * size, dtype=torch.float64).long().to(text.device)
    return [windows(text, part, context) for part in starts.split(size)]


def bigram_loss(text: torch.Tensor, batches: list[torch.Tensor], smoothing: float = 0.1) -> float:
    """Mean loss in nats on `batches` of the best guess from one byte before, counted on `text`.

    `smoothing` is added to each of the 256 x 256 counts.
    """
    pairs = text[:-1].long() * 256 + text[1:]
    counts = torch.bincount(pairs, minlength=256 * 256).view(256, 256).double() + smoothing
    log_probs = (counts / counts.sum(1, keepdim=True)).log()
    held_out = torch.cat(batches)
    return -log_probs[held_out[:, :-1], held_out[:, 1:]].mean().item()
