"""Record once, replay on plain tensors: `jit`."""

from .jit import CacheInfo, Jitted, disable_jit, jit
from .pipeline import PASSES
from .printing import debug_print

__all__ = ["PASSES", "CacheInfo", "Jitted", "debug_print", "disable_jit", "jit"]
