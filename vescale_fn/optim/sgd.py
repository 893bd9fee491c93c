"""Stochastic gradient descent, with momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._core.base.errors import VfnError
from .._core.base.front_door import public
from .._core.base.messages import report
from .optimizer import Optimizer, Rate, check_numbers, check_state, rate_at, zero_count
from .per_leaf import by_leaf, zeros_like
from .tensor_list import over, plus


class SgdState(NamedTuple):
    """Steps done, and the running sums of gradients (None without momentum)."""

    count: Any
    momentum: Any


@public("optim.sgd")
def sgd(lr: Rate, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """Stochastic gradient descent, with momentum as torch has it.

    Args:
        lr: the learning rate, or a schedule: a function of the number of steps done.
        momentum: how much of the running sum of gradients is kept each step.
        nesterov: look ahead along the momentum.
        weight_decay: added to the gradient, times the parameter (not decoupled).

    Source: `torch.optim.SGD`.

    >>> import torch, vescale_fn as vfn
    >>> opt, params = vfn.optim.sgd(0.5), {"w": torch.tensor([1.0, 2.0])}
    >>> updates, state = opt.update({"w": torch.tensor([1.0, -1.0])}, opt.init(params), params)
    >>> vfn.optim.apply_updates(params, updates)
    {'w': tensor([0.5000, 2.5000])}
    """
    check_numbers("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise VfnError(report("sgd", "nesterov=True needs a momentum, but momentum is 0", fix="momentum=0.9, say"))

    def init(params: Any) -> SgdState:
        return SgdState(zero_count(), zeros_like(params) if momentum else None)

    def update(grads: Any, state: SgdState, params: Any) -> tuple[Any, SgdState]:
        check_state("sgd", state, SgdState)
        scale = -rate_at(lr, state.count)

        def rule(grad: Any, param: Any, *kept: Any) -> tuple[Any, ...]:
            if weight_decay:
                grad = plus(grad, param, weight_decay)
            if not momentum:
                return (grad * scale,)
            total = plus(grad, kept[0], momentum)
            return over(torch.mul, plus(grad, total, momentum), scale) if nesterov else total * scale, total

        updates, *sums = by_leaf("sgd", rule, grads, params, *([state.momentum] if momentum else []))
        return updates, SgdState(state.count + 1, sums[0] if momentum else None)

    return Optimizer(init, update)
