"""What a `shard_map` body does beside torch's ops: the collectives, and where a rank is."""

from .._core.base import front_door
from .casts import pcast, pvary
from .exchanges import all_gather, all_to_all, pbroadcast, ppermute, psum_scatter
from .positions import axis_index, axis_size, dynamic_slice
from .reductions import pmax, pmean, pmin, psum

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

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
