"""`psum` of a tree of many small leaves, beside one all-reduce of one flat tensor with as many bytes, on real ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn import P

RANKS, ROUNDS, WARM = 2, 301, 20
SIZES = {"1 KiB": 256, "4 KiB": 1024, "16 KiB": 4096}  # of a leaf: elements of float32
LEAVES = 100


def medians_together(candidates: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The median wall time of a call in microseconds. The candidates take turns, and the ranks begin each one together."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(ROUNDS + WARM):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            candidates[name]()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values[WARM:]) for name, values in times.items()}


def measured(elements: int, check: bool) -> tuple[int, dict[str, float]]:
    """How many collectives one `psum` makes, and what it and a flat all-reduce take, on this rank."""
    mesh = vfn.make_mesh((RANKS,), ("dp",))
    flat, found = torch.zeros(LEAVES * elements), []

    def body(tree: list[torch.Tensor]) -> list[torch.Tensor]:
        with vfn.comm_log() as log:
            out = vfn.psum(tree, "dp")
        took = medians_together({"flat": lambda: dist.all_reduce(flat), "psum": lambda: vfn.psum(tree, "dp")})
        found.append((len(log), took))
        return out

    tree = [torch.full((RANKS * elements,), float(i)) for i in range(LEAVES)]
    with torch.no_grad():
        vfn.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P(), check_vma=check)(tree)
    return found[0]


def main() -> None:
    rows = []
    for size, elements in SIZES.items():
        row: list[Any] = [f"{LEAVES} of {size}"]
        for check in (True, False):
            (count, took), *_ = vfn.launch(measured, RANKS, elements, check, device="cpu")
            row += (
                [count, took["flat"], took["psum"], took["psum"] / took["flat"]]
                if check
                else [took["psum"] / took["flat"]]
            )
        rows.append(row)
    publish(
        "psum_of_a_tree",
        ["leaves", "collectives", "flat all-reduce, us", "`psum`, us", "ratio", "ratio, `check_vma=False`"],
        rows,
    )


if __name__ == "__main__":
    main()
