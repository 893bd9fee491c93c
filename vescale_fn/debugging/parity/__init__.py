"""`check_parity`, the parity audit: a function on one device against the same function on a mesh."""

from .check import check as check
from .check import check_parity
from .compare import Report

__all__ = ["Report", "check_parity"]
