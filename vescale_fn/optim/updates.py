"""Updates, added to the parameters."""

from __future__ import annotations

from typing import Any

from .._core.base import tree
from .._core.base.errors import VfnError
from .._core.base.messages import described, report
from .optimizer import is_trained
from .per_leaf import beside, each, in_dtype_of


def apply_updates(params: Any, updates: Any) -> Any:
    """The parameters with the updates added; leaves that are not floating point stay as they are.

    Source: `optax.apply_updates`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.optim.apply_updates({"w": torch.ones(2), "depth": 3}, {"w": torch.ones(2), "depth": 3})
    {'w': tensor([2., 2.]), 'depth': 3}
    """
    leaves, structure, (updates,) = beside("apply_updates", params, updates, name="updates")
    moved = [i for i, (leaf, update) in enumerate(zip(leaves, updates)) if is_trained(leaf) and update is not None]
    wrong = [i for i in moved if getattr(updates[i], "shape", None) != leaves[i].shape]
    if wrong:
        paths = tree.paths(params, "params")
        raise VfnError(
            report(
                "apply_updates",
                "the updates do not fit the parameters",
                [f"{paths[i]} is {described(leaves[i])}, its update {described(updates[i])}" for i in wrong],
                "the updates that opt.update(grads, state, params) returns for these params",
            )
        )
    if moved:
        params, updates = ([x[i] for i in moved] for x in (leaves, updates))
        (sums,) = each(lambda param, update: (in_dtype_of(param, param + update),), params, updates)
        for i, param in zip(moved, sums):
            leaves[i] = param
    return tree.unflatten(structure, leaves)
