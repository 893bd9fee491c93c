"""`vjp` over any pytree: the value, and a function from its cotangent to those of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import torch_internals
from ..arrays.array import mesh_of
from ..base import context, tracebacks, tree
from ..base.containers import opened
from ..base.errors import TransformError
from ..base.messages import described, mesh_text, report
from ..base.user_calls import called, checked_function
from ..distributed.mesh import same
from ..shard_map import body, interrupts
from ..sharding.index_map import axes_of
from .grad import Followed, backward, fresh, recording, within_another, zeros_for_none
from .primals import Split, as_primals, described_result

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here


class Flat:
    """`f` from its differentiated leaves to the tensors of its result, and the way back to a tree like its result."""

    def __init__(self, f: Callable[..., Any], split: Split) -> None:
        self.f, self.split = f, split

    def __call__(self, *moving: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = called(self.f, self.split.with_primals(moving), {}, self.split.where)
        self.leaves, self.treedef = opened(result, self.split.where, "out")
        return tuple(x for x in self.leaves if isinstance(x, torch.Tensor))

    def rebuilt(self, tensors: Sequence[Any]) -> Any:
        """The last result's tree, with these in place of its tensors."""
        found = iter(tensors)
        return tree.unflatten(self.treedef, [next(found) if isinstance(x, torch.Tensor) else x for x in self.leaves])


def pullback_of(flat: Callable[..., Any], primals: Sequence[torch.Tensor], follow: bool = False) -> tuple[Any, Any]:
    """The results of a function of tensors, and the function from their cotangents to those of `primals`.

    Args:
        follow: whether the pullback will itself be differentiated.
    """
    if torch_internals.transforming() or torch_internals.forward_ad_active():
        return torch.func.vjp(flat, *primals)[:2]
    return _autograd_vjp(flat, primals, follow)


@torch_internals.not_compiled
def vjp(f: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """``f(*primals)``, and the function from a cotangent of that result to the cotangents of the primals.

    Args:
        f: a function of trees of tensors to a tree of tensors.
        primals: its arguments.

    Returns:
        ``(out, pullback)``; ``pullback(cotangent)`` takes a tree like `out` and returns one tree for each primal, in
        its layout, with zeros at integer and bool tensors. It can be called again.

    Source: `jax.vjp`.

    >>> import torch, vescale_fn as vfn
    >>> out, pullback = vfn.vjp(lambda x: 3 * x, torch.tensor([1.0, 2.0]))
    >>> out, pullback(torch.tensor([1.0, 10.0]))
    (tensor([3., 6.]), (tensor([ 3., 30.]),))
    """
    checked_function(f, "vjp")
    split = Split("vjp", f, primals, range(len(primals)))
    flat = Flat(f, split)
    outs, back = pullback_of(flat, split.primals)
    out = flat.rebuilt(outs)

    @torch_internals.not_compiled
    def pullback(cotangent: Any, *more: Any) -> tuple[Any, ...]:
        if more:
            raise TransformError(
                report(
                    "vjp: pullback",
                    f"it takes one cotangent, a tree like the result, but {len(more) + 1} were given",
                    fix="pullback((a, b)) for a result (x, y)",
                )
            )
        cotangents = _cotangents(cotangent, out)
        return tuple(split.gradients(as_primals(back(cotangents), split.primals)))

    return out, pullback


def partner_problem(x: torch.Tensor, partner: Any, word: str) -> str:
    """What is wrong with the tangent or cotangent of `x`; "" if nothing is."""
    if not isinstance(partner, torch.Tensor):
        return f"is {described_result(x)}, its {word} is {described(partner)}, not a tensor"
    theirs = mesh_of(partner)
    if partner.shape != x.shape or partner.dtype != x.dtype:
        return f"is {described_result(x)}, its {word} {described_result(partner)}"
    if theirs is not None and (mine := mesh_of(x)) is not None and not same(mine, theirs):
        return f"lies on the {mesh_text(axes_of(mine))}, its {word} on the {mesh_text(axes_of(theirs))}"
    return ""


def _cotangents(cotangent: Any, out: Any) -> tuple[torch.Tensor, ...]:
    given = [body.local(x) for x in tree.broadcast(cotangent, out, "vjp: pullback", "the cotangent", "the result")]
    wanted, failures = tree.leaves(out), []
    for name, ct, x in zip(tree.paths(out, "out"), given, wanted, strict=True):
        if isinstance(x, torch.Tensor) and (problem := partner_problem(x, ct, "cotangent")):
            failures.append(f"{name} {problem}")
    if failures:
        raise TransformError(
            report(
                "vjp: pullback",
                "the cotangent does not fit the result",
                failures,
                "a tensor of the same shape and dtype for each, torch.ones_like(x) say",
            )
        )
    return tuple(ct for ct, x in zip(given, wanted, strict=True) if isinstance(x, torch.Tensor))


@recording
def _autograd_vjp(
    flat: Callable[..., Any], originals: Sequence[torch.Tensor], follow: bool
) -> tuple[Any, Callable[[Any], Any]]:
    attached = within_another(originals)
    with interrupts.undone(), Followed():
        primals = [fresh(x, attached) for x in originals]
        context.differentiated_by(primals)
        outs = flat(*primals)
        depth = context.grad_depth()
    moving = [i for i, x in enumerate(outs) if x.requires_grad]

    def back(cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pairs = [outs[i] for i in moving], [cotangents[i] for i in moving]
        found: Any = (None,) * len(primals)
        if moving:
            further = attached or follow or (torch.is_grad_enabled() and any(ct.requires_grad for ct in pairs[1]))
            with context.setting(grad_depth=depth):
                found = backward(pairs[0], primals, pairs[1], retain_graph=True, create_graph=further)
        return zeros_for_none(found, primals)

    return (outs if attached else tuple(x.detach() for x in outs)), back
