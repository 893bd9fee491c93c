"""Calls that choose as one: elementwise calls that read each other lie alike.

In a large step a value of many such calls, as the stream along which layers are added up is, is not moved between two of them:
it lies in one way, and moves where something else reads it. That leaves some choices out, and most of the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .described import value_of
from .options import PARTIAL, Layout
from .program import Chooser, Group, Program
from .structure import RESULT, Edge

Row = dict[int, int]  # of sites, by number, the number of an option
LARGE = 100  # sites from which on they are fused


def rows_of(made: Program) -> list[list[Row]]:
    """The choices of a program: for each group of sites that choose as one the options that go together."""
    if len(made.sites) < LARGE:
        return [[{site.number: k} for k in range(len(site.options))] for site in made.sites]
    return [*_Fusing(made).rows.values()]


class _Fusing:
    def __init__(self, made: Program) -> None:
        self.made = made
        self.root = {site.number: site.number for site in made.sites}
        self.rows: dict[int, list[Row]] = {
            site.number: [{site.number: k} for k in range(len(site.options))] for site in made.sites
        }
        self.readers: dict[tuple[int, int], list[Edge]] = {}
        for group in made.groups:
            self.readers.setdefault((group.site, group.part), []).extend(group.edges)
        self._without_sums()
        for group in made.groups:
            for edge in group.edges:
                if self._alike(group, edge):
                    self._join(group, edge)

    def _without_sums(self) -> None:
        """An elementwise call is made of partial sums only where all who read what it reads would take them: else these are
        added up for the others as it is. One of a single operand also only where somebody takes its partial sums, or they are
        smaller: else they may as well be added up before it."""
        adding = {key for key, edges in self.readers.items() if all(map(self._adds, edges))}
        made_by = {(edge.site, edge.operand): key for key, edges in self.readers.items() for edge in edges}
        elementwise = [site for site in self.made.sites if site.of is not None and site.of.is_elementwise]
        for site in elementwise:
            if not adding.issuperset(self._reads(site, made_by)):
                self._add_up(site)
        changed = True
        while changed:
            changed = False
            for site in reversed(elementwise):
                alone = len(self._reads(site, made_by)) == 1 and not _is_smaller(site)
                if (
                    alone
                    and self._is_partial(site)
                    and not any(map(self._adds, self.readers.get((site.number, 0), ())))
                ):
                    self._add_up(site)
                    changed = True

    def _reads(self, site: Chooser, made_by: Mapping[tuple[int, int], Any]) -> list[Any]:
        """What makes the operands of a site, those of one element left out."""
        return [made_by.get((site.number, i)) for i, dims in enumerate(site.ins) if dims.sizes]

    def _add_up(self, site: Chooser) -> None:
        """Leave out that a site makes partial sums."""
        self.rows[site.number] = [row for row in self.rows[site.number] if not _gives_sums(site, row[site.number])]

    def _adds(self, edge: Edge) -> bool:
        """Whether somebody may take partial sums."""
        site = self.made.sites[edge.site]
        return any(PARTIAL in (site.lies(row[edge.site], edge.operand) or ()) for row in self.rows[edge.site])

    def _is_partial(self, site: Chooser) -> bool:
        return any(_gives_sums(site, row[site.number]) for row in self.rows[self.root[site.number]])

    def _alike(self, group: Group, edge: Edge) -> bool:
        """Whether a value and what an elementwise call makes of it may choose as one. What may be a partial sum is added up
        between them, as late as it can be: gradients of one value are, before any is cast."""
        reads, makes = self.made.sites[edge.site], self.made.sites[group.site]
        if edge.operand == RESULT or reads.of is None or makes.of is None or not reads.of.is_elementwise:
            return False
        alone = makes.of.is_input and len(self.readers[group.site, group.part]) == 1
        dims, out = makes.outs[group.part], reads.outs[0]
        if dims is None or out is None or not (makes.of.is_elementwise or alone):
            return False
        same = len(edge.atoms) == len(dims.sizes) == len(out.sizes) > 0
        return same and not (makes.of.is_elementwise and self._is_partial(makes))

    def _join(self, group: Group, edge: Edge) -> None:
        """Let two sites choose as one, if each option of each has its counterpart; an input may have fewer."""
        a, b = self.root[group.site], self.root[edge.site]
        if a == b:
            return
        makes = self.made.sites[group.site]
        by: dict[Layout | None, list[Row]] = {}
        for row in self.rows[b]:
            by.setdefault(self.made.target(edge, row[edge.site]), []).append(row)
        made = [makes.options[row[group.site]].outs[group.part] for row in self.rows[a]]
        found = [{**row, **other} for row, lies in zip(self.rows[a], made) for other in by.get(lies, ())]
        fewer = makes.of is not None and makes.of.is_input
        if len(found) == len(self.rows[a]) and (fewer or len(found) == len(self.rows[b])):
            self.rows[a] = found
            for n in self.rows.pop(b)[0]:
                self.root[n] = a


def _gives_sums(site: Chooser, option: int) -> bool:
    return any(PARTIAL in lies for lies in site.options[option].outs)


def _is_smaller(site: Chooser) -> bool:
    """Whether an elementwise call gives smaller elements than it reads."""
    assert site.of is not None
    (node, part), *_ = site.of.operands
    out = site.of.outs[0]
    return out is not None and out.element_size() < value_of(node, part).element_size()
