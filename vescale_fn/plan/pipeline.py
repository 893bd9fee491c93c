"""The passes, in the order in which a plan goes through them."""

from __future__ import annotations

from .graph import Pass
from .passes.common import common
from .passes.dead import dead
from .passes.views import views

PASSES: tuple[Pass, ...] = (
    dead,
    views,
    common,
    dead,
)
