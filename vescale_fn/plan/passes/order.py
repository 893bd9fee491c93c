"""The calls in an order that needs less memory at once.

Three moves. A call that makes more than it would keep alive comes right before its first use (factories, casts, views). One
that uses up more than it makes comes as soon as it can. The updates of a parameter, which nothing else waits for, come
together, and where their results are written over donated arguments as soon as the gradient is there, so that gradients do
not all live at once.

Collectives, and calls with effects, keep their order among themselves: ranks may hold blocks of different sizes and move
local calls differently, but they meet in the same collectives in the same order.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from ...wire import Collective
from .. import aliasing, dependencies, inplace
from .. import graph as plan
from .donate import DONATED

Line = Sequence[fx.Node]

_STEP = 1e-6  # between calls that come to one place; far less than 1 / how many there are


def order(graph: fx.Graph) -> fx.Graph:
    """The graph in the order that needs least, of those that are tried."""
    facts = _Facts(graph)
    given: Line = list(graph.nodes)
    tried: list[Line] = [given]
    for moves in ((_next_to_use, _as_soon_as_it_frees), (_updates, _next_to_use, _as_soon_as_it_frees), (_updates,)):
        tried.append(functools.reduce(lambda line, move: move(facts, line), moves, given))
    best = min(tried, key=facts.peak)
    new = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in best:
        values[node] = new.node_copy(node, values.__getitem__)
    return new


class _Facts:
    """What does not depend on the order: where values lie, and what must come before what."""

    def __init__(self, graph: fx.Graph) -> None:
        self.lie = aliasing.memories(graph)
        self.bytes = {memory: memory.bytes for memory in frozenset().union(*self.lie.values())}
        fixed = plan.changed(graph)
        turns = [node for node in plan.calls(graph) if _takes_turns(node)]
        self.movable = {
            node for node in plan.calls(graph) if not (node in fixed or _takes_turns(node) or plan.has_effect(node))
        }
        self.needed = dependencies.needs(graph)
        for one, other in itertools.pairwise(turns):
            self.needed[other].append(one)
        self.made = {node: [m for m in self.lie[node] if m.maker is node] for node in graph.nodes}
        self.read = {
            node: list(dict.fromkeys(m for x in node.all_input_nodes for m in self.lie[x])) for node in graph.nodes
        }
        self.results = frozenset(m for x in plan.output(graph).all_input_nodes for m in self.lie[x])

    def ends(self, line: Line) -> dict[aliasing.Memory, fx.Node]:
        """For each memory, the last call that needs it."""
        return {memory: node for node in line for memory in (*self.made[node], *self.read[node])}

    def arranged(self, place: dict[fx.Node, float]) -> Line:
        """The calls, each as early as its place and what it needs allow."""
        return dependencies.in_order(self.needed, place)

    def size(self, memories: Iterable[aliasing.Memory]) -> int:
        return sum(map(self.bytes.__getitem__, memories))

    def peak(self, line: Line) -> int:
        """The most that is alive at once in an order, if results are written over what dies and what is donated."""
        ends, live, most = self.ends(line), 0, 0
        donated: Counter[int] = Counter()  # dead donated arguments, which results may take: how many of a size
        for node in line:
            if node.op != "call_function":
                continue
            dying = [memory for memory in self.read[node] if ends[memory] is node]
            made = self.size(self.made[node])
            donated.update(self.bytes[m] for m in dying if m.maker.op == "placeholder" and DONATED in m.maker.meta)
            dying = [memory for memory in dying if memory.maker.op == "call_function"]
            over = inplace.is_pointwise(node) and any(self.bytes[memory] == made for memory in dying)
            if donated[made] and made and not self.results.isdisjoint(self.made[node]):
                donated[made] -= 1
                live -= made  # it is no new memory
            live += made
            most = max(most, live - made if over else live)
            live -= self.size(dying)
            live -= self.size(memory for memory in self.made[node] if ends[memory] is node)
        return most


def _takes_turns(node: fx.Node) -> bool:
    """Whether other ranks, or the world outside, take part in a call."""
    return isinstance(node.target, Collective) or (isinstance(node.target, plan.Step) and node.target.effect)


def _next_to_use(facts: _Facts, line: Line) -> Line:
    """Each call that makes at least what it would keep alive right before its first use."""
    place = {node: float(i) for i, node in enumerate(line)}
    ends = {memory: place[node] for memory, node in facts.ends(line).items()}
    for node in reversed(line):
        if node not in facts.movable or not node.users or any(user.op == "output" for user in node.users):
            continue
        first = min(place[user] for user in node.users)
        longer = [m for m in facts.read[node] if m.maker.op == "call_function" and ends[m] < first]
        if not longer or facts.size(facts.made[node]) > facts.size(longer):
            place[node] = first - _STEP
            ends.update(dict.fromkeys(longer, place[node]))
    return facts.arranged(place)


def _as_soon_as_it_frees(facts: _Facts, line: Line) -> Line:
    """Each call that uses up more than it makes as soon as what it reads is there."""
    place = {node: float(i) for i, node in enumerate(line)}
    ends = {memory: place[node] for memory, node in facts.ends(line).items()}
    turn = itertools.count(1)
    for node in line:
        if node not in facts.movable:
            continue
        freed = [m for m in facts.read[node] if m.maker.op == "call_function" and ends[m] == place[node]]
        if facts.size(facts.made[node]) < facts.size(freed):
            ready = max((place[x] for x in facts.needed[node]), default=0.0)
            place[node] = min(place[node], ready + _STEP * next(turn))
            ends.update(dict.fromkeys(freed, place[node]))
    return facts.arranged(place)


def _updates(facts: _Facts, line: Line) -> Line:
    """What only results wait for, in groups of calls on values of one shape: each group at once, early where it frees."""
    place = {node: float(i) for i, node in enumerate(line)}
    last: set[fx.Node] = set()
    for node in reversed(line):
        cheap = node in facts.movable and (inplace.is_pointwise(node) or plan.viewed(node))
        if cheap and all(user in last or user.op == "output" for user in node.users):
            last.add(node)
    turn = itertools.count(1)

    def ready(x: fx.Node) -> float:
        """When a value is there; a single number that only updates need is made when what it is made of is there."""
        if x in last and _size(x) <= 1:
            place[x] = max(map(ready, facts.needed[x]), default=0.0) + _STEP * next(turn)
        return place[x]

    ends = facts.ends(line)
    for group in _groups([node for node in line if node in last]):
        inside = set(group)
        before = [x for node in group for x in facts.needed[node] if x not in inside]
        after = max(map(ready, before), default=0.0) if _frees(facts, group, ends) else float(len(line))
        for node in group:
            place[node] = after + _STEP * next(turn)
    return facts.arranged(place)


def _size(node: fx.Node) -> int:
    value = plan.value(node)
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _groups(line: Line) -> list[list[fx.Node]]:
    """Calls that are connected by values of one shape, of more than one element, each group in order."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in line:
        group = found[node] = [node]
        for x in node.all_input_nodes:
            if x in found and _size(x) == _size(node) > 1 and found[x] is not group:
                small, group = sorted((found[x], group), key=len)
                group += small
                found.update(dict.fromkeys(small, group))
    rank = {node: i for i, node in enumerate(line)}
    groups = {id(group): group for group in found.values()}.values()
    return [sorted(group, key=rank.__getitem__) for group in groups if _size(group[0]) > 1]


def _frees(facts: _Facts, group: Sequence[fx.Node], ends: dict[aliasing.Memory, fx.Node]) -> bool:
    """Whether fewer bytes are alive behind a group than before it, where results take the memory of donated arguments."""
    inside = set(group)
    stays = [m for node in group for m in facts.made[node] if any(user not in inside for user in node.users)]
    read = dict.fromkeys(m for node in group for m in facts.read[node] if m.maker not in inside)
    goes = [m for m in read if ends[m] in inside and (m.maker.op == "call_function" or DONATED in m.maker.meta)]
    return facts.size(stays) < facts.size(goes)
