"""A formula of one leaf, mapped over many: one call, however many leaves there are.

An optimiser's update is the same for each leaf. It is recorded once, as a body of one row: what stands at one leaf's place in
each of several lists. The call is given the lists (columns), then what all rows share, and gives all rows of its first result,
then those of the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from .graph import DONATED, calls, copied, memories, value, written
from .memory_aliases import Memory
from .nested import Nested, ends, extracted, reached
from .rewriting import computed

LIMIT = 1 << 18  # bytes of a leaf: larger ones gain nothing, and would only be kept alive for longer
COLUMN = "column"  # in the meta of a body's placeholder: of which each row has its own


@dataclass(frozen=True, eq=False)
class Mapped(Nested):
    """A call of a body for each of several rows.

    Args:
        rows: how many.
        on_leaves: whether each of its values is a list of leaves (`leaf_lists`), for which there is one row.
        runs: of these leaves the first and the end of each run that is taken at once; none: all are.

    Attributes:
        columns: how many of its arguments are lists, the first ones.
        lent: for each result of the body the column in whose memory it lies, or None.
    """

    name: str = "mapped"
    rows: int = 0
    on_leaves: bool = False
    runs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        body, lie = self.bodies[0], memories(self.bodies[0])
        places = {x: i for i, x in enumerate(ends(body)[0])}
        hot = {places[root] for x in calls(body) for y in written(x) for root in lie[y] if root in places}
        object.__setattr__(self, "writes", tuple(sorted(hot)))

    @cached_property
    def columns(self) -> int:
        return sum(COLUMN in x.meta for x in ends(self.bodies[0])[0])

    @cached_property
    def lent(self) -> list[int | None]:
        (places, outs), lie = ends(self.bodies[0]), memories(self.bodies[0])
        place = {x: i for i, x in enumerate(places)}
        return [next((place[root] for root in lie[x] if root in place), None) for x in outs]

    def told(self, i: int) -> tuple[str, str, str]:
        _, given, gives = super().told(i)
        return f"for each of {self.rows} leaves", given, gives

    def lender(self, node: fx.Node, part: int) -> fx.Node | None:
        column, row = divmod(part, self.rows)
        lent = self.lent[column]
        return None if lent is None else node.args[lent][row]  # type: ignore[index, return-value]

    def will_lie_in_donated(self, node: fx.Node) -> list[Memory]:
        """The memories of results that `donate` will put where donated arguments lie, a column of these for one of those."""
        donated = sum(all(x.op == "placeholder" and DONATED in x.meta for x in one) for one in self.lists(node))
        count = min(donated, len(self.lent)) * self.rows
        return [Memory(node, i) for i in range(count) if self.lent[i // self.rows] is None]

    def lists(self, node: fx.Node) -> list[list[fx.Node]]:
        """The columns that a call is given."""
        return list(node.args[: self.columns])  # type: ignore[arg-type]

    def at_once(self, node: fx.Node) -> float:
        first = [value(x).nbytes for x in node.args[0]]  # type: ignore[union-attr]
        one = value(ends(self.bodies[0])[0][0])
        return sum(first) / max(1, (one[0] if isinstance(one, list) else one).nbytes)

    def taken(
        self,
        columns: Collection[int],
        gives: Collection[int],
        pairs: Callable[[fx.Graph, Collection[int]], list[fx.Node]],
    ) -> list[int]:
        """Those of some columns that results take, if these are free: by `pairs`, of the body and the places of results."""
        body = self._free(columns)
        places = {x: i for i, x in enumerate(ends(body)[0])}
        return sorted(places[x] for x in pairs(body, gives))

    def over(self, columns: Collection[int], improve: Callable[[fx.Graph], fx.Graph]) -> Mapped:
        """The same, whose body may write over some columns: what `improve` makes of it."""
        return replace(self, bodies=(improve(self._free(columns)),))

    def _free(self, columns: Collection[int]) -> fx.Graph:
        body = copied(self.bodies[0])
        places = ends(body)[0]
        for i in columns:
            places[i].meta[DONATED] = True
        return body


def mapped(graph: fx.Graph) -> Iterator[tuple[fx.Node, Mapped]]:
    """The calls for many rows in a graph, in order."""
    return ((node, node.target) for node in list(calls(graph)) if isinstance(node.target, Mapped))


def is_on_lists(body: fx.Graph) -> bool:
    """Whether the columns of a body are lists of all rows; else it computes one row."""
    return any(COLUMN in x.meta and isinstance(value(x), list) for x in ends(body)[0])


def own(node: fx.Node, lie: dict[fx.Node, Any]) -> Callable[[fx.Node], bool]:
    """Whether nothing else that a call is given lies in the memory of one of its arguments."""
    given = [x for one in node.args for x in (one if isinstance(one, (list, tuple)) else (one,))]
    counts = Counter(memory for x in given if isinstance(x, fx.Node) for memory in lie[x])
    return lambda x: all(counts[memory] == 1 for memory in lie[x])


def split(node: fx.Node, parts: Sequence[Sequence[int]]) -> list[fx.Node]:
    """Several calls, each for some of the rows of one."""
    if len(parts) < 2:
        return [node]
    target: Any = node.target
    results, made = {part.args[1]: part for part in node.users}, []
    for rows in parts:
        with node.graph.inserting_before(node):
            args = [[column[i] for i in rows] for column in target.lists(node)]
            one = node.graph.call_function(replace(target, rows=len(rows)), (*args, *node.args[target.columns :]))
        places = [i * target.rows + row for i in range(len(target.lent)) for row in rows]
        one.meta = {**node.meta, "val": [node.meta["val"][place] for place in places]}
        for i, place in enumerate(places):
            if place in results:
                results[place].args = one, i
        made.append(one)
    node.graph.erase_node(node)
    return made


def prune(node: fx.Node) -> None:
    """Leave out of a call the results of which no row is needed, and what only these need."""
    target: Any = node.target
    rows, body = target.rows, target.bodies[0]
    places, outs = ends(body)
    gives = sorted({part.args[1] // rows for part in node.users if part.users})  # type: ignore[operator]
    live = reached(outs[i] for i in gives)
    used = [i for i, x in enumerate(places) if x in live]
    if len(gives) == len(outs) and len(used) == len(places):
        return
    nodes = [x for x in calls(body) if x in live]
    node.target = replace(target, bodies=(extracted(nodes, [places[i] for i in used], [outs[i] for i in gives]),))
    node.args = tuple(node.args[i] for i in used)
    node.meta["val"] = [node.meta["val"][i * rows + row] for i in gives for row in range(rows)]
    for part in list(node.users):
        column, row = divmod(part.args[1], rows)  # type: ignore[arg-type]
        if column in gives:
            part.args = node, gives.index(column) * rows + row
        else:
            node.graph.erase_node(part)


def unmapped(graph: fx.Graph) -> fx.Graph:
    """A recording in which the calls of the body stand in the place of each call, for one row after the other."""
    graph = copied(graph)
    for node, target in mapped(graph):
        places, outs = ends(target.bodies[0])
        parts = {part.args[1]: part for part in node.users}
        for row in range(target.rows):
            given = [x if i >= target.columns else x[row] for i, x in enumerate(node.args)]  # type: ignore[index]
            values: dict[fx.Node, Any] = dict(zip(places, given, strict=True))
            with graph.inserting_before(node):
                for x in calls(target.bodies[0]):
                    values[x] = copy = graph.node_copy(x, values.__getitem__)
                    copy.meta["val"] = computed(copy.target, copy.args, copy.kwargs)  # the body has that of another row
            for i, out in enumerate(outs):
                part = parts.get(i * target.rows + row)
                if part is not None:
                    values[out].meta["val"] = value(part)
                    part.replace_all_uses_with(values[out])
                    graph.erase_node(part)
        graph.erase_node(node)
    return graph
