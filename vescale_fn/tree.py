"""Trees (dictionaries, lists, tuples, named tuples, registered dataclasses; None is a node without leaves), as in `jax.tree`.

They are optree's, and what is registered there globally is a node here: keys, the states of optimisers, classes under
`register_dataclass`. An array and a `P` are leaves.

>>> import vescale_fn as vfn
>>> vfn.tree.map(lambda x, y: x + y, {"a": 1, "b": [2, None]}, {"a": 10, "b": [20, None]})
{'a': 11, 'b': [22, None]}
>>> leaves, treedef = vfn.tree.flatten({"b": 2, "a": 1})
>>> leaves, vfn.tree.unflatten(treedef, leaves)
([1, 2], {'b': 2, 'a': 1})
>>> vfn.tree.leaves_with_path({"layers": [{"w": 1}]})
[(('layers', 0, 'w'), 1)]
"""

from collections.abc import Callable
from typing import Any

from optree import tree_all as all
from optree import tree_flatten as flatten
from optree import tree_leaves as leaves
from optree import tree_map as map
from optree import tree_reduce as reduce
from optree import tree_structure as structure
from optree import tree_unflatten as unflatten

from ._core.base import front_door
from ._core.base.tree import keyed_leaves

__all__ = [
    "all",
    "flatten",
    "leaves",
    "leaves_with_path",
    "map",
    "map_with_path",
    "reduce",
    "structure",
    "unflatten",
]

__dir__ = front_door.listing(__name__)
__getattr__ = front_door.hints(__name__)


def leaves_with_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[tuple[str | int, ...], Any]]:
    """Pairs of a path, the keys that lead to a leaf as a tuple, and the leaf; with dots between it is what rules match."""
    return keyed_leaves(tree, is_leaf)


def map_with_path(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """``f(path, leaf, ...)`` for each leaf, with the path of `leaves_with_path`, in the structure of the first tree.

    >>> import vescale_fn as vfn
    >>> vfn.tree.map_with_path(lambda path, x: f"{path[-1]} is {x}", {"a": 1, "b": [2]})
    {'a': 'a is 1', 'b': ['0 is 2']}
    """
    outer = structure(tree, is_leaf)
    return unflatten(
        outer,
        [
            f(path, leaf, *others)
            for (path, leaf), *others in zip(keyed_leaves(tree, is_leaf), *(outer.flatten_up_to(r) for r in rest))
        ],
    )
