"""The call of a loop in a recording: its body, run once on what stands for the carry and a slice, and what it gives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.arrays.array import is_array, spec_of
from ..._core.control_flow.scan import Repeated, is_split
from ..._core.local_types import tensor_types
from ..execution.stride_checks import as_recorded
from ..ir.graph import Step, calls, value
from ..ir.loop import LAST, STACKED, Loop
from ..ir.nested import extracted
from . import leaves as leaves_
from .frame import Frame, Unrollable
from .loop_again import Differentiated, Leaves, captured, is_smooth
from .loop_slices import Collected, SplitLeaf, array_like, like_a_slice
from .loop_sums import reduce_to_owners
from .partition import Partition

Nodes = list[fx.Node]


class Iteration:
    """The body of a loop, run once.

    Args:
        recorder: at work.
        repeated: the body.
        xs: what the loop goes over.
        moving: whether autograd follows.
        count: the number of iterations.

    Attributes:
        given, cut: stand-ins of the carry and of a slice.
        rows: what is cut along its leading dim: the leaves of `xs` where that is whole, the iterations' numbers where one is
            split. Its nodes are `row_nodes`.
        turn: a stand-in of the iteration's number, where a leaf is split.
        split: by the place in `xs`, the leaves whose leading dim is split; `brings` are the calls that bring their slices.
        carried, collected: what it gave; where autograd follows, with the carry that it was given after what it collects.
        begins_again: whether the first carry has taken other types, so that it is to be run anew.
    """

    def __init__(self, recorder: Any, repeated: Repeated, xs: Leaves, moving: bool, count: int) -> None:
        self.recorder, self.frame, self.repeated = recorder, Frame(recorder.frame), repeated
        self.init = list(map(with_all_elements, repeated.init))
        self.start = torch_internals.autograd_count()
        self.split = {i: SplitLeaf(x) for i, x in enumerate(xs) if is_split(x)}
        turns = [torch.arange(count, device="cpu")] if self.split else []
        self.rows = [*turns, *(x for i, x in enumerate(xs) if i not in self.split)]
        likes = [(like_a_slice(x), list(map(recorder.fake, leaves_.plain_of(x)))) for x in self.rows]
        self.given_nodes: list[Nodes] = []
        self.row_nodes: list[Nodes] = []
        with recorder.within(self.frame):
            self.given = [self.stand_in(x, "carry", self.given_nodes, moving) for x in self.init]
            self.cut = self.slices(likes, len(xs), moving)
            self.brings = set(calls(self.frame.graph))
            now, y = repeated.step(self.given, self.cut)
        self.begins_again = repeated.adapt(now)
        if self.begins_again:
            return
        self.carried, self.collected = repeated.checked(now), [*y.leaves]
        self.results = [*self.carried, *self.collected]
        self.count_collected = len(self.collected)
        if moving:
            self.collected += self.given
        with recorder.within(self.frame):
            self.carried_nodes = [
                self.nodes(x, wanted) for x, wanted in zip(self.carried, self.given_nodes, strict=True)
            ]
            self.collected_nodes = [self.nodes(x) for x in self.collected]
        self.forward = list(calls(self.frame.graph))

    def slices(self, likes: Sequence[tuple[torch.Tensor, Leaves]], count: int, moving: bool) -> Leaves:
        """A slice of each of the `count` leaves that the loop goes over: a stand-in, or what brings it is recorded."""
        found = iter(
            [
                self.stand_in(like, "x", self.row_nodes, moving and x.requires_grad, parts)
                for x, (like, parts) in zip(self.rows, likes, strict=True)
            ]
        )
        self.turn = next(found) if self.split else None
        return [
            self.split[i].slice(self.recorder, self.turn, moving) if i in self.split else next(found)
            for i in range(count)
        ]

    def stand_in(
        self, leaf: torch.Tensor, name: str, nodes: list[Nodes], moving: bool, stacked: Leaves | None = None
    ) -> torch.Tensor:
        """What stands for a leaf in the body."""
        return stand_in(self.recorder, leaf, name, nodes, moving, stacked)

    def nodes(self, leaf: torch.Tensor, wanted: Nodes | None = None) -> Nodes:
        """The nodes of a leaf's plain tensors, which lie as those of `wanted`."""
        with torch_internals.no_torch_function():
            found = [self.recorder.node(x) for x in leaves_.plain_of(leaf)]
        if wanted is None:
            return found
        if len(found) != len(wanted):  # simulated ranks that hold one block have come to hold two
            raise Unrollable
        return [in_place_of(self.frame.graph, a, b) for a, b in zip(found, wanted, strict=True)]

    def captured(self) -> Leaves | None:
        """The tensors from outside that autograd follows into the results; None where one of them was not seen."""
        return captured(self.results, self.start, self.frame.followed.values(), [*self.given, *self.cut])


def stand_in(
    recorder: Any,
    leaf: torch.Tensor,
    name: str,
    nodes: list[Nodes],
    moving: bool = False,
    stacked: Leaves | None = None,
) -> torch.Tensor:
    """What stands for a leaf in a body; its nodes are added to `nodes`. Of what a loop goes over, `leaf` is `like_a_slice`, and
    `stacked` all of it; `moving` is what autograd is to follow."""
    found: Nodes = []
    rows = None if stacked is None else iter(stacked)

    def one(x: torch.Tensor) -> torch.Tensor:
        fake = recorder.stand_in(x if rows is None else next(rows), name, rows is not None)
        found.append(fake._plan_node)
        return fake

    with torch_internals.no_torch_function():
        out = leaves_.with_tensors(leaf, one)
        if moving and is_smooth(leaf):
            out.requires_grad_()
        tensor_types.kept(out, leaf)
    nodes.append(found)
    return out


@functools.lru_cache(maxsize=256)
def _in_order(strides: tuple[int, ...]) -> Step:
    return Step("in_order", functools.partial(as_recorded, strides=strides), views=(0,))


def in_place_of(graph: fx.Graph, node: fx.Node, wanted: fx.Node) -> fx.Node:
    """What a node gives, lying in memory as what it takes the place of."""
    return lying_as(graph, node, value(wanted))


def lying_as(graph: fx.Graph, node: fx.Node, like: torch.Tensor) -> fx.Node:
    """What a node gives, lying in memory as `like`."""
    if value(node).stride() == like.stride():
        return node
    new = graph.call_function(_in_order(like.stride()), (node,))
    new.meta = {"val": like, "line": node.meta.get("line", "")}
    return new


class LoopCall(Differentiated):
    """The call of a loop.

    Args:
        recorder: at work.
        one: the body.
        xs: what it goes over.
        captured: what it uses from outside that autograd follows.
        count, reverse: of the loop.
    """

    def __init__(self, recorder: Any, one: Iteration, xs: Leaves, captured: Leaves, count: int, reverse: bool) -> None:
        results = [*one.carried, *one.collected]
        super().__init__(one.repeated, one.init, xs, one.given, one.cut, results, captured, count, reverse)
        self.recorder, self.one = recorder, one

    def forward(self) -> Leaves:
        """Record the call of the loop, and give its results."""
        one, frame, recorder = self.one, self.one.frame, self.recorder
        with torch_internals.no_torch_function():
            plain = [[recorder.node(x) for x in leaves_.plain_of(leaf)] for leaf in self.init]
            first = [
                in_place_of(recorder.graph, node, wanted)
                for row, wants in zip(plain, one.given_nodes, strict=True)
                for node, wanted in zip(row, wants, strict=True)
            ]
            rows = [recorder.node(x) for leaf in one.rows for x in leaves_.plain_of(leaf)]
        places = list(frame.places)
        given = [*flat(one.given_nodes), *flat(one.row_nodes), *places]
        leading = self.repeated.leading
        self.rows = [
            Collected(leaf, nodes, self.count, leading.get(i))
            for i, (leaf, nodes) in enumerate(zip(one.collected, one.collected_nodes, strict=True))
        ]
        kept = [pair for one_of in self.rows for pair in one_of.kept]
        gives = [*flat(one.carried_nodes), *(node for node, _ in kept)]
        self.partition = Partition(one.forward, given, gives, len(first), len(rows), again=one.brings)
        loop = Loop(
            bodies=(self.body(),),
            length=self.count,
            reverse=self.reverse,
            carry=len(first),
            slices=(STACKED,) * len(rows),
            keeps=tuple(kind for _, kind in kept),
        )
        self.node, outs = self.emitted(loop, [*first, *rows], frame.constants[: len(places)])
        self.mark = outs[0]
        recorder.loops[torch_internals.memory_number(self.mark)] = self
        found = iter(outs)
        carried = [rebuilt(leaf, found) for leaf in self.init]
        return [*carried, *(one_of.whole(found) for one_of in self.rows)]

    def body(self) -> fx.Graph:
        """The body, of what runs forward."""
        one, part = self.one, self.partition
        body = extracted(part.forward, part.given, part.gives)
        if one.split:
            reduce_to_owners(body, self.rows, len(flat(one.carried_nodes)), part.given.index(one.row_nodes[0][0]))
        return body

    def emitted(self, loop: Loop, given: Nodes, constants: Sequence[Any]) -> tuple[fx.Node, Leaves]:
        """Record a call, and give it and stand-ins of its results."""
        recorder = self.recorder
        last = list(loop.body.nodes)[-1]
        kinds = (LAST,) * loop.carry + loop.keeps
        vals = [self.result(value(x), kind) for x, kind in zip(last.args[0], kinds, strict=True)]
        outer = [recorder.outer(x) for x in constants]
        for x, place in zip(outer, [n for n in loop.body.nodes if n.op == "placeholder"][loop.given :]):
            if "alike" in place.meta:
                x.meta["alike"] = True
        return recorder.called(loop, (*given, *outer), vals)

    def result(self, val: Any, kind: str | tuple[int, ...]) -> Any:
        """What a result of the loop is like, of which each iteration gives `val`."""
        if kind == LAST or not isinstance(val, torch.Tensor):
            return self.recorder.fake_like(val) if isinstance(val, torch.Tensor) else val
        return self.recorder.fake_stack(val, len(kind) if isinstance(kind, tuple) else self.count)

    def keep(self, residuals: Sequence[tuple[fx.Node, str]]) -> None:
        """Have the loop keep more of each iteration, for its derivative."""
        node: Any = self.node
        loop: Loop = node.target
        new = [(x, kind) for x, kind in residuals if x not in self.kept]
        if not new:
            return
        gives = [*self.partition.gives, *(x for x, _ in new)]
        self.partition.gives = gives
        node.target = Loop(
            bodies=(self.body(),),
            length=loop.length,
            reverse=loop.reverse,
            carry=loop.carry,
            slices=loop.slices,
            keeps=(*loop.keeps, *(kind for _, kind in new)),
        )
        vals = [self.result(value(x), kind) for x, kind in new]
        for x, stand_in in zip((x for x, _ in new), self.recorder.more_results(node, vals), strict=True):
            self.kept[x] = stand_in

    @functools.cached_property
    def kept(self) -> dict[fx.Node, Any]:
        """Stand-ins of what the loop keeps, by the node in its body."""
        return {}


def flat(rows: Any) -> Nodes:
    return [x for row in rows for x in row]


def rebuilt(leaf: torch.Tensor, found: Any) -> torch.Tensor:
    """A leaf like this one, of the next plain tensors, which have all elements."""
    with torch_internals.no_torch_function():
        return (
            leaves_.of_plain(leaf, found)
            if not is_expanded(leaf)
            else array_like(leaf, leaf.shape, spec_of(leaf), found)
        )


def is_expanded(leaf: torch.Tensor) -> bool:
    """Whether the strides of an array say that a dim of it repeats one entry."""
    return is_array(leaf) and any(n > 1 and step == 0 for n, step in zip(leaf.shape, leaf.stride(), strict=True))


def with_all_elements(leaf: torch.Tensor) -> torch.Tensor:
    """`leaf`, which does not repeat an entry along a dim: what comes in its place from a loop does not."""
    return leaf.contiguous() if is_expanded(leaf) else leaf
