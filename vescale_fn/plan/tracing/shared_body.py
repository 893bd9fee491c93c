"""The body of equal calls of a jitted function: what is recorded of it once, and of its derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.arrays.array import Array, narrowed
from ..._core.base import context, state, tree
from ..._core.base.containers import checked
from ..._core.distributed.blocks import Blocks
from ..._core.local_types import tensor_types
from ..ir.graph import value
from ..ir.nested import extracted
from ..ir.shared_bodies import Shared
from . import leaves as leaves_
from .frame import Frame, Unrollable
from .guards import Captured
from .loop_again import captured, gradients
from .loop_calls import Leaves, Nodes, flat
from .partition import Partition

_TENSORS = (*torch_internals.BARE, torch.nn.Parameter, Blocks, Array)
_VALUES = (int, bool, str, type(None), torch.dtype, torch.device, torch.Size)


class Unshareable(Exception):
    """The call cannot be a node of its own."""


def signatures(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What recording depends on of leaves, besides their `signature`."""
    places: dict[int, int] = {}
    return tuple((_signature(x), places.setdefault(id(x), i)) for i, x in enumerate(leaves))


def _signature(x: Any) -> Any:
    if type(x) is float:
        return repr(x)
    if not isinstance(x, torch.Tensor):
        return type(x)
    if type(x) not in _TENSORS:
        raise Unshareable
    known = tensor_types.read(x)
    body, mode = context.body(), context.mode()
    if known is not None and mode is not None and body is not None and tensor_types.typeof(x, body.axes) != known:
        raise Unshareable  # written since
    ids: dict[int, int] = {}
    blocks = [(ids.setdefault(id(b), len(ids)), b.shape, b.stride()) for b in x.blocks] if type(x) is Blocks else ()
    return leaves_.signature(x), x.requires_grad, known, tuple(blocks)


class SharedBody:
    """A function as recorded once.

    Attributes:
        given: stand-ins of the leaves of its arguments; `given_nodes`: those of their plain tensors.
        outs: for each leaf of its result: a leaf of the frame; or ``("given", i)``, ``("value", x)``, ``("same", i)``.
        captures: what it closes over.
        captured: the tensors among that which autograd follows into the results.
        target: of all calls.
        residuals: what the calls give besides, for the derivatives; `kept`: what each is like.
        found: it is an iteration of a loop, which nobody has marked.
    """

    def __init__(
        self,
        recorder: Any,
        call: Any,
        function: Callable[..., Any],
        captures: Captured,
        sources: Sequence[Any],
        casts: Sequence[Any],
    ) -> None:
        self.recorder, self.captures, self.frame = recorder, captures, Frame(recorder.frame)
        self.found = call.found
        start, self.given_nodes = torch_internals.autograd_count(), list[Nodes]()
        with torch_internals.keeping_tensors(), recorder.within(self.frame):
            one_of = {id(x): x for x in sources}
            stand_ins = {place: self.stand_in(x) for place, x in one_of.items()}
            self.given = [stand_ins[id(x)] for x in sources]
            given = [narrowed(x, cast[1]) if cast else x for x, cast in zip(self.given, casts, strict=True)]
            args, kwargs = (*tree.unflatten(call.treedef, given), {})[:2]
            out = checked(function(*args, **kwargs), "jit", "out", numpy=True, modules=True)
            leaves, self.out_def = tree.flatten(out)
            self.outs = self._outs(leaves)
            self.made = [x for x in self.outs if isinstance(x, torch.Tensor)]
            self.made_nodes = [self.nodes(x) for x in self.made]
        forward = [node for node in self.frame.graph.nodes if node.op == "call_function"]
        self._check_memory()
        self.moving = [i for i, x in enumerate(self.made) if x.requires_grad]
        self.captured: Leaves = []
        if self.moving:
            found = captured([self.made[i] for i in self.moving], start, self.frame.followed.values(), self.given)
            if found is None:
                raise Unshareable
            self.captured = found
        self.count = len(self.frame.places)
        given = [*flat(self.given_nodes), *self.frame.places]
        self.partition = Partition(forward, given, flat(self.made_nodes), joins=True)
        self.calls: list[Any] = []
        self.residuals: list[fx.Node] = []
        self.kept: list[Any] = []
        self.derivatives: dict[Any, SharedDerivative] = {}
        self.extract()

    def stand_in(self, leaf: Any) -> Any:
        """What stands for a leaf, and its nodes."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        found: Nodes = []

        def one(x: torch.Tensor) -> torch.Tensor:
            fake = self.recorder.input(x, "x")
            found.append(fake._plan_node)
            return fake

        with torch_internals.no_torch_function():
            out = leaves_.with_tensors(leaf, one)
            if leaf.requires_grad and torch.is_grad_enabled():
                out.requires_grad_()
            tensor_types.kept(out, leaf)
        self.given_nodes.append(found)
        return out

    def nodes(self, leaf: torch.Tensor) -> Nodes:
        """The nodes of a leaf's plain tensors, here."""
        with torch_internals.no_torch_function():
            return [self.recorder.node(x) for x in leaves_.plain_of(leaf)]

    def _outs(self, leaves: Sequence[Any]) -> list[Any]:
        places, given = (
            {id(x): i for i, x in reversed([*enumerate(leaves)])},
            {id(x): i for i, x in enumerate(self.given)},
        )
        found: list[Any] = []
        for i, x in enumerate(leaves):
            if isinstance(x, torch.Tensor) and id(x) in given:
                found.append(("given", given[id(x)]))
            elif isinstance(x, torch.Tensor) and places[id(x)] < i:
                found.append(("same", places[id(x)]))
            elif isinstance(x, torch.Tensor) and type(x) in _TENSORS:
                found.append(x)
            elif type(x) in _VALUES:
                found.append(("value", x))
            else:
                raise Unshareable
        return found

    def _check_memory(self) -> None:
        """Raise where results share memory with each other, or with what the body does not make."""
        with torch_internals.no_torch_function():
            seen = set(self.frame.given)
            for leaf in self.made:
                plain = leaves_.plain_of(leaf)
                here = {torch_internals.memory_number(x) for x in plain}
                if not all(map(self.recorder.is_ours, plain)) or not seen.isdisjoint(here) or len(here) < len(plain):
                    raise Unshareable
                if any(x._plan_node.graph is not self.frame.graph for x in plain):  # type: ignore[attr-defined]
                    raise Unshareable
                seen |= here

    def extract(self) -> None:
        """Make the body of the calls of what it gives now."""
        gives = [*self.partition.gives, *self.residuals]
        body = extracted(self.partition.forward, self.partition.given, gives)
        self.target = Shared(bodies=(body,), found=self.found)

    def keep(self, residuals: Sequence[fx.Node]) -> None:
        """Have all calls give more."""
        new = [x for x in residuals if x not in self.residuals]
        if not set(self.partition.forward).issuperset(new):
            raise Unrollable
        vals = [self.recorder.fake_like(x) if isinstance(x, torch.Tensor) else x for x in map(value, new)]
        self.residuals += new
        self.kept += vals
        self.extract()
        for call in self.calls:
            call.keep(vals)

    def derivative(self, cotangents: Sequence[Any]) -> SharedDerivative:
        """The derivative for cotangents like these."""
        try:
            key = signatures(cotangents), ambient_of_backward()
            if key not in self.derivatives:
                self.derivatives[key] = SharedDerivative(self, cotangents)
            return self.derivatives[key]
        except (TypeError, Unshareable):
            raise Unrollable from None


def ambient_of_backward() -> Any:
    """What decides what a backward pass does."""
    now = state.now()
    return now.run, now.strict, now.may_merge, state.process.sums_in


class SharedDerivative:
    """The derivative of a body, for one kind of cotangents.

    Attributes:
        grads: of what the body was given and follows, and of what it closes over: None where there is none.
        target: of all its calls.
    """

    def __init__(self, body: SharedBody, cotangents: Sequence[Any]) -> None:
        recorder, frame = body.recorder, body.frame
        before, count = set(frame.graph.nodes), len(frame.places)
        start = len(body.given_nodes)
        with torch_internals.keeping_tensors(), recorder.within(frame):
            pairs = [
                (body.made[i], body.stand_in(ct))
                for i, ct in zip(body.moving, cotangents, strict=True)
                if ct is not None
            ]
            ct_nodes = flat(body.given_nodes[start:])
            del body.given_nodes[start:]
            by = {id(x): x for x in body.given if isinstance(x, torch.Tensor) and x.requires_grad}
            self.grads = gradients(pairs, list(by.values()), body.captured, False)
            with torch_internals.no_torch_function():
                for g in self.grads:
                    if isinstance(g, Array):
                        torch_internals.local(g)
            gives = [node for g in self.grads if g is not None for node in body.nodes(g)]
        new = body.partition.since(before, frame.graph)
        split = body.partition.of_backward(new, ct_nodes, [], gives, frame.places[count:])
        self.each, self.constants, self.last = split.each, split.constants, split.last
        body.keep([*self.each, *self.last])
        given = [*ct_nodes, *self.each, *self.constants, *self.last]
        self.target = Shared(bodies=(extracted(split.nodes, given, gives),), found=body.found)
        self.vals = list(map(value, gives))
