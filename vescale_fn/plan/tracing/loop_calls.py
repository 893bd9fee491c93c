"""The call of a loop in a recording: its body, run once on what stands for the carry and a slice, and what it gives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.arrays.array import is_array, mesh_of, spec_of
from ..._core.base import context
from ..._core.control_flow.scan import Repeated
from ..._core.distributed.blocks import Blocks
from ..._core.local_types import tensor_types
from ..._core.sharding.spec import P
from ..execution.stride_checks import as_recorded
from ..ir.graph import Step, value
from ..ir.loop import LAST, STACKED, Loop
from ..ir.nested import extracted
from . import leaves as leaves_
from .frame import Frame
from .partition import Partition

Leaves = list[torch.Tensor]
Nodes = list[fx.Node]


class Iteration:
    """The body of a loop, run once.

    Attributes:
        given, cut: stand-ins of the carry and of a slice, and their nodes.
        carried, collected: what it gave; where autograd follows, with the carry that it was given after what it collects.
        begins_again: whether the first carry has taken other types, so that it is to be run anew.
    """

    def __init__(self, recorder: Any, repeated: Repeated, xs: Leaves, moving: bool) -> None:
        self.recorder, self.frame, self.repeated = recorder, Frame(recorder.frame), repeated
        self.start = torch_internals.autograd_count()
        templates = [x.select(0, 0) for x in xs]
        parts = [list(map(recorder.fake, leaves_.plain_of(x))) for x in xs]
        self.given_nodes: list[Nodes] = []
        self.cut_nodes: list[Nodes] = []
        with recorder.within(self.frame):
            self.given = [self.stand_in(x, "carry", self.given_nodes, moving) for x in repeated.init]
            self.cut = [
                self.stand_in(template, "x", self.cut_nodes, moving and x.requires_grad, cut)
                for template, x, cut in zip(templates, xs, parts, strict=True)
            ]
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
        self.forward = [node for node in self.frame.graph.nodes if node.op == "call_function"]

    def stand_in(
        self, leaf: torch.Tensor, name: str, nodes: list[Nodes], moving: bool, stacked: Leaves | None = None
    ) -> torch.Tensor:
        """What stands for a leaf in the body; its nodes are added to `nodes`. Of what is gone over, `stacked` is all of it."""
        found: Nodes = []
        rows = None if stacked is None else iter(stacked)

        def one(x: torch.Tensor) -> torch.Tensor:
            fake = self.recorder.stand_in(x if rows is None else next(rows), name, rows is not None)
            found.append(fake._plan_node)
            return fake

        with torch_internals.no_torch_function():
            out = leaves_.with_tensors(leaf, one)
            if moving and is_smooth(leaf):
                out.requires_grad_()
            tensor_types.kept(out, leaf)
        nodes.append(found)
        return out

    def nodes(self, leaf: torch.Tensor, wanted: Nodes | None = None) -> Nodes:
        """The nodes of a leaf's plain tensors, which lie as those of `wanted`."""
        with torch_internals.no_torch_function():
            found = [self.recorder.node(x) for x in leaves_.plain_of(leaf)]
        return (
            found
            if wanted is None
            else [in_place_of(self.frame.graph, a, b) for a, b in zip(found, wanted, strict=True)]
        )

    def captured(self) -> Leaves | None:
        """The tensors from outside that autograd follows into the results; None where one of them was not seen."""
        own = {id(x) for x in (*self.given, *self.cut)}
        found: dict[int, torch.Tensor] = {}
        with torch_internals.no_torch_function():
            known = {(x.grad_fn, x.output_nr): x for x in (*self.frame.followed.values(), *self.results)}
            moving = [x for x in self.results if x.requires_grad]
            for edge, leaf in torch_internals.edges_from_before(moving, self.start):
                x = known.get(edge) if leaf is None else leaf
                if x is None:
                    return None
                if id(x) not in own:
                    found[id(x)] = x
        return list(found.values())


def is_smooth(x: torch.Tensor) -> bool:
    """Whether a leaf can have a gradient."""
    return x.is_floating_point() or x.is_complex()


@functools.lru_cache(maxsize=256)
def _in_order(strides: tuple[int, ...]) -> Step:
    return Step("in_order", functools.partial(as_recorded, strides=strides), views=(0,))


def in_place_of(graph: fx.Graph, node: fx.Node, wanted: fx.Node) -> fx.Node:
    """What a node gives, lying in memory as what it takes the place of."""
    if value(node).stride() == value(wanted).stride():
        return node
    new = graph.call_function(_in_order(value(wanted).stride()), (node,))
    new.meta = {"val": value(wanted), "line": node.meta.get("line", "")}
    return new


class LoopCall:
    """The call of a loop.

    Args:
        recorder: at work.
        one: the body.
        xs: what it goes over.
        captured: what it uses from outside that autograd follows.
        count, reverse: of the loop.
    """

    def __init__(self, recorder: Any, one: Iteration, xs: Leaves, captured: Leaves, count: int, reverse: bool) -> None:
        self.recorder, self.one, self.xs, self.captured = recorder, one, xs, captured
        self.count, self.reverse, self.init = count, reverse, list(one.repeated.init)
        self.in_body = context.body() is not None
        self.moving = [i for i, x in enumerate(one.given) if x.requires_grad]
        self.moving_xs = [i for i, x in enumerate(one.cut) if x.requires_grad]
        self.inputs = [*(self.init[i] for i in self.moving), *(xs[i] for i in self.moving_xs), *captured]

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
            rows = [recorder.node(x) for leaf in self.xs for x in leaves_.plain_of(leaf)]
        places = list(frame.places)
        given = [*flat(one.given_nodes), *flat(one.cut_nodes), *places]
        gives = [*flat(one.carried_nodes), *flat(one.collected_nodes)]
        self.partition = Partition(one.forward, given, gives, len(first), len(rows))
        loop = Loop(
            bodies=(extracted(one.forward, given, gives),),
            length=self.count,
            reverse=self.reverse,
            carry=len(first),
            slices=(STACKED,) * len(rows),
            keeps=(STACKED,) * (len(gives) - len(first)),
        )
        self.node, outs = self.emitted(loop, [*first, *rows], frame.constants[: len(places)])
        self.mark = outs[0]
        recorder.loops[torch_internals.memory_number(self.mark)] = self
        found = iter(outs)
        carried = [rebuilt(leaf, found) for leaf in self.init]
        return [*carried, *(stacked(leaf, found, self.count) for leaf in one.collected)]

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

    def result(self, val: Any, kind: str) -> Any:
        """What a result of the loop is like, of which each iteration gives `val`."""
        if kind == LAST or not isinstance(val, torch.Tensor):
            return self.recorder.fake_like(val) if isinstance(val, torch.Tensor) else val
        return self.recorder.fake_stack(val, self.count)

    def keep(self, residuals: Sequence[tuple[fx.Node, str]]) -> None:
        """Have the loop keep more of each iteration, for its derivative."""
        node: Any = self.node
        loop: Loop = node.target
        new = [(x, kind) for x, kind in residuals if x not in self.kept]
        if not new:
            return
        gives = [*self.partition.gives, *(x for x, _ in new)]
        self.partition.gives = gives
        body = extracted(self.partition.forward, self.partition.given, gives)
        node.target = Loop(
            bodies=(body,),
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
    """A leaf like this one, of the next plain tensors."""
    with torch_internals.no_torch_function():
        return leaves_.of_plain(leaf, found)


def stacked(leaf: torch.Tensor, found: Any, count: int) -> torch.Tensor:
    """What is collected in all iterations, where each gives one like `leaf`, of the next plain tensors."""
    with torch_internals.no_torch_function():
        if not is_array(leaf):
            made: dict[int, torch.Tensor] = {}
            if isinstance(leaf, Blocks):
                return Blocks(
                    [made[id(x)] if id(x) in made else made.setdefault(id(x), next(found)) for x in leaf.blocks]
                )
            return next(found)
        spec = spec_of(leaf)
        lies = P(None, *spec, unreduced=spec.unreduced, reduced=spec.reduced)
        local: Any = [next(found) for _ in range(leaves_.count_of(leaf))]
        shape = torch.Size((count, *leaf.shape))
        return leaves_.array_of(local, mesh_of(leaf), lies, shape, type(torch_internals.local(leaf)) is Blocks)
