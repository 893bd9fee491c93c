"""What is recorded of one iteration and of its derivative, split into a graph that runs forward and one that runs backward.

The backward graph needs values of the forward one. What is cheap to have again is: views, what was an input, what the loop goes
over, also where that is brought here. The rest is kept of each iteration, once where it is the same in all.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..ir.graph import is_aten, name_of, value, viewed
from ..ir.loop import EACH, LAST


@dataclass
class Backward:
    """The backward graph.

    Attributes:
        nodes: its calls. Its placeholders are to be the carry, what it goes over (the rows of cotangents, `cuts`, `each`), and
            `constants` and `last`.
        cuts: slices of what the loop goes over.
        each, last: values of the forward graph that are kept of each iteration, or of the last, being the same in all.
        constants: placeholders of the forward graph for what is from outside.
    """

    nodes: list[fx.Node]
    cuts: list[fx.Node]
    each: list[fx.Node]
    last: list[fx.Node]
    constants: list[fx.Node]

    @property
    def residuals(self) -> list[tuple[fx.Node, str]]:
        """What the forward graph has to give besides, and what is kept of it."""
        return [*((x, EACH) for x in self.each), *((x, LAST) for x in self.last)]


class Partition:
    """The forward graph.

    Args:
        forward: the calls that run forward.
        given: its placeholders: the carry, slices, constants.
        gives: its results.
        carry, cuts: how many of the placeholders are of the carry, and of slices.
        joins: whether both graphs will be parts of one: then a copy is written down twice as well, and made once.
        again: calls that are made again rather than kept.
    """

    def __init__(
        self,
        forward: Sequence[fx.Node],
        given: list[fx.Node],
        gives: list[fx.Node],
        carry: int = 0,
        cuts: int = 0,
        joins: bool = False,
        again: Collection[fx.Node] = (),
    ) -> None:
        self.forward, self.given, self.gives, self.joins, self.again = forward, given, gives, joins, again
        self.cuts = given[carry : carry + cuts]
        self.constants = given[carry + cuts :]

    def since(self, before: set[fx.Node], graph: fx.Graph) -> list[fx.Node]:
        """The calls that were recorded after these nodes, and run backward. What a loop in the body has come to keep of its
        iterations meanwhile is had forward."""
        forward, new = (
            set(self.forward),
            [node for node in graph.nodes if node not in before and node.op == "call_function"],
        )
        kept = {node for node in new if node.target is operator.getitem and node.args[0] in forward}
        if kept:
            self.forward = [node for node in graph.nodes if node in forward or node in kept]
        return [node for node in new if node not in kept]

    def of_backward(
        self,
        nodes: Sequence[fx.Node],
        given: Sequence[fx.Node],
        rows: Sequence[fx.Node],
        gives: Sequence[fx.Node | None],
        more: Sequence[fx.Node],
    ) -> Backward:
        """The backward graph.

        Args:
            nodes: the calls that run backward.
            given: the placeholders of its carry.
            rows: those of the cotangents of what the loop collects.
            gives: its results.
            more: placeholders for what it uses from outside, besides those of the forward graph.
        """
        ours = {*nodes, *given, *rows}
        outside = {*self.constants, *more}
        fixed = set(outside)  # what is the same in all iterations
        for node in self.forward:
            if node.all_input_nodes and fixed.issuperset(node.all_input_nodes):
                fixed.add(node)
        cuts: dict[fx.Node, None] = {}
        each: dict[fx.Node, None] = {}
        last: dict[fx.Node, None] = {}
        constants: dict[fx.Node, None] = {}
        again: dict[fx.Node, None] = {}

        def need(x: fx.Node) -> None:
            if x in ours or x in again:
                return
            if x in outside:
                constants[x] = None
            elif x in self.cuts:
                cuts[x] = None
            elif x in self.again or _is_view(x) or (self.joins and name_of(x) == "clone"):
                for source in x.all_input_nodes:
                    need(source)
                again[x] = None
            else:
                (last if x in fixed else each)[x] = None

        for node in nodes:
            for x in node.all_input_nodes:
                need(x)
        for x in filter(None, gives):
            need(x)
        return Backward([*again, *nodes], list(cuts), list(each), list(last), list(constants))


def _is_view(x: fx.Node) -> bool:
    """Whether a value is had again for nothing: a view of one tensor, or a number."""
    if x.op != "call_function":
        return False
    if not isinstance(value(x), torch.Tensor):
        return isinstance(value(x), (int, float))
    return is_aten(x) and len(viewed(x)) == 1 and len(x.all_input_nodes) == 1
