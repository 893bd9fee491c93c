"""Transformations one after the other; the simplest of them: scaling, and weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core.base.errors import VfnError
from .._core.base.messages import report
from .masks import flags
from .optimizer import Optimizer, Rate, check_numbers, not_a_state, rate_at, zero_count
from .per_leaf import by_leaf
from .tensor_list import plus


def chain(*transformations: Optimizer) -> Optimizer:
    """One after the other: each is given the updates of the one before it.

    Args:
        transformations: optimisers or transformations of gradients; the state is the tuple of their states.

    Source: `optax.chain`.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.optim.chain(vfn.optim.clip_by_global_norm(1.0), vfn.optim.sgd(1.0)), torch.zeros(2)
    >>> opt.update(torch.tensor([3.0, 4.0]), opt.init(w), w)[0]
    tensor([-0.6000, -0.8000])
    """
    wrong = [
        f"part {i} is a {type(one).__name__}"
        for i, one in enumerate(transformations)
        if not (hasattr(one, "init") and hasattr(one, "update"))
    ]
    if wrong:
        fix = "chain(clip_by_global_norm(1.0), sgd(0.1)); chain(*parts) of a list"
        raise VfnError(report("chain", "each part must be an Optimizer", wrong, fix))

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(one.init(params) for one in transformations)

    def update(grads: Any, state: Sequence[Any], params: Any) -> tuple[Any, tuple[Any, ...]]:
        if not isinstance(state, (tuple, list)) or len(state) != len(transformations):
            raise not_a_state("chain", state, f"the tuple of the states of its {len(transformations)} parts")
        after = []
        for one, its in zip(transformations, state, strict=True):
            grads, its = one.update(grads, its, params)
            after.append(its)
        return grads, tuple(after)

    return Optimizer(init, update)


def scale(factor: Rate) -> Optimizer:
    """Multiply all updates by a number, or by what a schedule gives.

    Args:
        factor: a number, or a function of the number of steps done. The sign is yours: ``scale(-0.1)`` descends.

    Source: `optax.scale`, `optax.scale_by_schedule`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.optim.scale(-0.5).update(torch.tensor([2.0, 4.0]), None, None)[0]
    tensor([-1., -2.])
    """
    check_numbers("scale", factor=factor)

    def init(params: Any) -> Any:
        return zero_count() if callable(factor) else None

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if callable(factor) and state is None:
            raise not_a_state("scale", state, "the number of steps done")
        number = rate_at(factor, state)
        (updates,) = by_leaf("scale", lambda grad, _: (grad * number,), grads, grads)
        return updates, state + 1 if callable(factor) else state

    return Optimizer(init, update)


def add_decayed_weights(weight_decay: float, mask: Any = True) -> Optimizer:
    """Add a part of each parameter to its gradient, or to its update.

    Before an optimiser this is weight decay as SGD and Adam know it; between a rescaled gradient and ``scale(-lr)`` it is
    decoupled, as in AdamW.

    Args:
        weight_decay: the part of a parameter that is added.
        mask: which parameters decay: a tree prefix of bools, or a function of the parameters that gives one.

    Source: `optax.add_decayed_weights`.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.optim.add_decayed_weights(0.1), torch.tensor([10.0, 20.0])
    >>> opt.update(torch.tensor([1.0, 1.0]), opt.init(w), w)[0]
    tensor([2., 3.])
    """
    check_numbers("add_decayed_weights", weight_decay=weight_decay)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        def rule(grad: Any, param: Any, decays: Any) -> tuple[Any, ...]:
            return (plus(grad, param, weight_decay) if decays else grad, decays)

        decaying = flags("add_decayed_weights", mask, params)
        return by_leaf("add_decayed_weights", rule, grads, params, decaying)[0], state

    return Optimizer(lambda params: None, update)
