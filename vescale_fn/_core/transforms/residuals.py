"""`saved_residuals`: what a function keeps for its backward pass, value by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base import context, tree
from ..base.user_calls import called, checked_function, parameter
from ..local_types import tensor_types
from .kept_values import Keeper, RematStep
from .placeholders import memories

Tensor = torch.Tensor


def saved_residuals(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
    """What ``f(*args, **kwargs)`` keeps for its backward pass: the type of each value, and where it comes from.

    Every floating-point tensor among the arguments counts as differentiated. Within a `vfn.remat` those are its arguments, and
    what its policy keeps. Plain `f` is run once.

    Source: `jax.ad_checkpoint.print_saved_residuals`.

    >>> import torch, vescale_fn as vfn
    >>> f = vfn.remat(lambda w, x: vfn.name(torch.tanh(x @ w), "h").sin(), policy=vfn.remat_policies.save_only_these_names("h"))
    >>> [kind for kind, where in vfn.saved_residuals(f, torch.ones(4, 2), torch.ones(3, 4))]
    ['f32[4,2]', 'f32[3,4]', 'f32[3,2]']
    """
    checked_function(f, "saved_residuals")
    leaves, treedef = tree.flatten((args, kwargs))
    names = [_said(f, args, path) for path in tree.paths((args, kwargs), "")]
    smooth = [isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in leaves]
    leaves = [x.detach().requires_grad_() if move else x for x, move in zip(leaves, smooth, strict=True)]
    given = {memories(x): (x, name) for x, name in zip(leaves, names, strict=True) if isinstance(x, Tensor)}
    found: dict[Any, tuple[str, str]] = {}
    kept: list[RematStep] = []
    keeper = Keeper(lambda op, shapes, name: False)

    def pack(x: Tensor) -> Tensor:
        if (place := memories(x)) in given:
            argument, name = given[place]
            found[place] = tensor_types.text(argument), f"from the argument {name}"
        return x

    with torch.enable_grad(), context.setting(kept=kept):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), keeper.first():
            a, k = tree.unflatten(treedef, leaves)
            called(f, a, k, "saved_residuals")
    steps = [*kept, *(keeper.steps[i] for i in sorted(keeper.asked))]
    return [*found.values(), *((kind, _where(step)) for step in steps for kind in step.kinds())]


def print_saved_residuals(f: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Print `saved_residuals`, a line for each value.

    Source: `jax.ad_checkpoint.print_saved_residuals`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.print_saved_residuals(vfn.remat(lambda x: x.sin().exp()), torch.ones(3))
    f32[3] from the argument x
    """
    for kind, where in saved_residuals(f, *args, **kwargs):
        print(f"{kind} {where}")


def _where(step: RematStep) -> str:
    what = f"output of {step.name}" if step.label is None else f"named {step.label!r}"
    return f"{what} from {step.line}" if step.line else what


def _said(f: Callable[..., Any], args: Any, path: str) -> str:
    """A leaf of ``(args, kwargs)`` as the user would write it."""
    of, rest = path[: path.index("]") + 1], path[path.index("]") + 1 :]
    if of == "[1]":
        return rest
    number, rest = rest[1 : rest.index("]")], rest[rest.index("]") + 1 :]
    return (parameter(f, args, int(number)) or f"args[{number}]") + rest
