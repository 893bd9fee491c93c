"""What deserves its own sharded form: attention over a sharded sequence, experts that are split over ranks."""

from .attention import attention
from .experts import experts
from .routing import Routes, load_balance_loss, route, router_z_loss
from .zigzag import zigzag_order

__all__ = ["Routes", "attention", "experts", "load_balance_loss", "route", "router_z_loss", "zigzag_order"]
