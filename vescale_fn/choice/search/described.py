"""A call of a recorded step with its rule: which dims of its tensors may be split together."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.arrays.rules.rule import Call, Parts, Row, Rule, T
from ..._core.arrays.rules.table import find
from ..._core.base.op_arguments import bind, with_tensors
from ...plan.ir import graph as plan
from .composed import StepsPrice, composed

NEW = ("new_zeros", "new_ones", "new_full", "new_empty")  # of an operand that only says which dtype
FREE = ("view", "_unsafe_view", "reshape", "transpose", "t", "permute", "squeeze", "unsqueeze", "alias", "detach")


@dataclass(frozen=True, eq=False)
class Described:
    """A call, or an input, of a recorded step.

    Attributes:
        node: itself.
        operands: the tensors among its arguments, in order: each the node that makes it, and which of its results it is.
        outs: its results without values; None for one that is no tensor.
    """

    node: fx.Node
    operands: tuple[tuple[fx.Node, int], ...]
    outs: tuple[torch.Tensor | None, ...]

    @cached_property
    def rule(self) -> Rule | None:
        """Which dims may be split together; None where there is no rule, and all is whole."""
        return self._read[0]

    @property
    def composition(self) -> StepsPrice | None:
        """What it takes as its steps, where the rule has a label for what these sum over."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[Rule | None, StepsPrice | None]:
        return (None, None) if self.is_input else _rule(self.node, self.outs)

    @property
    def is_input(self) -> bool:
        """Whether it is an argument of the step, or a constant."""
        return self.node.op == "placeholder"

    @cached_property
    def name(self) -> str:
        """What it calls."""
        return "" if self.is_input else plan.name_of(self.node)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the operands."""
        return [tuple(value_of(node, part).shape) for node, part in self.operands]

    @cached_property
    def is_made(self) -> bool:
        """Whether it makes a tensor of nothing, each rank the part that it needs."""
        made = not self.is_input and len(self.outs) == 1 and (not self.operands or self.name in NEW)
        return made and plan.is_aten(self.node) and not plan.written(self.node)

    @cached_property
    def is_elementwise(self) -> bool:
        """Whether each element of its one result depends on the same element of its operands alone."""
        rule = self.rule
        return bool(
            rule is not None
            and len(self.outs) == 1
            and self.operands
            and rule.fold == "sum"
            and not rule.sums
            and (torch.Tag.pointwise in self.node.target.tags or self.name in ("clone", "_to_copy"))  # type: ignore[union-attr]
        )

    @cached_property
    def is_view(self) -> bool:
        """Whether it computes nothing."""
        return not self.is_input and bool(plan.viewed(self.node)) and not plan.written(self.node)

    @property
    def only_renames(self) -> bool:
        """Whether it is a view in which each dim of what it views is found again."""
        return self.name in FREE and self.rule is not None and self.rule.linear == (0,)


def source(node: fx.Node) -> tuple[fx.Node, int]:
    """The call that makes a value, and which of its results it is."""
    if node.target is operator.getitem:
        whole, part = node.args
        return whole, part  # type: ignore[return-value]
    return node, 0


def value_of(node: fx.Node, part: int) -> torch.Tensor:
    """A result of a call, without values."""
    value = plan.value(node)
    return value[part] if isinstance(value, (list, tuple)) else value


def described(graph: fx.Graph) -> list[Described]:
    """The inputs and calls of a graph, in order."""
    return [_described(node) for node in _sites(graph)]


def _sites(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.nodes:
        if node.op == "placeholder" or (node.op == "call_function" and node.target is not operator.getitem):
            yield node


def _described(node: fx.Node) -> Described:
    value = plan.value(node)
    outs = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    outs = tuple(out if isinstance(out, torch.Tensor) else None for out in outs)
    given = list[fx.Node]()
    _add_nodes(node.args, given)
    _add_nodes(node.kwargs.values(), given)
    return Described(node, tuple(source(x) for x in given if isinstance(plan.value(x), torch.Tensor)), outs)


def _add_nodes(args: Iterable[Any], found: list[fx.Node]) -> None:
    for x in args:
        if isinstance(x, fx.Node):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            _add_nodes(x, found)
        elif isinstance(x, dict):
            _add_nodes(x.values(), found)


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, (list, tuple)):
        for one in x:
            yield from _flat(one)
    elif isinstance(x, dict):
        yield from _flat(list(x.values()))
    else:
        yield x


def _rule(node: fx.Node, outs: tuple[Any, ...]) -> tuple[Rule | None, StepsPrice | None]:
    make = find(node.target) if plan.is_aten(node) else None
    if make is None:
        return None, None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), plan.value)  # type: ignore[misc]
    tensors = [x for x in _flat((args, kwargs)) if isinstance(x, torch.Tensor)]
    ts = [T(i, tuple(x.shape), x.dtype) for i, x in enumerate(tensors)]
    by_name = with_tensors(bind(node.target, args, kwargs), iter(ts))
    name = torch_internals.operator_name(node.target).removeprefix("aten::")
    shapes = tuple(tuple(o.shape) if isinstance(o, torch.Tensor) else None for o in outs)
    dtypes = tuple(o.dtype if isinstance(o, torch.Tensor) else None for o in outs)
    rule = make(Call(name, by_name, tuple(ts), shapes, dtypes))
    if rule is None or rule.per_result or len(rule.ins) != len(ts):  # of what out= is given a rule says nothing
        return None, None
    return composed(node, rule, by_name, shapes) or (rule, None)


def parts(label: Any, size: int) -> list[tuple[int, int, Any]]:
    """What a dim is seen as: for each part where it begins (the product of the sizes before it), its size and label."""
    found, start = list[tuple[int, int, Any]](), 1
    for n, inner in label if type(label) is Parts else [(size, label)]:
        found.append((start, n, inner))
        start *= n
    return found


def rows(it: Described) -> Iterator[tuple[str, int, Row, tuple[int, ...]]]:
    """The rows of a rule: of operands ("in") and results ("out"), by number, with the labels and sizes of the dims."""
    if it.rule is not None:
        for i, (row, shape) in enumerate(zip(it.rule.ins, it.shapes, strict=True)):
            yield "in", i, row, shape
        for i, (row, out) in enumerate(zip(it.rule.outs, it.outs, strict=True)):
            if out is not None:
                yield "out", i, row, tuple(out.shape)
