"""Numbers in a plan of which each rank has its own, as where its part of a value begins."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any


class RanksDiffer(Exception):
    """Ranks that were taken for one do not do the same."""


class PerRank(int):
    """The number of each rank, `values`. What is computed from it is so for each rank; a comparison on which ranks do not
    agree raises `RanksDiffer`. As an int it is that of the first rank, for what looks at shapes alone."""

    values: tuple[int, ...]
    tables = False  # whether a plan can have tables of which each rank has its own, as well

    def __new__(cls, values: Sequence[int]) -> PerRank:
        self = int.__new__(cls, values[0])
        self.values = tuple(values)
        return self

    def __repr__(self) -> str:
        return f"PerRank{self.values}"

    __str__ = __repr__

    def __hash__(self) -> int:
        return hash(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerRank) and self.values == other.values

    def __bool__(self) -> bool:
        return self != 0


class OfEveryRank(PerRank):
    """Such a number in a plan that is made for many ranks at once, for a file."""

    tables = True


class Tables(tuple[Any, ...]):
    """The table of each rank."""


def _computed(op: Callable[[Any, Any], Any], swapped: bool = False) -> Any:
    def method(self: PerRank, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        others = other.values if isinstance(other, PerRank) else (other,) * len(self.values)
        found = [op(b, a) if swapped else op(a, b) for a, b in zip(self.values, others, strict=True)]
        if len(set(found)) == 1:
            return found[0]
        if type(found[0]) is not int:
            raise RanksDiffer
        return type(self)(found)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(PerRank, f"__{_name}__", _computed(getattr(operator, _name)))
    setattr(PerRank, f"__r{_name}__", _computed(getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge"):
    setattr(PerRank, f"__{_name}__", _computed(getattr(operator, _name)))
PerRank.__ne__ = lambda self, other: not self == other  # type: ignore[method-assign]


def per_rank(values: Sequence[int]) -> int:
    """The number that all ranks have, or of each its own."""
    return PerRank(values) if len(set(values)) > 1 else values[0]


def of_rank(x: Any, rank: int) -> Any:
    """A static argument as one rank has it."""
    if isinstance(x, PerRank):
        return x.values[rank]
    return type(x)([of_rank(one, rank) for one in x]) if isinstance(x, (list, tuple)) else x
