"""What deserves its own sharded form: attention over a sharded sequence."""

from .attention import attention
from .zigzag import zigzag_order

__all__ = ["attention", "zigzag_order"]
