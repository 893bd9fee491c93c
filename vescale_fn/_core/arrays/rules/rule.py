"""What a rule is: which dims of an op's tensors may be split together, and what must be added up afterwards.

A rule gives every dim of every tensor argument and result a label. Dims with one label are split alike; a dim without a
label (None) must be whole; a dim that is several seen as one has their labels (`Parts`). That is all that an op's
mathematics says; which axes then split which label is the interpreter's business. A label that is summed over (`sums`) and
missing from a result leaves that result a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch


class Parts(tuple[tuple[int, Any], ...]):
    """The label of a dim that merges several: the size and the label of each."""


Label = Any
Row = tuple[Label, ...]


class T(NamedTuple):
    """A tensor argument: its place among the op's tensors, its global shape, its dtype."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)


@dataclass(frozen=True)
class Call:
    """One call of an op: its arguments by name, tensors as `T`, and its results' shapes and dtypes (None: no tensor)."""

    name: str
    args: dict[str, Any]
    tensors: tuple[T, ...]
    outs: tuple[tuple[int, ...] | None, ...]
    dtypes: tuple[torch.dtype | None, ...]
    lies: tuple[str, ...] = ()  # what is remembered of another tensor: the axes that split its first dim

    def __getitem__(self, name: str) -> Any:
        return self.args[name]


@dataclass(frozen=True)
class Rule:
    """What may be split together."""

    ins: tuple[Row, ...]
    outs: tuple[Row, ...]
    sums: frozenset[Label] = frozenset()  # split and missing from a result: that result is a partial sum
    per_result: bool = False  # one call for each result: a label begins with the number of its result
    even: frozenset[Label] = frozenset()  # may be split only where every size under it divides
    filled: frozenset[Label] = frozenset()  # may be split only where each rank has something: of nothing the op fails
    linear: tuple[int, ...] = ()  # the arguments in which, together, the op is linear: all partial in, partial out
    unmoved: tuple[
        int, ...
    ] = ()  # arguments that are not gathered to keep a sum partial: indices, as large as what is read
    shape_only: tuple[int, ...] = ()  # arguments of which only the shape is read
    joins: tuple[int, ...] = ()  # arguments that are added once to a sum
    # how the parts of a missing label are put together: sum (when it is needed), total (at once), max, min
    fold: str = "sum"
    op: Callable[..., Any] | None = None  # what runs on the blocks, where it is not the op itself
    only: str = ""  # `op` runs only where the "blocks" are split, or dims that are several, "parts"
    # what makes the results of the folded parts, where they are not the results
    finish: Callable[..., Any] | None = None
    again: bool = False  # `finish` takes the arguments, too
    copies: bool = False  # `op` gives a copy where the op itself gives a view
    sizes: str = ""  # the argument that holds the first result's global shape
    # where one of these labels is split, the last argument of `op` is the range that a rank's block covers, or a tuple of the
    # ranges of all of them
    blocks: tuple[Label, ...] = ()
    yields: frozenset[Label] = frozenset()  # take the axes that no other label takes
    wish: tuple[
        tuple[Label, tuple[str, ...]], ...
    ] = ()  # how labels that no argument has are split, if nothing opposes it


def same(shape: Sequence[int] | None) -> Row:
    """Each dim for itself."""
    return tuple(range(len(shape or ())))


def but(ndim: int, whole: Sequence[int]) -> Row:
    """Each dim for itself, but for those that must be whole."""
    return tuple(None if d in whole else d for d in range(ndim))


def none(shape: Sequence[int] | None) -> Row:
    """All dims whole."""
    return (None,) * len(shape or ())


def dims(dim: Any, ndim: int) -> list[int]:
    """A dim argument (None or empty: all) as a list."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(ndim))
    return [d % ndim if ndim else 0 for d in (dim if isinstance(dim, (list, tuple)) else (dim,))]


def dim_of(call: Call, ndim: int) -> int:
    """The dim that a call names, counted from the front."""
    return (call["dim"] if "dim" in call.args else call["dimension"]) % max(ndim, 1)


def broadcast(shape: Sequence[int], out: Sequence[int], labels: Row | None = None) -> Row:
    """The row of an argument that is broadcast to a result with these labels: a dim that is repeated is whole."""
    shift = len(out) - len(shape)
    labels = same(out) if labels is None else labels
    return tuple(labels[d + shift] if size == out[d + shift] else None for d, size in enumerate(shape))


def without_blocks(rule: Rule) -> Rule:
    """The rule with the dims whole of which a block has a range."""
    rows = lambda side: tuple(tuple(None if one in rule.blocks else one for one in row) for row in side)
    return replace(rule, ins=rows(rule.ins), outs=rows(rule.outs), blocks=(), op=None)
