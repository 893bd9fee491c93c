"""Gradients kept small: all of them by one factor, or each number by itself; and their norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._core import torch_internals
from .._core.base.containers import opened
from . import exact_sums
from .global_sums import added_up, parts_of_numbers
from .optimizer import Optimizer, check_numbers, is_trained
from .per_leaf import by_leaf


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Scale all gradients by one factor, so that their norm as one long vector is at most `max_norm`.

    On a mesh that takes one collective, however the leaves lie: see `global_norm`.

    Source: `torch.nn.utils.clip_grad_norm_` (with its 1e-6 in the divisor), `optax.clip_by_global_norm`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.optim.clip_by_global_norm(5.0).update({"a": torch.tensor([6.0]), "b": torch.tensor(8.0)}, None, None)[0]
    {'a': tensor([3.0000]), 'b': tensor(4.0000)}
    """
    check_numbers("clip_by_global_norm", max_norm=max_norm)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        factor = torch.clamp(max_norm / (global_norm(grads) + 1e-6), max=1.0)
        return by_leaf("clip_by_global_norm", lambda grad, _: (grad * factor,), grads, grads)[0], state

    return Optimizer(lambda params: None, update)


def clip_by_value(limit: float) -> Optimizer:
    """Bring each number of the gradients into the interval from ``-limit`` to `limit`.

    Source: `torch.nn.utils.clip_grad_value_`, `optax.clip`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.optim.clip_by_value(2.0).update(torch.tensor([-3.0, 1.0, 5.0]), None, None)[0]
    tensor([-2.,  1.,  2.])
    """
    check_numbers("clip_by_value", limit=limit)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return by_leaf("clip_by_value", lambda grad, _: (torch.clamp(grad, -limit, limit),), grads, grads)[0], state

    return Optimizer(lambda params: None, update)


def global_norm(grads: Any) -> Any:
    """The norm of all floating-point leaves as one long vector: a 0-d tensor, of float32 at least.

    On a mesh each rank adds up the squares of its own blocks, the first of those ranks that hold the same block alone: the
    sum of the ranks' numbers is one all-reduce over all axes that split any leaf. Under `deterministic` its bits do not
    depend on how the leaves lie, for which the ranks also compare their largest numbers.

    >>> import torch, vescale_fn as vfn
    >>> vfn.optim.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(4.0)})
    tensor(5.)
    """
    leaves = list(filter(is_trained, opened(grads, "global_norm", "grads")[0]))
    if not leaves:
        return torch.zeros(())
    dtype = torch.float32
    for leaf in leaves:
        dtype = torch.promote_types(dtype, leaf.dtype)
    if exact_sums.wanted(leaves):
        return exact_sums.norm(leaves, dtype)
    square = lambda x: torch.sum(x * x)
    one = lambda x: square(x if x.dtype == dtype else x.to(dtype))
    many = lambda *xs: torch.stack(list(torch_internals.norms(xs, dtype))).square()
    sums = [
        added_up([vector.sum() for _, vector in parts], mesh, _sum)
        for mesh, parts in parts_of_numbers(leaves, one, many).items()
    ]
    return torch.sqrt(_sum(sums))


def _sum(xs: Sequence[Any]) -> Any:
    return sum(xs[1:], xs[0])
