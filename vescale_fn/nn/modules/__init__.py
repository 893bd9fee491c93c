"""Modules of torch's as pure functions over trees of parameters."""

from .deferred import deferred
from .functional import Functional, module_function
from .functional import functionalize as functionalize

__all__ = ["Functional", "deferred", "module_function"]
