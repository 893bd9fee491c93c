"""Where the user is: the line of their code from which ours was called; warnings that point there.

A frame is *inner* when it runs code of this package, of torch or of optree, or of Python's own library called from such.
"""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep  # the folder of vescale_fn
_RECIPES = PACKAGE + "recipes" + os.sep  # programs, as a user would write them


def _folder(package: str) -> str:
    found = importlib.util.find_spec(package)  # does not import it
    return os.path.dirname(found.origin) + os.sep if found is not None and found.origin else "\0"


_INNER = (PACKAGE, *map(_folder, ("torch", "functorch", "optree")))
_LIBRARY = (os.path.dirname(os.__file__) + os.sep, "<frozen")


def is_ours(file: str) -> bool:
    """Whether a file of code belongs to this package."""
    return file.startswith(PACKAGE) and not file.startswith(_RECIPES)


def is_inner(file: str) -> bool:
    """Whether a file of code belongs to this package, to torch or to optree."""
    return file.startswith(_INNER) and not file.startswith(_RECIPES)


def is_library(file: str) -> bool:
    """Whether a file of code belongs to Python's own library."""
    return file.startswith(_LIBRARY) and "site-packages" not in file


def inner(files: Iterable[str]) -> list[bool]:
    """Which of these frames, given by their files with the outermost first, are inner."""
    found, last = [], False
    for file in files:
        last = is_inner(file) or (last and (is_library(file) or file == "<string>"))  # a dataclass's methods, say
        found.append(last)
    return found


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether a file of code is the user's."""
    return not (is_inner(file) or is_library(file))


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame of the user's code, from here (or `frame`) outwards; None where there is none."""
    frame = frame or sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line(frame: FrameType | None = None) -> str:
    """Where in the user's code this (or `frame`) is, as ``file:line``."""
    frame = user_frame(frame)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


def user_text() -> str:
    """What stands in the user's line, "" where it cannot be read."""
    frame = user_frame()
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip() if frame else ""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: by Python's rules once for each line and text, unless the user's filters say otherwise."""
    frame = user_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__") or "<unknown>"
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def readable(line: str) -> str:
    """A source line as its reader knows it: in a notebook by the number of the cell, not by the kernel's temporary file."""
    file, _, number = line.rpartition(":")
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return line if cell is None else f"{cell[1]}:{number}"


def quoted(line: str) -> str:
    """A source line with what stands there: ``train.py:12: `x = f(y)` ``."""
    file, _, number = line.rpartition(":")
    text = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
    return f"{readable(line)}: `{text}`" if text else readable(line)


def spelled(value: object) -> tuple[str, bool] | None:
    """How the user's code at this point can write a value: a variable, or a place in one; and whether it is a variable of
    the function itself, which can be assigned to. None where it cannot be written."""
    frame = user_frame(sys._getframe(1))
    if frame is None:
        return None
    code = frame.f_code
    own = {*frame.f_locals} - {*code.co_freevars}
    named = [(name, frame.f_globals[name]) for name in code.co_names if name in frame.f_globals]
    todo: list[tuple[str, Any]] = [*frame.f_locals.items(), *named]
    for _ in range(1000):
        if not todo:
            return None
        text, found = todo.pop(0)
        if found is value:
            return text, text in own
        if type(found) is dict:
            todo += [(f"{text}[{key!r}]", x) for key, x in found.items() if type(key) in (str, int)]
        elif type(found) in (list, tuple):
            todo += [(f"{text}[{i}]", x) for i, x in enumerate(found)]
    return None
