"""What a step of AdamW costs for the many leaves of a model, beside torch.optim's on the same leaves.

One update, and the new parameters, of the 9 leaves of each of a GPT's blocks. Ours is pure: run eagerly it makes new
parameters and state, where torch's writes over the old; replayed (`vfn.jit`, donated) so does ours. On plain tensors it stands
beside torch's foreach and fused ways; on arrays of a mesh of 8 `fake` ranks beside torch.optim on DTensors, as FSDP2 uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import distribute_tensor

import vescale_fn as vfn
from benchmarks import fake_ranks
from benchmarks.side_by_side import medians, publish
from vescale_fn import P
from vescale_fn._core.base import tree

RATE, DECAY = 1e-3, 0.1
OPTIMISER = vfn.optim.adamw(RATE, weight_decay=DECAY)
Step = Callable[[], Any]


def leaves(layers: int, dim: int) -> dict[str, torch.Tensor]:
    """The weights of a GPT's blocks; dims that 8 divides, but for the norms' they are two."""
    shapes = {
        "q": (dim, dim),
        "k": (dim, dim),
        "v": (dim, dim),
        "out": (dim, dim),
        "up": (dim, 4 * dim),
        "gate": (dim, 4 * dim),
        "down": (4 * dim, dim),
        "norm1": (dim,),
        "norm2": (dim,),
    }
    draw = torch.Generator().manual_seed(0)
    return {f"{i}.{name}": torch.randn(shape, generator=draw) for i in range(layers) for name, shape in shapes.items()}


def ours(params: Any, grads: Any, replayed: bool) -> Step:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = OPTIMISER.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state

    run = vfn.jit(step, donate_argnums=(0, 1)) if replayed else step
    held = [(tree.map_(torch.clone, params), OPTIMISER.init(params))]

    def once() -> None:
        held[0] = run(*held[0], grads)

    return once


def theirs(params: dict[str, Any], grads: dict[str, Any], **how: Any) -> Step:
    own = [p.clone().requires_grad_() for p in params.values()]
    for variable, grad in zip(own, grads.values()):
        variable.grad = grad
    return torch.optim.AdamW(own, lr=RATE, weight_decay=DECAY, **how).step


def on_plain_tensors(layers: int, dim: int) -> dict[str, Step]:
    params, grads = leaves(layers, dim), leaves(layers, dim)
    return {
        "foreach": theirs(params, grads, foreach=True),
        "fused": theirs(params, grads, fused=True),
        "eager": ours(params, grads, False),
        "replayed": ours(params, grads, True),
    }


def on_a_mesh(layers: int, dim: int) -> dict[str, Step]:
    """FSDP: every leaf split over 8 ranks in its first dim."""
    mesh = vfn.make_mesh((8,), ("dp",), device="cpu")
    params, grads = leaves(layers, dim), leaves(layers, dim)
    arrays, array_grads = vfn.shard((params, grads), mesh, P("dp"))
    placements = next(iter(arrays.values())).placements
    shards, shard_grads = (
        {name: distribute_tensor(x, mesh, placements) for name, x in values.items()} for values in (params, grads)
    )
    return {
        "foreach": theirs(shards, shard_grads, foreach=True),
        "fused": theirs(shards, shard_grads, fused=True),
        "eager": ours(arrays, array_grads, False),
        "replayed": ours(arrays, array_grads, True),
    }


def main() -> None:
    fake_ranks.start()
    rows = []
    for where, candidates, layers, dim in (
        ("plain", on_plain_tensors, 16, 16),
        ("plain", on_plain_tensors, 16, 64),
        ("plain", on_plain_tensors, 4, 256),
        ("8 ranks", on_a_mesh, 16, 16),
        ("8 ranks", on_a_mesh, 4, 256),
    ):
        took = medians(candidates(layers, dim), rounds=15, seconds=0.02)
        numbers = [took[name] / 1000 for name in ("foreach", "fused", "eager", "replayed")]
        ratios = [took["eager"] / took["foreach"], took["eager"] / took["fused"], took["replayed"] / took["foreach"]]
        rows.append([where, 9 * layers, sum(x.numel() for x in leaves(layers, dim).values()) / 1e6, *numbers, *ratios])
    publish(
        "optimiser_step",
        [
            "where",
            "leaves",
            "numbers, millions",
            "torch foreach, ms",
            "torch fused, ms",
            "eager, ms",
            "replayed, ms",
            "eager / foreach",
            "eager / fused",
            "replayed / foreach",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
