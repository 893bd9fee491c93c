"""Modules of torch's as pure functions over trees of parameters."""

from .deferred import deferred
from .functional import Functional, functionalize

__all__ = ["Functional", "deferred", "functionalize"]
