"""Trees as flat dictionaries under the names of their leaves, as `load_state_dict` takes them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._core.base.errors import CheckpointError
from .._core.base.messages import meant, report
from .names import named, rebuilt


def state_dict(tree_: Any) -> dict[str, Any]:
    """The leaves of a tree by name.

    Args:
        tree_: any tree; its leaves come back as they are.

    Raises:
        CheckpointError: two leaves with one name.

    Source: `torch.nn.Module.state_dict`.

    >>> import vescale_fn as vfn
    >>> vfn.checkpoint.state_dict({"blocks": [{"w": 1.0}, {"w": 2.0}]})
    {'blocks.0.w': 1.0, 'blocks.1.w': 2.0}
    """
    return {leaf.name: leaf.value for leaf in named(tree_, "state_dict", "tree")[0]}


def from_state_dict(leaves: Mapping[str, Any], like: Any) -> Any:
    """The tree that is shaped like `like`, of these leaves: the inverse of `state_dict`.

    Args:
        leaves: a leaf for each name.
        like: a tree of the shape wanted; its leaves are not looked at.

    Raises:
        CheckpointError: names that are missing, or that `like` has not.

    >>> import vescale_fn as vfn
    >>> vfn.checkpoint.from_state_dict({"blocks.0.w": 1.0, "blocks.1.w": 2.0}, {"blocks": [{"w": 0}, {"w": 0}]})
    {'blocks': [{'w': 1.0}, {'w': 2.0}]}
    """
    wanted, treedef = named(like, "from_state_dict", "like")
    names = {leaf.name for leaf in wanted}
    extra = [name for name in leaves if name not in names]
    failures = [
        f"{leaf.path} is missing: there is no {leaf.name!r}{meant(leaf.name, extra)}"
        for leaf in wanted
        if leaf.name not in leaves
    ]
    failures += [f"{name!r} is not in like" for name in extra]
    if failures:
        raise CheckpointError(report("from_state_dict", "the names are not those of like", failures))
    return rebuilt(treedef, [leaves[leaf.name] for leaf in wanted])
