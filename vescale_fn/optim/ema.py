"""A running mean of the parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._core.base.earlier_names import earlier_name
from .optimizer import Optimizer, Rate, check_numbers, check_state, is_trained, rate_at, zero_count
from .per_leaf import by_leaf, mapped
from .tensor_list import over


class EmaState(NamedTuple):
    """Steps done, and the running mean of the parameters."""

    count: Any
    average: Any


def params_ema(decay: Rate, dtype: torch.dtype | None = None) -> Optimizer:
    """Keep a running mean of the parameters, as they are after each step: the last part of a `chain`.

    The updates pass through as they are. The mean is in the state, ``state[-1].average`` of a chain's; it begins with the
    parameters that `init` is given.

    Args:
        decay: how much of the mean is kept each step, or a schedule.
        dtype: of the mean; by default the parameters'.

    Source: Polyak and Juditsky 1992; `torch.optim.swa_utils.get_ema_avg_fn`.

    >>> import torch, vescale_fn as vfn
    >>> opt, w = vfn.optim.chain(vfn.optim.sgd(1.0), vfn.optim.params_ema(0.5)), torch.tensor([4.0])
    >>> updates, state = opt.update(torch.tensor([2.0]), opt.init(w), w)
    >>> updates, state[-1].average
    (tensor([-2.]), tensor([3.]))
    """
    check_numbers("params_ema", decay=decay)

    def init(params: Any) -> EmaState:
        copied = lambda leaf: leaf.to(dtype or leaf.dtype, copy=True) if is_trained(leaf) else leaf
        return EmaState(zero_count(), mapped(copied, params))

    def update(grads: Any, state: EmaState, params: Any) -> tuple[Any, EmaState]:
        check_state("params_ema", state, EmaState)
        part = 1 - rate_at(decay, state.count)

        def rule(update: Any, param: Any, average: Any) -> tuple[Any, ...]:
            after = param + update
            after = after.to(dtype) if dtype is not None else after
            moved = over(torch.mul, over(torch.sub, after, average), part)
            return update, over(torch.add, moved, average)

        _, average = by_leaf("params_ema", rule, grads, params, state.average)
        return grads, EmaState(state.count + 1, average)

    return Optimizer(init, update)


ema = earlier_name("ema", params_ema)
