"""What is differentiated: the leaves of arguments that gradients are taken by, and the layouts that gradients come back in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import torch_internals
from ..arrays.array import Array, is_array, mesh_of, moved, moved_together, spec_of
from ..base import context, tree
from ..base.containers import opened
from ..base.errors import TransformError
from ..base.messages import described, dtype_text, report, short
from ..base.user_calls import parameter
from ..distributed.mesh import same
from ..shard_map import body
from ..sharding.layout import layout, type_text
from ..sharding.spec import P

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # what lies nowhere

# --- the leaves that are differentiated -------------------------------------------------------------------------------


class Split:
    """The arguments of a call, with the floating-point tensors among those to differentiate taken out."""

    def __init__(self, where: str, f: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]) -> None:
        self.where, self.args, self.argnums = where, args, argnums
        self.leaves, self.moving, self.defs, self.counts = [], [], [], []
        for n in argnums:
            leaves, treedef = opened(args[n], where, functools.partial(_paths, f, args, n))
            moving = _differentiable(leaves)
            if len(moving) < len(leaves):  # there may be keys, which are nodes around integers
                leaves, treedef = tree.flatten_opaque(args[n])
                moving = _differentiable(leaves)
            if context.body() is not None:
                leaves = [body.local(x) if i in moving else x for i, x in enumerate(leaves)]
            self.moving += [i + len(self.leaves) for i in moving] if self.leaves else moving
            self.leaves += leaves
            self.defs.append(treedef)
            self.counts.append(len(leaves))
        self.primals: list[torch.Tensor] = [self.leaves[i] for i in self.moving]
        if not self.moving:
            raise TransformError(
                report(
                    where,
                    "there is no floating-point tensor to differentiate",
                    [
                        f"argument {n}{_named(f, args, n)} holds {', '.join(sorted({_kind(x) for x in leaves})) or 'no leaves'}"
                        for n in argnums
                        for leaves in [tree.flatten_opaque(args[n])[0]]
                    ]
                    or ["it was given no argument to differentiate"],
                    _how_to_differentiate(self.leaves, where),
                )
            )

    def trees(self, leaves: Sequence[Any]) -> list[Any]:
        """These leaves as the trees of the differentiated arguments."""
        if len(self.defs) == 1:
            return [self.defs[0].unflatten(leaves)]
        out, start = [], 0
        for treedef, count in zip(self.defs, self.counts, strict=True):
            out.append(treedef.unflatten(leaves[start : start + count]))
            start += count
        return out

    def with_primals(self, primals: Sequence[Any]) -> list[Any]:
        """All arguments, with these in place of the differentiated leaves."""
        leaves = primals
        if len(primals) < len(self.leaves):
            leaves = list(self.leaves)
            for i, x in zip(self.moving, primals, strict=True):
                leaves[i] = x
        args = list(self.args)
        for n, value in zip(self.argnums, self.trees(leaves)):
            args[n] = value
        return args

    def gradients(self, grads: Sequence[Any]) -> list[Any]:
        """A gradient tree for each argument: zeros for integer and bool tensors, other leaves as they are."""
        if len(grads) < len(self.leaves):
            found = dict(zip(self.moving, grads, strict=True))
            grads = [
                found[i] if i in found else torch.zeros_like(x) if isinstance(x, torch.Tensor) else x
                for i, x in enumerate(self.leaves)
            ]
        return self.trees(grads)


def _paths(f: Callable[..., Any], args: Sequence[Any], n: int) -> list[str]:
    return tree.paths(args[n], parameter(f, args, n) or f"args[{n}]")


def _named(f: Callable[..., Any], args: Sequence[Any], n: int) -> str:
    name = parameter(f, args, n)
    return f" ({name!r})" if name else ""


def _differentiable(leaves: Sequence[Any]) -> list[int]:
    return [
        i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
    ]


def _kind(x: Any) -> str:
    return f"{dtype_text(x.dtype)} tensors" if isinstance(x, torch.Tensor) else f"{type(x).__name__} leaves"


def _how_to_differentiate(leaves: Sequence[Any], where: str) -> str:
    """What to give in place of leaves that cannot be differentiated."""
    if any(isinstance(x, float) for x in leaves):
        return "torch.tensor(x) for a Python number"
    if where not in ("grad", "value_and_grad"):
        return "floating-point tensors: x.float()"
    return "point argnums at the parameters, or convert them with .float()"


def is_place(n: Any) -> bool:
    """Whether this can be the place of an argument."""
    return isinstance(n, int) and not isinstance(n, bool)


def argnums_of(argnums: Any, args: Sequence[Any], where: str) -> tuple[int, ...]:
    """`argnums` as places counted from the front; or an error, where the call has no such arguments."""
    if type(argnums) is int and 0 <= argnums < len(args):
        return (argnums,)
    several = isinstance(argnums, (tuple, list))
    numbers = tuple(argnums) if several else (argnums,)
    wrong = [n for n in numbers if not -len(args) <= n < len(args)]
    if len(numbers) and not wrong and len({n % len(args) for n in numbers}) < len(numbers):
        raise TransformError(report(where, f"argnums={argnums!r} names an argument twice", fix="each of them once"))
    if wrong:
        given = f"{len(args)} argument{'s' * (len(args) != 1)}"
        fix = "argnums=0" if len(args) == 1 else f"argnums between 0 and {len(args) - 1}"
        fix = fix if args else "give what is differentiated by its place"
        raise TransformError(
            report(
                where,
                f"argnums={short(argnums)} does not fit a call with {given}",
                [f"there is no argument {short(n)}" for n in wrong],
                f"{fix}; arguments that are given by name are not counted",
            )
        )
    return tuple(n % len(args) for n in numbers)


def described_result(value: Any) -> str:
    """What a function of the user gave, on one short line."""
    if isinstance(value, torch.Tensor):
        return type_text(value.shape, value.dtype, spec_of(value))
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {', '.join(map(described_result, value))}"
    return described(value)


def _how_to_return(value: Any) -> str:
    """What to return in place of what is no loss."""
    if value is None:
        return "return loss: a `return` is missing"
    if isinstance(value, (int, float)):
        return "the tensor itself, without .item() or float(), from which no gradient comes back"
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], torch.Tensor) and not value[0].ndim:
        rest = "aux" if len(value) == 2 else "(" + ", ".join(f"aux{i}" for i in range(1, len(value))) + ")"
        return f"has_aux=True, with `return loss, {rest}`: only the loss is differentiated"
    if isinstance(value, dict):
        return "one of its entries; for the others as well, `return loss, aux` and has_aux=True"
    if isinstance(value, torch.Tensor) and not value.ndim:
        return "its .abs(), .real or .imag" if value.is_complex() else "a loss computed in floating point"
    return "reduce it: loss.mean() or loss.sum(); with more results, return (loss, aux) and has_aux=True"


def scalar(value: Any, where: str) -> torch.Tensor:
    """`value`, where it is a loss; or an error that says what to return."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.ndim or not value.is_floating_point():
        raise TransformError(
            report(
                where,
                "the function must return one floating-point number, a 0-d tensor",
                [f"it returned {described_result(value)}"],
                _how_to_return(value),
            )
        )
    return value


# --- layouts of gradients ---------------------------------------------------------------------------------------------


def gradient_spec(primal: torch.Tensor) -> P | None:
    """How the gradient of `primal` lies: as it, unreduced and reduced swapped; None for a plain tensor."""
    if not is_array(primal):
        return None
    spec = spec_of(primal)
    return P(*spec, unreduced=spec.reduced, reduced=spec.unreduced) if spec.unreduced or spec.reduced else spec


def as_primals(grads: Sequence[torch.Tensor], primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bring each gradient to the layout of its primal, differentiably, one by one."""
    out = []
    for g, x in zip(grads, primals, strict=True):
        goal, mesh = gradient_spec(x), mesh_of(x) or mesh_of(g)
        if mesh is not None and (goal is None or not is_array(g) or spec_of(g) != goal or not same(mesh_of(g), mesh)):
            g = moved(g, mesh, goal, "grad")
        out.append(g)
    return out


def settle_together(grads: Sequence[torch.Tensor], primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same for finished values: what is to be added over the same axes travels as one collective a dtype."""
    out, moving = list(grads), {}
    if PLAIN.issuperset(map(type, (*grads, *primals))):  # nothing lies anywhere
        return out
    for i, (g, x) in enumerate(zip(grads, primals, strict=True)):
        goal = gradient_spec(x)
        apart = isinstance(g, Array) and goal is not None and not same(torch_internals.mesh(g), mesh_of(x))
        if isinstance(g, Array) and goal is not None and not apart and layout(torch_internals.spec(g)) != goal:
            moving[i] = goal
        elif apart or isinstance(g, Array) != (goal is not None):
            out[i] = as_primals([g], [x])[0]
    arrays: list[Any] = [grads[i] for i in moving]
    found = moved_together(arrays, list(moving.values()), "grad: the layout of the primals")
    for i, g in zip(moving, found, strict=True):
        out[i] = g
    return out
