"""Calls that are carried out as a few others where a dim is split that they sum over: a softmax over classes of which each rank
has a part, and the loss of it.

Their rules keep that dim whole (see `compositions`). Here it has a label, and a price: the sums that ranks exchange, of one
number a row, and what the steps read and write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import fx

from ..._core.arrays.rules.compositions import COMPOSED
from ..._core.arrays.rules.rule import Row, Rule, T
from ..._core.base import dtypes
from ...plan.ir import graph as plan

APART = "apart"  # the label of such a dim


class StepsPrice(NamedTuple):
    """What it takes to carry a call out as its steps.

    Attributes:
        argument: the number of the operand whose dim is split.
        size: of that dim.
        width: the bytes of a number as the steps compute.
        sums: how many times ranks exchange a number for each row.
        passes: the bytes that each step reads and writes for an element.
    """

    argument: int
    size: int
    width: int
    sums: int
    passes: tuple[float, ...]


def composed(
    node: fx.Node, rule: Rule, named: Mapping[str, Any], shapes: Sequence[Sequence[int] | None]
) -> tuple[Rule, StepsPrice] | None:
    """The rule of a call with a label for the dim that its steps sum over, and their price; None where there are none.

    Args:
        node: the call.
        rule: of the call.
        named: its arguments by name, tensors as `T`.
        shapes: of its results.
    """
    name = str(node.target).removeprefix("aten.")
    found, of = COMPOSED.get(name), _STEPS.get(name.removesuffix(".default"))
    if found is None or of is None:
        return None
    x: T = named[found.argument]
    (dim,) = found.dims(dict(named), x.ndim) or (None,)
    if dim is None:
        return None
    given = {t.index: t.shape for t in named.values() if isinstance(t, T)}
    ins = tuple(_labelled(row, given[i], x.shape, dim) for i, row in enumerate(rule.ins))
    outs = tuple(_labelled(row, shape or (), x.shape, dim) for row, shape in zip(rule.outs, shapes, strict=True))
    new = replace(rule, ins=ins, outs=outs)
    if "nll_loss_forward" in name:
        adds = rule.fold == "sum" and bool(rule.sums)  # of the rule; what its steps give is added up at once
        new = replace(new, sums=rule.sums | {APART}, fold="sum" if adds else "total")
    sums, steps, halves = of
    wide, small = dtypes.wide(x.dtype).itemsize, x.dtype.itemsize
    casts = (float(wide + small),) * (halves if wide > small else 0)
    passes = (*(float(n) * wide for n in steps), *casts)
    return new, StepsPrice(x.index, x.shape[dim], wide, 0 if _is_known(node) else sums, passes)


def _labelled(row: Row, shape: Sequence[int], like: Sequence[int], dim: int) -> Row:
    """A row in which the dim has its label: of what is as large as the argument, and of a number for each class."""
    if tuple(shape) == tuple(like):
        return (*row[:dim], APART, *row[dim + 1 :])
    return (APART,) if row == (None,) and tuple(shape) == (like[dim],) else row


def _is_known(node: fx.Node) -> bool:
    """Whether the steps know the sum over the classes: of a loss each example's is that at its target."""
    grad = node.args[0]
    made = plan.name_of(grad) if isinstance(grad, fx.Node) and grad.op == "call_function" else ""
    return made.startswith("nll_loss") and "backward" in made and grad.args[3] is None  # type: ignore[union-attr]


# of each op how many sums of rows its steps take, how many numbers each of them reads and writes for an element, and how many
# of its tensors are halves that are computed with in float32
_STEPS: dict[str, tuple[int, tuple[float, ...], int]] = {
    "_softmax": (2, (1, 2, 2, 1, 2), 2),
    "_log_softmax": (2, (1, 2, 2, 1, 2), 2),
    "_softmax_backward_data": (1, (3, 1, 2, 3), 3),
    "_log_softmax_backward_data": (1, (2, 2, 3), 3),
    "nll_loss_forward": (0, (1, 0.25, 2, 2.25, 1, 1.25, 1), 1),
    "nll_loss2d_forward": (0, (1, 0.25, 2, 2.25, 1, 1.25, 1), 1),
    "nll_loss_backward": (0, (1, 0.25, 1.25), 1),
    "nll_loss2d_backward": (0, (1, 0.25, 1.25), 1),
}
