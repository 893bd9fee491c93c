"""Dims that several split dims were merged into: how they lie, how they move, and which ops keep them where they are.

The oracle lays the parts out as dims of their own, in numpy or on an array, and reshapes.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random

import numpy as np
import pytest
import torch
from test_reshard import assert_holds, placed

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.arrays import reshard, reshard_plan
from vescale_fn._core.distributed import mesh
from vescale_fn._core.distributed import mesh as mesh_
from vescale_fn._core.distributed.blocks import Blocks
from vescale_fn._core.sharding import index_map, placements, spec
from vescale_fn._core.sharding.layout import axes_items
from vescale_fn._core.sharding.merged_dim import Merged, common, merge, taken_apart
from vescale_fn.errors import SpecError

# --- the data ---------------------------------------------------------------------------------------------------------


def cases(count: int):
    """(sizes of axes in mesh order, parts of a dim), random ones."""
    draw = random.Random(0)
    for _ in range(count):
        names = draw.sample("abc", 3)
        axes = {name: draw.choice([1, 2, 2, 3]) for name in names}
        pool = draw.sample("abc", 3)
        parts = []
        for _ in range(draw.choice([2, 3, 4])):
            row = tuple(pool.pop() for _ in range(draw.choice([0, 0, 1, 1, 2])) if pool)
            size = draw.choice([1, 1, 2, 3]) * math.prod(axes[name] for name in row)
            parts.append((draw.choice([size, size, size, size + 1, 1]), row))
        yield axes, parts


def test_a_merged_dim_holds_what_its_parts_hold() -> None:
    """Index maps, against numpy, even and uneven; as DTensor's placements and back; taken apart again."""
    merged = 0
    for axes, parts in cases(1500):
        sizes = [size for size, _ in parts]
        row, n = merge(parts, axes), math.prod(sizes)
        merged += isinstance(row, Merged)
        s = spec.from_split_axes([row])
        back = placements.from_placements(placements.to_placements(s, axes, 1), axes, 1, (n,))
        said, everything = taken_apart(row, n, sizes, axes)
        grid = np.arange(n).reshape(sizes)
        for place in itertools.islice(itertools.product(*map(range, axes.values())), 5):
            coord = dict(zip(axes, place))
            held = grid[
                np.ix_(*[list(index_map.dim_indices(size, names, axes, coord)) for size, names in parts])
            ].ravel()
            for one in (s, back):
                assert list(index_map.dim_indices(n, spec.split_axes(one, 1)[0], axes, coord)) == held.tolist(), (
                    axes,
                    parts,
                )
                assert index_map.local_shape((n,), axes, one, coord) == (held.size,)
            again = grid[
                np.ix_(*[list(index_map.dim_indices(size, names, axes, coord)) for size, names in zip(sizes, said)])
            ]
            assert not everything or again.ravel().tolist() == held.tolist(), (axes, parts)
        if 1 not in axes.values():
            assert back == s
    assert merged > 500


def test_the_smallest_form() -> None:
    """Neighbours that could be one part are; a list of one part is an ordinary row of axes."""
    axes = {"a": 2, "b": 3}
    assert merge([(4, ("a",)), (5, ())], axes) == ("a",)
    assert merge([(2, ("a",)), (3, ("b",))], axes) == ("a", "b")
    assert merge([(4, ()), (1, ()), (6, ("b",))], axes) == Merged([(4, ()), (6, ("b",))])
    assert merge([(4, ("b",)), (1, ("a",))], axes) == Merged([(1, ("a",)), (4, ("b",))])
    assert merge([(1, ("b",)), (1, ("a",))], axes) == ("b", "a")
    assert P.merged((4, None), (1, "a"), (1, "b")) == P.merged((1, ("a", "b")), (4, None))
    assert P(P.merged((1, "a"), (1, "b"))) == P(("a", "b"))
    assert common([8, 4], [2, 16]) == (2, 4, 4)
    assert common([6, 4], [8, 3]) is None
    assert P(P.merged((4, "a"), (3, "b"))) != P(("a", "b"))
    assert eval(repr(P(P.merged((4, "a"), (6, ("b", "c"))), "d"))) == P(P.merged((4, "a"), (6, ("b", "c"))), "d")
    s = P(P.merged((4, "a"), (3, None)), unreduced={"b"})
    assert pickle.loads(pickle.dumps(s)) == copy.deepcopy(s) == s
    with pytest.raises(
        SpecError, match=r"P.merged\(\(4, 'a'\), \(3, 'b'\)\) is the layout of a dim of 12, but the dim has 8"
    ):
        index_map.local_indices((8,), axes, P(P.merged((4, "a"), (3, "b"))), {"a": 0, "b": 0})


# --- moves ------------------------------------------------------------------------------------------------------------

LAYOUTS = [
    P(),
    P("a"),
    P("b"),
    P(("a", "b")),
    P(("b", "a")),
    P("a", "b"),
    P(None, "a"),
    P(unreduced={"a"}),
    P(P.merged((4, None), (6, "a"))),
    P(P.merged((2, "a"), (12, "b"))),
    P(P.merged((4, "b"), (6, "a"))),
    P(P.merged((4, "a"), (6, "b"))),
    P(P.merged((3, None), (8, "b")), "a"),
    P(P.merged((12, None), (2, "a"))),
    P(P.merged((2, None), (2, "b"), (6, "a"))),
    P(P.merged((4, None), (6, "a")), unreduced={"b"}),
    P(P.merged((3, "a"), (8, None))),
    P(P.merged((8, "b"), (3, "a"))),
    P(P.merged((1, "a"), (24, "b"))),
    P(P.merged((3, None), (8, ("a", "b")))),
]


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_moves(names: str) -> None:
    """Every layout to every other: right values, forward and backward."""
    with vfn.simulate(4):
        m = vfn.make_mesh((2, 2), tuple(names))
        x = torch.arange(24 * 6.0).view(24, 6) * 3 + 1
        weights = torch.arange(24 * 6.0).view(24, 6) % 7 + 0.5
        for source, target in itertools.product(LAYOUTS, repeat=2):
            steps = reshard_plan.plan((24, 6), axes_items(m), source, target)
            assert_holds(reshard.run(Blocks(placed(x, m, source)), (24, 6), m, steps, "test"), x, m, target)
        for source, target in zip(LAYOUTS, LAYOUTS[3:]):
            there = vfn.from_local(Blocks(placed(x, m, source)), m, source).requires_grad_()
            (g,) = torch.autograd.grad((vfn.with_sharding(there, target) * weights).sum(), there)
            assert torch.equal(vfn.unshard(g), weights)


@pytest.mark.parametrize(
    ("source", "target", "collectives"),
    [
        (P(P.merged((4, "a"), (6, "b"))), P("a"), ["all_gather b"]),
        (P(P.merged((4, "a"), (6, "b"))), P(P.merged((4, None), (6, "b"))), ["all_gather a"]),
        (P(P.merged((4, "a"), (6, "b"))), P(P.merged((4, "a"), (6, None)), "b"), ["all_to_all b"]),
        (P("a", unreduced={"b"}), P(P.merged((4, "a"), (6, "b"))), ["reduce_scatter b"]),
        (P("a"), P(P.merged((4, "a"), (6, "b"))), []),
        # the part is cut along b before it is summed over a: parts are taken apart again
        (P(unreduced={"a"}), P(P.merged((3, None), (8, ("a", "b")))), ["reduce_scatter a"]),
    ],
    ids=str,
)
def test_a_move_touches_only_the_parts_that_differ(source: P, target: P, collectives: list[str]) -> None:
    steps = reshard_plan.plan((24, 6), (("a", 2), ("b", 2)), source, target)
    assert [f"{s.kind} {','.join(s.axes)}" for s in steps if s.kind not in reshard_plan.LOCAL_KINDS] == collectives


def _on_this_rank(blocks, moves):
    m = vfn.make_mesh((2, 2), ("a", "b"))
    run = lambda source, target: reshard.run(
        blocks[source][mesh.communicator_of(m).ranks[0]],
        (24, 6),
        m,
        reshard_plan.plan((24, 6), axes_items(m), source, target),
        "test",
    )
    x = vfn.shard(torch.arange(24.0).view(4, 6), m, P("a", "b"))
    return [run(*move) for move in moves], vfn.unshard(x.reshape(24) * 2), str(vfn.spec_of(x.reshape(24)))


def test_moves_on_real_ranks(gloo) -> None:
    with vfn.simulate(4):
        m = vfn.make_mesh((2, 2), ("a", "b"))
        x = torch.arange(24 * 6.0).view(24, 6)
        blocks = {s: placed(x, m, s) for s in LAYOUTS}
        moves = list(itertools.product(LAYOUTS[::3], LAYOUTS[7:]))
        want = [
            reshard.run(Blocks(blocks[s]), (24, 6), m, reshard_plan.plan((24, 6), axes_items(m), s, t), "test")
            for s, t in moves
        ]
    for rank, (found, doubled, said) in enumerate(gloo(4, _on_this_rank, blocks, moves)):
        assert torch.equal(doubled, torch.arange(24.0) * 2)
        assert said == "P(P.merged((4, 'a'), (6, 'b')))"
        for got, one in zip(found, want, strict=True):
            assert torch.equal(got, one.blocks[rank])


# --- ops --------------------------------------------------------------------------------------------------------------

FREE = {  # what works on a merged dim where it lies
    "elementwise": lambda x, y: (x.exp() * 2 + y).relu(),
    "a plain tensor": lambda x, y: x * torch.arange(float(x.shape[0]))[:, None, None],
    "softmax of another dim": lambda x, y: x.softmax(-1),
    "sum of another dim": lambda x, y: x.sum(1),
    "bmm": lambda x, y: x @ y.mT,
    "bmm, then back": lambda x, y: (x @ y.mT).view(*PARTS[x.shape[0]], 5, 5).transpose(1, 2),
    "back in another way": lambda x, y: x.view(2, 12, 5, 3) * 2,
    "merged further": lambda x, y: x.reshape(-1, 3) + y.reshape(-1, 3),
    "matrix": lambda x, y: x.reshape(-1, 3) @ torch.arange(6.0).view(3, 2),
    "transposed": lambda x, y: x.permute(1, 0, 2).exp(),
    "in place": lambda x, y: x.clone().mul_(y),
    "a row of zeros": lambda x, y: torch.zeros_like(x) + x,
    "embedding": lambda x, y: torch.nn.functional.embedding((x[..., 0] * 10).long() % 7, torch.arange(14.0).view(7, 2)),
    "layer norm": lambda x, y: torch.nn.functional.layer_norm(x, (5, 3)),
    "grad": lambda x, y: vfn.grad(lambda x: (x.view(*PARTS[x.shape[0]], 15).tanh().reshape(-1, 5, 3) * y).sum())(x),
}
MOVING = {  # what needs it whole, or otherwise
    "cumsum": lambda x, y: x.cumsum(0),
    "sort": lambda x, y: x.sort(0)[0],
    "a slice": lambda x, y: x[3:17] + 0,
    "flip": lambda x, y: x.flip(0) + y,
    "meets another layout": lambda x, y: x + vfn.with_sharding(y, P("a")),
    "another cut": lambda x, y: x.reshape(3, 8, 15) + 1,
    "written": lambda x, y: vfn.with_sharding(y.clone(), P("b")).copy_(x),
}
SUMS = {  # what adds up what the ranks hold
    "sum": lambda x, y: x.sum(),
    "mean": lambda x, y: (x * y).mean((0, 2)),
    "contraction": lambda x, y: torch.einsum("nij,nik->jk", x, y),
    "max": lambda x, y: x.amax(0),
}
PARTS = {24: (4, 6), 35: (5, 7), 21: (1, 21)}  # split evenly, not evenly, and so that one rank along an axis has all
EVEN = {"back in another way", "another cut"}


def _merged(names: str, parts: tuple[int, int]):
    """Two arrays of shape [n, 5, 3] whose first dim is merged of dims split over a and b, and their whole values."""
    with vfn.simulate(4):
        m = vfn.make_mesh((2, 2), tuple(names))
        wholes = [torch.randn(*parts, 5, 3, generator=torch.Generator().manual_seed(k)) for k in range(2)]
        arrays = [vfn.shard(w, m, P("a", "b")).reshape(-1, 5, 3) for w in wholes]
        assert arrays[0].type_text == f"f32[{parts[0]}@a*{parts[1]}@b,5,3]"
        yield arrays, [w.reshape(-1, 5, 3) for w in wholes]


@pytest.fixture(params=["ab", "ba"])
def merged(request):
    yield from _merged(request.param, PARTS[24])


@pytest.fixture(params=[("ab", 35), ("ba", 35), ("ab", 21)], ids=str)
def uneven(request):
    names, size = request.param
    yield from _merged(names, PARTS[size])


@pytest.mark.parametrize("name", sorted({*FREE, *SUMS, *MOVING} - EVEN))
def test_ops_on_uneven_parts(uneven, name: str) -> None:
    _check_op(*uneven, name)


@pytest.mark.parametrize("name", [*FREE, *SUMS, *MOVING])
def test_ops(merged, name: str) -> None:
    _check_op(*merged, name)


def _check_op(arrays, wholes, name: str) -> None:
    f = {**FREE, **SUMS, **MOVING}[name]
    want = f(*(w.clone() for w in wholes)) if name != "meets another layout" else wholes[0] + wholes[1]
    if name == "written":
        want = wholes[0]
    with vfn.comm_log() as log:
        out = f(*arrays)
    torch.testing.assert_close(vfn.unshard(out), want)
    if name in FREE:
        assert len(log) == 0, log
    elif name in SUMS:
        empty = name == "max" and wholes[0].shape[0] == 21  # of nothing there is no maximum
        assert {r.op for r in log} <= {"all_reduce", *["all_gather"] * empty}, log
    else:
        assert len(log)


VIEWS = {  # shape, spec, views that keep a dim of size 1 split where it is
    "merged with the next": ((1, 5, 4), P("a", "b"), lambda x: x.flatten(0, 1) * 2),
    "merged with the one before": ((5, 1), P("b", "a"), lambda x: x.flatten() * 2),
    "all in one": ((6, 1, 4), P("b", "a"), lambda x: x.flatten() * 2),
    "over two axes": ((1, 6, 4), P(("b", "a")), lambda x: x.view(6, 4).exp()),
    "in another place": ((1, 5, 4), P("a", "b"), lambda x: x.view(5, 1, 4) + 1),
    "beside another": ((1, 5, 4), P("a", "b"), lambda x: x[:, None].view(1, 1, 20)),
    "linear": ((1, 5, 4), P("a", "b"), lambda x: torch.nn.functional.linear(x, torch.arange(12.0).view(3, 4))),
}


@pytest.mark.parametrize("case", VIEWS)
def test_a_dim_of_size_1_that_is_split_is_merged_where_it_is(case) -> None:
    """One rank along its axis has something. Nothing is gathered, forward or backward."""
    shape, spec, f = VIEWS[case]
    loss = lambda x: f(x).square().sum()
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with vfn.simulate(4):
        x = vfn.shard(whole, vfn.make_mesh((2, 2), ("a", "b")), spec)
        with vfn.comm_log() as log:
            torch.testing.assert_close(vfn.unshard(out := f(x)), f(whole))
            g = vfn.grad(loss)(x)
            torch.testing.assert_close(vfn.unshard(g), vfn.grad(loss)(whole))
        torch.testing.assert_close(vfn.unshard(vfn.jit(vfn.grad(loss))(x)), vfn.grad(loss)(whole))
    assert {record.why for record in log if record.op != "all_reduce"} == {"unshard"}
    assert "1@" in str(vfn.typeof(out))
    assert vfn.spec_of(g) == spec


def _one_row(whole):
    x = vfn.shard(whole, vfn.make_mesh((3,), ("a",)), P("a"))
    loss = lambda x: (x.view(5, 4) @ torch.arange(12.0).view(4, 3)).square().sum()
    with vfn.comm_log() as log:
        g = vfn.grad(loss)(x)
    assert not log.count("all_gather")
    return vfn.unshard(g), vfn.unshard(vfn.jit(vfn.grad(loss))(x))


def test_a_dim_of_size_1_on_real_ranks(gloo) -> None:
    whole = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(0))
    want = vfn.grad(lambda x: (x.view(5, 4) @ torch.arange(12.0).view(4, 3)).square().sum())(whole)
    for found in gloo(3, _one_row, whole):
        for one in found:
            torch.testing.assert_close(one, want)


def test_an_array_of_a_merged_dim(merged) -> None:
    """Printing, showing, pickling; and a map over it."""
    (x, _), (whole, _) = merged
    assert repr(x).startswith("Array f32[4@a*6@b,5,3] on mesh")
    assert "f32[4@a*6@b,5,3]  [6, 5, 3]" in repr(vfn.show(x))
    assert "<svg" not in vfn.show(x)._repr_html_()  # blocks of many pieces are not drawn
    again = pickle.loads(pickle.dumps(x))
    assert vfn.spec_of(again) == vfn.spec_of(x)
    assert torch.equal(vfn.unshard(again), whole)
    m = mesh_.root(x._spec.mesh)
    double = vfn.shard_map(lambda x: x * 2, mesh=m, in_specs=vfn.spec_of(x), out_specs=vfn.spec_of(x))
    with vfn.comm_log() as log:
        assert torch.equal(vfn.unshard(double(x).detach()), whole * 2)
    assert [r.why for r in log] == ["unshard"] * 2
    over_rows = vfn.vmap(lambda row: row.sum(0))
    assert torch.allclose(vfn.unshard(over_rows(x)), whole.sum(1))
    with pytest.raises(SpecError, match="blocks are no contiguous parts"):
        x.__create_chunk_list__()
