"""`typed_op`: an op into which a body cannot see, with the types that its results have by its author's word."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from .. import torch_internals
from ..base import context, tracebacks, tree
from ..base.errors import SpecError, VaryingTypeError
from ..base.messages import meant, report, short
from ..base.op_arguments import tensors_in, with_tensors
from ..base.user_calls import checked_function
from ..local_types import replica_check, tensor_types, types
from ..local_types.types import Type
from .body import watched
from .typed_mode import Checked

Q = ParamSpec("Q")
R = TypeVar("R")
Stated = Mapping[str, str]
__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here

_WHERE = "typed_op"


def typed_op(*, out: Any) -> Callable[[Callable[Q, R]], Callable[Q, R]]:
    """State the types of what an op gives in a `shard_map` body, where that is not how its operands vary: a decorator.

    Of a `torch.library.custom_op`, an `autograd.Function` or a kernel's Python function nobody can tell what it does, so its
    results vary over the axes over which its operands do. That is wrong of an op that talks to other ranks (a matrix product
    with its all-reduce in one kernel), and of one that gives each rank something else. Outside of bodies, and in a body
    without types, the op is as it was.

    Args:
        out: the type of the results over some axes, ``{"tp": "invarying"}``; by the words of `pcast`: "varying" (each rank's
            own), "invarying" (the same on all ranks), "unreduced" (parts of a sum over the ranks), "reduced" (the same, and
            its gradient a part of a sum). Over other axes, and for None, as the operands. For several results a prefix of
            their tree. Or a function of the op's arguments to that.

    The op's own derivative gets cotangents of these types: over "invarying" and "unreduced" axes the same on all ranks, over
    others each rank's own. An operand that is the same on all ranks gets the sum of the ranks' gradients along each
    axis over which another operand or a result is not "invarying".

    In debug mode (`vfn.debug`) results are compared along the axes over which they are the same.

    Raises:
        VaryingTypeError: from a call, a word that there is not, an axis that the body does not have.
        SpecError: from a call, an `out` that does not fit the results.
        DivergenceError: from a call in debug mode, a result that is not the same on all ranks.

    >>> import torch, vescale_fn as vfn
    >>> from vescale_fn import P
    >>> @vfn.typed_op(out={"dp": "invarying"})
    ... def positions(x):  # a kernel, of which each rank gets the same: only the length counts
    ...     return torch.ones_like(x).cumsum(0)
    >>> with vfn.simulate(2):
    ...     mesh = vfn.make_mesh((2,), ("dp",))
    ...     print(vfn.unshard(vfn.shard_map(positions, mesh=mesh, in_specs=P("dp"), out_specs=P())(torch.zeros(4))))
    tensor([1., 2.])
    """

    def decorate(op: Callable[Q, R]) -> Callable[Q, R]:
        checked_function(op, _WHERE)
        name = _name(op)

        def run(*args: Any, **kwargs: Any) -> Any:
            mode = context.mode() if watched() else None
            if not isinstance(mode, Checked):
                return op(*args, **kwargs)  # type: ignore[arg-type]
            return _run(mode, name, op, out(*args, **kwargs) if callable(out) else out, args, kwargs)

        return functools.update_wrapper(run, op, updated=())  # type: ignore[return-value]

    return decorate


def _name(op: Any) -> str:
    """For messages: of a Function's `apply` with its class."""
    name = torch_internals.custom_op_name(op) or getattr(op, "__name__", None) or short(op)
    owner = getattr(op, "__self__", None)
    return f"{owner.__name__}.{name}" if isinstance(owner, type) else name


def _run(mode: Checked, name: str, op: Callable[..., Any], out: Any, args: Any, kwargs: Any) -> Any:
    letters = [_letters(name, stated, mode) for stated in tree.leaves(out, is_leaf=_is_stated)]
    with torch_internals.no_torch_function():
        given = [mode.taken_in(x) for x in tensors_in(args, kwargs)]
        axes = frozenset().union(*letters)
        wide = frozenset(axis for each in letters for axis, letter in each.items() if letter != "I")
        wide |= {axis for x in given for axis in axes if mode.typeof(x).letter(axis) != "I"}
        operands = [_opened(mode, x, axes, wide) for x in given]
    args, kwargs = with_tensors((args, kwargs), iter(operands))
    result = op(*args, **kwargs)
    leaves, treedef = tree.flatten(result, is_leaf=_is_stated)
    try:
        each = tree.broadcast(out, result, name, "out", "result", is_leaf=_is_stated)
    except SpecError as error:
        raise SpecError(f"{_WHERE} of {error}") from None
    with torch_internals.no_torch_function():
        leaves = [
            _stated(mode, x, _letters(name, stated, mode)) if isinstance(x, torch.Tensor) else x
            for x, stated in zip(leaves, each, strict=True)
        ]
        replica_check.stated_alike(mode.body, name, [x for x in leaves if isinstance(x, torch.Tensor)])
    return tree.unflatten(treedef, leaves)


def _is_stated(x: Any) -> bool:
    return x is None or (isinstance(x, Mapping) and all(isinstance(word, str) for word in x.values()))


def _letters(name: str, stated: Stated | None, mode: Checked) -> dict[str, str]:
    """What is stated, by letters."""
    where, axes = f"{_WHERE} of {name}", mode.body.axes
    if stated is None:
        return {}
    if not _is_stated(stated):
        what = f"out holds {short(stated)}, which states no type"
        raise VaryingTypeError(report(where, what, fix="out={'tp': 'invarying'}, or None for as the operands"))
    wrong = [f"{word!r} is no type{meant(word, types.WORDS)}" for word in stated.values() if word not in types.WORDS]
    wrong += [f"{axis!r} is no axis of the body, which has {axes}" for axis in stated if axis not in axes]
    if wrong:
        fix = f"one of {tuple(types.WORDS)} for each axis that the body has"
        raise VaryingTypeError(report(where, "out states no type of this body", wrong, fix))
    return {axis: types.WORDS[word] for axis, word in stated.items()}


def _opened(mode: Checked, x: torch.Tensor, axes: frozenset[str], wide: frozenset[str]) -> torch.Tensor:
    """An operand as one that varies over those of the axes over which a type is stated and not all is the same."""
    have = mode.typeof(x)
    want = types.of(wide - have.unreduced - have.reduced)
    bare = axes & (have.unreduced | have.reduced)
    x = mode.promoted(x, have, want)
    return _named(x, types.with_letter(types.promoted(have, want), tuple(sorted(bare)), "V")) if bare else x


def _stated(mode: Checked, x: torch.Tensor, letters: Mapping[str, str]) -> torch.Tensor:
    x = mode.taken_in(x)
    type_: Type = mode.typeof(x)
    for axis, letter in letters.items():
        type_ = types.with_letter(type_, (axis,), letter)
    return _named(x, type_)


def _named(x: torch.Tensor, type_: Type) -> torch.Tensor:
    """The same value under another type."""
    out = x.view_as(x)
    tensor_types.mark(out, type_)
    return out
