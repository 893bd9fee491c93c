"""Cheap values computed again where they are needed late, instead of being kept over the peak.

What a forward pass keeps for the backward pass is, to a large part, what follows from other kept things at the cost of one
reading: activation functions, normalisations, casts. The same call on the same values gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from ..ir import graph as plan
from ..ir import memory_aliases
from ..ir.liveness import Facts
from .recompute_in_calls import SMALLEST, STEPS, is_cheap, recompute_in_calls


@dataclass(frozen=True)
class _Value:
    """A value that could be computed again.

    Args:
        memory: where it lies.
        start, stop: the last use before a time in which nothing needs it, and the first use behind that.
        bytes: how many they are.
        made: what is computed again for it: itself, and what that takes that is not there any more.
        sources: what that is computed from, which is there.
        held: those of the sources that wait for it, each with the last use that it has besides.
    """

    memory: memory_aliases.Memory
    start: int
    stop: int
    bytes: int
    made: frozenset[memory_aliases.Memory]
    sources: frozenset[memory_aliases.Memory]
    held: tuple[tuple[memory_aliases.Memory, int], ...] = ()

    @property
    def since(self) -> int:
        """The last use before its time, or before that of what waits for it."""
        return min((self.start, *(last for _, last in self.held)))

    def waits(self, at: int) -> int:
        """The bytes that wait for it at a place in its time, and would not be there."""
        return sum(memory.bytes for memory, last in self.held if last < at)


def recompute(graph: fx.Graph, smallest: int = SMALLEST) -> fx.Graph:
    """Compute values again until the peak cannot be lowered in that way, and no more of them than that takes.

    Args:
        smallest: values of fewer bytes are kept.
    """
    graph = recompute_in_calls(plan.copied(graph), smallest)
    if not any(is_cheap(node) and _largest(plan.value(node)) >= smallest for node in plan.calls(graph)):
        return graph
    nodes, facts, kept = list(graph.nodes), Facts(graph), plan.changed(graph)
    uses: dict[memory_aliases.Memory, list[int]] = {}
    for i, node in enumerate(nodes):
        for memory in dict.fromkeys((*facts.made[node], *facts.read[node])):
            uses.setdefault(memory, []).append(i)
    found = [value for memory in uses if facts.bytes[memory] >= smallest for value in _idle(memory, uses, facts, kept)]
    place = {node: i for i, node in enumerate(nodes)}
    for value in _chosen(found, np.array(facts.live(nodes))):
        users = [nodes[i] for i in uses[value.memory] if i >= value.stop]
        _compute_again(graph, nodes[value.stop], value, users, facts.lie, place)
    return graph


def _largest(value: Any) -> int:
    return max(map(memory_aliases.extent, value if isinstance(value, (list, tuple)) else [value]), default=0)


def _idle(
    memory: memory_aliases.Memory, uses: dict[memory_aliases.Memory, list[int]], facts: Facts, kept: Any
) -> list[_Value]:
    """A value in the longest time for which nothing uses it, if it can be computed again at the end of that time."""
    at = uses[memory]
    start, stop = max(zip(at, at[1:]), key=lambda pair: pair[1] - pair[0], default=(0, 0))
    if stop - start <= 1:
        return []
    made: set[memory_aliases.Memory] = set()
    sources: set[memory_aliases.Memory] = set()
    todo = [memory]
    while todo:
        one = todo.pop()
        if len(made) == STEPS or not _can_be_again(one, facts, kept):
            return _with_held(memory, (start, stop), uses, facts, kept)
        made.add(one)
        for source in facts.read[one.maker]:
            if source.maker.op == "placeholder" or uses[source][-1] >= stop:
                sources.add(source)
            elif source not in made:
                todo.append(source)
    return [_Value(memory, start, stop, facts.bytes[memory], frozenset(made), frozenset(sources))]


def _with_held(
    memory: memory_aliases.Memory,
    idle: tuple[int, int],
    uses: dict[memory_aliases.Memory, list[int]],
    facts: Facts,
    kept: Any,
) -> list[_Value]:
    """The value, if what it is made of is to wait for it: what a norm is given, where the gradient of a weight comes later than
    that of the norm."""
    node = memory.maker
    if not _can_be_again(memory, facts, kept):
        return []
    sources = [x for x in facts.read[node] if x.maker.op != "placeholder"]
    held = tuple((x, uses[x][-1]) for x in sources if uses[x][-1] < idle[1])
    value = _Value(memory, *idle, facts.bytes[memory], frozenset((memory,)), frozenset(facts.read[node]), held)
    return [value] if value.waits(idle[1]) < 2 * value.bytes else []


def _can_be_again(memory: memory_aliases.Memory, facts: Facts, kept: Any) -> bool:
    """Whether the call that makes a value is cheap and gives the same again: nothing writes it, or what it is made of."""
    node = memory.maker
    return memory.part >= 0 and is_cheap(node) and kept.isdisjoint((node, *(x.maker for x in facts.read[node])))


def _chosen(values: list[_Value], live: np.ndarray) -> list[_Value]:
    """Of the values, those that bring the peak down, and none that another one is made of: first what is large and made in few
    calls."""
    waiting = sorted(values, key=lambda value: -value.bytes / len(value.made))
    chosen: dict[memory_aliases.Memory, _Value] = {}
    made_of: set[memory_aliases.Memory] = set()
    while True:
        peak = int(live.argmax())
        fits = (
            value
            for value in waiting
            if value.start < peak < value.stop
            and value.memory not in made_of
            and value.memory not in chosen
            and chosen.keys().isdisjoint(value.sources)
            and (not value.held or (2 * value.waits(peak) < value.bytes and _without(value, live).max() < live[peak]))
        )
        value = next(fits, None)
        if value is None:
            break
        chosen[value.memory] = value
        made_of |= value.sources
        live[value.since + 1 : value.stop + 1] = _without(value, live)
    reached = live[peak]
    for value in list(chosen.values()):  # what turned out not to matter stays
        idle = live[value.start + 1 : value.stop]
        if idle.max() + value.bytes <= reached:
            idle += value.bytes
            del chosen[value.memory]
    return list(chosen.values())


def _without(value: _Value, live: np.ndarray) -> np.ndarray:
    """What is alive without a value in its time, and in that of what waits for it, up to when it is computed again."""
    found = live[value.since + 1 : value.stop + 1].copy()
    found[value.start - value.since : -1] -= value.bytes
    for source, last in value.held:
        found[last - value.since :] += source.bytes
    return found


def _compute_again(
    graph: fx.Graph, at: fx.Node, value: _Value, users: list[fx.Node], lie: Any, place: dict[fx.Node, int]
) -> None:
    """Make a value once more at its first use behind the idle time, for all uses from there on."""
    copies: dict[fx.Node, fx.Node] = {}

    def again(x: fx.Node) -> fx.Node:
        if x not in lie or value.made.isdisjoint(lie[x]):  # what has come in for another value is there
            return x
        if x not in copies:
            with graph.inserting_before(at):
                for y in x.all_input_nodes:
                    again(y)
                copies[x] = graph.node_copy(x, again)
                copies[x].meta["again"] = True
        return copies[x]

    for user in users:
        for x in user.all_input_nodes:
            if place.get(x, value.stop) < value.stop and value.memory in lie[x]:
                user.replace_input_with(x, again(x))
