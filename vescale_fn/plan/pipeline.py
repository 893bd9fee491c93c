"""The passes, in the order in which a plan goes through them."""

from __future__ import annotations

from .graph import Pass

PASSES: tuple[Pass, ...] = ()
