"""A static arena for a plan: one block of memory, and where in it each value lies that the plan makes and lets go."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from . import graph as plan
from . import memory_aliases, packing
from .branches import Branches
from .memory_use import bytes_text, call_text, place
from .nested import bodies_of, nested
from .rotated_loop import OWN
from .shared_bodies import Shared


class Life(NamedTuple):
    """A value that wants a place.

    Attributes:
        maker: the call that makes it.
        bytes: how many it has.
        first, last: the calls between which it is alive, both inclusive.
    """

    maker: fx.Node
    bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Slot:
    """A value's place in the arena.

    Attributes:
        call: what makes it.
        line: the user's, of that call.
        offset, bytes: where it lies, and how much it takes, rounded up to the alignment.
        first, last: the calls between which it is alive, both inclusive, counted from 0.
    """

    call: str
    line: str
    offset: int
    bytes: int
    first: int
    last: int


class Arena:
    """The static arena of a plan on one process: what ``vfn.jit(f).lower(...).arena()`` returns.

    Arguments and constants are not in it: they have memory already.

    Args:
        slots: of what the plan makes, in the order of the calls.
        least: the most bytes that are alive at once, rounded up as the slots are: no arena is smaller.

    Attributes:
        bytes: its size.
    """

    def __init__(self, slots: Iterable[Slot], least: int) -> None:
        self.slots, self.least = tuple(slots), least
        self.bytes = max((slot.offset + slot.bytes for slot in self.slots), default=0)

    def __repr__(self) -> str:
        apart = sum(slot.bytes for slot in self.slots)
        ratio = self.bytes / self.least if self.least else 1.0
        lines = [
            f"arena of {bytes_text(self.bytes)} for {len(self.slots)} values of {bytes_text(apart)}; "
            f"{bytes_text(self.least)} are alive at once ({ratio:.4f})"
        ]
        largest = sorted(self.slots, key=lambda slot: -slot.bytes)[:8]
        lines += [
            f"  {bytes_text(slot.bytes):>10} at {slot.offset:>12,}, calls {slot.first} to {slot.last}: "
            f"{slot.call}, {place(slot.line)}"
            for slot in largest
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"{_drawn(self)}<pre>{html.escape(repr(self).splitlines()[0])}</pre>"


def arena(graph: fx.Graph, alignment: int) -> Arena:
    """Offsets for all that a plan makes, each a multiple of `alignment` bytes."""
    index = {node: i for i, node in enumerate(plan.calls(graph))}
    end = len(index)
    index.update((node, 0) for node in graph.nodes if OWN in node.meta)
    lives = [
        Life(piece.maker, piece.bytes, index[piece.maker], index.get(last, end))
        for piece, last in memory_aliases.last_uses(graph).items()
        if piece.maker in index and piece.bytes
    ]
    # what one body needs, or one iteration, has the same place in the others
    bodies = {body for node in nested(graph) for body in bodies_of(node)}
    inside = {body: arena(body, alignment).bytes for body in bodies}
    given = Counter[fx.Node]()
    for life in lives:
        given[life.maker] += -(-life.bytes // alignment) * alignment
    for node in nested(graph):
        most = node.target.needs([*map(inside.__getitem__, bodies_of(node))])  # type: ignore[union-attr]
        if isinstance(node.target, (Branches, Shared)):  # whose results are those of the body
            most = max(most - given[node], 0)
        lives.append(Life(node, most, index[node], index[node]))
    lives = sorted((life for life in lives if life.bytes), key=lambda life: life.first)
    found = offsets(lives, alignment)
    slots = [
        Slot(
            call_text(life.maker),
            life.maker.meta.get("line", ""),
            int(offset),
            -(-life.bytes // alignment) * alignment,
            life.first,
            life.last,
        )
        for life, offset in zip(lives, found.offsets, strict=True)
    ]
    return Arena(slots, found.least)


def offsets(lives: Sequence[Life], alignment: int) -> packing.Packing:
    """Offsets for some values, each a multiple of `alignment` bytes."""
    sizes = [-(-life.bytes // alignment) * alignment for life in lives]
    return packing.pack([life.first for life in lives], [life.last for life in lives], sizes)


def _drawn(arena: Arena, width: float = 640.0, height: float = 240.0) -> str:
    """The arena over time: each value a rectangle; hovering names its call."""
    calls = max((slot.last for slot in arena.slots), default=0) + 1
    boxes = [
        f"<rect x='{width * slot.first / calls:.1f}' y='{height * (1 - (slot.offset + slot.bytes) / arena.bytes):.1f}' "
        f"width='{width * (slot.last - slot.first + 1) / calls:.1f}' height='{height * slot.bytes / arena.bytes:.1f}' "
        f"fill='#4e79a7' stroke='white' stroke-width='0.5'>"
        f"<title>{html.escape(f'{slot.call}: {bytes_text(slot.bytes)}, {place(slot.line)}')}</title></rect>"
        for slot in arena.slots
    ]
    return f"<svg width='{width:.0f}' height='{height:.0f}' role='img'>{''.join(boxes)}</svg>"
