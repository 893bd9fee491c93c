"""A step as somebody would write it who pastes a chosen layout into it: with `with_sharding` in some of its lines."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .._core import torch_internals
from .._core.arrays import array
from .._core.arrays.array import is_array, mesh_of, spec_of
from .._core.arrays.placement import with_sharding
from .._core.base import op_arguments, tree
from .._core.base.containers import opened
from .._core.sharding.index_map import axes_of
from .._core.sharding.layout import type_text
from .._core.sharding.placements import normal
from .._core.sharding.spec import P
from ..plan.ir.memory_use import place
from .apply import differing, other
from .recording import Recording
from .search.layouts import Layouts
from .user_calls import UserCall, UserCalls, called

RETURNS = "return"


@dataclass(frozen=True)
class MoveToWrite:
    """A line to write.

    Attributes:
        line: where, ``file:line``.
        op: the function of torch that is called there, or "return".
        gives: whether it is what the function gives that is to move; or what it is given.
        number: which of the tensors that it gives, or is given.
        shape, dtype, lies: of this tensor: as it lies without the line.
        spec: how it is to lie.
        value: in words: an argument by its path; "" for others.
        count: how often this moves something: once for each of equal layers, say.
    """

    line: str
    op: str
    gives: bool
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    lies: P
    spec: P
    value: str = ""
    count: int = 1

    @property
    def place(self) -> tuple[Any, ...]:
        """By what it is known where a line is meant."""
        return self.line, self.op, self.gives, self.number, self.shape, self.dtype, self.lies

    def __repr__(self) -> str:
        which = f"what {self.op} gives" if self.gives else f"what {self.op} is given"
        which = f"{self.value}, before {self.op}" if self.value else which
        which = "what the step returns" if self.op == RETURNS else which
        often = f", {self.count} times" if self.count > 1 else ""
        kind = type_text(self.shape, self.dtype, self.lies)
        return f"{place(self.line)}\n  {which}, {kind}{often}: x = vfn.with_sharding(x, {self.spec!r})"


class WrittenStep:
    """A step that runs as if lines were written in it.

    Args:
        recorded: the step.
        lines: to be written.
        layouts: how its results are to lie, and the mesh.

    Raises:
        SpecError: it is called with other arguments than it was recorded for, which may lie otherwise at these lines.
    """

    def __init__(self, recorded: Recording, lines: Sequence[MoveToWrite], layouts: Layouts) -> None:
        functools.update_wrapper(self, recorded.f)
        self.__name__ = recorded.name
        self.recorded, self.lines, self.layouts = recorded, tuple(lines), layouts

    @torch_internals.not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs) if kwargs else (args,)
        leaves, treedef = opened(given, "choice", lambda: tree.paths(given, "args"), numpy=True, modules=True)
        if wrong := differing(self.recorded, leaves, treedef):
            raise other(self.recorded, wrong)
        written = [line for line in self.lines if line.op != RETURNS]
        with _Written(written, self.layouts.mesh) if written else nullcontext():
            out = self.recorded.f(*args, **kwargs)
        return returned(out, self.layouts.outputs, next((mesh_of(x) for x in leaves if is_laid_out(x)), None))


def returned(out: Any, outputs: Sequence[P | None], mesh: Any = None) -> Any:
    """The result of a step in its layout: arrays are moved, and tensors that are made of constants alone sharded.

    Args:
        out: the result.
        outputs: the layout of each leaf; None for one that stays as it is.
        mesh: on which tensors are sharded; None: they stay tensors.
    """
    leaves, treedef = tree.flatten(out)
    if len(leaves) != len(outputs):
        return out
    for i, (x, spec) in enumerate(zip(leaves, outputs)):
        if mesh is not None and spec is not None and isinstance(x, torch.Tensor) and not is_laid_out(x):
            leaves[i] = array.place(x, mesh, normal(spec, axes_of(mesh), x.shape), "a result of the step")
    moving = [i for i, (x, spec) in enumerate(zip(leaves, outputs)) if spec is not None and is_laid_out(x)]
    if not moving:
        return tree.unflatten(treedef, leaves)
    moved = with_sharding([leaves[i] for i in moving], [outputs[i] for i in moving])
    for i, x in zip(moving, moved, strict=True):
        leaves[i] = x
    return tree.unflatten(treedef, leaves)


def is_laid_out(x: Any) -> bool:
    """Whether a value is an array, in transforms, too."""
    return isinstance(x, torch.Tensor) and is_array(torch_internals.peel(x))


def lying(x: torch.Tensor, axes: Mapping[str, int]) -> P:
    """How an array lies."""
    return normal(spec_of(x), dict(axes), x.shape)


def moved_in(xs: Any, specs: Mapping[int, P]) -> Any:
    """What a function is given, or gives, with some of its tensors, by their numbers, moved."""
    numbers = itertools.count()
    tensors = (x for x in op_arguments.tensors_in(xs))
    new = [with_sharding(x, specs[i]) if (i := next(numbers)) in specs else x for x in tensors]
    return op_arguments.with_tensors(xs, iter(new)) if specs else xs


class _Written(UserCalls):
    """The mode in which lines count as written."""

    def __init__(self, lines: Sequence[MoveToWrite], axes: Mapping[str, int]) -> None:
        super().__init__()
        self._lines = {line.place: line.spec for line in lines}
        self._names, self._axes = {(line.line, line.op) for line in lines}, axes

    def called(self, line: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call = called(line, func, ())
        if (line, call.name) not in self._names:
            return func(*args, **kwargs)
        args, kwargs = self._brought(call, False, (args, kwargs))
        return self._brought(call, True, func(*args, **kwargs))

    def _brought(self, call: UserCall, gives: bool, xs: Any) -> Any:
        found = dict[int, P]()
        for i, x in enumerate(op_arguments.tensors_in(xs)):
            if is_laid_out(x):
                key = call.line, call.name, gives, i, tuple(x.shape), x.dtype, lying(x, self._axes)
                if key in self._lines:
                    found[i] = self._lines[key]
        return moved_in(xs, found)
