"""One call of a recorded graph, carried out on arrays as a layout says."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import fx

from .._core import torch_internals
from .._core.arrays.array import Array, is_array, place, spec_of, wrap
from .._core.arrays.array_values import brought, reason
from .._core.arrays.decision import Composed
from .._core.arrays.interpreter import stated_decision
from .._core.arrays.strides import in_order
from .._core.base import context, source_lines
from .._core.base.errors import SpecError
from .._core.base.messages import report
from .._core.sharding.index_map import axes_of
from .._core.sharding.layout import WHOLE, type_text
from .._core.sharding.placements import normal
from .._core.sharding.spec import P
from ..plan.ir.graph import Step, is_aten, name_of, value, viewed, written
from ..plan.tracing.traced_float import Number
from .search.described import NEW
from .search.layouts import CallLayout
from .search.sums import sums_in

_NOT_SO = "a call cannot be carried out as the layout says"
_BEHIND = -1  # the number of the repetition that a backward pass is
_LEFT_OUT = "leave it out of Layouts.calls, and it runs as the rules vote"


class CallFacts(NamedTuple):
    """What is asked of a call each time that it is carried out.

    Attributes:
        operands: the nodes that give the tensors among its arguments, as of `operands`.
        aten: whether it is an operator of torch's.
        stays: whether it writes its arguments, or shows memory that is written: they stay where they are, and the rules vote.
    """

    operands: list[fx.Node]
    aten: bool
    stays: bool


def facts(nodes: Iterable[fx.Node], hot: Container[fx.Node]) -> dict[fx.Node, CallFacts]:
    """Of each call; `hot`: the nodes whose memory is written after they were made."""
    stays = lambda node: bool(written(node)) or any(x in hot for x in node.all_input_nodes) and bool(viewed(node))
    return {node: CallFacts(operands(node), is_aten(node), stays(node)) for node in nodes}


def operands(node: fx.Node) -> list[fx.Node]:
    """The nodes that give the tensors among a call's arguments, in order; once for each time that it takes one."""
    return [x for x in _nodes_in((node.args, node.kwargs)) if isinstance(value(x), torch.Tensor)]


def results(node: fx.Node) -> list[torch.Tensor]:
    """A call's tensor results, without values."""
    val = value(node)
    return [x for x in (val if isinstance(val, (list, tuple)) else (val,)) if isinstance(x, torch.Tensor)]


def _nodes_in(a: Any) -> Iterator[fx.Node]:
    if isinstance(a, fx.Node):
        yield a
    elif isinstance(a, (list, tuple)):
        for x in a:
            yield from _nodes_in(x)
    elif isinstance(a, dict):
        yield from _nodes_in(list(a.values()))


def filled(a: Any, of: Callable[[fx.Node], Any]) -> Any:
    """A call's arguments with `of` of each node."""
    if isinstance(a, fx.Node):
        return of(a)
    if isinstance(a, (list, tuple)):
        return (list if isinstance(a, list) else tuple)(filled(x, of) for x in a)
    return {name: filled(x, of) for name, x in a.items()} if isinstance(a, dict) else a


def early_moves(
    about: Mapping[fx.Node, CallFacts], stated: Mapping[str, CallLayout], kept: Collection[fx.Node]
) -> dict[fx.Node, tuple[P, fx.Node]]:
    """Partial sums that all who read them want in one layout, with it and the first who reads them: they are summed as soon as
    they are made, as gradients that only the update reads. So what is held is smaller, and the collective has time.

    Args:
        about: the calls.
        stated: their layouts.
        kept: nodes that something else reads, or writes.
    """
    found = dict[fx.Node, tuple[P, fx.Node]]()
    for node in about:
        call = stated.get(node.name)
        if call is None or node in kept or len(call.outs) != 1 or not call.outs[0].unreduced:
            continue
        if not all(user.name in stated and about[user].aten and not written(user) for user in node.users):
            continue
        pairs = ((user, zip(about[user].operands, stated[user.name].ins)) for user in node.users)
        wanted = {spec: user for user, given in pairs for x, spec in given if x is node}
        if len(wanted) == 1 and not next(iter(wanted)).unreduced:
            found[node] = next(iter(wanted.items()))
    return found


class Calls:
    """Carries calls out.

    Args:
        mesh: of the arrays.
        hot: the nodes whose memory is written after they were made: they stay where they are.
        facts: of the calls.
        keeps: whether what moves in the forward pass is kept for the backward pass.
    """

    def __init__(
        self, mesh: Any, hot: Container[fx.Node], facts: Mapping[fx.Node, CallFacts], keeps: bool = False
    ) -> None:
        self.mesh, self.hot, self.facts, self.axes = mesh, hot, facts, axes_of(mesh)
        self._values: dict[fx.Node, Any] = {}
        self._moved: dict[tuple[fx.Node, P], Any] = {}
        self._before: set[tuple[fx.Node, P]] = set()  # what moved in the forward pass
        self._behind = keeps  # whether the forward pass is over, or may be

    def hold(self, node: fx.Node, x: Any) -> None:
        """Note what a node gives."""
        self._values[node] = x

    def move(self, node: fx.Node, spec: P, caller: fx.Node) -> None:
        """Have what a node gave lie in another way from now on."""
        if is_array(self._values[node]):
            self._values[node] = self._brought(node, spec, caller)
            self._moved.pop((node, spec), None)

    def given(self, node: fx.Node) -> Any:
        """What a node gave."""
        return self._values[node]

    def forget(self, node: fx.Node) -> None:
        """Let what a node gave go."""
        x = self._values.pop(node, None)
        if isinstance(x, torch.Tensor):
            for key in [key for key in self._moved if key[0] is node]:
                del self._moved[key]

    def end(self) -> None:
        """Let all go."""
        self._values.clear()
        self._moved.clear()

    def run(self, node: fx.Node, stated: CallLayout | None) -> Any:
        """What a call gives: laid out as stated, or as the rules vote."""
        func: Any = node.target
        about = self.facts[node]
        if not self._behind and "backward" in node.meta:  # what was gathered is gathered again, and not held until then
            self._behind, self._before = True, set(self._moved)
            self._moved.clear()
        if func is operator.getitem:
            whole, part = node.args
            out = self._values[whole][part]  # type: ignore[index]
            return out if stated is None else self._laid_out(node, out, stated.outs)
        if isinstance(func, Step):
            return self._in_order(node)
        if not about.aten:  # arithmetic on floats
            return func(*filled(node.args, self.given), **filled(node.kwargs, self.given))
        nodes = about.operands
        if not nodes:
            return self._made(node, stated)
        if stated is None or about.stays or name_of(node) in NEW:
            out = func(*filled(node.args, self.given), **filled(node.kwargs, self.given))
            return out if stated is None or about.stays else self._laid_out(node, out, stated.outs)
        given = [self._brought(x, spec, node) for x, spec in zip(nodes, stated.ins, strict=True)]
        each = iter(given)
        take = lambda x: next(each) if isinstance(value(x), torch.Tensor) else _as_torch_sees(self.given(x))
        args, kwargs = filled(node.args, take), filled(node.kwargs, take)
        decision = self._decision(node, given, args, kwargs, stated)
        if decision is not None:
            out = decision.run(Array, args, kwargs)
            return self._laid_out(node, out, stated.outs) if isinstance(decision, Composed) else out
        if any(not self._same(spec, WHOLE, value(x)) for x, spec in zip(nodes, stated.ins, strict=True)):
            raise self.unfit(node, stated, "no rule says how it is split: its arguments are whole")
        return self._laid_out(node, func(*args, **kwargs), stated.outs)

    def _decision(self, node: fx.Node, given: Sequence[Any], args: Any, kwargs: Any, stated: CallLayout) -> Any:
        """The decision that carries a call out as stated; None where no rule says how it is split."""
        decision, why = stated_decision(node.target, args, kwargs, stated.ins, stated.outs)
        if decision is None and why:
            ins = [normal(spec, self.axes, x.shape) for x, spec in zip(given, stated.ins, strict=True)]
            if any(ins) or any(one.unreduced for one in (*stated.ins, *stated.outs)):
                raise self.unfit(node, stated, why)
        return decision  # of whole arguments every rank can make all, and keep its part

    def _same(self, a: P, b: P, x: torch.Tensor) -> bool:
        return a == b or normal(a, self.axes, x.shape) == normal(b, self.axes, x.shape)

    def _brought(self, node: fx.Node, spec: P, caller: fx.Node) -> Any:
        """What a node gave, in a layout; once for all calls that want it so."""
        x = self._values[node]
        if self._same(spec_of(x), spec, x):
            return x
        found = self._moved.get((node, spec))
        if found is None:
            target = normal(spec, self.axes, x.shape)
            why = reason(caller.target, tuple(x.shape), x.dtype, spec_of(x), target)
            with _again() if (node, spec) in self._before else nullcontext(), _added_up(node, caller):
                local = in_order(brought(x, target, why), x)
            found = wrap(local, self.mesh, target, x.shape, tuple(x.stride()))
            if node not in self.hot:  # which later is another value
                self._moved[node, spec] = found
        return found

    def _made(self, node: fx.Node, stated: CallLayout | None) -> Any:
        """What a call without tensors makes: every rank makes all of it and keeps its part, which a plan makes alone."""
        device = torch.device(self.mesh.device_type)
        there = lambda a: device if isinstance(a, torch.device) else a
        func: Any = node.target
        kwargs = {name: there(x) for name, x in filled(node.kwargs, self.given).items()}
        out = func(*map(there, filled(node.args, self.given)), **kwargs)
        outs = [P()] * len(results(node)) if stated is None else stated.outs
        return self._laid_out(node, out, outs)

    def _laid_out(self, node: fx.Node, out: Any, specs: Sequence[P]) -> Any:
        """Results, each moved to where it is to lie."""
        each = iter(specs)

        def one(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            spec = next(each)
            if is_array(x) and self._same(spec_of(x), spec, x):
                return x
            if spec.unreduced:
                is_ = type_text(x.shape, x.dtype, spec_of(x) if is_array(x) else WHOLE)
                raise self.unfit(node, CallLayout((), tuple(specs)), f"it gives {is_}")
            return place(x, self.mesh, normal(spec, self.axes, x.shape), f"what {name_of(node)} gives, in parts")

        return type(out)(map(one, out)) if isinstance(out, (list, tuple)) else one(out)

    def _in_order(self, node: fx.Node) -> Any:
        """A value with its elements in another order in memory."""
        x, like = self.given(node.args[0]), value(node)  # type: ignore[arg-type]
        if 0 in like.stride():
            return x
        order = sorted(range(x.ndim), key=lambda d: -like.stride(d))
        back = sorted(range(x.ndim), key=order.__getitem__)
        return x.permute(order).contiguous().permute(back)

    def unfit(self, node: fx.Node, stated: CallLayout, why: str) -> SpecError:
        """What is said where a call cannot be carried out as stated."""
        ins = ", ".join(type_text(value(x).shape, value(x).dtype, spec) for x, spec in zip(operands(node), stated.ins))
        outs = ", ".join(type_text(x.shape, x.dtype, spec) for x, spec in zip(results(node), stated.outs))
        return SpecError(
            report(
                "choice", _NOT_SO, [f"{node.name}: {name_of(node)}({ins}) -> {outs}: {why}, {_where(node)}"], _LEFT_OUT
            )
        )


@contextmanager
def _again() -> Iterator[None]:
    """Within the block, what is recorded repeats on purpose what was done before."""
    recorder: Any = torch_internals.recorder()
    if recorder is None or recorder.said_again is not None:
        yield
        return
    recorder.said_again = _BEHIND
    try:
        yield
    finally:
        recorder.said_again = None


@contextmanager
def _added_up(node: fx.Node, caller: fx.Node) -> Iterator[None]:
    """Within the block, what a node gave is added up in the dtype that was said when it, or its reader, was recorded."""
    before = context.sums_in()
    context.sum_in(sums_in(node, caller))
    try:
        yield
    finally:
        context.sum_in(before)


def _as_torch_sees(x: Any) -> Any:
    """A float that is an input of a plan as the value that stands for it, by which the recorder knows it again."""
    return float.__add__(x, 0.0) if isinstance(x, Number) else x


def _where(node: fx.Node) -> str:
    return f"at {source_lines.quoted(node.meta.get('line') or '?')}"
