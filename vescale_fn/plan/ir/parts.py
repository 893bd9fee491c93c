"""A graph as a row of calls, and parts of it: calls that follow each other.

Parts are equal where they call the same operators with the same numbers for the same lines, and are wired in the same way,
inside and to what they are given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.distributed.collectives import Collective
from .graph import Step, calls, changed, is_aten, name_of, value, viewed, written
from .nested import Nested
from .periods import Span
from .rewriting import key

_AGAIN = ("val", "line", "again")


class CallRow:
    """The calls of a graph, in order, but for those that take a slice of what the graph is given, another one in each part.

    Attributes:
        place: of each.
        inputs: for each the nodes among its arguments.
        labels: for each a number, equal for those that call the same. A negative one is equal to no other.
    """

    def __init__(self, graph: fx.Graph) -> None:
        nodes = [node for node in calls(graph) if not _is_slice_of_given(node)]
        self.hot = changed(graph)
        self.nodes, self.place = nodes, {node: i for i, node in enumerate(nodes)}
        self.inputs: list[list[fx.Node]] = []
        self.labels: list[int] = []
        numbers: dict[Any, int] = {}
        for i, node in enumerate(nodes):
            found: list[fx.Node] = []
            try:
                label = _called(node), _said(node.args, found), _said(node.kwargs, found), _noted(node.meta)
                self.labels.append(numbers.setdefault(label, i))
            except TypeError:  # what cannot be compared
                self.labels.append(-1 - i)
            self.inputs.append(found)

    def views(self, x: fx.Node) -> list[fx.Node]:
        """The calls, each of the one before, that make a value as a view; none where it is no view. A copy counts as one, that
        passes may find not to be needed in one place and in another."""
        return [*self.views(x.args[0]), x] if self._is_view(x) else []  # type: ignore[arg-type]

    def root(self, x: fx.Node) -> fx.Node:
        """Of what a value is a view; itself where it is no view."""
        return self.root(x.args[0]) if self._is_view(x) else x  # type: ignore[arg-type]

    def _is_view(self, x: fx.Node) -> bool:
        if x not in self.place:
            return False
        copy = name_of(x) == "clone" and x.args[0] in x.all_input_nodes and self.hot.isdisjoint((x, x.args[0]))  # type: ignore
        return copy or _is_view(x)

    def cut(self, span: Span, many: int) -> Iterator[Part]:
        """The parts of a span, at least `many`, cut where the fewest values go from one to the next; none where no value does:
        what is done to each leaf of a tree need not be done at once."""
        (start, stop, period), best = span, None
        count = lambda i: (stop - start - i) // period
        for i, alive in enumerate(self._alive(span)):
            if alive and count(i) >= many and (best is None or (alive, -count(i), i) < best):
                best = alive, -count(i), i
        if best is not None:
            yield from (Part(self, i, i + period) for i in range(start + best[-1], stop - period + 1, period))

    def _alive(self, span: Span) -> list[int]:
        """How many values that the first two parts make are needed later in the span, at each place of the second; once more
        those that are written there."""
        start, stop, period = span
        change = [0] * (2 * period + 1)
        for i, node in enumerate(self.nodes[start : start + 2 * period]):
            users = [user for user in node.users if start <= self.place.get(user, -1) < stop]
            for some in (users, [user for user in users if node in written(user)]):
                if some:
                    change[i + 1] += 1
                    change[min(max(map(self.place.__getitem__, some)) - start + 1, 2 * period)] -= 1
        return list(itertools.accumulate(change))[period:-1]


class Part:
    """Some calls that follow each other.

    Attributes:
        start: the place of the first.
        given: what they take from outside, each with the calls that make it as a view.
        roots: of what these are views.
        form: equal for equal parts.
    """

    def __init__(self, row: CallRow, start: int, stop: int) -> None:
        self.start, self.nodes = start, row.nodes[start:stop]
        numbers, roots, agains = dict[fx.Node, int](), dict[fx.Node, int](), dict[Any, int]()
        form: list[Any] = row.labels[start:stop]
        for xs in row.inputs[start:stop]:
            for x in xs:
                at = row.place.get(x, -1)
                form.append(at - start if at >= start else -1 - numbers.setdefault(x, len(numbers)))
        self.given = {x: row.views(x) for x in numbers}
        for x, chain in self.given.items():
            form += roots.setdefault(row.root(x), len(roots)), *(row.labels[row.place[view]] for view in chain)
        form += map(_lies, roots)
        form += (agains.setdefault(x.meta["again"], len(agains)) for x in self.nodes if "again" in x.meta)
        self.roots, self.form = list(roots), tuple(form)


def _is_slice_of_given(x: fx.Node) -> bool:
    return name_of(x) in ("select", "slice") and x.args[0].op == "placeholder"  # type: ignore[union-attr]


def _is_view(x: fx.Node) -> bool:
    """Whether a value is a view of the first argument, and of no other."""
    if x.op != "call_function" or not is_aten(x) or not isinstance(value(x), torch.Tensor) or written(x):
        return False
    of = viewed(x)
    if len(of) != 1 or x.all_input_nodes != of or x.args[0] is not of[0] or not isinstance(value(of[0]), torch.Tensor):
        return False
    number = torch_internals.memory_number
    return name_of(x) == "_unsafe_view" or number(value(x)) == number(value(of[0]))


def _called(node: fx.Node) -> Any:
    """What a node calls, as something that can be compared."""
    target: Any = node.target
    if isinstance(target, Collective):
        return target, target.why, target.line, target.elements, target.padded
    if isinstance(target, Step):
        if target.effect or isinstance(target, Nested):
            raise TypeError
        return target
    return id(target)  # torch computes the hash of an operator in Python


def _said(x: Any, found: list[fx.Node]) -> Any:
    """An argument as something that can be compared; nodes in it, all said in the same way, are `found`."""
    if isinstance(x, fx.Node):
        found.append(x)
        return fx.Node
    if isinstance(x, (list, tuple)):
        return tuple([_said(one, found) for one in x])
    if isinstance(x, dict):
        return tuple([(name, _said(one, found)) for name, one in x.items()]) if x else ()
    return key(x)


def _noted(meta: dict[str, Any]) -> Any:
    """What is known of a call besides what it gives."""
    more = tuple((name, x) for name, x in meta.items() if name not in _AGAIN) if len(meta) > 2 else ()
    return meta.get("line"), "again" in meta, more


def _lies(node: fx.Node) -> Any:
    x = value(node)
    if not isinstance(x, torch.Tensor):
        return float if isinstance(x, float) else object()  # a list, say, which a part is not to be given
    return x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg()
