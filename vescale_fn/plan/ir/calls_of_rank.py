"""The calls that one of several ranks makes, of a graph in which a process has recorded each rank that it plays."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from .collective_nodes import given, is_listed, source


def calls_of_rank(at: int, results: Iterable[fx.Node]) -> set[fx.Node]:
    """Those that the results of the `at`-th of these ranks come from: of a collective what this rank gives to it, whichever of
    those that get the same is said to have its result."""
    todo, found = list(results), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        if (arrived := source(node)) is None:
            todo += node.all_input_nodes
        else:
            collective, _ = arrived
            found.add(collective)
            todo.append(given(collective)[at if is_listed(collective) else 0])
    return found
