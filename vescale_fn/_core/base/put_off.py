"""What a recording has put off is done before a function of ours that it does not see as one call.

Here is no torch, as functions that need none call this, too: the recorder says how (`settled_by`).
"""

from __future__ import annotations

from collections.abc import Callable

_settling: list[Callable[[bool], None]] = []


def settled_by(how: Callable[[bool], None]) -> None:
    """From here on `how` does what has been put off."""
    _settling[:] = [how]


def settle(for_good: bool = False) -> None:
    """Do it. `for_good`: no more is put off, as the function that was looked at has come to its end."""
    for how in _settling:
        how(for_good)
