"""What a limit on memory costs in time: plans with `memory=` beside torch's min-cut partitioner, on one graph of each model.

Both get the same graph, of a model's loss and gradients on one device, and the same passes behind. Peaks are counted while
the plan runs; times are those of our model of costs, for both.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition

import vescale_fn as vfn
from benchmarks.peak_memory import accounting
from benchmarks.side_by_side import publish
from vescale_fn._core.base import tree
from vescale_fn.plan.execution.codegen import generate
from vescale_fn.plan.ir import costs
from vescale_fn.plan.ir import graph as plan
from vescale_fn.plan.ir.memory_limit import MemoryLimit
from vescale_fn.plan.ir.memory_use import memory
from vescale_fn.plan.passes.budget import Budget
from vescale_fn.plan.passes.dce import dead
from vescale_fn.plan.passes.memory_order import order
from vescale_fn.plan.passes.reuse_memory import reuse
from vescale_fn.recipes import models

BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.1)
SIZES: dict[str, tuple[dict[str, Any], int, int]] = {  # of the model, batch and length
    "gpt": ({"dropout": 0.0, "layers": 4}, 8, 128),
    "llama": ({"dropout": 0.0, "layers": 4}, 8, 128),
    "mixtral": ({"dropout": 0.0, "layers": 2}, 8, 64),
    "dit": ({}, 16, 0),
    "resnet": ({"dropout": 0.0}, 16, 32),
}


def joint(name: str) -> tuple[fx.GraphModule, list[Any]]:
    """A model's loss and gradients as one graph of parameters, batch and the loss's own gradient; and values of these."""
    sizes, batch, length = SIZES[name]
    model = models.MODELS[name]
    config = model.Config(**sizes)
    params = model.init(vfn.random.key(0), config)
    data = models.random_batch(vfn.random.key(1), config, batch, length)
    leaves, structure = tree.flatten((params, data))
    count = len(tree.leaves(params))

    def flat(*given: torch.Tensor) -> tuple[torch.Tensor]:
        params, data = tree.unflatten(structure, given)
        return (model.loss(params, data, config, vfn.random.key(2)),)

    given = [x.requires_grad_() if i < count else x for i, x in enumerate(leaves)]
    traced: Any = aot_export_joint_simple(flat, tuple(given), trace_joint=True)
    constants = dict.fromkeys(node.target for node in traced.graph.nodes if node.op == "get_attr")
    return traced, [*(x.detach() for x in given), torch.ones(()), *(getattr(traced, name) for name in constants)]


def as_plan(graph: fx.Graph, again: Collection[str] = ()) -> fx.Graph:
    """The graph as passes take it: constants as arguments, behind the others; calls named `again` before their first use."""
    graph = plan.copied(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    constants: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        node.meta.setdefault("line", "?")
        if node.op == "get_attr":
            if node.target not in constants:
                with graph.inserting_after([*inputs, *constants.values()][-1]):
                    constants[node.target] = graph.placeholder(node.name)
                constants[node.target].meta = dict(node.meta)
            node.replace_all_uses_with(constants[node.target])
            graph.erase_node(node)
    line: dict[fx.Node, None] = {}

    def put(node: fx.Node) -> None:
        for x in node.all_input_nodes:
            if x.name in again and x not in line:
                put(x)
        line[node] = None

    for node in graph.nodes:
        if node.name not in again:
            put(node)
    graph = plan.reordered(graph, [*line])[0]
    end = plan.output(graph)
    end.args, end.meta["val"] = (tuple(x for x in end.args[0] if x is not None),), None  # type: ignore[union-attr]
    return dead(graph)


def partitioned(traced: fx.GraphModule, given: list[Any], budget: float) -> tuple[fx.Graph, set[str]]:
    """What torch makes of it: forward graph and backward graph, one behind the other; and the calls that are in both."""
    with torch._functorch.config.patch(activation_memory_budget=budget):
        module = fx.GraphModule(traced, plan.copied(traced.graph))
        forward, backward = min_cut_rematerialization_partition(module, given, num_fwd_outputs=1)
    graph, values = fx.Graph(), dict[str, fx.Node]()
    for name in (node.name for node in traced.graph.nodes if node.op == "placeholder"):
        values[name] = graph.placeholder(name)
    again = set[str]()
    for part in (forward, backward):
        known: dict[fx.Node, fx.Node] = {}
        for node in part.graph.nodes:
            if node.op == "placeholder":
                known[node] = values[node.name]
                known[node].meta = dict(node.meta)
            elif node.op != "output":
                known[node] = graph.node_copy(node, known.__getitem__)
                known[node].meta = dict(node.meta)
                if part is backward and any(x.name == node.name for x in forward.graph.nodes):
                    again.add(known[node].name)
        if part is forward:
            gives = plan.output(part.graph).args[0]
            values.update((x.name, known[x]) for x in gives)  # type: ignore[union-attr]
            loss = known[gives[0]]  # type: ignore[index]
        else:
            grads = [known[x] if x is not None else None for x in plan.output(part.graph).args[0]]  # type: ignore[union-attr]
    graph.output((loss, *grads))
    return graph, again


def counted(graph: fx.Graph, given: list[Any]) -> int:
    """The most bytes that are alive while it runs, arguments included."""
    run = generate(graph).run
    run(list(given))
    with accounting(given) as account:
        run(list(given))
    return account.peak


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name in SIZES:
        traced, given = joint(name)
        whole = as_plan(traced.graph)
        once = costs.total(whole)
        for budget in BUDGETS:
            merged, again = partitioned(traced, given, budget)
            fits = [reuse(order(as_plan(merged, some))) for some in ((), again)]
            most, theirs = min(((counted(one, given), one) for one in fits), key=lambda pair: pair[0])
            ours = reuse(Budget(MemoryLimit(memory(theirs).peak))(order(whole), (reuse,)))
            peak = counted(ours, given)
            extra = [costs.total(one) - once for one in (theirs, ours)]
            mib = [one / 2**20 for one in (most, peak)]
            rows.append(
                [name, budget, *mib, memory(ours).peak / peak, *(1e3 * x for x in extra), 100 * extra[1] / once]
            )
    publish(
        "memory_budget",
        [
            "model",
            "activation_memory_budget",
            "torch, MiB",
            "plan, MiB",
            "predicted / counted",
            "torch recomputes, ms",
            "plan recomputes, ms",
            "of the step, %",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
