"""Gradients of a scaled loss: float16 has no numbers below 6e-8, which gradients are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._core.base import tree
from .._core.base.earlier_names import earlier_name
from .._core.base.errors import VfnError
from .._core.base.messages import report
from ..optim.optimizer import Optimizer, check_numbers, check_parts, check_state, check_steps, is_trained
from ..optim.per_leaf import by_leaf, choose, zeros_like
from .finite import all_finite


class ScaledState(NamedTuple):
    """What the loss is multiplied by, how many steps in a row had finite gradients, and the state of the optimiser."""

    scale: Any
    good: Any
    inner: Any


def loss_scaled(
    opt: Optimizer, initial: float = 2.0**15, period: int = 2000, factor: float = 2.0, least: float = 1.0
) -> Optimizer:
    """An optimiser of the gradients of ``loss * state.scale``, which finds the scale as it goes.

    Gradients are divided by the scale. Where a number of them is not finite nothing changes but the scale, which goes down;
    after so many good steps it goes up. Nothing is read in Python, so that `jit` records it.

    Args:
        opt: the optimiser, which gets the gradients of the loss itself; all of a chain, norms and all.
        initial: the first scale.
        period: after so many steps in a row with finite gradients the scale is multiplied by `factor`.
        factor: also what the scale is divided by where a gradient is not finite.
        least: the least scale.

    Source: Micikevicius et al., arXiv 1710.03740; `torch.amp.GradScaler`, `jmp.DynamicLossScale`.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.precision.loss_scaled(vfn.optim.sgd(1.0), initial=8.0), torch.tensor([2.0])
    >>> state = opt.init(w)
    >>> grad = vfn.grad(lambda w: (w * w).sum() * state.scale)(w)
    >>> grad, opt.update(grad, state, w)[0]
    (tensor([32.]), tensor([-4.]))
    """
    check_numbers("loss_scaled", initial=initial, factor=factor, least=least)
    check_steps("loss_scaled", period=period)
    check_parts("loss_scaled", {"opt": opt}, "loss_scaled(vfn.optim.adamw(1e-3))")
    if not (initial >= least > 0 and factor > 1):
        found = (
            f"needed is initial >= least > 0 and factor > 1, but initial={initial}, least={least} and factor={factor}"
        )
        raise VfnError(report("loss_scaled", found))

    def init(params: Any) -> ScaledState:
        return ScaledState(torch.tensor(float(initial)), torch.zeros((), dtype=torch.int64), opt.init(params))

    def update(grads: Any, state: ScaledState, params: Any) -> tuple[Any, ScaledState]:
        check_state("loss_scaled", state, ScaledState)
        scale = torch.as_tensor(state.scale)
        finite = all_finite(grads)
        # In float32: what is too small for float16 must not be lost before `master_weights` adds it up.
        wide = tree.map_(lambda x: x.to(torch.promote_types(x.dtype, torch.float32)) if is_trained(x) else x, grads)
        (own,) = by_leaf("loss_scaled", lambda grad, _: (grad / scale,), wide, wide)
        updates, inner = opt.update(own, state.inner, params)
        good = torch.where(finite, torch.as_tensor(state.good) + 1, 0)
        grown = torch.where(good == period, scale * factor, scale)
        after = torch.where(finite, grown, torch.clamp(scale / factor, min=least))
        updates = choose(finite, updates, zeros_like(updates))
        return updates, ScaledState(after, torch.where(good == period, 0, good), choose(finite, inner, state.inner))

    return Optimizer(init, update)


scaled = earlier_name("scaled", loss_scaled)
