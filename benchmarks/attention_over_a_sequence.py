"""Causal attention, forward and backward, over a sequence that is split over two real processes over gloo."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn import P

RANKS, HEADS, SHARED, LENGTH, WIDTH, ROUNDS, WARM = 2, 8, 4, 1024, 64, 5, 1
WAYS = {
    "all on each rank": None,
    "torch's own, which gathers": ("torch", 0),
    "ring": ("ring", 0),
    "ring, zigzag": ("ring", RANKS),
    "all_gather": ("all_gather", 0),
    "all_to_all": ("all_to_all", 0),
}


def main() -> None:
    each = vfn.launch(measure, RANKS, device="cpu")
    whole = max(found["all on each rank"][0] for found in each)
    rows = []
    for name in WAYS:
        slowest = max(found[name][0] for found in each)  # the ranks wait for it
        least = min(found[name][0] for found in each)
        _, kept, count, sent = each[0][name]
        rows.append([name, slowest * 1e3, slowest / whole, least / slowest, kept, count, sent])
    columns = [
        "way",
        "ms, of the slower rank",
        "ratio to all of it",
        "faster rank / slower rank",
        "kept, MiB",
        "collectives",
        "MiB moved",
    ]
    publish("attention_over_a_sequence", columns, rows)


def measure() -> dict[str, tuple[float, float, int, float]]:
    """Of each way: seconds of this rank on the CPU, MiB kept for the backward pass, collectives, MiB that a rank gets."""
    torch.set_num_threads(1)
    mesh = vfn.make_mesh((RANKS,), ("cp",))
    torch.manual_seed(0)
    leaves = (torch.randn(1, HEADS, LENGTH, WIDTH), *(torch.randn(1, SHARED, LENGTH, WIDTH) for _ in range(2)))
    parts = vfn.shard(leaves, mesh, P(None, None, "cp"))
    steps: dict[str, Any] = {}
    for name, way in WAYS.items():
        given = leaves if way is None else parts
        steps[name] = lambda way=way, given=given: vfn.grad(lambda *x: _attention(way, *x).sum(), (0, 1, 2))(*given)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS + WARM):
        for name, step in steps.items():
            dist.barrier()
            start = time.process_time()
            step()
            times[name].append(time.process_time() - start)
    return {
        name: (statistics.median(times[name][WARM:]), *_counted(way, leaves if way is None else parts))
        for name, way in WAYS.items()
    }


def _attention(way: tuple[str, int] | None, q: Any, k: Any, v: Any) -> Any:
    if way is None or way[0] == "torch":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    method, zigzag = way
    return vfn.nn.attention(q, k, v, causal=True, method=method, zigzag=zigzag)


def _counted(way: Any, leaves: Any) -> tuple[float, int, float]:
    """What is kept, each memory once, and what moves."""
    kept: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        block = x.to_local() if isinstance(x, vfn.Array) else x
        kept[block.data_ptr()] = block.numel() * block.element_size()
        return x

    inputs = [x.detach().requires_grad_() for x in leaves]
    with vfn.comm_log() as log:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = _attention(way, *inputs).sum()
        torch.autograd.grad(out, inputs)
    return sum(kept.values()) / 2**20, log.count(), sum(call.bytes for call in log) / 2**20


if __name__ == "__main__":
    main()
