"""What `jit(memory=...)` asks for: a number of bytes, or a share of what a plan needs without a limit."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from ..._core.base.errors import TransformError
from ..._core.base.messages import report, short

_UNITS = (
    {"B": 1}
    | {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
    | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
)
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d*)?)\s*(%|[KMGT]?i?B)\s*")


@dataclass(frozen=True)
class MemoryLimit:
    """A number of bytes, or a share of a number that is still to be found.

    Args:
        bytes: of one rank; None where it is a share.
        share: of the peak of the plan without a limit.
        asked: what the user wrote, for messages.
    """

    bytes: int | None
    share: float = 1.0
    asked: str = field(default="", compare=False)

    def __repr__(self) -> str:
        return f"{self.bytes} B" if self.bytes is not None else f"{100 * self.share:.12g} %"

    def of(self, peak: int) -> int:
        """The bytes, where a plan without a limit needs `peak` bytes."""
        return int(self.share * peak) if self.bytes is None else self.bytes


def limit(memory: Any, backend: str = "torch", caller: str = "jit") -> MemoryLimit:
    """What was asked for.

    Args:
        memory: as `jit` takes it.
        backend: what computes.
        caller: who asks; but for `jit` for no share.

    >>> limit("60 %"), limit(2048), limit("8 GiB")
    (60 %, 2048 B, 8589934592 B)
    """
    if backend != "torch":
        what = f"memory={short(memory)} cannot be held with backend={backend!r}, whose code takes memory of its own"
        raise TransformError(report("jit", what, fix='backend="torch", or leave memory out'))
    if type(memory) is int and memory > 0:
        return MemoryLimit(memory, asked=repr(memory))
    found = _WRITTEN.fullmatch(memory) if isinstance(memory, str) else None
    number = float(found[1]) if found is not None else 0.0
    if found is not None and found[2] == "%" and number > 0 and caller == "jit":
        return MemoryLimit(None, number / 100, repr(memory))
    if found is not None and found[2] in _UNITS and (count := math.floor(number * _UNITS[found[2]])) > 0:
        return MemoryLimit(count, asked=repr(memory))
    share = '; or a share of what the plan needs without it, memory="60 %"' if caller == "jit" else ""
    what, fix = f"memory={short(memory)} is no amount of memory", f'bytes, as an int or as memory="8 GiB"{share}'
    raise TransformError(report(caller, what, fix=fix))
