"""Where the user is: the line of their code from which ours was called."""

from __future__ import annotations

import linecache
import sys

import torch

_HERE = __file__.rsplit("/", 1)[0]
_TORCH = torch.__file__.rsplit("/", 1)[0]


def user_line() -> str:
    """Where in the user's code this is, as ``file:line``: the innermost frame that is neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_HERE, _TORCH)) or f"{_HERE}/recipes" in file:
            if not file.startswith("<frozen") and "/optree/" not in file:
                return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


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
