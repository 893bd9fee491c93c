"""A function under `jit` that is called while another is recorded: recorded once for equal calls, which share its body.

What differs between equal calls is the values of their tensors alone. The body is run on tensors without values in a frame of
its own, and so is, when the first gradient comes back, its derivative; each call is one node of the graph, and its derivative
another one. What cannot be such a part is recorded where it stands, as if it were not jitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.arrays.array import before_narrowing
from ..._core.base import state, tree
from ..._core.local_types import tensor_types
from ..ir.graph import value
from ..ir.shared_bodies import Shared
from . import leaves as leaves_
from .ambient import only_recorded
from .frame import Unrollable
from .guards import Captured
from .loop_again import check_recorded_again
from .loop_calls import Nodes, rebuilt
from .recorder import Unrecordable
from .shared_body import SharedBody, SharedDerivative, Unshareable, signatures


def recorded_once(
    recorder: Any, call: Any, function: Callable[..., Any], around: Any, guards: Callable[[], Captured]
) -> tuple[Any] | None:
    """The result of a call, as one node; None where it has to be recorded where it stands.

    Args:
        recorder: at work.
        call: the `JitCall`.
        function: what is called, of the arguments that are not static.
        around: the jitted function.
        guards: looks at what the function closes over.
    """
    if not recorder.shares or not only_recorded():
        return None
    try:
        now = state.now()
        # a value and the cast to the argument, whose gradient is then added up over ranks as where the call stands
        sources, casts = zip(*map(before_narrowing, call.leaves)) if call.leaves else ((), ())
        key = around, call.key, signatures(sources), casts, now.run, now.strict, now.may_merge, now.grad_depth > 0
        known = recorder.frame.shared.setdefault(key, [])
    except (TypeError, Unshareable):  # an argument that cannot be compared, or has no node
        return None
    body = next((one for one in known if one is None or one.captures.changed() is None), _NEW)
    if body is _NEW:
        captures = guards()
        try:
            body = SharedBody(recorder, call, function, captures, sources, casts)
        except (Exception, Unrecordable):  # which comes again where the call stands, if it is the function's
            body = None
        known.append(body)
    if body is None:
        return None
    recorder.has_shared = True
    return (SharedCall(body, sources).result(),)


_NEW: Any = object()


class SharedCall:
    """A call of a body.

    Args:
        body: what is called.
        leaves: of the arguments.
    """

    def __init__(self, body: SharedBody, leaves: Sequence[Any]) -> None:
        self.body, self.leaves = body, list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())
        self.all = leaves
        self.inputs = [*(x for x in self.leaves if body.moving and x.requires_grad), *body.captured]

    def result(self) -> Any:
        """Record the call, and give its result."""
        body = self.body
        if body.moving:
            made = torch_internals.apply(_Called, self, *self.inputs)
            for i, x in zip(body.moving, made, strict=True):
                self.made[i] = x
        else:
            self.forward()
        found, outs = iter(self.made), list[Any]()
        with torch_internals.no_torch_function():
            for out in body.outs:
                if isinstance(out, torch.Tensor):
                    outs.append(tensor_types.kept(next(found), out))
                else:
                    kind, what = out
                    outs.append(self.all[what] if kind == "given" else outs[what] if kind == "same" else what)
        return tree.unflatten(body.out_def, outs)

    def forward(self) -> list[Any]:
        """Record the call; give those of its results that autograd follows."""
        body, recorder = self.body, self.body.recorder
        with torch_internals.no_torch_function():
            self.plain = [x for leaf in self.leaves for x in leaves_.plain_of(leaf)]
            self.args = list(map(recorder.node, self.plain))
            constants = [recorder.outer(x) for x in body.frame.constants[: body.count]]
        like = map(value, body.partition.gives)
        self.node, self.outs = self.emitted(body.target, [*self.args, *constants], list(like))
        self.kept: list[fx.Node] = []
        self.keep(body.kept)
        self.since = len(recorder.writes)
        body.calls.append(self)
        found = iter(self.outs)
        self.made = [rebuilt(leaf, found) for leaf in body.made]
        if body.moving:
            self.mark = recorder.twin(self.outs[0])
            recorder.loops[torch_internals.memory_number(self.mark)] = self
        return [self.made[i] for i in body.moving]

    def keep(self, vals: Sequence[Any]) -> None:
        """Let the call give more, which is like these."""
        self.node.target = self.body.target
        self.kept += self.body.recorder.more_parts(self.node, vals)

    def emitted(self, target: Shared, args: Nodes, like: Sequence[Any]) -> tuple[fx.Node, list[Any]]:
        """Record a node, and give it and stand-ins of its results."""
        recorder = self.body.recorder
        vals = [recorder.fake_like(x) if isinstance(x, torch.Tensor) else x for x in like]
        for x, place in zip(args, (n for n in target.bodies[0].nodes if n.op == "placeholder"), strict=True):
            if "alike" in place.meta:
                x.meta["alike"] = True
        return recorder.called(target, tuple(args), vals)

    def cotangents(self, cotangents: Sequence[Any]) -> list[Any]:
        """Record the derivative of the call, and give the cotangents of `inputs`."""
        body, recorder = self.body, self.body.recorder
        derivative = body.derivative(cotangents)
        self._check_unchanged(derivative)
        places = {place: i for i, place in enumerate(body.partition.given)}
        constant_of = dict(zip(body.frame.places, body.frame.constants, strict=True))
        with torch_internals.no_torch_function():
            kept = dict(zip(body.residuals, map(recorder.outer_part, self.kept), strict=True))
            args = [recorder.node(x) for ct in cotangents if ct is not None for x in leaves_.plain_of(ct)]
            args += [kept[x] for x in derivative.each]
            for place in derivative.constants:
                i = places.get(place, len(self.plain))
                args.append(recorder.outer(self.plain[i] if i < len(self.plain) else constant_of[place]))
            args += [kept[x] for x in derivative.last]
        found = iter(self.emitted(derivative.target, args, derivative.vals)[1])
        return [None if g is None else rebuilt(g, found) for g in derivative.grads]

    def _check_unchanged(self, derivative: SharedDerivative) -> None:
        """Raise where something that the derivative needs has been written in place since the call."""
        body, recorder = self.body, self.body.recorder
        needed = {*derivative.constants, *derivative.each, *derivative.last}
        given = [*zip(self.plain, self.args), *zip(body.frame.constants, map(recorder.outer, body.frame.constants))]
        pairs = [(x, node) for place, (x, node) in zip(body.partition.given, given) if place in needed]
        used = [x for x, _ in pairs] + [x for node, x in zip(body.partition.gives, self.outs) if node in needed]
        memories = {torch_internals.memory_number(x) for x in used if isinstance(x, torch.Tensor)}
        renamed = any(node.graph is recorder.graph and recorder.outer(x) is not node for x, node in pairs)
        if renamed or not memories.isdisjoint(recorder.writes[self.since :]):
            raise Unrollable


class _Called(torch.autograd.Function):
    """A call as autograd sees it."""

    @staticmethod
    def forward(call: SharedCall, *inputs: torch.Tensor) -> Any:
        return tuple(call.forward())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[0]
        ctx.save_for_backward(inputs[0].mark)  # under `remat` that is the mark of the call that is recorded again
        ctx.count = len(inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        if all(ct is None for ct in cotangents):
            return (None,) * ctx.count
        if torch.is_grad_enabled() or torch_internals.transforming():
            raise Unrollable  # the gradient of a gradient, or a pullback under another transform
        (mark,) = ctx.saved_tensors  # where a body sees it: this may run it once more
        call = ctx.call.body.recorder.loops[torch_internals.memory_number(mark)]
        check_recorded_again(ctx.call, call, False)
        with torch_internals.no_torch_function():
            return None, *call.cotangents(cotangents)
