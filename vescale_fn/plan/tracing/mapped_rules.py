"""A formula of one leaf, such as an optimiser's update, recorded once for many leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..._core.sharding.layout import contiguous_stride
from ..ir import inplace
from ..ir.graph import has_effect, is_aten, name_of, nbytes, value
from ..ir.mapped import COLUMN, LIMIT
from ..ir.nested import reached
from . import formulas
from .formulas import Formula
from .frame import Frame

Rule = Callable[..., Sequence[Any]]
Row = tuple[Any, ...]


def recorded(recorder: Any, rule: Rule, columns: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """What a formula gives for each row.

    Args:
        recorder: at work.
        rule: of the tensors and other values of a row, of which it asks no shape.
        columns: plain tensors that are alike but for their shapes and how they lie; or other values, the same in all rows.
    """
    rows: list[Row] = list(zip(*columns, strict=True))
    kinds: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        kinds.setdefault(_kind(row), []).append(i)
    found: list[Any] = [None] * len(rows)
    for kind, members in kinds.items():
        own = [rows[i] for i in members]
        one = None if kind is None or len(own) == 1 else _OneRow(recorder, rule, own)
        outs = one.of_all(own) if one is not None and one.fits(own) else [rule(*row) for row in own]
        for i, out in zip(members, outs, strict=True):
            found[i] = out
    return found


def _kind(row: Row) -> Any:
    """What rows have alike that share a body; None for one that does not."""
    tensors = [x for x in row if isinstance(x, torch.Tensor)]
    shape, ids = tensors[0].shape, list(map(id, tensors))
    if not shape or any(x.shape != shape or nbytes(x) > LIMIT for x in tensors):
        return None
    same, strides = tuple(map(ids.index, ids)), [x.stride() for x in tensors]
    return same if strides.count(contiguous_stride(shape)) == len(strides) else (same, shape, *strides)


class _OneRow:
    """A formula as recorded of the largest of some rows of one kind."""

    def __init__(self, recorder: Any, rule: Rule, rows: Sequence[Row]) -> None:
        self.recorder, self.frame = recorder, Frame(recorder.frame)
        row = max(rows, key=lambda row: max(nbytes(x) for x in row if isinstance(x, torch.Tensor)))
        self.column = {id(x): j for j, x in reversed([*enumerate(row)]) if isinstance(x, torch.Tensor)}
        with recorder.within(self.frame):
            given = {i: recorder.input(row[j], "x") for i, j in self.column.items()}
            self.outs = list(rule(*(given.get(id(x), x) for x in row)))
        self.columns = {x._plan_node: self.column[i] for i, x in given.items()}  # type: ignore[attr-defined]
        self.nodes = [x for x in self.frame.graph.nodes if x.op == "call_function"]
        self.gives = list(
            dict.fromkeys(x for x in map(self.node, self.outs) if x is not None and x not in self.columns)
        )
        self.live = reached(self.gives)
        self.shape = next(iter(given.values())).shape

    def node(self, x: Any) -> fx.Node | None:
        """The node of a result that is a value of the formula."""
        ours = isinstance(x, torch.Tensor) and self.recorder.is_ours(x)
        found = x._plan_node if ours else None  # type: ignore[attr-defined]
        return found if found is not None and found.graph is self.frame.graph else None

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether the formula is one of a row's tensors and of numbers alone, and of any shape if the rows are of several."""
        shared = (value(x) for x in self.frame.places)
        several = any(x.shape != self.shape for row in rows for x in row[:1])
        return (
            not self.live.isdisjoint(self.columns)
            and all(is_aten(x) and not has_effect(x) and isinstance(value(x), torch.Tensor) for x in self.nodes)
            and not any(isinstance(x, torch.Tensor) and x.ndim for x in shared)
            and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in self.outs)
            and all(inplace.is_pointwise(x) or name_of(x) == "_to_copy" for x in (self.nodes if several else ()))
            and all(value(x).shape == self.shape for x in self.gives)
        )

    def of_all(self, rows: Sequence[Row]) -> list[Sequence[Any]]:
        """Record the call for all rows, and give their results."""
        recorder = self.recorder
        used = [x for x in self.columns if x in self.live]
        for x in used:
            x.meta[COLUMN] = True
        closed = [
            (x, place) for x, place in zip(self.frame.constants, self.frame.places, strict=True) if place in self.live
        ]
        nodes = [x for x in self.nodes if x in self.live]
        args = [[recorder.node(row[self.columns[x]]) for row in rows] for x in used]
        numbers = [recorder.outer(x) for x, _ in closed]
        for x, (_, place) in zip(numbers, closed):
            if "alike" in place.meta:
                x.meta["alike"] = True
        vals = [self.like(value(x), row) for x in self.gives for row in rows]
        places = [*used, *(place for _, place in closed)]
        made = formulas.recorded(recorder, Formula(nodes, places, self.gives), args, numbers, vals)
        results: dict[Any, list[Any]] = {x: made[i * len(rows) : (i + 1) * len(rows)] for i, x in enumerate(self.gives)}
        results |= {x: [row[j] for row in rows] for x, j in self.columns.items()}
        same = lambda x: [x] * len(rows)
        return list(zip(*(results.get(self.node(x)) or same(x) for x in self.outs), strict=True))

    def like(self, x: torch.Tensor, row: Row) -> torch.Tensor:
        """A stand-in of what a row gets where the recorded one gets `x`."""
        shape = next(one.shape for one in row if isinstance(one, torch.Tensor))
        return self.recorder.fake_like(x) if shape == x.shape else self.recorder.fake_dense(x, shape)
