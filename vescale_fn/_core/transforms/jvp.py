"""jvp and linearize over any pytree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from .. import torch_internals
from ..base import tracebacks, tree
from ..base.errors import TransformError
from ..base.messages import count_text, described, report
from ..base.user_calls import checked_function
from ..shard_map import body, interrupts
from .primals import Split, as_primals
from .vjp import Flat, partner_problem, pullback_of

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here


@torch_internals.not_compiled
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
    checked_function(f, "jvp")
    wrong = [
        f"{name} is {described(given)}"
        for name, given in (("primals", primals), ("tangents", tangents))
        if not isinstance(given, (tuple, list))
    ]
    if wrong:
        fix = "jvp(f, (x,), (dx,)): one of each for each argument of f"
        raise TransformError(report("jvp", "primals and tangents must be tuples", wrong, fix))
    if len(primals) != len(tangents):
        what = f"primals has length {len(primals)}, but tangents has length {len(tangents)}"
        raise TransformError(report("jvp", what, fix="give tuples, one tangent for each argument of the function"))
    split = Split("jvp", f, tuple(primals), range(len(primals)))
    flat = Flat(f, split)
    torch_internals.load_forward_rules()
    with interrupts.undone():
        outs, slopes = torch.func.jvp(flat, tuple(split.primals), _directions(split, tangents))[:2]
    return flat.rebuilt(outs), flat.rebuilt(slopes)


def _directions(split: Split, tangents: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The tangent of each leaf that is differentiated."""
    where, primals = split.where, split.args
    given = [
        tangent
        for p, t in zip(primals, tangents, strict=True)
        for leaf, tangent in zip(
            tree.leaves(p, is_leaf=tree.none_or_opaque),
            tree.broadcast(t, p, where, "tangents", "primals", is_leaf=tree.none_or_opaque),
            strict=True,
        )
        if leaf is not None
    ]
    directions = tuple(body.local(given[i]) for i in split.moving)
    names = [name for n, p in enumerate(primals) for name in tree.paths_opaque(p, f"primals[{n}]")]
    failures = []
    for i, tangent in zip(split.moving, directions, strict=True):
        x = split.leaves[i]
        if problem := partner_problem(x, tangent, "tangent"):
            failures.append(f"{names[i]} {problem}")
    if failures:
        raise TransformError(
            report(
                where,
                "the tangents do not fit the primals",
                failures,
                "a tensor of the same shape and dtype for each, torch.ones_like(x) say",
            )
        )
    return directions


@torch_internals.not_compiled
def linearize(f: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """``f(*primals)``, and its derivative there: a function of tangents, which does not run `f` again.

    For many tangents at one point (conjugate gradients, Lanczos, a Jacobian's columns). `f` runs once, and what its
    derivative needs is kept; each call then costs about a backward pass. Its derivative is the transpose of the
    transpose: whatever `vjp` of `vjp` goes through, on plain tensors, on arrays and in a `shard_map` body. For one
    tangent `jvp` does it in one run.

    Args:
        f: a function of trees of tensors to a tree of tensors.
        primals: its arguments.

    Returns:
        ``(out, f_jvp)``; ``f_jvp(*tangents)`` takes one tree for each primal (read as `jvp` reads its tangents) and
        returns a tree like `out`, in its layout, with zeros at integer and bool tensors.

    Raises:
        TransformError: nothing to differentiate; from `f_jvp`, tangents that do not fit the primals.

    Source: `jax.linearize`; the transposition trick is Jamie Townsend's, "A new trick for calculating
        Jacobian vector products" (2017).

    >>> import torch, vescale_fn as vfn
    >>> out, f_jvp = vfn.linearize(lambda x: x**2, torch.tensor(3.0))
    >>> out, f_jvp(torch.tensor(1.0)), f_jvp(torch.tensor(10.0))
    (tensor(9.), tensor(6.), tensor(60.))
    """
    checked_function(f, "linearize")
    split = Split("linearize", f, primals, range(len(primals)))
    flat = Flat(f, split)
    outs, back = pullback_of(flat, split.primals, follow=True)
    out = flat.rebuilt(outs)
    smooth = [i for i, x in enumerate(outs) if x.is_floating_point() or x.is_complex()]

    def transposed(*seeds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cotangents = [torch.zeros_like(x) for x in outs]
        for i, seed in zip(smooth, seeds, strict=True):
            cotangents[i] = seed
        return tuple(back(tuple(cotangents)))

    _, forth = pullback_of(
        transposed, [torch.zeros_like(outs[i]) for i in smooth], follow=any(x.requires_grad for x in outs)
    )

    @torch_internals.not_compiled
    def f_jvp(*tangents: Any) -> Any:
        if len(tangents) != len(primals):
            given = count_text(len(tangents), "tangent")
            what = f"it was made with {count_text(len(primals), 'primal')}, and called with {given}"
            raise TransformError(report("linearize: f_jvp", what, fix="one tangent for each argument of the function"))
        slopes = [torch.zeros_like(x) for x in outs]
        found = as_primals(forth(_directions(split, tangents)), [slopes[i] for i in smooth])
        for i, slope in zip(smooth, found, strict=True):
            slopes[i] = slope
        return flat.rebuilt(slopes)

    return out, f_jvp
