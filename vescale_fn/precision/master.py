"""Wide copies of narrow parameters, kept in the state of an optimiser."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._core.base import tree
from .._core.base.containers import opened
from .._core.base.earlier_names import earlier_name
from ..optim.optimizer import Optimizer, check_parts, check_state, is_trained
from ..optim.per_leaf import beside, by_leaf, each
from ..optim.updates import apply_updates


class MasterState(NamedTuple):
    """The wide copies (None for leaves that are wide themselves), and the state of the optimiser of these."""

    params: Any
    inner: Any


def master_weights(opt: Optimizer) -> Optimizer:
    """An optimiser of parameters in bfloat16 or float16, which takes its steps on copies of them in float32.

    A step that is too small for a narrow number is lost there, and not in the copies. After `apply_updates` a parameter is
    its copy, rounded. Gradients are widened first: also a norm, or a running mean, is of float32. Beside `policy`, whose
    parameters are wide and are narrowed where they are used, what is gathered and kept for a model is half as large, and
    what a step returns can be used as it is; gradients, and sums of them over ranks, are narrow.

    Args:
        opt: the optimiser, which gets the copies and wide gradients; all of a chain, and what `loss_scaled` gives.

    Returns:
        The optimiser. Its updates are in float32: adding them gives the rounded copies exactly, but for a number that
        becomes thousands of times smaller in one step, which is off by less than 1e-7 of what it was until the next.

    Source: Micikevicius et al., arXiv 1710.03740.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.precision.master_weights(vfn.optim.sgd(1.0)), torch.tensor([1.0], dtype=torch.bfloat16)
    >>> state = opt.init(w)
    >>> for _ in range(3):  # steps of 0.001, where numbers of bfloat16 are 0.0078 apart
    ...     updates, state = opt.update(torch.full_like(w, -0.001), state, w)
    ...     w = vfn.optim.apply_updates(w, updates)
    >>> w, state.params
    (tensor([1.], dtype=torch.bfloat16), tensor([1.0030]))
    """
    check_parts("master_weights", {"opt": opt}, "master_weights(vfn.optim.adamw(1e-3))")

    def init(params: Any) -> MasterState:
        leaves, structure = opened(params, "opt.init", "params")
        copies = [leaf.to(torch.float32) if _is_narrow(leaf) else None for leaf in leaves]
        return MasterState(tree.unflatten(structure, copies), opt.init(_wide(leaves, structure, copies)))

    def update(grads: Any, state: MasterState, params: Any) -> tuple[Any, MasterState]:
        check_state("master_weights", state, MasterState)
        leaves, structure, (_, copies) = beside("master_weights", params, grads, state.params)
        wide = _wide(leaves, structure, copies)
        (own,) = by_leaf("master_weights", lambda grad, _: (grad,), grads, wide)
        updates, inner = opt.update(own, state.inner, wide)
        after, found = (structure.flatten_up_to(x) for x in (apply_updates(wide, updates), updates))
        moved = [i for i, copy in enumerate(copies) if copy is not None and found[i] is not None]
        if moved:
            # The difference of two narrow numbers of which none is 2**13 times the other is exact in float32.
            rule = lambda copy, leaf: (copy.to(leaf.dtype).to(torch.float32) - leaf.to(torch.float32),)
            (steps,) = each(rule, [after[i] for i in moved], [leaves[i] for i in moved])
            for i, step in zip(moved, steps):
                found[i] = step
        kept = [None if copy is None else after[i] for i, copy in enumerate(copies)]
        return tree.unflatten(structure, found), MasterState(tree.unflatten(structure, kept), inner)

    return Optimizer(init, update)


def _is_narrow(leaf: Any) -> bool:
    return is_trained(leaf) and leaf.dtype.itemsize < 4


def _wide(leaves: Any, structure: Any, copies: Any) -> Any:
    """The parameters that the optimiser sees."""
    return tree.unflatten(structure, [leaf if copy is None else copy for leaf, copy in zip(leaves, copies)])


master = earlier_name("master", master_weights)
