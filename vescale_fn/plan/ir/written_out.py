"""One rank's program written out for all that are here: a call for each rank, but one for those that are given the same."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.distributed.collectives import Collective
from .graph import AT_ONCE, HOLDERS, output, value
from .per_rank import of_rank
from .rank_choices import OneOf, TableOf
from .rank_runs import firsts, note_holders, runs


class WrittenOut:
    """A program of one rank, written out for all.

    Args:
        ranks: a `RanksAsOne`.
        graph: what passes have made of its graph.

    Attributes:
        graph: what all do.
    """

    def __init__(self, ranks: Any, graph: fx.Graph) -> None:
        self.ranks, self.graph = ranks, fx.Graph()
        self.made: dict[tuple[fx.Node, int], fx.Node] = {}
        self._inputs(
            [node for node in note_holders(graph, ranks.places, ranks.count).nodes if node.op == "placeholder"]
        )
        for run in runs(graph):
            if isinstance(run[0].target, Collective):
                self._collective(run[0])
            elif AT_ONCE in run[0].meta:
                self._on_lists(run[0])
            else:
                self._run(run)
        self._results(output(graph))

    def _inputs(self, places: Sequence[fx.Node]) -> None:
        new = list(map(self.graph.node_copy, self.ranks.inputs))
        for place, of_all in zip(places, self.ranks.places, strict=True):
            self.made.update(((place, i), new[x]) for i, x in zip(place.meta[HOLDERS], of_all))

    def of(self, node: fx.Node, rank: int) -> fx.Node:
        """What a rank has of a value."""
        return self.made[node, node.meta[HOLDERS][rank]]

    def _run(self, run: Sequence[fx.Node]) -> None:
        for rank in range(self.ranks.count):
            of = lambda x, rank=rank: self.of(x, rank)
            for node in run:
                key = node, node.meta[HOLDERS][rank]
                if key in self.made:
                    continue
                if isinstance(node.target, OneOf):
                    which, *values = node.args
                    self.made[key] = of(values[of_rank(which, rank)])  # type: ignore[arg-type]
                    continue
                args, kwargs = fx.map_arg((node.args, node.kwargs), of)  # type: ignore[misc]
                args, kwargs = of_rank(args, rank), {k: of_rank(x, rank) for k, x in kwargs.items()}
                self.made[key] = new = self.graph.create_node(node.op, node.target, (), {}, node.name)
                if isinstance(node.target, TableOf):
                    new.target, args = node.target.of(*args), ()  # type: ignore[arg-type]
                new.args, new.kwargs = args, kwargs  # type: ignore[assignment]
                new.meta = _noted(node)

    def _collective(self, node: fx.Node) -> None:
        given, holders = node.args[0], node.meta[HOLDERS]
        blocks = [self.of(given, rank) for rank in range(self.ranks.count)]  # type: ignore[arg-type]
        first = firsts(holders)
        vals = [torch_internals.another(value(node)) if i else value(node) for i in range(len(first))]
        new = self.graph.call_function(node.target, (blocks,))  # type: ignore[arg-type]
        new.meta = {**_noted(node), "val": [vals[i] for i in holders]}
        for i in range(len(first)):
            self.made[node, i] = part = self.graph.call_function(operator.getitem, (new, first[i]))
            part.meta = {**_noted(node), "val": vals[i]}

    def _on_lists(self, node: fx.Node) -> None:
        """A call on lists, which hold what each rank has."""
        ranks = firsts(node.meta[HOLDERS])
        given: Any = node.args
        args = [
            [self.of(x, rank) for x in one for rank in ranks] if isinstance(one, (list, tuple)) else one
            for one in given
        ]
        new = self.graph.create_node(node.op, node.target, (), {}, node.name)
        new.args, new.kwargs = fx.map_arg((tuple(args), node.kwargs), lambda x: self.made.get((x, 0), x))  # type: ignore
        new.meta = _noted(node)
        if value(node) is not None:
            new.meta["val"] = [x for x in value(node) for _ in ranks]
        for part in node.users:
            for k in range(len(ranks)):
                place = part.args[1] * len(ranks) + k  # type: ignore[operator]
                self.made[part, k] = one = self.graph.call_function(operator.getitem, (new, place))
                one.meta = _noted(part)

    def _results(self, end: fx.Node) -> None:
        given: Any = end.args[0]
        taken, found = dict[fx.Node, Any](), list[fx.Node]()
        for place, rank, same in self.ranks.results:
            x = self.of(given[place], rank)
            if taken.setdefault(x, same) != same:  # each has memory of its own
                copy = self.graph.call_function(torch.ops.aten.clone.default, (x,))
                copy.meta = dict(x.meta)
                x = copy
            found.append(x)
        new = self.graph.output(tuple(found))
        new.meta = _noted(end)


def _noted(node: fx.Node) -> dict[str, Any]:
    return {key: x for key, x in node.meta.items() if key != HOLDERS}
