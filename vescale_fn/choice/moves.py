"""Where a step is to say `with_sharding`, so that the rules' votes come to a chosen layout by themselves."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._core.arrays.layout_solver import solved
from .._core.arrays.reshard_plan import LOCAL_KINDS, plan
from .._core.sharding.layout import type_text
from .._core.sharding.placements import normal
from .._core.sharding.spec import P
from ..plan.ir.graph import calls, name_of, value
from ..plan.ir.memory_use import place
from .apply_calls import operands, results
from .recording import Recording
from .search.described import described
from .search.layouts import Layouts


@dataclass(frozen=True)
class MoveToWrite:
    """A line to write.

    Attributes:
        line: of the call that is given the value, ``file:line``.
        value: what moves, in words: an argument by its path, or the result of a call.
        kind: its type as it lies before.
        spec: how it is to lie.
        op: that is given it.
        backward: whether this is in the backward pass, where nothing can be written.
        count: how often: once for each of equal layers, say.
    """

    line: str
    value: str
    kind: str
    spec: P
    op: str
    backward: bool = False
    count: int = 1

    def __repr__(self) -> str:
        often = f", {self.count} times" if self.count > 1 else ""
        moved = f"  {self.value}, {self.kind}, before {self.op}{often}"
        if self.backward:
            return (
                f"{place(self.line)}: in the backward pass of it, where nothing can be written\n{moved}: {self.spec!r}"
            )
        return f"{place(self.line)}\n{moved}: x = vfn.with_sharding(x, {self.spec!r})"


def moves(recorded: Recording, layouts: Layouts) -> list[MoveToWrite]:
    """Where the vote would differ from a layout: values that are to move before a call, in the order of the calls."""
    walk = _Walk(recorded, layouts)
    for node in calls(recorded.graph):
        walk.pass_by(node)
    counts: dict[MoveToWrite, int] = {}
    for one in walk.found:
        counts[one] = counts.get(one, 0) + 1
    return [MoveToWrite(*_fields(one), count=n) for one, n in counts.items()]


def _fields(move: MoveToWrite) -> tuple[Any, ...]:
    return move.line, move.value, move.kind, move.spec, move.op, move.backward


class _Walk:
    """The calls in order, with how values lie once the moves that were found are written.

    What has moved can be named both ways: as it was, and as it is since. Gradients come back in the layouts of what they are
    of, and what `with_sharding` moves comes back in the backward pass: these moves nobody writes. What the backward pass needs
    of the forward pass moves there.
    """

    def __init__(self, recorded: Recording, layouts: Layouts) -> None:
        self.layouts, self.axes = layouts, dict(layouts.mesh)
        self.described = {x.node: x for x in described(recorded.graph)}
        self.paths = dict(zip(recorded.placeholders, recorded.paths))
        self.lies: dict[fx.Node, list[P]] = {}  # the last is the newest
        self.parts: dict[fx.Node, Sequence[P]] = {}
        self.arguments: set[tuple[torch.Size, P]] = set()
        self.back: set[tuple[torch.Size, P]] = set()  # what moves back in the backward pass
        self.votes: dict[Any, tuple[fx.Node, fx.Node, P]] = {}  # moves by votes, by that of the cotangent
        self.found: list[MoveToWrite] = []
        for node, spec in zip(recorded.placeholders, layouts.inputs, strict=True):
            if spec is not None:
                self.lies[node] = [normal(spec, self.axes, value(node).shape)]
                self.arguments.add((value(node).shape, self.lies[node][0]))

    def pass_by(self, node: fx.Node) -> None:
        """Compare a call's vote with what is stated, and note how its results lie."""
        stated = self.layouts.calls.get(node.name)
        if node.target is operator.getitem:
            whole, part = node.args
            tensors = [i for i, x in enumerate(value(whole)) if isinstance(x, torch.Tensor)]  # type: ignore[arg-type]
            if part in tensors:
                self.lies[node] = [self.parts[whole][tensors.index(part)]]  # type: ignore[index, arg-type]
            return
        given = operands(node)
        if stated is None:
            outs = self._vote(node, [self.lies[x][-1] for x in given])[1]
        else:
            ins = [normal(spec, self.axes, value(x).shape) for x, spec in zip(given, stated.ins, strict=True)]
            outs = [normal(spec, self.axes, x.shape) for x, spec in zip(results(node), stated.outs, strict=True)]
            lying = [spec if spec in self.lies[x] else self.lies[x][-1] for x, spec in zip(given, ins)]
            if self._vote(node, lying) != (ins, outs):
                for x, lies, spec in zip(given, lying, ins):
                    if lies != spec:
                        self._move(node, x, lies, spec)
            elif "backward" not in node.meta:
                for x, lies, spec in zip(given, lying, ins):
                    if lies != spec:
                        self.votes.setdefault((value(x).shape, spec, P(*lies)), (node, x, lies))
        self.parts[node] = outs
        if outs and isinstance(value(node), torch.Tensor):
            self.lies[node] = [outs[0]]

    def _vote(self, node: fx.Node, lying: Sequence[P]) -> tuple[list[P], list[P]]:
        """How a call's arguments and results would lie by its rule."""
        one = self.described.get(node)
        if one is None or one.rule is None or not lying:
            return [P()] * len(lying), [P() for _ in results(node)]
        shapes = [None if x is None else tuple(x.shape) for x in one.outs]
        found = solved(one.rule, list(zip(lying, one.shapes, strict=True)), shapes, self.axes, ())
        targets = [normal(spec, self.axes, shape) for spec, shape in zip(found.targets, one.shapes)]
        pairs = zip(found.outs, shapes, strict=True)
        return targets, [normal(spec, self.axes, shape) for spec, shape in pairs if shape is not None]

    def _move(self, node: fx.Node, x: fx.Node, lies: P, spec: P) -> None:
        """Note that a value is to move before a call; it can be named so from then on."""
        shape, backward = value(x).shape, "backward" in node.meta
        finished = "backward" in x.meta and not backward and (shape, spec) in self.arguments
        comes_back = backward and (shape, spec) in self.back
        self.lies[x].append(spec)
        if finished or comes_back:
            return
        if backward and "backward" not in x.meta:
            node, backward = self._first_use(x, spec) or node, False
        elif backward and (made := self.votes.get((shape, lies, spec))) is not None:
            spec, backward = lies, False  # the vote's move does not come back, a written one does
            node, x, lies = made
            self.lies[x].append(spec)
        elif backward and not self._travels(x, lies, spec):
            return
        what = self.paths.get(x) or f"what {name_of(x) or 'a call'} gives at {place(x.meta.get('line') or '?')}"
        kind = type_text(shape, value(x).dtype, lies)
        if not backward:
            self.back.add((shape, P(*lies)))
        self.found.append(MoveToWrite(node.meta.get("line") or "?", what, kind, spec, name_of(node), backward))

    def _travels(self, x: fx.Node, lies: P, spec: P) -> bool:
        """Whether a move is more than that each rank takes its part."""
        steps = plan(tuple(value(x).shape), tuple(self.axes.items()), lies, spec)
        return any(step.kind not in LOCAL_KINDS for step in steps)

    def _first_use(self, x: fx.Node, spec: P) -> fx.Node | None:
        """The first call of the forward pass that is given a value, if it is to lie so there, too."""
        for user in x.users:
            stated = self.layouts.calls.get(user.name)
            if "backward" not in user.meta and stated is not None:
                ins = [one for y, one in zip(operands(user), stated.ins) if y is x]
                if any(normal(one, self.axes, value(x).shape) == spec for one in ins):
                    return user
        return None
