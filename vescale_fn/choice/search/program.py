"""The program of choices of a recorded step: sites that choose, values that move between them, and what all of it costs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..._core.base.errors import SpecError
from ..._core.base.messages import report
from ..._core.sharding.spec import from_split_axes, split_axes
from ...plan.ir import graph as plan
from ...plan.ir.work import flops
from .atoms import Atoms
from .classes import classes
from .described import Described, described, source
from .moves import Moves, spec_of_dims, ways
from .options import Dims, Layout, Option, dims_of, layouts, options

_HIDDEN = 0.1  # of a collective beside computation, which it takes units and bandwidth from
RESULT = -1  # the operand of an input that a result replaces: it lies as the input does


@dataclass(eq=False)
class Chooser:
    """Calls, inputs or a result that choose together.

    Attributes:
        number: its place.
        of: one of the calls; None for a result that replaces no input.
        count: how many there are.
        options: to choose from, with the seconds of one call.
        ins, outs: the dims of operands and results.
    """

    number: int
    of: Described | None
    count: int
    options: list[Option]
    ins: list[Dims] = field(default_factory=list[Dims])
    outs: list[Dims | None] = field(default_factory=list[Dims | None])

    def lies(self, option: int, operand: int) -> Layout | None:
        """How an option wants an operand; or how the result that replaces the input is to lie."""
        found = self.options[option]
        return found.outs[0] if operand == RESULT else found.ins[operand]


@dataclass(frozen=True)
class Edge:
    """An operand of a site, read from a value.

    Attributes:
        site, operand: who reads it.
        atoms: of each atom of the operand the number of that of the value.
    """

    site: int
    operand: int
    atoms: tuple[int, ...]


@dataclass(eq=False)
class Group:
    """Those who read one value in one part of the step: of equal moves they share one.

    Attributes:
        site, part: what makes the value.
        edges: who reads it.
        count: how many values there are.
        itemsize: the bytes of an element.
        late: whether they read it after the moment when, on one device, most is held.
        credit: seconds of a move that are hidden behind computation, where it can begin early or end late.
        shown: the part of these seconds that is not hidden after all.
        is_gradient: whether it is read by the update alone, element by element.
    """

    site: int
    part: int
    edges: list[Edge]
    count: int
    itemsize: int
    late: bool = False
    credit: float = 0.0
    shown: float = _HIDDEN
    is_gradient: bool = False


@dataclass(eq=False)
class Program:
    """The choices of a step on a mesh.

    Attributes:
        sites, groups: as they are.
        moves: what moves take.
        members: of each node that is no renaming view the number of its site.
        length: how many moments there are: one for each call.
        spans: of (site, result) from when to when each of its values is held.
        uses: of (site, result, late) the moments of the first and the last call that reads each of its values.
        calls: the inputs and calls of the step, in order.
        classes: of each the number of its class.
        dims: of each class, of its operands and results.
        through: of each class of renaming views, of each atom of the result that of what is viewed.
        ties: of results, by number, the input that each replaces.
        result_sites: of other results the number of the site.
    """

    sites: list[Chooser]
    groups: list[Group]
    moves: Moves
    members: Mapping[Any, int]
    length: int
    spans: Mapping[tuple[int, int], list[tuple[int, int]]]
    uses: Mapping[tuple[int, int, bool], list[tuple[int, int]]]
    calls: Sequence[Described]
    classes: Mapping[Any, int]
    dims: Mapping[int, tuple[list[Dims], list[Dims | None]]]
    through: Mapping[int, tuple[int, ...]]
    ties: Mapping[int, int]
    result_sites: Mapping[int, int]

    def target(self, edge: Edge, option: int) -> Layout | None:
        """How a site with this option wants a value, in the value's atoms; None where it does not matter."""
        lies = self.sites[edge.site].lies(option, edge.operand)
        return None if lies is None else tuple(edge.atoms[x] if x >= 0 else x for x in lies)

    def price(self, group: Group, before: Layout, after: Layout) -> float:
        """The seconds of a move of all values of a group."""
        dims = self.sites[group.site].outs[group.part]
        seconds = self.moves(dims.sizes, group.itemsize, before, after).seconds if dims is not None else 0.0
        return group.count * (max(0.0, seconds - group.credit) + group.shown * min(seconds, group.credit))

    def seconds(self, chosen: Sequence[int]) -> float:
        """What all takes, with these options."""
        total = sum(site.count * site.options[k].seconds for site, k in zip(self.sites, chosen))
        for group in self.groups:
            before = self.sites[group.site].options[chosen[group.site]].outs[group.part]
            afters = {self.target(edge, chosen[edge.site]) for edge in group.edges} - {None}
            total += sum(self.price(group, before, after) for after in afters)  # type: ignore[arg-type]
        return total


def program(
    recording: Any,
    axes: Mapping[str, int],
    hardware: Any,
    ties: Mapping[int, int],
    fixed: Mapping[int, Any] | None = None,
) -> Program:
    """The program of a recorded step.

    Args:
        recording: of the step.
        axes: of the mesh, with their sizes.
        hardware: what calls and moves take.
        ties: of results, by number, the number of the input that each replaces, as which it lies.
        fixed: of inputs, by number, how they lie.
    """
    return _Made(recording, axes, hardware, ties, fixed or {}).program


class _Made:
    def __init__(
        self, recording: Any, axes: Mapping[str, int], hardware: Any, ties: Mapping[int, int], fixed: Mapping[int, Any]
    ) -> None:
        self.axes, self.hardware = dict(axes), hardware
        self.calls, self.inputs = described(recording.graph), recording.placeholders
        self.colours = classes(self.calls, recording.paths)
        self.colour = {x.node: c for x, c in zip(self.calls, self.colours)}
        self.first: dict[int, Described] = {}
        for x, c in zip(self.calls, self.colours):
            self.first.setdefault(c, x)
        order = list(self.first)
        dense = {c: n for n, c in enumerate(order)}
        self.colour = {node: dense[c] for node, c in self.colour.items()}
        self.reps = [self.first[c] for c in order]
        links = {
            (self.colour[y], part, self.colour[x.node], i) for x in self.calls for i, (y, part) in enumerate(x.operands)
        }
        for r, p in ties.items():
            node, part = source(recording.results[r])
            links.add((self.colour[node], part, self.colour[self.inputs[p]], RESULT))
        inputs = [(a, o, b, i) for a, o, b, i in sorted(links) if i != RESULT]
        self.atoms = Atoms(self.reps, inputs)
        self._options()
        self._fix(recording, fixed)
        self._edges(recording, ties)
        self._credits(ties)

    def _options(self) -> None:
        counts = Counter(self.colour.values())
        self.through: dict[int, tuple[int, ...]] = {}
        self.dims = {n: dims_of(n, rep, self.atoms) for n, rep in enumerate(self.reps)}
        self.sites, self.number = list[Chooser](), dict[int, int]()
        for n, rep in enumerate(self.reps):
            if rep.only_renames and (found := self._renamed(n, rep)) is not None:
                self.through[n] = found
                continue
            choices, ins, outs = options(n, rep, self.atoms, self.axes)
            self.number[n] = len(self.sites)
            site = Chooser(len(self.sites), rep, counts[n], choices, ins, outs)
            site.options = [replace(x, seconds=self._seconds(site, x)) for x in choices]
            self.sites.append(site)

    def _fix(self, recording: Any, fixed: Mapping[int, Any]) -> None:
        """Leave inputs whose specs are given the options that are these specs."""
        for i, given in fixed.items():
            site = self.sites[self.number[self.colour[self.inputs[i]]]]
            dims = site.outs[0]
            if dims is None:
                continue
            want = from_split_axes(split_axes(given, len(dims.dims)), given.unreduced)
            lies = lambda x, d=dims: spec_of_dims(d.sizes, d.dims, x.outs[0], self.axes)
            site.options = [x for x in site.options if lies(x) == want]
            if not site.options:
                what = f"{recording.paths[i]} is given as {given!r}, in which it is not looked for"
                rows = ["sizes that do not divide, axes of a dim in another order than the mesh's, and equal layers"]
                rows = [f"{rows[0]} that lie differently are left out"]
                raise SpecError(report("auto", what, rows, "vfn.price of the whole layout"))

    def _renamed(self, n: int, rep: Described) -> tuple[int, ...] | None:
        """Of each atom of a view's result that of what it views; None where they are not the same ones."""
        (inner, *_), (outer, *_) = self.dims[n]
        if outer is None or None in inner.labels or sorted(map(repr, inner.labels)) != sorted(map(repr, outer.labels)):
            return None
        found = tuple(inner.labels.index(x) for x in outer.labels)
        same = all(inner.sizes[k] == size for k, size in zip(found, outer.sizes))
        return found if same and len(set(found)) == len(inner.sizes) else None

    def _root(self, node: Any, part: int) -> tuple[Any, int, tuple[int, ...] | None]:
        """What makes a value, seen through views that only rename; and its atoms."""
        atoms: tuple[int, ...] | None = None
        while (n := self.colour[node]) in self.through:
            step = self.through[n]
            atoms = step if atoms is None else tuple(step[k] for k in atoms)
            x = self.by_node[node]
            node, part = x.operands[0]
        return node, part, atoms

    def _edges(self, recording: Any, ties: Mapping[int, int]) -> None:
        self.by_node = {x.node: x for x in self.calls}
        self.place = {x.node: i for i, x in enumerate(self.calls)}
        self.turn = self._turn(recording, ties)
        counts: Counter[Any] = Counter()
        self.read: dict[Any, list[tuple[int, bool]]] = defaultdict(list)
        for x in self.calls:
            if (n := self.colour[x.node]) in self.through:
                continue
            for i, (y, part) in enumerate(x.operands):
                self._count(counts, (self.number[n], i), y, part, self.place[x.node])
        self.result_sites = dict[int, int]()
        self.tied_roots = list[tuple[Any, int, int]]()
        for r, made in enumerate(recording.results):
            if made is None or not isinstance(plan.value(made), torch.Tensor):
                continue
            node, part, atoms = self._root(*source(made))
            if r in ties:
                to = self.number[self.colour[self.inputs[ties[r]]]], RESULT
                self.tied_roots.append((node, part, ties[r]))
            else:
                to = self._result(node, part, atoms), 0
                self.result_sites[r] = to[0]
            self._count(counts, to, *source(made), len(self.calls) - 1)
        spans, uses = self._spans()
        groups: dict[Any, Group] = {}
        for (u, part, late, edge), count in counts.items():
            out = self.sites[u].of.outs[part]  # type: ignore[union-attr]
            group = groups.setdefault((u, part, late), Group(u, part, [], 0, out.element_size(), late))  # type: ignore[union-attr]
            group.edges.append(edge)
            group.count = max(group.count, count)
        self.groups = list(groups.values())
        members = {node: self.number[n] for node, n in self.colour.items() if n not in self.through}
        self.program = Program(
            self.sites,
            self.groups,
            Moves(self.axes, self.hardware),
            members,
            len(self.calls),
            spans,
            uses,
            self.calls,
            self.colour,
            self.dims,
            self.through,
            ties,
            self.result_sites,
        )

    def _count(self, counts: Counter[Any], to: tuple[int, int], y: Any, part: int, when: int) -> None:
        node, part, atoms = self._root(y, part)
        late = when > self.turn
        self.read[node, part].append((when, late))
        u = self.number[self.colour[node]]
        dims = self.sites[u].outs[part]
        if dims is None:
            return
        counts[u, part, late, Edge(*to, tuple(range(len(dims.sizes))) if atoms is None else atoms)] += 1

    def _turn(self, recording: Any, ties: Mapping[int, int]) -> int:
        """Where the backward pass begins: behind the loss, the first number of the results that replace no input."""
        numbers = [made for r, made in enumerate(recording.results) if made is not None and r not in ties]
        is_loss = lambda x: isinstance(x, torch.Tensor) and not x.ndim and x.is_floating_point()
        roots = [source(x)[0] for x in numbers if is_loss(plan.value(x))]
        return min((self.place[x] for x in roots if not self.by_node[x].is_input), default=len(self.calls))

    def _spans(self) -> tuple[Any, Any]:
        """From when to when values are held, and read."""
        spans, uses = defaultdict[Any, Any](list), defaultdict[Any, Any](list)
        replaced = {(node, part) for node, part, _ in self.tied_roots}
        for x in self.calls:
            if (n := self.colour[x.node]) in self.through or x.is_view:
                continue
            for part, out in enumerate(x.outs):
                read = self.read.get((x.node, part), [])
                at = self.place[x.node]
                stop = self.place_last if x.is_input else max((when for when, _ in read), default=at)
                if out is not None and not ((x.node, part) in replaced and not x.is_input):
                    spans[self.number[n], part].append((0 if x.is_input else at, stop))
                for late in (False, True):
                    mine = [when for when, when_late in read if when_late == late]
                    if mine:
                        uses[self.number[n], part, late].append((min(mine), max(mine)))
        return spans, uses

    @property
    def place_last(self) -> int:
        return len(self.calls) - 1

    def _result(self, node: Any, part: int, atoms: tuple[int, ...] | None) -> int:
        """A result that replaces no input lies in any way, but is no partial sum."""
        dims = self.sites[self.number[self.colour[node]]].outs[part]
        assert dims is not None
        sizes = dims.sizes if atoms is None else tuple(dims.sizes[k] for k in atoms)
        site = Chooser(len(self.sites), None, 1, [Option((x,), ()) for x in layouts(sizes, self.axes)])
        self.sites.append(site)
        return site.number

    def _seconds(self, site: Chooser, option: Option) -> float:
        it = site.of
        assert it is not None
        sizes = [x.element_size() if x is not None else 0 for x in it.outs]
        made = sum(
            math.prod(d.sizes) * n / ways(lies, self.axes)
            for d, n, lies in zip(site.outs, sizes, option.outs)
            if d is not None
        )
        if it.is_input or it.is_view:
            return made / self.hardware.bytes * 1e-3 if it.is_input else 0.0
        read = 0.0
        for (node, part), d, lies in zip(it.operands, site.ins, option.ins):
            size = node.meta["val"][part] if isinstance(node.meta["val"], (list, tuple)) else node.meta["val"]
            read += math.prod(d.sizes) * size.element_size() / (ways(lies, self.axes) if lies is not None else 1)
        split = math.prod(self.axes[a] for a in option.split)
        dtype = next((x.dtype for x in it.outs if x is not None), None)
        seconds = self.hardware.compute(flops(it.node) / split, dtype, made + read)
        for i, over in option.folds:
            d = site.outs[i]
            if d is not None:
                nbytes = math.prod(d.sizes) * sizes[i] / ways(option.outs[i], self.axes)
                seconds += self.hardware.collective("all_reduce", nbytes, self.axes, over)
        return seconds

    def _credits(self, ties: Mapping[int, int]) -> None:
        """Parameters are gathered while another layer computes, and gradients are added up so: each may hide behind its share
        of a third of the computation, by its bytes. What is gathered after the update hides behind nothing, nor do the first
        gather and the last sum: of a few parameters that is much."""
        tied = {self.number[self.colour[self.inputs[p]]] for p in ties.values()}
        whole = sum(site.count * min(x.seconds for x in site.options) for site in self.sites)
        bytes_of = lambda site: math.prod(site.outs[0].sizes) * site.of.outs[0].element_size()
        read = {g.site for g in self.groups if g.site in tied and any(e.operand >= 0 for e in g.edges)}
        gradients = self._gradients()
        total = sum(self.sites[n].count * bytes_of(self.sites[n]) for n in read) or 1
        large = sum(self.sites[n].count for n in read if bytes_of(self.sites[n]) >= total / 100)
        for group in self.groups:
            n = group.site
            if n in read or (n, group.part) in gradients:
                dims = self.sites[n].outs[group.part]
                share = math.prod(dims.sizes) * group.itemsize / total if dims is not None else 0
                group.credit, group.shown = whole / 3 * min(share, 1.0), _HIDDEN + (1 - _HIDDEN) / max(large, 1)
                group.is_gradient = n not in read and not any(edge.operand == RESULT for edge in group.edges)

    def _gradients(self) -> set[tuple[int, int]]:
        """The values from which the results that replace inputs are computed element by element."""
        todo, seen, found = [(node, part) for node, part, _ in self.tied_roots], set(), set()
        while todo:
            node, part = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            x = self.by_node[node]
            if self.reps[self.colour[node]].is_elementwise:
                todo += [self._root(*y)[:2] for y in x.operands]
            elif not x.is_input:
                found.add((self.number[self.colour[node]], part))
        return found
