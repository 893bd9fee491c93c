"""The choices of a traced step on a mesh: sites with options, moves (reshards) of values between them, and all costs."""

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
from .structure import RESULT, Edge, Span, Structure

# The share of a collective that is exposed although it overlaps with computation. Where the collective takes more than these
# shares of that computation, the exposed share rises by so much: not all of the computation is where it can hide something.
# Set by the prices of `benchmarks.chosen_layouts`.
_BESIDE = 0.07
_RISES = ((0.5, 0.35), (1.0, 0.58))


@dataclass(eq=False)
class Chooser:
    """A site: calls or inputs that share one choice, or a result.

    Attributes:
        number: its position among the sites.
        of: one of the calls; None for a result that replaces no input.
        count: how many calls there are.
        options: the options to choose from, with the seconds of one call.
        ins, outs: the dims of operands and results.
    """

    number: int
    of: Described | None
    count: int
    options: list[Option]
    ins: list[Dims] = field(default_factory=list[Dims])
    outs: list[Dims | None] = field(default_factory=list[Dims | None])

    def lies(self, option: int, operand: int) -> Layout | None:
        """The layout that an option wants of an operand, or of the result that replaces the input."""
        found = self.options[option]
        return found.outs[0] if operand == RESULT else found.ins[operand]


@dataclass(eq=False)
class Group:
    """The readers of a value, in one pass of the step or in all of it: those that need the same move share it.

    Attributes:
        site, part: the site and the result that make the value.
        edges: the readers.
        spans: for each of equal values, the moments of the first and the last read.
        itemsize, summed: the bytes of an element, and its bytes in a reduction over ranks.
        shown: the exposed share of the seconds of a move: 1, except for moves that can start early or end late.
        exposed: for such moves, from how many seconds on a larger share is exposed, and by how much it is larger.
        is_gradient: whether only the update reads it, element by element.
    """

    site: int
    part: int
    edges: Sequence[Edge]
    spans: Sequence[Span]
    itemsize: int
    summed: int
    shown: float = 1.0
    exposed: Sequence[tuple[float, float]] = ()
    is_gradient: bool = False


@dataclass(eq=False)
class Program:
    """The choices of a step on a mesh.

    Attributes:
        step: the structure, which is the same on all meshes.
        sites, groups: the sites, and the groups of readers.
        moves: gives the time of moves.
        keeps: whether what a move of the forward pass gives is kept for the backward pass; else the value is moved again.
    """

    step: Structure
    sites: list[Chooser]
    groups: list[Group]
    moves: Moves
    keeps: bool = False

    def target(self, edge: Edge, option: int) -> Layout | None:
        """The layout, in the value's atoms, that a reading site with this option wants; None where any will do."""
        lies = self.sites[edge.site].lies(option, edge.operand)
        return None if lies is None else tuple(edge.atoms[x] if x >= 0 else x for x in lies)

    def price(self, group: Group, before: Layout, after: Layout) -> float:
        """The exposed seconds of a move of all values of a group."""
        dims = self.sites[group.site].outs[group.part]
        if dims is None:
            return 0.0
        count = len(group.spans)
        sent = self.moves(dims.sizes, group.itemsize, group.summed, before, after, count if group.exposed else 1)
        found = group.shown * sent.seconds + sum(more * max(0.0, sent.seconds - most) for most, more in group.exposed)
        # of those that travel as one the first gather is that of all, and the last sum
        return count * found + (sent.together - 1) * (1 - group.shown) * sent.seconds

    def seconds(self, chosen: Sequence[int]) -> float:
        """The seconds of a step with these options."""
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
    """The program of a traced step.

    Args:
        step: its calls, and which of them read which values.
        axes: the axes of the mesh, with their sizes.
        hardware: gives the time of calls and moves.
        fixed: the specs of inputs, by number, that must be kept.
        keeps: whether what a move of the forward pass gives is kept for the backward pass.
    """
    return _Made(step, axes, hardware, fixed or {}, keeps).program


class _Made:
    def __init__(
        self, step: Structure, axes: Mapping[str, int], hardware: Any, fixed: Mapping[int, Any], keeps: bool
    ) -> None:
        self.step, self.axes, self.hardware = step, dict(axes), hardware
        self.sites = [self._site(n, number) for n, number in step.number.items()]
        for sizes in step.loose:  # a result that replaces no input: any layout but partial sums
            ways_ = [Option((x,), ()) for x in layouts(sizes, self.axes)]
            self.sites.append(Chooser(len(self.sites), None, 1, ways_))
        self._fix(fixed)
        readers = step.readers if keeps else step.readers_by_part
        self.groups = [Group(x.site, x.part, x.edges, x.spans, *x.itemsizes) for x in readers]
        self._hide()
        self.program = Program(step, self.sites, self.groups, Moves(self.axes, hardware), keeps)

    def _site(self, n: int, number: int) -> Chooser:
        rep = self.step.reps[n]
        choices, ins, outs = options(n, rep, self.step.atoms, self.axes)
        site = Chooser(number, rep, self.step.counts[n], choices, ins, outs)
        costs = CallPrices(rep, ins, outs, self.axes, self.hardware)
        site.options = [replace(x, seconds=costs(x)) for x in choices]
        return site

    def _fix(self, fixed: Mapping[int, Any]) -> None:
        """Restrict inputs with fixed specs to the options with these specs."""
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

    def _hide(self) -> None:
        """Set the exposed share of moves that overlap with computation: parameters are gathered, and gradients reduced, while
        other layers compute. Each overlaps with a share of the computation in its pass, in proportion to its size. The first
        gather and the last reduction overlap with nothing, which is a large part where there are few parameters."""
        tied = {self.step.site_of(self.step.inputs[p]) for p in self.step.ties.values()}
        # parameters: the forward pass reads no optimiser's state
        read = {g.site for g in self.groups if g.site in tied and g.spans[0][0] < self.step.turn}
        cast, gradients, passes = self._of_parameters(read), self.step.gradients, self._computing()
        sizes = [(self.sites[n].count, math.prod(self.sites[n].outs[0].sizes)) for n in read]  # type: ignore[union-attr]
        total, squares = (sum(count * size**power for count, size in sizes) for power in (1, 2))
        for group in self.groups:
            n, dims = group.site, self.sites[group.site].outs[group.part]
            early = n in read or n in cast
            if dims is not None and total and (early or (n, group.part) in gradients):
                computed = passes[group.spans[0][0] >= self.step.turn] * min(math.prod(dims.sizes) / total, 1.0)
                group.shown = _BESIDE + (1 - _BESIDE) * squares / total**2
                group.exposed = [(share * computed, more * (1 - group.shown)) for share, more in _RISES]
                group.is_gradient = not early and not any(edge.operand == RESULT for edge in group.edges)

    def _computing(self) -> tuple[float, float]:
        """The least seconds of computation in the forward pass, and in the backward pass."""
        step, passes = self.step, [0.0, 0.0]
        for n, number in step.number.items():
            least = min(x.seconds for x in self.sites[number].options)
            passes[0] += (step.counts[n] - step.late[n]) * least
            passes[1] += step.late[n] * least
        return passes[0], passes[1]

    def _of_parameters(self, read: set[int]) -> set[int]:
        """The sites of values computed from one parameter element by element, such as its cast to another dtype."""
        found, before = set[int](), set[int]()
        while todo := [g for g in self.groups if g.site in read | found and g.site not in before]:
            before.update(g.site for g in todo)
            sites = (self.sites[edge.site] for g in todo for edge in g.edges if edge.operand >= 0)
            found.update(x.number for x in sites if x.of is not None and len(x.ins) == 1 and _looks(x.of))
        return found


def _looks(it: Described) -> bool:
    return it.is_view or it.is_elementwise
