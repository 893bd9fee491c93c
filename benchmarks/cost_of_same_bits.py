"""What `vfn.deterministic` costs: a sum by its tree beside gloo's, and a training step beside the usual one."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn import P
from vescale_fn._core.base import tree
from vescale_fn._core.distributed import collectives
from vescale_fn._core.distributed.blocks import Blocks
from vescale_fn.recipes import llama

SIZES = {"4 KiB": 2**10, "64 KiB": 2**14, "1 MiB": 2**18, "4 MiB": 2**20}  # of float32
PROCESSES = (2, 4, 8)
ROUNDS, TURNS = 61, 9
CONFIG = llama.Config(vocab=256, dim=512, heads=8, groups=8, layers=2, hidden=1024, dropout=0.0)
RANKS, BATCH, LENGTH = 8, 8, 64


def main() -> None:
    rows = []
    for count in PROCESSES:
        with vfn.deterministic(count):
            rows += vfn.launch(sums, count, device="cpu")[0]
    publish(
        "cost_of_same_bits_sums", ["processes", "value", "gloo, ms", "the tree, ms", "ratio", "bytes of a ring's"], rows
    )
    rows = [["2 ranks", "2 processes", *row] for row in vfn.launch(steps_of_ranks, 2, device="cpu")[0]]
    rows += [[f"{RANKS} ranks", "1 process", *row] for row in steps_alone()]
    publish("cost_of_same_bits_steps", ["a mesh of", "on", "step", "usual, ms", "deterministic, ms", "ratio"], rows)


# --- sums -------------------------------------------------------------------------------------------------------------


def sums() -> list[list[Any]]:
    """An all-reduce of each size, by gloo and by the tree."""
    n, rows = dist.get_world_size(), []
    mesh = vfn.make_mesh(n, "dp")
    for name, size in SIZES.items():
        x = torch.randn(size)
        tree_sum = lambda x=x: collectives.all_reduce(Blocks([x]), mesh, ("dp",), "benchmark")
        times = best_of({"gloo": lambda x=x: dist.all_reduce(x.clone()), "tree": tree_sum})
        ring = 2 * (n - 1) / n * size * 4
        ratio = times["tree"] / times["gloo"]
        rows.append([n, name, times["gloo"] * 1e3, times["tree"] * 1e3, ratio, sent_by(tree_sum) / ring])
    return rows


def sent_by(call: Callable[[], Any]) -> int:
    """How many bytes this process sends to others."""
    begin, count = dist.batch_isend_irecv, 0

    def counting(messages: list[dist.P2POp]) -> Any:
        nonlocal count
        count += sum(one.tensor.numel() for one in messages if one.op is dist.isend)
        return begin(messages)

    dist.batch_isend_irecv = counting
    try:
        call()
    finally:
        dist.batch_isend_irecv = begin
    return count


def best_of(candidates: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The least time of one call of each, in seconds; they take turns, and all processes begin together."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, candidate in candidates.items():
            dist.barrier()
            start = time.perf_counter()
            candidate()
            times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


# --- steps ------------------------------------------------------------------------------------------------------------


def made(spec: P, count: int, jit: bool) -> Callable[[], Any]:
    """A training step on a mesh of so many ranks."""
    mesh = vfn.make_mesh(count, "dp")
    params = vfn.init(llama.init, vfn.random.key(0), CONFIG, torch.float32, spec=spec, mesh=mesh)
    batch = vfn.random.randint(vfn.random.key(1), (BATCH, LENGTH + 1), 0, 256, dtype=torch.int64)
    batch = vfn.shard(batch, mesh, P("dp"))
    opt = vfn.optim.adamw(1e-3)
    state = opt.init(params)

    def step(params: Any, state: Any) -> Any:
        loss: Any = lambda params: llama.loss(params, batch, CONFIG)
        grads = vfn.grad(loss)(params)
        updates, state = opt.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state

    return functools.partial(vfn.jit(step) if jit else step, params, state)


def in_turn(count: int, jit: bool, usual: Callable[[], Any]) -> list[float]:
    """The median CPU time of a step of this process, as usual and under `deterministic`, in milliseconds."""
    modes = {"usual": usual, "deterministic": lambda: vfn.deterministic(count)}
    steps, times = {}, {name: list[float]() for name in modes}
    for name, mode in modes.items():
        with mode():
            steps[name] = made(P(), count, jit)
            for _ in range(2):
                steps[name]()
    for _ in range(TURNS):
        for name, mode in modes.items():
            with mode():
                start = time.process_time()
                tree.leaves(steps[name]())
                times[name].append((time.process_time() - start) * 1e3)
    return [statistics.median(values) for values in times.values()]


def steps_of_ranks() -> list[list[Any]]:
    """A process for each rank."""
    return [_row(jit, in_turn(2, jit, lambda: vfn.use_mesh(vfn.make_mesh(2, "dp")))) for jit in (True, False)]


def steps_alone() -> list[list[Any]]:
    """All ranks in one process."""
    torch.set_num_threads(1)
    return [_row(jit, in_turn(RANKS, jit, lambda: vfn.simulate(RANKS))) for jit in (True, False)]


def _row(jit: bool, times: list[float]) -> list[Any]:
    usual, deterministic = times
    return ["replayed" if jit else "eager", usual, deterministic, deterministic / usual if usual else math.nan]


if __name__ == "__main__":
    main()
