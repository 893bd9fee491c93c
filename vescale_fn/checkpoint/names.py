"""The leaves of a tree by name (`params.blocks.0.w`), and the shape of a tree as plain data. None is a leaf here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import optree

from .._core.base import tree
from .._core.base.containers import adopted
from .._core.base.errors import CheckpointError
from .._core.base.messages import report

ALONE = "value"  # the name of a tree that is one leaf


class Named(NamedTuple):
    """One leaf of a tree."""

    name: str  # params.blocks.0.w
    keys: tuple[str, ...]  # the same in parts
    path: str  # as the user would write it: tree['params']['blocks'][0]['w']
    value: Any


def named(tree_: Any, where: str, root: str) -> tuple[list[Named], Any]:
    """The leaves of a tree in order, and what `rebuilt` makes a tree of."""
    while adopted(tree.leaves(tree_, is_leaf=tree.opaque)):
        pass  # a node may hold others
    accessors, leaves, treedef = optree.tree_flatten_with_accessor(tree_, is_leaf=tree.opaque, none_is_leaf=True)
    found = [
        Named(".".join(keys) or ALONE, keys or (ALONE,), accessor.codify(root), leaf)
        for accessor, leaf in zip(accessors, leaves, strict=True)
        for keys in (tuple(map(_key, accessor)),)
    ]
    seen: dict[str, str] = {}
    clashes = [
        f"{seen[one.name]} and {one.path} are both {one.name!r}"
        for one in found
        if seen.setdefault(one.name, one.path) != one.path
    ]
    if clashes:
        raise CheckpointError(
            report(
                where,
                "leaves are stored by their names, and some have the same name",
                clashes,
                "keys without dots, or other keys",
            )
        )
    return found, treedef


def _key(entry: Any) -> str:
    """One step of a path: an attribute's or a field's name, a key, a place in a sequence."""
    return str(getattr(entry, "field", None) or getattr(entry, "name", None) or entry.entry)


def rebuilt(treedef: Any, leaves: list[Any]) -> Any:
    """The tree of these leaves."""
    return optree.tree_unflatten(treedef, leaves)


def outline(tree_: Any, names: Iterator[str]) -> Any:
    """The shape of a tree as what JSON can say, with names for leaves; other containers than lists, tuples and
    dictionaries come back as dictionaries."""
    if tree.opaque(tree_) or optree.tree_is_leaf(tree_, none_is_leaf=True):
        return next(names)
    children, _, keys, _ = optree.tree_flatten_one_level(tree_, none_is_leaf=True)
    inner = [outline(child, names) for child in children]
    if type(tree_) in (list, tuple):
        return {type(tree_).__name__: inner}
    keys = getattr(tree_, "_fields", keys)
    return {"dict": [[key if type(key) in (str, int, float, bool) else str(key), x] for key, x in zip(keys, inner)]}


def outlined(shape: Any) -> list[str]:
    """The names in an outline, in order; any exception where it is none."""
    names, todo = list[str](), [shape]
    while todo:
        shape = todo.pop()
        if isinstance(shape, str):
            names.append(shape)
            continue
        ((kind, inner),) = shape.items()
        if kind == "dict" and len({key for key, _ in inner}) == len(inner):
            todo += [x for _, x in inner]
        elif kind in ("list", "tuple") and isinstance(inner, list):
            todo += inner
        else:
            raise ValueError(f"{kind} is no container")
    return names


def filled(shape: Any, leaf: Callable[[str], Any]) -> Any:
    """The tree of this outline, of ``leaf(name)`` for each name."""
    if isinstance(shape, str):
        return leaf(shape)
    ((kind, inner),) = shape.items()
    if kind == "dict":
        return {key: filled(x, leaf) for key, x in inner}
    return (tuple if kind == "tuple" else list)(filled(x, leaf) for x in inner)
