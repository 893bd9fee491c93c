"""The first call of a jitted step on 1 to 32 simulated ranks: recorded once for all of them, or each by itself.

The step is that of `simulated_step` on the tiny model, data-parallel; each call records it anew. What is decided about ops and
layouts once in a process is decided before. Least time of some calls that take turns.
"""

from __future__ import annotations

import gc
import time
from unittest import mock

import torch

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from benchmarks.simulated_step import SIZES, step
from vescale_fn import P
from vescale_fn.plan import plan
from vescale_fn.plan.ir.per_rank import RanksDiffer
from vescale_fn.plan.tracing import recorder
from vescale_fn.recipes import transformer

RANKS, ROUNDS = (1, 2, 4, 8, 32), 5


def first_call(ranks: int) -> float:
    """Seconds of this process on the CPU."""
    config, batch_size, length = SIZES["tiny"]
    params = transformer.init(vfn.random.key(0), config)
    batch = vfn.random.randint(vfn.random.key(1), (max(batch_size, ranks), length + 1), 0, 256).long()
    with vfn.simulate(ranks):
        mesh = vfn.make_mesh((ranks, 1), ("dp", "tp"))
        there, parts = vfn.shard((params, batch), mesh, (P(), P("dp")))
        jitted = vfn.jit(lambda params, batch: step(config, params, batch))
        with vfn.use_mesh(mesh):
            gc.collect()  # what calls before have left is not of this one
            start = time.process_time()
            jitted(there, parts)
            return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    as_one: dict[int, float] = {}
    apart: dict[int, float] = {}
    folds_not = mock.patch.object(plan, "folded", side_effect=RanksDiffer)
    for _ in range(ROUNDS + 1):  # the first round decides
        for ranks in RANKS:
            as_one[ranks] = min(as_one.get(ranks, 60.0), first_call(ranks))
            with mock.patch.object(recorder, "RankRows", return_value=None), folds_not:
                apart[ranks] = min(apart.get(ranks, 60.0), first_call(ranks))
    rows = [[n, as_one[n], as_one[n] / as_one[1], apart[n], apart[n] / apart[1], as_one[n] / apart[n]] for n in RANKS]
    columns = ["ranks", "as one, s", "of 1 rank", "each by itself, s", "of 1 rank", "as one / each by itself"]
    publish("simulated_first_call", columns, rows)


if __name__ == "__main__":
    main()
