"""Meshes of three axes and more: two axes choose at a time.

The choices of a call are a product over the axes, and the moves between two calls its square: with three axes the program is
too large. So at first the outer axes go together, as one: that is the optimum of a mesh of two axes. Then two axes choose
again, while the others stay, as long as that makes the step faster. That need not end at the optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from .best import Best, NothingFits, best
from .highs import Deadline, OutOfTime
from .options import Layout, Option
from .program import Chooser, Program

_BETTER = 1e-4  # of the time, by which another choice is to be faster at least

Keep = Callable[[Chooser, Option], bool]


def best_in_pairs(made: Program, memory: float | None, candidates: int, deadline: Deadline) -> list[Best]:
    """The best choices of a program of three axes and more that were found.

    Raises:
        NothingFits: in the memory, where axes go together.
        OutOfTime: nothing was found by then.
    """
    axes = range(len(made.moves.axes))
    try:  # the outer axes together, or the inner ones
        found = _restricted(made, _alike(axes[:-1]), memory, candidates, deadline)
    except NothingFits:
        found = _restricted(made, _alike(axes[1:]), memory, candidates, deadline)
    one = found[0]
    pairs, tried = [*itertools.combinations(axes, 2)], 0
    for pair in itertools.cycle(pairs):
        if tried == len(pairs):
            break
        tried += 1
        fixed = [k for k in axes if k not in pair]
        try:
            (new, *more) = _restricted(
                made, _as_now(made, one, fixed), memory, 1 if tried > 1 else candidates, deadline
            )
        except (NothingFits, OutOfTime):
            break
        found += more
        if new.seconds < one.seconds * (1 - _BETTER):
            one, tried = new, 1
            found.append(new)
    return _distinct(sorted(found, key=lambda x: x.seconds))[:candidates]


def _restricted(made: Program, keep: Keep, memory: float | None, candidates: int, deadline: Deadline) -> list[Best]:
    """The best choices among the options that are kept; numbers are those of all options."""
    kept = [[k for k, option in enumerate(site.options) if keep(site, option)] for site in made.sites]
    sites = [replace(site, options=[site.options[k] for k in of]) for site, of in zip(made.sites, kept)]
    small = replace(made, sites=sites)
    return [
        one._replace(chosen=[of[k] for of, k in zip(kept, one.chosen)], proven=False, least=0.0)
        for one in best(small, memory, candidates, deadline)
    ]


def _alike(group: Sequence[int]) -> Keep:
    """Options in which these axes do the same."""
    return lambda site, option: all(len({lies[k] for k in group}) == 1 for lies in _layouts(option))


def _as_now(made: Program, now: Best, fixed: Sequence[int]) -> Keep:
    """Options in which these axes do what they do now."""

    def keep(site: Chooser, option: Option) -> bool:
        old = made.sites[site.number].options[now.chosen[site.number]]
        return all(a[k] == b[k] for a, b in zip(_layouts(option), _layouts(old)) for k in fixed)

    return keep


def _layouts(option: Option) -> list[Layout]:
    return [x for x in (*option.ins, *option.outs) if x is not None]


def _distinct(found: Sequence[Best]) -> list[Best]:
    seen = set[tuple[int, ...]]()
    return [one for one in found if (key := tuple(one.chosen)) not in seen and not seen.add(key)]
