"""The same bits on 1, 2, 4 and 8 processes: each model, layout, precision and optimiser, by the digest of what it has learned.

No clock is read. A run is some steps of training with dropout on (but in zigzag order, where it goes by another order), on a
mesh of 8 ranks under `vfn.deterministic`; its digest is that of the losses, the parameters and the optimiser's state. A cell
is right where all numbers of processes have one digest. dp, zero1, zero2, fsdp and hsdp have one digest besides.
``python -m benchmarks.same_bits`` runs all of it, days on two cores; ``--models``, ``--layouts``, ``--precisions``,
``--optimizers``, ``--how`` (eager, jit), ``--processes`` and ``--steps`` less of it, and ``--covering`` the fewest cells in
which each two choices meet that can. What has run is in ``results/same_bits.json``, and is not run again on the same versions
and processor. ``--without`` is the negative control: data parallel on as many processes as ranks, without the mode.
tests/test_same_bits.py runs a few steps of a few.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch

import vescale_fn as vfn
from benchmarks.parity import CONFIGS, KEY, alone
from vescale_fn.recipes import models, parallel

RANKS, BATCH, LENGTH, STEPS = 8, 16, 16, 20
AT_ONCE = 4  # cells that a start of processes runs
RESULTS = Path(__file__).parent / "results" / "same_bits.json"
LAYOUTS: dict[str, dict[str, int]] = {
    "dp": {"dp": 8},
    "zero1": {"dp": 8},
    "zero2": {"dp": 8},
    "fsdp": {"dp": 8},
    "hsdp": {"replica": 2, "dp": 4},
    "dp+tp+sp+vp": {"dp": 2, "tp": 4},
    "dp+cp": {"dp": 2, "cp": 4},
    "dp+cp-gather": {"dp": 2, "cp": 4},
    "dp+cp-ulysses": {"dp": 2, "cp": 4},
    "dp+cp-zigzag": {"dp": 2, "cp": 4},
    "dp+ep": {"dp": 2, "ep": 4},
    "fsdp+tp": {"dp": 4, "tp": 2},
    "dp+cp+ep": {"dp": 2, "cp": 2, "ep": 2},
    "pp+dp": {"pp": 2, "dp": 4},
    "pp+fsdp": {"pp": 2, "dp": 4},
    "pp+fsdp+tp": {"pp": 2, "dp": 2, "tp": 2},
}
MICROBATCHES = 4
OVER_ONE_AXIS = ("dp", "zero1", "zero2", "fsdp", "hsdp")
PRECISIONS = {"f32": "params=f32", "bf16": "params=f32,compute=bf16"}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: vfn.optim.adamw(3e-3),
    "muon": lambda: vfn.optim.partition({"muon": vfn.optim.muon(1e-2), "adamw": vfn.optim.adamw(3e-3)}, _matrices),
    "lion": lambda: vfn.optim.lion(1e-3),
    "adafactor": lambda: vfn.optim.adafactor(1e-2),
}


class Cell(NamedTuple):
    """What is run."""

    model: str
    layout: str
    precision: str
    optimizer: str
    how: str


def _matrices(params: Any) -> Any:
    return optree.tree_map(lambda p: "muon" if p.ndim == 2 else "adamw", params)


def train(cell: Cell, steps: int, sizes: dict[str, int] | None = None) -> str:
    """The digest of a run, on the ranks that there are: of a mesh of these axes, by default those of `LAYOUTS`."""
    sizes = sizes or LAYOUTS[cell.layout]
    mesh = vfn.make_mesh(tuple(sizes.values()), tuple(sizes), device="cpu")
    layout, model = parallel.parallel(cell.layout, mesh), models.MODELS[cell.model]
    config = models.laid_out(CONFIGS[cell.model], layout)
    policy = vfn.precision.policy(PRECISIONS[cell.precision])
    optimizer = vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), OPTIMIZERS[cell.optimizer]())
    loss = policy.apply(lambda params, batch, key: model.loss(params, batch, config, key))
    loss = layout.pipelined(loss, microbatches=MICROBATCHES, schedule="1f1b")
    shapes, spec = vfn.eval_shape(model.init, KEY, config), layout.spec("batch")

    def step(params: Any, state: Any, batch: Any, key: vfn.random.Key | None) -> Any:
        value, grads = vfn.value_and_grad(loss)(params, batch, key)
        return *specs.update(optimizer, grads, state, params), value

    with vfn.use_mesh(mesh):
        batch = vfn.shard(models.random_batch(KEY, config, BATCH, LENGTH), mesh, spec)
        specs = layout.specs(shapes, model.NAMES, mesh).staged(loss, shapes, batch, KEY)
        params = vfn.init(model.init, KEY, config, spec=specs.params, mesh=mesh)
        state, losses = specs.init(optimizer, params), []
        run = vfn.jit(step) if cell.how == "jit" else step
        for i in range(steps):
            batch = models.random_batch(vfn.random.fold_in(KEY, i % 4), config, BATCH, LENGTH)
            key = vfn.random.fold_in(KEY, 100 + i) if alone(cell.layout) != "cp-zigzag" else None
            params, state, value = run(params, state, vfn.shard(batch, mesh, spec), key)
            losses.append(vfn.unshard(value))
        return vfn.digest({"params": params, "state": state, "losses": losses})


def covering(every: Sequence[Cell]) -> list[Cell]:
    """A few of the cells in which each two choices meet that do so in any: always the one next that has most new pairs."""
    pairs = lambda cell: set(itertools.combinations(enumerate(cell), 2))
    left, found = set().union(*map(pairs, every)), list[Cell]()
    while left:
        found.append(max(every, key=lambda cell: len(pairs(cell) & left)))
        left -= pairs(found[-1])
    return found


def _train_all(cells: Sequence[Cell], steps: int, sizes: dict[str, int] | None = None) -> list[str]:
    return [_or_error(cell, steps, sizes) for cell in cells]


def _or_error(cell: Cell, steps: int, sizes: dict[str, int] | None) -> str:
    try:
        return train(cell, steps, sizes)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def digests(cells: Sequence[Cell], processes: int, steps: int = STEPS) -> list[str]:
    """The digest of each of these runs, or what it raises, on so many processes that play 8 ranks."""
    with vfn.deterministic(virtual=RANKS):
        if processes == 1:
            return _train_all(cells, steps)
        return vfn.launch(_train_all, processes, cells, steps, device="cpu", timeout=3600.0)[0]


def without(cells: Sequence[Cell], processes: int, steps: int = STEPS) -> list[str]:
    """The same without the mode, on a mesh that has as many ranks as there are processes."""
    return vfn.launch(_train_all, processes, cells, steps, {"dp": processes}, device="cpu", timeout=3600.0)[0]


def cells(chosen: argparse.Namespace) -> Iterator[Cell]:
    """Those of the table that are chosen, and that the model has dims for."""
    for found in itertools.product(chosen.models, chosen.layouts, chosen.precisions, chosen.optimizers, chosen.how):
        cell = Cell(*found)
        if models.suits(cell.model, cell.layout):
            yield cell


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    """What is chosen on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_bits")
    listed = lambda text: text.split(",")
    parser.add_argument("--models", type=listed, default=list(CONFIGS))
    parser.add_argument("--layouts", type=listed, default=list(LAYOUTS))
    parser.add_argument("--precisions", type=listed, default=list(PRECISIONS))
    parser.add_argument("--optimizers", type=listed, default=list(OPTIMIZERS))
    parser.add_argument("--how", type=listed, default=["eager", "jit"])
    parser.add_argument("--processes", type=listed, default=["1", "2", "4", "8"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--covering", action="store_true", help="as few cells as have each pair of choices")
    parser.add_argument("--without", action="store_true", help="without the mode: dp, zero1, zero2 and fsdp alone")
    return parser.parse_args(argv)


class Results:
    """What has been run so far: the digest, or the error, of each cell on each number of processes, in a file."""

    def __init__(self, path: Path) -> None:
        self.path, here = path, json.loads(json.dumps(vfn.fingerprint()))
        before = json.loads(path.read_text()) if path.exists() else {}
        kept = before if before.get("fingerprint") == here else {"fingerprint": here, "runs": []}
        self.fingerprint, self.runs = here, {tuple(key): said for *key, said in kept["runs"]}

    def add(self, cells: Sequence[Cell], processes: int, steps: int) -> None:
        """Run what is missing, and note it."""
        new = [cell for cell in cells if (*cell, steps, processes) not in self.runs]
        if new:
            said = digests(new, processes, steps)
            self.runs.update({(*cell, steps, processes): one for cell, one in zip(new, said, strict=True)})
            runs = [[*key, said] for key, said in sorted(self.runs.items())]
            rows = ",\n".join(f"  {json.dumps(row)}" for row in runs)
            self.path.write_text(f'{{"fingerprint": {json.dumps(self.fingerprint)},\n"runs": [\n{rows}\n]}}\n')

    def differing(self) -> tuple[int, dict[Any, list[str]]]:
        """How many cells there are of which several runs are known, and those whose digests differ, or that raise."""
        by_cell: dict[Any, list[str]] = {}
        for (*cell, _), said in self.runs.items():
            by_cell.setdefault(tuple(cell), []).append(said)
        known = {cell: said for cell, said in by_cell.items() if len(said) > 1}
        wrong = lambda said: len(set(said)) > 1 or " " in said[0]
        return len(known), {cell: said for cell, said in known.items() if wrong(said)}


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)
    every, counts = list(cells(options)), list(map(int, options.processes))
    if options.without:
        every = [cell for cell in every if set(LAYOUTS[cell.layout]) == {"dp"}]
        for cell, said in zip(every, zip(*(without(every, n, options.steps) for n in counts))):
            print(*cell, f"{len(set(said))} digests on {len(counts)} numbers of processes")
        return
    every, results = covering(every) if options.covering else every, Results(RESULTS)
    for i in range(0, len(every), AT_ONCE):
        for n in counts:
            results.add(every[i : i + AT_ONCE], n, options.steps)
        count, wrong = results.differing()
        print(f"{count - len(wrong)} of {count} the same", *wrong.items(), sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
