"""What `vfn.price` predicts for layouts of the recipes' models, beside what four processes over gloo measure.

A training step (gradients, AdamW, donated arguments) of GPT, Llama, Mixtral and DiT in rows of `recipes.parallel` and
their compositions, on meshes of four ranks. `vfn.hardware.measure` says what the ranks do in a second; each layout is priced in
a bare process, from shapes. Then four processes run it: of each, the median wall time of rounds in which all layouts of a model
take turns, collectives and bytes as `comm_log` counts them, and the most bytes that were alive on rank 0.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

import vescale_fn as vfn
from benchmarks.peak_memory import Accountant
from benchmarks.side_by_side import publish
from vescale_fn.recipes import dit, gpt, llama, mixtral, models
from vescale_fn.recipes.parallel import parallel

RANKS, ROUNDS, KEY = 4, 7, vfn.random.key(0)
# name: model, sizes, sequences (or images), their length
MODELS: dict[str, tuple[ModuleType, Any, int, int]] = {
    "gpt": (gpt, gpt.Config(vocab=512, dim=128, heads=4, hidden=512, layers=2, dropout=0.0), 8, 128),
    "llama": (llama, llama.Config(vocab=1024, dim=192, heads=4, groups=4, hidden=512, layers=2, dropout=0.0), 8, 64),
    "mixtral": (mixtral, mixtral.Config(dim=128, groups=4, hidden=256, experts=4, layers=2, dropout=0.0), 8, 64),
    "dit": (dit, dit.Config(dim=128, layers=3), 16, 32),
}
FOUR = {"dp": {"dp": 4}, "tp": {"tp": 4}, "cp": {"cp": 4}, "ep": {"ep": 4}, "replica": {"replica": 2, "dp": 2}}
TWO = {
    "dp+tp": {"dp": 2, "tp": 2},
    "dp+cp": {"dp": 2, "cp": 2},
    "cp+tp": {"cp": 2, "tp": 2},
    "dp+ep": {"dp": 2, "ep": 2},
}
MESHES = {**FOUR, **TWO}
OF_ALL = [  # layout, mesh
    *(("dp", "dp"), ("zero1", "dp"), ("zero2", "dp"), ("fsdp", "dp"), ("fsdp+remat", "dp"), ("fsdp+reshard", "dp")),
    *(("hsdp", "replica"), ("tp", "tp"), ("tp+sp", "tp"), ("tp+remat", "tp")),
    *(("dp+tp", "dp+tp"), ("zero1+tp", "dp+tp"), ("fsdp+tp", "dp+tp"), ("fsdp+tp+sp", "dp+tp")),
    *(("cp-gather", "cp"), ("fsdp+cp", "dp+cp")),
]
OF_TOKENS = [("tp+sp+vp", "tp"), ("fsdp+tp+vp", "dp+tp")]
OF_EXPERTS = [("ep", "ep"), ("fsdp+ep", "dp+ep")]
LAYOUTS = {
    "gpt": OF_ALL + OF_TOKENS,
    "llama": OF_ALL + OF_TOKENS,
    "mixtral": OF_ALL + OF_TOKENS + OF_EXPERTS,
    "dit": OF_ALL,
}


def stepped(name: str, text: str, mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], Any]:
    """A step in a layout, the shapes of its arguments, their specs, and what makes the arguments."""
    model, config, size, length = MODELS[name]
    layout, optimizer = parallel(text, mesh), vfn.optim.adamw(1e-4)
    config = models.laid_out(config, layout)
    initial = functools.partial(model.init, config=config)
    shapes = vfn.eval_shape(initial, KEY)
    specs = layout.specs(shapes, model.NAMES, mesh)
    batch = functools.partial(models.random_batch, config=config, size=size, length=length)

    def step(params: Any, state: Any, data: Any) -> Any:
        loss, grads = vfn.value_and_grad(model.loss)(params, data, config)
        return *specs.update(optimizer, grads, state, params), loss

    def made() -> Any:
        params = vfn.init(initial, KEY, spec=specs.params, mesh=mesh)
        return params, specs.init(optimizer, params), vfn.shard(batch(KEY), mesh, layout.spec("batch"))

    with vfn.use_mesh(mesh):
        state = specs.init(optimizer, vfn.shard(shapes, mesh, specs.params)) if mesh.device_type == "cpu" else None
    abstract = (shapes, state, vfn.eval_shape(batch, KEY))
    return vfn.jit(step, donate_argnums=(0, 1)), abstract, (specs.params, None, layout.spec("batch")), made


def priced(name: str, hardware: Any) -> list[Any]:
    """The prices of the layouts of a model."""
    found = []
    for text, axes in LAYOUTS[name]:
        sizes = MESHES[axes]
        mesh = vfn.abstract_mesh(tuple(sizes.values()), tuple(sizes))
        step, shapes, specs, _ = stepped(name, text, mesh)
        found.append(vfn.price(step, *shapes, specs=specs, mesh=mesh, hardware=hardware))
    return found


def run(name: str, layouts: Sequence[tuple[str, str]], rounds: int = ROUNDS) -> list[Any]:
    """On this rank, of each layout: seconds of a step, by axis how many collectives of how many bytes, the most alive."""
    return measured([(MESHES[axes], functools.partial(stepped, name, text)) for text, axes in layouts], rounds)


def measured(layouts: Sequence[tuple[dict[str, int], Callable[[Any], Any]]], rounds: int) -> list[Any]:
    """The same of meshes, each with what `stepped` gives on it."""
    torch.set_num_threads(1)
    runs = []
    for sizes, stepped in layouts:
        mesh = vfn.make_mesh(tuple(sizes.values()), tuple(sizes), device="cpu")
        step, _, _, made = stepped(mesh)
        with vfn.use_mesh(mesh):
            runs.append((mesh, step, list(made()), []))
        _once(*runs[-1][:3], [])
    for _ in range(rounds):
        for one in runs:
            _once(*one)
    return [(statistics.median(times), _sent(*one), _alive(*one)) for *one, times in runs]


def _once(mesh: Any, step: Any, values: list[Any], times: list[float]) -> None:
    with vfn.use_mesh(mesh):
        torch.distributed.barrier()
        begin = time.perf_counter()
        values[:2] = step(*values)[:2]
        times.append(time.perf_counter() - begin)


def _sent(mesh: Any, step: Any, values: list[Any]) -> dict[str, tuple[int, int]]:
    with vfn.use_mesh(mesh), vfn.comm_log() as log:
        values[:2] = step(*values)[:2]
    return {r.axis: (log.count(axis=r.axes), log.bytes(axis=r.axes)) for r in log}


def _alive(mesh: Any, step: Any, values: list[Any]) -> int:
    plan: Any = next(iter(step._plans.values()))  # itself: a jitted function runs as written where a mode looks on
    leaves = vfn.tree.leaves(tuple(values))
    account = Accountant([x.to_local() if isinstance(x, vfn.Array) else x for x in leaves])
    with vfn.use_mesh(mesh), account:
        values[:2] = plan.taking(leaves, "step", "")[:2]
    return account.peak


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each among all, from the least; equal ones share theirs."""
    line = sorted(values)
    return [line.index(x) + (line.count(x) - 1) / 2 for x in values]


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's correlation."""
    return statistics.correlation(ranks(xs), ranks(ys))


def hardware() -> Any:
    """What the ranks do in a second, as they find it."""
    text, *_ = vfn.launch(_found, RANKS, (2, 2), ("outer", "inner"), device="cpu")
    return vfn.hardware.Hardware.from_json(text)


def _found(sizes: Sequence[int], names: Sequence[str]) -> str:
    torch.set_num_threads(1)
    return vfn.hardware.measure(vfn.make_mesh(sizes, names, device="cpu"), seconds=4).to_json()


def compared(name: str, hardware: Any) -> tuple[list[float], list[float], int, float, list[list[Any]]]:
    """Of the layouts of a model: seconds as predicted and as measured, how many differ in bytes or calls, the worst ratio of
    the peaks, and a row for each."""
    prices = priced(name, hardware)
    found = vfn.launch(run, RANKS, name, LAYOUTS[name], device="cpu")
    times = [statistics.mean(of_rank[i][0] for of_rank in found) for i in range(len(prices))]
    sent = [{axis: (one.calls[axis], one.bytes[axis]) for axis in one.calls} for one in prices]
    wrong = sum(ours != theirs for ours, (_, theirs, _) in zip(sent, found[0]))
    ratios = [one.peak / alive for one, (_, _, alive) in zip(prices, found[0])]
    predicted = [one.seconds for one in prices]
    rows = [[text, p * 1e3, t * 1e3, r] for (text, _), p, t, r in zip(LAYOUTS[name], predicted, times, ratios)]
    return predicted, times, wrong, max(ratios, key=lambda ratio: abs(ratio - 1)), rows


def main() -> None:
    torch.set_num_threads(1)
    found_hardware = hardware()
    found = {name: compared(name, found_hardware) for name in LAYOUTS}
    every = [[x for one in found.values() for x in one[i]] for i in (0, 1)]  # type: ignore[union-attr]
    rows = []
    for name, (predicted, times, wrong, ratio, _) in found.items():
        choice = times[predicted.index(min(predicted))] / min(times)
        rows.append([name, len(times), spearman(predicted, times), wrong, ratio, choice])
    worst = max((row[4] for row in rows), key=lambda ratio: abs(ratio - 1))
    rows.append(
        ["all", len(every[0]), spearman(*every), sum(row[3] for row in rows), worst, max(row[5] for row in rows)]
    )
    columns = [
        "model",
        "layouts",
        "Spearman",
        "bytes or calls differ in",
        "peak, predicted / alive",
        "the choice / the fastest",
    ]
    publish("prices", columns, rows, layouts={name: one[4] for name, one in found.items()})


if __name__ == "__main__":
    main()
