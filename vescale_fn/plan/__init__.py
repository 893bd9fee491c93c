"""Record once, replay on plain tensors: `jit`."""

from .jit import CacheInfo, Jitted, disable_jit, jit
from .printing import debug_print

__all__ = ["CacheInfo", "Jitted", "debug_print", "disable_jit", "jit"]
