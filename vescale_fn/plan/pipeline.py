"""The passes, in the order in which a plan goes through them."""

from __future__ import annotations

from .graph import Pass
from .passes.axes import axes
from .passes.buckets import buckets
from .passes.common import common
from .passes.composites import composites
from .passes.dead import dead
from .passes.donate import donate
from .passes.draws import draws
from .passes.flat import flat
from .passes.foreach import foreach
from .passes.once import once
from .passes.order import order
from .passes.overlap import overlap
from .passes.recompute import recompute
from .passes.residual import residual
from .passes.reuse import reuse
from .passes.scatter import scatter
from .passes.views import views
from .passes.writes import writes

PASSES: tuple[Pass, ...] = (
    dead,
    once,
    writes,
    draws,
    scatter,
    residual,
    views,
    composites,
    flat,
    views,
    common,
    dead,
    axes,
    buckets,
    overlap,
    order,
    recompute,
    donate,
    reuse,
    foreach,
)
