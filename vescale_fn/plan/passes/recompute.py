"""Cheap values computed again where they are needed late, instead of being kept over the peak.

What a forward pass keeps for the backward pass is, to a large part, what follows from other kept things at the cost of one
reading: activation functions, normalisations, casts. The same call on the same values gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from .. import aliasing, inplace
from .. import graph as plan

SMALLEST = 256 << 10  # bytes; for less it is not worth a call
_CHEAP = {"native_layer_norm", "_fused_rms_norm", "rms_norm", "_to_copy", "cat", "arange", "full", "zeros", "ones",
          "zeros_like", "ones_like", "full_like", "roll", "layer_norm"}  # fmt: skip


@dataclass(frozen=True)
class _Value:
    """A value that could be computed again: where it is idle, from the last use before to the first use behind."""

    memory: aliasing.Memory
    start: int
    stop: int
    bytes: int
    sources: frozenset[aliasing.Memory]


def recompute(graph: fx.Graph, smallest: int = SMALLEST) -> fx.Graph:
    """Compute values again until the peak cannot be lowered in that way, and no more of them than that takes.

    Args:
        smallest: values of fewer bytes are kept.
    """
    graph = plan.copied(graph)
    lie = aliasing.memories(graph)
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    uses: dict[aliasing.Memory, list[int]] = {}
    for node in nodes:
        for x in (node, *node.all_input_nodes):
            for memory in lie[x]:
                if not uses.setdefault(memory, []) or uses[memory][-1] != place[node]:
                    uses[memory].append(place[node])
    live = _live(nodes, uses)
    kept = plan.changed(graph)
    found = [
        value
        for memory in uses
        if memory.part >= 0 and memory.bytes >= smallest and _is_cheap(memory.maker) and memory.maker not in kept
        for value in _idle(memory, uses, lie)
    ]
    for value in _chosen(found, live):
        _compute_again(graph, nodes, value, [nodes[i] for i in uses[value.memory] if i >= value.stop], lie)
    return graph


def _live(nodes: list[fx.Node], uses: dict[aliasing.Memory, list[int]]) -> list[int]:
    """How many bytes are alive at each node, besides arguments."""
    change = [0] * (len(nodes) + 1)
    for memory, at in uses.items():
        if memory.maker.op == "call_function":
            change[at[0]] += memory.bytes
            change[at[-1] + 1] -= memory.bytes
    live, total = [], 0
    for one in change[:-1]:
        total += one
        live.append(total)
    return live


def _is_cheap(node: fx.Node) -> bool:
    return inplace.is_pointwise(node) or plan.name_of(node) in _CHEAP


def _idle(memory: aliasing.Memory, uses: dict[aliasing.Memory, list[int]], lie: Any) -> list[_Value]:
    """The longest time for which nothing uses a value, if what it is made of is needed at the end of that time too."""
    at = uses[memory]
    start, stop = max(zip(at, at[1:]), key=lambda pair: pair[1] - pair[0], default=(0, 0))
    sources = frozenset(source for x in memory.maker.all_input_nodes for source in lie[x])
    there = all(source.maker.op == "placeholder" or uses[source][-1] >= stop for source in sources)
    return [_Value(memory, start, stop, memory.bytes, sources)] if there and stop - start > 1 else []


def _chosen(values: list[_Value], live: list[int]) -> list[_Value]:
    """Of the values, those that bring the peak down: largest first, and none that another one is made of."""
    live, waiting = list(live), sorted(values, key=lambda value: -value.bytes)
    chosen: list[_Value] = []
    made_of: set[aliasing.Memory] = set()
    while True:
        peak = max(range(len(live)), key=live.__getitem__)
        dropped = {value.memory for value in chosen}
        fits = (
            value
            for value in waiting
            if value.start < peak < value.stop and value.memory not in made_of and not dropped & value.sources
        )
        value = next(fits, None)
        if value is None:
            break
        waiting.remove(value)
        chosen.append(value)
        made_of |= value.sources
        _add(live, value, -value.bytes)
    reached = live[peak]
    for value in list(chosen):  # what turned out not to matter stays
        if max(live[value.start + 1 : value.stop]) + value.bytes <= reached:
            _add(live, value, value.bytes)
            chosen.remove(value)
    return chosen


def _add(live: list[int], value: _Value, bytes: int) -> None:
    live[value.start + 1 : value.stop] = [one + bytes for one in live[value.start + 1 : value.stop]]


def _compute_again(graph: fx.Graph, nodes: list[fx.Node], value: _Value, users: list[fx.Node], lie: Any) -> None:
    """Make a value once more before its first use behind the idle time, for all uses from there on."""
    before = set(nodes[: value.stop])
    copies: dict[fx.Node, fx.Node] = {}

    def again(x: fx.Node) -> fx.Node:
        if value.memory not in lie[x]:
            return x
        if x not in copies:
            with graph.inserting_before(nodes[value.stop]):
                for y in x.all_input_nodes:
                    again(y)
                copies[x] = graph.node_copy(x, again)
                copies[x].meta["again"] = True
        return copies[x]

    for user in users:
        for x in user.all_input_nodes:
            if x in before and value.memory in lie[x]:
                user.replace_input_with(x, again(x))
