"""Values that a body reads into Python, where ranks must not part: what such a read is called, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from . import lines, types
from .errors import TypingError, mesh_text, report
from .mesh import axes_of
from .types import Type

VALUES = ("numpy", "__array__", "__dlpack__", "tolist")  # these take all of a value, the others one number
_CALLED = {"__bool__": "bool()", "__float__": "float()", "__int__": "int()", "__complex__": "complex()", "__contains__": "in",
           "__index__": "an index", "equal": "torch.equal", "allclose": "torch.allclose"}  # fmt: skip
_CONDITIONS = re.compile(r"(?<!\.)\b(if|while|assert|and|or|not|any|all|max|min|sorted)\b")


def refused(name: str, found: Sequence[tuple[torch.Tensor, Type]], mesh: Any) -> TypingError:
    """The error of a read of values that vary, or are unreduced: `name` is torch's for it."""
    axes = sorted({axis for _, t in found for axis in t.varying | t.unreduced})
    varies = any(t.varying for _, t in found)
    one = f"vfn.psum(x, {axes[0]!r})"
    fact = "that differs by rank" if varies else f"that is still to be added over {axes[0]!r}"
    if not varies:
        fix = f"{one} first, which adds it up"
    elif name in VALUES:
        fix = f"torch ops; a torch.library.custom_op for what torch has no op for; or one value for all ranks: {one}"
    elif name in ("__bool__", "is_nonzero"):
        fix = f"torch.where(condition, a, b); or one condition for all ranks, of {one} or vfn.pmax(x, {axes[0]!r})"
    elif name in ("equal", "allclose", "__contains__"):
        fix = f"torch.where((a == b).all(), ...); or one answer for all ranks: vfn.pmin((a == b).all(), {axes[0]!r})"
    elif name == "__index__":
        fix = "torch.stack(choices)[i] or vfn.dynamic_slice(x, [i], [size]), with the tensor as it is"
    else:
        fix = f"the 0-d tensor as it is, which arithmetic takes; or one number for all ranks: {one}, vfn.pmean"
    reads = f"{_asked(name)} a value {fact}"
    parting = ", so ranks could go different ways" if varies else ""
    shown = [f"the value is {types.text(x, t)} on the {mesh_text(axes_of(mesh))}" for x, t in found]
    return TypingError(report(_called(name), reads + parting, shown, fix))


def _asked(name: str) -> str:
    if name in VALUES:
        return "this takes the numbers out of"
    if name in ("__bool__", "is_nonzero"):
        return "this asks for the truth of"
    if name in ("equal", "allclose", "__contains__"):
        return "this compares"
    return "this reads a number out of"


def _called(name: str) -> str:
    """What the user wrote: of a condition the word in their line, where there is but one."""
    said = _CALLED.get(name, name)
    if name == "__bool__" and (line := lines.user_text()) and "bool(" not in line:
        words = set(_CONDITIONS.findall(line))
        said = f"`{words.pop()}`" if len(words) == 1 else said
    return said
