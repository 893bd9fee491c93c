"""Calls of two loops' bodies that make the same of the same things: of slices, and of what no iteration changes."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_arg

from ..._core.distributed.collectives import Collective
from .graph import Step, calls, changed, has_effect
from .loop import LAST, STACKED, loop_of
from .nested import Nested, ends


def numbered(loop: fx.Node, numbers: dict[Any, int], collectives: bool) -> dict[fx.Node, int]:
    """A number for each call of a loop's body that depends on what is cut, and what is the same in all iterations, alone; equal
    for calls that make the same of the same."""
    how, found = loop_of(loop), dict[fx.Node, int]()
    hot, kinds = changed(how.body), [None] * how.carry + [*how.slices]

    def number(*key: Any) -> int:
        return numbers.setdefault(key, len(numbers))

    for i, (x, outer) in enumerate(zip(ends(how.body)[0], loop.args, strict=True)):
        kind = kinds[i] if i < how.given else LAST
        if kind in (STACKED, LAST):
            found[x] = number(outer, kind)
    for x in calls(how.body):
        target = x.target
        apart = isinstance(target, Nested) or (isinstance(target, Collective) and not collectives)
        if apart or has_effect(x) or x in hot or not found.keys() >= {*x.all_input_nodes}:
            continue
        if isinstance(target, Step):
            run: Any = target.run
            target = target.name, getattr(run, "func", run), repr(getattr(run, "keywords", None))
        args = map_arg((x.args, x.kwargs), lambda y: _Number(found[y]))
        found[x] = number(target, repr(args))
    return found


class _Number(int):
    """The number of a call, among arguments that are numbers too."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def made_before(before: fx.Node, x: fx.Node, place: dict[fx.Node, int]) -> fx.Node:
    """`x`, which is made of what a body is given, made before another node; `place` says where nodes are."""
    if x.op == "call_function" and place[x] > place[before]:
        for y in x.all_input_nodes:
            made_before(before, y, place)
        before.prepend(x)
        place[x] = place[before]
    return x
