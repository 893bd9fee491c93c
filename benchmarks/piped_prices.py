"""What `vfn.price` predicts for pipelines, beside what four processes over gloo measure.

A training step of a GPT of eight layers (gradients, AdamW, donated arguments) whose stages run on two or four ranks, by several
schedules and numbers of microbatches, alone and with data and tensor parallelism. As in `benchmarks.prices`; what each rank
sends and holds is compared with what is predicted of the ranks at its place.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

import vescale_fn as vfn
from benchmarks import prices
from benchmarks.side_by_side import publish
from vescale_fn.recipes import gpt, models
from vescale_fn.recipes.parallel import parallel

CONFIG, SIZE, LENGTH = gpt.Config(vocab=512, dim=128, heads=4, hidden=512, layers=8, dropout=0.0), 16, 64
FOUR, DATA, TENSOR = {"pp": 4}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}
LAYOUTS: list[tuple[str, dict[str, int], dict[str, Any]]] = [  # layout, mesh, and how it is a pipeline
    ("pp", FOUR, {"microbatches": 4, "schedule": "1f1b"}),
    ("pp", FOUR, {"microbatches": 16, "schedule": "1f1b"}),
    ("pp", FOUR, {"microbatches": 4, "schedule": "zb-h1"}),
    ("pp", FOUR, {"microbatches": 4, "schedule": "interleaved"}),
    ("pp", FOUR, {"microbatches": 1, "schedule": "gpipe"}),
    ("pp+dp", DATA, {"microbatches": 4, "schedule": "1f1b"}),
    ("pp+fsdp", DATA, {"microbatches": 4, "schedule": "zbv"}),
    ("pp+fsdp", DATA, {"microbatches": 4, "schedule": "1f1b", "gather": "microbatch"}),
    ("pp+tp", TENSOR, {"microbatches": 2, "schedule": "1f1b"}),
    ("pp+tp", TENSOR, {"microbatches": 8, "schedule": "1f1b"}),
]


def stepped(
    text: str, how: dict[str, Any], mesh: Any, config: gpt.Config = CONFIG
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], Any]:
    """A step in a layout, the shapes of its arguments, their specs, and what makes the arguments."""
    layout, optimizer = parallel(text, mesh), vfn.optim.adamw(1e-4)
    config = models.laid_out(config, layout)
    initial = functools.partial(gpt.init, config=config)
    shapes = vfn.eval_shape(initial, prices.KEY)
    batch = functools.partial(models.random_batch, config=config, size=SIZE, length=LENGTH)
    loss = layout.pipelined(lambda params, data: gpt.loss(params, data, config), **how)
    with vfn.use_mesh(mesh):
        data = vfn.shard(vfn.eval_shape(batch, prices.KEY), mesh, layout.spec("batch"))
        specs = layout.specs(shapes, gpt.NAMES, mesh).staged(loss, shapes, data)
        state = specs.init(optimizer, vfn.shard(shapes, mesh, specs.params))

    def step(params: Any, state: Any, data: Any) -> Any:
        value, grads = vfn.value_and_grad(loss)(params, data)
        return *specs.update(optimizer, grads, state, params), value

    def made() -> Any:
        params = vfn.init(initial, prices.KEY, spec=specs.params, mesh=mesh)
        return params, specs.init(optimizer, params), vfn.shard(batch(prices.KEY), mesh, layout.spec("batch"))

    return vfn.jit(step, donate_argnums=(0, 1)), (shapes, state, data), (specs.params, None, None), made


def priced(text: str, sizes: dict[str, int], how: dict[str, Any], hardware: Any, config: gpt.Config = CONFIG) -> Any:
    """The price of a layout."""
    mesh = vfn.abstract_mesh(tuple(sizes.values()), tuple(sizes))
    step, shapes, specs, _ = stepped(text, how, mesh, config)
    return vfn.price(step, *shapes, specs=specs, mesh=mesh, hardware=hardware)


def run(
    layouts: Sequence[tuple[str, dict[str, int], dict[str, Any]]],
    rounds: int = prices.ROUNDS,
    config: gpt.Config = CONFIG,
) -> list[Any]:
    """On this rank, of each layout, what `benchmarks.prices.run` gives."""
    made = [(sizes, functools.partial(stepped, text, how, config=config)) for text, sizes, how in layouts]
    return prices.measured(made, rounds)


def beside(price: Any, found: Sequence[tuple[float, dict[str, tuple[int, int]], int]], sizes: dict[str, int]) -> Any:
    """Of what ranks found: on how many of them bytes or calls are others than predicted, and the worst ratio of the peaks."""
    wrong, ratios = 0, []
    for rank, (_, sent, alive) in enumerate(found):
        own = price.ranks[rank * sizes["pp"] // len(found)]  # "pp" is the outermost axis
        wrong += {axis: (own.calls[axis], own.bytes[axis]) for axis in own.calls} != sent
        ratios.append(own.peak / alive)
    return wrong, max(ratios, key=lambda ratio: abs(ratio - 1))


def main() -> None:
    torch.set_num_threads(1)
    hardware = prices.hardware()
    predicted = [priced(*one, hardware) for one in LAYOUTS]
    found = list(zip(*vfn.launch(run, prices.RANKS, LAYOUTS, device="cpu")))  # by layout what each rank found
    times = [statistics.mean(seconds for seconds, *_ in ranks) for ranks in found]
    rows = []
    for (text, sizes, how), price, time, ranks in zip(LAYOUTS, predicted, times, found):
        mesh = ", ".join(f"{axis}={n}" for axis, n in sizes.items())
        told = ", ".join(map(str, how.values()))
        bubble = price.bubble / price.seconds
        rows.append([text, mesh, told, price.seconds * 1e3, bubble, time * 1e3, *beside(price, ranks, sizes)])
    correlation = prices.spearman([one.seconds for one in predicted], times)
    worst = max((row[-1] for row in rows), key=lambda ratio: abs(ratio - 1))
    rows.append(["all", "", f"Spearman {correlation:.3f}", "", "", "", sum(row[-2] for row in rows), worst])
    columns = [
        "layout",
        "mesh",
        "parts, schedule",
        "predicted ms",
        "of it bubble",
        "measured ms",
        "ranks that differ",
        "peak, predicted / alive",
    ]
    publish("piped_prices", columns, rows)


if __name__ == "__main__":
    main()
