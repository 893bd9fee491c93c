"""Offsets in a static arena: MiniMalloc's public instances beside greedy placement, the arenas of steps, and steps in them."""

from __future__ import annotations

import csv
import functools
import math
import time
from pathlib import Path
from typing import Any

import torch

import vescale_fn as vfn
from benchmarks.peak_memory import SIZES
from benchmarks.side_by_side import medians, publish
from vescale_fn.plan.execution import in_arena
from vescale_fn.plan.ir import memory_aliases, packing
from vescale_fn.recipes import gpt, llama, mixtral, models, transformer
from vescale_fn.recipes.parallel import parallel

INSTANCES = Path(__file__).parent / "data" / "minimalloc"
CAPACITY = 1_048_576
WORK = 20_000_000_000  # about ten seconds


def instances() -> list[list[Any]]:
    """Each instance: the height of the best of the greedy orders, ours, and the seconds that it took."""
    rows = []
    for path in sorted(INSTANCES.glob("*.csv")):
        with path.open() as file:
            buffers = [(int(row["lower"]), int(row["upper"]) - 1, int(row["size"])) for row in csv.DictReader(file)]
        greedy = packing.pack(*zip(*buffers), work=0)
        start = time.process_time()
        found = packing.pack(*zip(*buffers), capacity=CAPACITY, work=WORK)
        seconds = time.process_time() - start
        fits = "yes" if found.height <= CAPACITY else "no"
        rows.append([path.stem, len(buffers), found.least / CAPACITY, greedy.height / CAPACITY, fits, seconds])
    return rows


def peak_memory_steps() -> Any:
    """The three steps of `peak_memory`, as plans."""
    opt = vfn.optim.adamw(1e-3, weight_decay=1e-2)
    for name, (config, size, length) in SIZES.items():
        params = transformer.init(vfn.random.key(0), config)
        batch = vfn.random.randint(vfn.random.key(1), (size, length + 1), 0, 256).long()

        def step(params: Any, state: Any, batch: torch.Tensor, config: Any = config) -> Any:
            loss, grads = vfn.value_and_grad(transformer.loss)(params, batch, config)
            updates, state = opt.update(grads, state, params)
            return loss, vfn.optim.apply_updates(params, updates), state

        yield f"transformer, mostly {name}", vfn.jit(step, donate_argnums=(0, 1)).lower(params, opt.init(params), batch)


def placed_steps() -> list[list[Any]]:
    """The three steps of `peak_memory`: what of the bytes that they make lies in the arena, and their time."""
    opt, rows = vfn.optim.adamw(1e-3, weight_decay=1e-2), []
    for name, (config, size, length) in SIZES.items():
        params = transformer.init(vfn.random.key(0), config)
        state = opt.init(params)
        batch = vfn.random.randint(vfn.random.key(1), (size, length + 1), 0, 256).long()

        def step(params: Any, state: Any, batch: torch.Tensor, config: Any = config) -> Any:
            loss, grads = vfn.value_and_grad(transformer.loss)(params, batch, config)
            updates, state = opt.update(grads, state, params)
            return loss, vfn.optim.apply_updates(params, updates), state

        usual, placed = vfn.jit(step), vfn.jit(step, arena=True)
        graph = usual.lower(params, state, batch).graph
        inside = sum(life.bytes for lives in in_arena.placeable(graph).values() for life in lives)
        made = sum(memory.bytes for memory in memory_aliases.last_uses(graph) if memory.maker.op == "call_function")
        times = medians(
            {
                "without": functools.partial(usual, params, state, batch),
                "with": functools.partial(placed, params, state, batch),
            },
            rounds=15,
        )
        rows.append([f"transformer, mostly {name}", inside / made, times["with"] / times["without"]])
    return rows


def recipe_step(model: Any, config: Any, text: str, **sizes: int) -> Any:
    """A step of a recipe's model on a simulated mesh, as a plan; of one rank where there is one."""
    key = vfn.random.key(0)
    with vfn.simulate(math.prod(sizes.values())):
        mesh = vfn.make_mesh(tuple(sizes.values()), tuple(sizes))
        layout = parallel(text, mesh)
        laid_out, opt = models.laid_out(config, layout), vfn.optim.adamw(1e-3)
        params = model.init(key, laid_out)
        specs = layout.specs(params, model.NAMES, mesh)
        params = vfn.shard(params, mesh, specs.params)
        state = specs.init(opt, params)
        batch = vfn.shard(models.random_batch(key, laid_out, 8, 64), mesh, layout.spec("batch"))

        def step(params: Any, state: Any, batch: Any) -> Any:
            loss, grads = vfn.value_and_grad(model.loss)(params, batch, laid_out, key)
            return loss, specs.update(opt, grads, state, params)

        with vfn.use_mesh(mesh):
            return vfn.jit(step, donate_argnums=(0, 1)).lower(params, state, batch)


def steps() -> Any:
    """Plans by name."""
    yield from peak_memory_steps()
    yield "GPT, 4 layers", recipe_step(gpt, gpt.Config(vocab=256, dim=64, heads=4, layers=4), "dp", dp=1)
    config = llama.Config(vocab=256, dim=64, heads=4, groups=2, layers=4, hidden=192)
    yield "Llama, 4 layers", recipe_step(llama, config, "dp", dp=1)
    yield "Llama, 4 layers, fsdp on 4 simulated ranks", recipe_step(llama, config, "fsdp", dp=4)
    sparse = mixtral.Config(vocab=256, dim=64, heads=4, groups=2, layers=2, hidden=96, experts=4)
    yield "Mixtral, 2 layers", recipe_step(mixtral, sparse, "dp", dp=1)


def main() -> None:
    torch.set_num_threads(1)
    columns = ["instance", "buffers", "alive at once / capacity", "best greedy / capacity", "fits", "s"]
    publish("minimalloc", columns, instances())
    rows = []
    for name, lowered in steps():
        start = time.process_time()
        arena = lowered.arena()
        seconds = time.process_time() - start
        apart = sum(slot.bytes for slot in arena.slots) / arena.bytes
        rows.append([name, len(arena.slots), arena.bytes / 2**20, apart, arena.bytes / arena.least, seconds])
    columns = ["plan", "values", "arena, MiB", "apart / arena", "arena / alive at once", "s"]
    publish("arena", columns, rows)
    publish("in_arena", ["step", "bytes in the arena / made", "time in it / without"], placed_steps())


if __name__ == "__main__":
    main()
