"""What one op costs on an array, beside the same op on a DTensor and on the plain block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import distribute_tensor

import vescale_fn as vfn
from benchmarks import fake_ranks
from benchmarks.side_by_side import medians, publish
from vescale_fn import P

# the op on a batch x, a weight w and a second batch y
OPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "`x + y`": lambda x, w, y: x + y,
    "`x @ w`": lambda x, w, y: x @ w,
    "`relu`": lambda x, w, y: torch.relu(x),
    "`x * 2.0`": lambda x, w, y: x * 2.0,
    "`x + 1`": lambda x, w, y: x + 1,
    "`x.add_(y)`": lambda x, w, y: x.add_(y),
    "`view`": lambda x, w, y: x.view(8, 2, 4),
    "`transpose`": lambda x, w, y: x.transpose(0, 1),
    "`unsqueeze`": lambda x, w, y: x.unsqueeze(1),
    "`sum(1)`": lambda x, w, y: x.sum(1),
    "`softmax`": lambda x, w, y: torch.softmax(x, 1),
}


def candidates(mesh_name: str, op: Callable[[Any, Any, Any], Any]) -> dict[str, Callable[[], Any]]:
    mesh = fake_ranks.mesh(mesh_name)
    # x, y: split by the first axis in dim 0; w: by the last axis, if there is a second one, in dim 1.
    x, w, y = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8)
    names = fake_ranks.MESHES[mesh_name][1]
    specs = P(names[0]), P(None, *names[1:]), P(names[0])
    ours = [vfn.shard(value, mesh, spec) for value, spec in zip((x, w, y), specs, strict=True)]
    theirs = [distribute_tensor(v, mesh, a.placements) for v, a in zip((x, w, y), ours, strict=True)]
    return {"plain": lambda: op(x, w, y), "DTensor": lambda: op(*theirs), "array": lambda: op(*ours)}


def main() -> None:
    fake_ranks.start()
    rows = []
    with torch.no_grad():
        for mesh_name in fake_ranks.MESHES:
            sides = {name: candidates(mesh_name, op) for name, op in OPS.items()}
            flat = medians({(name, side): call for name, calls in sides.items() for side, call in calls.items()})
            took = {name: {side: flat[name, side] for side in calls} for name, calls in sides.items()}
            for name, times in took.items():
                # Ops that DTensor runs in C++ take it about as long as a relu; those in Python several times as long.
                slow = times["DTensor"] > 2 * took["`relu`"]["DTensor"]
                row = [mesh_name, name, times["plain"], times["DTensor"], times["array"]]
                rows.append([*row, times["array"] / times["DTensor"], "< 1" if slow else "<= 1.5"])
    publish(
        "eager_ops",
        ["mesh", "op", "plain whole value, us", "DTensor, us", "array, us", "array / DTensor", "aim"],
        rows,
    )


if __name__ == "__main__":
    main()
