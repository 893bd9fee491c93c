"""remat: intermediate values are computed again in the backward pass instead of kept."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint

from .. import torch_internals
from ..base import context, state, tree
from ..base.containers import opened
from ..base.errors import TransformError
from ..base.front_door import public
from ..base.messages import report
from ..base.user_calls import called, checked_function, owner
from ..shard_map import body
from .custom_vjp import custom_vjp
from .kept_values import Keeper
from .remat_policies import Policy
from .vjp import vjp

Q = ParamSpec("Q")
R = TypeVar("R")


@torch_internals.not_compiled
@public("remat")
def remat(
    f: Callable[Q, R],
    *,
    policy: Policy | None = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[Q, R]:
    """`f`, whose intermediate values are computed again in the backward pass instead of being kept.

    A gather made in `f` is made again too: with parameters sharded and gathered inside, this is FSDP's memory. Draws, keyed
    and torch's own, are the same the second time. Under a `torch.func` transform, which keeps every value by construction, and
    in forward mode, which keeps none, it is `f`.

    Args:
        f: a function of trees.
        policy: which values are kept all the same: one of `vfn.remat_policies`, or a function ``(op, shapes, name)``. What
            follows from a kept value is computed from it, and what only it follows from not at all. No bit depends on it.
        prevent_cse: under `jit`, whether what is computed again stays apart from what it repeats; else they may be merged.
        static_argnums, static_argnames: arguments, by place and by name, that are handed on as they are: no trees with tensors
            in them.

    Raises:
        TransformError: `f` itself takes a gradient by `torch.func`; with a policy, `f` does something else the second time.

    Source: `jax.checkpoint`, `torch.utils.checkpoint`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.grad(vfn.remat(lambda x: x.sin().exp()))(torch.tensor(0.0))
    tensor(1.)
    """

    checked_function(f, "remat")
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if names:
        known = list(inspect.signature(f).parameters)
        if unknown := [name for name in names if name not in known]:
            failures = [f"there is no parameter {name!r}" for name in unknown]
            raise TransformError(report("remat", "static_argnames are names of parameters of the function", failures))
        static += tuple(map(known.index, names))

    @torch_internals.not_compiled
    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _keeps():
            return f(*args, **kwargs)
        places = {n % len(args) for n in static if n < len(args)}
        named = {name: kwargs.pop(name) for name in names if name in kwargs}
        leaves, treedef = opened(
            ([None if n in places else x for n, x in enumerate(args)], kwargs),
            "remat",
            "(args, kwargs)",
            numpy=True,
            modules=True,
            passing=functools.partial(owner, f, args),
        )

        def flat(*flat_args: Any) -> Any:
            a, k = tree.unflatten(treedef, flat_args)
            a = [args[n] if n in places else x for n, x in enumerate(a)]
            outs, flat_def = opened(called(f, a, k | named, "remat"), "remat", "out", numpy=True)
            return (flat_def, *outs)

        out_def, *outs = _checkpointed(flat, leaves, None if policy is None else Keeper(policy), prevent_cse)
        return tree.unflatten(out_def, outs)

    return run


def remat_call(f: Callable[..., Any], args: Any, kwargs: Any, policy: Policy | None) -> Any:
    """``remat(f, policy=policy)(*args, **kwargs)``, where anything may be an argument or a result."""
    if not _keeps():
        return f(*args, **kwargs)
    leaves, treedef = tree.flatten((args, kwargs))

    def flat(*leaves: Any) -> Any:
        a, k = tree.unflatten(treedef, leaves)
        return f(*a, **k)

    return _checkpointed(flat, leaves, None if policy is None else Keeper(policy), True)


def _keeps() -> bool:
    """Whether values are kept for a backward pass that finds them where they are to be left out."""
    if state.now().keeps_all or not torch.is_grad_enabled():
        return False
    return not (torch_internals.transforming() or torch_internals.forward_ad_active())


def _checkpointed(flat: Callable[..., Any], leaves: Sequence[Any], keeper: Keeper | None, apart: bool) -> Any:
    """``flat(*leaves)``, whose values autograd keeps as little as `keeper` says."""
    if getattr(torch_internals.recorder(), "cuts", None) is not None:
        flat = _known_to_repeat(flat)
    again, setting = body.computed_again(flat, leaves, {})
    before = contextlib.nullcontext() if keeper is None else context.Again(keeper.first)
    more = [] if apart else [lambda: context.setting(may_merge=True)]
    within = context.Again(lambda: setting, *more, *([] if keeper is None else [keeper.again]))

    def contexts() -> tuple[Any, Any]:
        return before, within

    contexts.enters_body = True
    try:
        out = torch.utils.checkpoint.checkpoint(
            again, *leaves, use_reentrant=False, preserve_rng_state=True, context_fn=contexts
        )
    except Exception as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                frame.clear()  # with which, on torch 2.11, a checkpoint that raised is left: else its hooks stay on
        if not (isinstance(error, RuntimeError) and torch_internals.is_about_hooks(error)):
            raise
        return _by_a_rule(flat, leaves)
    if keeper is not None and (collected := state.now().kept) is not None:
        collected += keeper.residuals()
    return out


def _known_to_repeat(flat: Any) -> Any:
    """A function that knows that it is computed again, where no `vfn.cut` may stand."""

    def run(*leaves: Any) -> Any:
        with context.setting(computed_again=True):
            return flat(*leaves)

    return run


def _by_a_rule(flat: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    """``flat(*leaves)``, which takes a gradient by `torch.func` (as `vfn.grad` under `vmap` does): that keeps values where the
    backward pass of a checkpoint cannot find them. So the whole of it has a rule, whose cotangents are those of another run."""
    devices, states = torch.utils.checkpoint.get_device_states(*leaves)
    drawn = torch.get_rng_state()

    def again(leaves: Any, ct: Any) -> Any:
        with torch.random.fork_rng(devices):
            torch.set_rng_state(drawn)
            torch.utils.checkpoint.set_device_states(devices, states)
            return vjp(flat, *leaves)[1](ct)

    ruled = custom_vjp(flat)
    ruled.defvjp(lambda *leaves: (flat(*leaves), leaves), again)
    ruled.where = "remat"
    return ruled(*leaves)
