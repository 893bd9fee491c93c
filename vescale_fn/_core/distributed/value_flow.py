"""While collectives are logged: which value each one moved, and what became of the result.

A value is known by its memory, which is held weakly, so that a log keeps nothing alive. What an op that takes each element by
itself makes of a moved value counts as that value; so does a view of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import torch_internals
from ..base import context, op_lines
from ..sharding.layout import type_text
from ..sharding.spec import P, from_split_axes
from .blocks import Blocks


class KeptPart(NamedTuple):
    """The part that each rank then kept of a value that it had been given whole: as which spec, over which axes, and where."""

    spec: P | None  # None: its dims are not those of what moved
    axes: tuple[str, ...]
    line: str
    backward: bool


@dataclass(eq=False)
class Moved:
    """A value that moved: its number, the same for the same value, its type before, and what became of the result."""

    number: int
    value: str
    source: P
    backward: bool
    kept: list[KeptPart] = field(default_factory=list)  # where each rank kept its part alone
    whole: list[str] = field(default_factory=list)  # what used more than that

    def counts(self, backward: bool) -> bool:
        """Whether a use counts: what a backward pass does with values of the forward pass follows from how they lay there."""
        return self.backward or not backward


class _Result(NamedTuple):
    """A local value with moved ones in it."""

    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    of: dict[Moved, bool]  # what it was made of; whether its dims are those of what moved


class ValueFlow:
    """What is known, while a log records, of the values that move."""

    def __init__(self) -> None:
        self.moving: Moved | None = None  # what the collectives that run now are for
        self.given: list[torch.Tensor] | None = None  # what moves have brought for the op that runs now
        self._numbers: dict[Any, int] = {}
        self._results: dict[Any, _Result] = {}
        self._count, self._most = 0, 1000

    def __reduce__(self) -> Any:  # what stands for memory is of this process, and of this object
        return ValueFlow, ()

    def begin(self, x: Any, shape: Sequence[int], steps: Sequence[Any]) -> None:
        """A local value of an array of this shape is about to be moved by these steps."""
        x, first = _one(x), steps[0]
        line, backward = op_lines.here()
        slices = list(itertools.takewhile(lambda step: step.kind == "slice", steps))
        if not slices:
            self._use(x, first.kind)
        else:
            axes = tuple(axis for step in slices for axis in step.axes)
            for moved, same in self._made_of(x).items():
                if moved.counts(backward):
                    spec = from_split_axes(slices[-1].after) if same and not first.apart else None
                    moved.kept.append(KeptPart(spec, axes, line, backward))
        sums = [axis for step in steps if step.kind in ("all_reduce", "reduce_scatter") for axis in step.axes]
        source = P() if first.apart else from_split_axes(first.before, sums)
        place = sorted((step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size != 1)
        key = *_memory(x), torch_internals.version(x), tuple(place)
        if key not in self._numbers:
            self._count += 1
            self._numbers[key] = self._count
        self.moving = Moved(self._numbers[key], type_text(shape, x.dtype, source), source, backward)

    def end(self, x: Any | None) -> None:
        """The move is done, and gave this; None: it failed."""
        moved, self.moving = self.moving, None
        if x is not None and moved is not None:
            self._note(_one(x), {moved: True})

    def give(self, value: torch.Tensor, copy: torch.Tensor) -> None:
        """The op that runs is given `copy`, of a value that has perhaps been moved for it."""
        if copy is not value:
            self._note(copy, self._made_of(value))
        if self.given is not None:
            self.given.append(copy)

    def use(self, name: str, inputs: Iterable[Any], outs: Iterable[Any], by_element: bool) -> None:
        """An op has used these local values, and those that it was given, and made others."""
        results = {_memory(_one(out)): (_one(out), dict[Moved, bool]()) for out in outs}
        for x in (*(self.given or ()), *map(_one, inputs)):
            if _memory(x) in results:  # a view of it
                continue
            if not by_element or any(out.shape != x.shape for out, _ in results.values()):
                self._use(x, name)
                continue
            for moved, same in self._made_of(x).items():
                for out, of in results.values():
                    of[moved] = same and out.stride() == x.stride() and of.get(moved, True)
        for out, of in results.values():
            self._note(out, of)

    def _use(self, x: torch.Tensor, by: str) -> None:
        """All of a local value is used."""
        if made_of := self._made_of(x):
            backward = op_lines.here()[1]
            for moved in made_of:
                if moved.counts(backward):
                    moved.whole.append(by)

    def _made_of(self, x: torch.Tensor) -> dict[Moved, bool]:
        """What moved values a local value consists of, and whether its dims are theirs."""
        found = self._results.get(_memory(x)) if self._results else None
        if found is None:
            return {}
        if found.version != torch_internals.version(x):
            for moved in self._results.pop(_memory(x)).of:
                moved.whole.append("a write")
            return {}
        same = (x.shape, x.stride()) == (found.shape, found.stride)
        return {moved: same and before for moved, before in found.of.items()}

    def _note(self, x: torch.Tensor, of: dict[Moved, bool]) -> None:
        if not of:
            return
        self._results[_memory(x)] = _Result(torch_internals.version(x), x.shape, x.stride(), of)
        if len(self._results) + len(self._numbers) > self._most:  # of memory that is gone nothing will be seen
            self._results = {key: result for key, result in self._results.items() if not key[0].expired()}
            self._numbers = {key: number for key, number in self._numbers.items() if not key[0].expired()}
            self._most = 1000 + 2 * (len(self._results) + len(self._numbers))


def give(value: Any, copy: Any) -> None:
    """The op that runs is given `copy`, of a value that has perhaps been moved for it."""
    for log in context.logs():
        log.flow.give(_one(value), _one(copy))


def read(value: Any) -> None:
    """A local value leaves the arrays: all of it counts as used."""
    for log in context.logs():
        log.flow.use("a read", [value], (), False)


@contextlib.contextmanager
def of_one_op() -> Iterator[list[ValueFlow]]:
    """Run what is one op by itself, perhaps a part of another one: what it is given is its own."""
    flows = [log.flow for log in context.logs()]
    given = [flow.given for flow in flows]
    for flow in flows:
        flow.given = []
    try:
        yield flows
    finally:
        for flow, before in zip(flows, given, strict=True):
            flow.given = before


def _memory(x: torch.Tensor) -> tuple[Any, ...]:
    """The same for all views of all of a value, and for nothing else."""
    return StorageWeakRef(x.untyped_storage()), x.storage_offset(), x.numel()


def _one(x: Any) -> torch.Tensor:
    """A rank's block, where `x` stands for those of several: what is done with it is done with them all."""
    return x.blocks[0] if type(x) is Blocks else x
