"""What simulated ranks do as one program says it of each: which of them hold the same, and in what order they compute.

Between two collectives one rank's calls come after the other's; what ranks hold alike the first of them computes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from ..._core.distributed.collectives import TABLE, Collective
from ..._core.distributed.mesh import communicator_of
from ..._core.distributed.rows import Holders, numbered, together
from .graph import ARRIVED, AT_ONCE, HOLDERS, calls, name_of, viewed, written
from .memory_aliases import Memory, last_uses, memories, touched
from .per_rank import PerRank, RanksDiffer

SHORTEST, LONGEST = 12, 40  # how many calls one rank makes at once, where it can make more before the next one does
CACHE = 1 << 20  # bytes between such turns: where more are alive, code is not what a processor waits for


def note_holders(graph: fx.Graph, places: Sequence[Sequence[int]], count: int) -> fx.Graph:
    """Note in each node of one rank's program which ranks hold the same of its value (`HOLDERS`).

    Memory that ranks write is each one's own, as far as what they write there differs.

    Args:
        places: for each input, for each rank which one it has.
        count: how many ranks there are.

    Raises:
        RanksDiffer: ranks write different things into inputs, or into what collectives give, that they share; with these.
    """
    own = dict[fx.Node, Holders]()
    while True:
        inputs = iter(places)
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta[HOLDERS] = numbered(next(inputs))
                continue
            node.meta[HOLDERS] = found = _given(node, count)
            if node in own:
                node.meta[HOLDERS] = together(frozenset((found, own[node])))
        writes = [(node, x) for node in calls(graph) for x in written(node)]
        lie = memories(graph) if writes else {}
        parted = {
            (memory.maker, node)
            for node, x in writes
            for memory in lie[x]
            if memory.maker.meta[HOLDERS] != node.meta[HOLDERS]
        }
        if not parted:
            return graph
        shared = {maker for maker, _ in parted if maker.op == "placeholder" or isinstance(maker.target, Collective)}
        if shared:
            raise RanksDiffer(*shared)
        for maker, node in parted:
            own[maker] = together(frozenset((own.get(maker, maker.meta[HOLDERS]), node.meta[HOLDERS])))


def _given(node: fx.Node, count: int) -> Holders:
    """Which ranks are given the same."""
    if isinstance(node.target, Collective):
        return arrived(node.target, node.args[0].meta[HOLDERS])  # type: ignore[union-attr]
    if ARRIVED in node.meta and node.target is operator.getitem and not node.args[0].target.lends:  # type: ignore
        return node.meta[ARRIVED]
    like = node.args[0] if name_of(node) in _LIKE else None  # of which the shape alone is looked at
    columns = {x.meta[HOLDERS] for x in node.all_input_nodes if x is not like}
    columns.update(numbered(number.values) for number in numbers_in((node.args, node.kwargs)))
    return together(frozenset(columns)) if columns else (0,) * count


_LIKE = {f"{name}_like" for name in ("empty", "full", "ones", "zeros")}
_LIKE |= {f"new_{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros")}


def numbers_in(x: Any) -> Iterator[PerRank]:
    """The numbers in arguments of which each rank has its own."""
    if isinstance(x, PerRank):
        yield x
    elif isinstance(x, (list, tuple)):
        for one in x:
            yield from numbers_in(one)
    elif isinstance(x, dict):
        yield from numbers_in(list(x.values()))


def arrived(collective: Collective, given: Holders) -> Holders:
    """Which of the ranks that are played here get the same of a collective, where these have the same before.

    What ranks have that other processes play is not known: a group in which they are gets something of its own."""
    communicator = communicator_of(collective.mesh)
    groups = [communicator.group_of(at, collective.axes) for at in range(len(given))]
    had = dict(zip(communicator.ranks, given, strict=True))
    what = {group: tuple(map(had.get, group)) for group in set(groups)}
    keys = {group: (group, row) if None in row else row for group, row in what.items()}
    if TABLE[collective.kind].shared:
        return numbered(map(keys.__getitem__, groups))
    return numbered((keys[group], group.index(rank)) for rank, group in zip(communicator.ranks, groups))


def firsts(holders: Holders) -> list[int]:
    """Of those that hold the same, the first rank of each."""
    return [holders.index(k) for k in range(1 + max(holders))]


def runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """The calls of one rank's program in order: each collective alone, or call for all ranks at once, and between them what one
    rank does before the next rank does it. Another run begins where memory is written that other ranks still look at in this
    one, or is looked at that they still write; and after some calls, as a processor that soon comes back to the same ones has
    their code at hand (a step on small blocks takes a tenth longer where each rank goes through all of it at once)."""
    lie = memories(graph)
    last = last_uses(graph, lie)
    return [part for run in _apart(graph, lie) for part in _in_turns(run, lie, last)]


def _in_turns(
    run: list[fx.Node], lie: Mapping[fx.Node, frozenset[Memory]], last: Mapping[Memory, fx.Node]
) -> Iterator[list[fx.Node]]:
    """A run in parts of few calls. Between them the least is alive that the run alone needs, as all ranks have it then."""
    place, alive = {node: i for i, node in enumerate(run)}, [0] * (len(run) + 1)
    for i, node in enumerate(run if len(run) > LONGEST else ()):
        for memory in lie[node]:
            if memory.maker is node and last[memory] in place:
                alive[i + 1] += memory.bytes * (1 + max(node.meta[HOLDERS]))
                alive[place[last[memory]] + 1] -= memory.bytes * (1 + max(node.meta[HOLDERS]))
    alive, start, end = list(itertools.accumulate(alive)), 0, 0
    while len(run) - end > LONGEST:
        end = min(range(end + SHORTEST, end + LONGEST + 1), key=alive.__getitem__)
        if alive[end] <= CACHE:
            yield run[start:end]
            start = end
    yield run[start:]


def _apart(graph: fx.Graph, lie: Mapping[fx.Node, frozenset[Memory]]) -> list[list[fx.Node]]:
    """The runs, as long as they can be."""
    found: list[list[fx.Node]] = [[]]
    writes = any(written(node) for node in calls(graph))
    sent = _sent(graph) if writes else {}
    looked: dict[Memory, set[Any]] = {}  # in a run, of a memory: which ranks look at the same, and what handed it on
    wrote: dict[Memory, Any] = {}
    for node in calls(graph):
        if isinstance(node.target, Collective) or AT_ONCE in node.meta:
            found += [node], []
            looked, wrote = {}, {}
            continue
        holders = node.meta[HOLDERS]
        touches = [(memory, sent[x]) for x in (node, *touched(node)) for memory in lie[x]] if writes else []
        changes = [(memory, sent[x]) for x in written(node) for memory in lie[x]]
        parted = any(looked.get(memory, set()) - {(holders, by)} for memory, by in changes)
        if parted or any(wrote.get(memory, by) != by for memory, by in touches):
            found.append([])
            looked, wrote = {}, {}
        found[-1].append(node)
        for memory, by in touches:
            looked.setdefault(memory, set()).add((holders, by))
        wrote.update(changes)
    return [run for run in found if run]


def _sent(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each value the collectives that have handed it on as it is: it lies where it lay on another rank."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in graph.nodes:
        sources = viewed(node) if node.op == "call_function" else []
        by = tuple(dict.fromkeys(one for x in sources for one in found[x]))
        found[node] = (*by, node) if sources and isinstance(node.target, Collective) else by
    return found


class Ownership:
    """Which memory a call of each rank may write over: what no other rank needs then.

    Args:
        lie: where the values of a graph lie.
    """

    def __init__(self, graph: fx.Graph, lie: dict[fx.Node, frozenset[Memory]]) -> None:
        self.lie = lie
        self.run: dict[fx.Node, int] = {}
        self.looked: dict[Memory, set[Any]] = {}  # in which runs, which ranks look at the same, and what handed it on
        if not any(HOLDERS in node.meta for node in graph.nodes):
            return
        run, self.sent = 0, _sent(graph)
        for node in calls(graph):
            run += isinstance(node.target, Collective)
            self.run[node] = run
            for x in () if isinstance(node.target, Collective) else (node, *touched(node)):
                for memory in lie[x]:
                    self.looked.setdefault(memory, set()).add((run, node.meta[HOLDERS], self.sent[x]))

    def may_write(self, x: fx.Node, node: fx.Node) -> bool:
        """Whether `node` may write over `x`, as far as other ranks are concerned."""
        if not self.run:
            return True
        holders, run = node.meta[HOLDERS], self.run[node]
        return all(by.meta[HOLDERS] == holders for by in self.sent[x]) and all(
            memory.maker.meta[HOLDERS] == holders
            and not isinstance(memory.maker.target, Collective)
            and all((run, holders, self.sent[x]) == at for at in self.looked.get(memory, ()) if at[0] == run)
            for memory in self.lie[x]
        )
