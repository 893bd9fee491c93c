"""Pytrees: optree at our boundary, prefix broadcast, and paths as users write them.

``None`` is a node without leaves, dictionaries are walked in sorted key order, a spec `P` is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

from .errors import SpecError, report

flatten = optree.tree_flatten
unflatten = optree.tree_unflatten
map_ = optree.tree_map
leaves = optree.tree_leaves


_opaque: set[type] = set()


def mark_opaque(cls: type) -> type:
    """Have transforms pass nodes of this class through as leaves (keys: there is nothing in them to differentiate)."""
    _opaque.add(cls)
    return cls


def flatten_opaque(tree: Any) -> tuple[list[Any], Any]:
    """`flatten`, with nodes of opaque classes as leaves."""
    return optree.tree_flatten(tree, is_leaf=lambda x: type(x) in _opaque)


def paths(tree: Any, root: str = "") -> list[str]:
    """The path of each leaf as the user would write it: ``params['blocks'][0].w``."""
    return [accessor.codify(root) for accessor in optree.tree_accessors(tree)]


def dotted(accessor: optree.PyTreeAccessor) -> str:
    """A leaf's path with dots, for patterns: ``blocks.0.attn.wq``."""
    return ".".join(str(getattr(entry, "name", None) or entry.entry) for entry in accessor)


def broadcast(prefix: Any, tree: Any, where: str, prefix_name: str, tree_name: str,
              is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:  # fmt: skip
    """One entry of `prefix` for each leaf of `tree`, or a SpecError that names every place where they part."""
    try:
        return optree.broadcast_prefix(prefix, tree, is_leaf=is_leaf)
    except ValueError:
        errors = optree.prefix_errors(prefix, tree, is_leaf=is_leaf)
        failures = [str(error(prefix_name)).replace("\n", " ") for error in errors]
        raise SpecError(
            report(where, f"{prefix_name} is not a prefix of {tree_name}", failures or ["the structures differ"],
                   f"give {prefix_name} the structure of {tree_name}, or one spec for a whole subtree")  # fmt: skip
        ) from None
