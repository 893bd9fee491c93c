"""Several batches for one step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._core.arrays.placement import spec_of, with_sharding
from .._core.base import dtypes, tree
from .._core.sharding.spec import P
from .optimizer import Optimizer, check_parts, check_state, check_steps, is_readable, is_trained, zero_count
from .per_leaf import by_leaf, choose, mapped, zeros_like


class AccumulateState(NamedTuple):
    """Gradients added up since the last step, their sum, and the state of the optimiser that makes the steps."""

    count: Any
    total: Any
    inner: Any


def accumulate(opt: Optimizer, steps: int) -> Optimizer:
    """Make a step of `opt` with the mean of every `steps` gradients; the updates in between are zero.

    With equal parts of a batch, and a loss that is a mean, that is a step with the whole batch. Gradients of less than
    32 bits are added up in float32. Gradients that are partial sums over an axis (of a parameter whose spec calls that axis
    ``reduced``) stay so until the step: they are reduced once.

    Run eagerly, `opt` is asked only for its step. In a plan, which cannot look at a number, it is asked each time, and its
    result chosen or not: what it computes is computed, and what it communicates, for the sum of the gradients or a norm, is
    communicated `steps` times. Where all batches are there at once, `microbatches` takes them in one step, and in a plan too
    reduces and updates once.

    Args:
        opt: an optimiser, or a chain that ends in one.
        steps: how many gradients make a step.

    Source: `optax.MultiSteps`.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.optim.accumulate(vfn.optim.sgd(1.0), 2), torch.zeros(2)
    >>> first, state = opt.update(torch.tensor([1.0, 2.0]), opt.init(w), w)
    >>> second, state = opt.update(torch.tensor([3.0, 4.0]), state, w)
    >>> first, second
    (tensor([0., 0.]), tensor([-2., -3.]))
    """
    check_steps("accumulate", steps=steps)
    check_parts("accumulate", {"opt": opt}, "accumulate(vfn.optim.adamw(1e-3), 4)")

    def init(params: Any) -> AccumulateState:
        total = mapped(
            lambda leaf: torch.zeros_like(leaf, dtype=dtypes.wide(leaf.dtype)) if is_trained(leaf) else leaf, params
        )
        return AccumulateState(zero_count(), total, opt.init(params))

    def update(grads: Any, state: AccumulateState, params: Any) -> tuple[Any, AccumulateState]:
        check_state("accumulate", state, AccumulateState)
        add = lambda grad, _, total: (grad, total + grad)
        _, total = by_leaf("accumulate", add, grads, params, state.total)
        count = torch.as_tensor(state.count) + 1
        last = count == steps
        read = is_readable(last)
        if read and not last:
            return zeros_like(grads), AccumulateState(count, total, state.inner)
        mean = lambda grad, _, total: (total / steps, total)
        means, _ = by_leaf("accumulate", mean, grads, params, total)
        updates, inner = opt.update(reduced(means), state.inner, params)
        if read:
            return updates, AccumulateState(torch.zeros_like(count), zeros_like(total), inner)
        return choose(last, updates, zeros_like(updates)), AccumulateState(
            torch.where(last, 0, count), choose(last, zeros_like(total), total), choose(last, inner, state.inner)
        )

    return Optimizer(init, update)


def reduced(grads: Any) -> Any:
    """Gradients whose parts are on several ranks, added up: all leaves together."""
    leaves, structure = tree.flatten(grads)
    partial = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and spec_of(x).unreduced]
    if not partial:
        return grads
    moved = with_sharding([leaves[i] for i in partial], [P(*(spec := spec_of(leaves[i])), at=spec.at) for i in partial])
    for i, x in zip(partial, moved):
        leaves[i] = x
    return tree.unflatten(structure, leaves)
