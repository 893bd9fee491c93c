"""Whether a limit on memory is held at the least time: small plans beside all ways to keep values or make them again."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.side_by_side import publish
from vescale_fn.errors import TransformError
from vescale_fn.plan.execution.codegen import generate
from vescale_fn.plan.ir import costs
from vescale_fn.plan.ir import graph as plan
from vescale_fn.plan.ir.memory_limit import MemoryLimit
from vescale_fn.plan.ir.memory_use import memory
from vescale_fn.plan.passes.boundary import gathered
from vescale_fn.plan.passes.budget import Budget
from vescale_fn.plan.passes.dce import dead
from vescale_fn.plan.passes.memory_order import order, updated
from vescale_fn.plan.passes.reuse_memory import reuse

MOST = 7  # values, of which all choices are tried


def small(seed: int) -> tuple[fx.Graph, list[Any]]:
    """A random loss of few calls and its gradients, as a graph; and what it is called with."""
    rng = random.Random(seed)
    widths = [rng.choice((3, 8, 16, 40)) for _ in range(rng.randint(1, 3))]
    kinds = [rng.choice((torch.tanh, F.gelu, torch.sin, F.silu, torch.exp)) for _ in widths]

    def f(x: torch.Tensor, *ws: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [w.detach().requires_grad_() for w in ws]
        for w, kind in zip(leaves, kinds, strict=True):
            x = kind(x @ w)
        return torch.autograd.grad(x.square().sum(), leaves)

    torch.manual_seed(seed)
    given = [torch.randn(32, 6), *(0.3 * torch.randn(a, b) for a, b in zip([6, *widths], widths))]
    graph = make_fx(f, tracing_mode="fake")(*given).graph
    for node in graph.nodes:
        node.meta.setdefault("line", "?")
    end = plan.output(graph)
    end.args, end.meta["val"] = (tuple(end.args[0]),), None  # type: ignore[arg-type]
    return order(dead(graph)), given


def keeping(graph: fx.Graph, at: int, kept: set[fx.Node]) -> fx.Graph:
    """The graph in which, of what is made up to a call, only `kept` is used after it, and the rest made again where it is."""
    new, early, late = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()

    def value(x: fx.Node) -> fx.Node:
        if x not in late and (x.op == "placeholder" or x in kept):
            return early[x]
        if x not in late:
            late[x] = new.node_copy(x, value)
        return late[x]

    for i, node in enumerate(graph.nodes):
        if i <= at:
            early[node] = new.node_copy(node, early.__getitem__)
        else:
            late[node] = new.node_copy(node, value)
    return dead(new)


def ways(graph: fx.Graph) -> list[tuple[int, float]] | None:
    """The peak and the time of each way to keep values across the call that needs most; None where there are too many."""
    found = []
    for line in (gathered(graph), gathered(updated(plan.copied(graph)))):
        use, nodes = memory(line), list(line.nodes)
        calls = [i for i, node in enumerate(nodes) if node.op == "call_function"]
        at = calls[use.timeline.index(use.at)]  # type: ignore[arg-type]
        needed = {x for node in nodes[at + 1 :] for x in node.all_input_nodes}
        for node in reversed(nodes[: at + 1]):
            needed.update(node.all_input_nodes if node in needed else ())
        made = [x for x in nodes[: at + 1] if x in needed and x.op == "call_function" and not plan.viewed(x)]
        if len(made) > MOST:
            return None
        for kept in itertools.chain.from_iterable(itertools.combinations(made, n) for n in range(len(made) + 1)):
            new = keeping(line, at, set(kept))
            found.append((memory(reuse(new)).peak, costs.total(new)))
    return found


def compared(seed: int) -> str:
    """How a plan within a random limit that can be held compares to the best of all ways; "" where there is none to compare."""
    graph, given = small(seed)
    found = ways(graph)
    usual = memory(reuse(graph)).peak
    limits = sorted({peak for peak, _ in found or () if peak < usual})
    if not limits:
        return ""
    most = random.Random(seed).choice(limits)
    want = min(time for peak, time in found or () if peak <= most)
    try:
        fitting = reuse(Budget(MemoryLimit(most))(graph, (reuse,)))
    except TransformError:
        return "not found"
    same = zip(generate(fitting).run(list(given)), generate(graph).run(list(given)), strict=True)
    if memory(fitting).peak > most or not all(torch.equal(one, other) for one, other in same):
        return "wrong"
    return (
        "equal" if math.isclose(costs.total(fitting), want) else "faster" if costs.total(fitting) < want else "slower"
    )


def main(count: int = 200) -> None:
    torch.set_num_threads(1)
    tally: Counter[str] = Counter()
    for seed in itertools.count():
        if found := compared(seed):
            tally[found] += 1
        if tally.total() == count:
            break
    kinds = ("equal", "faster", "slower", "not found", "wrong")
    publish("small_budgets", ["plans", *kinds], [[count, *(tally[kind] for kind in kinds)]])


if __name__ == "__main__":
    main()
