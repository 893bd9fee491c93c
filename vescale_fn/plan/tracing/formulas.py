"""A formula of what another formula gives, for the same leaves, becomes a part of that one's call.

An optimiser's update is one formula of each leaf, and adding it to the parameter the next one: as two calls, each leaf of the
update would be a value of the plan, which every pass looks at.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from ..._core import torch_internals
from ..ir.graph import calls, value
from ..ir.mapped import Mapped
from ..ir.nested import ends, extracted


class Formula(NamedTuple):
    """A formula of one row.

    Attributes:
        nodes: its calls.
        given: what it is given: of columns first.
        gives: its results.
    """

    nodes: Sequence[fx.Node]
    given: Sequence[fx.Node]
    gives: Sequence[fx.Node]


def recorded(
    recorder: Any, formula: Formula, columns: list[list[fx.Node]], numbers: list[fx.Node], vals: list[Any]
) -> list[Any]:
    """Record a formula for all rows.

    Args:
        recorder: at work.
        columns, numbers: what it is given: of each row, and of all alike.
        vals: stand-ins of what it gives: the first result of all rows, then the next.
    """
    rows = len(columns[0])
    earlier = next((call for column in columns if (call := _call_of(recorder, column)) is not None), None)
    if earlier is not None and _may_join(recorder, earlier, [*columns, numbers]):
        _join(earlier, formula, columns, numbers)
        return recorder.more_results(earlier, vals)
    body = extracted(formula.nodes, formula.given, formula.gives)
    node, made = recorder.called(Mapped(bodies=(body,), rows=rows), (*columns, *numbers), vals)
    recorder.formulas[node] = len(recorder.writes)
    return made


def _call_of(recorder: Any, column: Sequence[fx.Node]) -> Any:
    """The call of an earlier formula for the same rows of which a column is one result; None where it is none."""
    if column[0].target is not operator.getitem or column[0].args[0] not in recorder.formulas:
        return None
    call, first = column[0].args
    rows = call.target.rows  # type: ignore[union-attr]
    same = rows == len(column) and first % rows == 0  # type: ignore[operator]
    return call if same and all(x.args == (call, first + i) for i, x in enumerate(column)) else None  # type: ignore[operator]


def _may_join(recorder: Any, earlier: fx.Node, given: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether all that a formula is given is there at an earlier call of another one, as it is now, and nothing between them
    needs memory besides, so that it makes no difference for that."""
    if recorder.formulas[earlier] != len(recorder.writes) or torch_internals.in_backward_pass():
        return False
    between = set[fx.Node]()
    for node in reversed(earlier.graph.nodes):
        if node is earlier:
            break
        maker = node.args[0] if node.target is operator.getitem else node
        if maker is not earlier:
            if maker not in recorder.formulas and _size(node) > 1:
                return False
            between.add(node)
    return between.isdisjoint(x for column in given for x in column)


def _size(node: fx.Node) -> int:
    x = value(node)
    return x.numel() if isinstance(x, torch.Tensor) else 2


def _join(call: fx.Node, formula: Formula, columns: list[list[fx.Node]], numbers: list[fx.Node]) -> None:
    """Let an earlier call compute a formula of its results, too."""
    target: Any = call.target
    body, count = target.bodies[0], target.columns
    places, outs = ends(body)
    known: dict[Any, fx.Node] = {_key(x): place for x, place in zip(call.args, places, strict=True)}
    same: dict[fx.Node, fx.Node] = {}  # what stands for what the formula is given: in the body
    new: list[tuple[Any, fx.Node]] = []
    for x, place in zip((*columns, *numbers), formula.given, strict=True):
        one: Any = x[0] if isinstance(x, list) else x
        if one.target is operator.getitem and one.args[0] is call:
            same[place] = outs[one.args[1] // target.rows]
        elif place_known := known.get(_key(x)):
            same[place] = place_known
        else:
            new.append((x, place))
    lists, others = ([one for one in new if isinstance(one[0], list) is kind] for kind in (True, False))
    given = [*places[:count], *(place for _, place in lists), *places[count:], *(place for _, place in others)]
    nodes, gives = [*calls(body), *formula.nodes], [*outs, *formula.gives]
    call.target = replace(target, bodies=(extracted(nodes, given, gives, same),))
    args = (*call.args[:count], *(x for x, _ in lists), *call.args[count:], *(x for x, _ in others))
    call.args = args  # type: ignore[assignment]


def _key(x: Any) -> Any:
    return tuple(x) if isinstance(x, (list, tuple)) else x
