"""The program of choices of a recorded step: sites that choose, values that move between them, and what all of it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..._core.base.errors import SpecError
from ..._core.base.messages import report
from ..._core.sharding.spec import from_split_axes, split_axes
from .costs import CallPrices
from .described import Described
from .moves import Moves, spec_of_dims
from .options import Dims, Layout, Option, layouts, options
from .structure import RESULT, Edge, Structure

_WIDTH = 2  # bytes of a number that is gathered, by which large and small parameters are weighed
_HIDDEN = 0.02  # of a collective beside computation, which it takes units and bandwidth from


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


@dataclass(eq=False)
class Group:
    """Those who read one value in one part of the step: of equal moves they share one.

    Attributes:
        site, part: what makes the value.
        edges: who reads it.
        count: how many values there are.
        itemsize, summed: the bytes of an element, and those in which it is added up over ranks.
        late: whether they read it after the moment when, on one device, most is held; None: at any time.
        credit: seconds of a move that are hidden behind computation, where it can begin early or end late.
        shown: the part of these seconds that is not hidden after all.
        is_gradient: whether it is read by the update alone, element by element.
    """

    site: int
    part: int
    edges: list[Edge]
    count: int
    itemsize: int
    summed: int
    late: bool | None = False
    credit: float = 0.0
    shown: float = _HIDDEN
    is_gradient: bool = False


@dataclass(eq=False)
class Program:
    """The choices of a step on a mesh.

    Attributes:
        step: what is the same on all meshes.
        sites, groups: as they are.
        moves: what moves take.
        keeps: whether what moves in the forward pass is kept for the backward pass; else it moves once more.
    """

    step: Structure
    sites: list[Chooser]
    groups: list[Group]
    moves: Moves
    keeps: bool = False

    def target(self, edge: Edge, option: int) -> Layout | None:
        """How a site with this option wants a value, in the value's atoms; None where it does not matter."""
        lies = self.sites[edge.site].lies(option, edge.operand)
        return None if lies is None else tuple(edge.atoms[x] if x >= 0 else x for x in lies)

    def price(self, group: Group, before: Layout, after: Layout) -> float:
        """The seconds of a move of all values of a group."""
        dims = self.sites[group.site].outs[group.part]
        sizes = group.itemsize, group.summed
        seconds = self.moves(dims.sizes, *sizes, before, after).seconds if dims is not None else 0.0
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
    step: Structure,
    axes: Mapping[str, int],
    hardware: Any,
    fixed: Mapping[int, Any] | None = None,
    keeps: bool = False,
) -> Program:
    """The program of a recorded step.

    Args:
        step: its calls, and who reads what.
        axes: of the mesh, with their sizes.
        hardware: what calls and moves take.
        fixed: of inputs, by number, how they lie.
        keeps: whether what moves in the forward pass is kept for the backward pass.
    """
    return _Made(step, axes, hardware, fixed or {}, keeps).program


class _Made:
    def __init__(
        self, step: Structure, axes: Mapping[str, int], hardware: Any, fixed: Mapping[int, Any], keeps: bool
    ) -> None:
        self.step, self.axes, self.hardware = step, dict(axes), hardware
        self.sites = [self._site(n, number) for n, number in step.number.items()]
        for sizes in step.loose:  # a result that replaces no input lies in any way, but is no partial sum
            ways_ = [Option((x,), ()) for x in layouts(sizes, self.axes)]
            self.sites.append(Chooser(len(self.sites), None, 1, ways_))
        self._fix(fixed)
        self.groups = [Group(x.site, x.part, list(x.edges), x.count, *x.itemsizes, x.late) for x in step.readers]
        if keeps:
            self.groups = _joined(self.groups)
        self._credits()
        self.program = Program(step, self.sites, self.groups, Moves(self.axes, hardware), keeps)

    def _site(self, n: int, number: int) -> Chooser:
        rep = self.step.reps[n]
        choices, ins, outs = options(n, rep, self.step.atoms, self.axes)
        site = Chooser(number, rep, self.step.counts[n], choices, ins, outs)
        costs = CallPrices(rep, ins, outs, self.axes, self.hardware)
        site.options = [replace(x, seconds=costs(x)) for x in choices]
        return site

    def _fix(self, fixed: Mapping[int, Any]) -> None:
        """Leave inputs whose specs are given the options that are these specs."""
        for i, given in fixed.items():
            site = self.sites[self.step.site_of(self.step.inputs[i])]
            dims = site.outs[0]
            if dims is None:
                continue
            several = [tuple(a for a in names if self.axes[a] > 1) for names in split_axes(given, len(dims.dims))]
            want = from_split_axes(several, given.unreduced)
            lies = lambda x, d=dims: spec_of_dims(d.sizes, d.dims, x.outs[0], self.axes)
            site.options = [x for x in site.options if lies(x) == want]
            if not site.options:
                what = f"{self.step.paths[i]} is given as {given!r}, in which it is not looked for"
                rows = ["sizes that do not divide, axes of a dim in another order than the mesh's, and equal layers"]
                rows = [f"{rows[0]} that lie differently are left out"]
                raise SpecError(report("auto", what, rows, "vfn.price of the whole layout"))

    def _credits(self) -> None:
        """Parameters are gathered while other layers compute, and gradients are added up so: each may hide behind its share of
        the pass in which it travels, by what it takes to gather it from all ranks. Of the computation a third is the forward
        pass, the rest the backward pass. The first gather and the last sum hide behind nothing: of a few parameters that is
        much."""
        tied = {self.step.site_of(self.step.inputs[p]) for p in self.step.ties.values()}
        whole = sum(site.count * min(x.seconds for x in site.options) for site in self.sites)
        read = {g.site for g in self.groups if g.site in tied and any(e.operand >= 0 for e in g.edges)}
        travel, large = self._travel(read)
        cast, gradients = self._of_parameters(read), self.step.gradients
        for group in self.groups:
            n, dims = group.site, self.sites[group.site].outs[group.part]
            early = n in read or n in cast
            if dims is not None and travel and (early or (n, group.part) in gradients):
                share = min(self._gathered(math.prod(dims.sizes)) / travel, 1.0)
                group.credit = whole / 3 * share * (1 if early else 2)
                group.shown = _HIDDEN + (1 - _HIDDEN) / max(large, 1)
                group.is_gradient = not early and not any(edge.operand == RESULT for edge in group.edges)

    def _travel(self, read: set[int]) -> tuple[float, int]:
        """What it takes to gather all parameters from all ranks, and how many have a hundredth of all elements."""
        sizes = {n: math.prod(self.sites[n].outs[0].sizes) for n in read}  # type: ignore[union-attr]
        total = sum(self.sites[n].count * size for n, size in sizes.items())
        large = sum(self.sites[n].count for n, size in sizes.items() if size >= total / 100)
        return sum(self.sites[n].count * self._gathered(size) for n, size in sizes.items()), large

    def _gathered(self, count: int) -> float:
        """The seconds in which so many elements are gathered from all ranks."""
        over, ranks = [axis for axis, n in self.axes.items() if n > 1], math.prod(self.axes.values())
        return self.hardware.collective("all_gather", count * _WIDTH / ranks, self.axes, over) if over else 0.0

    def _of_parameters(self, read: set[int]) -> set[int]:
        """What is made of one parameter element by element, as its cast to another dtype is."""
        found, before = set[int](), set[int]()
        while todo := [g for g in self.groups if g.site in read | found and g.site not in before]:
            before.update(g.site for g in todo)
            sites = (self.sites[edge.site] for g in todo for edge in g.edges if edge.operand >= 0)
            found.update(x.number for x in sites if x.of is not None and len(x.ins) == 1 and _looks(x.of))
        return found


def _looks(it: Described) -> bool:
    return it.is_view or it.is_elementwise


def _joined(groups: Sequence[Group]) -> list[Group]:
    """Those who read a value at any time as one group."""
    found: dict[tuple[int, int], Group] = {}
    for group in groups:
        if (one := found.setdefault((group.site, group.part), group)) is not group:
            one.edges += [edge for edge in group.edges if edge not in one.edges]
            one.count, one.late = max(one.count, group.count), None
    return [*found.values()]
