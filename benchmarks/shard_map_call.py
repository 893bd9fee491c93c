"""What a call of `shard_map` costs beside DTensor's `local_map`, with a body that returns its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.experimental import local_map

import vescale_fn as vfn
from benchmarks import fake_ranks
from benchmarks.side_by_side import medians, publish
from vescale_fn import P


def identity(*args: Any) -> Any:
    return args if len(args) > 1 else args[0]


def pair(mesh_name: str, count: int, differentiate: bool) -> dict[str, Callable[[], Any]]:
    """The same call on both sides: `count` arguments, split by the first axis."""
    mesh = fake_ranks.mesh(mesh_name)
    axis = fake_ranks.MESHES[mesh_name][1][0]
    whole = [torch.randn(8, 8) for _ in range(count)]
    ours = [vfn.shard(x, mesh, P(axis)).requires_grad_(differentiate) for x in whole]
    placements = ours[0].placements
    theirs = [distribute_tensor(x, mesh, placements).requires_grad_(differentiate) for x in whole]
    out = tuple([placements] * count) if count > 1 else list(placements)

    calls = {
        "local_map": local_map(
            identity, out_placements=out, in_placements=tuple([placements] * count), device_mesh=mesh
        ),
        "shard_map": vfn.shard_map(identity, mesh=mesh, in_specs=P(axis), out_specs=P(axis)),
        "unchecked": vfn.shard_map(identity, mesh=mesh, in_specs=P(axis), out_specs=P(axis), check_vma=False),
    }
    return {name: lambda f=f, args=theirs if name == "local_map" else ours: f(*args) for name, f in calls.items()}


def main() -> None:
    fake_ranks.start()
    rows = []
    for mesh_name in fake_ranks.MESHES:
        for count in (1, 4):
            for differentiate in (False, True):
                took = medians(pair(mesh_name, count, differentiate))
                case = f"{count} argument{'s' * (count > 1)}{', requiring grad' * differentiate}"
                base = took["local_map"]
                row = [mesh_name, case, base, took["shard_map"], took["shard_map"] / base, took["unchecked"] / base]
                rows.append(row)
    publish(
        "shard_map_call",
        ["mesh", "call", "`local_map`, us", "`shard_map`, us", "ratio", "ratio, `check_vma=False`"],
        rows,
    )


if __name__ == "__main__":
    main()
