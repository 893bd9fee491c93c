"""Calls that choose as one: elementwise calls that read each other lie alike.

In a large step a value of many such calls, as the stream along which layers are added up is, is not moved between two of them:
it lies in one way, and moves where something else reads it. That leaves some choices out, and most of the program.
"""

from __future__ import annotations

from .options import PARTIAL, Layout
from .program import Group, Program
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
        added up for the others as it is."""
        adding = {key for key, edges in self.readers.items() if all(map(self._adds, edges))}
        made_by = {(edge.site, edge.operand): key for key, edges in self.readers.items() for edge in edges}
        for site in self.made.sites:
            of = site.of
            if of is not None and of.is_elementwise:
                reads = [made_by.get((site.number, i)) for i, dims in enumerate(site.ins) if dims.sizes]
                if not adding.issuperset(reads):
                    whole = [row for row in self.rows[site.number] if not self._is_partial(row)]
                    self.rows[site.number] = whole

    def _adds(self, edge: Edge) -> bool:
        site = self.made.sites[edge.site]
        return any(PARTIAL in (site.lies(k, edge.operand) or ()) for k in range(len(site.options)))

    def _is_partial(self, row: Row) -> bool:
        return any(PARTIAL in lies for n, k in row.items() for lies in self.made.sites[n].options[k].outs)

    def _alike(self, group: Group, edge: Edge) -> bool:
        """Whether a value and what an elementwise call makes of it may choose as one."""
        reads, makes = self.made.sites[edge.site], self.made.sites[group.site]
        if edge.operand == RESULT or reads.of is None or makes.of is None or not reads.of.is_elementwise:
            return False
        alone = makes.of.is_input and len(self.readers[group.site, group.part]) == 1
        dims, out = makes.outs[group.part], reads.outs[0]
        if dims is None or out is None or not (makes.of.is_elementwise or alone):
            return False
        return len(edge.atoms) == len(dims.sizes) == len(out.sizes) > 0

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
