"""`cond` and `switch`: one of several functions, by a value.

Source: `jax.lax`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .. import torch_internals
from ..base import tracebacks, tree
from ..base.errors import TransformError
from ..base.messages import described, report
from ..base.user_calls import called, checked_function
from . import leaves as leaves_
from . import select
from .leaves import Opened

__tracebackhide__ = tracebacks.between  # of a user's error that only passes through here


class LayoutsDiffer(TransformError):
    """Branches give the same but for its layout or type: one of them can run, and no call that stands for both.

    Attributes:
        said: what differs, and what makes it one, in a line.
    """

    said = ""


_NONE = object()
_AGREED = "branches give one layout"


@torch_internals.not_compiled
def cond(
    pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any, operand: Any = _NONE
) -> Any:
    """``true_fun(*operands)`` where `pred` holds, else ``false_fun(*operands)``.

    Args:
        pred: a bool, or a 0-d tensor. Where it is one value on all ranks, one function runs. Under `vmap`, where each entry has
            its own, and in a body where it varies over an axis, both run and `torch.where` takes one of the results; then the
            functions must not communicate over that axis.
        true_fun, false_fun: functions of the operands whose results have one structure, with equal shapes and dtypes.
        operands: their arguments. Tensors that they close over will do as well.
        operand: the one argument, by name.

    Raises:
        TransformError: `pred` has dims, the results differ in their shapes or dtypes, where both are looked at.
        VaryingTypeError: a function communicates over an axis along which `pred` varies.

    Source: `jax.lax.cond`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.cond(torch.tensor(True), torch.sin, torch.cos, torch.tensor(0.0))
    tensor(0.)
    """
    operands = _operands(operands, operand, "cond", "pred, true_fun, false_fun")
    for name, f in (("true_fun", true_fun), ("false_fun", false_fun)):
        if not callable(f):
            what = f"{name} must be a function, but it is {described(f)}"
            raise TransformError(report("cond", what, fix="cond(pred, true_fun, false_fun, *operands)"))
    pred = select.scalar(pred, "cond", "pred")
    if not isinstance(pred, torch.Tensor) or (leaves_.recorder() is None and not select.differs(pred)):
        return called(true_fun if pred else false_fun, operands, {}, "cond")
    return _one_of(pred == 0, (true_fun, false_fun), operands, "cond", ("true_fun", "false_fun"))


@torch_internals.not_compiled
def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any, operand: Any = _NONE) -> Any:
    """``branches[index](*operands)``, where an index that is too small or too large counts as the first or the last.

    Args:
        index: an int, or a 0-d integer tensor. What `cond` says of its condition holds for it.
        branches: functions of the operands whose results have one structure, with equal shapes and dtypes.
        operands: their arguments.
        operand: the one argument, by name.

    Raises:
        TransformError: there is no branch, `index` is no integer, the results differ in their types.
        VaryingTypeError: a function communicates over an axis along which `index` varies.

    Source: `jax.lax.switch`.

    >>> import torch, vescale_fn as vfn
    >>> vfn.switch(torch.tensor(7), [torch.sin, torch.cos], torch.tensor(0.0))
    tensor(1.)
    """
    operands = _operands(operands, operand, "switch", "index, [f, g, ...]")
    if not isinstance(branches, (tuple, list)) or not branches:
        what = f"branches must be a list of functions, at least one, but it is {described(branches)}"
        raise TransformError(report("switch", what, fix="switch(index, [f, g, ...], *operands)"))
    for f in branches:
        checked_function(f, "switch")
    index = select.scalar(index, "switch", "index", whole=True)
    last = len(branches) - 1
    if not isinstance(index, torch.Tensor):
        return called(branches[min(max(index, 0), last)], operands, {}, "switch")
    names = tuple(f"branches[{i}]" for i in range(len(branches)))
    return _one_of(index.clamp(0, last), branches, operands, "switch", names)


def _operands(operands: tuple[Any, ...], operand: Any, where: str, before: str) -> tuple[Any, ...]:
    if operand is _NONE:
        return operands
    if operands:
        what = "operands were given by place, and one as operand="
        raise TransformError(report(where, what, fix=f"{where}({before}, *operands)"))
    return (operand,)


def _one_of(
    index: torch.Tensor, branches: Sequence[Any], operands: tuple[Any, ...], where: str, names: Sequence[str]
) -> Any:
    chosen = Choice(branches, operands, where, names)
    if not select.differs(index):
        recorder = leaves_.recorder()
        found = None if recorder is None else recorder.choice(index, chosen)
        return called(branches[int(index)], operands, {}, where) if found is None else tree.unflatten(*found)
    with select.apart(index, where):
        outs = [chosen(i) for i in range(len(branches))]
    chosen.agree(outs, lambda x: (x.shape, x.dtype))
    found = outs[0].leaves
    for i, out in enumerate(outs[1:], 1):
        found = select.chosen(index == i, out.leaves, found)
    return tree.unflatten(outs[0].treedef, found)


class Choice:
    """What is chosen between.

    Args:
        functions: the branches.
        operands: their arguments.
        where: the public function.
        names: the branches, as its user knows them.
    """

    runs_anywhere = True  # not only while a transform is active

    def __init__(self, functions: Sequence[Any], operands: tuple[Any, ...], where: str, names: Sequence[str]) -> None:
        self.functions, self.operands, self.where, self.names = functions, operands, where, names
        self._device = leaves_.device_of(operands)

    def __call__(self, i: int) -> Opened:
        """What a branch gives."""
        return Opened(called(self.functions[i], self.operands, {}, self.where), self.where, "out", self._device)

    def again(self, i: int, outs: Sequence[Opened]) -> list[torch.Tensor]:
        """The leaves of what a branch gives once more, of the types on which `outs` have agreed."""
        out = self(i)
        for other in outs:
            out.make_sums(other, _AGREED)
            out.adapt(other, _AGREED)
        return out.leaves

    def agree(
        self,
        outs: Sequence[Opened],
        facts: Callable[[torch.Tensor], Any] = leaves_.facts,
        within: Callable[[int], AbstractContextManager[Any]] = lambda i: nullcontext(),
    ) -> None:
        """Give what branches give one type, or raise where it cannot be had: a number takes the dtype that another one gives, a
        plain tensor becomes an array.

        Args:
            outs: of each branch.
            facts: what must be the same of a leaf.
            within: a block in which the values of one branch can be computed with.
        """
        for i, j in [*((0, j) for j in range(1, len(outs))), *((i, 0) for i in range(1, len(outs)))]:
            with within(i):
                outs[i].make_sums(outs[j], _AGREED)
                outs[i].adapt(outs[j], _AGREED)
        for i, out in enumerate(outs[1:], 1):
            self._refuse_other(outs[0], out, (self.names[0], self.names[i]), facts)

    def _refuse_other(self, one: Opened, other: Opened, names: tuple[str, str], facts: Any) -> None:
        where = self.where
        what = f"{names[0]} and {names[1]} must give the same structure, shapes and dtypes"
        if facts is leaves_.facts:
            what = f"{names[0]} and {names[1]} must give the same structure, shapes, dtypes, layouts and types"
        if one.treedef != other.treedef:
            found = list(tree.partings(one.value, other.value, f"that of {names[0]}", f"that of {names[1]}"))
            raise TransformError(report(where, what, found, "the same structure from both"))
        wrong = [
            (f"{path} is {leaves_.text(a)} of {names[0]} and {leaves_.text(b)} of {names[1]}", _way(a, b, path, names))
            for path, a, b in zip(one.paths(), one.leaves, other.leaves, strict=True)
            if facts(a) != facts(b)
        ]
        if wrong:
            ways = dict.fromkeys(way for _, way in wrong if way)
            fix = "a.to(b.dtype), torch.zeros_like(b) where nothing is computed"
            error = report(where, what, [said for said, _ in wrong], "; ".join(ways) or fix)
            if any(leaves_.facts(a)[:2] != leaves_.facts(b)[:2] for a, b in zip(one.leaves, other.leaves)):
                raise TransformError(error)
            differ = LayoutsDiffer(error)
            differ.said = f"{where} has to read which branch runs: {wrong[0][0]}"
            differ.said += f"; with {'; '.join(ways)} it is a call of the plan" if ways else ""
            raise differ


def _way(a: torch.Tensor, b: torch.Tensor, path: str, names: tuple[str, str]) -> str:
    """What makes layouts or types of two branches one."""
    (*shapes, lies, type_), (*other_shapes, other_lies, other_type) = leaves_.facts(a), leaves_.facts(b)
    if shapes != other_shapes:
        return ""
    if lies != other_lies:
        name, goal = (names[1], lies) if lies is not None else (names[0], other_lies)
        return f"vfn.with_sharding({path}, {goal}) in {name}"
    for name, one, other in ((names[0], type_, other_type), (names[1], other_type, type_)):
        if more := sorted(other.varying - one.varying):
            return f"vfn.pvary({path}, {more[0] if len(more) == 1 else tuple(more)!r}) in {name}"
    return ""
