"""The numbers of a run, step by step: into a file of JSON lines, into TensorBoard; and what they are measured by."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch
from torch.utils.flop_counter import FlopCounterMode

import vescale_fn as vfn

# Multiplications and additions a second in bf16 without sparsity, by makers' data sheets
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12}


class Metrics:
    """Where the numbers of a run go. A run that goes on from step `done` leaves out what was written of later steps.

    Args:
        jsonl: a file that gets a line of JSON a call, or None.
        tensorboard: a folder that gets points for TensorBoard, or None.
        done: how many steps have been done already.

    Raises:
        ImportError: TensorBoard is asked for and not installed.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "run.jsonl")
    >>> with Metrics(path) as metrics:
    ...     metrics.write(1, loss=2.5, tokens_per_second=None)
    >>> path.read_text()
    '{"step": 1, "loss": 2.5}\\n'
    """

    def __init__(self, jsonl: str | Path | None = None, tensorboard: str | Path | None = None, done: int = 0) -> None:
        self._file: Any = None
        self._board: Any = writer()(str(tensorboard), purge_step=done + 1) if tensorboard else None
        if jsonl:
            path = Path(jsonl)
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [line for line in path.read_text().splitlines() if _step(line) <= done] if path.exists() else []
            path.write_text("".join(f"{line}\n" for line in kept))
            self._file = path.open("a")

    def write(self, step: int, **numbers: float | None) -> None:
        """Write the numbers of a step; those that are None are left out."""
        given = {name: number for name, number in numbers.items() if number is not None}
        if self._file is not None:
            print(json.dumps({"step": step, **given}), file=self._file, flush=True)
        if self._board is not None:
            for name, number in given.items():
                self._board.add_scalar(name, number, step)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: Any) -> None:
        for end in self._file, self._board:
            if end is not None:
                end.close()


def _step(line: str) -> int:
    """The step of a line; of one that a killed run left half written, one that is never kept."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return sys.maxsize


def writer() -> Any:
    """TensorBoard's writer.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError("--tensorboard needs tensorboard: pip install tensorboard") from None
    return SummaryWriter


def flops(loss: Callable[..., Any], params: Any, *args: Any) -> int:
    """Multiplications and additions of a loss and its gradient on the whole batch, counted on shapes: nothing is computed.

    >>> flops(lambda w, x: (x @ w).sum(), torch.ones(4, 5), torch.ones(2, 4))  # x @ w, and x.T @ its cotangent
    160
    """
    given: Any = (params, *args)
    shapes = optree.tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, given)
    with FlopCounterMode(display=False) as counter:
        vfn.grad(loss)(*shapes)
    return counter.get_total_flops()


def peak(device: str) -> float:
    """The most that a rank's processor does in a second: by its data sheet, or by what a product of matrices reaches."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        known = next((peak for part, peak in PEAKS.items() if part in name), None)
        if known is not None:
            return known
    x, times = torch.ones(1024, 1024, device=device), []
    for _ in range(4):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        (x @ x)[0, 0].item()
        times.append(time.perf_counter() - began)
    return 2 * 1024**3 / min(times)


def memory(device: str) -> int:
    """The most bytes that this rank has had in use: of the GPU's memory, or of the process's."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
