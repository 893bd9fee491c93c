"""Record once, replay on plain tensors: `jit`."""

from .debug_print import debug_print
from .jit import CacheInfo, Jitted, disable_jit, jit
from .pipeline import PASSES

__all__ = ["PASSES", "CacheInfo", "Jitted", "debug_print", "disable_jit", "jit"]
