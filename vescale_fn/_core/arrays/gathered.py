"""The decision for what nothing else is known of: the op on gathered arguments, as on one device. Right for every op."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import torch_internals
from ..base import context
from ..base.array_notes import root_of
from ..base.errors import InPlaceError
from ..base.messages import op_text, report
from ..base.op_arguments import tensors_in, with_tensors
from ..distributed import blocks
from ..distributed.mesh import communicator_of
from ..sharding.layout import WHOLE, layout, spec_for, text
from ..sharding.spec import P
from . import in_place, reshard_plan
from .aliasing import note_views
from .array_values import put_back, steps_to_whole, whole_tensor
from .decision import Decision
from .deferred_views import deferred, elements_move, state_offsets
from .lazy_layout import note_stated, note_view
from .on_blocks import run_on_blocks
from .places import not_here
from .refusals import OVERLAP
from .rules.traits import STAYS_PLAIN
from .strict import refuse_moves


@dataclass(frozen=True, eq=False, kw_only=True)
class Gathered(Decision):
    """The op on gathered arguments; what it wrote goes back to where it lies."""

    many: Any  # tuple or list, where the op gives several results
    ruled: bool  # the op has a rule, which does not cover this call
    view: bool  # results alias the first argument
    offsets: tuple[int, ...]  # of a view: where on one device each result begins in the memory of the first argument

    def run(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if blocks.written(self.func):
            return in_place.write(self, cls, args, kwargs, True)
        if self.view and elements_move(args[0], layout(torch_internals.spec(args[0])) != WHOLE):
            note_stated(args[0])  # what shows elements that lie elsewhere knows where they do
            return deferred(cls, args, kwargs, self)
        return self.run_now(cls, args, kwargs)

    def moves_of(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[tuple[int, tuple[reshard_plan.MoveStep, ...], P]]:
        tensors = enumerate(tensors_in(args, kwargs))
        return [(i, steps_to_whole(x), WHOLE) for i, x in tensors if isinstance(x, DTensor)]

    def spec_of_result(self, i: int, shown: torch.Tensor) -> Any:
        """How a result lies; `shown` is that result, perhaps in a tensor without values."""
        return spec_for(self.mesh, WHOLE, shown.shape, tuple(shown.stride()), shown.dtype)

    def run_now(self, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Carry it out, after all that may be refused; a view, too, is read."""
        func = self.func
        tensors = tensors_in(args, kwargs)
        written = {id(x) for x in tensors_in(blocks.written_arguments(func, args, kwargs))}
        targets = list({id(x): x for x in tensors if id(x) in written and isinstance(x, DTensor)}.values())
        _refuse_overlap(func, targets)
        if context.is_strict():
            refuse_moves(func, args, kwargs, self.moves_of(args, kwargs))
        if targets and not_here(self.mesh, tensors):
            return _only_noted(func, args, kwargs, targets)
        whole: dict[int, Any] = {}  # an array that is two arguments is one value: what is written is read
        moved = False
        for x in tensors:
            if id(x) not in whole:
                whole[id(x)], copied = (
                    whole_tensor(func, x, id(x) in written, self.view, self.ruled)
                    if isinstance(x, DTensor)
                    else (x, False)
                )
                moved = moved or copied
        all_args, all_kwargs = with_tensors((args, kwargs), iter([whole[id(x)] for x in tensors]))
        if self.view:  # of each rank's own memory: ranks may hold the same value in blocks of their own
            out = run_on_blocks(func, all_args, all_kwargs, self.mesh, None)
        else:
            out = func(*all_args, **all_kwargs)
        for x in targets:
            put_back(func, x, whole[id(x)])
            in_place.note_written(func, x)
        result = self._wrapped(cls, out, {id(whole[id(x)]): x for x in tensors if id(x) in written})
        if func in STAYS_PLAIN:
            result = tuple(out[i] if i == STAYS_PLAIN[func] else r for i, r in enumerate(result))
        if self.view:
            results = list(result) if isinstance(result, (list, tuple)) else [result]
            state_offsets(func, args, results, self.offsets)
            note_views(args[0], results, moved)
            note_view(args[0], func, args, result)
        return result

    def _wrapped(self, cls: Any, o: Any, targets: dict[int, Any]) -> Any:
        """A result as arrays: `targets` are those that were written, by the id of the whole tensor that stood for each."""
        if isinstance(o, (list, tuple)):
            return type(o)(self._wrapped(cls, one, targets) for one in o)
        if not isinstance(o, torch.Tensor) or o.layout is not torch.strided:
            return o  # a sparse result is a plain tensor, the same on every rank
        if torch_internals.is_lazy(o):
            o = torch_internals.materialized(o)
        if id(o) in targets:
            return targets[id(o)]
        return torch_internals.new_dtensor(cls, communicator_of(self.mesh).held(o), self.spec_of_result(0, o))


def _only_noted(func: Any, args: Sequence[Any], kwargs: dict[str, Any], targets: Iterable[Any]) -> Any:
    """What an op gives that writes these arrays, on other ranks than this one."""
    for x in targets:
        in_place.note_written(func, x)
    given, count = blocks.written_arguments(func, args, kwargs), len(torch_internals.schema(func).returns)
    return None if not count else given[0] if count == 1 else tuple(given)


def _refuse_overlap(func: Any, targets: Iterable[Any]) -> None:
    """Two views of one memory, each written whole, would undo each other's writes."""
    roots: dict[int, Any] = {}
    for x in targets:
        root = id(root_of(x))
        if root in roots:
            raise InPlaceError(
                report(
                    op_text(func), OVERLAP, [f"they are {text(roots[root])} and {text(x)}"], "one call for each of them"
                )
            )
        roots[root] = x
