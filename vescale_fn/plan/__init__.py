"""Record once, replay on plain tensors: `jit`."""

from .jit import CacheInfo, Jitted, jit

__all__ = ["CacheInfo", "Jitted", "jit"]
