"""The calls in an order that needs less memory at once.

Three moves. A call that makes more than it would keep alive comes right before its first use (factories, casts, views). One
that uses up more than it makes comes as soon as it can. The updates of a parameter, which nothing else waits for, come
together, and where their results are written over donated arguments as soon as the gradient is there, so that gradients do
not all live at once.

Collectives, and calls with effects, keep their order among themselves: ranks may hold blocks of different sizes and move
local calls differently, but they meet in the same collectives in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import fx

from ..ir import graph as plan
from ..ir import inplace, memory_aliases
from ..ir.graph import DONATED
from ..ir.liveness import Facts, Line
from . import exact_order

_STEP = 1e-6  # between calls that come to one place; far less than 1 / how many there are


def order(graph: fx.Graph) -> fx.Graph:
    """The graph in the order that needs least, of those that are tried."""
    facts = Facts(graph)
    given: Line = list(graph.nodes)
    joint = _updates(facts, given)
    moved = [_as_soon_as_it_frees(facts, _next_to_use(facts, line)) for line in (given, joint)]
    tried = list({id(line): line for line in (given, *moved, joint)}.values())
    best = exact_order.refined(facts, min(tried, key=lambda line: max(facts.live(line))))
    return plan.reordered(graph, best)[0]


def updated(graph: fx.Graph) -> fx.Graph:
    """The graph in the order of all moves, also where the most that is alive at once is not less for it."""
    facts = Facts(graph)
    line = _as_soon_as_it_frees(facts, _next_to_use(facts, _updates(facts, list(graph.nodes))))
    return plan.reordered(graph, line)[0]


def _next_to_use(facts: Facts, line: Line) -> Line:
    """Each call that makes at least what it would keep alive right before its first use."""
    place = {node: float(i) for i, node in enumerate(line)}
    ends, movable = facts.ends(line), [node for node in line if node in facts.movable]
    for node in reversed(movable):
        if not node.users or any(user.op == "output" for user in node.users):
            continue
        first = min(place[user] for user in node.users)
        longer = [m for m in facts.read[node] if m.maker.op == "call_function" and ends[m] < first]
        if not longer or facts.size(facts.made[node]) > facts.size(longer):
            place[node] = first - _STEP
            ends.update(dict.fromkeys(longer, place[node]))
    return facts.arranged(place, line)


def _as_soon_as_it_frees(facts: Facts, line: Line) -> Line:
    """Each call that uses up more than it makes as soon as what it reads is there."""
    place = {node: float(i) for i, node in enumerate(line)}
    ends, movable = facts.ends(line), [node for node in line if node in facts.movable]
    turn = itertools.count(1)
    for node in movable:
        freed = [m for m in facts.read[node] if m.maker.op == "call_function" and ends[m] == place[node]]
        if facts.size(facts.made[node]) < facts.size(freed):
            ready = max((place[x] for x in facts.needed[node]), default=0.0)
            place[node] = min(place[node], ready + _STEP * next(turn))
            ends.update(dict.fromkeys(freed, place[node]))
    return facts.arranged(place, line)


def _updates(facts: Facts, line: Line) -> Line:
    """What only results wait for, in groups of calls on values of one shape: each group at once, early where it frees."""
    place = {node: float(i) for i, node in enumerate(line)}
    movable, turn = [node for node in line if node in facts.movable], itertools.count(1)
    for node in movable:  # single numbers, which all updates may need, when what they are made of is there
        if _size(node) <= 1:
            ready = max((place[x] for x in facts.needed[node]), default=0.0) + _STEP * next(turn)
            place[node] = min(place[node], ready)
    last = _last(movable)
    ends = {memory: line[int(at)] for memory, at in facts.ends(line).items()} if last else {}
    for group in _groups(last):
        inside = set(group)
        before = [x for node in group for x in facts.needed[node] if x not in inside]
        after = max((place[x] for x in before), default=0.0) if _frees(facts, group, ends) else float(len(line))
        for node in group:
            place[node] = after + _STEP * next(turn)
    return facts.arranged(place, line)


def _last(line: Line) -> Line:
    """What only results wait for."""
    found: set[fx.Node] = set()
    for node in reversed(line):
        cheap = inplace.is_pointwise(node) or plan.viewed(node)
        if cheap and all(user in found or user.op == "output" for user in node.users):
            found.add(node)
    return [node for node in line if node in found]


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


def _frees(facts: Facts, group: Sequence[fx.Node], ends: dict[memory_aliases.Memory, fx.Node]) -> bool:
    """Whether fewer bytes are alive behind a group than before it, where results take the memory of donated arguments."""
    inside = set(group)
    stays = [m for node in group for m in facts.made[node] if any(user not in inside for user in node.users)]
    read = dict.fromkeys(m for node in group for m in facts.read[node] if m.maker not in inside)
    goes = [m for m in read if ends[m] in inside and (m.maker.op == "call_function" or DONATED in m.maker.meta)]
    return facts.size(stays) < facts.size(goes)
