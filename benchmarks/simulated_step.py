"""A step of the recipe's transformer on 8 simulated ranks, beside 8 steps on one device; and where its time goes."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import vescale_fn as vfn
from benchmarks.side_by_side import medians, publish
from vescale_fn import P
from vescale_fn.recipes import transformer

MESHES = {"(8,) dp": ((8, 1), ("dp", "tp")), "(2, 4) dp, tp": ((2, 4), ("dp", "tp"))}
SIZES = {
    "tiny": (transformer.Config(dim=32, heads=4, layers=2, hidden=64, dropout=0.0), 16, 16),
    "the recipe's": (transformer.Config(dropout=0.0), 16, 64),
}
PACKAGE, TORCH = str(Path(vfn.__file__).parent), str(Path(torch.__file__).parent)


def step(config: transformer.Config, params: Any, batch: torch.Tensor) -> Any:
    """SGD, as one pure function of parameters and batch."""
    opt = vfn.optim.sgd(1e-3)
    _, grads = vfn.value_and_grad(transformer.loss)(params, batch, config)
    updates, _ = opt.update(grads, opt.init(params), params)
    return vfn.optim.apply_updates(params, updates)


def profile(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """The share of each of our files, and of torch, in the time of a call (by its own time, under cProfile)."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(3):
        call()
    profiler.disable()
    shares: Counter[str] = Counter()
    for (file, _, _), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if file.startswith(PACKAGE):
            shares[str(Path(file).relative_to(PACKAGE))] += own
        elif file == "~":
            shares["built-in calls (torch's C++ among them)"] += own
        elif file.startswith(TORCH):
            shares[str(Path("torch") / Path(file).relative_to(TORCH))] += own
        else:
            shares["other Python"] += own
    total = sum(shares.values())
    return [(name, time / total) for name, time in shares.most_common(8)]


def main() -> None:
    torch.set_num_threads(1)
    rows, spent = [], {}
    for size, (config, batch_size, length) in SIZES.items():
        params = transformer.init(vfn.random.key(0), config)
        batch = vfn.random.randint(vfn.random.key(1), (batch_size, length + 1), 0, 256).long()
        eighth = batch[: batch_size // 8]

        def alone(config: Any = config, params: Any = params, eighth: Any = eighth) -> None:
            for _ in range(8):
                step(config, params, eighth)

        calls = {"8 steps alone": alone}
        with vfn.simulate(8):
            for name, (shape, names) in MESHES.items():
                mesh = vfn.make_mesh(shape, names)
                there = vfn.shard(params, mesh, vfn.spec_from_rules(params, transformer.SPECS))
                parts = vfn.shard(batch, mesh, P("dp"))

                def on_mesh(config: Any = config, mesh: Any = mesh, there: Any = there, parts: Any = parts) -> None:
                    with vfn.use_mesh(mesh):
                        step(config, there, parts)

                calls[name] = on_mesh
            took = medians(calls, rounds=15)
            base = took["8 steps alone"]
            for name in MESHES:
                rows.append([size, name, base / 1000, took[name] / 1000, took[name] / base])
                spent[f"{size}, {name}"] = profile(calls[name])
    publish(
        "simulated_step",
        ["model", "mesh", "8 single-device steps, ms", "one simulated step, ms", "ratio"],
        rows,
        spent=spent,
    )
    text = [[case, ", ".join(f"{name} {share:.0%}" for name, share in shares)] for case, shares in spent.items()]
    publish("where_the_time_goes", ["step", "own time under cProfile"], text)


if __name__ == "__main__":
    main()
