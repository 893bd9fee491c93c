"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .masks import flags
from .optimizer import Optimizer, Rate, check_numbers, check_state, rate_at, zero_count
from .per_leaf import by_leaf, zeros_like
from .tensor_list import over, plus


class LionState(NamedTuple):
    """Steps done, and the running mean of the gradients."""

    count: Any
    mean: Any


def lion(lr: Rate, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0, mask: Any = True) -> Optimizer:
    """The sign of an interpolated momentum, with decoupled weight decay.

    Args:
        lr: the learning rate, or a schedule; about a tenth of what Adam takes.
        b1: how much of the running mean the step looks at, the rest being the gradient of now.
        b2: how much of the running mean is kept each step.
        weight_decay: times the learning rate, the part of a parameter that is taken away each step.
        mask: which parameters decay, as in `adamw`.

    Source: Chen et al., arXiv 2302.06675; `optax.lion`.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.optim.lion(0.1), torch.tensor([1.0, 2.0])
    >>> opt.update(torch.tensor([3.0, -4.0]), opt.init(w), w)[0]
    tensor([-0.1000,  0.1000])
    """
    check_numbers("lion", lr=lr, b1=b1, b2=b2, weight_decay=weight_decay)

    def init(params: Any) -> LionState:
        return LionState(zero_count(), zeros_like(params))

    def update(grads: Any, state: LionState, params: Any) -> tuple[Any, LionState]:
        check_state("lion", state, LionState)
        scale = -rate_at(lr, state.count)

        def rule(grad: Any, param: Any, decays: Any, mean: Any) -> tuple[Any, ...]:
            step = over(torch.sign, torch.lerp(mean, grad, 1 - b1))
            if decays and weight_decay:
                step = plus(step, param, weight_decay)
            return over(torch.mul, step, scale), decays, torch.lerp(mean, grad, 1 - b2)

        updates, _, mean = by_leaf("lion", rule, grads, params, flags("lion", mask, params), state.mean)
        return updates, LionState(state.count + 1, mean)

    return Optimizer(init, update)
