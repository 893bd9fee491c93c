"""A training step planned before anything is started: how long its plan takes, what a rank needs and sends, from nothing.

A bare process makes an abstract mesh and the shapes of a model, and lowers its step with AdamW: gradients, the clipped update,
donated parameters and state, in bfloat16 with sequences of 4,096 tokens, one for each place along "dp". Seconds are of this
process on the CPU, once without and once with the import of torch and of vescale_fn; memory is what the process had resident at
most. ``python -m benchmarks.any_size sweep`` plans the recipes' models under their layouts on 8 to 4,096 ranks.
"""

from __future__ import annotations

import time

BEGAN = time.process_time()

import functools  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import platform  # noqa: E402
import resource  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

import vescale_fn as vfn  # noqa: E402
from benchmarks.side_by_side import keep, publish, table  # noqa: E402
from benchmarks.traffic_formulas import formulas  # noqa: E402
from vescale_fn.recipes import dit, gpt, llama, mixtral, models, resnet  # noqa: E402
from vescale_fn.recipes.parallel import parallel  # noqa: E402

IMPORTED = time.process_time()
KEY = vfn.random.key(0)
# name: model, sizes, the mesh; dropout is off
LARGE: dict[str, tuple[ModuleType, Any, dict[str, int]]] = {
    "Llama-7B": (
        llama,
        llama.Config(vocab=32000, dim=4096, heads=32, groups=32, layers=32, hidden=11008, dropout=0.0),
        {"dp": 64, "tp": 8},
    ),
    "Mixtral 8x7B": (
        mixtral,
        mixtral.Config(vocab=32000, dim=4096, heads=32, groups=8, layers=32, hidden=14336, dropout=0.0),
        {"dp": 64, "tp": 8},
    ),
    "Llama-70B": (
        llama,
        llama.Config(vocab=32000, dim=8192, heads=64, groups=8, layers=80, hidden=28672, dropout=0.0),
        {"dp": 128, "tp": 8},
    ),
}


def planned(
    model: ModuleType,
    config: Any,
    text: str,
    sizes: dict[str, int],
    batch: int,
    length: int,
    dtype: Any,
    rank: int = 0,
    plans: Any = (),
) -> Any:
    """The plan of a step under the layout `text` on abstract ranks; the trees of its arguments, and of their specs."""
    mesh = vfn.abstract_mesh(tuple(sizes.values()), tuple(sizes), rank=rank)
    layout, optimizer = parallel(text, mesh), vfn.optim.adamw(1e-4)
    config = models.laid_out(config, layout)
    shapes = vfn.eval_shape(functools.partial(model.init, config=config, dtype=dtype), KEY)
    specs = layout.specs(shapes, model.NAMES, mesh)
    params = vfn.shard(shapes, mesh, specs.params)
    data = vfn.eval_shape(
        functools.partial(models.random_batch, config=config, size=batch, length=length, dtype=dtype), KEY
    )
    with vfn.use_mesh(mesh):
        state = specs.init(optimizer, params)

        def step(params: Any, state: Any, data: Any) -> Any:
            loss, grads = vfn.value_and_grad(model.loss)(params, data, config)
            return *specs.update(optimizer, grads, state, params), loss

        data = vfn.shard(data, mesh, layout.spec("batch"))
        return vfn.jit(step, donate_argnums=(0, 1), plans=plans).lower(params, state, data), params, state, specs


def one(name: str) -> list[Any]:
    """A row of the table, in a process that has done nothing else."""
    model, config, sizes = LARGE[name]
    plan, params, _, _ = planned(model, config, "fsdp+tp", sizes, sizes["dp"], 4096, torch.bfloat16)
    peak, comms = plan.memory().peak, plan.comms()
    ended = time.process_time()
    count = sum(x.numel() for x in vfn.tree.leaves(params))
    sent = [comms.bytes(axis=axis) / 1e9 for axis in ("dp", "tp")]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    times = [ended - IMPORTED, ended - BEGAN]
    return [name, count / 1e9, config.layers, math.prod(sizes.values()), *times, resident, peak / 1e9, *sent]


COLUMNS = (
    "model",
    "parameters, 10^9",
    "layers",
    "ranks",
    "s",
    "s, with imports",
    "GB resident here",
    "GB on a rank, at most",
    "GB sent over dp",
    "GB sent over tp",
)


def processor() -> str:
    """What computes here."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    rows = []
    for name in LARGE:
        out = subprocess.run(
            [sys.executable, "-m", "benchmarks.any_size", name], capture_output=True, text=True, check=True
        )
        rows.append(json.loads(out.stdout.splitlines()[-1]))
    publish("any_size", COLUMNS, rows, processor=processor())


# --- the recipes' models under their layouts, on any number of ranks --------------------------------------------------

RANKS = (8, 64, 512, 4096)
# Sizes that no number of ranks divides: heads, hidden units, experts and vocabularies too; and such as all divide.
ODD = {
    "gpt": gpt.Config(vocab=509, context=37, dim=84, heads=6, hidden=211, layers=2, dropout=0.0),
    "llama": llama.Config(vocab=509, dim=84, heads=6, groups=3, hidden=211, layers=2, dropout=0.0),
    "mixtral": mixtral.Config(vocab=509, dim=84, heads=6, groups=3, hidden=101, experts=5, layers=2, dropout=0.0),
    "dit": dit.Config(size=24, dim=84, heads=3, hidden=211, layers=2),
    "resnet": resnet.Config(widths=(24, 40), blocks=1, dropout=0.0),
}
EVEN = {
    "gpt": gpt.Config(vocab=4096, context=64, dim=4096, heads=8, hidden=8192, layers=2, dropout=0.0, tied=False),
    "llama": llama.Config(vocab=4096, dim=4096, heads=8, groups=8, hidden=8192, layers=2, dropout=0.0),
    "mixtral": mixtral.Config(vocab=4096, dim=4096, heads=8, groups=8, hidden=4096, experts=8, layers=2, dropout=0.0),
}


def layouts(n: int) -> dict[str, dict[str, int]]:
    """Parallelisms by their names, with the sizes of their axes on `n` ranks; some of these are 1."""
    return {
        **{text: {"dp": n} for text in ("dp", "zero1", "zero2", "fsdp", "fsdp+remat", "fsdp+reshard")},
        "hsdp": {"replica": 2, "dp": n // 2},
        "fsdp+tp": {"dp": n // 4, "tp": 4},
        "fsdp+tp+vp": {"dp": n, "tp": 1},
        "zero1+tp+sp+vp": {"dp": n // 8, "tp": 8},
        "fsdp+cp": {"dp": n // 4, "cp": 4},
        "fsdp+cp-ulysses+tp": {"dp": n // 8, "cp": 4, "tp": 2},
        "dp+cp-gather": {"dp": n // 4, "cp": 4},
        "fsdp+ep": {"dp": n // 8, "ep": 8},
    }


def block_bytes(shapes: Any, mesh: Any, specs: Any, among: Any = None) -> int:
    """The bytes of the first rank's blocks of a tree, the largest; `among`: of those leaves whose spec there is another."""
    each = zip(*(vfn.tree.leaves(tree) for tree in (shapes, specs, specs if among is None else among)), strict=True)
    sizes = ((x, spec) for x, spec, other in each if among is None or vfn.P(*spec) != vfn.P(*other))
    return sum(math.prod(vfn.shard_shape(tuple(x.shape), mesh, spec)) * x.element_size() for x, spec in sizes)


def sent(comms: Any, sizes: dict[str, int]) -> dict[tuple[str, str], int]:
    """The bytes of a plan's collectives, by op and axes; without axes of size 1."""
    found: dict[tuple[str, str], int] = {}
    for record in comms:
        axes = [axis for axis in record.axes if sizes[axis] > 1]
        if axes:
            key = record.op, ",".join(axes)
            found[key] = found.get(key, 0) + record.bytes
    return found


def swept(ranks: tuple[int, ...], kinds: dict[str, dict[str, Any]], only: str = "") -> list[list[Any]]:
    """A row for each model under each layout on each number of ranks; raises where bytes are not those of the formulas."""
    rows = []
    for kind, configs in kinds.items():
        for n in ranks:
            for (name, config), (text, sizes) in itertools.product(configs.items(), layouts(n).items()):
                if not models.suits(name, text) or only not in (f"{name} {text}", ""):
                    continue
                began, model = time.process_time(), models.MODELS[name]
                length = 37 if kind == "odd" else 64
                plan, params, state, specs = planned(model, config, text, sizes, n, length, torch.float32)
                peak, comms, taken = plan.memory().peak, plan.comms(), time.process_time() - began
                mesh = vfn.tree.leaves(params)[0].mesh
                held = block_bytes(params, mesh, specs.params) + 2 * block_bytes(params, mesh, specs.state)
                arguments = sum(x.to_local().nbytes for x in vfn.tree.leaves((params, state)) if x.ndim)
                assert held == arguments <= peak, (kind, name, text, n, held, arguments, peak)
                found = sent(comms, sizes)
                wanted = formulas(text, sizes, model, config, params, specs, length)
                assert found == wanted, (kind, name, text, n, found, wanted)
                figures = taken, held / 1e6, peak / 1e6, comms.bytes() / 1e6
                rows.append([kind, name, text, n, *(float(f"{x:.4g}") for x in figures)])
    return rows


PLANS = ("sizes", "model", "layout", "ranks", "s", "MB held on a rank", "MB at most", "MB sent")

if __name__ == "__main__":
    if sys.argv[1:] == ["sweep"]:
        rows = swept(RANKS, {"even": EVEN, "odd": ODD})
        print(table(PLANS, rows))
        keep("any_size_sweep", PLANS, rows)
    elif sys.argv[1:]:
        print(json.dumps(one(sys.argv[1])))
    else:
        main()
