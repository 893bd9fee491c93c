"""A first call whose plan comes from a file, beside one that records: a step of a GPT with AdamW and dropout, on one device;
and the step of a Llama-7B on 512 ranks, whose plan one process saves for all of them."""

from __future__ import annotations

import functools
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import vescale_fn as vfn
from benchmarks import any_size
from benchmarks.side_by_side import publish
from vescale_fn.recipes import gpt, models

KEY = vfn.random.key(0)


def seconds(call: Callable[[], Any]) -> float:
    """How long a call keeps this process on the CPU."""
    start = time.process_time()
    call()
    return time.process_time() - start


def row(layers: int, path: Path) -> list[Any]:
    """Layers, nodes, seconds of a first call that records, and of one that reads the file; their ratio; the file."""
    config, opt = gpt.Config(vocab=256, dim=64, heads=4, layers=layers), vfn.optim.adamw(1e-3)
    params = gpt.init(KEY, config)
    args = params, opt.init(params), models.random_batch(KEY, config, 8, 64), KEY

    def step(params: Any, state: Any, batch: Any, key: Any) -> Any:
        mine, key = vfn.random.split(key)
        loss, grads = vfn.value_and_grad(gpt.loss)(params, batch, config, mine)
        updates, state = opt.update(grads, state, params)
        return loss, vfn.optim.apply_updates(params, updates), state, key

    recording = vfn.jit(step)
    recorded = seconds(lambda: recording(*args))
    plan = recording.lower(*args)
    vfn.save_plan(plan, path)
    loaded = seconds(lambda: vfn.jit(step, plans=[vfn.load_plan(path)])(*args))
    return [layers, len(plan.graph.nodes), recorded, loaded, loaded / recorded, path.stat().st_size / 2**20]


def for_every_rank(name: str, path: Path) -> list[Any]:
    """The model, its ranks; seconds to record its step, to save it for all ranks, to prepare it on one from the file; how many
    plans the file has, its size."""
    model, config, sizes = any_size.LARGE[name]
    ranks, made = math.prod(sizes.values()), list[Any]()
    planned = functools.partial(any_size.planned, model, config, "fsdp+tp", sizes, sizes["dp"], 4096, torch.bfloat16)
    recorded = seconds(lambda: made.append(planned()[0]))
    saved = seconds(lambda: vfn.save_plan(made[0], path))
    loaded = seconds(lambda: planned(rank=ranks - 3, plans=[vfn.load_plan(path)]))
    plans = len(json.loads(path.read_text())["plans"])
    return [name, ranks, recorded, saved, loaded, plans, path.stat().st_size / 2**20]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.plan"
        row(1, path)  # what the first plan of a process pays once
        rows = [row(layers, path) for layers in (2, 8, 32)]
        every = [for_every_rank(name, path) for name in ("Llama-7B", "Mixtral 8x7B")]
    columns = ["layers", "nodes", "records, s", "reads the file, s", "ratio", "file, MiB"]
    publish("saved_plan", columns, rows)
    columns = ["model", "ranks", "records, s", "saves for every rank, s", "reads on one, s", "plans", "file, MiB"]
    publish("saved_for_every_rank", columns, every)


if __name__ == "__main__":
    main()
