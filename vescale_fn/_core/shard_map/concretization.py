"""Reading a value into Python in a body (`if x > 0`, `.item()`), where ranks could take different branches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..base import source_lines
from ..base.errors import VaryingTypeError
from ..base.messages import mesh_text, report
from ..local_types import tensor_types
from ..local_types.types import Type
from ..sharding.index_map import axes_of


class _Read(NamedTuple):
    """What a kind of reading does, and what to write instead where the value differs along an axis."""

    does: str
    instead: str


_VALUES = _Read(
    "takes the numbers out of",
    "torch ops; a torch.library.custom_op for what torch has no op for; or one value "
    "for all ranks: vfn.psum(x, {axis})",
)
_TRUTH = _Read(
    "asks for the truth of",
    "torch.where(condition, a, b); or one condition for all ranks, of vfn.psum(x, {axis}) or vfn.pmax(x, {axis})",
)
_COMPARISON = _Read(
    "compares", "torch.where((a == b).all(), ...); or one answer for all ranks: vfn.pmin((a == b).all(), {axis})"
)
_INDEX = _Read(
    "reads a number out of", "torch.stack(choices)[i] or vfn.dynamic_slice(x, [i], [size]), with the tensor as it is"
)
_NUMBER = _Read(
    "reads a number out of",
    "the 0-d tensor as it is, which arithmetic takes; or one number for all ranks: vfn.psum(x, {axis}), vfn.pmean",
)

# By torch's name: what its user writes, and its kind.
_READS = {
    "__bool__": ("bool()", _TRUTH),
    "is_nonzero": ("is_nonzero", _TRUTH),
    "__float__": ("float()", _NUMBER),
    "__int__": ("int()", _NUMBER),
    "__complex__": ("complex()", _NUMBER),
    "item": ("item", _NUMBER),
    "__index__": ("an index", _INDEX),
    "equal": ("torch.equal", _COMPARISON),
    "allclose": ("torch.allclose", _COMPARISON),
    "__contains__": ("in", _COMPARISON),
    **{name: (name, _VALUES) for name in ("numpy", "__array__", "__dlpack__", "tolist")},
}
VALUES = frozenset(name for name, (_, kind) in _READS.items() if kind is _VALUES)

_CONDITIONS = re.compile(r"(?<!\.)\b(if|while|assert|and|or|not|any|all|max|min|sorted)\b")


def refused(name: str, found: Sequence[tuple[torch.Tensor, Type]], mesh: Any) -> VaryingTypeError:
    """The error of a read of values that vary, or are unreduced: `name` is torch's for it."""
    said, kind = _READS.get(name, (name, _NUMBER))
    axis = min(axis for _, t in found for axis in t.varying | t.unreduced)
    if any(t.varying for _, t in found):
        what = f"this {kind.does} a value that differs by rank, so ranks could go different ways"
        fix = kind.instead.format(axis=repr(axis))
    else:
        what = f"this {kind.does} a value that is still to be added over {axis!r}"
        fix = f"vfn.psum(x, {axis!r}) first, which adds it up"
    shown = [f"the value is {tensor_types.text(x, t)} on the {mesh_text(axes_of(mesh))}" for x, t in found]
    return VaryingTypeError(report(_condition() or said if name == "__bool__" else said, what, shown, fix))


def _condition() -> str:
    """What asks for a truth in the user's line, ```if``` say, where only one thing there can be it; else nothing."""
    line = source_lines.user_text()
    words = set(_CONDITIONS.findall(line))
    return f"`{words.pop()}`" if len(words) == 1 and "bool(" not in line else ""
