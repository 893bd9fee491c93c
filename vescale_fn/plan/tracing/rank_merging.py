"""Calls of which each rank makes its own, as calls that all ranks make.

Where they differ in numbers alone they become one, of `PerRank` numbers. Where some ranks do something else than others, all do
both, and each goes on with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.base import op_arguments
from ..._core.distributed.collectives import Collective
from ..._core.distributed.rows import Holders, numbered
from ..ir.graph import Step, value, written
from ..ir.per_rank import PerRank
from ..ir.rank_choices import one_of
from ..ir.ranks_as_one import alike
from .frame import MergedCall, RanksApart


class RankCalls(NamedTuple):
    """What was recorded of some ranks: the calls, and what they give in the end."""

    nodes: list[fx.Node]
    out: Any

    def kind(self) -> Any:
        """What calls have in common that differ in numbers alone."""
        for node in self.nodes:
            if isinstance(node.target, (Collective, Step)) or written(node):
                raise RanksApart
        return tuple(
            (node.target, len(node.args), *node.kwargs, *map(_lies, _flat(value(node)))) for node in self.nodes
        )


def merged(rows: Any, calls: Sequence[RankCalls], numbers: Holders) -> Any:
    """What all calls give, as one.

    Args:
        rows: notes them: a `RankRows`.
        numbers: for each rank, which of the calls are its own.
    """
    kinds = numbered((calls_.kind(), tuple(map(_lies, _flat(calls_.out)))) for calls_ in calls)
    outs = []
    for kind in range(max(kinds) + 1):
        members = [i for i, other in enumerate(kinds) if other == kind]
        of_ranks = [members.index(i) if i in members else 0 for i in numbers]
        merging = _Merging(rows, [calls[i] for i in members], tuple(of_ranks))
        outs.append(merging.one([calls[i].out for i in members]))
        merging.carry_out()
    return outs[0] if len(outs) == 1 else _chosen(rows, PerRank([kinds[i] for i in numbers]), outs)


def _chosen(rows: Any, which: PerRank, outs: Sequence[Any]) -> Any:
    """What each rank has of what several kinds of calls give."""
    first, recorder = outs[0], rows.recorder
    if isinstance(first, torch.Tensor):
        fakes = list(map(recorder.fake, outs))
        if not all(alike(x, fakes[0]) for x in fakes):
            raise RanksApart
        _, found = recorder.called(one_of(len(outs)), (which, *map(recorder.node, fakes)), recorder.fake_like(fakes[0]))
        rows.parted.update(map(torch_internals.memory_number, (found, *fakes)))
        return found
    if isinstance(first, (list, tuple)) and all(type(x) is type(first) and len(x) == len(first) for x in outs):
        return type(first)([_chosen(rows, which, column) for column in zip(*outs)])
    raise RanksApart


class _Merging:
    """Calls that differ in numbers alone, as one.

    Args:
        rows: notes them.
        calls: what some ranks do, and others with other numbers.
        numbers: for each rank, which of the calls are its own, or may be.
    """

    def __init__(self, rows: Any, calls: Sequence[RankCalls], numbers: Holders) -> None:
        self.rows, self.numbers = rows, numbers
        self.calls = [one.nodes for one in calls]
        self.places = [{node: i for i, node in enumerate(nodes)} for nodes in self.calls]

    def one(self, xs: Sequence[Any]) -> Any:
        """What stands for what there is in one place of each."""
        first = xs[0]
        if isinstance(first, torch.Tensor):
            return value(self._node([self.rows.recorder.node(x) for x in xs]))
        if isinstance(first, fx.Node):
            return self._node(xs)
        if isinstance(first, (list, tuple)):
            if any(type(x) is not type(first) or len(x) != len(first) for x in xs):
                raise RanksApart
            return type(first)([self.one([x[i] for x in xs]) for i in range(len(first))])
        if all(type(x) is type(first) and repr(x) == repr(first) for x in xs):
            return first
        if all(type(x) is int for x in xs):
            return PerRank([xs[i] for i in self.numbers])
        raise RanksApart

    def _node(self, xs: Sequence[fx.Node]) -> fx.Node:
        at = self.places[0].get(xs[0])
        if all(x is xs[0] for x in xs) or (at is not None and all(row.get(x) == at for row, x in zip(self.places, xs))):
            return xs[0]
        parts = [(xs[0], self.numbers, i) for i in range(1, len(xs))]
        if [getattr(x, "of", None) for x in xs[1:]] == parts:  # which calls before them gave, and are one already
            return xs[0]
        return self.rows.constant([xs[i] for i in self.numbers])

    def carry_out(self) -> None:
        """Leave the first rank's calls, as those of all."""
        for nodes in zip(*self.calls):
            first = nodes[0]
            args = tuple(self.one([x.args[i] for x in nodes]) for i in range(len(first.args)))
            kwargs = {key: self.one([x.kwargs[key] for x in nodes]) for key in first.kwargs}
            first.args, first.kwargs = args, kwargs
        for number, row in enumerate(self.calls[1:], 1):
            for one, node in zip(self.calls[0], row, strict=True):
                for x in op_arguments.tensors_in(value(node)):
                    x._plan_node = MergedCall(one, self.numbers, number, self.rows.merging)  # type: ignore[attr-defined]
            for node in reversed(row):
                node.graph.erase_node(node)


def _flat(x: Any) -> Sequence[Any]:
    return x if isinstance(x, (list, tuple)) else (x,)


def _lies(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    return tuple(map(_lies, x)) if isinstance(x, (list, tuple)) else type(x)
