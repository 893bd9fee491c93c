"""A loop of unknown length is recorded once: its condition and its body as graphs, and one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._core import torch_internals
from ..._core.control_flow import select
from ..._core.control_flow.while_loop import refused
from ..._core.local_types import tensor_types
from ..ir.branches import While
from ..ir.graph import value
from ..ir.nested import extracted
from . import leaves as leaves_
from .bodies import OneOfEach, columns, given, recorded_call, uses
from .branch_levels import WhileBelow
from .called import followed
from .frame import Frame, Unrecordable
from .loop_again import Leaves, captured
from .loop_calls import Nodes, flat, in_place_of, rebuilt, stand_in, with_all_elements
from .loop_levels import Unsettled


def recorded(recorder: Any, loop: Any) -> Leaves | None:
    """Record a loop, a `while_loop.Conditioned`, as one call.

    Returns:
        The leaves of its last carry; None where a value is read in it, or it uses something that autograd follows and that
        nothing has seen, or runs under a transform that is not known here.
    """
    layer = torch_internals.innermost_layer()
    if layer is None:
        return _recorded(recorder, loop)
    if layer is False or hasattr(layer, "followed"):
        return None
    below = WhileBelow(loop, layer)
    with layer.off():
        try:
            found = recorded(recorder, below)
        except Unsettled:
            return None
    return None if found is None else below.results(found)


def _recorded(recorder: Any, loop: Any) -> Leaves | None:
    try:
        one = WhileCall(recorder, loop)
    except (Unrecordable, _Unseen):
        return None
    if not one.inputs:
        outs = one.forward()
    else:
        outs = followed(one, _no_gradient)
        outs = [x if i in one.moving else x.detach() for i, x in enumerate(outs)]
    with torch_internals.no_torch_function():
        return [tensor_types.kept(out, like) for out, like in zip(outs, one.results, strict=True)]


def _no_gradient(call: Any, cotangents: Sequence[Any]) -> Any:
    raise refused()


class _Unseen(Exception):
    """A condition that is no tensor, or something that autograd follows and that was not seen."""


class _Body:
    """A function of the carry, to be run in a frame of its own.

    Attributes:
        carry, places: what stands for the carry, and its nodes.
    """

    def __init__(self, recorder: Any, carry: Leaves, moving: set[int]) -> None:
        self.frame, self.start = Frame(recorder.frame), torch_internals.autograd_count()
        self.places: list[Nodes] = []
        with recorder.within(self.frame):
            self.carry = [stand_in(recorder, x, "carry", self.places, i in moving) for i, x in enumerate(carry)]

    def graph(self, before: Nodes, gives: Nodes) -> Any:
        """The graph of its calls."""
        nodes = [node for node in self.frame.graph.nodes if node.op == "call_function"]
        return extracted(nodes, [*flat(self.places), *before], gives)


class WhileCall:
    """The call of a loop of unknown length.

    Attributes:
        results: what its body gives.
        moving: the places in the carry of what autograd follows.
        inputs: where that comes from.
    """

    def __init__(self, recorder: Any, loop: Any) -> None:
        self.recorder, self.loop, self.moving, follows = recorder, loop, set[int](), torch.is_grad_enabled()
        anchors: dict[int, torch.Tensor] = {}
        loop.init = list(map(with_all_elements, loop.init))
        while True:  # the types of the first carry follow from what the body gives, and so does what autograd follows
            anchors.update((i, x) for i, x in enumerate(loop.init) if follows and x.requires_grad)
            self.moving |= anchors.keys()
            self.test = _Body(recorder, loop.init, self.moving)
            with recorder.within(self.test.frame):
                holds = loop.holds(self.test.carry)
                if not isinstance(holds, torch.Tensor):
                    raise _Unseen
            if loop.vary(holds):
                continue
            self.body = _Body(recorder, loop.init, self.moving)
            with recorder.within(self.body.frame):
                self.differs = select.differs(holds)
                now = loop.step(self.body.carry, loop.holds(self.body.carry) if self.differs else holds)
                self.body.frame.see(now.leaves)
            if loop.adapt(now):
                continue
            self.results = loop.checked(now)
            more = {i for i, x in enumerate(self.results) if follows and x.requires_grad}
            if more <= self.moving and not self._apart():
                break
            self.moving |= more
        self.inputs: Leaves = []
        if self.moving:
            found = captured(self.results, self.body.start, self.body.frame.followed.values(), self.body.carry)
            if found is None:
                raise _Unseen
            self.inputs = [*anchors.values(), *found]
        with recorder.within(self.test.frame):
            asked = leaves_.plain_of(holds) if self.differs else recorder.sought(holds)
            with torch_internals.no_torch_function():
                self.asked = [recorder.node(x) for x in asked]

    def _apart(self) -> bool:
        """Give each simulated rank a carry of its own where what comes back differs by rank, and say whether some had not."""
        self.ones = list(map(OneOfEach, zip(self.loop.init, self.results, strict=True)))
        with torch_internals.no_torch_function():
            leaves = [one.apart(x) for one, x in zip(self.ones, self.loop.init, strict=True)]
        changed = any(x is not old for x, old in zip(leaves, self.loop.init, strict=True))
        self.loop.init = leaves
        return changed

    def forward(self) -> Leaves:
        """Record the call, and give its results."""
        recorder, carry, bodies = self.recorder, self.loop.init, (self.test, self.body)
        places = flat(self.body.places)
        with recorder.within(self.body.frame), torch_internals.no_torch_function():
            plain = [recorder.node(x) for one, leaf in zip(self.ones, self.results) for x in one.plain(leaf)]
            gives = [in_place_of(recorder.graph, x, place) for x, place in zip(plain, places, strict=True)]
        used = uses([body.frame for body in bodies], [body.frame.places for body in bodies])
        outer = [given(columns(used), i) for i in range(2)]
        graphs = self.test.graph(outer[0], self.asked), self.body.graph(outer[1], gives)
        with torch_internals.no_torch_function():
            first = [recorder.node(x) for leaf in carry for x in leaves_.plain_of(leaf)]
            args = [in_place_of(recorder.graph, x, place) for x, place in zip(first, places, strict=True)]
        _, outs = recorded_call(
            recorder, While(bodies=graphs, carry=len(args), apart=self.differs), args, used, [value(x) for x in places]
        )
        if outs:
            self.mark = outs[0]
            recorder.loops[torch_internals.memory_number(self.mark)] = self
        found = iter(outs)
        return [rebuilt(leaf, found) for leaf in carry]
