"""A choice between branches, and a loop of unknown length: calls of which a value says, when the plan runs, what runs.

A choice is given that value and then what its branches are given, all of them the same; a branch that has no use for something
does not look at it. What one branch gives and another does not, `None` there, is what a derivative needs of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from . import memory_aliases
from .graph import KEPT, calls, has_effect
from .nested import Nested, ends, extracted, reached


@dataclass(frozen=True, eq=False)
class Branches(Nested):
    """A choice, by the number that is its first argument.

    Args:
        labels: what the branches are called.
        read: of how many simulated ranks that number comes, which are to have it alike: how many first arguments there are.
    """

    name: str = "cond"
    labels: tuple[str, ...] = ()
    read: int = 1

    def often(self, i: int) -> tuple[int, str]:
        return 1, f"if {self.labels[i]} is chosen"

    def told(self, i: int) -> tuple[str, str, str]:
        return self.labels[i], *super().told(i)[1:]


@dataclass(frozen=True, eq=False)
class While(Nested):
    """A loop that runs as long as its first body says. The second one gives the new carry. Both are given the carry, and what
    is the same in all iterations.

    Args:
        carry: how many values are carried.
        apart: whether simulated ranks may differ in what the first body says, and one that goes on will do.
    """

    name: str = "while_loop"
    carry: int = 0
    apart: bool = False

    def often(self, i: int) -> tuple[int, str]:
        return 1, "each time"

    def told(self, i: int) -> tuple[str, str, str]:
        _, given, gives = super().told(i)
        return ("as long as", given, gives) if i == 0 else ("each time", given, gives)


def shared(body: fx.Graph) -> list[int]:
    """The places of the results that may be the memory of something that a body is given, or of another result."""
    lie, seen, found = memory_aliases.memories(body), set[Any](), []
    for i, out in enumerate(ends(body)[1]):
        if out is None:
            continue
        if any(memory in seen or memory.maker.op == "placeholder" for memory in lie[out]):
            found.append(i)
        seen |= lie[out]
    return found


def prune(node: fx.Node) -> None:
    """Leave out of a choice what nobody needs of its results, and what only that needs."""
    branches: Any = node.target
    parts: list[Any] = [part for part in node.users if part.users]
    gives = sorted({part.args[1] for part in parts})
    made = []
    for body in branches.bodies:
        places, outs = ends(body)
        acts = [x for x in calls(body) if has_effect(x) or KEPT in x.meta]
        live = reached([*acts, *(outs[i] for i in gives if outs[i] is not None)])
        made.append((places, live, [outs[i] for i in gives], [x for x in calls(body) if x in live]))
    count = len(node.args) - branches.read
    used = [i for i in range(count) if any(places[i] in live for places, live, *_ in made)]
    if len(gives) == len(node.meta["val"]) and len(used) == count:
        return
    bodies = tuple(extracted(nodes, [places[i] for i in used], outs) for places, _, outs, nodes in made)
    node.target = replace(branches, bodies=bodies)
    node.args = (*node.args[: branches.read], *(node.args[branches.read + i] for i in used))
    node.meta["val"] = [node.meta["val"][i] for i in gives]
    for part in list(node.users):
        if part in parts:
            part.args = (node, gives.index(part.args[1]))
        else:
            node.graph.erase_node(part)
