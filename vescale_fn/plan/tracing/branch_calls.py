"""A choice is recorded with each branch as a graph of its own: a call, and in a backward pass a second one of the derivatives.

A branch is run in a frame of its own; what it uses from outside, its operands too, is what the call is given. When a gradient
comes back, autograd runs through each branch in its frame. What the derivative of a branch needs of its values the first call
gives as well: of the branch that runs alone, and in one place where two branches have something of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.base import tree
from ..._core.control_flow.cond import Choice
from ..._core.transforms.primals import as_primals
from ..ir.branches import Branches
from ..ir.graph import value
from ..ir.inplace import is_dense
from ..ir.nested import extracted
from . import leaves as leaves_
from .bodies import Column, OneOfEach, Uses, columns, given, recorded_call, uses
from .frame import Frame
from .loop_again import Leaves, captured, distinct, gradients
from .loop_calls import Nodes, flat, lying_as, stand_in
from .partition import Backward, Partition


class Branch:
    """A branch, run once in a frame of its own.

    Attributes:
        out: what it gave.
        forward: the calls in it.
    """

    def __init__(self, recorder: Any, chosen: Choice, i: int) -> None:
        self.frame = Frame(recorder.frame)
        self.start = torch_internals.autograd_count()
        with recorder.within(self.frame):
            self.frame.see(torch_internals.peel(x) for x in tree.leaves(chosen.operands) if isinstance(x, torch.Tensor))
            self.out = chosen(i)
        self.forward: Nodes = []

    def nodes(
        self, recorder: Any, ones: Sequence[OneOfEach], leaves: Sequence[torch.Tensor | None]
    ) -> list[fx.Node | None]:
        """The nodes of the plain tensors in leaves, with None for those that there are not."""
        with recorder.within(self.frame), torch_internals.no_torch_function():
            plain = [[None] * one.count if x is None else one.plain(x) for one, x in zip(ones, leaves, strict=True)]
            return [None if x is None else recorder.node(x) for row in plain for x in row]


class BranchCall:
    """The call of a choice.

    Args:
        recorder: at work.
        chosen: what is chosen between.
        index: what is read to choose, plain tensors that are alike.
        branches: as they were run.
    """

    def __init__(self, recorder: Any, chosen: Choice, index: Leaves, branches: Sequence[Branch]) -> None:
        self.recorder, self.chosen, self.index, self.branches = recorder, chosen, index, branches
        self.results = list(map(OneOfEach, zip(*(branch.out.leaves for branch in branches))))
        self.gives = self.settled([branch.nodes(recorder, self.results, branch.out.leaves) for branch in branches])
        for branch in branches:
            branch.forward = [node for node in branch.frame.graph.nodes if node.op == "call_function"]
        self.inputs: Leaves = []  # those that autograd follows
        self.again: Any = None  # a `branch_again.ChoiceAgain`
        self.slots: list[Column] = []  # what the derivatives need of the branches, given after the results

    def followed(self) -> Leaves | None:
        """What autograd follows into the results; None where some of it was not seen."""
        found = [
            captured(branch.out.leaves, branch.start, branch.frame.followed.values(), []) for branch in self.branches
        ]
        return None if any(xs is None for xs in found) else distinct(xs or [] for xs in found)

    def settled(self, rows: Sequence[Sequence[fx.Node | None]]) -> list[Column]:
        """What the branches give, lying in memory in the same way; zeros for None."""
        return [self._settled(column) for column in zip(*rows, strict=True)]

    def _settled(self, column: Sequence[fx.Node | None]) -> Column:
        like = value(next(x for x in column if x is not None))
        like = like if is_dense(like) else self.recorder.fake_dense(like)
        found = {}
        for i, (branch, x) in enumerate(zip(self.branches, column, strict=True)):
            with self.recorder.within(branch.frame):
                found[i] = lying_as(branch.frame.graph, self.recorder.zeros(like) if x is None else x, like)
        return found

    def forward(self) -> Leaves:
        """Record the call, and give its results."""
        frames = [branch.frame for branch in self.branches]
        self.used = uses(frames, [frame.places for frame in frames])
        self.node, outs = self.emitted(self.bodies(), self.gives, [], self.used)
        if outs:
            self.mark = outs[0]
            self.recorder.loops[torch_internals.memory_number(self.mark)] = self
        found = iter(outs)
        with torch_internals.no_torch_function():
            return [one.of(found) for one in self.results]

    def bodies(self) -> list[fx.Graph]:
        """The branches' graphs."""
        places = columns(self.used)
        return [
            extracted(branch.forward, given(places, i), [*self.row(self.gives, i), *self.row(self.slots, i)])
            for i, branch in enumerate(self.branches)
        ]

    @staticmethod
    def row(columns: Sequence[Column], i: int) -> list[fx.Node | None]:
        """What a branch has of each column."""
        return [column.get(i) for column in columns]

    def emitted(
        self, bodies: Sequence[fx.Graph], gives: Sequence[Column], args: Sequence[fx.Node], used: Uses
    ) -> tuple[fx.Node, Leaves]:
        """Record a call with these bodies, and give it and stand-ins of its results."""
        step = Branches(bodies=tuple(bodies), labels=tuple(self.chosen.names), read=len(self.index))
        with torch_internals.no_torch_function():
            for x in self.index if step.effect else ():
                self.recorder.counts_as_alike(x)
            args = [*map(self.recorder.node, self.index), *args]
        return recorded_call(self.recorder, step, args, used, [value(next(iter(column.values()))) for column in gives])

    def keep(self, needed: Sequence[Nodes]) -> list[tuple[Any, Column]]:
        """Have the call give what the derivative of each branch needs of its values.

        Returns:
            What it gives then, with what stands for it in each branch.
        """
        used: dict[int, Column] = {}
        for i, nodes in enumerate(needed):
            results = self.row(self.gives, i)
            for x in nodes:
                at = results.index(x) if x in results else self._slot(i, x, len(results))
                used.setdefault(at, {})[i] = x
        if new := self.slots[len(self.node.meta["val"]) - len(self.gives) :]:
            self.node.target = replace(self.node.target, bodies=tuple(self.bodies()))  # type: ignore[type-var]
            vals = [next(iter(column.values())).meta["val"] for column in new]
            self.recorder.more_results(
                self.node, [self.recorder.fake_like(x) if isinstance(x, torch.Tensor) else x for x in vals]
            )
        outs = {
            part.args[1]: value(part) if isinstance(value(part), torch.Tensor) else part for part in self.node.users
        }
        return [(outs[at], column) for at, column in sorted(used.items())]

    def _slot(self, i: int, x: fx.Node, before: int) -> int:
        """The place among the results of what a derivative needs of a branch, one that other branches have no use for."""
        for at, column in enumerate(self.slots):
            if column.get(i) is x:
                return before + at
        for at, column in enumerate(self.slots):
            if i not in column and _kind(next(iter(column.values()))) == _kind(x) is not None:
                column[i] = x
                return before + at
        self.slots.append({i: x})
        return before + len(self.slots) - 1


def _kind(x: fx.Node) -> Any:
    """What two values have alike that can stand in one place."""
    val = value(x)
    return (val.shape, val.stride(), val.dtype, val.device) if isinstance(val, torch.Tensor) else None


class _Backward:
    """The derivative of one branch, recorded in its frame.

    Attributes:
        places: the nodes of what stands for the cotangents.
        grads: what comes back to the inputs, None where nothing does.
    """

    def __init__(self, recorder: Any, branch: Branch, at: Sequence[int], cts: Leaves, inputs: Leaves) -> None:
        self.branch, frame = branch, branch.frame
        self._known, self._before = len(frame.places), set(frame.graph.nodes)
        nodes: list[Nodes] = []
        with recorder.within(frame):
            fakes = [stand_in(recorder, ct, "ct", nodes) for ct in cts]
            pairs = [(branch.out.leaves[i], ct) for i, ct in zip(at, fakes, strict=True)]
            found = gradients([pair for pair in pairs if pair[0].requires_grad], [], inputs, False)
            self.grads = [None if g is None else as_primals([g], [x])[0] for g, x in zip(found, inputs, strict=True)]
        self.places = flat(nodes)

    def split(self, gives: Sequence[fx.Node | None]) -> Backward:
        """What runs backward, and what it needs of what runs forward."""
        branch, places = self.branch, self.branch.frame.places
        partition = Partition(branch.forward, places[: self._known], [], 0, 0)
        new = partition.since(self._before, branch.frame.graph)
        branch.forward = list(partition.forward)
        return partition.of_backward(new, self.places, [], gives, places[self._known :])


def derivative(call: BranchCall, cotangents: Sequence[torch.Tensor | None]) -> list[Any]:
    """Record the derivative of a choice, and give the cotangents of its inputs.

    Args:
        call: the choice.
        cotangents: of its results, None where nothing comes back.
    """
    recorder, inputs = call.recorder, call.inputs
    at = [i for i, ct in enumerate(cotangents) if ct is not None]
    cts = as_primals([ct for ct in cotangents if ct is not None], [call.results[i].like for i in at])
    backward = [_Backward(recorder, branch, at, cts, inputs) for branch in call.branches]
    moving = [i for i, column in enumerate(zip(*(b.grads for b in backward))) if any(g is not None for g in column)]
    ones = [OneOfEach([b.grads[i] for b in backward]) for i in moving]
    gives = call.settled([b.branch.nodes(recorder, ones, [b.grads[i] for i in moving]) for b in backward])
    outs = iter(_recorded(call, backward, gives, cts))
    with torch_internals.no_torch_function():
        found = dict(zip(moving, [one.of(outs) for one in ones], strict=True))
    return [found.get(i) for i in range(len(inputs))]


def _recorded(call: BranchCall, backward: Sequence[_Backward], gives: Sequence[Column], cts: Leaves) -> Leaves:
    """Record the call of the derivatives, and give its plain results."""
    recorder = call.recorder
    splits = [b.split(call.row(gives, i)) for i, b in enumerate(backward)]
    kept = call.keep([[*split.each, *split.last] for split in splits])
    used = uses([branch.frame for branch in call.branches], [split.constants for split in splits])
    cotangents = [dict(enumerate(column)) for column in zip(*(b.places for b in backward), strict=True)]
    places = [*cotangents, *(column for _, column in kept), *columns(used)]
    bodies = [extracted(split.nodes, given(places, i), call.row(gives, i)) for i, split in enumerate(splits)]
    with torch_internals.no_torch_function():
        nodes = [recorder.node(x) for ct in cts for x in leaves_.plain_of(ct)]
        args = [lying_as(recorder.graph, x, value(y)) for x, y in zip(nodes, backward[0].places, strict=True)]
        args += [recorder.outer(x) for x, _ in kept]
    return call.emitted(bodies, gives, args, used)[1]
