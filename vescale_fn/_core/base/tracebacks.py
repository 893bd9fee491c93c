"""Tracebacks that end at the user's line: what Python, IPython and pytest show of an error leaves our frames out.

The error keeps its whole traceback, for debuggers and logs; only what is displayed is shorter. Of an error of ours all
inner frames go (`lines.inner`), so that the last one is the user's; so do those of an error that torch raised below us,
about an op that the user called. Of any other error that came through our code go those between the user's frames: a
function that `grad` or `shard_map` called stands below the line that called them. But what our own code did not mean to
raise is shown to where it was raised; a line of ours that only carries out the user's op did not raise what torch's C++
raises there. Such lines call it ``func`` or ``op``.

Source: the idea of JAX's traceback filtering.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from . import source_lines, state


def full_tracebacks(on: bool = True) -> None:
    """From here on, show errors with all frames, those of vescale_fn and torch too; False: without them again.

    The environment variable ``VESCALE_FN_TRACEBACK=full`` does the same. Either way ``error.__traceback__`` is whole,
    and so are ``traceback.print_exc`` and what goes into logs.

    Args:
        on: whether to show all frames.

    >>> import vescale_fn as vfn
    >>> vfn.full_tracebacks(False)
    """
    state.process.full_tracebacks = on


def hide_from_pytest() -> None:
    """Mark the frames that an error which is being made now should be shown without. pytest knows this variable."""
    if state.process.full_tracebacks:
        return
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    for frame, hidden in zip(frames, source_lines.inner(f.f_code.co_filename for f in frames)):
        if hidden:
            frame.f_locals["__tracebackhide__"] = True


def hide_inner_from_pytest(error: BaseException) -> None:
    """The same for an error that came out of a function of the user's, torch's own about an op in it say."""
    entries = _entries(error.__traceback__)
    if state.process.full_tracebacks or _raised_by_us(entries[-1]):
        return
    for entry, hidden in zip(entries, source_lines.inner(e.tb_frame.f_code.co_filename for e in entries)):
        if hidden:
            entry.tb_frame.f_locals["__tracebackhide__"] = True


def between(excinfo: Any) -> bool:
    """``__tracebackhide__`` of a file that calls functions of the user, for pytest: hide it where an error passed through."""
    return not state.process.full_tracebacks and not _raised_by_us(_entries(excinfo.tb)[-1])


def _entries(found: TracebackType | None) -> list[TracebackType]:
    entries = []
    while found is not None:
        entries.append(found)
        found = found.tb_next
    return entries


def _takes_part(file: str) -> bool:
    """Whether a frame of this file makes an error one that came through our code: torch's own calls pass through what asks
    whether they are in a body."""
    return source_lines.is_ours(file) and not file.endswith("interception.py")


_OF_THE_USER = re.compile(r"\b(func|op)\(")


def _raised_by_us(entry: TracebackType) -> bool:
    """Whether an error whose innermost frame is this one is a fault of ours."""
    file = entry.tb_frame.f_code.co_filename
    return source_lines.is_ours(file) and not _OF_THE_USER.search(linecache.getline(file, entry.tb_lineno))


def shorter(error: BaseException, whole: TracebackType | None) -> tuple[TracebackType | None, int]:
    """The part of an error's traceback that is shown, and the number of frames that are not."""
    entries = _entries(whole)
    files = [entry.tb_frame.f_code.co_filename for entry in entries]
    hidden = source_lines.inner(files)
    if not getattr(error, "ends_at_the_users_line", False):
        if not any(map(_takes_part, files)):
            return whole, 0
        i = len(files) - 1
        while _raised_by_us(entries[-1]) and hidden[i]:
            hidden[i] = False
            i -= 1
    if state.process.full_tracebacks or all(hidden):
        return whole, 0
    shown = None
    for entry, hide in zip(reversed(entries), reversed(hidden), strict=True):
        if not hide:
            shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown, sum(hidden)


def _chain(error: BaseException | None, seen: dict[int, BaseException]) -> list[BaseException]:
    """An error, and those that are shown with it."""
    if error is None or id(error) in seen:
        return []
    seen[id(error)] = error
    others = [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
    return [error, *(found for other in others for found in _chain(other, seen))]


@contextlib.contextmanager
def shortened(error: BaseException, whole: TracebackType | None) -> Iterator[None]:
    """Within the block, an error and those that are shown with it have the tracebacks to show, and a note of what is
    missing (which Python shows from 3.11 on).
    """
    before = [(e, e.__traceback__) for e in _chain(error, {})]
    notes = error.__dict__.get("__notes__")
    count = 0
    try:
        for e, its_whole in before:
            e.__traceback__, hidden = shorter(e, whole if e is error else its_whole)
            count += hidden
        if count:
            said = (
                f"({count} frame{'s' * (count != 1)} of vescale_fn and torch hidden; vfn.full_tracebacks() or "
                "VESCALE_FN_TRACEBACK=full shows them)"
            )
            error.__dict__["__notes__"] = [*(notes or ()), said]
        yield
    finally:
        for e, its_whole in before:
            e.__traceback__ = its_whole
        if notes is None:
            error.__dict__.pop("__notes__", None)
        else:
            error.__dict__["__notes__"] = notes


def text(error: BaseException, whole: TracebackType | None) -> str:
    """What is shown of an error, as text."""
    with shortened(error, whole):
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))


# --- where Python and IPython show errors -----------------------------------------------------------------------------


def _show(kind: Any, error: Any, whole: Any) -> object:
    """`sys.excepthook`. A hook that was there before, of someone else, gets the whole traceback."""
    if _excepthook is not sys.__excepthook__ or not isinstance(error, BaseException):
        return _excepthook(kind, error, whole)
    with shortened(error, whole):
        return _excepthook(kind, error, error.__traceback__)


def _show_in_thread(args: Any) -> object:
    """`threading.excepthook`."""
    if _thread_excepthook is not threading.__excepthook__ or args.exc_value is None:
        return _thread_excepthook(args)
    with shortened(args.exc_value, args.exc_traceback):
        shown = args.exc_type, args.exc_value, args.exc_value.__traceback__, args.thread
        return _thread_excepthook(threading.ExceptHookArgs(shown))


def _show_in(shell: Any) -> None:
    """Have an IPython shell, a notebook's say, show errors so."""
    show = shell.showtraceback

    def showtraceback(exc_tuple: Any = None, *args: Any, **kwargs: Any) -> Any:
        kind, error, whole = exc_tuple or sys.exc_info()
        if not isinstance(error, BaseException):
            return show(exc_tuple, *args, **kwargs)
        with shortened(error, whole):
            out = show((kind, error, error.__traceback__), *args, **kwargs)
        sys.last_traceback = whole  # for %debug and %tb, which show all of it
        return out

    shell.showtraceback = showtraceback


_excepthook, sys.excepthook = sys.excepthook, _show
_thread_excepthook, threading.excepthook = threading.excepthook, _show_in_thread
if "IPython" in sys.modules and (_shell := sys.modules["IPython"].get_ipython()) is not None:
    _show_in(_shell)
