"""Whether a limit on memory is held at the least time: small plans beside all ways to keep values or make them again; and, as
if they ran on a device, to let them wait on the host."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.side_by_side import publish
from vescale_fn._core.base import no_values
from vescale_fn.errors import TransformError
from vescale_fn.plan.execution.codegen import generate
from vescale_fn.plan.ir import costs, host_copies
from vescale_fn.plan.ir import graph as plan
from vescale_fn.plan.ir.memory_limit import MemoryLimit
from vescale_fn.plan.ir.memory_use import memory
from vescale_fn.plan.ir.nested import everywhere
from vescale_fn.plan.passes.boundary import gathered
from vescale_fn.plan.passes.budget import Budget
from vescale_fn.plan.passes.dce import dead
from vescale_fn.plan.passes.memory_order import order, updated
from vescale_fn.plan.passes.reuse_memory import reuse

MOST = 7  # values, of which all choices are tried
MOST_SENT = 4  # where some may go to the host
LAGS = (0, 1, 3)  # calls by which copies are waited for later, or begun earlier
# a device on which it takes about as long to copy a small matrix as to make it
SMALL = costs.Rates(flops=5e9, bytes=1e10, draws=1.5e9, link=1e9, host=2e9, call=1e-7, collective=1e-6)


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


def on_device(graph: fx.Graph) -> fx.Graph:
    """The same plan, of which it is said that its values are on a GPU."""

    def there(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(there, value))
        return no_values.like(value, torch.device("cuda", 0)) if isinstance(value, torch.Tensor) else value

    def moved(graph: fx.Graph) -> fx.Graph:
        graph = plan.copied(graph)
        for node in graph.nodes:
            node.meta["val"] = there(node.meta.get("val"))
        return graph

    return everywhere(moved, plan.copied(graph))


def keeping(
    graph: fx.Graph, at: int, kept: set[fx.Node], sent: Collection[fx.Node] = (), lags: tuple[int, int] = (0, 0)
) -> fx.Graph:
    """The graph in which, of what is made up to a call, only `kept` is used after it, and the rest made again where it is; and
    `sent` waits on the host meanwhile, copied some calls longer than need be."""
    new, early, late = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()

    def value(x: fx.Node) -> fx.Node:
        if x not in late and (x.op == "placeholder" or x in kept):
            return early[x]
        if x not in late and x in sent:
            late[x] = host_copies.inserted(new._root, host_copies.fetched, (), x)
        elif x not in late:
            late[x] = new.node_copy(x, value)
        return late[x]

    for i, node in enumerate(graph.nodes):
        if i <= at:
            early[node] = new.node_copy(node, early.__getitem__)
        else:
            late[node] = new.node_copy(node, value)
    sent = [x for x in sent if x in late]
    for node in reversed(new.nodes):
        if node.op == "call_function" and not node.users and node not in map(early.get, sent):
            new.erase_node(node)
    for x in sent:
        send(early[x], late[x], *lags)
    return dead(new)


def send(x: fx.Node, back: fx.Node, behind: int, ahead: int) -> None:
    """Let a value wait on the host until it is needed back."""
    line = list(x.graph.nodes)
    reads = [i for i, node in enumerate(line) if x in roots(node)]
    leaves = min(max(reads) + 1 + behind, line.index(back))
    comes = max(line.index(back) - ahead, leaves)
    begun = host_copies.inserted(x.next, host_copies.offload, (x,), x)
    there = host_copies.inserted(line[leaves], host_copies.offloaded, (begun, x), x)
    back.args = (host_copies.inserted(line[comes], host_copies.fetch, (there,), x),)


def roots(node: fx.Node) -> set[fx.Node]:
    """What a call reads, through views."""
    return {y for x in node.all_input_nodes for y in ({x} | (roots(x) if x.args and plan.viewed(x) else set()))} | {
        node
    }


def ways(graph: fx.Graph, sending: bool = False) -> list[tuple[int, float]] | None:
    """The peak and the time of each way to keep values across the call that needs most; None where there are too many.

    Args:
        graph: the plan.
        sending: whether values may wait on the host.
    """
    found = []
    for line in (gathered(graph), gathered(updated(plan.copied(graph)))):
        use, nodes = memory(line), list(line.nodes)
        calls = [i for i, node in enumerate(nodes) if node.op == "call_function"]
        at = calls[use.timeline.index(use.at)]  # type: ignore[arg-type]
        needed = {x for node in nodes[at + 1 :] for x in node.all_input_nodes}
        for node in reversed(nodes[: at + 1]):
            needed.update(node.all_input_nodes if node in needed else ())
        made = [x for x in nodes[: at + 1] if x in needed and x.op == "call_function" and not plan.viewed(x)]
        if len(made) > (MOST_SENT if sending else MOST):
            return None
        for kept in itertools.product((True, False, None) if sending else (True, False), repeat=len(made)):
            stays, sent = ({x for x, one in zip(made, kept) if one is how} for how in (True, None))
            for lags in itertools.product(LAGS, LAGS) if sent else ((0, 0),):
                new = keeping(line, at, stays, sent, lags)
                found.append((memory(reuse(new)).peak, costs.total(new)))
    return found


def compared(seed: int, sending: bool = False) -> str:
    """How a plan within a random limit that can be held compares to the best of all ways; "" where there is none to compare."""
    graph, given = small(seed)
    graph = on_device(graph) if sending else graph
    found = ways(graph, sending)
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


def tallied(count: int, sending: bool) -> list[int]:
    """How often each of `KINDS` was found."""
    found = (one for seed in itertools.count() if (one := compared(seed, sending)))
    tally = Counter(itertools.islice(found, count))
    return [tally[kind] for kind in KINDS]


KINDS = ("equal", "faster", "slower", "not found", "wrong")


def main(count: int = 200, sending: int = 60) -> None:
    torch.set_num_threads(1)
    rows = [["kept or made again", count, *tallied(count, False)]]
    costs.RATES["cuda"] = SMALL
    rows.append(["or on the host", sending, *tallied(sending, True)])
    publish("small_budgets", ["values are", "plans", *KINDS], rows)


if __name__ == "__main__":
    main()
