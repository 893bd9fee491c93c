"""Saving and loading on two real processes, beside torch.distributed.checkpoint used directly on DTensors."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn import P

RANKS, ROUNDS, WARM = 2, 5, 1
TREES = {
    "8 leaves of 16 MiB": (8, 2048),
    "200 leaves of 16 KiB": (200, 64),
}  # leaves, and how many rows and columns each
SMALL = 20_000, 16


def trees(leaves: int, size: int) -> tuple[Any, Any]:
    """Parameters, a half of each on every rank: as arrays, and as DTensors."""
    mesh = vfn.make_mesh((RANKS,), ("dp",))
    arrays = {str(i): vfn.shard(torch.rand(size, size), mesh, P("dp")) for i in range(leaves)}
    return arrays, {name: DTensor.from_local(x.to_local(), mesh, x.placements) for name, x in arrays.items()}


def measured(folder: str, leaves: int, size: int) -> dict[str, float]:
    """The median wall time of each way in milliseconds; they take turns, and the ranks begin each one together."""
    torch.set_num_threads(1)
    arrays, dtensors = trees(leaves, size)
    apart = dist.new_group(backend="gloo")
    ours, theirs, running = Path(folder) / "ours", Path(folder) / "theirs", list[Any]()
    into = {name: torch.empty_like(x) for name, x in dtensors.items()}
    ways: dict[str, Callable[[], Any]] = {
        "save, DCP": lambda: dcp.save(dtensors, checkpoint_id=theirs),
        "save, ours": lambda: vfn.save(ours, arrays),
        "load, DCP": lambda: dcp.load(into, checkpoint_id=theirs),
        "load, ours": lambda: vfn.load(ours, arrays),
        "blocked, DCP": lambda: running.append(dcp.async_save(dtensors, checkpoint_id=theirs, process_group=apart)),
        "blocked, ours": lambda: running.append(vfn.save(ours, arrays, background=True)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + WARM):
        for name, way in ways.items():
            if name.startswith("save") and dist.get_rank() == 0:  # both into a folder that is not there
                shutil.rmtree(ours if "ours" in name else theirs, ignore_errors=True)
            dist.barrier()
            start = time.perf_counter()
            way()
            times[name].append((time.perf_counter() - start) * 1e3)
            while running:
                last = running.pop()
                last.wait() if hasattr(last, "wait") else last.result()
    return {name: statistics.median(values[WARM:]) for name, values in times.items()}


def in_one_process(folder: str, leaves: int, size: int) -> dict[str, float]:
    """The median time of each way in milliseconds of the CPU, beside one file of `torch.save`, flushed to the disk too."""
    torch.set_num_threads(1)
    tree, file, ours = (
        {str(i): torch.full((size, size), float(i)) for i in range(leaves)},
        Path(folder, "x.pt"),
        Path(folder, "c"),
    )

    def save() -> None:
        with open(file, "wb") as handle:
            torch.save(tree, handle)
            handle.flush()
            os.fsync(handle.fileno())

    ways: dict[str, Callable[[], Any]] = {
        "save, torch": save,
        "save, ours": lambda: vfn.save(ours, tree),
        "load, torch": lambda: torch.load(file),
        "load, ours": lambda: vfn.load(ours, tree),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + WARM):
        for name, way in ways.items():
            start = time.process_time()
            way()
            times[name].append((time.process_time() - start) * 1e3)
    return {name: statistics.median(values[WARM:]) for name, values in times.items()}


def main() -> None:
    rows = []
    for name, (leaves, size) in TREES.items():
        with tempfile.TemporaryDirectory() as folder:
            took, *_ = vfn.launch(measured, RANKS, folder, leaves, size, device="cpu")
        for what in "save", "load", "blocked":
            theirs, ours = took[f"{what}, DCP"], took[f"{what}, ours"]
            rows.append(
                [
                    name,
                    {"blocked": "save in the background, until it returns"}.get(what, what),
                    theirs,
                    ours,
                    ours / theirs,
                ]
            )
    publish("checkpoint", ["tree", "what", "DCP on DTensors, ms", "`vfn`, ms", "ratio"], rows)
    small()


def small() -> None:
    """Many small leaves in one process."""
    with tempfile.TemporaryDirectory() as folder:
        took = in_one_process(folder, *SMALL)
    pairs = [(what, took[f"{what}, torch"], took[f"{what}, ours"]) for what in ("save", "load")]
    rows = [[f"{SMALL[0]} leaves of 1 KiB", what, theirs, ours, ours / theirs] for what, theirs, ours in pairs]
    publish("checkpoint-small", ["tree", "what", "torch, one file, ms of CPU", "`vfn`, ms of CPU", "ratio"], rows)


if __name__ == "__main__":
    main()
