"""Dims as atoms: the parts that are split as a whole.

A dim of 4,096 that is seen as 32 heads of 128 somewhere is two atoms, 32 and 128, everywhere. Views then move no atom:
they only say which atoms make up a dim. Where dims are cut is found from the rules, from call to call in both directions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from .described import Described, parts, rows

Slot = tuple[int, str, int]  # a class, "in" or "out", and the number of the operand or result
Element = tuple[Slot, int]  # a dim


class Atoms:
    """The atoms of each dim of each operand and result.

    Args:
        sites: one for each class.
        links: which slots are of one value: a result and an operand, or a result and the input that it replaces.
    """

    def __init__(self, sites: Sequence[Described], links: Iterable[tuple[Slot, Slot]]) -> None:
        self._up: dict[Element, Element] = {}
        self._cuts: dict[Element, set[int]] = {}
        self._sizes: dict[Element, int] = {}
        nested = list[tuple[Element, int, int, Element, int, int]]()
        for n, site in enumerate(sites):
            for i, out in enumerate(site.outs):
                for d, size in enumerate(out.shape if out is not None else ()):
                    self._add(((n, "out", i), d), size)
            for i, shape in enumerate(site.shapes):
                for d, size in enumerate(shape):
                    self._add(((n, "in", i), d), size)
            self._rule(n, site, nested)
        for a, b in links:
            for d in itertools.count():
                if (a, d) not in self._up or (b, d) not in self._up:
                    break
                self._join((a, d), (b, d))
        self._spread(nested)
        self._found = {x: _nested(self._cuts[x], self._sizes[x]) for x in self._up if self._root(x) == x}

    def of(self, slot: Slot, ndim: int) -> list[tuple[int, ...]]:
        """The sizes of the atoms of each dim."""
        return [self._found[self._root((slot, d))] for d in range(ndim)]

    def _add(self, x: Element, size: int) -> None:
        self._up[x], self._cuts[x], self._sizes[x] = x, set(), size

    def _root(self, x: Element) -> Element:
        while self._up[x] != x:
            self._up[x] = self._up[self._up[x]]
            x = self._up[x]
        return x

    def _join(self, x: Element, y: Element) -> None:
        x, y = self._root(x), self._root(y)
        if x != y and self._sizes[x] == self._sizes[y]:
            self._up[y] = x
            self._cuts[x] |= self._cuts[y]

    def _rule(self, n: int, site: Described, nested: list[Any]) -> None:
        """Dims with one label are cut alike; those in which a label is a part, in this part."""
        where: dict[Any, list[tuple[Element, int, int]]] = {}
        for side, i, row, shape in rows(site):
            for d, (label, size) in enumerate(zip(row, shape, strict=True)):
                pieces = parts(label, size)
                x = (n, side, i), d
                self._cuts[self._root(x)] |= {start for start, _, _ in pieces if 1 < start < size}
                for start, m, inner in pieces:
                    if inner is not None and m > 1:
                        where.setdefault((inner, m), []).append((x, start, m))
        for first, *rest in where.values():
            for other in rest:
                whole = all(self._sizes[x] == m for x, _, m in (first, other))
                if whole:
                    self._join(first[0], other[0])
                else:
                    nested.append((*first, *other))

    def _spread(self, nested: list[Any]) -> None:
        changed = True
        while changed:
            changed = False
            for x, a, n, y, b, m in nested:
                for (one, i, size), (other, j, _) in (((x, a, n), (y, b, m)), ((y, b, m), (x, a, n))):
                    inside = {c // i * j for c in self._cuts[self._root(one)] if i < c < i * size and c % i == 0}
                    cuts = self._cuts[self._root(other)]
                    if not inside <= cuts:
                        cuts |= inside
                        changed = True


def _nested(cuts: set[int], size: int) -> tuple[int, ...]:
    """The sizes of the parts of a dim that is cut there; cuts that do not nest are left out."""
    found, last = list[int](), 1
    for cut in (*sorted(cuts), size):
        if cut % last == 0 and size % max(cut, 1) == 0 and cut > last:
            found.append(cut // last)
            last = cut
    return tuple(found) or (size,)
