"""Loss curves on meshes beside those of one device: every model, every parallelism, every mesh of up to 8 simulated ranks.

No clock is read. A step is loss, gradients, clipping by their norm and AdamW, with dropout on (but in zigzag order, where
it goes by another order than on one device), replayed from one plan. A pipeline's is beside the same parts of the batch. In
float64 sums in another order explain a difference of 1e-15 or so, and a mistake always shows; in float32 curves drift apart.
``python -m benchmarks.parity`` runs all of it, hours on two cores; ``--sample`` one mesh of each row, the largest; ``--models
llama,dit`` and ``--rows fsdp,tp+sp`` some rows, the others of the table staying. tests/test_parallelisms.py runs a few steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import vescale_fn as vfn
from benchmarks.side_by_side import RESULTS, publish
from vescale_fn import P
from vescale_fn._core.base import tree
from vescale_fn.recipes import dit, gpt, llama, mixtral, models, parallel, resnet

BATCH, LENGTH, LARGEST = 8, 12, 8
MICROBATCHES, SCHEDULE = 2, "zb-h1"  # of pipelines
EXACT, DRIFTING = (torch.float64, 20, 1e-12), (torch.float32, 100, 6e-5)  # dtype, steps, largest difference of losses
KEY = vfn.random.key(0)
CONFIGS = {
    "gpt": gpt.Config(vocab=24, context=16, dim=16, heads=4, layers=2, hidden=24, dropout=0.2),
    "llama": llama.Config(vocab=24, dim=16, heads=4, groups=2, layers=2, hidden=24, dropout=0.2),
    "mixtral": mixtral.Config(
        vocab=24, dim=16, heads=4, groups=2, layers=2, hidden=12, experts=4, capacity=1.0, dropout=0.2
    ),
    "dit": dit.Config(size=8, patch=2, classes=5, dim=16, heads=4, layers=2, hidden=24, frequencies=8, dropout=0.2),
    "resnet": resnet.Config(classes=5, widths=(8, 16), blocks=1, groups=4, dropout=0.2),
}
ROWS = (
    "dp zero1 zero2 fsdp fsdp+remat fsdp+reshard hsdp tp tp+sp vp cp cp-zigzag cp-gather cp-ulysses ep "
    "dp+tp zero1+tp zero2+tp+sp fsdp+tp fsdp+tp+sp+vp+remat hsdp+tp dp+cp fsdp+cp+tp dp+ep fsdp+ep+tp dp+cp+ep "
    "pp pp+zero1 pp+fsdp pp+tp+sp pp+fsdp+tp+vp+remat pp+hsdp pp+cp pp+fsdp+ep"
).split()


class Run(NamedTuple):
    """What a run gives: the losses, the parameters before and after, and what dropout makes of ones."""

    losses: list[float]
    first: Any
    last: Any
    mask: torch.Tensor


def alone(text: str) -> str:
    """What one device runs beside a row of parallelisms: the parts of a pipeline; without dropout where positions lie in
    zigzag order."""
    return "pp" if "pp" in text.split("+") else "cp-zigzag" if "cp-zigzag" in text.split("+") else ""


def train(name: str, dtype: torch.dtype, steps: int, text: str = "", mesh: Any = None, jit: bool = True) -> Run:
    """Train a model by the parallelisms that `text` names; without a mesh, as one device does beside them, see `alone`."""
    layout = parallel.ONE_DEVICE if mesh is None else parallel.parallel(text, mesh)
    model, config = models.MODELS[name], models.laid_out(CONFIGS[name], layout)
    config = dataclasses.replace(config, dropout=0.0) if "cp-zigzag" in text else config
    loss = lambda params, batch, key: model.loss(params, batch, config, key)
    if alone(text) == "pp":
        loss = vfn.pipeline(loss, "pp", microbatches=MICROBATCHES, schedule=SCHEDULE)
    optimizer = vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), vfn.optim.adamw(3e-3))
    specs, mask = parallel.Specs(P(), P(), P()), torch.ones(BATCH, LENGTH, 6, dtype=dtype)
    if mesh is None:
        params = model.init(KEY, config, dtype)
    else:
        shapes = vfn.eval_shape(model.init, KEY, config, dtype)
        batch = vfn.shard(models.random_batch(KEY, config, BATCH, LENGTH, dtype), mesh, layout.spec("batch"))
        specs = layout.specs(shapes, model.NAMES, mesh).staged(loss, shapes, batch, KEY)
        params = vfn.init(model.init, KEY, config, dtype, spec=specs.params, mesh=mesh)
        mask = vfn.shard(mask, mesh, layout.spec("batch", "norm_length"))
    first, state, losses = vfn.unshard(params), specs.init(optimizer, params), []

    def step(params: Any, state: Any, batch: Any, key: vfn.random.Key) -> Any:
        value, grads = vfn.value_and_grad(loss)(params, batch, key)
        params, state = specs.update(optimizer, grads, state, params)
        return params, state, value

    run = vfn.jit(step) if jit else step
    for i in range(steps):
        batch = models.random_batch(vfn.random.fold_in(KEY, i % 4), config, BATCH, LENGTH, dtype)
        batch = batch if mesh is None else vfn.shard(batch, mesh, layout.spec("batch"))
        params, state, value = run(params, state, batch, vfn.random.fold_in(KEY, 100 + i))
        losses.append(vfn.unshard(value).item())
    return Run(losses, first, vfn.unshard(params), vfn.unshard(vfn.random.dropout(KEY, mask, 0.3)))


def on_mesh(name: str, dtype: torch.dtype, steps: int, text: str, sizes: dict[str, int], jit: bool = True) -> Run:
    """Train on a mesh of these axes, of the ranks that there are."""
    mesh = vfn.make_mesh(tuple(sizes.values()), tuple(sizes))
    with vfn.use_mesh(mesh):
        return train(name, dtype, steps, text, mesh, jit)


def apart(one: Run, other: Run) -> float:
    """The largest difference of two runs' losses; infinite where parameters or masks do not begin as the same bits."""
    begun = [
        torch.equal(a, b) for a, b in zip(tree.leaves((one.first, one.mask)), tree.leaves((other.first, other.mask)))
    ]
    differences = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    return math.inf if not all(begun) or any(map(math.isnan, differences)) else max(differences)


def meshes(name: str, text: str, largest: int = LARGEST) -> Iterator[dict[str, int]]:
    """The meshes of 2 to `largest` ranks for a parallelism: all sizes of its axes from 2 on, but that ranks which share a
    sequence need as many positions each, or by exchange as many heads, those that share experts as many of these, and that
    there are three stages at most."""
    config, layout = CONFIGS[name], parallel.parallel(text)
    positions = (config.size // config.patch) ** 2 if name == "dit" else LENGTH
    if layout.method == "all_to_all":
        positions = math.gcd(positions, config.heads)
    positions //= 1 if layout.zigzag == 0 else 2
    axes = [
        axis
        for axis in parallel.AXES
        if any(axis in names for _, names in layout.dims) or (axis == "pp" and layout.stages)
    ]
    for sizes in itertools.product(range(2, largest + 1), repeat=len(axes)):
        found = dict(zip(axes, sizes))
        divides = not positions % found.get("cp", 1) and not 4 % found.get("ep", 1)
        if math.prod(sizes) <= largest and divides and found.get("pp", 1) <= 3:
            yield found


def rows(names: list[str], texts: list[str]) -> Iterator[tuple[str, str]]:
    """The models, each with the parallelisms that it has dims for."""
    return ((name, text) for name in names for text in texts if models.suits(name, text))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity")
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--sample", action="store_true", help="of each row the largest mesh alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, one = [], {}
    for name, text in rows(options.models.split(","), options.rows.split(",")):
        every = list(meshes(name, text))
        every = every[-1:] if options.sample else every
        worst = {}
        for kind in EXACT, DRIFTING:
            dtype, steps, _ = kind
            key = name, dtype, alone(text)
            if key not in one:
                one[key] = train(name, dtype, steps, key[2])
            worst[dtype] = 0.0
            for sizes in every if kind is EXACT else every[-1:]:
                with vfn.simulate(math.prod(sizes.values())):
                    worst[dtype] = max(worst[dtype], apart(one[key], on_mesh(name, dtype, steps, text, sizes)))
        last = ", ".join(f"{axis}={size}" for axis, size in every[-1].items())
        same = "yes" if max(worst.values()) < math.inf else "NO"
        found.append([name, text, len(every), last, *worst.values(), same])
        print(*found[-1], flush=True)
        published(found)  # what is done stays done, if the rest is not
    assert all(row[4] < EXACT[2] and row[5] < DRIFTING[2] for row in found)


def published(found: list[list[Any]]) -> None:
    """Put rows into the table, in the place of those of the same models and parallelisms."""
    kept = RESULTS / "parity.json"
    before = json.loads(kept.read_text())["rows"] if kept.exists() else []
    every = {(name, text): [name, text, *rest] for name, text, *rest in [*before, *found]}
    columns = [
        "model",
        "parallelism",
        "meshes",
        "the last",
        "float64, 20 steps",
        "float32, 100 steps",
        "same bits first",
    ]
    publish("parity", columns, [every[key] for key in itertools.product(CONFIGS, ROWS) if key in every], say=False)


if __name__ == "__main__":
    main()
