"""The passes, in the order in which a plan goes through them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from .ir.graph import Pass
from .passes.buckets import buckets
from .passes.call_shapes import shapes
from .passes.canonicalize import composites
from .passes.cse import common
from .passes.cse_collectives import once
from .passes.dce import dead
from .passes.donate import donate
from .passes.equal_parts import equal_parts
from .passes.foreach import foreach
from .passes.functionalize_writes import writes
from .passes.hoist import hoist
from .passes.kept_calls import kept
from .passes.mapped_in_parts import in_parts
from .passes.memory_order import order
from .passes.merge_axes import axes
from .passes.overlap import overlap
from .passes.pointwise_before_views import flat
from .passes.prefetch import prefetch
from .passes.reduce_scatter import scatter
from .passes.rematerialize import recompute
from .passes.residual_sums import residual
from .passes.reuse_memory import reuse
from .passes.slice_draws import draws
from .passes.slices_again import sliced
from .passes.under_way import under_way
from .passes.views import views

OF_ONE_RANK: tuple[Pass, ...] = (  # which look at no other rank's blocks
    equal_parts,
    dead,
    once,
    writes,
    draws,
    scatter,
    residual,
    views,
    composites,
    common,
    dead,
    kept,
    once,
    scatter,
    residual,
    flat,
    views,
    common,
    dead,
    sliced,
    hoist,
    shapes,
    axes,
    buckets,
    overlap,
    prefetch,
    order,
    recompute,
    under_way,
)
OF_RANKS: tuple[Pass, ...] = (donate, reuse, in_parts, foreach)  # which look at what ranks hold alike
PASSES = (*OF_ONE_RANK, *OF_RANKS)


def beside_computing(passes: Sequence[Pass]) -> list[Pass]:
    """The passes as on devices that compute while values travel: they ask the mesh, which is of CPUs wherever there are no
    GPUs."""
    asks = lambda one: getattr(one, "func", one) in (kept, overlap, prefetch, under_way)
    computing: Any = functools.partial
    return [computing(one, on_cpu=True) if asks(one) else one for one in passes]
