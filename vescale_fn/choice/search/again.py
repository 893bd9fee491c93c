"""Values that the forward pass makes and the backward pass computes again, instead of keeping them while most is held.

What takes no longer than to read its operands is computed again anyway, by a pass of every plan; it counts as not held. A
product may be: for that a site has each of its options twice, the second time for twice the seconds. A value can be computed
again if its operands are arguments, or held at that time in any case: those that could be computed again themselves count as
held from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...plan.ir import graph as plan
from ...plan.ir.work import flops
from ...plan.passes.recompute_in_calls import is_cheap
from .described import Described

Span = tuple[int, int]
Moments = Mapping[tuple[Any, int], tuple[Sequence[int], Sequence[int]]]  # of (node, result): early reads, late ones


def gaps(calls: Sequence[Described], moments: Moments, roots: Mapping[Any, Any]) -> dict[Any, Span]:
    """Of nodes whose value can be computed again the moments between in which it need not be held.

    Args:
        calls: in order.
        moments: at which values are read.
        roots: of renaming views what they are a view of.
    """
    found, needed = dict[Any, Span](), dict[Any, int]()
    for x in reversed(calls):
        early, late = moments.get((x.node, 0), ((), ()))
        if x.node in roots or not early or not late or not _can_be_again(x):
            continue
        start, stop = early[-1], min(late[0], needed.get(x.node, late[0]))
        reads = [roots[y][:2] if y in roots else (y, part) for y, part in x.operands]
        there = all(y.op == "placeholder" or max(moments[y, part][1], default=-1) >= late[0] for y, part in reads)
        if there and start + 1 < stop:
            found[x.node] = start + 1, stop - 1
            needed.update((y, min(needed.get(y, stop), stop)) for y, _ in reads)
    return found


def _can_be_again(x: Described) -> bool:
    """Whether a call gives one value, the same again."""
    one = not x.is_input and not x.is_view and len(x.outs) == 1 and not plan.written(x.node)
    return one and not plan.has_effect(x.node) and (is_cheap(x.node) or flops(x.node) > 0)


def add_repeats(made: Any, wanted: bool = True) -> None:
    """Give the sites of products whose values can be computed again their options once more, for that."""
    for number in {n for n, _ in made.step.gaps if wanted}:
        site = made.sites[number]
        if not is_cheap(site.of.node):
            site.options = site.options + [replace(x, seconds=2 * x.seconds, again=True) for x in site.options]
