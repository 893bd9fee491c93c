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
from ..sharding.spec import P
from .rules.proved import PROVED


def propagated(func: Any, args: Any, kwargs: Any, tensors: Any, outs: Any, mesh: Any) -> tuple[list[P], list[P]] | None:
    """How each tensor argument must lie, and how each result lies, if DTensor's propagator is trusted to say so."""
    if str(func) not in PROVED or outs is None or blocks.written(func) or tensors_in(kwargs):
        return None
    axes = axes_of(mesh)
    metas = [
        torch_internals.spec(x)
        if isinstance(x, DTensor)
        else spec_for(mesh, WHOLE, x.shape, tuple(x.stride()), x.dtype)
        for x in tensors
    ]
    if any(p.is_partial() or type(p) not in (Replicate, Shard) for meta in metas for p in meta.placements):
        return None
    answer = torch_internals.propagate(func, with_tensors(list(args), iter(metas)), kwargs)
    if answer is None or len(answer[0]) != len(tensors) or len(answer[1]) != len(outs):
        return None
    specs = []
    for x, placements in zip((*tensors, *outs), (*answer[0], *answer[1]), strict=True):
        if not isinstance(x, torch.Tensor) or placements is None:
            specs.append(WHOLE)
            continue
        if any(type(p) not in (Replicate, Shard) and p != Partial("sum") for p in placements):
            return None
        specs.append(from_placements(placements, axes, x.ndim))
    shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else () for x in (*tensors, *outs)]
    if not all(is_even(shape, axes, spec) for shape, spec in zip(shapes, specs, strict=True)):
        return None
    targets, out_specs = specs[: len(tensors)], specs[len(tensors) :]
    if not any(targets) or any(target.unreduced for target in targets):
        return None  # nothing is gained
    return targets, out_specs
