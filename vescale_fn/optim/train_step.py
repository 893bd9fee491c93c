"""A loss and an optimiser as the step of a training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._core.base.user_calls import checked_function
from .._core.transforms.grad import value_and_grad
from .optimizer import Optimizer
from .updates import apply_updates


def train_step(loss: Callable[..., Any], opt: Optimizer) -> Callable[..., Any]:
    """The step of a training loop: ``params, state, value = step(params, state, *batch)``, pure as what it is made of.

    It runs eagerly, under `jit` (``donate_argnums=(0, 1)``: the new parameters may take the place of the old ones), and `auto`
    chooses its layout.

    Args:
        loss: a function of the parameters and of a batch, which gives a number.
        opt: an optimiser; ``state = opt.init(params)`` before the first step.

    Returns:
        A function of the parameters, the optimiser's state and a batch, which gives the new ones and the loss before the step.

    >>> import torch, vescale_fn as vfn
    >>> opt = vfn.optim.sgd(0.25)
    >>> step = vfn.optim.train_step(lambda w, x: (w * x).square().sum(), opt)
    >>> w = torch.tensor(1.0)
    >>> w, state, loss = step(w, opt.init(w), torch.tensor([1.0, 0.0]))
    >>> w, loss
    (tensor(0.5000), tensor(1.))
    """
    checked_function(loss, "train_step")

    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, Any]:
        value, grads = value_and_grad(loss)(params, *batch)
        updates, state = opt.update(grads, state, params)
        return apply_updates(params, updates), state, value

    return step
