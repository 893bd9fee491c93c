"""The best others of the choices of a program: each lays a large argument otherwise.

For each parameter, or other large argument, there is a search for the best choices in which it does not lie as it does in the
best of all, and for each axis one for those in which it splits no such argument. So the second best is among them, and others
differ from it and from each other in something that matters. A relaxed program first tells what each of them takes at least.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from .highs import OutOfTime
from .program import Chooser, Program
from .solver import Choices

_LARGE = 0.01  # of the bytes of the arguments
_SLOWER = 1.5  # times as long as the best: what is not worth its price
_SAME = 1e-3  # of the time: what the same axes on other dims have to differ by, to count as another layout


class Best(NamedTuple):
    """The choices that a search found.

    Attributes:
        chosen: of each site the number of its option.
        seconds: what they take.
        bytes: the most that a rank holds.
        relaxed: whether the linear relaxation gave them, without a branch.
        proven: whether there are no better ones; of others, none that lay the same argument otherwise.
        least: seconds that all of these take at least.
    """

    chosen: list[int]
    seconds: float
    bytes: float
    relaxed: bool
    proven: bool
    least: float


class ChoiceSolver(Protocol):
    """How choices within the memory are found."""

    choices: Choices

    def bound(self, without: Sequence[int], most: float) -> float:
        """The seconds that all choices without some columns take at least; inf where there are none, or above `most`."""
        ...

    def without(self, columns: Sequence[int]) -> Best | None:
        """The best choices without some columns, if any were found."""
        ...


def others(made: Program, way: ChoiceSolver, first: Best, count: int, within: float = math.inf) -> list[Best]:
    """The best others, the fastest first. Where time ends, those that were found by then.

    Args:
        made: the program.
        way: how choices are found.
        first: the best.
        count: how many, at most.
        within: seconds that they may take.
    """
    arguments = _arguments(made)
    within, near = min(within, _SLOWER * first.seconds), first.seconds * (1 + _SAME)
    axes = lambda n, k: _splitting(made.sites[n].options[k].outs[0])
    other = lambda n, one: _columns(way, n, [k for k, _ in enumerate(made.sites[n].options) if one(k)])
    level = lambda bound: bound // (_SAME * first.seconds)
    found, bounds = [first], list[tuple[float, int, float, list[int]]]()
    try:
        for a in range(len(made.moves.axes)) if count > 0 else ():
            if any(a in axes(n, first.chosen[n]) for n in arguments):
                closed = [x for n in arguments for x in other(n, lambda k, a=a, n=n: a in axes(n, k))]
                bound = way.bound(closed, within)
                bounds.append((level(bound), len(bounds), bound, closed))
        for n in arguments if count > 0 else ():
            now = first.chosen[n]
            bound = way.bound(closed := other(n, lambda k, now=now: k == now), within)
            if bound <= near:  # on other dims, most likely
                closed = other(n, lambda k, n=n, now=now: axes(n, k) == axes(n, now))
                bound = way.bound(closed, within)
            bounds.append((level(bound), len(bounds), bound, closed))
        for *_, bound, closed in sorted(bounds):
            if bound > within or (len(found) > count and bound >= sorted(one.seconds for one in found)[count]):
                break
            one = way.without(closed)
            if one is not None and one.seconds <= within and _is_other(made, arguments, one, found):
                found.append(one)
    except OutOfTime:
        pass
    return sorted(found[1:], key=lambda one: one.seconds)[:count]


def _is_other(made: Program, arguments: Sequence[int], one: Best, found: Sequence[Best]) -> bool:
    """Whether arguments lie otherwise than in each that was found: over other axes, unless that they are on other dims
    makes a difference."""
    lies = lambda x: [made.sites[n].options[x.chosen[n]].outs[0] for n in arguments]
    over = lambda x: [_splitting(layout) for layout in lies(x)]
    for old in found:
        close = abs(one.seconds - old.seconds) <= _SAME * old.seconds
        if lies(one) == lies(old) or (close and over(one) == over(old)):
            return False
    return True


def _splitting(layout: Sequence[int]) -> frozenset[int]:
    """The axes, by number, that split a value."""
    return frozenset(a for a, label in enumerate(layout) if label >= 0)


def _columns(way: ChoiceSolver, site: int, options: Sequence[int]) -> list[int]:
    return [column for k in options for column in way.choices.columns.get((site, k), ())]


def _arguments(made: Program) -> list[int]:
    """The sites of arguments that are at least a hundredth of all: of those that calls read other than element by element, if
    there are any, and not of what an optimiser keeps for each."""
    inputs = [site for site in made.sites if site.of is not None and site.of.is_input and site.outs[0] is not None]
    sizes = {site.number: site.count * _bytes(site) for site in inputs}
    large = [n for n, size in sizes.items() if size >= _LARGE * sum(sizes.values())]
    readers = defaultdict[int, list[Chooser]](list)
    for group in made.groups:
        readers[group.site] += [made.sites[edge.site] for edge in group.edges if edge.operand >= 0]
    return [n for n in large if _is_read_as_a_whole(n, readers)] or large


def _bytes(site: Chooser) -> float:
    assert site.of is not None
    assert site.outs[0] is not None
    return float(np.prod(site.outs[0].sizes)) * site.of.outs[0].element_size()  # type: ignore[union-attr]


def _is_read_as_a_whole(number: int, readers: dict[int, list[Chooser]]) -> bool:
    """Whether some call reads a value, or what is made of it alone, other than element by element."""
    todo, seen = [number], {number}
    while todo:
        for site in readers[todo.pop()]:
            if site.of is None or site.number in seen:
                continue
            seen.add(site.number)
            if not (site.of.is_elementwise or site.of.is_view):
                return True
            if len(site.ins) == 1:
                todo.append(site.number)
    return False
