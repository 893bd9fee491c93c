"""What `vfn.auto` takes: recording a training step, searching a layout of it, pricing one, and all of it as a user calls it,
with six candidates; in seconds of a CPU, one thread. Without a bound by the memory, and within one that binds.

A Llama with layers of 8,192 in bf16 and AdamW, a sequence of 4,096 tokens a rank, on 64 H100s, and on all
meshes of two axes of 1,024.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn.choice.recording import record
from vescale_fn.choice.search.shapes import searched
from vescale_fn.choice.verified import priced_as
from vescale_fn.recipes import llama

MESH, GIB = {"dp": 8, "tp": 8}, 2**30
LIMITS = (None, 0.8)  # the memory, as a share of what the best layout holds
SECONDS = 60.0


def stepping(layers: int, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """A step, and the shapes of its arguments."""
    config = llama.Config(layers=layers, vocab=32000, dim=8192, heads=64, groups=8, hidden=28672, dropout=0.0)
    opt = vfn.optim.adamw(1e-3)
    params = vfn.eval_shape(lambda: llama.init(vfn.random.key(0), config, torch.bfloat16))
    step = vfn.optim.train_step(lambda params, tokens: llama.loss(params, tokens, config, None), opt)
    return step, (params, vfn.eval_shape(opt.init, params), vfn.ShapeDtype((batch, 4097), torch.int64))


def timed(f: Any, *args: Any, **how: Any) -> tuple[Any, float]:
    """What a call gives, and the seconds of this process that it takes."""
    start = time.process_time()
    return f(*args, **how), time.process_time() - start


def row(layers: int, batch: int, meshes: Sequence[Mapping[str, int]], share: float | None) -> list[Any]:
    """Recording, a search, the price of what it finds, and `vfn.auto`."""
    step, args = stepping(layers, batch)
    recorded, record_seconds = timed(record, step, *args)
    ranks = max(torch.Size(mesh.values()).numel() for mesh in meshes)
    hardware, memory = vfn.hardware.h100(-(-ranks // 8)), None
    if share is not None:
        memory = share * searched(recorded, meshes, hardware, candidates=1)[0].bytes
    what = f"{ranks} ranks, {len(meshes)} mesh{'es' * (len(meshes) > 1)}"
    start = time.process_time()
    try:
        best = searched(recorded, meshes, hardware, memory, candidates=1, seconds=SECONDS)[0]
    except vfn.errors.VfnError as error:
        told = str(error).splitlines()[0].removeprefix("auto: ")
        return [layers, what, share or "", record_seconds, time.process_time() - start, "", "", told]
    seconds = time.process_time() - start
    _, priced = timed(priced_as, recorded, best.layouts, hardware, (0, 1))
    how: dict[str, Any] = {"mesh": meshes, "hardware": hardware, "donate_argnums": (0, 1), "seconds": SECONDS}
    _, whole = timed(vfn.auto, step, *args, memory=None if memory is None else int(memory), **how)
    proven = "yes" if best.proven else "within 0.5 %"
    return [layers, what, share or "", record_seconds, seconds, priced, whole, proven]


def main() -> None:
    torch.set_num_threads(1)
    rows = list[list[Any]]()
    for layers in (8, 24, 80):
        rows += [row(layers, 64, [MESH], share) for share in LIMITS]
        print(*rows, sep="\n", flush=True)
    rows.append(row(80, 1024, vfn.mesh_shapes(1024, nodes=128), None))
    columns = [
        "layers",
        "on",
        "memory",
        "record, s",
        "search, s",
        "price of one, s",
        "whole, s",
        "proven to be the best",
    ]
    publish("search_time", columns, rows)


if __name__ == "__main__":
    main()
