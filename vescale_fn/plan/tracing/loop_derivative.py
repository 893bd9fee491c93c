"""The derivative of a loop: autograd runs through its one iteration, and what is recorded of that becomes a second loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._core import torch_internals
from ..._core.control_flow.scan import is_split
from ..._core.transforms.primals import as_primals
from ..ir.graph import value
from ..ir.loop import EACH, STACKED, Loop
from ..ir.nested import extracted
from . import leaves as leaves_
from .loop_again import gradients
from .loop_calls import LoopCall, Nodes, flat, in_place_of, rebuilt, with_all_elements
from .loop_slices import Collected, SplitLeaf, as_slice, like_a_slice
from .loop_sums import reduce_to_owners


class Derivative:
    """The derivative of one call.

    Args:
        call: the call.
        cotangents: of its results, None where nothing comes back.
    """

    def __init__(self, call: LoopCall, cotangents: Sequence[Any]) -> None:
        self.call = call
        self.first, self.rows = call.arriving(cotangents)
        self.first = list(map(with_all_elements, self.first))
        self.cut = [ct for _, ct in self.rows if not is_split(ct)]

    def cotangents(self) -> list[Any]:
        """Record it, and give the cotangents of the call's inputs."""
        call, frame, recorder = self.call, self.call.one.frame, self.call.recorder
        before, known = set(frame.graph.nodes), len(frame.places)
        self.record()
        new, given = (
            call.partition.since(before, frame.graph),
            [*flat(self.ct_nodes), *(total for total, _ in self.totals)],
        )
        collected = self.of_slices()
        kept = [pair for rows in collected for pair in rows.kept]
        gives = [*self.carry_nodes, *(added for _, added in self.totals), *(node for node, _ in kept)]
        turn = flat(call.one.row_nodes)[:1] if call.one.split else []
        split = call.partition.of_backward(new, given, flat(self.row_nodes), [*gives, *turn], frame.places[known:])
        call.keep(split.residuals)
        zeros = [recorder.zeros(value(total)) for total, _ in self.totals]
        start, along = self.given()
        cut_of = dict(
            zip(flat(call.one.row_nodes), [x for leaf in call.one.rows for x in leaves_.plain_of(leaf)], strict=True)
        )
        constant_of = dict(zip(frame.places, frame.constants, strict=True))
        along += [recorder.outer(cut_of[x]) for x in split.cuts]
        each = [recorder.outer(call.kept[x]) for x in split.each]
        places = [*given, *flat(self.row_nodes), *split.cuts, *split.each, *split.constants, *split.last]
        body = extracted(split.nodes, places, gives)
        if turn:
            reduce_to_owners(body, collected, len(given), places.index(turn[0]))
        loop = Loop(
            bodies=(body,),
            length=call.count,
            reverse=not call.reverse,
            carry=len(given),
            slices=(STACKED,) * len(along) + (EACH,) * len(each),
            keeps=tuple(kind for _, kind in kept),
        )
        constants = [*(constant_of[x] for x in split.constants), *(call.kept[x] for x in split.last)]
        found = iter(call.emitted(loop, [*start, *zeros, *along, *each], constants)[1])
        result: list[Any] = [rebuilt(ct, found) for ct in self.first]
        sums = {i: rebuilt(g, found) for i, g in self.sums}
        result += [rows.whole(found) for rows in collected]
        return [*result, *map(sums.get, range(len(call.captured)))]

    def given(self) -> tuple[Nodes, Nodes]:
        """The nodes of the cotangents: of the last carry's, and of what is cut."""
        recorder = self.call.recorder
        with torch_internals.no_torch_function():
            start = [
                in_place_of(recorder.graph, recorder.node(x), wanted)
                for ct, wants in zip(self.first, self.ct_nodes, strict=True)
                for x, wanted in zip(leaves_.plain_of(ct), wants, strict=True)
            ]
            return start, [recorder.node(x) for ct in self.cut for x in leaves_.plain_of(ct)]

    def of_slices(self) -> list[Collected]:
        """The cotangents of slices."""
        first = len(self.first)
        own = zip(self.own[first:], self.own_nodes[first:], self.lead, strict=True)
        return [Collected(g, nodes, self.call.count, names) for g, nodes, names in own]

    @property
    def lead(self) -> list[Any]:
        """For what is cut and moves, how its leading dim is split."""
        split = self.call.one.split
        return [split[i].lies[0] if i in split else None for i in self.call.moving_xs]

    def record(self) -> None:
        """Record the derivative of one iteration, in its frame."""
        call, one, recorder = self.call, self.call.one, self.call.recorder
        likes = [(like_a_slice(ct), list(map(recorder.fake, leaves_.plain_of(ct)))) for ct in self.cut]
        self.ct_nodes: list[Nodes] = []
        self.row_nodes: list[Nodes] = []
        with recorder.within(one.frame):
            cts = [one.stand_in(ct, "ct", self.ct_nodes, False) for ct in self.first]
            cut = iter([one.stand_in(like, "ct_y", self.row_nodes, False, parts) for like, parts in likes])
            rows = [
                SplitLeaf(ct).slice(recorder, one.turn, False) if is_split(ct) else next(cut) for _, ct in self.rows
            ]
            pairs = list(zip([one.carried[i] for i in call.moving], cts, strict=True))
            pairs += zip([call.likes[i] for i, _ in self.rows], rows, strict=True)
            by = [*(one.given[i] for i in call.moving), *(one.cut[i] for i in call.moving_xs)]
            grads = gradients([pair for pair in pairs if pair[0].requires_grad], by, call.captured, False)
            own = [torch.zeros_like(x) if g is None else g for x, g in zip(by, grads)]
            first = len(call.moving)
            self.own = [
                *as_primals(own[:first], by[:first]),
                *map(as_slice, own[first:], by[first:], self.lead),
            ]
            self.sums = [(i, g) for i, g in enumerate(grads[len(by) :]) if g is not None]
            self.own_nodes = list(map(one.nodes, self.own))
            self.carry_nodes = [
                in_place_of(one.frame.graph, node, wanted)
                for row, wants in zip(self.own_nodes, self.ct_nodes)
                for node, wanted in zip(row, wants, strict=True)
            ]
            totals = [recorder.total(node) for _, g in self.sums for node in one.nodes(g)]
            self.totals = [(total, in_place_of(one.frame.graph, added, total)) for total, added in totals]
