"""Simulated ranks recorded as one: what all of them do to blocks that lie alike is noted once, of one stand-in for all ranks.

What ranks do on their own (a rank's block taken by itself, blocks of several sizes, values that are read or written, loops)
leaves this: `RanksApart` is raised, and the function is recorded again, each rank by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from ..._core import torch_internals
from ..._core.base import op_arguments
from ..._core.distributed.blocks import Blocks
from ..._core.distributed.collectives import Collective
from ..._core.distributed.communicator import rank_axes
from ..._core.distributed.mesh import communicator_of
from ..._core.distributed.rows import Holders, RankRow, numbered, together
from ..ir.graph import PLAYED, value
from ..ir.rank_choices import OneOf
from ..ir.rank_runs import arrived
from ..ir.ranks_as_one import RanksAsOne, alike
from .frame import RanksApart
from .rank_merging import RankCalls, merged


class RankRows:
    """What a recorder notes of simulated ranks as one.

    Args:
        recorder: it.

    Attributes:
        used: whether there is anything of that kind.
    """

    def __init__(self, recorder: Any) -> None:
        self.recorder, self.used = recorder, False
        self.count = 1
        self.given = 0  # how many plain tensors and floats the inputs are
        self.places: dict[fx.Node, Any] = {}  # of placeholders, which of all inputs it is for each rank, or for all
        self.parted = set[int]()  # the memory of values of which some ranks have one, and others another
        self._constants: dict[tuple[int, ...], fx.Node] = {}
        self._merges = False  # whether calls of ranks are recorded that will become one

    def input(self, blocks: Sequence[torch.Tensor], holders: Sequence[int], name: str) -> RankRow:
        """The stand-in of an array's blocks, of which `holders` says for each rank which is its own."""
        if not all(alike(x, blocks[0]) for x in blocks) or blocks[0].device.type != "cpu":
            raise RanksApart
        one = self.recorder.input(blocks[0], name)
        place = {rank: self.given + i for i, rank in enumerate(dict.fromkeys(holders))}
        self.places[one._plan_node] = [place[rank] for rank in holders]
        self.given += len(blocks)
        return self.row(one, numbered(holders))

    def plain(self, x: Any) -> None:
        """Note an input, a tensor or the node of a float, that is the same for all ranks."""
        if type(x) is not fx.Node and not self.recorder.is_ours(x):  # a real rank's block, or a local value
            x = torch_internals.local(x) if isinstance(x, DTensor) else x
            if type(x) is Blocks:
                raise RanksApart
        self.places[x if type(x) is fx.Node else x._plan_node] = self.given
        self.given += 1

    def row(self, one: torch.Tensor, holders: Holders) -> RankRow:
        """The row of blocks for which a tensor stands."""
        if self.used and len(holders) != self.count:  # blocks of a mesh beside those of a part of it
            raise RanksApart
        self.used, self.count = True, len(holders)
        one = self.recorder.fake(one)
        found = getattr(one, "_plan_row", None)
        if found is None:
            found = one._plan_row = RankRow(one, holders, self)  # type: ignore[attr-defined]
        return found

    def alone(self, one: torch.Tensor) -> torch.Tensor:
        """The block of one rank: how it lies may be asked, nothing can be computed of it."""
        return self.recorder.of_one_rank(one)

    def call(
        self,
        call: Callable[..., Any],
        n: int,
        given: Sequence[Any],
        keys: Sequence[Hashable] | None,
        share: bool,
    ) -> Any:
        """``call(rank, *locals)`` on each of `n` ranks, noted once; with rows in the place of tensors.

        Args:
            given: local values, `Blocks` among them.
            keys: of each rank, what the call depends on besides.
            share: ranks that are given the same share a result.
        """
        columns: set[Holders] = set()
        local = [self._one(x, columns) for x in given]
        numbers = (0,) * n if keys is None else numbered(keys)
        out = self._merged(call, local, numbers) if any(numbers) else call(0, *local)
        holders = together(frozenset((numbers, *columns))) if share else tuple(range(n))
        return op_arguments.mapped(lambda x: self.row(x, holders) if isinstance(x, torch.Tensor) else x, out)

    def _one(self, x: Any, columns: set[Holders]) -> Any:
        if isinstance(x, (list, tuple)):
            return op_arguments.mapped(lambda one: self._one(one, columns), x)
        if type(x) is not Blocks:
            return x
        if type(x.blocks) is not RankRow:
            if all(block is x.blocks[0] for block in x.blocks):
                return x.blocks[0]
            row = self.row(
                self.constant(list(map(self.recorder.node, x.blocks))).meta["val"], numbered(map(id, x.blocks))
            )
        else:
            row = x.blocks
        columns.add(row.holders)
        return row.one

    def constant(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """What stands for tensors that the function closes over, one for each rank."""
        recorder, frame = self.recorder, self.recorder.frame
        if not all(node in frame.places for node in nodes):
            raise RanksApart
        places = tuple(map(frame.places.index, nodes))
        xs = [frame.constants[i] for i in places]
        if frame.outer is not None:
            with recorder.outside():
                one = value(self.constant(list(map(recorder.outer, xs))))
            return recorder.node(one)
        if places not in self._constants:
            if not all(alike(value(node), value(nodes[0])) for node in nodes):
                raise RanksApart
            self._constants[places] = recorder.input(xs[0], "constant")._plan_node
        return self._constants[places]

    def _merged(self, call: Callable[..., Any], local: Sequence[Any], numbers: Holders) -> Any:
        """The calls of ranks that do not make the same, as calls that all make."""
        graph, calls = self.recorder.graph, list[RankCalls]()
        before, self._merges = self._merges, True
        try:
            for rank in [numbers.index(i) for i in range(max(numbers) + 1)]:
                last = next(iter(reversed(graph.nodes)), None)
                out = call(rank, *local)
                new = itertools.takewhile(lambda node, last=last: node is not last, reversed(graph.nodes))
                calls.append(RankCalls([node for node in new if node.op != "placeholder"][::-1], out))
            return merged(self, calls, numbers)
        finally:
            self._merges = before

    def merging(self, node: fx.Node) -> fx.Graph:
        """The graph of a node, of whose value one rank's part may be used now."""
        if not self._merges:
            raise RanksApart
        return node.graph

    def collective(self, collective: Collective, x: Blocks, line: str, again: Any) -> Blocks:
        """A collective of all ranks."""
        n, communicator = len(x.blocks), communicator_of(collective.mesh)
        if len(communicator.ranks) != n or collective.mesh.size() != math.prod(rank_axes(collective.mesh).values()):
            raise RanksApart  # over a part of a mesh
        columns: set[Holders] = set()
        given = self._one(x, columns)
        out = self.recorder.made_by(collective, given, line, again)
        out._plan_node.meta[PLAYED] = True
        return Blocks(self.row(out, arrived(collective, together(frozenset(columns)) if columns else (0,) * n)))

    def own(self, x: torch.Tensor) -> RankRow:
        """What stands for a value of which each rank has one of its own."""
        return self.row(self.recorder.twin(x), tuple(range(self.count)))

    def check_write(self, x: torch.Tensor) -> None:
        """Raise where what is written is another value for each rank."""
        if torch_internals.memory_number(x) in self.parted:
            raise RanksApart

    def finished(self, outputs: Sequence[tuple[fx.Node, int, Any]]) -> RanksAsOne | None:
        """The program of one rank; None where ranks have no blocks.

        Args:
            outputs: of each result the node, the rank whose it is, and which it is of the values that ranks have there.
        """
        if not self.used:
            return None
        graph, frame = self.recorder.graph, self.recorder.frame
        places = self.places | {node: self.given + i for i, node in enumerate(frame.places)}
        places |= {node: [self.given + i for i in at] for at, node in self._constants.items()}
        of_all, inputs = list[Sequence[int]](), dict[int, fx.Node]()
        for node in graph.nodes:
            if node.op == "placeholder":
                place = places[node]
                of_all.append([place] * self.count if isinstance(place, int) else place)
                for i in of_all[-1]:
                    inputs.setdefault(i, node)
        ones: dict[fx.Node, int] = {}
        outputs = [(self._own(node), rank, number) for node, rank, number in outputs]
        results = [(ones.setdefault(node, len(ones)), rank, (node, number)) for node, rank, number in outputs]
        end = graph.output(tuple(ones))
        end.meta["val"], end.meta["line"] = None, ""
        return RanksAsOne(graph, self.count, [inputs[i] for i in range(len(inputs))], of_all, results)

    def _own(self, node: fx.Node) -> fx.Node:
        """A result, which is no other value of one of the ranks."""
        if not isinstance(node.target, OneOf):
            return node
        copy = self.recorder.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = dict(node.meta)
        return copy
