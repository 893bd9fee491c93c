"""A loop is recorded once: its body as a graph of its own, in the first backward pass as much of its derivative, and two calls.

The body is run on tensors without values that stand for the carry and one slice, in a frame of its own. When a gradient comes
back, autograd runs through that one iteration in the same frame; `partition` splits what was recorded there into what runs
forward and what runs backward, and the call of the loop is given what the latter needs to keep.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.arrays.array import is_array, mesh_of, moved, spec_of
from ..._core.base import context
from ..._core.control_flow.scan import Repeated, Slices
from ..._core.distributed.blocks import Blocks
from ..._core.local_types import tensor_types
from ..._core.sharding.spec import P
from ..._core.transforms.primals import settled
from ..execution.stride_checks import as_recorded
from ..ir.graph import Step, value
from ..ir.loop import EACH, LAST, STACKED, Loop, extracted
from . import leaves as leaves_
from .frame import Frame, Unrollable
from .partition import Partition

Leaves = list[torch.Tensor]
Nodes = list[fx.Node]


def recorded(
    recorder: Any, repeated: Repeated, slices: Slices, count: int, reverse: bool
) -> tuple[Leaves, Leaves] | None:
    """Record a loop as one call.

    Returns:
        The last carry and what is collected, as leaves; None where the body uses something that autograd follows and that
        nothing has seen: then each iteration has to be recorded.
    """
    xs = slices.whole()
    follows = torch.is_grad_enabled()
    moving = follows and any(x.requires_grad for x in (*repeated.init, *xs))
    while True:
        one = Iteration(recorder, repeated, xs, moving)
        if one.begins_again:
            continue
        if not moving and follows and any(x.requires_grad for x in one.results):
            moving = True
            continue
        break
    captured: Leaves = []
    if moving:
        found = one.captured()
        if found is None:
            return None
        captured = found
    call = Call(recorder, one, xs, captured, count, reverse)
    outs: Any = torch_internals.apply(_Looped, call, *call.inputs) if moving else call.forward()
    with torch_internals.no_torch_function():
        for out, like in zip(outs, (*one.carried, *one.collected), strict=True):
            tensor_types.kept(out, like)
    outs = list(outs)
    return outs[: len(one.carried)], outs[len(one.carried) : len(one.carried) + one.count_collected]


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
        known = {(x.grad_fn, x.output_nr): x for x in self.frame.followed.values()}
        found: dict[int, torch.Tensor] = {}
        for edge, leaf in torch_internals.edges_from_before([x for x in self.results if x.requires_grad], self.start):
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


class Call:
    """The call of a loop, and that of its derivative.

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
        given = [*_flat(one.given_nodes), *_flat(one.cut_nodes), *places]
        gives = [*_flat(one.carried_nodes), *_flat(one.collected_nodes)]
        self.partition = Partition(one.forward, given, gives, len(first), len(rows))
        loop = Loop(
            body=extracted(one.forward, given, gives),
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
        carried = [_rebuilt(leaf, found) for leaf in self.init]
        return [*carried, *(_stacked(leaf, found, self.count) for leaf in one.collected)]

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
        if kind is LAST or not isinstance(val, torch.Tensor):
            return self.recorder.fake_like(val) if isinstance(val, torch.Tensor) else val
        return self.recorder.fake_stack(val, self.count)

    def backward(self, cotangents: Sequence[Any]) -> list[Any]:
        """Record the derivative of the loop, and give the cotangents of `inputs`."""
        if torch.is_grad_enabled():
            raise Unrollable  # the gradient of a gradient
        one, recorder, frame = self.one, self.recorder, self.one.frame
        carried = len(one.carried)
        first = [torch.zeros_like(self.init[i]) if cotangents[i] is None else cotangents[i] for i in self.moving]
        first = settled(first, [self.init[i] for i in self.moving])
        coming = [
            (i, ct) for i, ct in enumerate(cotangents[carried:]) if ct is not None and one.collected[i].requires_grad
        ]
        coming = [(i, _along(ct, one.collected[i])) for i, ct in coming]
        cuts = [ct.select(0, 0) for _, ct in coming]
        parts = [list(map(recorder.fake, leaves_.plain_of(ct))) for _, ct in coming]
        before, places = set(frame.graph.nodes), len(frame.places)
        ct_nodes: list[Nodes] = []
        row_nodes: list[Nodes] = []
        with recorder.within(frame):
            cts = [one.stand_in(ct, "ct", ct_nodes, False) for ct in first]
            rows = [one.stand_in(cut, "ct_y", row_nodes, False, part) for cut, part in zip(cuts, parts, strict=True)]
            pairs = [
                *((one.carried[i], ct) for i, ct in zip(self.moving, cts, strict=True)),
                *((one.collected[i], ct) for (i, _), ct in zip(coming, rows, strict=True)),
            ]
            pairs = [(x, ct) for x, ct in pairs if x.requires_grad]
            by = [*(one.given[i] for i in self.moving), *(one.cut[i] for i in self.moving_xs)]
            grads: list[Any] = [None] * (len(by) + len(self.captured))
            if pairs:
                grads = list(
                    torch.autograd.grad(
                        [x for x, _ in pairs],
                        [*by, *self.captured],
                        [ct for _, ct in pairs],
                        allow_unused=True,
                        retain_graph=True,
                    )
                )
            own = [torch.zeros_like(x) if g is None else g for x, g in zip(by, grads)]
            own = settled(own, by)
            sums = [(i, g) for i, g in enumerate(grads[len(by) :]) if g is not None]
            own_nodes = [one.nodes(g) for g in own]
            carry_nodes = _flat(
                [in_place_of(frame.graph, a, b) for a, b in zip(row, wants, strict=True)]
                for row, wants in zip(own_nodes, ct_nodes)
            )
            sum_nodes = [one.nodes(g) for _, g in sums]
            totals = [recorder.total(node) for node in _flat(sum_nodes)]
            totals = [(total, in_place_of(frame.graph, added, total)) for total, added in totals]
        new = self.partition.since(before, frame.graph)
        more = frame.places[places:]
        given = [*_flat(ct_nodes), *(total for total, _ in totals)]
        gives = [*carry_nodes, *(added for _, added in totals), *_flat(own_nodes[len(self.moving) :])]
        split = self.partition.of_backward(new, given, _flat(row_nodes), gives, more)
        self.keep(split.residuals)
        zeros = [recorder.zeros(value(node)) for node in _flat(sum_nodes)]
        with torch_internals.no_torch_function():
            start = [
                in_place_of(recorder.graph, recorder.node(x), wanted)
                for ct, wants in zip(first, ct_nodes, strict=True)
                for x, wanted in zip(leaves_.plain_of(ct), wants, strict=True)
            ]
            along = [recorder.node(x) for _, ct in coming for x in leaves_.plain_of(ct)]
        cut_of = dict(zip(_flat(one.cut_nodes), [x for leaf in self.xs for x in leaves_.plain_of(leaf)], strict=True))
        constant_of = dict(zip(frame.places, frame.constants, strict=True))
        rows_ = [
            *along,
            *(recorder.outer(cut_of[x]) for x in split.cuts),
            *(recorder.outer(self.kept[x]) for x in split.each),
        ]
        loop = Loop(
            body=split.body,
            length=self.count,
            reverse=not self.reverse,
            carry=len(given),
            slices=(STACKED,) * (len(along) + len(split.cuts)) + (EACH,) * len(split.each),
            keeps=(STACKED,) * (len(gives) - len(given)),
        )
        constants = [*(constant_of[x] for x in split.constants), *(self.kept[x] for x in split.last)]
        found = iter(self.emitted(loop, [*start, *zeros, *rows_], constants)[1])
        result: list[Any] = [_rebuilt(ct, found) for ct in first]
        added: list[Any] = [None] * len(self.captured)
        for i, g in sums:
            added[i] = _rebuilt(g, found)
        result += [_stacked(g, found, self.count) for g in own[len(self.moving) :]]
        return [*result, *added]

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
            body=body,
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


class _Looped(torch.autograd.Function):
    """A loop as autograd sees it."""

    @staticmethod
    def forward(call: Call, *inputs: torch.Tensor) -> Any:
        return tuple(call.forward())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.recorder = inputs[0].recorder
        ctx.save_for_backward(inputs[0].mark)  # under `remat` that is the mark of the call that is recorded again
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        with torch_internals.no_torch_function():
            call = ctx.recorder.loops[torch_internals.memory_number(*ctx.saved_tensors)]
            return None, *call.backward(cotangents)


def _along(ct: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The cotangent of what a loop collects, laid out as that is: `like` is of one iteration."""
    goal = None
    if is_array(like):
        spec = spec_of(like)
        goal = P(None, *spec, unreduced=spec.reduced, reduced=spec.unreduced)
    if goal is None and not is_array(ct) or (is_array(ct) and spec_of(ct) == goal):
        return ct
    return moved(ct, mesh_of(like) if goal is not None else mesh_of(ct), goal, "grad")


def _flat(rows: Any) -> Nodes:
    return [x for row in rows for x in row]


def _rebuilt(leaf: torch.Tensor, found: Any) -> torch.Tensor:
    """A leaf like this one, of the next plain tensors."""
    with torch_internals.no_torch_function():
        return leaves_.with_tensors(leaf, lambda _: next(found))


def _stacked(leaf: torch.Tensor, found: Any, count: int) -> torch.Tensor:
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
        local: Any = [next(found) for _ in leaves_.plain_of(leaf)]
        shape = torch.Size((count, *leaf.shape))
        return leaves_.array_of(local, mesh_of(leaf), lies, shape, type(torch_internals.local(leaf)) is Blocks)
