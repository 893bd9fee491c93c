"""The user's line that a value came from; in a backward pass, the line of the forward op.

Autograd numbers its nodes in the order in which they are made. While somebody listens (a log, `strict`), the line of each
op on an array is noted with the number of the last node that had then been made; in the backward pass the node that runs
tells its number.
"""

from __future__ import annotations

import bisect
import contextlib
import sys
from collections.abc import Iterator

from .. import torch_internals
from .context import Restored
from .source_lines import is_users, user_line

_KEPT = 200_000  # ops whose lines are remembered
_numbers: list[int] = []
_lines: list[str] = []
listeners: set[object] = set()  # who wants to know


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Note lines in this block."""
    who = object()
    with Restored(_ended, who), Restored(_ended, who):
        listeners.add(who)
        yield


def _ended(who: object) -> None:
    listeners.discard(who)
    if not listeners:
        _numbers.clear()
        _lines.clear()


def note(made: bool = True) -> None:
    """Note the line of an op that begins: the nodes for its backward pass have been made, or are next."""
    number = torch_internals.autograd_count() - made
    if _numbers and number <= _numbers[-1]:  # an op without a node, or another thread's
        return
    _numbers.append(number)
    _lines.append(here()[0])
    if len(_numbers) > _KEPT:
        del _numbers[: _KEPT // 2], _lines[: _KEPT // 2]


def here() -> tuple[str, bool]:
    """The user's line at this point; in a backward pass that of the forward op, and True."""
    if (number := torch_internals.running_node()) is None or _recomputes():
        return user_line(), False
    at = bisect.bisect_left(_numbers, number)
    return (_lines[at], True) if at < len(_lines) else (user_line(), True)


def _recomputes() -> bool:
    """Whether code of the user's runs inside of the backward pass, which it computes again."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not torch_internals.engine_code:
        if is_users(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
