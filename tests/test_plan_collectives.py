"""The passes on collectives and draws: what each improves, what it leaves alone, and that the values stay what they were.

The graphs are written by hand, as the recorder writes them: on a simulated mesh a node for each rank's op and collectives of
lists, on a real rank one node each. The oracle is the graph as written, on simulated ranks.
"""

import functools
import operator
from typing import Any

import pytest
import torch
from torch import fx

import vescale_fn as vfn
from benchmarks.peak_memory import accounting
from vescale_fn import P
from vescale_fn._core.arrays.reshard import OwnPart
from vescale_fn._core.distributed.collectives import Collective, group_size
from vescale_fn._core.distributed.mesh import communicator_of
from vescale_fn.plan import pipeline
from vescale_fn.plan.ir.collective_nodes import size
from vescale_fn.plan.ir.graph import collectives, name_of
from vescale_fn.plan.passes.buckets import _flat, _for_each_rank, buckets
from vescale_fn.plan.passes.merge_axes import axes
from vescale_fn.plan.passes.overlap import overlap
from vescale_fn.plan.passes.prefetch import prefetch
from vescale_fn.plan.passes.reduce_scatter import _place, scatter
from vescale_fn.plan.passes.residual_sums import residual
from vescale_fn.plan.passes.slice_draws import draws
from vescale_fn.plan.passes.under_way import under_way

aten = torch.ops.aten


class Hand:
    """A graph being written: a value is the list of its nodes, one a rank that this process plays."""

    def __init__(self, mesh: Any, *ranks: int) -> None:
        self.mesh, self.ranks, self.graph, self.feeds = mesh, ranks or list(communicator_of(mesh).ranks), fx.Graph(), []

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

    def once(self, target: Any, *args: Any) -> list[fx.Node]:
        """An op on what all ranks have alike: one node for all."""
        return [self.call(target, tuple(self._pick(a, 0) for a in args))] * len(self.ranks)

    def own(self, x: list[fx.Node], names: tuple[str, ...], dim: int, even: bool = True) -> list[fx.Node]:
        """Each rank's own part along these axes, in memory of its own."""
        size, n = x[0].meta["val"].shape[dim], group_size(self.mesh, names)
        length = -(-size // n)
        first = {rank: min(size, length * _place(self.mesh, names, rank)) for rank in self.ranks}
        part = self.op(
            aten.narrow.default,
            x,
            dim,
            first.__getitem__,
            lambda rank: min(length, size - first[rank]),
            own=OwnPart(self.mesh, names, even),
        )
        return self.op(aten.clone.default, part)

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
        if len(self.ranks) == 1:
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
    return [
        hand.exchange("reduce_scatter", hand.input(block(*shape)), ("dp", "tp"), dim)
        for shape, dim in (((4, 3), 0), ((2, 8), 1), ((2, 4, 3), 1))
    ]


def exchanges(hand):
    """Queries, keys and values, each split by heads instead of tokens: along different dims here."""
    h = [hand.op(aten.mul.Tensor, hand.input(block(*shape)), 2) for shape in ((4, 3), (2, 8), (2, 4, 3))]
    dims = ((0, 1), (1, 0), (1, 1))
    return [hand.exchange("all_to_all", x, ("dp", "tp"), *pair) for x, pair in zip(h, dims, strict=True)]


def exchanges_apart(hand):
    """There and back, and one beside them; a sum between two."""
    one, other, third = (hand.input(block(*shape)) for shape in ((4, 3), (2, 4), (2, 2)))
    back = hand.exchange("all_to_all", hand.exchange("all_to_all", one, ("tp",), 0, 1), ("tp",), 1, 0)
    total = hand.exchange("all_reduce", other, ("tp",), "sum")
    return [back, total, hand.exchange("all_to_all", third, ("tp",), 0, 1)]


def written_between(hand):
    """A value is written in place after one sum has read it."""
    x = hand.op(aten.mul.Tensor, hand.input(block(3)), 2)
    one = hand.exchange("all_reduce", x, ("tp",), "sum")
    hand.op(aten.add_.Tensor, x, 100)
    return [one, hand.exchange("all_reduce", hand.input(block(2)), ("tp",), "sum")]


def read_late_and_written(hand):
    """What is added to the first sum is written between the two, after it was read."""
    h = hand.op(aten.mul.Tensor, hand.input(block(3)), 2)
    one = hand.op(aten.add.Tensor, hand.exchange("all_reduce", hand.input(block(3)), ("tp",), "sum"), h)
    hand.op(aten.add_.Tensor, h, 100)
    return [one, h, hand.exchange("all_reduce", hand.input(block(2)), ("tp",), "sum")]


def forward_and_again(hand):
    """A weight gathered once more in the backward pass, on purpose."""
    w = hand.input(block(1, 2))
    return [hand.exchange("all_gather", w, ("tp",), 0), hand.exchange("all_gather", w, ("tp",), 0, again=7)]


def own_part_of_a_sum(hand):
    return [hand.own(hand.exchange("all_reduce", hand.input(block(4, 3)), ("tp",), "sum"), ("tp",), 0)]


def own_part_of_an_entry_of_a_sum(hand):
    total = hand.exchange("all_reduce", hand.input(block(1, 4, 3)), ("tp",), "sum")
    return [hand.own(hand.op(aten.mul.Tensor, hand.op(aten.select.int, total, -3, 0), 2), ("tp",), 0)]


def own_parts_of_a_scaled_sum(hand):
    """The one sum serves two slices, and what it is multiplied by is cut as well."""
    total = hand.exchange("all_reduce", hand.input(block(3, 4)), ("tp",), "sum")
    cast = hand.op(aten.to.dtype, hand.op(aten.mul.Tensor, total, hand.input(block(4))), torch.float64)
    turned = hand.op(aten.t.default, cast)
    return [hand.own(turned, ("tp",), 0)]


def own_part_along_one_of_two_axes(hand):
    return [hand.own(hand.exchange("all_reduce", hand.input(block(4, 3)), ("dp", "tp"), "sum"), ("tp",), 0)]


def own_part_of_a_gather(hand):
    return [hand.own(hand.exchange("all_gather", hand.input(block(2, 3)), ("dp", "tp"), 1), ("dp", "tp"), 1)]


def own_part_along_the_major_axis_of_a_gather(hand):
    return [hand.own(hand.exchange("all_gather", hand.input(block(2, 3)), ("dp", "tp"), 1), ("dp",), 1)]


def own_part_along_the_minor_axis_of_a_gather(hand):
    return [hand.own(hand.exchange("all_gather", hand.input(block(2, 3)), ("dp", "tp"), 1), ("tp",), 1)]


def own_part_of_another_dim(hand):
    return [hand.own(hand.exchange("all_gather", hand.input(block(2, 4)), ("tp",), 0), ("tp",), 1)]


def own_part_of_a_maximum(hand):
    return [hand.own(hand.exchange("all_reduce", hand.input(block(4)), ("tp",), "max"), ("tp",), 0)]


def own_part_of_another_size(hand):
    return [hand.own(hand.exchange("all_reduce", hand.input(block(5)), ("tp",), "sum"), ("tp",), 0, even=False)]


def own_part_and_the_whole(hand):
    total = hand.exchange("all_reduce", hand.input(block(4)), ("tp",), "sum")
    return [total, hand.own(total, ("tp",), 0)]


def the_first_rows_on_every_rank(hand):
    """On the first rank this is its own part; on the others it is not."""
    total = hand.exchange("all_reduce", hand.input(block(4)), ("tp",), "sum")
    return [hand.op(aten.narrow.default, total, 0, 0, 2)]


def own_part_and_the_first_rows(hand):
    total = hand.exchange("all_reduce", hand.input(block(4)), ("tp",), "sum")
    return [hand.op(aten.slice.Tensor, total, 0, 0, 2), hand.own(total, ("tp",), 0)]


def residual_stream(hand, kept=False):
    """Each layer reduces what the ones before it have added up."""
    x, sums = hand.input(block(2, 3)), []
    total = hand.exchange("all_reduce", x, ("tp",), "sum")
    for _ in range(2):
        x = hand.op(aten.add.Tensor, hand.op(aten.mul.Tensor, total, hand.input(block(2, 3))), x)
        sums.append(x)
        total = hand.exchange("all_reduce", x, ("tp",), "sum")
    return [total, *sums[:1]] if kept else [total]


def residual_stream_that_is_a_result(hand):
    return residual_stream(hand, kept=True)


def a_sum_of_reduced_terms(hand):
    a, b = hand.input(block(2, 3)), hand.input(block(1, 3))
    return [hand.exchange("all_reduce", x, ("tp",), "sum") for x in (a, b, hand.op(aten.add.Tensor, a, b))]


def a_sum_over_other_axes(hand):
    a, b = hand.input(block(2, 3)), hand.input(block(1, 3))
    both = hand.op(aten.add.Tensor, a, b)
    return [hand.exchange("all_reduce", a, ("tp",), "sum"), hand.exchange("all_reduce", both, ("dp",), "sum")]


def scattered_up(graph):
    return scatter(draws(graph))


def layers(hand):
    """Four layers, the weights gathered right before their use, one of them after a cast."""
    h = hand.input(block(2, 2))
    for i, w in enumerate([hand.input(block(1, 2)) for _ in range(4)]):
        w = hand.op(aten.mul.Tensor, w, 0.5) if i == 2 else w
        h = hand.op(aten.mm.default, h, hand.exchange("all_gather", w, ("tp",), 0))
    return [h]


def sums_at_the_end(hand):
    """Gradients in the order of a backward pass, summed at the end, in the order of the parameters."""
    g = hand.input(block(2, 2))
    grads = []
    for _ in range(3):
        g = hand.op(aten.mm.default, g, g)
        grads.append(hand.op(aten.neg.default, g))
    sums = [hand.exchange("all_reduce", grad, ("dp",), "sum") for grad in reversed(grads)]
    return [hand.op(aten.exp.default, hand.op(aten.t.default, total)) for total in sums]


def gradients_of_layers(hand):
    """Of each layer the gradient is summed, then its weight is gathered for that of the next one."""
    g, sums = hand.input(block(2, 2)), []
    for w in [hand.input(block(1, 2)) for _ in range(4)]:
        sums.append(hand.exchange("all_reduce", hand.op(aten.neg.default, g), ("dp",), "sum"))
        g = hand.op(aten.mm.default, g, hand.exchange("all_gather", w, ("tp",), 0))
    return [*sums, g]


def used_at_once(hand):
    h = hand.input(block(2, 2))
    for _ in range(2):
        h = hand.op(aten.mm.default, h, hand.exchange("all_reduce", h, ("tp",), "sum"))
    return [h]


def overlapped(graph):
    return overlap(graph, ahead=0, on_cpu=True)


def far_ahead(graph):
    return overlap(graph, ahead=160, on_cpu=True)


def bucketed_and_overlapped(graph):
    return overlap(buckets(graph, limit=64), on_cpu=True)


def weights_there_and_back(hand):
    """Two weights gathered for the forward pass and, transposed, for the backward pass."""
    ws = [hand.input(block(1, 2)), hand.input(block(1, 2))]
    h = hand.input(block(2, 2))
    for w in ws:
        h = hand.op(aten.mm.default, h, hand.exchange("all_gather", w, ("tp",), 0))
    for w in reversed(ws):
        h = hand.op(aten.mm.default, h, hand.exchange("all_gather", hand.op(aten.t.default, w), ("tp",), 1))
    return [h]


def then_scattered(op, axis):
    """What is added up over ``tp`` and scattered over an axis."""
    given = block(4, 2)
    return lambda hand: [
        hand.exchange("reduce_scatter", hand.exchange("all_reduce", hand.input(given), ("tp",), op), (axis,), 0)
    ]


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
    "a sum scattered over another axis": (then_scattered("sum", "dp"), axes, [(S, "dp", 64), (R, "tp", 32)]),
    "a sum scattered over its own axis": (then_scattered("sum", "tp"), axes, None),
    "a maximum, scattered": (then_scattered("max", "dp"), axes, None),
    "gradients": (gradients, small, [(R, "dp", 40), (R, "dp", 56), (R, "dp", 320)]),
    "a chain": (a_chain, buckets, [(R, "tp", 40), (R, "tp", 24)]),
    "crossed": (crossed, buckets, [(R, "dp", 24), (R, "tp", 40), (R, "dp", 16)]),
    "weights": (weights, buckets, [(G, "tp", 48)]),
    "weights and activations": (weights_and_activations, buckets, None),
    "scatters": (scatters, buckets, [(S, "dp,tp", 416)]),
    "exchanges": (exchanges, buckets, [("all_to_all", "dp,tp", 416)]),
    "exchanges apart": (exchanges_apart, buckets, None),
    "written between": (written_between, buckets, None),
    "read late and written": (read_late_and_written, buckets, [(R, "tp", 40)]),
    "forward and again": (forward_and_again, buckets, None),
    "weights there and back": (weights_there_and_back, buckets, [(G, "tp", 32), (G, "tp", 32)]),
    "residual stream": (residual_stream, residual, [(R, "tp", 48)] * 3),
    "residual stream that is a result": (residual_stream_that_is_a_result, residual, None),
    "a sum of reduced terms": (a_sum_of_reduced_terms, residual, [(R, "tp", 48), (R, "tp", 24)]),
    "a sum over other axes": (a_sum_over_other_axes, residual, None),
    "layers": (layers, overlapped, [("start_all_gather", "tp", 16)] * 4),
    "layers, far ahead": (layers, far_ahead, [("start_all_gather", "tp", 16)] * 4),
    "gradients of layers": (
        gradients_of_layers,
        overlapped,
        [("start_all_gather", "tp", 16), *[("start_all_gather", "tp", 16), ("start_all_reduce", "dp", 32)] * 3]
        + [("start_all_reduce", "dp", 32)],
    ),
    "sums at the end": (sums_at_the_end, overlapped, [("start_all_reduce", "dp", 32)] * 2 + [(R, "dp", 32)]),
    "sums in buckets": (sums_at_the_end, bucketed_and_overlapped, [("start_all_reduce", "dp", 64), (R, "dp", 32)]),
    "used at once": (used_at_once, overlapped, None),
    "written between, overlapped": (written_between, overlapped, [("start_all_reduce", "tp", 16), (R, "tp", 24)]),
    "own part of a sum": (own_part_of_a_sum, scattered_up, [(S, "tp", 96)]),
    "own part of an entry of a sum": (own_part_of_an_entry_of_a_sum, scattered_up, [(S, "tp", 96)]),
    "own parts of a scaled sum": (own_parts_of_a_scaled_sum, scattered_up, [(S, "tp", 96)]),
    "own part along one of two axes": (own_part_along_one_of_two_axes, scattered_up, [(S, "tp", 96), (R, "dp", 48)]),
    "own part of a gather": (own_part_of_a_gather, scattered_up, []),
    "own part along the major axis": (own_part_along_the_major_axis_of_a_gather, scattered_up, [(G, "tp", 48)]),
    "own part along the minor axis": (own_part_along_the_minor_axis_of_a_gather, scattered_up, None),
    "own part of another dim": (own_part_of_another_dim, scattered_up, None),
    "own part of a maximum": (own_part_of_a_maximum, scattered_up, None),
    "own part of another size": (own_part_of_another_size, scattered_up, None),
    "own part and the whole": (own_part_and_the_whole, scattered_up, None),
    "the first rows on every rank": (the_first_rows_on_every_rank, scattered_up, None),
    "own part and the first rows": (own_part_and_the_first_rows, scattered_up, None),
}


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


@pytest.mark.parametrize(("pack", "ranks"), [(_flat, 1), (_for_each_rank, 2)])
def test_what_travels_together_is_copied_once_however_it_lies(pack, ranks):
    blocks, dims = [torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(2, 5)], [(1,), (1,), (0,)]
    with accounting(blocks) as account:
        flat = pack(blocks, ranks, dims)
    pieces = [x.chunk(ranks, dim)[i].reshape(-1) for i in range(ranks) for x, (dim,) in zip(blocks, dims, strict=True)]
    assert torch.equal(flat, torch.cat(pieces))
    assert account.peak == 2 * flat.nbytes


def told(graph: fx.Graph) -> str:
    """The calls that compute or communicate, in order."""
    short = {"start_all_gather": "gather", "start_all_reduce": "sum", "all_reduce": "sum!"}
    skipped = ("getitem", "t.default", "pack", "unpack")
    names = [node.target.__name__ for node in graph.nodes if node.op == "call_function"]
    return " ".join(short.get(name, name.split(".")[0]) for name in names if name not in skipped)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("layers", "gather gather wait mm mul gather wait mm gather wait mm wait mm"),
        ("layers, far ahead", "gather gather mul gather gather wait mm wait mm wait mm wait mm"),
        (
            "gradients of layers",
            "neg gather gather sum wait mm neg gather sum wait mm neg gather sum wait mm neg sum wait mm wait wait wait wait",
        ),
        ("sums at the end", "mm neg sum mm neg sum mm neg sum! exp wait exp wait exp"),
        ("sums in buckets", "mm neg mm neg sum mm neg sum! exp wait exp exp"),
        ("used at once", "sum! mm sum! mm"),
        ("residual stream", "sum! mul sum! add mul sum! add"),
        ("residual stream that is a result", "sum! mul add sum! mul add sum!"),
    ],
)
def test_when_collectives_start_and_are_waited_for(name, wanted):
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    program, improve, _ = PROGRAMS[name]
    hand = Hand(mesh, 0)
    assert told(improve(hand.end(*program(hand)))) == wanted


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


# --- draws ------------------------------------------------------------------------------------------------------------


def drawn(graph: fx.Graph) -> int:
    """How many elements a graph draws, or fills with a number."""
    names = ("draw", "zeros", "ones", "full", "new_zeros", "zeros_like")
    return sum(node.meta["val"].numel() for node in graph.nodes if name_of(node) in names)


def draw(hand, shape, kind="normal", keys=1, params=()):
    key = hand.once(aten.mul.Tensor, hand.input(lambda rank: torch.tensor([3, 4], dtype=torch.int32)), 1)
    if keys > 1:
        key = hand.once(torch.ops.vescale_fn.split.default, key, keys)
    more = (None, list(shape), list(shape), kind, list(params), torch.float32, torch.device("cpu"))
    return hand.once(torch.ops.vescale_fn.draw.default, key, *more)


def scaled(hand):
    return [hand.own(hand.once(aten.mul.Tensor, draw(hand, (8, 6)), 0.02), ("tp",), 0)]


def turned_and_cast(hand):
    x = hand.once(aten.permute.default, draw(hand, (3, 8, 2), "uniform", params=(0.0, 1.0)), [1, 2, 0])
    x = hand.once(aten.to.dtype, x, torch.bfloat16)
    return [hand.own(x, ("dp", "tp"), 0)]


def in_another_shape(hand):
    x = hand.once(aten.view.default, draw(hand, (8, 3, 2)), [4, 2, 6])
    return [hand.own(x, ("tp",), 0), hand.own(hand.once(aten.view.default, draw(hand, (2, 4)), [8]), ("tp",), 0)]


def split_apart(hand):
    """One dim that becomes two, and a part of the major one."""
    return [hand.own(hand.once(aten.view.default, draw(hand, (8, 3)), [4, 2, 3]), ("tp",), 0)]


def stacked_by_keys(hand):
    x = draw(hand, (6,), keys=4)
    return [hand.own(x, ("tp",), 0), hand.own(draw(hand, (6,), keys=4), ("tp",), 1)]


def cut_twice(hand):
    return [hand.own(hand.own(draw(hand, (8, 6)), ("dp",), 0), ("tp",), 1)]


def cut_twice_along_one_dim(hand):
    return [hand.own(hand.own(draw(hand, (8, 6)), ("dp",), 0), ("tp",), 0)]


def uneven(hand):
    return [hand.own(draw(hand, (5, 2)), ("dp", "tp"), 0, even=False)]


def shifted_and_masked(hand):
    x = hand.once(aten.add.Tensor, draw(hand, (8, 6)), hand.once(aten.full.default, [6], 2.0))
    keep = hand.once(aten.lt.Scalar, draw(hand, (8, 6), "uniform", params=(0.0, 1.0)), 0.5)
    zeros = hand.once(aten.zeros_like.default, x)
    return [hand.own(hand.once(aten.where.self, keep, x, zeros), ("tp",), 1)]


def normalised(hand):
    """A sum over what is drawn needs all of it."""
    x = draw(hand, (8, 6))
    return [hand.own(hand.once(aten.div.Tensor, x, hand.once(aten.sum.dim_IntList, x, [0])), ("tp",), 0)]


def across(hand):
    """A part of a dim that was made of two, but not of whole entries of the major one."""
    return [hand.own(hand.once(aten.view.default, draw(hand, (3, 4)), [12]), ("tp",), 0)]


def off_the_entries(hand):
    """As long as one entry of the major dim, and no entry of it."""
    x = hand.once(aten.view.default, draw(hand, (3, 4)), [12])
    return [hand.op(aten.slice.Tensor, x, 0, 2, 6)]


def three_of_one(hand):
    """Parts that every rank takes, on purpose, of one draw: three draws would be no less."""
    x = draw(hand, (6, 2))
    return [hand.op(aten.slice.Tensor, x, 0, start, start + 2) for start in (0, 2, 4)]


DRAWS: dict[
    str, Any
] = {  # elements drawn and filled on a simulated mesh of 4, and after: on all ranks together, on rank 1
    "scaled": (scaled, 48, 48, 24),
    "turned and cast": (turned_and_cast, 48, 48, 12),
    "in another shape": (in_another_shape, 56, 56, 28),
    "split apart": (split_apart, 24, 24, 12),
    "stacked by keys": (stacked_by_keys, 48, 48, 24),
    "cut twice": (cut_twice, 48, 48, 12),
    "cut twice along one dim": (cut_twice_along_one_dim, 48, 48, 12),
    "off the entries": (off_the_entries, 12, 12, 12),
    "uneven": (uneven, 10, 10, 4),
    "shifted and masked": (shifted_and_masked, 150, 150, 75),
    "normalised": (normalised, 48, 48, 48),
    "across": (across, 12, 12, 12),
    "three of one": (three_of_one, 12, 12, 12),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_bits_from_smaller_draws(name):
    program, *counts = DRAWS[name]
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    for ranks in ((), (0,), (1,), (2,), (3,)):  # all in one graph; each by itself, as where it is real
        hand = Hand(mesh, *ranks)
        graph = hand.end(*program(hand))
        better = draws(graph)
        better.lint()
        for wanted, found in zip(run(graph, hand.feeds), run(better, hand.feeds), strict=True):
            for one, other in zip(wanted, found, strict=True):
                assert other.dtype == one.dtype
                assert torch.equal(other, one)
        if ranks in ((), (1,)):
            assert [drawn(graph), drawn(better)] == [counts[0], counts[1 + len(ranks)]], ranks


def test_a_result_shares_no_memory_with_what_it_is_made_of():
    """A gather that is nothing gives what was gathered, which the caller may hold."""
    with vfn.simulate(4):
        hand = Hand(vfn.make_mesh((2, 2), ("dp", "tp")))
    whole = hand.exchange("all_gather", hand.input(block(2, 3)), ("tp",), 0)
    first = {rank: 2 * (rank % 2) for rank in hand.ranks}
    mine = hand.op(aten.narrow.default, whole, 0, first.__getitem__, 2, own=OwnPart(hand.mesh, ("tp",), True))
    better = scatter(hand.end(hand.op(aten.view.default, mine, [6]), hand.op(aten.neg.default, mine)))
    assert asked(better) == []
    for out, given in zip(run(better, hand.feeds)[0], hand.feeds, strict=True):
        assert torch.equal(out.view(2, 3), given)
        assert out.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


# --- plans ------------------------------------------------------------------------------------------------------------


def _train(params, batch, rate):
    def loss(p):
        h = torch.tanh(batch @ p["in"] + p["bias"]) @ p["out"]
        return (h**2).mean()

    value, grads = vfn.value_and_grad(loss)(params)
    return value, {name: params[name] - rate * grads[name] for name in params}


def _trained(mesh, spec, sizes=(6, 8, 4), passes=pipeline.PASSES):
    """A step by its plan, the same step as it is written on one device, and the collectives of the plan."""
    i, h, o = sizes
    params = {"in": block(i, h)(0) / 9, "bias": block(h)(0), "out": block(h, o)(0).cos()}
    batch = block(4 * mesh.size(), i)(0).sin()
    step = vfn.jit(_train, passes=passes)
    args = vfn.shard(params, mesh, spec), vfn.shard(batch, mesh, P("dp")), 0.25
    with vfn.comm_log() as log:
        step(*args)
        found = step(*args)
    assert step.cache_info()[:3] == (1, 1, 0)
    return vfn.unshard(found), _train(params, batch, 0.25), [(x.op, x.axis, x.bytes) for x in log[len(log) // 2 :]]


LAYOUTS = {  # elements: 84 of the weights in, 8 + 48 + 32 = 88 in all, and the loss
    "data parallel": ((2,), ("dp",), P(), [(R, "dp", 8 * (88 + 1))]),
    "sharded parameters": (
        (2,),
        ("dp",),
        P("dp"),
        [(G, "dp", 8 * 88), (G, "dp", 8 * 32), (R, "dp", 8), (S, "dp", 8 * 88)],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_training_step_makes_the_collectives_of_the_best_one_by_hand(name):
    shape, names, spec, wanted = LAYOUTS[name]
    with vfn.simulate(2):
        found, alone, sent = _trained(vfn.make_mesh(shape, names), spec)
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)
    assert sorted(sent) == sorted(wanted)


def _uneven_steps(passes):
    mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
    told = []
    for spec in (P("dp"), P("tp"), P(("dp", "tp")), P()):
        found, alone, sent = _trained(mesh, spec, (5, 7, 3), passes)
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)
        told.append([(op, axis) for op, axis, _ in sent])
    return told


def test_ranks_with_blocks_of_other_sizes_make_the_same_collectives_in_the_same_order(gloo):
    beside = {one: functools.partial(one, on_cpu=True) for one in (overlap, prefetch, under_way)}
    as_on_gpus = [beside.get(one, one) for one in pipeline.PASSES]
    for improved in (pipeline.PASSES, (*as_on_gpus, beside[overlap], beside[under_way])):
        told = gloo(4, _uneven_steps, improved)
        assert all(one == told[0] for one in told)
        assert all(told[0])


def test_what_arrives_as_it_was_sent_was_sent_all_the_same():
    """Simulated ranks hand one tensor on; a plan has the collective, though what it gives is there already."""
    with vfn.simulate(3):
        mesh = vfn.make_mesh((3,), ("i",))
        x = vfn.shard(torch.arange(6.0), mesh, P("i"))
        turn = lambda x: vfn.pbroadcast(vfn.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)]), "i", 2)
        body = vfn.shard_map(turn, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        with vfn.comm_log() as log:
            found = vfn.jit(body)(x)
        assert [(one.op, one.bytes) for one in log] == [("permute", 8), ("broadcast", 8)]
        assert vfn.unshard(found).tolist() == [2, 3] * 3


def test_an_initialiser_makes_each_rank_only_its_shards():
    def init(key):
        keys = vfn.random.split(key, 2)
        return {
            "w": vfn.random.normal(keys[0], (8, 6)) * 0.02,
            "t": vfn.random.uniform(keys[1], (6, 8)).T,
            "b": torch.zeros(8),
        }

    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        jitted = vfn.jit(init, out_specs=P("dp"))
        with vfn.use_mesh(mesh):
            made = jitted(vfn.random.key(3))
            text = jitted.lower(vfn.random.key(3)).text()
    for name, one in init(vfn.random.key(3)).items():
        assert vfn.spec_of(made[name]) == P("dp")
        assert torch.equal(vfn.unshard(made[name]), one)
    assert "f32[4,6]" in text
    assert "f32[8,6]" not in text
    assert "f32[6,8]" not in text
