"""What a rank leaves out of a plan that all ranks have recorded: values that are at another place (`distributed/places`).

All ranks record a whole program, and agree on it and on what passes make of it. Then each takes out what is computed, and sent,
among the ranks of places where it is not; a collective of the whole mesh stays, and is given a stand-in.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._core.distributed.abstract_mesh import seen_from
from ..._core.distributed.collectives import Collective, Start
from ..._core.distributed.communicator import coordinates
from ..._core.distributed.mesh import communicator_of
from ..._core.distributed.places import is_elsewhere, nothing, place_of
from .graph import ELSEWHERE, Step, calls, copied, has_effect, operator_of, output, value, written
from .mapped import unmapped
from .nested import Nested
from .shared_bodies import inlined

_FILLS = torch.ops.aten.masked_fill.Scalar  # of a part of a sum: zeros where the value is not


class ThisRank:
    """The rank of this process."""

    def lacks(self, mesh: Any) -> bool:
        """Whether values on a mesh are elsewhere."""
        return is_elsewhere(mesh)

    def communicator(self, mesh: Any) -> Any:
        """Its part in what goes over a mesh."""
        return communicator_of(mesh)


@dataclass(frozen=True)
class SeenRank(ThisRank):
    """A rank of a mesh without ranks, by its row-major place."""

    rank: int

    def lacks(self, mesh: Any) -> bool:
        place = place_of(mesh)
        return place is not None and not place.holds(coordinates(place.whole, self.rank))

    def communicator(self, mesh: Any) -> Any:
        return communicator_of(seen_from(mesh, self.rank) if place_of(mesh) is None else mesh)


def left_out(graph: fx.Graph, results: Collection[int], rank: ThisRank = ThisRank()) -> fx.Graph:
    """The graph without what is elsewhere: its placeholders are marked, and `results` are the places of such results."""
    graph = inlined(unmapped(copied(graph)))
    gone = _Gone(graph, rank)
    outs = [*output(graph).args[0]]  # type: ignore[misc]
    for i, node in enumerate(outs):
        if isinstance(node, fx.Node) and (i in results or node in gone.values):
            with graph.inserting_before(output(graph)):
                outs[i] = _stand_in(graph, node, whole=False)
    output(graph).args = (tuple(outs),)
    for node in reversed([*calls(graph)]):
        if not node.users and (node in gone.calls or _is_pure(node, rank)):
            graph.erase_node(node)
    return graph


class _Gone:
    """What is not here of a graph: `values` that this rank has not got, and `calls` that it does not make."""

    def __init__(self, graph: fx.Graph, rank: ThisRank) -> None:
        self.graph, self.rank = graph, rank
        self.values = {node for node in graph.nodes if node.op == "placeholder" and ELSEWHERE in node.meta}
        self.calls: set[fx.Node] = set()
        for node in [*calls(graph)]:
            self._see(node)

    def _see(self, node: fx.Node) -> None:
        if isinstance(node.target, Step) and node.target.at:
            node.meta[ELSEWHERE] = frozenset(i for i, mesh in enumerate(node.target.at) if self.rank.lacks(mesh))
        given = set(node.all_input_nodes)
        missing = given & self.values
        if isinstance(node.target, Collective) and self.rank.lacks(node.target.mesh):
            self._leave_out(node)
        elif given and isinstance((start := node.args[0]), fx.Node) and isinstance(start.target, Start):
            self._see_wait(node, start)
        elif self._gives_elsewhere(node):
            self._leave_out(node)
        elif not missing:
            return
        elif isinstance(node.target, Collective):
            self._give_stand_ins(node, missing)
            if not self._receives(node.target):
                self.values.add(node)
        elif self._is_elsewhere(node, missing == given):
            self._leave_out(node)
        else:
            self._give_stand_ins(node, missing)

    def _gives_elsewhere(self, node: fx.Node) -> bool:
        """Whether a value is a result, of a call that gives several at several places, of which this rank has none."""
        if node.target is not operator.getitem or not isinstance(of := node.args[0], fx.Node):
            return False
        return isinstance(of.target, Step) and bool(of.target.at) and node.args[1] in of.meta[ELSEWHERE]

    def _receives(self, collective: Collective) -> bool:
        """Whether this rank gets what is sent from place to place."""
        if collective.kind != "permute":
            return True
        communicator = self.rank.communicator(collective.mesh)
        groups = ((communicator.group_of(at, collective.axes), rank) for at, rank in enumerate(communicator.ranks))
        reached = {destination for _, destination in collective.params[0]}
        return any(group.index(rank) in reached for group, rank in groups)

    def _is_elsewhere(self, node: fx.Node, all_missing: bool) -> bool:
        """Whether a call, of which arguments are missing, is none of this rank's."""
        if isinstance(node.target, Step):  # of several calls in one, it may do some for all ranks
            return all_missing and not has_effect(node) and not isinstance(node.target, Nested)
        return node.target is not _FILLS and self.values.issuperset(written(node))

    def _see_wait(self, node: fx.Node, start: fx.Node) -> None:
        """A wait belongs to its start."""
        if start in self.calls:
            self._leave_out(node)
            return
        node.args = (start, *start.args)
        if start in self.values:
            self.values.add(node)

    def _leave_out(self, node: fx.Node) -> None:
        self.values.add(node)
        self.calls.add(node)

    def _give_stand_ins(self, node: fx.Node, missing: Collection[fx.Node]) -> None:
        with self.graph.inserting_before(node):
            whole = not (isinstance(node.target, Step) and node.target.at)  # which knows what is missing
            for x in missing:
                node.replace_input_with(x, _stand_in(self.graph, x, whole, operator_of(node) is not None))


def _stand_in(graph: fx.Graph, x: fx.Node, whole: bool, written: bool = False) -> fx.Node:
    """What stands for a value; `whole`: as an argument of a call, which may be an index; `written`: whose result may lie in its
    memory."""
    val: Any = value(x)
    made = [(tuple(one.shape), one.dtype, one.device) for one in (val if isinstance(val, (list, tuple)) else [val])]
    make = functools.partial(_made, made, whole, written, isinstance(val, (list, tuple)))
    node = graph.call_function(Step("elsewhere", make))
    node.meta = {"val": val, "line": x.meta.get("line", "")}
    if not written and not (whole and any(not (of.is_floating_point or of.is_complex) for _, of, _ in made)):
        node.meta[ELSEWHERE] = True  # one number, whatever its shape
    return node


def _made(what: Sequence[Any], whole: bool, written: bool, several: bool) -> Any:
    found = [nothing(*one, own=whole) for one in what]
    if whole:  # an index that is nothing must not end the program
        found = [x if x.is_floating_point() or x.is_complex() else torch.zeros_like(x) for x in found]
    if written:
        found = [x.clone(memory_format=torch.contiguous_format) for x in found]
    return found if several else found[0]


def _is_pure(node: fx.Node, rank: ThisRank) -> bool:
    """Whether nobody misses a call whose result is not used."""
    if isinstance(node.target, Collective):
        return rank.lacks(node.target.mesh)
    waits = any(isinstance(x.target, Start) for x in node.all_input_nodes)
    return not (waits or isinstance(node.target, Nested) or has_effect(node))
