"""How one op on arrays is carried out: decisions that run themselves. Here those without work on blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_internals
from ..base.array_notes import noted, notes_of
from ..base.errors import InPlaceError
from ..base.messages import report
from ..base.op_arguments import bind
from ..base.stateful_draws import refuse_seeded
from ..sharding.layout import layout, spec_for, text
from ..sharding.spec import P
from .refusals import MEMORY, MOVE, STORAGE
from .reshard_plan import MoveStep
from .rules.traits import RETURNS_VIEW_OF_ITSELF


@dataclass(frozen=True, eq=False)
class Decision:
    """How `func` is carried out on arrays on `mesh`, for one set of layouts, shapes and static arguments."""

    func: Any
    mesh: Any

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results, as arrays of class `cls`."""
        raise NotImplementedError

    def moves_of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[int, tuple[MoveStep, ...], P]]:
        """Which tensor arguments move, by which steps, to which layout."""
        return []


@dataclass(frozen=True, eq=False)
class ShapeOnly(Decision):
    """The op asks about shapes alone: its answer is known."""

    answer: Any

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.answer


@dataclass(frozen=True, eq=False)
class Composed(Decision):
    """Carried out as other ops on arrays, each decided on for itself."""

    steps: Callable[[Sequence[Any], dict[str, Any]], Any]

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.steps(args, kwargs)


@dataclass(frozen=True, eq=False)
class MayDraw(Decision):
    """Whether the op draws is a float's doing, of which no decision knows: it is asked each time."""

    then: Decision

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        refuse_seeded(self.func, args, kwargs)
        return self.then.run(cls, args, kwargs)


@dataclass(frozen=True, eq=False)
class ViewOfItself(Decision):
    """An array is made to be a view of itself."""

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x, view = args[0], cls.redispatch(RETURNS_VIEW_OF_ITSELF[self.func], args)
        notes = notes_of(view)
        if notes.moved is not None:
            name = torch_internals.operator_name(self.func).removeprefix("aten::")
            raise InPlaceError(report(f"torch's {name}", MOVE, [f"the array is {text(x)}"], _new_array(name)))
        torch_internals.set_local(x, torch_internals.local(view))
        torch_internals.set_spec(x, torch_internals.spec(view))
        if notes.sums is not None:
            noted(x).sums = notes.sums
        torch_internals.own_shape(self.func, args)
        return x


@dataclass(frozen=True, eq=False)
class StridesOfItself(Decision):
    """An array says other strides of itself: torch's own pooling does so to its result, to call it channels-last."""

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x, size, stride, *_ = args
        bound = bind(self.func, args, kwargs)
        moves_none = all(n == 1 or a == b for n, a, b in zip(size, stride, x.stride()))
        if tuple(size) != tuple(x.shape) or not moves_none or bound["storage_offset"] not in (None, x.storage_offset()):
            refuse(self.func, args, kwargs)
        torch_internals.set_spec(
            x, spec_for(torch_internals.mesh(x), layout(torch_internals.spec(x)), x.shape, tuple(stride), x.dtype)
        )
        torch_internals.own_shape(self.func, args)
        return x


def refuse(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise for what has no answer on a mesh: a stateful draw, a change of storage."""
    name = torch_internals.operator_name(func).removeprefix("aten::")
    refuse_seeded(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags and name != "detach_" or name == "resize_as_":
        instead = (
            "x.copy_(source), or a new name: x = source" if name == "set_" else f"{_new_array(name)}, or x = x.clone()"
        )
        raise InPlaceError(report(f"torch's {name}", STORAGE, fix=instead))
    if name == "as_strided" and notes_of(args[0]).root is not None and not _within(*args):
        raise InPlaceError(
            report(
                "torch's as_strided", MEMORY, [f"the view is {text(args[0])}"], "index the array itself, or x.clone()"
            )
        )


def _new_array(name: str) -> str:
    return f"a new array: x = x.{name.removesuffix('_')}(...)"


def _within(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
    """Whether as_strided shows nothing but the elements of a view: stft cuts its windows so."""
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return offset is None and x.is_contiguous() and last < x.numel()
