"""What `vfn.auto` chooses for large models, beside the rows of `recipes.parallel`, within three amounts of memory.

A training step (float32 parameters, computed in bfloat16, AdamW, donated arguments) of Llama 7B and 70B, Mixtral 8x22B and
DiT-XL on 64, 256 and 1,024 H100s that nobody has, 8 a node: 4,096 tokens a rank, 4 million on 1,024. Rows, joined as
experts do, are priced as they are written, on meshes that suit them; the search knows none of them. All figures are
predicted. The memory is 80 GiB, then a tenth less than what the fastest row that fits needs, twice.

``python -m benchmarks.chosen_layouts "DiT-XL" 64`` takes one model on so many ranks; a third argument, how many layers; a
fourth, how many amounts of memory. What was found is kept beside what was before, so that the table may be made in pieces;
without arguments those are taken that are missing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import subprocess
import sys
import time
from types import ModuleType
from typing import Any

import torch

import vescale_fn as vfn
from benchmarks.side_by_side import RESULTS, publish
from vescale_fn.recipes import dit, llama, mixtral, models, rows
from vescale_fn.recipes.parallel import ONE_DEVICE

KEY, NODE, RANKS, LARGEST = vfn.random.key(0), 8, (64, 256, 1024), 80 * 2**30
SECONDS = 600.0  # that a search has, of which it takes a part: what it finds is not to depend on how busy a machine is
POLICY = vfn.precision.policy("params=f32,compute=bf16")
# name: model, sizes, examples for each rank, their length
MODELS: dict[str, tuple[ModuleType, Any, int, int]] = {
    "Llama 7B": (
        llama,
        llama.Config(vocab=32000, dim=4096, heads=32, groups=32, layers=32, hidden=11008, dropout=0.0),
        1,
        4096,
    ),
    "Llama 70B": (
        llama,
        llama.Config(vocab=32000, dim=8192, heads=64, groups=8, layers=80, hidden=28672, dropout=0.0),
        1,
        4096,
    ),
    "Mixtral 8x22B": (
        mixtral,
        mixtral.Config(vocab=32000, dim=6144, heads=48, groups=8, layers=56, hidden=16384, dropout=0.0),
        1,
        4096,
    ),
    "DiT-XL": (
        dit,
        dit.Config(
            size=32, patch=2, channels=4, classes=1000, dim=1152, heads=16, layers=28, hidden=4608, frequencies=256
        ),
        16,
        32,
    ),
}
OF_DATA = (
    "dp",
    "zero1",
    "fsdp",
    "fsdp+remat",
    "fsdp+reshard",
    "hsdp",
    "hsdp+remat",
    "fsdp+cp-ulysses",
    "fsdp+cp-gather",
)
OF_TENSORS = (
    "zero1+tp+sp+vp",
    "zero1+tp+sp+vp+remat",
    "fsdp+tp+sp+vp",
    "fsdp+tp+sp+vp+remat",
    "fsdp+tp+sp",
    "fsdp+tp+vp",
)
OF_IMAGES = ("zero1+tp+sp", "zero1+tp+sp+remat", "fsdp+tp+sp", "fsdp+tp+sp+remat", "fsdp+tp")
OF_EXPERTS = ("zero1+ep", "fsdp+ep", "fsdp+ep+remat")
COLUMNS = (
    *("model", "ranks", "layers", "GiB there are", "fastest row that fits", "its ms", "its GiB at most", "its GB sent"),
    *("ms of the search's own", "its GiB", "its GB", "search / row", "what it is"),
)


def stepped(name: str, ranks: int, layers: int = 0) -> tuple[Any, tuple[Any, ...], dict[str, rows.Row]]:
    """The step as for one device, the shapes of its arguments, and the rows."""
    model, config, count, length = MODELS[name]
    config = dataclasses.replace(config, layers=layers or config.layers)
    optimizer = vfn.optim.adamw(1e-4)
    params = vfn.eval_shape(functools.partial(model.init, config=config), KEY)
    batch = functools.partial(models.random_batch, config=config, size=count * ranks, length=length)
    args = params, vfn.eval_shape(optimizer.init, params), vfn.eval_shape(batch, KEY)

    def make(layout: Any, specs: Any) -> Any:
        return rows.training(model, models.laid_out(config, layout), optimizer, specs, POLICY)

    texts = OF_DATA + (OF_IMAGES if model is dit else OF_TENSORS) + (OF_EXPERTS if model is mixtral else ())
    meshes = [mesh for mesh in rows.meshes(ranks, ranks // NODE) if mesh.get("tp") != 4]
    return make(ONE_DEVICE, None), args, rows.rows(make, args, model.NAMES, optimizer, meshes, texts)


def one(name: str, ranks: int, layers: int = 0, budgets: int = 3) -> list[list[Any]]:
    """The rows of the table for a model on so many ranks."""
    began = time.process_time()
    hardware = vfn.hardware.h100(nodes=ranks // NODE)
    step, args, given = stepped(name, ranks, layers)
    how = {"hardware": hardware, "donate_argnums": (0, 1)}
    prices = {}
    for text, (own, specs, mesh) in given.items():
        prices[text] = vfn.price(own, *args, specs=specs, mesh=mesh, **how)
        told(f"{text}: {figures(prices[text])}, {time.process_time() - began:.0f} s")
    found, memory = list[list[Any]](), float(LARGEST)
    for _ in range(budgets):
        fit = {text: price for text, price in prices.items() if price.peak <= memory}
        if not fit:
            break
        best = min(fit, key=lambda text: fit[text].seconds)
        beside = [best, *figures(fit[best])]
        try:
            meshes = vfn.mesh_shapes(ranks, nodes=ranks // NODE)
            choice = vfn.auto(step, *args, mesh=meshes, memory=int(memory), seconds=SECONDS, **how)
            chosen: list[Any] = [*figures(choice.predicted), choice.predicted.seconds / fit[best].seconds, said(choice)]
        except vfn.errors.VfnError as error:
            chosen = [math.nan, math.nan, math.nan, math.nan, str(error).splitlines()[0]]
        found.append([name, ranks, layers or MODELS[name][1].layers, memory / 2**30, *beside, *chosen])
        told(f"{found[-1]}, {time.process_time() - began:.0f} s")
        memory = 0.9 * fit[best].peak
    return found


def figures(price: Any) -> list[float]:
    """Milliseconds, GiB at most, GB sent by a rank."""
    return [price.seconds * 1e3, price.peak / 2**30, sum(price.bytes.values()) / 1e9]


def said(choice: Any) -> str:
    """A layout in a few words."""
    axes = ", ".join(f"{axis}={size}" for axis, size in choice.layouts.mesh.items())
    kinds: dict[str, int] = {}
    for spec in vfn.tree.leaves(choice.specs[0]):
        kinds[repr(spec)] = kinds.get(repr(spec), 0) + 1
    most = sorted(kinds, key=lambda kind: -kinds[kind])[:3]
    held = f"; {choice.ranked[0].held}" if choice.ranked[0].held else ""
    return f"{axes}; parameters {', '.join(f'{kinds[kind]} {kind}' for kind in most)}{held}"


def told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def kept() -> list[list[Any]]:
    """The rows that were found before."""
    path = RESULTS / "chosen_layouts.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def keep(new: list[list[Any]]) -> None:
    """Put rows in the place of those of the same model, ranks and layers."""
    names, pieces = list(MODELS), {tuple(row[:3]) for row in new}
    rows = [*(row for row in kept() if tuple(row[:3]) not in pieces), *new]
    publish("chosen_layouts", COLUMNS, sorted(rows, key=lambda row: (names.index(row[0]), row[1], row[2], -row[3])))


def main() -> None:
    there = {(name, ranks, layers) for name, ranks, layers, *_ in kept()}
    for name, (_, config, *_) in MODELS.items():
        for ranks in RANKS:
            if (name, ranks, config.layers) not in there:
                here = [sys.executable, "-m", "benchmarks.chosen_layouts", name, str(ranks)]
                subprocess.run(here, check=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        keep(one(sys.argv[1], *map(int, sys.argv[2:])))
    else:
        main()
