"""`stop_gradient`: values that no transform follows."""

from __future__ import annotations

from typing import TypeVar

import torch

from ..base import tree
from ..base.containers import opened

T = TypeVar("T")


def stop_gradient(x: T) -> T:
    """The tree `x`, whose tensors no transform differentiates by: in reverse and in forward mode, of any order.

    Tensors keep shape, dtype, layout and type; other leaves pass through.

    Source: `jax.lax.stop_gradient`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.grad(lambda x: x * vfn.stop_gradient(x))(torch.tensor(3.0))
    tensor(3.)
    """
    leaves, treedef = opened(x, "stop_gradient", "x", numpy=True, modules=True)
    return tree.unflatten(treedef, [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
