"""An interrupt may come between any two lines, also of what cleans up. Each call of ours that sets something ambient remembers
what there was, and puts that back when it is left by an exception, whatever is left over of the contexts inside of it.
"""

from __future__ import annotations

from typing import Any

from .. import torch_internals
from ..base import state


def before() -> tuple[Any, ...]:
    """What is ambient now, in this thread."""
    return state.saved(), torch_internals.ambient()


def undo(saved: tuple[Any, ...]) -> None:
    """Put back what `before` has seen. Where nothing is left over it changes nothing."""
    ours, torchs = saved
    torch_internals.set_ambient(torchs)
    state.put_back(ours)


class undone:
    """A context that does so, whichever way it is left."""

    def __enter__(self) -> None:
        self._saved = before()

    def __exit__(self, *error: Any) -> None:
        undo(self._saved)
