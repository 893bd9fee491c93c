"""What JAX's programs import from `jax.lax`, by the same names: ``from vescale_fn import lax``."""

from ._core.arrays.placement import with_sharding as with_sharding_constraint
from ._core.base import front_door
from ._core.control_flow.associative_scan import associative_scan
from ._core.control_flow.cond import cond, switch
from ._core.control_flow.scan import map, scan
from ._core.control_flow.while_loop import fori_loop, while_loop
from ._core.transforms.stop_gradient import stop_gradient
from .ops import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    dynamic_slice,
    pbroadcast,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    pvary,
)

__all__ = [
    "all_gather",
    "all_to_all",
    "associative_scan",
    "axis_index",
    "axis_size",
    "cond",
    "dynamic_slice",
    "fori_loop",
    "map",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
    "scan",
    "stop_gradient",
    "switch",
    "while_loop",
    "with_sharding_constraint",
]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
