"""Debug mode for keys: what each was used for, and an error where one is used again.

Keys are known by their bits, so a key that was made twice (``split(key)[0]`` and ``fold_in(key, 0)`` are one) is found too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._core import torch_internals
from .._core.base import context
from .._core.base.errors import RandomError
from .._core.base.messages import report
from .._core.base.source_lines import quoted, user_line
from .._core.distributed.blocks import parts

DRAW, FOLD = "use", "fold"  # a draw and a split use a key up; folding numbers in may go on, but not beside them


def note(data: Any, where: str, kind: str = DRAW) -> None:
    """In debug mode: note that `where` uses these keys, int32 [..., 2]; an error where one was used up before.

    Raises:
        RandomError: with the lines of both uses.
    """
    if (uses := context.key_uses()) is None or torch.compiler.is_compiling() or torch_internals.tracing():
        return
    line = user_line()
    for bits in _bits(data):
        before = uses.get(bits)
        if before is not None and before[0] == "clones":
            left = before[1] - 1
            uses[bits] = ("clones", left, before[2]) if left else before[2]
            continue
        if before is not None and not before[0] == kind == FOLD:
            _, first, there = before
            first_word, second = (word & 0xFFFFFFFF for word in bits)
            again = "again by" if first == where else "and by"
            raise RandomError(
                report(
                    where,
                    f"the key [{first_word}, {second}] was used before, so the numbers are not new ones",
                    [f"by {first} at {quoted(there)}", f"{again} {where} at {quoted(line)}"],
                    "k1, k2 = vfn.random.split(key), and each of them once; vfn.random.clone(key) where it is meant",
                )
            )
        uses[bits] = (kind, where, line)


def allow(data: Any) -> None:
    """In debug mode: let these keys be used once more, because `clone` says so."""
    if not torch.compiler.is_compiling() and (uses := context.key_uses()) is not None and not torch_internals.tracing():
        for bits in _bits(data):
            before = uses.get(bits)
            count, rest = (before[1] + 1, before[2]) if before and before[0] == "clones" else (1, before)
            uses[bits] = ("clones", count, rest)


def _bits(data: Any) -> list[tuple[int, int]]:
    """The bits of the keys, each once: of all that a batch or a simulated mesh holds; none where they are not known."""
    below = torch_internals.peel(data)
    rows: dict[tuple[int, int], None] = {}
    with torch_internals.no_torch_function():
        for one in parts(torch_internals.local(below) if isinstance(below, DTensor) else below):
            if type(one) is torch.Tensor:
                rows.update(dict.fromkeys(map(tuple, one.reshape(-1, 2).tolist())))
    return list(rows)
