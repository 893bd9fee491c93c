"""One rank's step on 8, 64 and 512 ranks: what it replays, and its first call.

Two steps, whose work on one rank is the same however many ranks there are:

- data-parallel: the transformer of `replayed_step` (4 layers), 4 windows a rank, gradients summed in buckets;
- FSDP: 40 leaves of 512 x 8, gathered in buckets, used whole, their gradients scattered, and AdamW on the pieces.

All run on torch's `fake` process group of 512 ranks, along axes of 8, 64 and 512 of them. It exchanges nothing, but to gather
it copies once for each rank: its own time is measured beside, by the collectives of the plan alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import vescale_fn as vfn
from benchmarks import fake_ranks, replayed_step
from benchmarks.side_by_side import medians, publish
from vescale_fn import P
from vescale_fn._core import torch_internals
from vescale_fn._core.distributed.collectives import Collective

RANKS, LEAVES = (8, 64, 512), 40
OPTIMISER = vfn.optim.adamw(1e-3)
Step = Callable[[], Any]


def data_parallel(ranks: int) -> tuple[Any, tuple[Any, ...]]:
    mesh = vfn.make_mesh((RANKS[-1] // ranks, ranks), ("rest", "dp"), device="cpu")
    tokens = torch.arange(ranks * 4 * 17).view(-1, 17) * 7 % replayed_step.VOCAB
    mask = torch.full((16, 16), float("-inf")).triu(1)
    params = vfn.shard(replayed_step.init(4), mesh, P())
    return replayed_step.on_arrays, (params, vfn.shard(tokens, mesh, P("dp")), vfn.shard(mask, mesh, P()))


def fsdp(ranks: int) -> tuple[Any, tuple[Any, ...]]:
    mesh = vfn.make_mesh((RANKS[-1] // ranks, ranks), ("rest", "dp"), device="cpu")
    generator = torch.Generator().manual_seed(0)
    params = vfn.shard([torch.randn(512, 8, generator=generator) for _ in range(LEAVES)], mesh, P("dp"))
    x = vfn.shard(torch.randn(4 * ranks, 512, generator=generator), mesh, P("dp"))

    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = vfn.value_and_grad(lambda params: sum((x @ p).square().mean() for p in params))(params)
        updates, state = OPTIMISER.update(grads, state, params)
        return value, vfn.optim.apply_updates(params, updates), state

    return step, (params, OPTIMISER.init(params), x)


def alone(jitted: Any, args: tuple[Any, ...]) -> Step:
    """The collectives of a plan, on tensors that are there already."""
    begun: list[Step] = []
    for node in jitted.lower(*args).graph.nodes:
        collective = node.target
        if isinstance(collective, Collective):
            x, out = torch.zeros(node.args[0].meta["val"].shape), torch.zeros(node.meta["val"].shape)
            group = collective.mesh.get_group("dp")
            if collective.kind == "all_gather":
                begun.append(lambda x=x, out=out, group=group: torch_internals.all_gather_single(out, x, group=group))
            elif collective.kind == "reduce_scatter":
                begun.append(
                    lambda x=x, out=out, group=group: torch_internals.reduce_scatter_single(out, x, group=group)
                )
            else:
                begun.append(lambda x=x, group=group: dist.all_reduce(x, group=group))
    return lambda: [begin() for begin in begun]


def main() -> None:
    fake_ranks.start(RANKS[-1])
    rows = []
    for name, make in {"data-parallel": data_parallel, "FSDP": fsdp}.items():
        steps, group, first = {}, {}, {}
        for ranks in (RANKS[0], *RANKS):  # once before: what is loaded once
            step, args = make(ranks)
            jitted = vfn.jit(step)
            start = time.process_time()
            jitted(*args)
            first[ranks] = time.process_time() - start
            steps[ranks] = lambda jitted=jitted, args=args: jitted(*args)
            group[ranks] = alone(jitted, args)
        took, its = medians(steps, rounds=21, seconds=0.03), medians(group)
        ours = {ranks: took[ranks] - its[ranks] for ranks in RANKS}
        for ranks in RANKS:
            more = ours[ranks] / ours[RANKS[0]]
            rows.append([name, ranks, first[ranks], took[ranks] / 1000, its[ranks] / 1000, ours[ranks] / 1000, more])
    columns = ["step", "ranks", "first call, s", "replayed, ms", "the group itself, ms", "without it, ms", "of 8 ranks"]
    publish("many_ranks", columns, rows)


if __name__ == "__main__":
    main()
