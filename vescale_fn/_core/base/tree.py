"""Pytrees: optree at our boundary, prefix broadcast, and paths as users write them.

``None`` is a node without leaves, dictionaries are walked in sorted key order, a spec `P` is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import optree

from . import source_lines
from .errors import SpecError
from .messages import meant, report

flatten: Callable[..., tuple[list[Any], Any]] = optree.tree_flatten
unflatten: Callable[[Any, Iterable[Any]], Any] = optree.tree_unflatten
map_: Callable[..., Any] = optree.tree_map
leaves: Callable[..., list[Any]] = optree.tree_leaves


_opaque: set[type] = set()


def mark_opaque(cls: type) -> type:
    """Have transforms pass nodes of this class through as leaves (keys: there is nothing in them to differentiate)."""
    _opaque.add(cls)
    return cls


def none_or_opaque(x: Any) -> bool:
    """Whether `x` has no leaves of its own to walk to: with None as a leaf, a tree and what goes with it stay in step."""
    return x is None or type(x) in _opaque


def opaque(x: Any) -> bool:
    """Whether `x` is a node that transforms pass through as a leaf: a key."""
    return type(x) in _opaque


def none(x: Any) -> bool:
    """Whether `x` is None: for trees in which None is an entry."""
    return x is None


def flatten_opaque(tree: Any) -> tuple[list[Any], Any]:
    """`flatten`, with nodes of opaque classes as leaves."""
    return optree.tree_flatten(tree, is_leaf=opaque)


def flatten_plain(tree: Any, kinds: frozenset[type], leaves: list[Any]) -> Any:
    """Add the leaves of lists, tuples and dictionaries to `leaves`, and return the shape from which
    `unflatten_plain` makes their like. Other nodes count as leaves. `kinds` are classes of leaves that are told at once.

    Only for what is called so seldom that `optree`, and its table of the classes of nodes, have left the cache of the
    processor: it takes a tenth of the time then.
    """
    kind = tree.__class__
    if kind is not list and kind is not tuple and kind is not dict:
        leaves.append(tree)
        return None
    children = tree.values() if kind is dict else tree
    if kinds.issuperset(map(type, children)):
        leaves += children
        return kind, tuple(tree) if kind is dict else len(tree), None
    return kind, tuple(tree) if kind is dict else len(tree), [flatten_plain(x, kinds, leaves) for x in children]


def unflatten_plain(shape: Any, leaves: Iterator[Any]) -> Any:
    """The tree of this shape, of these leaves."""
    if shape is None:
        return next(leaves)
    kind, keys, children = shape
    found = leaves if children is None else iter([unflatten_plain(child, leaves) for child in children])
    return dict(zip(keys, found)) if kind is dict else kind(islice(found, keys))


def leaves_in_opaque(tree: Any) -> list[bool]:
    """For each leaf, whether it belongs to a node of an opaque class: whether it is the data of keys."""
    return [opaque(node) for node in optree.tree_leaves(tree, is_leaf=opaque) for _ in optree.tree_leaves(node)]


def paths(tree: Any, root: str = "", is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The path of each leaf as the user would write it: ``params['blocks'][0].w``."""
    return [accessor.codify(root) for accessor in optree.tree_accessors(tree, is_leaf=is_leaf)]


def paths_opaque(tree: Any, root: str = "") -> list[str]:
    """`paths`, with nodes of opaque classes as leaves."""
    return [accessor.codify(root) for accessor in optree.tree_accessors(tree, is_leaf=opaque)]


def keys(accessor: optree.PyTreeAccessor) -> tuple[str | int, ...]:
    """A leaf's path as a tuple: keys, places, names of fields."""
    return tuple(getattr(entry, "field", None) or getattr(entry, "name", None) or entry.entry for entry in accessor)


def keyed_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[tuple[str | int, ...], Any]]:
    """Pairs of a path as a tuple, and the leaf."""
    accessors, found, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_leaf)
    return [(keys(accessor), leaf) for accessor, leaf in zip(accessors, found)]


def dotted(accessor: optree.PyTreeAccessor) -> str:
    """A leaf's path with dots, for patterns: ``blocks.0.attn.wq``."""
    return ".".join(map(str, keys(accessor)))


def spelling(value: Any, otherwise: str) -> str:
    """The name by which the user's code calls `value` (its variable's), for messages; else `otherwise`."""
    frame = source_lines.user_frame()
    if frame is None or isinstance(value, (int, str, bool, float, type(None))):
        return otherwise
    used = {name: frame.f_globals.get(name) for name in frame.f_code.co_names}
    held = {**used, **frame.f_locals}
    return next((name for name, x in held.items() if x is value and name.isidentifier()), otherwise)


def broadcast(
    prefix: Any, tree: Any, where: str, prefix_name: str, tree_name: str, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """One entry of `prefix` for each leaf of `tree`, or a SpecError that names every place where they part."""
    try:
        return optree.broadcast_prefix(prefix, tree, is_leaf=is_leaf)
    except ValueError:
        of_specs = "spec" in prefix_name
        if prefix_name == "spec":  # given by position; others the user writes by name
            prefix_name, tree_name = spelling(prefix, prefix_name), spelling(tree, tree_name)
        failures = list(partings(prefix, tree, prefix_name, tree_name))
        fix = f"give {prefix_name} the structure of {tree_name}, or one entry for a whole subtree"
        if of_specs and any(" is None, but " in failure for failure in failures):
            fix = f"P() in place of None, where all ranks hold the whole value; or {fix}"
        raise SpecError(
            report(
                where,
                f"{prefix_name} is not a prefix of {tree_name}",
                failures,
                fix,
            )
        ) from None


def partings(prefix: Any, tree: Any, prefix_path: str, tree_path: str) -> Iterator[str]:
    """Where a tree and its would-be prefix part, in words."""
    if optree.tree_is_leaf(prefix):
        return
    if optree.tree_is_leaf(tree) or type(prefix) is not type(tree):
        what = [
            "None"
            if x is None
            else f"a leaf ({'Tensor' if hasattr(x, 'dtype') else type(x).__name__})"
            if optree.tree_is_leaf(x)
            else f"a {type(x).__name__}"
            for x in (prefix, tree)
        ]
        yield f"{prefix_path} is {what[0]}, but {tree_path} is {what[1]}"
        return
    (mine, _, my_keys, _), (theirs, _, their_keys, _) = map(optree.tree_flatten_one_level, (prefix, tree))
    if isinstance(tree, (list, tuple)) and len(mine) != len(theirs):
        yield f"{prefix_path} has length {len(mine)}, but {tree_path} has length {len(theirs)}"
        return
    if set(my_keys) != set(their_keys):
        missing, extra = ([k for k in a if k not in b] for a, b in ((their_keys, my_keys), (my_keys, their_keys)))
        parts = [
            f"{word} {', '.join(map(repr, keys))}"
            for word, keys in (("lacks", missing), ("has besides", extra))
            if keys
        ]
        question = meant(extra[0], missing) if extra else ""
        yield f"{prefix_path} {' and '.join(parts)}: {tree_path} has {', '.join(map(repr, their_keys))}{question}"
        return
    found = dict(zip(their_keys, theirs, strict=True))
    for key, child in zip(my_keys, mine, strict=True):
        if hasattr(tree, "_fields"):  # a named tuple, whose keys are its fields' places
            step = f".{tree._fields[key]}"
        else:
            step = f"[{key!r}]" if isinstance(tree, (dict, list, tuple)) else f".{key}"
        yield from partings(child, found[key], prefix_path + step, tree_path + step)
