"""Adam, and AdamW."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._core.base.front_door import public
from .masks import flags
from .optimizer import Optimizer, Rate, check_numbers, check_state, rate_at, steps_done, zero_count
from .per_leaf import by_leaf, zeros_like
from .tensor_list import over, plus


class AdamState(NamedTuple):
    """Steps done, and the running means of the gradients and of their squares."""

    count: Any
    mean: Any
    square: Any


@public("optim.adam")
def adam(
    lr: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, mask: Any = True
) -> Optimizer:
    """Adam, with weight decay added to the gradient (not decoupled).

    Args:
        lr: the learning rate, or a schedule: a function of the number of steps done.
        b1, b2: how much of the running means of the gradients and of their squares is kept each step.
        eps: added to the root of the mean square.
        weight_decay: added to the gradient, times the parameter.
        mask: which parameters decay, as in `adamw`.

    Source: Kingma and Ba, arXiv 1412.6980; `torch.optim.Adam`.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.optim.adam(0.1), torch.tensor([1.0, 2.0])
    >>> opt.update(torch.tensor([3.0, -4.0]), opt.init(w), w)[0]
    tensor([-0.1000,  0.1000])
    """
    return _adam("adam", lr, b1, b2, eps, weight_decay, mask, decoupled=False)


@public("optim.adamw")
def adamw(
    lr: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 1e-2, mask: Any = True
) -> Optimizer:
    """Adam with decoupled weight decay.

    Args:
        lr: the learning rate, or a schedule: a function of the number of steps done.
        b1, b2: how much of the running means of the gradients and of their squares is kept each step.
        eps: added to the root of the mean square.
        weight_decay: times the learning rate, the part of a parameter that is taken away each step.
        mask: which parameters decay: a tree prefix of bools, or a function of the parameters that gives one.

    Source: Loshchilov and Hutter, arXiv 1711.05101; `torch.optim.AdamW`.

    >>> import torch, vescale_fn as vfn
    >>> opt = vfn.optim.adamw(vfn.optim.warmup_cosine(1e-3, 10, 100), mask={"w": True, "b": False})
    >>> params = {"w": torch.ones(2, 3), "b": torch.ones(3)}
    >>> updates, state = opt.update({"w": torch.ones(2, 3), "b": torch.zeros(3)}, opt.init(params), params)
    >>> updates["w"][0], updates["b"]
    (tensor([-0.0001, -0.0001, -0.0001]), tensor([-0., -0., -0.]))
    """
    return _adam("adamw", lr, b1, b2, eps, weight_decay, mask, decoupled=True)


def _adam(
    where: str, lr: Rate, b1: float, b2: float, eps: float, weight_decay: float, mask: Any, decoupled: bool
) -> Optimizer:
    check_numbers(where, lr=lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)

    def init(params: Any) -> AdamState:
        return AdamState(zero_count(), zeros_like(params), zeros_like(params))

    def update(grads: Any, state: AdamState, params: Any) -> tuple[Any, AdamState]:
        check_state(where, state, AdamState)
        count = state.count + 1
        done = steps_done(count)
        # u = -lr * (m / c1) / (sqrt(v / c2) + eps), with the corrections c1 and c2 moved out of the leaves.
        root = torch.sqrt(1 - b2**done)
        scale = -rate_at(lr, state.count) * root / (1 - b1**done)
        least, decay = eps * root, weight_decay * (1 - b1**done) / root

        def rule(grad: Any, param: Any, decays: Any, mean: Any, square: Any) -> tuple[Any, ...]:
            decays_here = decays and weight_decay
            if decays_here and not decoupled:
                grad = plus(grad, param, weight_decay)
            mean = torch.lerp(mean, grad, 1 - b1)
            square = over(torch.addcmul, square * b2, grad, grad, value=1 - b2)
            size = over(torch.add, torch.sqrt(square), least)
            step = over(torch.addcdiv, param * decay, mean, size) if decays_here and decoupled else mean / size
            return over(torch.mul, step, scale), decays, mean, square

        decaying = flags(where, mask, params)
        updates, _, mean, square = by_leaf(where, rule, grads, params, decaying, state.mean, state.square)
        return updates, AdamState(count, mean, square)

    return Optimizer(init, update)
