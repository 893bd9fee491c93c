"""What models of other libraries return, as nodes of trees: what is a node for torch's own pytrees becomes one for ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import optree.registry
import torch

from .. import _torch

_adopted: set[type] = set()


def adopt(value: Any) -> None:
    """See to it that the class of a result, a model's output with named fields say, is a node and no leaf."""
    cls = type(value)
    if cls in _adopted or isinstance(value, torch.Tensor) or not optree.tree_is_leaf(value, none_is_leaf=True):
        return
    known = _torch.tree_node(cls)
    if known is None:
        return
    _adopted.add(cls)
    take_apart, put_together = known

    def flatten(node: Any) -> tuple[Any, Any, Any]:
        children, kept = take_apart(node)
        keys = tuple(node.keys()) if isinstance(node, Mapping) else tuple(range(len(children)))
        return tuple(children), _Kept(kept), keys

    def together(kept: Any, children: Any) -> Any:
        return put_together(list(children), kept.value)

    optree.register_pytree_node(cls, flatten, together,
                                namespace=optree.registry.__GLOBAL_NAMESPACE)  # fmt: skip


class _Kept:
    """What torch's pytrees keep of a node besides its children, which may be a list: with a hash."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and self.value == other.value

    def __hash__(self) -> int:
        return hash(repr(self.value))
