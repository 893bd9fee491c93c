"""A step recorded once, as for one device: the graph that a layout is chosen for, and that is then carried out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from .._core.arrays.shapes import ShapeDtype
from .._core.base import source_lines, tree
from .._core.base.errors import TransformError
from .._core.base.messages import report
from .._core.distributed.collectives import Collective
from ..plan.ir.graph import Step, calls, changed, name_of, output
from ..plan.ir.nested import Nested
from ..plan.passes.dce import dead
from ..plan.passes.functionalize_writes import writes
from ..plan.signature import JitCall
from ..plan.tracing import leaves as leaves_
from ..plan.tracing.guards import Captured
from ..plan.tracing.recorder import Unrecordable
from ..plan.tracing.trace import Recorded, trace_flat
from ..plan.uncollected import uncollected
from .apply_calls import CallFacts, facts
from .user_calls import GIVEN, GIVES, NotedCalls, UserCall

_INSTEAD = "torch.where for `if`, tensors for numbers; what cannot be recorded, outside of the step"


class AboutCalls(NamedTuple):
    """What is asked of the calls of a recorded graph whenever it is carried out.

    Attributes:
        calls: its calls in order, each with what is asked of it.
        hot: the nodes whose memory is written after they were made.
        ends: of each call the values that nothing needs behind it.
    """

    calls: dict[fx.Node, CallFacts]
    hot: frozenset[fx.Node]
    ends: dict[fx.Node, list[fx.Node]]


@dataclass(frozen=True, eq=False)
class Recording:
    """A step, recorded for arguments of these shapes.

    Attributes:
        f, name: the step.
        call: what it was recorded for: a shape for each tensor among the leaves.
        recorded: the recording.
        captured: what the step found besides its arguments.
        graph: its calls on whole tensors, each a node of its own, without writes where nobody can tell, and without dead code.
        paths: of each placeholder what it is in the user's words: ``params['w']``, or ``constant 0``.
        leaves: of each placeholder the place of its leaf among the arguments' leaves; None for a constant.
        results: of each leaf of the result the node that gives it; None where it is no value of the graph.
        user_calls: the functions of torch that its own code calls.
    """

    f: Callable[..., Any]
    name: str
    call: JitCall
    recorded: Recorded
    captured: Captured
    graph: fx.Graph
    paths: tuple[str, ...]
    leaves: tuple[int | None, ...]
    results: tuple[fx.Node | None, ...]
    user_calls: tuple[UserCall, ...] = ()

    @property
    def placeholders(self) -> list[fx.Node]:
        """The inputs of the graph: the tensors and the floats among the arguments' leaves, then constants."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @functools.cached_property
    def about(self) -> AboutCalls:
        """What is asked of the calls in every layout."""
        nodes, hot = list(calls(self.graph)), changed(self.graph)
        return AboutCalls(facts(nodes, hot), hot, last_uses(nodes, output(self.graph).all_input_nodes))


@uncollected()
def record(step: Callable[..., Any], *args: Any) -> Recording:
    """Record a step for arguments of these shapes; arrays count as what they are on one device. No value is used.

    Raises:
        TransformError: it cannot be recorded, or no layout of it could be carried out.
    """
    name = getattr(step, "__name__", type(step).__name__)
    call = JitCall(step, tree.map_(_shape_of, args), {}, None, None)
    try:
        recorded = trace_flat((notes := NotedCalls()).around(call.function), call.leaves, call.names(), call.treedef)
    except Unrecordable as why:
        reason = why.reason if why.line == "?" else f"{why.reason}, at {source_lines.quoted(why.line)}"
        raise TransformError(report("auto", f"{name} cannot be recorded", [reason], _INSTEAD)) from None
    captured = Captured(step, filter(leaves_.is_object, call.leaves))
    graph = _unnamed(dead(writes(recorded.graph)))
    recorded.end()
    if reasons := _hindrances(recorded, graph):
        raise TransformError(report("auto", f"no layout of {name} can be carried out", reasons, _INSTEAD))
    names, places = call.names(), [i for i, x in enumerate(call.leaves) if _is_input(x)]
    paths = [names[i] for i in places] + [f"constant {i}" for i in range(len(recorded.constants))]
    leaves = (*places, *[None] * len(recorded.constants))
    results = tuple(_results(recorded, graph, places))
    return Recording(step, name, call, recorded, captured, graph, tuple(paths), leaves, results, tuple(notes.noted))


def _shape_of(x: Any) -> Any:
    return ShapeDtype(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x


def _is_input(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or leaves_.is_number(leaf)


def _unnamed(graph: fx.Graph) -> fx.Graph:
    """The graph, its own, without calls that only give a value another name."""
    hot = changed(graph)
    for node in list(calls(graph)):
        if name_of(node) in ("detach", "alias") and node not in hot:
            (same,) = node.all_input_nodes
            for name in {GIVEN, GIVES} & {*node.meta}:
                same.meta[name] = (*same.meta.get(name, ()), *node.meta[name])
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    return graph


def _hindrances(recorded: Recorded, graph: fx.Graph) -> list[str]:
    """Why no layout of a recording can be carried out, one line each."""
    found: dict[str, None] = {}
    if recorded.guards:
        found["it reads a truth value in Python, of which other arguments may have another"] = None
    if recorded.read:
        found["it reads the value of a tensor that it closes over"] = None
    if any(isinstance(made, leaves_.Result) and made.spec is not None for made in recorded.results):
        found["it closes over arrays of a mesh, and gives some: they are arguments"] = None
    for node in calls(graph):
        line, target = source_lines.quoted(node.meta.get("line") or "?"), node.target
        if isinstance(target, Collective):
            found[f"a collective at {line}: what shard_map does is laid out already"] = None
        elif isinstance(target, Nested):
            found[f"a {target.name} whose length, or branch, depends on values, at {line}"] = None
        elif isinstance(target, Step) and target.name != "in_order":
            found[f"{target.name} at {line}"] = None
    return list(found)


def _results(recorded: Recorded, graph: fx.Graph, places: Sequence[int]) -> list[fx.Node | None]:
    """The node that gives each leaf of the result."""
    given: Any = output(graph).args[0]
    inputs = dict(zip(places, (node for node in graph.nodes if node.op == "placeholder")))
    found: list[fx.Node | None] = []
    for made in recorded.results:
        if isinstance(made, leaves_.Result):
            found.append(given[made.places[0]])
        else:
            kind, what = made
            found.append(inputs.get(what) if kind == "input" else None)
    return found


def last_uses(nodes: Sequence[fx.Node], kept: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each call the values that nothing needs behind it."""
    ends: dict[fx.Node, list[fx.Node]] = {}
    seen = set(kept)
    for node in reversed(nodes):
        for x in (node, *node.all_input_nodes):
            if x not in seen:
                seen.add(x)
                ends.setdefault(node, []).append(x)
    return ends
