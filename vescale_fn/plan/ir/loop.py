"""A loop in a graph: one call, whose body is a graph of its own, recorded once and run for each iteration.

The call is given the first carry, what it goes over, and what is the same in all iterations; so are the body's placeholders,
with one entry of what it goes over. The body gives the new carry and then what is kept of each iteration.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .graph import KEPT, calls, has_effect, memories
from .nested import Nested, ends, extracted, reached

STACKED, EACH, LAST = "stacked", "each", "last"


@dataclass(frozen=True, eq=False)
class Loop(Nested):
    """A loop, whose body is one iteration.

    Args:
        length: the number of iterations.
        reverse: whether it goes over its slices from the last one.
        carry: how many values are carried.
        slices: for each thing that it goes over whether it is a tensor, which is cut along its leading dim (`STACKED`), or a
            list with a value for each iteration (`EACH`).
        keeps: for each result of the body after the carry what becomes of it: all along a new dim (`STACKED`), a list of all
            (`EACH`), the last (`LAST`); or, a tuple of their numbers, those of some iterations along a new dim.
    """

    name: str = "loop"
    length: int = 0
    reverse: bool = False
    carry: int = 0
    slices: tuple[str, ...] = ()
    keeps: tuple[str | tuple[int, ...], ...] = ()

    @property
    def body(self) -> fx.Graph:
        """The graph of one iteration."""
        return self.bodies[0]

    @property
    def begun(self) -> int:
        """How many of the last things that the body is given were made in another part of it."""
        return 0

    def joined(self) -> Loop:
        """The loop whose body is whole: itself, where it is not in parts."""
        return self

    @property
    def crossing(self) -> tuple[int, int]:
        """The bytes of what an iteration has begun for the one behind it, and of what it has left for that to end."""
        return 0, 0

    @property
    def shifted(self) -> dict[int, int]:
        """By the place of a list of a carried value, as each iteration gets it, the place of a list of the same as each gives
        it: one has the entries of the other, an iteration later, and its first."""
        places, outs = ends(self.body)
        lists = {i: outs[i] for i, kind in enumerate(self.keeps, self.carry) if kind == EACH}
        first = {x: i for i, x in reversed(lists.items()) if x is not None and x.op == "call_function"}
        new = {place: first[x] for place, x in zip(places[: self.carry], outs) if x in first}
        pairs = {i: new[x] for i, x in lists.items() if x in new}
        if not pairs:
            return {}
        lie, given = memories(self.body), set(places[self.carry :])  # what may be the memory of a slice is copied
        return {i: j for i, j in pairs.items() if lie[outs[j]].isdisjoint(given)}

    def often(self, i: int) -> tuple[int, str]:
        return self.length, ""

    def told(self, i: int) -> tuple[str, str, str]:
        places, outs = ends(self.body)
        end, count = len(places) - self.begun, self.carry + len(self.keeps)
        rows = {
            "": places[: self.carry],
            "of each ": places[self.carry : self.given],
            "the same ": places[self.given : end],
            "begun ": places[end:],
        }
        given = "; ".join(word + ", ".join(x.name for x in xs) for word, xs in rows.items() if xs)
        words = {LAST: "of the last", STACKED: "of each", EACH: "of each"}
        kept = [
            f"{x} {words.get(kind, 'of its own')}"  # type: ignore[arg-type]
            for x, kind in zip(outs[self.carry : count], self.keeps)
            if x is not None
        ]
        kept += [f"{x} for later" for x in outs[count:]]
        when = f"{self.length} times{', from the last' if self.reverse else ''}"
        return when, given, ", ".join([*(str(x) for x in outs[: self.carry] if x is not None), *kept])

    @property
    def given(self) -> int:
        """How many arguments are not the same in all iterations."""
        return self.carry + len(self.slices)


def loops(graph: fx.Graph) -> list[fx.Node]:
    """The loops of a graph, without those in their bodies."""
    return [node for node in calls(graph) if isinstance(node.target, Loop)]


def loop_of(node: fx.Node) -> Loop:
    """The loop that a node is."""
    assert isinstance(node.target, Loop)
    return node.target


def is_used_up(x: Any) -> bool:
    """Whether a call is the only one that needs what a loop has kept, which is let go when it was used."""
    return x.target is operator.getitem and isinstance(x.args[0].target, Loop) and len(x.users) == 1


def eaten(node: fx.Node) -> list[int]:
    """The places of the arguments of a loop that are lists of which each iteration lets its own entry go."""
    loop = loop_of(node)
    kinds = enumerate(loop.slices, loop.carry)
    return [i for i, kind in kinds if kind == EACH and is_used_up(node.args[i])]


class Sharing:
    """What would share memory across the edge of a loop's body, and is copied where it crosses.

    Attributes:
        enters: of the carried values, the places of those that are kept as they come: the first is the caller's.
        leaves: those of which the last may be the memory of something else that goes in or comes out.
        kept: of what is kept, the places of what may be the memory of something that the loop is given.
    """

    def __init__(self, loop: Loop) -> None:
        loop = loop.joined()
        lie = memories(loop.body)
        places, outs = ends(loop.body)
        kept = [(i, lie[x]) for i, (x, kind) in enumerate(zip(outs[loop.carry :], loop.keeps)) if kind in (EACH, LAST)]
        all_kept: frozenset[Any] = frozenset().union(*(roots for _, roots in kept))
        self.enters = [i for i, x in enumerate(places[: loop.carry]) if x in all_kept]
        self.kept = {i for i, roots in kept if not roots.isdisjoint(places[loop.carry :])}
        self.leaves = set()
        for i, out in enumerate(outs[: loop.carry]):
            others = frozenset().union(*(lie[x] for j, x in enumerate(outs) if j != i))
            if any(root.op == "placeholder" or root in others for root in lie[out]):
                self.leaves.add(i)


def prune(node: fx.Node) -> None:
    """Leave out of a loop what nobody needs of its results, and what only that needs. A carried value that no iteration changes
    is from then on the same in all iterations."""
    loop = loop_of(node)
    if (needed := _needed(node, loop.carry, loop.body)) is None:
        return
    body, gives, order = needed
    loop = replace(
        loop,
        bodies=(body,),
        carry=sum(i < loop.carry for i in gives),
        slices=tuple(loop.slices[i - loop.carry] for i in order if loop.carry <= i < loop.given),
        keeps=tuple(loop.keeps[i - loop.carry] for i in gives if i >= loop.carry),
    )
    _become(node, loop, gives, order)


def prune_while(node: fx.Node) -> None:
    """The same of a loop of unknown length, of which also what its condition asks for is needed."""
    loop: Any = node.target
    test, body = loop.bodies
    places, holds = ends(test)
    live = reached([*_acting(test), *holds])
    if (needed := _needed(node, loop.carry, body, {i for i, x in enumerate(places) if x in live})) is None:
        return
    body, gives, order = needed
    test = extracted([x for x in calls(test) if x in live], [places[i] for i in order], holds)
    _become(node, replace(loop, bodies=(test, body), carry=len(gives)), gives, order)


def _needed(
    node: fx.Node, carry: int, body: fx.Graph, asked: Collection[int] = ()
) -> tuple[fx.Graph, list[int], list[int]] | None:
    """What is needed of a loop: the body of an iteration that does no more, the places of its results, and those of what it is
    given, in order. None where all is. `asked`: the places of what is needed besides."""
    places, outs = ends(body)
    fixed = {i for i in range(carry) if outs[i] is places[i]}
    wanted: set[Any] = {part.args[1] for part in node.users if part.users}  # type: ignore[misc]
    wanted = (wanted | {i for i in asked if i < carry}) - fixed
    while True:
        live = reached([*_acting(body), *(outs[i] for i in wanted)])
        more = {i for i in range(carry) if places[i] in live} - wanted - fixed
        if not more:
            break
        wanted |= more
    gives, used = sorted(wanted), [i for i, x in enumerate(places) if x in live or i in wanted or i in asked]
    if len(gives) == len(outs) and len(used) == len(places):
        return None
    order = sorted(used, key=fixed.__contains__)
    nodes = [x for x in calls(body) if x in live]
    return extracted(nodes, [places[i] for i in order], [outs[i] for i in gives]), gives, order


def _acting(body: fx.Graph) -> list[fx.Node]:
    return [x for x in calls(body) if has_effect(x) or KEPT in x.meta]


def _become(node: fx.Node, loop: Nested, gives: list[int], order: list[int]) -> None:
    """Let a loop become one that gives and is given less. What takes results out of it takes them from their new places; of the
    rest, what comes out is what went in."""
    given = node.args
    node.target, node.args = loop, tuple(given[i] for i in order)
    node.meta["val"] = [node.meta["val"][i] for i in gives]
    for part in list(node.users):
        place: Any = part.args[1]
        if place in gives:
            part.args = (node, gives.index(place))
            continue
        if part.users:
            with node.graph.inserting_after(node):
                copy = node.graph.call_function(torch.ops.aten.clone.default, (given[place],))
                copy.meta = dict(part.meta)
            part.replace_all_uses_with(copy)
        node.graph.erase_node(part)
