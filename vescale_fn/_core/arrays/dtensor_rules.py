"""DTensor's own sharding propagation, for ops without a rule of ours that a sweep has found right, on even shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .. import torch_internals
from ..base.op_arguments import tensors_in, with_tensors
from ..distributed import blocks
from ..sharding.index_map import axes_of, is_even
from ..sharding.layout import WHOLE, spec_for
from ..sharding.placements import from_placements
from .layout_solver import Solution
from .rules.proved import PROVED


def propagated(func: Any, args: Any, kwargs: Any, tensors: Any, outs: Any, mesh: Any) -> Solution | None:
    """How each tensor argument must lie, and how each result lies, if DTensor's propagator is trusted to say so."""
    if str(func) not in PROVED or blocks.written(func) or tensors_in(kwargs):
        return None
    axes = axes_of(mesh)
    metas = [
        torch_internals.spec(x)
        if isinstance(x, DTensor)
        else spec_for(mesh, WHOLE, x.shape, tuple(x.stride()), x.dtype)
        for x in tensors
    ]
    if not all(type(p) in (Replicate, Shard) for meta in metas for p in meta.placements):
        return None
    answer = torch_internals.propagate(func, with_tensors(list(args), iter(metas)), kwargs)
    if answer is None or (len(answer[0]), len(answer[1])) != (len(tensors), len(outs)):
        return None
    specs = [_even_spec(x, found, axes) for x, found in zip((*tensors, *outs), (*answer[0], *answer[1]), strict=True)]
    targets, out_specs = specs[: len(tensors)], specs[len(tensors) :]
    if None in specs or not any(targets) or any(target.unreduced for target in targets):
        return None  # unknown, or nothing is gained
    return Solution(targets, out_specs, [()] * len(outs))


def _even_spec(x: Any, placements: Any, axes: dict[str, int]) -> Any:
    """The spec that says these placements of a tensor; None where none does or where they split it unevenly."""
    if not isinstance(x, torch.Tensor) or placements is None:
        return WHOLE
    if not all(type(p) in (Replicate, Shard) or p == Partial("sum") for p in placements):
        return None
    spec = from_placements(placements, axes, x.ndim)
    return spec if is_even(tuple(x.shape), axes, spec) else None
