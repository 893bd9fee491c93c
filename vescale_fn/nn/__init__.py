"""What deserves its own sharded form: attention over a split sequence, split experts, tables and losses over split classes."""

from .._core.base import front_door
from . import flex as flex  # from now on torch's flex_attention takes arrays
from .attention import attention
from .embedding import embedding
from .experts import experts
from .linear_cross_entropy import linear_cross_entropy
from .routing import Routes, load_balance_loss, route, router_z_loss
from .zigzag import zigzag_order

__all__ = [
    "Routes",
    "attention",
    "embedding",
    "experts",
    "linear_cross_entropy",
    "load_balance_loss",
    "route",
    "router_z_loss",
    "zigzag_order",
]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
