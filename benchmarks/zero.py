"""Bytes on each rank for parameters, gradients and optimiser state under each stage of ZeRO, beside the formulas.

No clock is read. A Llama of 0.3 million parameters takes three steps with AdamW on four real ranks over gloo; what is
counted are the storages of what is then alive, each whole, also where a tensor shows but a part of one: what a rank
would really free. Formulas: Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import vescale_fn as vfn
from benchmarks.side_by_side import publish
from vescale_fn._core.base import tree
from vescale_fn.recipes import llama, models
from vescale_fn.recipes.parallel import parallel

RANKS = 4
KEY = vfn.random.key(0)
CONFIG = llama.Config(vocab=256, dim=128, heads=4, groups=4, layers=2, hidden=256, dropout=0.1)
# of parameters, gradients, and the two means of AdamW: into how many parts each is split
STAGES = {
    "dp": ({"dp": 4}, (1, 1, 1)),
    "zero1": ({"dp": 4}, (1, 1, 4)),
    "zero2": ({"dp": 4}, (1, 4, 4)),
    "fsdp": ({"dp": 4}, (4, 4, 4)),
    "fsdp+remat": ({"dp": 4}, (4, 4, 4)),
    "hsdp": ({"replica": 2, "dp": 2}, (2, 2, 2)),
}


def storages(values: Any) -> Iterator[int]:
    """The bytes of the memory that this rank holds for the tensors of a tree: each storage once, and whole."""
    seen = set()
    for x in tree.leaves(values):
        if isinstance(x, torch.Tensor) and x.ndim:
            local = x.to_local() if isinstance(x, vfn.Array) else x
            storage = local.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage.nbytes()


def held(text: str, sizes: dict[str, int], steps: int = 3) -> tuple[int, int, int]:
    """On this rank, after some steps: bytes of parameters, of gradients, of the optimiser's state."""
    mesh = vfn.make_mesh(tuple(sizes.values()), tuple(sizes), device="cpu")
    layout, optimizer = parallel(text, mesh), vfn.optim.adamw(1e-3)
    config = models.laid_out(CONFIG, layout)
    params = llama.init(KEY, config)
    specs = layout.specs(params, llama.NAMES, mesh)
    params = vfn.shard(params, mesh, specs.params)
    state = specs.init(optimizer, params)

    def step(params: Any, state: Any, batch: Any, key: vfn.random.Key) -> Any:
        grads = vfn.grad(llama.loss)(params, batch, config, key)
        grads = vfn.with_sharding(grads, specs.grads)
        params, state = specs.update(optimizer, grads, state, params)
        return params, state, grads

    run, grads = vfn.jit(step, donate_argnums=(0, 1)), None
    for i in range(steps):
        batch = vfn.shard(models.random_batch(vfn.random.fold_in(KEY, i), config, 8, 16), mesh, layout.spec("batch"))
        params, state, grads = run(params, state, batch, vfn.random.fold_in(KEY, 100 + i))
    return sum(storages(params)), sum(storages(grads)), sum(storages(state))


def formula(parts: tuple[int, int, int]) -> tuple[int, int, int]:
    """The same by the formulas: 4 bytes a parameter, 4 a gradient, 8 for its two means."""
    count = sum(x.numel() for x in tree.leaves(llama.init(KEY, CONFIG)))
    return 4 * count // parts[0], 4 * count // parts[1], 8 * count // parts[2]


def main() -> None:
    rows = []
    for text, (sizes, parts) in STAGES.items():
        found, wanted = vfn.launch(held, RANKS, text, sizes, device="cpu"), formula(parts)
        assert len(set(found)) == 1, found
        rows.append([text, *(x for pair in zip(wanted, found[0]) for x in pair)])
    columns = [
        "parallelism",
        *(f"{what}, {how}" for what in ("parameters", "gradients", "state") for how in ("formula", "held")),
    ]
    publish("zero", columns, rows)
    assert all(row[1::2] == row[2::2] for row in rows)


if __name__ == "__main__":
    main()
