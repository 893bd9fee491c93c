"""The other transforms over any pytree: `jvp`, `vmap`, `remat`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from . import _torch, context, tracking, tree
from .errors import TransformError, report
from .gradient import Split


def jvp(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """``f(*primals)`` and its derivative along `tangents`, by forward-mode differentiation.

    Args:
        f: a function of trees of tensors to a tree of tensors.
        primals: a tuple of its arguments.
        tangents: a tuple like it; at leaves that are not floating-point tensors the tangent is not read (None will do).

    Returns:
        ``(out, tangent_out)``.

    Source: `jax.jvp`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.jvp(torch.sin, (torch.tensor(0.0),), (torch.tensor(2.0),))
    (tensor(0.), tensor(2.))
    """
    split = Split("jvp", tuple(primals), range(len(primals)))
    given = [
        tangent
        for p, t in zip(primals, tangents, strict=True)
        for leaf, tangent in zip(
            tree.leaves(p, is_leaf=tree.none_or_opaque),
            tree.broadcast(t, p, "jvp", "tangents", "primals", is_leaf=tree.none_or_opaque),
            strict=True,
        )
        if leaf is not None
    ]
    directions = tuple(given[i] for i in split.moving)
    rest: dict[str, Any] = {}

    def flat(*moving: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves, rest["def"] = tree.flatten(f(*split.with_primals(moving)))
        rest["leaves"] = leaves
        return tuple(x for x in leaves if isinstance(x, torch.Tensor))

    outs, slopes = torch.func.jvp(flat, tuple(split.primals), directions)[:2]

    def rebuilt(tensors: Sequence[Any]) -> Any:
        found = iter(tensors)
        return tree.unflatten(rest["def"], [next(found) if isinstance(x, torch.Tensor) else x for x in rest["leaves"]])

    return rebuilt(outs), rebuilt(slopes)


def vmap(f: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
    """The function that applies `f` to each entry along a dim of its arguments.

    Args:
        f: a function of trees of tensors; inside it, tensors, specs and keys speak of one entry.
        in_axes: for each argument the dim to map over, an int, None for none, or a prefix tree of them; or one for all.
        out_axes: where the dim goes in the results; an int or a prefix tree.

    Source: `jax.vmap`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.vmap(lambda x, y: x @ y, in_axes=(0, None))(torch.eye(2), torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        leaves, treedef = tree.flatten(args, is_leaf=lambda x: x is None)
        axes = in_axes if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
        dims = tree.broadcast(tuple(axes), args, "vmap", "in_axes", "args", is_leaf=lambda x: x is None)
        mapped = [
            i
            for i, (x, d) in enumerate(zip(leaves, dims, strict=True))
            if isinstance(x, torch.Tensor) and d is not None
        ]
        if not mapped:
            raise TransformError(report("vmap", "no tensor argument is mapped over", [f"in_axes={in_axes!r}"]))
        rest: dict[str, Any] = {}

        def flat(*moving: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = list(leaves)
            for i, x in zip(mapped, moving, strict=True):
                full[i] = x
            outs, rest["def"] = tree.flatten(f(*tree.unflatten(treedef, full)))
            rest["leaves"] = outs
            rest["dims"] = tree.broadcast(out_axes, tree.unflatten(rest["def"], outs), "vmap", "out_axes", "the result")
            return tuple(x for x in outs if isinstance(x, torch.Tensor))

        outs = torch.func.vmap(flat, in_dims=tuple(dims[i] for i in mapped))(*(leaves[i] for i in mapped))
        found = iter(outs)
        placed = [next(found).movedim(0, d) if isinstance(x, torch.Tensor) else x
                  for x, d in zip(rest["leaves"], rest["dims"], strict=True)]  # fmt: skip
        return tree.unflatten(rest["def"], placed)

    return run


class _Again:
    """Enters the contexts that these functions make, each time anew."""

    def __init__(self, *makers: Callable[[], Any]) -> None:
        self.makers, self.stacks = makers, []

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        for make in self.makers:
            stack.enter_context(make())
        self.stacks.append(stack)

    def __exit__(self, *error: Any) -> Any:
        return self.stacks.pop().__exit__(*error)


def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, whose intermediate values are computed again in the backward pass instead of being kept.

    A gather made in `f` is made again too: with parameters sharded and gathered inside, this is FSDP's memory. Keyed
    draws are the same the second time. Under a `torch.func` transform, which keeps every value by construction, it is
    `f`.

    Source: `jax.checkpoint`, `torch.utils.checkpoint`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.grad(vfn.remat(lambda x: x.sin().exp()))(torch.tensor(0.0))
    tensor(1.)
    """

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _torch.transforming() or not torch.is_grad_enabled():
            return f(*args, **kwargs)
        leaves, treedef = tree.flatten((args, kwargs))
        again = _Again(context.captured(), tracking.capture())

        def flat(*flat_args: Any) -> Any:
            a, k = tree.unflatten(treedef, flat_args)
            outs, flat_def = tree.flatten(f(*a, **k))
            return (flat_def, *outs)

        out_def, *outs = torch.utils.checkpoint.checkpoint(
            flat, *leaves, use_reentrant=False, preserve_rng_state=False,
            context_fn=lambda: (contextlib.nullcontext(), again))  # fmt: skip
        return tree.unflatten(out_def, outs)

    return run
