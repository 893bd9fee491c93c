"""Where ranks that a plan takes for one go on with different values, or tables: a call that gives each its own."""

from __future__ import annotations

import functools
from typing import Any

from .graph import Step


class OneOf(Step):
    """The call of a number, a `PerRank`, and of values: it gives the value that the number says."""


@functools.lru_cache(maxsize=64)
def one_of(count: int) -> OneOf:
    """That of so many values."""
    return OneOf("one_of", _one, views=tuple(range(1, count + 1)))


def _one(which: int, *values: Any) -> Any:
    return values[which]


class TableOf(Step):
    """The call of a number, a `PerRank`: it gives the table that the number says."""

    def of(self, which: int) -> Step:
        """That of a rank by itself."""
        return table_step(self.name, self.run(which))


def table_step(name: str, rows: Any) -> Step:
    """A table that is a part of the plan."""
    return Step(name, functools.partial(as_it_is, rows=rows))


def table_of(name: str, tables: tuple[Any, ...]) -> TableOf:
    """One of several tables."""
    return TableOf(name, functools.partial(_table, rows=tables))


def rows_of(step: Any) -> Any:
    """The table of such a step, or its tables."""
    return step.run.keywords["rows"]


def as_it_is(rows: Any) -> Any:
    return rows


def _table(which: int, rows: Any) -> Any:
    return rows[which]
