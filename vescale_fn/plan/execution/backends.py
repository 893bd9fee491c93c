"""Other ways to run a plan: local calls compiled by inductor, the whole of it as one CUDA graph, values in an arena."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from ..._core import torch_internals
from ..._core.base.errors import TransformError
from ..._core.base.messages import meant, report, short
from ..ir import graph as plan
from ..ir import memory_aliases
from . import cuda_graphs, in_pool
from .cuda_graphs import Run
from .in_arena import in_arena

BACKENDS = ("torch", "inductor")

_LEAST = 2  # calls that are worth compiling


@dataclass(frozen=True)
class Backend:
    """What runs plans.

    Args:
        name: what computes, one of `BACKENDS`.
        cuda_graph: whether it is replayed as a CUDA graph.
        arena: whether values lie in a static arena.
    """

    name: str = "torch"
    cuda_graph: bool = False
    arena: bool = False

    def __post_init__(self) -> None:
        if self.name not in BACKENDS:
            raise TransformError(
                report(
                    "jit",
                    f"backend={short(self.name)} is not one{meant(self.name, BACKENDS)}",
                    fix=" or ".join(map(repr, BACKENDS)),
                )
            )
        if self.arena and self.cuda_graph:
            raise TransformError(
                report("jit", "a CUDA graph has a block of memory of its own", fix="cuda_graph=True without arena=True")
            )
        if self.cuda_graph and not torch.cuda.is_available():
            raise TransformError(
                report(
                    "jit",
                    "cuda_graph=True needs a CUDA device, and there is none here",
                    fix="leave cuda_graph out: the plan runs on the CPU as well",
                )
            )

    @property
    def passes(self) -> tuple[plan.Pass, ...]:
        """What a plan goes through besides."""
        return (inductor,) if self.name == "inductor" else ()

    @property
    def op_by_op(self) -> bool:
        """Whether it has to see each operator of a plan: what computes it, or where its result lies."""
        return self.arena or self.name == "inductor"

    def placed(self, graph: fx.Graph) -> fx.Graph:
        """The graph as it runs: where its values lie in an arena, with their places."""
        if self.cuda_graph:
            cuda_graphs.check(graph)
        if self.arena:
            graph = in_arena(graph)
            return in_pool.apart(graph) if in_pool.is_for(graph) else graph
        return graph

    def running(self, run: Run, graph: fx.Graph) -> Run:
        """What is called to run a plan, of which `run` runs the graph that is `placed`."""
        if self.cuda_graph:
            return cuda_graphs.CudaGraph(run)
        if self.arena and in_pool.is_for(graph):
            return in_pool.InPool(run, in_pool.size(graph))
        return run


def inductor(graph: fx.Graph) -> fx.Graph:
    """The graph in which each run of local calls between collectives has become one call, of what inductor made of them.

    Values are the same up to rounding: fused calls round less often, and sum in another order.
    """
    graph = plan.copied(graph)
    for run in _runs(graph):
        if sum(not plan.viewed(node) for node in run) >= _LEAST:
            _compile(graph, run)
    return graph


def _runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """The local calls, those in a row together."""
    runs: list[list[fx.Node]] = [[]]
    for node in plan.calls(graph):
        tensors = all(isinstance(plan.value(x), torch.Tensor) for x in node.all_input_nodes)
        if (plan.is_aten(node) and tensors) or (node.target is operator.getitem and node.args[0] in runs[-1]):
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _compile(graph: fx.Graph, run: list[fx.Node]) -> None:
    """Put one call of compiled code in the place of a run of calls."""
    lie = memory_aliases.memories(graph)
    inside = set(run)
    inputs = list(dict.fromkeys(x for node in run for x in node.all_input_nodes if x not in inside))
    outputs = [
        node
        for node in run
        if isinstance(plan.value(node), torch.Tensor) and any(user not in inside for user in node.users)
    ]
    alone = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for x in inputs:
        values[x] = alone.placeholder(x.name)
    for node in run:
        values[node] = alone.node_copy(node, values.__getitem__)
    alone.output(tuple(values[node] for node in outputs))
    examples = [_example(plan.value(x)) for x in inputs]
    compiled = torch_internals.compiled_by_inductor(fx.GraphModule(torch.nn.Module(), alone), examples)
    written = {memory for node in run for x in plan.written(node) for memory in lie[x]}
    shown = frozenset().union(*(lie[node] for node in outputs))
    step = plan.Step(
        "compiled",
        compiled,
        writes=tuple(i for i, x in enumerate(inputs) if not written.isdisjoint(lie[x])),
        views=tuple(i for i, x in enumerate(inputs) if not shown.isdisjoint(lie[x])),
    )
    with graph.inserting_before(run[-1]):
        call = graph.call_function(step, tuple(inputs))
        call.meta = {"val": [plan.value(node) for node in outputs], "line": run[0].meta.get("line", "?")}
        for i, node in enumerate(outputs):
            part = graph.call_function(operator.getitem, (call, i))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part, delete_user_cb=lambda user: user not in inside)
    for node in reversed(run):
        graph.erase_node(node)


def _example(x: torch.Tensor) -> torch.Tensor:
    """A tensor like one without values, for a compiler to look at."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_()
