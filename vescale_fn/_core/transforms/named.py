"""`name`: a value that policies of `remat` know by a name."""

from __future__ import annotations

from typing import TypeVar

import torch

from ..base import state, tree

T = TypeVar("T")


def name(x: T, name: str) -> T:
    """`x`, a tree whose tensors the policy of a `vfn.remat` around knows by this name.

    Of a view of a value, or what a collective has made, the value itself gets the name. Where no `vfn.remat` with a policy is
    around, and of arguments, a name means nothing.

    Source: `jax.ad_checkpoint.checkpoint_name`.

    >>> import torch, vescale_fn as vfn
    >>> f = lambda x: vfn.name(x.sin(), "a").cos()
    >>> vfn.grad(vfn.remat(f, policy=vfn.remat_policies.save_only_these_names("a")))(torch.tensor(0.0))
    tensor(-0.)
    """
    keeper = state.now().keeper
    if keeper is not None:
        for leaf in tree.leaves(x):
            if isinstance(leaf, torch.Tensor):
                keeper.named(leaf, name)
    return x


checkpoint_name = name
