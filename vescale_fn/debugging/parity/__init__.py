"""`check`, the parity audit: a function on one device against the same function on a mesh."""

from .check import check
from .compare import Report

__all__ = ["Report", "check"]
