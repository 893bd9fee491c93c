"""A loop whose iterations reach into each other: what one waits for at its start is begun during the one before it, and what it
begins at its end is waited for after the one behind it.

Its body is in up to three parts: what begins something, from a slice alone; the iteration; what follows from values that arrive
late. The first part of an iteration runs right before the second part of the one before it, the third right after the second of
the one behind it. What goes from part to part, collectives under way among it, is no result of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from . import memory_aliases
from .graph import calls, output
from .loop import Loop
from .nested import ends

OWN = (
    "own in its part"  # in the meta of a placeholder: what comes there is made in another part, and nothing else has it
)


@dataclass(frozen=True, eq=False)
class Rotated(Loop):
    """A loop in parts.

    The first part takes a slice and what is the same in all iterations. The second takes what the body of a loop does, and then
    what the first gives; it gives what the body of a loop does, None for what is late, and then what the third takes behind
    those of the carry that it alone uses, and before what is the same in all iterations.

    Args:
        begins: whether there is the first part.
        late: of the carry and what is kept, the places of what the third part gives; where nothing, there is no such part.
    """

    begins: bool = False
    late: tuple[int, ...] = ()

    @property
    def body(self) -> fx.Graph:
        return self.bodies[self.begins]

    @property
    def begun(self) -> int:
        return len(ends(self.bodies[0])[1]) if self.begins else 0

    @property
    def totals(self) -> tuple[int, ...]:
        """The places of the carry that the third part alone uses."""
        return tuple(i for i in self.late if i < self.carry)

    def often(self, i: int) -> tuple[int, str]:
        return self.length, "an iteration ahead" if i < self.begins else ""

    def told(self, i: int) -> tuple[str, str, str]:
        if i == self.begins:
            return super().told(i)
        places, outs = ends(self.bodies[i])
        when = "an iteration late" if i > self.begins else "an iteration ahead"
        return when, ", ".join(x.name for x in places if x.users), ", ".join(map(str, outs))

    @property
    def crossing(self) -> tuple[int, int]:
        ahead, behind = (sum(map(_bytes, ends(self.bodies[i])[0])) for i in (self.begins, -1))
        return ahead, behind * bool(self.late)

    def needs(self, bodies: Sequence[int]) -> int:
        ahead, behind = self.crossing
        both = self.length > 2  # there is an iteration with one before it and one behind it
        found = [bodies[self.begins] + (ahead + behind if both else max(ahead, behind))]
        if self.begins:
            found.append(bodies[0] + ahead + behind * both)
        if self.late:
            found.append(bodies[-1] + behind + ahead * both)
        return max(found)

    def joined(self) -> Loop:
        graph, places, given = fx.Graph(), ends(self.body)[0], list[fx.Node]()
        for x in places[: len(places) - self.begun]:
            given.append(graph.placeholder(x.name))
            given[-1].meta = dict(x.meta)
        begun = _put(graph, self.bodies[0], given[self.carry :]) if self.begins else []
        gives = _put(graph, self.body, [*given, *begun])
        gives, left = gives[: self.carry + len(self.keeps)], gives[self.carry + len(self.keeps) :]
        if self.late:
            late = _put(graph, self.bodies[-1], [*(given[i] for i in self.totals), *left, *given[self.given :]])
            for i, x in zip(self.late, late, strict=True):
                gives[i] = x
        graph.output(tuple(gives)).meta = dict(output(self.body).meta)
        return Loop(
            bodies=(graph,),
            length=self.length,
            reverse=self.reverse,
            carry=self.carry,
            slices=self.slices,
            keeps=self.keeps,
        )


def _bytes(place: fx.Node) -> int:
    """The bytes of what comes from another part, 0 for what has its place anyway."""
    return sum(piece.bytes for piece in memory_aliases.made(place)) if OWN in place.meta else 0


def _put(graph: fx.Graph, part: fx.Graph, given: Sequence[fx.Node]) -> list[Any]:
    """Copy the calls of a part to the end of a graph, and give its results there."""
    places, outs = ends(part)
    values = dict(zip(places, given, strict=True))
    for x in calls(part):
        values[x] = graph.node_copy(x, values.__getitem__)
    return [None if x is None else values[x] for x in outs]
