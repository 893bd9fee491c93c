"""What rounding does to a program: runs of it in which each number that is added to others is off by its rounding.

Sums in another order differ by so much, and a program may enlarge that: a difference of large numbers, many layers.
How much it does is seen by trying, as in Monte Carlo arithmetic (Parker 1997).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..._core import torch_internals
from ..._core.base import tree

_SUMS = frozenset(
    "sum mean var std var_mean std_mean norm vector_norm linalg_norm linalg_vector_norm logsumexp cumsum softmax "
    "log_softmax cross_entropy nll_loss mse_loss layer_norm rms_norm batch_norm group_norm instance_norm normalize trace "
    "matmul __matmul__ __rmatmul__ mm bmm mv dot inner outer vdot addmm baddbmm addmv linear bilinear einsum tensordot "
    "conv1d conv2d conv3d scaled_dot_product_attention".split()
)


class Rounded(TorchFunctionMode):
    """While it is active, what functions that add up are given, and what they give, is off by its rounding."""

    def __init__(self, seed: int) -> None:
        self._seed = 1000 * seed

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _SUMS:
            return func(*args, **kwargs)
        given = [x for x in tree.leaves((args, kwargs)) if _is_float(x)]
        exact: Any = True
        for x in given:
            exact = exact & (x == x.round()).all()
        args, kwargs = tree.map_(self.of, args), tree.map_(self.of, kwargs)
        return tree.map_(functools.partial(self.of, exact=exact), func(*args, **kwargs))

    def of(self, x: Any, exact: bool | torch.Tensor = True) -> Any:
        """A leaf, off by its rounding. Whole numbers stay if `exact`: they are often codes, masks, or counts."""
        if not _is_float(x):
            return x
        self._seed += 1
        with torch.no_grad():
            eps = torch.finfo(x.dtype).eps
            off = torch.where(_signs(x.shape, self._seed).to(x.device), 1 + eps, 1 - eps).to(x.dtype)
            factor = torch.where((x == x.round()) & exact, torch.ones_like(off), off)
        return x * factor


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _signs(shape: torch.Size, seed: int) -> torch.Tensor:
    """As good as random bits: draws of torch are refused under its vmap."""
    with torch_internals.no_torch_function():
        bits = (torch.arange(math.prod(shape), device="cpu") + 1000003 * seed) * 2654435761 % 2**32
        bits = (bits ^ (bits >> 15)) * 2246822519 % 2**32
        return ((bits >> 17) & 1).bool().reshape(shape)
