"""What can be done with values on a mesh: the collectives of a `shard_map` body, and the rules by which ops shard."""

from .collective import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
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
from .slices import dynamic_slice

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "dynamic_slice",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
]
