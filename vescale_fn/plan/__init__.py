"""Record once, replay on plain tensors: `jit`."""

from .._core.base import front_door
from .debug_print import debug_print
from .equal_calls import shared
from .jit import CacheInfo, Jitted, disable_jit, jit
from .pipeline import PASSES

__all__ = ["PASSES", "CacheInfo", "Jitted", "debug_print", "disable_jit", "jit", "shared"]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)
