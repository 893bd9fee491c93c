"""Live memory: the bytes that a rank holds at each moment, by the layouts that were chosen.

Arguments are live all the time, and a result that replaces one takes over its memory. The result of a call is live until the
last call that reads it. The result of a move is live from the first to the last call that reads it, in one pass of the step or
in all of it. A gradient is held in the layout that the update wants, where that is smaller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...plan.passes.recompute_in_calls import is_cheap
from .moves import ways
from .options import Layout, Option
from .program import Group, Program


@dataclass(eq=False)
class HeldBytes:
    """What is live at each moment; there is a moment for each call.

    Attributes:
        values: for (site, result), how many of its values are live at each moment.
        copies: for groups, by number, how many values made by a move are live at each moment.
        gaps: for (site, result), how many values need not be live at each moment, because they can be recomputed.
    """

    program: Program
    values: dict[tuple[int, int], np.ndarray] = field(default_factory=dict[Any, Any])
    copies: dict[int, np.ndarray] = field(default_factory=dict[Any, Any])
    gaps: dict[tuple[int, int], np.ndarray] = field(default_factory=dict[Any, Any])

    def live(self, site: int, part: int, option: Option) -> np.ndarray:
        """How many values are live at each moment, with an option of the site."""
        live, of = self.values[site, part], self.program.sites[site].of
        if (site, part) not in self.gaps or not (option.again or (of is not None and is_cheap(of.node))):
            return live
        return live - self.gaps[site, part]

    def bytes(self, site: int, part: int, layout: Layout) -> float:
        """The bytes of a value on a rank."""
        of = self.program.sites[site]
        dims = of.outs[part]
        assert dims is not None
        assert of.of is not None
        size = of.of.outs[part].element_size()  # type: ignore[union-attr]
        return float(np.prod(dims.sizes, dtype=float)) * size / ways(layout, self.program.moves.axes)

    def by_moment(self, chosen: Sequence[int]) -> np.ndarray:
        """The bytes at each moment, with these options."""
        total: Any = 0.0
        for site, part in self.values:
            option = self.program.sites[site].options[chosen[site]]
            total = total + self.live(site, part, option) * self._size(site, part, chosen)
        for n, live in self.copies.items():
            group = self.program.groups[n]
            before = self._made(group.site, group.part, chosen)
            for after in self.wanted(group, chosen):
                if self.is_sent(group, before, after):
                    total = total + live * self.bytes(group.site, group.part, after)
        return total

    def row(self, moment: int) -> tuple[dict[tuple[int, int], float], dict[tuple[int, Layout, Layout], float]]:
        """The bytes live at a moment, for each option by site and number, and for each move of a group."""
        options, moves = dict[tuple[int, int], float](), dict[tuple[int, Layout, Layout], float]()
        for (site, part), live in self.values.items():
            if live[moment]:
                early = self.early.get((site, part))
                for k, option in enumerate(self.program.sites[site].options):
                    if early is None:
                        many = self.live(site, part, option)[moment]
                        size = many * self.bytes(site, part, option.outs[part])
                        options[site, k] = options.get((site, k), 0.0) + size
                if early is not None:
                    for before, after in self.pairs(self.program.groups[early]):
                        size = min(self.bytes(site, part, before), self.bytes(site, part, after))
                        moves[early, before, after] = moves.get((early, before, after), 0.0) + live[moment] * size
        for n, live in self.copies.items():
            group = self.program.groups[n]
            if live[moment]:
                for before, after in self.pairs(group):
                    if self.is_sent(group, before, after):
                        size = live[moment] * self.bytes(group.site, group.part, after)
                        moves[n, before, after] = moves.get((n, before, after), 0.0) + size
        return options, moves

    def pairs(self, group: Group) -> Iterator[tuple[Layout, Layout]]:
        """All possible moves of a group, as pairs of layouts."""
        program = self.program
        befores = dict.fromkeys(option.outs[group.part] for option in program.sites[group.site].options)
        afters = dict.fromkeys(
            found
            for edge in group.edges
            for k in range(len(program.sites[edge.site].options))
            if (found := program.target(edge, k)) is not None
        )
        return ((a, b) for a in befores for b in afters)

    def wanted(self, group: Group, chosen: Sequence[int]) -> list[Layout]:
        """The layouts that the readers of a group want."""
        found = (self.program.target(edge, chosen[edge.site]) for edge in group.edges)
        return [*dict.fromkeys(x for x in found if x is not None)]

    def is_sent(self, group: Group, before: Layout, after: Layout) -> bool:
        """Whether a move makes a new value: where a rank only takes its own part, that is a view."""
        return self.program.price(group, before, after) > 0

    @cached_property
    def early(self) -> Mapping[tuple[int, int], int]:
        """The group of each value that is moved as soon as it is made."""
        groups = self.program.groups
        alone = Counter((g.site, g.part) for g in groups)
        early = lambda g: g.is_gradient and len(g.edges) == alone[g.site, g.part] == 1
        return {(g.site, g.part): n for n, g in enumerate(groups) if early(g)}

    def _made(self, site: int, part: int, chosen: Sequence[int]) -> Layout:
        return self.program.sites[site].options[chosen[site]].outs[part]

    def _size(self, site: int, part: int, chosen: Sequence[int]) -> float:
        found = [self._made(site, part, chosen)]
        if (early := self.early.get((site, part))) is not None:
            found += self.wanted(self.program.groups[early], chosen)
        return min(self.bytes(site, part, x) for x in found)


def held(program: Program) -> HeldBytes:
    """The live memory of a program's choices."""
    found = HeldBytes(program)
    for key, spans in program.step.gaps.items():
        if key not in found.early:
            found.gaps[key] = _live(spans, len(program.step.calls))
    for key, spans in program.step.spans.items():
        found.values[key] = _live(spans, len(program.step.calls))
    for n, group in enumerate(program.groups):
        of = program.sites[group.site].of
        if (group.site, group.part) not in found.early and of is not None and not of.is_view:
            found.copies[n] = _live(group.spans, len(program.step.calls))
    return found


def _live(spans: Sequence[tuple[int, int]], length: int) -> np.ndarray:
    """How many spans contain each moment."""
    change = np.zeros(length + 1)
    for start, stop in spans:
        change[start] += 1
        change[stop + 1] -= 1
    return np.cumsum(change)[:-1]
