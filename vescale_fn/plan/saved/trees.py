"""The tree of a plan's results as data: Python's own containers by what they are, others as places in the arguments' tree.

A class is never looked up by a name that a file holds: a node of another class is as the node of the arguments that it equals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..._core.base import tree
from .graph_data import unsaveable

_LEAF = "leaf"
_PLAIN = {list: "list", tuple: "tuple"}


def written(results: Any, arguments: Any) -> Any:
    """The tree of results, an optree treespec, as data for JSON."""
    if results.is_leaf():
        return _LEAF
    kind, children = results.type, results.children()
    if kind is type(None) or kind is None:
        return None
    if kind in _PLAIN:
        return {_PLAIN[kind]: [written(child, arguments) for child in children]}
    if kind is dict and all(type(key) in (str, int) for key in results.entries()):
        keys = [[type(key).__name__, key] for key in results.entries()]
        return {"dict": keys, "children": [written(child, arguments) for child in children]}
    for place, node in _nodes(arguments):
        if node == results:
            return {"argument": place}
    raise unsaveable(
        f"a result of class {kind.__qualname__}",
        "results in lists, tuples and dictionaries, or in trees like the arguments'",
    )


def read(data: Any, arguments: Any) -> Any:
    """The treespec that `written` has told of, where the arguments' tree is the same."""
    return tree.flatten(_like(data, arguments))[1]


def _like(data: Any, arguments: Any) -> Any:
    if data == _LEAF:
        return 0
    if data is None:
        return None
    if "argument" in data:
        node = next(node for place, node in _nodes(arguments) if place == data["argument"])
        return tree.unflatten(node, [0] * node.num_leaves)
    if "dict" in data:
        keys = [int(key) if kind == "int" else key for kind, key in data["dict"]]
        return {key: _like(child, arguments) for key, child in zip(keys, data["children"], strict=True)}
    ((kind, children),) = data.items()
    return (list if kind == "list" else tuple)(_like(child, arguments) for child in children)


def _nodes(spec: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[list[int], Any]]:
    """The nodes of a tree with their places: of which child the which child ..."""
    if not spec.is_leaf():
        yield list(place), spec
        for i, child in enumerate(spec.children()):
            yield from _nodes(child, (*place, i))
