"""Results written into the memory of donated arguments."""

from __future__ import annotations

import functools
import operator
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..._core.distributed.collectives import Start
from ..ir import graph as plan
from ..ir import inplace, memory_aliases
from ..ir.graph import DONATED, HOLDERS, held_alike
from ..ir.mapped import Mapped, mapped, own, split
from . import buckets


def donate(graph: fx.Graph, gives: Collection[int] | None = None) -> fx.Graph:
    """Write results where donated arguments lie, so that there is no second copy of parameters and of moments.

    Each donated argument (a placeholder with ``meta["donated"]``) takes the result that is computed from it element by
    element, else the first that is of its shape, dtype and layout. The call that makes that result writes in place, where
    it works element by element and nothing needs the argument any more; else the result is copied there as soon as may be.

    Args:
        gives: the places of the results that may be written there; None for all.
    """
    graph = plan.copied(graph)
    if not _donated(graph):
        return graph
    if any(True for _ in mapped(graph)):
        _map_over(graph)
    places = _Places(graph)
    for target, result in _pairs(graph, places, gives):
        _write(graph, places, target, result)
    hand_over(graph)
    return graph


def _donated(graph: fx.Graph) -> set[memory_aliases.Memory]:
    return {memory_aliases.Memory(x) for x in graph.nodes if x.op == "placeholder" and DONATED in x.meta}


class _Places:
    """Where everything lies, before any result has moved, and who uses what is donated."""

    def __init__(self, graph: fx.Graph) -> None:
        self.lie = memory_aliases.memories(graph)
        self.changed = plan.changed(graph)
        self.writers: dict[memory_aliases.Memory, fx.Node] = {}  # of donated memory
        donated = _donated(graph)
        self.users: dict[memory_aliases.Memory, list[fx.Node]] = {}
        for node in graph.nodes:
            for memory in (m for x in memory_aliases.touched(node) for m in self.lie[x] if m in donated):
                users = [
                    node,
                    *(node.users if isinstance(node.target, Start) else ()),
                ]  # until it has arrived, it is read
                self.users.setdefault(memory, []).extend(users)

    def uses(self, node: fx.Node) -> list[fx.Node]:
        """The calls that need something in a node's memory."""
        return [user for memory in self.lie[node] for user in self.users.get(memory, ())]

    def taken(self, given: Sequence[fx.Node]) -> bool:
        """Whether some result takes the memory of one of these already."""
        return any(memory in self.writers for x in given for memory in self.lie[x])

    def may_move(self, node: fx.Node, behind: fx.Node) -> bool:
        """Whether all that a call reads is still there behind a later call."""
        if not self.changed.isdisjoint(node.all_input_nodes):
            return False
        read = frozenset().union(*(self.lie[x] for x in node.all_input_nodes))
        return not any(memory in self.writers and self.writers[memory] <= behind for memory in read)


def _map_over(graph: fx.Graph) -> None:
    """Have formulas that are mapped over many leaves write over those of their columns that are donated."""
    places, count = _Places(graph), len(graph.nodes)
    lent, made = _lent(graph, places), dict[Any, Mapped]()
    if len(graph.nodes) > count:  # some were split
        places = _Places(graph)
    for node, columns in lent.items():
        target: Any = node.target
        leave: Any = [part.args[1] for part in node.users if all(x.op == "output" for x in part.users)]
        gives = sorted({place // target.rows for place in leave})
        taken = _in_time(node, target.taken(columns, gives, _pairs_of), places)
        if taken:
            key = target.bodies, *taken, None, *gives
            if key not in made:
                made[key] = target.over(taken, functools.partial(donate, gives=gives))
            node.target = replace(made[key], rows=target.rows, on_leaves=target.on_leaves)
            places.writers.update((memory_aliases.Memory(x), node) for x in plan.written(node))


def _lent(graph: fx.Graph, places: _Places) -> dict[fx.Node, tuple[int, ...]]:
    """The calls that are mapped over leaves, and of each the columns that are donated: rows of which others are get a call of
    their own."""
    kept = frozenset().union(*(places.lie[x] for x in results(graph) if isinstance(x, fx.Node)))
    found: dict[fx.Node, tuple[int, ...]] = {}
    for node, target in mapped(graph):
        alone, rows = own(node, places.lie), dict[tuple[int, ...], list[int]]()
        for i, row in enumerate(zip(*target.lists(node))):
            free = (j for j, x in enumerate(row) if _is_free(x, places, kept) and alone(x))
            rows.setdefault(tuple(free), []).append(i)
        found.update(zip(split(node, list(rows.values())), rows))
    return found


def _is_free(x: fx.Node, places: _Places, kept: frozenset[memory_aliases.Memory]) -> bool:
    """Whether a value is a donated argument that no result shows."""
    given = x.op == "placeholder" and DONATED in x.meta
    return given and x not in places.changed and places.lie[x].isdisjoint(kept)


def _in_time(node: fx.Node, columns: Sequence[int], places: _Places) -> list[int]:
    """Those of some columns that nothing needs behind a call, which is put behind the last such use if it may."""
    lists: Any = node.args
    columns = [j for j in columns if not places.taken(lists[j])]
    late = {j: [y for x in lists[j] for y in places.uses(x) if node < y] for j in columns}
    last = max((y for users in late.values() for y in users), default=node)
    after = (user for part in node.users for user in part.users)
    if last is not node and places.may_move(node, last) and all(last < user for user in after):
        last.append(node)
        for part in reversed(list(node.users)):
            node.append(part)
        return columns
    return [j for j in columns if not late[j]]


def _pairs_of(body: fx.Graph, gives: Collection[int]) -> list[fx.Node]:
    """The donated arguments that take some of the results."""
    return [target for target, _ in _pairs(body, _Places(body), gives)]


def results(graph: fx.Graph) -> list[Any]:
    """What the plan gives back."""
    return list(plan.output(graph).args[0])  # type: ignore[arg-type]


def _pairs(graph: fx.Graph, places: _Places, gives: Collection[int] | None = None) -> list[tuple[fx.Node, fx.Node]]:
    """Donated arguments, each with the result that takes its memory."""
    given = results(graph)
    chosen = [x for i, x in enumerate(given) if gives is None or i in gives]
    kept = frozenset().union(*(places.lie[x] for x in given if isinstance(x, fx.Node)))
    free = {x: None for x in graph.nodes if _is_free(x, places, kept)}
    lying = Counter(memory for x in set(given) if isinstance(x, fx.Node) for memory in places.lie[x])
    waiting = [x for x in dict.fromkeys(chosen) if isinstance(x, fx.Node) and _has_its_own(x, lying, places)]
    pairs = []
    for choose in (_origin, _First(free)):
        rest = []
        for result in waiting:
            target = choose(result, free)
            if target is None or not held_alike(target, result):
                rest.append(result)
            else:
                pairs.append((target, result))
                del free[target]
        waiting = rest
    return pairs


def _has_its_own(result: fx.Node, lying: Counter[memory_aliases.Memory], places: _Places) -> bool:
    """Whether a result lies in memory that the plan made, where no other result lies. `lying`: how many results lie in each."""
    return len(lie := places.lie[result]) == 1 and all(x.maker.op == "call_function" and lying[x] == 1 for x in lie)


def _origin(result: fx.Node, free: dict[fx.Node, None]) -> fx.Node | None:
    """The nearest donated argument that a result is computed from element by element."""
    todo, seen = deque([result]), {result}
    while todo:
        node = todo.popleft()
        if node in free:
            return node if inplace.alike(plan.value(node), plan.value(result)) else None
        if inplace.is_pointwise(node):
            before = [x for x in node.all_input_nodes if x not in seen and _same_shape(x, result)]
            todo.extend(before)
            seen.update(before)
    return None


def _same_shape(x: fx.Node, y: fx.Node) -> bool:
    value = plan.value(x)
    return isinstance(value, torch.Tensor) and value.shape == plan.value(y).shape


class _First:
    """The first donated argument that is of a result's shape, dtype and layout."""

    def __init__(self, free: dict[fx.Node, None]) -> None:
        self._alike: dict[Any, deque[fx.Node]] = {}
        for node in free:
            self._alike.setdefault(self._kind(node), deque()).append(node)

    def __call__(self, result: fx.Node, free: dict[fx.Node, None]) -> fx.Node | None:
        waiting = self._alike.get(self._kind(result), deque())
        while waiting and waiting[0] not in free:
            waiting.popleft()
        return waiting[0] if waiting else None

    def _kind(self, node: fx.Node) -> Any:
        found = inplace.kind(plan.value(node))
        return node if found is None else (found, node.meta.get(HOLDERS))


def _write(graph: fx.Graph, places: _Places, target: fx.Node, result: fx.Node) -> None:
    """Have `result` written into the memory of `target`."""
    used = max([target, *(node for node in places.uses(target) if node is not result)])
    changed = result in places.changed
    later = [node for node in result.users if node.op != "output" and not used < node]
    stays = used < result or places.may_move(result, used)
    if stays and not changed and not later and (call := _fitting(places, target, result)) is not None:
        if result < used:
            used.append(result)  # behind the last use
        place = target
        if result.args[:1] == (used,) and (earlier := _earlier(places, target, used, result)) is not None:
            used.target, used.args, used.kwargs = earlier
            call, place = inplace.written_into(result, used), used
        result.target, result.args, result.kwargs = call
        places.writers[memory_aliases.Memory(target)] = used if place is used else result
        return
    whole = _unpacked(result)
    if whole is not None and used < whole and not changed:
        found = buckets.written_into(whole, result.args[1], target)  # type: ignore[arg-type]
        if found is not None:
            whole.target, whole.args = found
            places.lie[result] = places.lie[target]
            places.writers[memory_aliases.Memory(target)] = whole
            return
    with graph.inserting_after(max(used, result) if not changed else _last(graph)):
        copy = graph.call_function(torch.ops.aten.copy_.default, (target, result))
    copy.meta = dict(result.meta)
    places.lie[copy] = places.lie[target]
    places.writers[memory_aliases.Memory(target)] = copy
    result.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy and copy < user)


def _unpacked(result: fx.Node) -> fx.Node | None:
    """The call that gives a result as one of several, if ranks hold all of these alike: what it writes they hold so, too."""
    whole = result.args[0] if result.target is operator.getitem else None
    return whole if isinstance(whole, fx.Node) and all(held_alike(whole, part) for part in whole.users) else None


def _earlier(places: _Places, target: fx.Node, used: fx.Node, result: fx.Node) -> Any:
    """How the last call before `result` that needs `target` writes over it, if `result` is made of what that gives, over the
    same again, and does not need what was there before."""
    needed = any(places.lie[x] & places.lie[target] for x in result.all_input_nodes)
    alone = list(used.users) == [result] and used not in places.changed and not needed
    alone = alone and held_alike(used, target)
    fits = alone and inplace.alike(plan.value(used), plan.value(target))
    return _fitting(places, target, used) if fits and inplace.written_into(result, used) is not None else None


def _last(graph: fx.Graph) -> fx.Node:
    return plan.output(graph).prev


def _fitting(places: _Places, target: fx.Node, result: fx.Node) -> Any:
    """How the call that makes a result writes into `target`, if it can."""
    if not inplace.is_pointwise(result):
        return None
    for x in result.all_input_nodes:  # what lies in the same memory must be the same elements in the same order
        if places.lie[x] & places.lie[target] and x is not target:
            return None
    return inplace.written_into(result, target)


def hand_over(graph: fx.Graph) -> None:
    """Give back what lies in donated memory as new tensors, that know nothing of those that were given away."""
    if not (donated := _donated(graph)):
        return
    lie, end = memory_aliases.memories(graph), plan.output(graph)
    handed: dict[Any, fx.Node] = {}
    for result in dict.fromkeys(results(graph)):
        if isinstance(result, fx.Node) and lie[result] & donated and not _is_handed_over(result):
            with graph.inserting_before(end):
                handed[result] = graph.call_function(HAND_OVER, (result,))
            handed[result].meta = dict(result.meta)
    end.args = (tuple(handed.get(x, x) for x in results(graph)),)


def _is_handed_over(result: fx.Node) -> bool:
    """Whether it is such a tensor already: one that a formula has given back for each leaf is."""
    part = result.target is operator.getitem and isinstance(result.args[0].target, Mapped)  # type: ignore[union-attr]
    return part or result.target is HAND_OVER


HAND_OVER = plan.Step("handed_over", lambda x: x.data, views=(0,))
