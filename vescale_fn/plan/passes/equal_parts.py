"""Equal parts of a recording, such as the layers of a Python loop and their derivatives, become calls of one body.

A recording is a row of calls, in which a part that is repeated shows as a period. Nothing is moved: a part stands where it
stood, as one node. Only views are made again by those who need them, so that what a call gives is memory of its own. A part is
left as it is where a write into memory would cross its border, and all are where passes have to see their collectives together.

What the recorder has found to be equal (`tracing.repeated`) are calls already, and stay calls by the same rules.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import fx

from ..._core import torch_internals
from ..._core.distributed.collectives import Collective
from ..ir.collective_nodes import only_moves
from ..ir.graph import calls, copied, memories, value, written
from ..ir.nested import ends, extracted, nested
from ..ir.parts import CallRow, Part
from ..ir.periods import spans
from ..ir.ranks_as_one import ROW
from ..ir.shared_bodies import Shared, inlined
from .kept_calls import MANY, may_stay

SMALLEST = 10  # calls in a part: fewer are not worth a call
FEW = 5  # parts that the recorder has found already, which are worth it sooner
Group = Sequence[Part]  # equal ones


def equal_parts(graph: fx.Graph, many: int = MANY, smallest: int = SMALLEST) -> fx.Graph:
    """The graph in which parts that repeat each other, at least `many` of them, are calls of one body.

    Args:
        smallest: how many calls a part has at least.
    """
    if any(isinstance(node.target, Shared) and node.target.found for node in nested(graph)):
        graph = without_found(graph, FEW)
    if len(graph.nodes) < many * smallest or any(ROW in node.meta for node in graph.nodes):
        return graph
    row = CallRow(graph)
    parts = [part for span in spans(row.labels, many, smallest) for part in row.cut(span, many)]
    groups = _staying(graph, row, parts, many)
    return graph if not groups or any(_meet(row, group) for group in groups) else _with_calls(graph, row, groups)


def without_found(graph: fx.Graph, few: float = float("inf")) -> fx.Graph:
    """The graph without calls that the recorder has found: those of which there are less than `few`, and all where passes have
    to see what is in them."""
    same: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in nested(graph):
        same[node.target].append(node)
    found = {target: some for target, some in same.items() if isinstance(target, Shared) and target.found}
    if not found:
        return copied(graph)
    stay = {target: target.bodies[0] for target, some in found.items() if len(some) >= few}
    if not all(may_stay(body) and not _calls_meet(body, found[target]) for target, body in stay.items()):
        stay = {}
    return inlined(graph, {target for target in same if target not in found or target in stay})


def _staying(graph: fx.Graph, row: CallRow, parts: list[Part], many: int) -> Sequence[Group]:
    """Groups of at least `many` equal parts, none of which has a write that can be seen outside of it, or sees one."""
    together = [*_written(graph, row), *_repeated(row)] if parts else []
    while True:
        by_form: dict[Any, list[Part]] = defaultdict(list)
        for part in parts:
            by_form[part.form].append(part)
        groups = [group for group in by_form.values() if len(group) >= many]
        left = [part for group in groups for part in group]
        home = {node: part for part in left for node in part.nodes}
        crossed = set[Any]()
        for makers, users in together:
            homes = {home.get(x) for x in makers}
            if homes == {None}:
                homes.update(map(home.get, users))
            if len(homes) > 1:
                crossed |= homes
        parts = [part for part in left if part not in crossed]
        if len(parts) == len(left):
            return groups


def _written(graph: fx.Graph, row: CallRow) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """For each memory that is written in place: the calls that make it and write it, and those that use it before the last of
    these."""
    targets = [(node, x) for node in calls(graph) for x in written(node)]
    if not targets:
        return []
    lie, found = memories(graph), dict[fx.Node, tuple[list[fx.Node], list[fx.Node]]]()
    for node, x in targets:
        for memory in lie[x]:
            found.setdefault(memory, ([memory], []))[0].append(node)
    for node, where in lie.items():
        for memory in where:
            if memory in found:
                makers, users = found[memory]
                users += (user for user in node.users if row.place.get(user, len(row.nodes)) < row.place[makers[-1]])
    return list(found.values())


def _repeated(row: CallRow) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """What is computed again at one time, and merges with nothing that is at another."""
    found: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in row.nodes:
        if "again" in node.meta:
            found[node.meta["again"]].append(node)
    return [(nodes, []) for nodes in found.values()]


def _meet(row: CallRow, group: Group) -> bool:
    """Whether a pass could put collectives of one part together with those of another, and so has to see all of these at once:
    where what is given is sent, what is sent is given, or a collective does not wait for all of the part before."""
    one, starts = group[0], {part.start for part in group}
    followers = [part for part in group if part.start - len(one.nodes) in starts]
    carries = {tuple(_carried(row, part)) for part in followers}
    given = {x: row.root(x) for x in one.given}
    return _meets(one.nodes, given, [{one.roots[j]: one.nodes[i] for j, i in carried} for carried in carries])


def _calls_meet(body: fx.Graph, same: Sequence[fx.Node]) -> bool:
    """The same of equal calls of a body."""
    places, outs = ends(body)
    carries = set[tuple[tuple[int, int], ...]]()
    for before, call in itertools.pairwise(same):
        made = {part: part.args[1] for part in before.users}
        carries.add(tuple((j, made[x]) for j, x in enumerate(call.args) if x in made))  # type: ignore[misc]
    carried = [{places[j]: outs[i] for j, i in carry} for carry in carries]
    return _meets(list(calls(body)), {x: x for x in places}, carried)


def _meets(
    nodes: Sequence[fx.Node], given: Mapping[fx.Node, fx.Node], carries: Iterable[Mapping[Any, fx.Node]]
) -> bool:
    """The same of the calls of a part.

    Args:
        given: what the part is given, and of what that is a view.
        carries: of this, what the part before makes.
    """
    sends = {x for x in nodes if isinstance(x.target, Collective)}
    if not sends:
        return False
    if not sends.isdisjoint(_moved(nodes, given)):
        return True
    moved, behind = _moved(nodes, sends), _behind(nodes, given, sends)
    for carry in carries:
        waits = {x: behind[y] for x, y in carry.items()}
        late = (frozenset().union(*(waits.get(x, ()) for x in behind[send] - {send})) for send in sends)
        if not moved.isdisjoint(carry.values()) or not all(map(sends.issubset, late)):
            return True
    return False


def _moved(nodes: Sequence[fx.Node], sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The sources, and what calls make of these alone by moving elements; and the collectives of that."""
    found = set(sources)
    for x in nodes:
        if x.all_input_nodes and found.issuperset(x.all_input_nodes):
            if only_moves(x) or isinstance(x.target, Collective):
                found.add(x)
    return found


def _behind(
    nodes: Sequence[fx.Node], given: Mapping[fx.Node, fx.Node], sends: set[fx.Node]
) -> dict[fx.Node, frozenset[fx.Node]]:
    """What each value of a part is made of: of what the part is given, and of which collectives, itself if it is one."""
    found: dict[fx.Node, frozenset[fx.Node]] = {x: frozenset((root,)) for x, root in given.items()}
    for x in nodes:
        found[x] = frozenset(sends & {x}).union(*map(found.__getitem__, x.all_input_nodes))
    return found


def _carried(row: CallRow, part: Part) -> Iterator[tuple[int, int]]:
    """Which of the values that a part is given are made by the part before it, and where there."""
    for j, x in enumerate(part.roots):
        i = row.place.get(x, -1) - part.start + len(part.nodes)
        if 0 <= i < len(part.nodes):
            yield j, i


def _with_calls(graph: fx.Graph, row: CallRow, groups: Sequence[Group]) -> fx.Graph:
    """The graph in which the parts of each group are calls of one body."""
    home = {node: (part, i) for group in groups for part in group for i, node in enumerate(part.nodes)}
    needed = _needed(graph, row, home)
    gives: dict[Any, set[int]] = defaultdict(set)  # by the form of a part
    for part, i in map(home.__getitem__, needed):
        gives[part.form].add(i)
    targets = {group[0].form: _body(group[0], sorted(gives[group[0].form])) for group in groups}
    new, values = torch_internals.Graph(), dict[fx.Node, fx.Node]()

    def there(node: fx.Node) -> fx.Node:
        if node not in values:  # perhaps a view that a part has made
            for x in node.all_input_nodes:
                there(x)
            values[node] = new.node_copy(node, values.__getitem__)
        return values[node]

    for node in graph.nodes:
        part, i = home.get(node, (None, 0))
        if part is None:
            there(node)
        elif i == 0:
            call = new.call_function(targets[part.form], tuple(map(there, part.roots)))
            _call(call, part, [part.nodes[i] for i in sorted(gives[part.form])], needed, values)
    return new


def _needed(graph: fx.Graph, row: CallRow, home: Mapping[fx.Node, tuple[Part, int]]) -> set[fx.Node]:
    """What parts make and others need."""
    outside = (row.root(x) for node in graph.nodes if node not in home for x in node.all_input_nodes if x in home)
    inside = (x for part, i in home.values() if i == 0 for x in part.roots)
    return {x for x in itertools.chain(outside, inside) if x in home}


def _body(part: Part, gives: Sequence[int]) -> Shared:
    """The call of what a part does, and makes at some places."""
    again = {view: None for chain in part.given.values() for view in chain}
    body = extracted([*again, *part.nodes], part.roots, [part.nodes[i] for i in gives])
    for x in ends(body)[0]:
        x.meta = {"val": value(x), "line": ""}  # what a call is given is not donated to it
    return Shared(bodies=(body,))


def _call(call: fx.Node, part: Part, gives: Sequence[fx.Node], needed: Set[fx.Node], values: Any) -> None:
    """Finish the call that stands for a part, and note the values that it gives."""
    call.meta = {"val": list(map(value, gives)), "line": part.nodes[0].meta.get("line", "")}
    for i, x in enumerate(gives):
        if x in needed:
            values[x] = call.graph.call_function(operator.getitem, (call, i))
            values[x].meta = {**call.meta, "val": value(x)}
