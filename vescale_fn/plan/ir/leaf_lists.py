"""Leaves that a plan does nothing with but map formulas over them, as lists: one value for all that go the same way.

A recording of an update has nodes for each leaf: what it is given, and what each formula gives. Here leaves are put together by
the calls that they pass and the places that they have there. A list is one node, which passes see as one tensor of as many
elements; its ``meta`` says what each leaf is. The code that runs has a Python list there. `written_out` gives back the nodes
of each leaf, for all who want to look at a plan.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .graph import DONATED, Step, calls, output, value
from .inplace import is_dense
from .mapped import Mapped, mapped, split
from .nested import ends
from .ranks_as_one import ROW

LEAVES = "leaves"  # in the meta of a node that stands for a list: what each of its leaves is, as tensors without values
LISTED = Step("listed", lambda *xs: list(xs), views=())
Place = int | list[int]


@dataclass(frozen=True)
class LeafLists:
    """A recording with lists.

    Attributes:
        graph: the recording.
        inputs, outputs: for each input of the graph, and for each of its results, the places that its leaves have there.
    """

    before: fx.Graph
    graph: fx.Graph
    inputs: Sequence[Place]
    outputs: Sequence[Place]

    def given(self, values: list[Any]) -> list[Any]:
        """The inputs of the graph, of those of the recording: a list that is empty then."""
        found = [values[at] if isinstance(at, int) else [values[i] for i in at] for at in self.inputs]
        values.clear()
        return found

    def gives(self, outs: Sequence[Any]) -> list[Any]:
        """The results of the recording, of those of the graph."""
        found: dict[int, Any] = {}
        for at, out in zip(self.outputs, outs, strict=True):
            found.update([(at, out)] if isinstance(at, int) else zip(at, out, strict=True))
        return [found[i] for i in range(len(found))]

    def written_out(self, graph: fx.Graph) -> fx.Graph:
        """What passes have made of the graph, with nodes for each leaf."""
        return _WrittenOut(self, graph).graph


def leaf_lists(graph: fx.Graph) -> LeafLists | None:
    """A recording with lists of leaves; None where there is nothing to put together."""
    leaves = _Leaves(graph)
    as_one = any(ROW in node.meta for node in graph.nodes)  # simulated ranks' calls, which may become one
    return _Together(graph, leaves).made() if leaves.groups and not as_one else None


Row = tuple[fx.Node, int]  # of a call that is mapped over leaves


class _Leaves:
    """The leaves of a recording that can be parts of lists.

    Attributes:
        calls: the calls that are mapped over leaves, in order, with what each is given and gives for each of its rows; None for
            a result that is not there.
        groups: of leaves that go the same way: for each call that they pass the rows that are theirs, and what lists there are.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.calls = {node: _rows(node, target) for node, target in mapped(graph) if not target.writes}
        self._numbers = {node: i for i, node in enumerate(self.calls)}
        self._times = Counter(output(graph).args[0] if self.calls else ())  # type: ignore[arg-type]
        self._own = {x for x in graph.nodes if self._is_own(x)} if self.calls else set[fx.Node]()
        found: dict[Any, list[tuple[list[Row], list[fx.Node]]]] = {}
        for rows in self._connected():
            known: dict[fx.Node, int] = {}
            way = self._way(rows, known)
            if way is not None:
                found.setdefault(way, []).append((rows, list(known)))
        self.groups: list[tuple[dict[fx.Node, list[int]], list[tuple[fx.Node, ...]]]] = []
        for alike in found.values():
            if len(alike) > 1:
                passed = {rows[0][0]: [row for _, row in rows] for rows in zip(*(rows for rows, _ in alike))}
                self.groups.append((passed, list(zip(*(values for _, values in alike)))))

    def _is_own(self, x: fx.Node) -> bool:
        """Whether a value is an argument, or a result of a formula, that nothing but formulas and the results needs."""
        ours = x.op == "placeholder" or (x.target is operator.getitem and x.args[0] in self.calls)
        return ours and all(user in self.calls or user.op == "output" for user in x.users)

    def _connected(self) -> list[list[Row]]:
        """The rows of calls, those together that have a value in common which is their own."""
        of: dict[fx.Node, list[Row]] = {}
        own = lambda node, row: [x for x in self.calls[node][row] if x in self._own]
        for node, rows in self.calls.items():
            for row in range(len(rows)):
                joint: list[Row] = []
                for other in {id(of[x]): of[x] for x in own(node, row) if x in of}.values():
                    few, joint = sorted((other, joint), key=len)
                    of.update((x, joint) for one in few for x in own(*one))
                    joint += few
                joint.append((node, row))
                of.update((x, joint) for x in own(node, row))
        return list({id(rows): rows for rows in of.values()}.values())

    def _way(self, rows: list[Row], known: dict[fx.Node, int]) -> Any:
        """The calls that a leaf passes, and its places there: equal for leaves that can be of one list. None where it can be of
        none. `known`: gets its values, in the order of these places."""
        rows.sort(key=lambda one: self._numbers[one[0]])
        if any(one[0] is other[0] for one, other in itertools.pairwise(rows)):
            return None
        way: list[Any] = []
        for node, row in rows:
            way.append(self._numbers[node])
            for x in self.calls[node][row]:
                if x is None or x in known:
                    way.append(None if x is None else known[x])
                    continue
                v, own = value(x), x in self._own
                lent = not own and x.op == "placeholder" and DONATED not in x.meta
                if not (own or lent) or not (v.is_contiguous() or is_dense(v)):
                    return None
                if own:
                    known[x] = len(known)
                way.append((own, x.op, v.dtype, v.device, self._times[x], *x.meta))
        return tuple(way)


def _rows(node: fx.Node, target: Mapped) -> list[tuple[fx.Node | None, ...]]:
    parts: dict[Any, fx.Node] = {part.args[1]: part for part in node.users}
    count = len(target.lent) * target.rows
    gives = [map(parts.get, range(i, i + target.rows)) for i in range(0, count, target.rows)]
    return list(zip(*target.lists(node), *gives, strict=True))


class _Together:
    """The recording, with a node for each list."""

    def __init__(self, graph: fx.Graph, leaves: _Leaves) -> None:
        self.before, self.graph, self.leaves = graph, fx.Graph(), leaves
        self.values: dict[fx.Node, fx.Node] = {}  # by the nodes before; of a list by its first
        self.lists = {xs[0]: xs for _, lists in leaves.groups for xs in lists}
        self.inner = {x for xs in self.lists.values() for x in xs}

    def made(self) -> LeafLists:
        inputs = self._inputs()
        for node in calls(self.before):
            if node in self.leaves.calls:
                self._split(node)
            elif node.target is not operator.getitem or node.args[0] not in self.leaves.calls:
                self.values[node] = self.graph.node_copy(node, self.values.__getitem__)
        return LeafLists(self.before, self.graph, inputs, self._outputs())

    def _inputs(self) -> list[Place]:
        given = [x for x in self.before.nodes if x.op == "placeholder"]
        places, found = {x: i for i, x in enumerate(given)}, list[Place]()
        for x in given:
            if x in self.lists or x not in self.inner:
                self.values[x] = new = self.graph.placeholder(x.name)
                new.meta = _listed(self.lists[x]) if x in self.lists else dict(x.meta)
                found.append([places[one] for one in self.lists[x]] if x in self.lists else places[x])
        return found

    def _split(self, node: fx.Node) -> None:
        """Record what stands for a call that is mapped over leaves: one for each group of these, and one for the rest."""
        groups = [rows[node] for rows, _ in self.leaves.groups if node in rows]
        for rows in groups:
            self._call(node, rows, True)
        if rest := sorted(set(range(len(self.leaves.calls[node]))).difference(*groups)):
            self._call(node, rest, False)

    def _call(self, node: fx.Node, rows: Sequence[int], listed: bool) -> None:
        target: Any = node.target
        columns = list(zip(*map(self.leaves.calls[node].__getitem__, rows)))
        args = [[self._list(xs)] if listed else [self.values[x] for x in xs] for xs in columns[: target.columns]]
        shared = (self.values[x] for x in node.args[target.columns :])  # type: ignore[index]
        many = replace(target, rows=1 if listed else len(rows), on_leaves=listed)
        call = self.graph.call_function(many, (*args, *shared))
        vals = [[node.meta["val"][i * target.rows + row] for row in rows] for i in range(len(target.lent))]
        call.meta = {**node.meta, "val": list(map(_whole, vals)) if listed else [x for one in vals for x in one]}
        results = columns[target.columns :]
        for i, xs in enumerate(results if listed else [[x] for one in results for x in one]):
            if xs[0] is not None:
                self.values[xs[0]] = part = self.graph.call_function(operator.getitem, (call, i))
                part.meta = _listed(xs) if listed else dict(xs[0].meta)

    def _list(self, xs: Sequence[fx.Node]) -> fx.Node:
        """The node of a list: there already, or of leaves that something else needs too."""
        if xs[0] in self.lists:
            return self.values[xs[0]]
        step = replace(LISTED, views=tuple(range(len(xs))))
        node = self.graph.call_function(step, tuple(map(self.values.__getitem__, xs)))
        node.meta = _listed(xs)
        return node

    def _outputs(self) -> list[Place]:
        at: dict[fx.Node, list[int]] = {}
        for i, x in enumerate(output(self.before).args[0]):  # type: ignore[arg-type]
            at.setdefault(x, []).append(i)
        outs, found = list[fx.Node](), list[Place]()
        for x, own in at.items():
            if x in self.lists or x not in self.inner:
                found += [list(one) for one in zip(*map(at.__getitem__, self.lists[x]))] if x in self.lists else own
                outs += [self.values[x]] * len(own)
        self.graph.output(tuple(outs)).meta = dict(output(self.before).meta)
        return found


def _listed(leaves: Sequence[fx.Node]) -> dict[str, Any]:
    """The meta of a list."""
    vals = list(map(value, leaves))
    return {**leaves[0].meta, "val": _whole(vals), LEAVES: vals}


def _whole(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor of as many elements as some together."""
    return torch.ops.aten.new_empty.default(leaves[0], [sum(x.numel() for x in leaves)])


class _WrittenOut:
    """What passes have made of a graph with lists, with nodes for each leaf."""

    def __init__(self, lists: LeafLists, graph: fx.Graph) -> None:
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}  # by the nodes of `graph`: a node, or of a list those of its leaves
        given = [x for x in graph.nodes if x.op == "placeholder"]
        inputs = [x for x in lists.before.nodes if x.op == "placeholder"]
        new = list(map(self.graph.node_copy, inputs))
        for x, at in zip(given, lists.inputs, strict=True):
            self.values[x] = new[at] if isinstance(at, int) else [new[i] for i in at]
        self.split: list[tuple[fx.Node, list[list[int]]]] = []
        for node in calls(graph):
            self._call(node)
        for call, parts in self.split:
            split(call, parts)
        end = output(graph)
        outs = lists.gives([self.values[x] for x in end.args[0]])  # type: ignore[union-attr]
        self.graph.output(tuple(outs)).meta = dict(end.meta)

    def _call(self, node: fx.Node) -> None:
        target, leaves = node.target, node.meta.get(LEAVES)
        if isinstance(target, Mapped) and target.on_leaves:
            columns = [self.values[x] for (x,) in target.lists(node)]
            rows = len(columns[0])
            args = *columns, *(self.values[x] for x in node.args[target.columns :])  # type: ignore[index]
            call = self.graph.call_function(replace(target, rows=rows, on_leaves=False, runs=()), args)
            vals: list[Any] = [None] * (rows * len(ends(target.bodies[0])[1]))
            for part in node.users:
                i: Any = part.args[1]
                vals[i * rows : (i + 1) * rows] = part.meta[LEAVES]
            call.meta = {**node.meta, "val": vals}
            self.values[node] = call
            self.split.append((call, [list(range(*run)) for run in target.runs]))
        elif leaves is None:
            self.values[node] = self.graph.node_copy(node, self.values.__getitem__)
        elif isinstance(target, Step) and target.name == LISTED.name:
            self.values[node] = [self.values[x] for x in node.args]  # type: ignore[index]
        else:
            self.values[node] = [self._of_leaf(node, i, val) for i, val in enumerate(leaves)]

    def _of_leaf(self, node: fx.Node, i: int, val: Any) -> fx.Node:
        """The call for one leaf, of a call for all of a list."""
        if node.target is operator.getitem:
            call: Any = self.values[node.args[0]]  # type: ignore[index]
            args: Any = call, node.args[1] * len(node.meta[LEAVES]) + i  # type: ignore[operator]
        else:
            args = tuple(self.values[x][i] for x in node.args)  # type: ignore[index]
        new = self.graph.call_function(node.target, args)  # type: ignore[arg-type]
        new.meta = {name: x for name, x in node.meta.items() if name != LEAVES} | {"val": val}
        return new
