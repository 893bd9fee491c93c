"""The structure of a traced step, the same on all meshes: which calls share a choice, and which calls read which values.

All work that grows with the number of calls is done here, once for each traced step. The work for a mesh grows with the number
of classes of calls: a step of 80 equal layers has no more of them than one of 8.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...plan.ir import graph as plan
from .again import gaps
from .atoms import Atoms
from .classes import classes
from .described import Described, described, source
from .options import Dims, dims_of
from .sums import itemsizes

RESULT = -1  # as an operand of an input: the result that replaces the input, and has its layout
Span = tuple[int, int]
Root = tuple[Any, int, tuple[int, ...] | None]


@dataclass(frozen=True)
class Edge:
    """An operand of a site, read from a value.

    Attributes:
        site, operand: the reading site, and which of its operands it is.
        atoms: for each atom of the operand, the number of the value's atom.
    """

    site: int
    operand: int
    atoms: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Readers:
    """The readers of equal values of a site: all of them read each of the values, and first in the same pass.

    Attributes:
        site, part: the site and the result that make the values.
        edges: the readers of each value.
        spans: for each value, the moments of the first and the last of these reads.
        itemsizes: the bytes of an element, and its bytes in a reduction over ranks.
    """

    site: int
    part: int
    edges: tuple[Edge, ...]
    spans: tuple[Span, ...]
    itemsizes: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Structure:
    """The calls of a traced step, and which of them read which values.

    Attributes:
        calls: the inputs and calls, in order; a moment is a position in it.
        paths, inputs: the names and the nodes of the inputs.
        results: the node of each result; None for one that is no value of the step.
        atoms: the atoms of the dims of all classes.
        reps: one call of each class.
        counts: how many calls each class has.
        turn: where the backward pass begins: the number of its first call.
        late: how many calls each class has from there on.
        classes: the number of the class of each node.
        dims: for each class, the dims of its operands and of its results.
        through: for each class of renaming views, the viewed value's atom for each atom of the result.
        number: for each other class, the number of its site.
        loose: the sizes of the atoms of results that replace no input; their sites come after the others.
        readers: the readers of all values.
        readers_by_part: the same, with those in the forward pass and those in the backward pass apart.
        spans: for (site, result), the live range of each of its values.
        ties: the input that each result replaces, by the result's number.
        result_sites: the number of the site of each other result.
        gradients: the (site, result) from which the results that replace inputs are computed element by element.
        gaps: for (site, result) that can be recomputed, the moments in between, at which the values need not be live.
    """

    calls: Sequence[Described]
    paths: Sequence[str]
    inputs: Sequence[Any]
    results: Sequence[Any]
    atoms: Atoms
    reps: Sequence[Described]
    counts: Sequence[int]
    turn: int
    late: Mapping[int, int]
    classes: Mapping[Any, int]
    dims: Mapping[int, tuple[list[Dims], list[Dims | None]]]
    through: Mapping[int, tuple[int, ...]]
    number: Mapping[int, int]
    loose: Sequence[tuple[int, ...]]
    readers: Sequence[Readers]
    readers_by_part: Sequence[Readers]
    spans: Mapping[tuple[int, int], list[Span]]
    ties: Mapping[int, int]
    result_sites: Mapping[int, int]
    gradients: set[tuple[int, int]]
    gaps: Mapping[tuple[int, int], list[Span]]

    def site_of(self, node: Any) -> int:
        """The number of the site of a node; the node must not be a renaming view."""
        return self.number[self.classes[node]]


def structure(recording: Any, ties: Mapping[int, int]) -> Structure:
    """The structure of a traced step.

    Args:
        recording: the traced step.
        ties: the number of the input that each result replaces, by the result's number; it has the layout of that input.
    """
    return _Read(recording, ties).structure


class _Read:
    def __init__(self, recording: Any, ties: Mapping[int, int]) -> None:
        self.calls, self.inputs = described(recording.graph), recording.placeholders
        self.by_node = {x.node: x for x in self.calls}
        self.place = {x.node: i for i, x in enumerate(self.calls)}
        self._classes(recording.paths)
        self._dims(recording.results, ties)
        # For each value, the moments of its reads, and its readers: in the forward pass, in the backward pass.
        self.moments: dict[tuple[Any, int], tuple[list[int], list[int]]] = {}
        self.edges: dict[tuple[Any, int], tuple[dict[Edge, None], dict[Edge, None]]] = {}
        self.turn = self._turn(recording, ties)
        self._reads(recording, ties)
        self.structure = Structure(
            self.calls,
            recording.paths,
            self.inputs,
            recording.results,
            self.atoms,
            self.reps,
            self.counts,
            self.turn,
            Counter(self.colour[x.node] for x in self.calls[self.turn :]),
            self.colour,
            self.dims,
            self.through,
            self.number,
            self.loose,
            self._readers(lambda early, late: (early + late,)),
            self._readers(lambda early, late: (early, late)),
            self._spans(),
            ties,
            self.result_sites,
            self._gradients(),
            self._gaps(),
        )

    def _classes(self, paths: Sequence[str]) -> None:
        dense: dict[int, int] = {}
        self.colour: dict[Any, int] = {}
        self.reps = list[Described]()
        self.counts = list[int]()
        for x, c in zip(self.calls, classes(self.calls, paths)):
            n = dense.setdefault(c, len(dense))
            if n == len(self.reps):
                self.reps.append(x)
                self.counts.append(0)
            self.counts[n] += 1
            self.colour[x.node] = n

    def _dims(self, results: Sequence[Any], ties: Mapping[int, int]) -> None:
        colour = self.colour
        out = lambda node, part: (colour[node], "out", part)
        links = {(out(*y), (colour[x.node], "in", i)) for x in self.calls for i, y in enumerate(x.operands)}
        links |= {(out(*source(results[r])), out(self.inputs[i], 0)) for r, i in ties.items()}
        self.atoms = Atoms(self.reps, sorted(links))
        self.dims = {n: dims_of(n, rep, self.atoms) for n, rep in enumerate(self.reps)}
        self.through, self.number = dict[int, tuple[int, ...]](), dict[int, int]()
        for n, rep in enumerate(self.reps):
            if rep.only_renames and (found := _renamed(*self.dims[n])) is not None:
                self.through[n] = found
            else:
                self.number[n] = len(self.number)
        self.roots: dict[Any, Root] = {}
        for x in self.calls:
            if (step := self.through.get(colour[x.node])) is not None:
                node, part, atoms = self._root(*x.operands[0])
                self.roots[x.node] = node, part, step if atoms is None else tuple(atoms[k] for k in step)

    def _root(self, node: Any, part: int) -> Root:
        """The call and the result behind a value's renaming views, and the atoms seen through these; None: the same atoms."""
        return self.roots.get(node) or (node, part, None)

    def _turn(self, recording: Any, ties: Mapping[int, int]) -> int:
        """Where the backward pass begins; in a step without one, right after the loss: the first floating-point scalar among
        the results that replace no input."""
        behind = next((i for i, x in enumerate(self.calls) if "backward" in x.node.meta), None)
        if behind is not None:
            return behind
        numbers = [made for r, made in enumerate(recording.results) if made is not None and r not in ties]
        is_loss = lambda x: isinstance(x, torch.Tensor) and not x.ndim and x.is_floating_point()
        roots = [source(x)[0] for x in numbers if is_loss(plan.value(x))]
        return min((self.place[x] + 1 for x in roots if not self.by_node[x].is_input), default=len(self.calls))

    def _reads(self, recording: Any, ties: Mapping[int, int]) -> None:
        for when, x in enumerate(self.calls):
            if (n := self.number.get(self.colour[x.node])) is not None:
                for i, (y, part) in enumerate(x.operands):
                    self._read(n, i, y, part, when)
        self._results(recording, ties)

    def _readers(self, parted: Callable[[Any, Any], Sequence[Any]]) -> list[Readers]:
        """The readers of values; values of a site with the same readers share an entry."""
        groups: dict[Any, tuple[tuple[Edge, ...], list[Span]]] = {}
        for (node, part), edges in self.edges.items():
            u = self.number[self.colour[node]]
            for some, moments in zip(parted(*map(tuple, edges)), parted(*self.moments[node, part])):
                some = tuple(dict.fromkeys(some))
                if some:
                    late = moments[0] >= self.turn
                    _, spans = groups.setdefault((u, part, late, frozenset(some)), (some, []))
                    spans.append((moments[0], moments[-1]))
        made_by = {number: self.reps[n] for n, number in self.number.items()}
        sizes = lambda u, part: itemsizes(made_by[u].node, made_by[u].outs[part])  # type: ignore[arg-type]
        return [Readers(*key[:2], some, tuple(spans), sizes(*key[:2])) for key, (some, spans) in groups.items()]

    def _results(self, recording: Any, ties: Mapping[int, int]) -> None:
        self.result_sites, self.loose = dict[int, int](), list[tuple[int, ...]]()
        self.tied_roots = list[tuple[Any, int]]()
        for r, made in enumerate(recording.results):
            if made is None or not isinstance(plan.value(made), torch.Tensor):
                continue
            node, part, atoms = self._root(*source(made))
            if r in ties:
                to = self.number[self.colour[self.inputs[ties[r]]]], RESULT
                self.tied_roots.append((node, part))
            else:
                to = len(self.number) + len(self.loose), 0
                self.result_sites[r] = to[0]
                sizes = self._sizes(node, part)
                self.loose.append(sizes if atoms is None else tuple(sizes[k] for k in atoms))
            self._read(*to, *source(made), len(self.calls) - 1)

    def _sizes(self, node: Any, part: int) -> tuple[int, ...]:
        dims = self.dims[self.colour[node]][1][part]
        assert dims is not None
        return dims.sizes

    def _read(self, n: int, operand: int, y: Any, part: int, when: int) -> None:
        node, part, atoms = self._root(y, part)
        late = when >= self.turn
        self.moments.setdefault((node, part), ([], []))[late].append(when)
        dims = self.dims[self.colour[node]][1][part]
        if dims is not None:
            edge = Edge(n, operand, tuple(range(len(dims.sizes))) if atoms is None else atoms)
            self.edges.setdefault((node, part), ({}, {}))[late][edge] = None

    def _spans(self) -> dict[tuple[int, int], list[Span]]:
        """The live ranges of values."""
        spans, replaced, end = defaultdict[Any, Any](list), set(self.tied_roots), len(self.calls) - 1
        views = [rep.is_view for rep in self.reps]
        for at, x in enumerate(self.calls):
            colour = self.colour[x.node]
            if (n := self.number.get(colour)) is None or views[colour]:
                continue
            for part, out in enumerate(x.outs):
                early, late = self.moments.get((x.node, part), ([], []))
                if out is not None and x.is_input:
                    spans[n, part].append((0, end))
                elif out is not None and (x.node, part) not in replaced:
                    spans[n, part].append((at, max([at, *early[-1:], *late[-1:]])))
        return spans

    def _gaps(self) -> dict[tuple[int, int], list[Span]]:
        found = defaultdict[tuple[int, int], list[Span]](list)
        for node, gap in gaps(self.calls, self.moments, self.roots).items():
            found[self.number[self.colour[node]], 0].append(gap)
        return dict(found)

    def _gradients(self) -> set[tuple[int, int]]:
        """The values from which the results that replace inputs are computed element by element."""
        todo, seen, found = list(self.tied_roots), set[Any](), set[tuple[int, int]]()
        elementwise = [rep.is_elementwise for rep in self.reps]
        while todo:
            node, part = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            x = self.by_node[node]
            if elementwise[self.colour[node]]:
                todo += [self._root(*y)[:2] for y in x.operands]
            elif not x.is_input:
                found.add((self.number[self.colour[node]], part))
        return found


def _renamed(ins: Sequence[Dims], outs: Sequence[Dims | None]) -> tuple[int, ...] | None:
    """For each atom of a view's result, the viewed value's atom; None where the two do not have the same atoms."""
    (inner, *_), (outer, *_) = ins, outs
    if outer is None or None in inner.labels or sorted(map(repr, inner.labels)) != sorted(map(repr, outer.labels)):
        return None
    found = tuple(inner.labels.index(x) for x in outer.labels)
    same = all(inner.sizes[k] == size for k, size in zip(found, outer.sizes))
    return found if same and len(set(found)) == len(inner.sizes) else None
