"""A formula that is mapped over many leaves, as a Python function: what it runs is the generated code of its body."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..ir.mapped import Mapped, is_on_lists

Run = Callable[[list[Any]], Sequence[Any]]


def mapping(call: Mapped, body: Run) -> Run:
    """The function of a call, of the list of its columns and of what all rows share, which it empties.

    Args:
        body: the function of all rows, or of one.
    """

    def of_lists(given: list[Any]) -> Sequence[Any]:
        columns, shared = [list(column) for (column,) in given[: call.columns]], given[call.columns :]
        given.clear()
        found = []
        for first, end in call.runs or [(0, len(columns[0]))]:
            run = [column[: end - first] for column in columns]
            for column in columns:
                del column[: end - first]
            given += [*run, *shared]
            del run
            found.append(body(given) if is_on_lists(call.bodies[0]) else list(zip(*by_rows(given))))
        return found[0] if len(found) == 1 else [[*itertools.chain(*lists)] for lists in zip(*found)]

    def on_lists(given: list[Any]) -> list[Any]:
        return list(itertools.chain.from_iterable(body(given)))

    def row_by_row(given: list[Any]) -> list[Any]:
        return list(itertools.chain.from_iterable(zip(*by_rows(given))))

    def by_rows(given: list[Any]) -> Iterator[Sequence[Any]]:
        shared = given[call.columns :]
        rows = list(zip(*given[: call.columns]))
        given.clear()
        return (body([*row, *shared]) for row in rows)

    if call.on_leaves:
        return of_lists
    return on_lists if is_on_lists(call.bodies[0]) else row_by_row
