"""The passes on collectives and draws: what each improves, what it leaves alone, and that the values stay what they were.

The graphs are written by hand, as the recorder writes them: on a simulated mesh a node for each rank's op and collectives of
lists, on a real rank one node each. The oracle is the graph as written, on simulated ranks.
"""

import operator
from typing import Any

import pytest
import torch
from torch import fx

import vescale_fn as vfn
from vescale_fn.mesh import is_simulated, played_ranks
from vescale_fn.plan.exchanged import size
from vescale_fn.plan.graph import collectives
from vescale_fn.plan.passes.axes import axes
from vescale_fn.plan.passes.buckets import buckets
from vescale_fn.wire import Collective

aten = torch.ops.aten


class Hand:
    """A graph being written: a value is the list of its nodes, one a rank that this process plays."""

    def __init__(self, mesh: Any) -> None:
        self.mesh, self.ranks, self.graph, self.feeds = mesh, list(played_ranks(mesh)), fx.Graph(), []

    def input(self, block: Any) -> list[fx.Node]:
        """``block(rank)`` on each rank."""
        nodes = []
        for rank in self.ranks:
            nodes.append(self.graph.placeholder(f"x{len(self.feeds)}"))
            self.feeds.append(block(rank))
            nodes[-1].meta = {"val": self.feeds[-1], "line": ""}
        return nodes

    def op(self, target: Any, *args: Any, **meta: Any) -> list[fx.Node]:
        """An op on each rank; arguments are values, functions of the rank, or the same for all."""
        return [self.call(target, tuple(self._pick(a, i) for a in args), meta) for i in range(len(self.ranks))]

    def call(self, target: Any, args: Any, meta: Any = None) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {"val": fx.node.map_arg(args, lambda n: n.meta["val"]), "line": "", **(meta or {})}
        node.meta["val"] = target(*node.meta["val"])
        return node

    def _pick(self, a: Any, i: int) -> Any:
        if callable(a):
            return a(self.ranks[i])
        if isinstance(a, list) and a and isinstance(a[0], fx.Node):
            return a[i]
        return [self._pick(x, i) for x in a] if isinstance(a, list) else a

    def exchange(self, kind: str, x: list[fx.Node], names: tuple[str, ...], *params: Any, **meta: Any) -> list[fx.Node]:
        collective = Collective(kind, self.mesh, names, params, "by hand", "here")
        if not is_simulated(self.mesh):
            node = self.graph.call_function(collective, (x[0],))
            node.meta = {"val": collective.like(x[0].meta["val"]), "line": "here", **meta}
            return [node]
        node = self.call(collective, (list(x),), meta)
        shared: dict[int, fx.Node] = {}  # ranks that get one tensor share its node
        for i, val in enumerate(node.meta["val"]):
            if id(val) not in shared:
                shared[id(val)] = self.call(operator.getitem, (node, i), meta)
        return [shared[id(val)] for val in node.meta["val"]]

    def end(self, *values: list[fx.Node]) -> fx.Graph:
        self.graph.output(tuple(tuple(x) for x in values))
        self.graph.lint()
        return self.graph


def run(graph: fx.Graph, feeds: list[torch.Tensor]) -> Any:
    """What a graph gives, node by node."""
    values, given = {}, iter(feeds)
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return args[0]
        values[node] = next(given) if node.op == "placeholder" else node.target(*args, **kwargs)


def block(*shape: int, dtype: torch.dtype = torch.float64) -> Any:
    """Distinct values on each rank."""
    n = torch.Size(shape).numel()
    return lambda rank: (torch.arange(n, dtype=torch.float64).reshape(shape) / 7 + 10 * rank + 1).to(dtype)


def asked(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """The collectives: kind, axes, bytes that a rank gives."""
    return [(node.target.__name__, ",".join(node.target.axes), size(node)) for node in collectives(graph)]


# --- the programs -----------------------------------------------------------------------------------------------------
# Each one: how it is written, the passes, and the collectives before and after.


def two_sums(hand):
    x = hand.input(block(3, 2))
    return [hand.exchange("all_reduce", hand.exchange("all_reduce", x, ("tp",), "sum"), ("dp",), "sum")]


def two_maxima(hand):
    x = hand.input(block(3))
    return [hand.exchange("all_reduce", hand.exchange("all_reduce", x, ("dp",), "max"), ("tp",), "max")]


def a_sum_of_a_maximum(hand):
    x = hand.input(block(3))
    return [hand.exchange("all_reduce", hand.exchange("all_reduce", x, ("tp",), "max"), ("dp",), "sum")]


def a_sum_used_twice(hand):
    inner = hand.exchange("all_reduce", hand.input(block(3)), ("tp",), "sum")
    return [inner, hand.exchange("all_reduce", inner, ("dp",), "sum")]


def a_sum_over_one_axis_twice(hand):
    x = hand.input(block(3))
    return [hand.exchange("all_reduce", hand.exchange("all_reduce", x, ("tp",), "sum"), ("tp",), "sum")]


def gathered(first, second, dims=(0, 0)):
    def program(hand):
        x = hand.input(block(2, 3))
        return [hand.exchange("all_gather", hand.exchange("all_gather", x, first, dims[0]), second, dims[1])]

    return program


def scattered(first, second, dims=(1, 1)):
    def program(hand):
        x = hand.input(block(2, 8))
        return [hand.exchange("reduce_scatter", hand.exchange("reduce_scatter", x, first, dims[0]), second, dims[1])]

    return program


def gradients(hand):
    """Sums of gradients, each used by itself; one of them large, one of other integers."""
    out = []
    for shape, dtype in (
        ((3, 2), torch.float64),
        ((), torch.float64),
        ((5,), torch.int64),
        ((0, 4), torch.float64),
        ((40,), torch.float64),
    ):
        grad = hand.op(aten.mul.Tensor, hand.input(block(*shape, dtype=dtype)), 2)
        total = hand.exchange("all_reduce", grad, ("dp",), "sum")
        out.append(hand.op(aten.neg.default, total))
    return out


def a_chain(hand):
    """The second needs the first, the third nothing: the third goes with the second."""
    x, y = hand.input(block(3)), hand.input(block(2))
    one = hand.exchange("all_reduce", x, ("tp",), "sum")
    two = hand.exchange("all_reduce", hand.op(aten.mul.Tensor, one, x), ("tp",), "sum")
    three = hand.exchange("all_reduce", y, ("tp",), "sum")
    return [one, two, three]


def crossed(hand):
    """Over dp: a, then d. Over tp: b, which needs a, then c, which d needs. Either pair may be one, both may not."""
    x, y = hand.input(block(3)), hand.input(block(2))
    a = hand.exchange("all_reduce", x, ("dp",), "sum")
    b = hand.exchange("all_reduce", hand.op(aten.neg.default, a), ("tp",), "sum")
    c = hand.exchange("all_reduce", y, ("tp",), "sum")
    d = hand.exchange("all_reduce", hand.op(aten.neg.default, c), ("dp",), "sum")
    return [b, d]


def weights(hand):
    """Parameters of three layers, gathered along different dims, each right before its use."""
    h = hand.input(block(2, 2))
    ws = [hand.input(block(*shape)) for shape in ((1, 2), (2, 1), (1, 2))]
    for w, dim in zip(ws, (0, 1, 0), strict=True):
        cast = hand.op(aten.mul.Tensor, w, 0.5)
        h = hand.op(aten.mm.default, h, hand.exchange("all_gather", cast, ("tp",), dim))
    return [h]


def weights_and_activations(hand):
    """What is gathered second is made with the first."""
    h, w = hand.input(block(2, 2)), hand.input(block(1, 2))
    h = hand.op(aten.mm.default, h, hand.exchange("all_gather", w, ("tp",), 0))
    return [hand.exchange("all_gather", h, ("tp",), 0)]


def scatters(hand):
    """Gradients of sharded weights, each summed to its shard, along different dims."""
    return [hand.exchange("reduce_scatter", hand.input(block(*shape)), ("dp", "tp"), dim)
            for shape, dim in (((4, 3), 0), ((2, 8), 1), ((2, 4, 3), 1))]  # fmt: skip


def written_between(hand):
    """A value is written in place after one sum has read it."""
    x = hand.op(aten.mul.Tensor, hand.input(block(3)), 2)
    one = hand.exchange("all_reduce", x, ("tp",), "sum")
    hand.op(aten.add_.Tensor, x, 100)
    return [one, hand.exchange("all_reduce", hand.input(block(2)), ("tp",), "sum")]


def forward_and_again(hand):
    """A weight gathered once more in the backward pass, on purpose."""
    w = hand.input(block(1, 2))
    return [hand.exchange("all_gather", w, ("tp",), 0), hand.exchange("all_gather", w, ("tp",), 0, again=7)]


def small(graph):
    return buckets(graph, limit=200, alone=300)


R, G, S = "all_reduce", "all_gather", "reduce_scatter"
PROGRAMS: dict[str, Any] = {
    "two sums": (two_sums, axes, [(R, "dp,tp", 48)]),
    "two maxima": (two_maxima, axes, [(R, "dp,tp", 24)]),
    "a sum of a maximum": (a_sum_of_a_maximum, axes, None),
    "a sum used twice": (a_sum_used_twice, axes, None),
    "a sum over one axis twice": (a_sum_over_one_axis_twice, axes, None),
    "gathers, minor first": (gathered(("tp",), ("dp",)), axes, [(G, "dp,tp", 48)]),
    "gathers, major first": (gathered(("dp",), ("tp",)), axes, [(G, "tp,dp", 48)]),
    "gathers of two dims": (gathered(("tp",), ("dp",), (0, 1)), axes, None),
    "scatters, major first": (scattered(("dp",), ("tp",)), axes, [(S, "dp,tp", 128)]),
    "scatters, minor first": (scattered(("tp",), ("dp",)), axes, [(S, "tp,dp", 128)]),
    "scatters of two dims": (scattered(("tp",), ("dp",), (0, 1)), axes, None),
    "gradients": (gradients, small, [(R, "dp", 40), (R, "dp", 56), (R, "dp", 320)]),
    "a chain": (a_chain, buckets, [(R, "tp", 24), (R, "tp", 40)]),
    "crossed": (crossed, buckets, [(R, "dp", 24), (R, "tp", 40), (R, "dp", 16)]),
    "weights": (weights, buckets, [(G, "tp", 48)]),
    "weights and activations": (weights_and_activations, buckets, None),
    "scatters": (scatters, buckets, [(S, "dp,tp", 416)]),
    "written between": (written_between, buckets, None),
    "forward and again": (forward_and_again, buckets, None),
}  # fmt: skip


def written_and_improved(name: str, mesh: Any) -> tuple[Hand, fx.Graph, fx.Graph]:
    program, improve, _ = PROGRAMS[name]
    hand = Hand(mesh)
    graph = hand.end(*program(hand))
    better = improve(graph)
    better.lint()
    return hand, graph, better


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_values_by_fewer_collectives(name):
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    hand, graph, better = written_and_improved(name, mesh)
    before = asked(graph)
    assert asked(better) == (before if PROGRAMS[name][2] is None else PROGRAMS[name][2])
    for wanted, found in zip(run(graph, hand.feeds), run(better, hand.feeds), strict=True):
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-14, atol=0)  # sums in another order
    assert asked(graph) == before  # the graph that was given is as it was


def on_a_rank():
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    found = {}
    for name in PROGRAMS:
        hand, _, better = written_and_improved(name, mesh)
        found[name] = asked(better), [x[0] for x in run(better, hand.feeds)]
    return found


def test_on_real_ranks(gloo):
    ranks = gloo(4, on_a_rank)
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    for name in PROGRAMS:
        hand, graph, better = written_and_improved(name, mesh)
        wanted = run(graph, hand.feeds)
        for rank, found in enumerate(ranks):
            assert found[name][0] == asked(better), name
            for one, other in zip(wanted, found[name][1], strict=True):
                torch.testing.assert_close(other, one[rank], rtol=1e-14, atol=0, msg=lambda m, n=name: f"{n}: {m}")
