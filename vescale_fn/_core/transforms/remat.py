"""remat: intermediate values are computed again in the backward pass instead of kept."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint

from .. import torch_internals
from ..base import tree
from ..base.containers import opened
from ..base.errors import TransformError
from ..base.front_door import public
from ..base.messages import report
from ..base.user_calls import called, checked_function, owner
from ..shard_map import body

Q = ParamSpec("Q")
R = TypeVar("R")


@torch_internals.not_compiled
@public("remat")
def remat(f: Callable[Q, R]) -> Callable[Q, R]:
    """`f`, whose intermediate values are computed again in the backward pass instead of being kept.

    A gather made in `f` is made again too: with parameters sharded and gathered inside, this is FSDP's memory. Keyed
    draws are the same the second time. Under a `torch.func` transform, which keeps every value by construction, and in
    forward mode, which keeps none, it is `f`.

    Raises:
        TransformError: `f` itself takes a gradient by `torch.func`.

    Source: `jax.checkpoint`, `torch.utils.checkpoint`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.grad(vfn.remat(lambda x: x.sin().exp()))(torch.tensor(0.0))
    tensor(1.)
    """

    checked_function(f, "remat")

    @torch_internals.not_compiled
    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch_internals.transforming() or torch_internals.forward_ad_active() or not torch.is_grad_enabled():
            return f(*args, **kwargs)
        leaves, treedef = opened(
            (args, kwargs),
            "remat",
            "(args, kwargs)",
            numpy=True,
            modules=True,
            passing=functools.partial(owner, f, args),
        )

        def flat(*flat_args: Any) -> Any:
            a, k = tree.unflatten(treedef, flat_args)
            outs, flat_def = opened(called(f, a, k, "remat"), "remat", "out", numpy=True)
            return (flat_def, *outs)

        again, setting = body.computed_again(flat, leaves, {})

        def contexts() -> tuple[Any, Any]:
            return contextlib.nullcontext(), setting

        contexts.enters_body = True
        try:
            out_def, *outs = torch.utils.checkpoint.checkpoint(
                again, *leaves, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
            )
        except Exception as error:
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                    frame.clear()  # with which, on torch 2.11, a checkpoint that raised is left: else its hooks stay on
            if not (isinstance(error, RuntimeError) and torch_internals.is_about_hooks(error)):
                raise
            raise TransformError(
                report(
                    "remat",
                    "the function takes a gradient by torch.func (so does vfn.grad under vmap or jvp), which keeps values "
                    "where the backward pass of a remat cannot find them",
                    fix="vfn.grad in it, outside of vmap and jvp; or the remat inside of the transform: "
                    "torch.func.grad(vfn.remat(f)), vfn.vmap(vfn.remat(f))",
                )
            ) from None
        return tree.unflatten(out_def, outs)

    return run
