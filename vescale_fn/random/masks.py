"""Dropout: a mask from a key, lying as its value does."""

from __future__ import annotations

import torch

from .. import array, context
from ..errors import RandomError, report
from ..spec import P
from .draws import probability
from .keys import Key, checked, described
from .placed import Draw, drawn


def dropout(key: Key, x: torch.Tensor, rate: float) -> torch.Tensor:
    """Set each element of x to zero with probability `rate`, and divide the others by ``1 - rate``.

    The mask is ``bernoulli(key, 1 - rate, x.shape)``, drawn in float32 whatever x is: element i of it depends on the
    key and on i alone. On an array each rank draws its own block of the mask, so the result is the same on every mesh.
    Inside a `shard_map` body, x is one rank's block: with the same key on all ranks, all their blocks have the same
    mask; ``fold_in(key, axis_index(axis))`` makes them different.

    Args:
        key: one key.
        x: a float tensor or array.
        rate: a number in [0, 1]; 0 gives x back, 1 gives zeros.

    Returns:
        As x: shape, dtype, placement. Differentiable in x.

    Raises:
        RandomError: not one key, x not floating point, rate outside [0, 1].

    Source: Srivastava et al., "Dropout" (JMLR 2014), scaled as is usual since.

    >>> import torch, vescale_fn as vfn
    >>> vfn.random.dropout(vfn.random.key(42), torch.ones(4), 0.5)
    tensor([2., 0., 0., 0.])
    """
    key = checked(key, "random.dropout")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise RandomError(report("random.dropout", f"rate must be a number, but it is {described(rate)}"))
    keep = 1 - probability(rate, "random.dropout", "rate")
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        raise RandomError(report("random.dropout", f"x must be a float tensor, but it is {described(x)}"))
    if keep == 1:
        return x
    draw = Draw("bernoulli", tuple(x.shape), torch.float32, (keep,))
    if not torch.compiler.is_compiling() and context.body() is None and array.is_array(x):
        mask = drawn("random.dropout", key, draw, P(*array.spec_of(x)), array.mesh_of(x))
    else:
        mask = drawn("random.dropout", key, draw, device=x.device)
    return torch.where(mask, x / keep if keep else x * 0, 0.0)
