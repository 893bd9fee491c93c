"""Every layout to every other: right values, forward and backward, by the collectives that it should take.

The oracle places a whole tensor by index maps (`spec.local_indices`, tested against torch and JAX in test_spec.py) and
looks at each rank's block. With ``VFN_TEST_ALL=1`` all pairs run, otherwise a seeded sample of them.
"""

import itertools
import math
import os
import pickle
import random

import pytest
import torch
from test_spec import all_specs

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.arrays import reshard, reshard_plan
from vescale_fn._core.distributed import communicator, mesh
from vescale_fn._core.distributed.blocks import Blocks
from vescale_fn._core.sharding import index_map, spec
from vescale_fn._core.sharding.layout import axes_items

ALL = os.environ.get("VFN_TEST_ALL") == "1"
MESHES = [((4,), "a"), ((2, 3), "ab"), ((3, 2), "ab"), ((1, 4), "ab"), ((2, 2, 2), "abc"), ((2, 1, 3), "abc")]


def shapes(n: int) -> list[tuple[int, ...]]:
    """Sizes k*n, k*n + 1 and k*n - 1; fewer elements than ranks; nothing at all."""
    return [(2 * n, n), (n + 1, 2 * n - 1), (n - 1, n + 1), (1, 2 * n), (3 * n - 1, 2), (0, n)]


def split(x: torch.Tensor, axes: dict[str, int], s: P, coord: dict[str, int]) -> torch.Tensor:
    """The block of `x` that the rank at `coord` holds, were nothing partial."""
    for dim, indices in enumerate(index_map.local_indices(x.shape, axes, s, coord)):
        x = x.index_select(dim, torch.tensor(list(indices), dtype=torch.int64))
    return x


def placed(x: torch.Tensor, m, s: P) -> list[torch.Tensor]:
    """One block a rank; over unreduced axes the true block is cut into random summands."""
    axes = index_map.axes_of(m)
    blocks = [split(x, axes, s, communicator.coordinates(m, r)) for r in range(m.size())]
    for group in communicator.groups(m, [a for a in axes if a in s.unreduced]) if s.unreduced else ():
        parts = [torch.randint(-4, 5, blocks[r].shape).to(x.dtype) for r in group[1:]]
        for r, part in zip(group[1:], parts):
            blocks[group[0]] = blocks[group[0]] - part
            blocks[r] = part
    return blocks


def assert_holds(local: Blocks, x: torch.Tensor, m, s: P) -> None:
    """That these blocks are `x` laid out by `s`: each block, partial ones added up."""
    axes, blocks = index_map.axes_of(m), list(local.blocks)
    for group in communicator.groups(m, [a for a in axes if a in s.unreduced]) if s.unreduced else ():
        total = sum(blocks[r] for r in group)
        for r in group:
            blocks[r] = total
    for r, block in enumerate(blocks):
        wanted = split(x, axes, s, communicator.coordinates(m, r))
        assert block.shape == wanted.shape, f"rank {r}"
        assert torch.equal(block, wanted), f"rank {r}"
        assert block.is_contiguous(), f"rank {r}"


def cases(sizes, names: str, count: int, seed: int) -> list[tuple[tuple[int, ...], P, P]]:
    axes = dict(zip(names, sizes))
    layouts = all_specs(axes, 2, unreduced=True)
    everything = list(itertools.product(shapes(math.prod(sizes)), layouts, layouts))
    return everything if ALL else random.Random(seed).sample(everything, min(count, len(everything)))


@pytest.mark.parametrize(("sizes", "names"), MESHES, ids=str)
def test_forward(sizes, names) -> None:
    with vfn.simulate(math.prod(sizes)):
        m = vfn.make_mesh(sizes, tuple(names))
        for shape, source, target in cases(sizes, names, 120, 1):
            x = torch.arange(math.prod(shape)).view(shape) * 3 + 1
            steps = reshard_plan.plan(shape, axes_items(m), source, target)
            assert (not steps) == (source == target or (1 in sizes and steps == ())), (source, target)
            try:
                assert_holds(reshard.run(Blocks(placed(x, m, source)), shape, m, steps, "test"), x, m, target)
            except Exception as error:
                raise AssertionError(f"{shape}: {source} -> {target} by {[(s.kind, s.axes) for s in steps]}") from error


@pytest.mark.parametrize(("sizes", "names"), MESHES, ids=str)
def test_backward(sizes, names) -> None:
    """The gradient of sum(weights * reshard(x)) is the weights, laid out as x, unreduced and reduced swapped."""
    with vfn.simulate(math.prod(sizes)):
        m = vfn.make_mesh(sizes, tuple(names))
        for shape, source, target in cases(sizes, names, 25, 2):
            whole = (torch.arange(math.prod(shape)).view(shape) * 3 + 1).double()
            weights = (torch.arange(math.prod(shape)).view(shape) % 7 + 0.5).double()
            blocks = placed(whole, m, source)
            x = vfn.from_local(Blocks(blocks), m, source).requires_grad_()
            y = vfn.with_sharding(x, target)
            assert vfn.spec_of(y) == target
            assert torch.equal(vfn.unshard(y), whole), (shape, source, target)
            (g,) = torch.autograd.grad((y * weights).sum(), x)
            assert torch.equal(vfn.unshard(g), weights), (shape, source, target)
            x = vfn.from_local(Blocks(blocks), m, source)
            g = vfn.grad(lambda x: (vfn.with_sharding(x, target) * weights).sum())(x)
            goal = P(*source, reduced=source.unreduced)
            assert vfn.spec_of(g) == goal, (source, target)
            assert torch.equal(vfn.unshard(g), weights), (shape, source, target)


def test_a_cotangent_in_another_layout() -> None:
    """What arrives backward need not lie as the result does."""
    with vfn.simulate(6):
        m = vfn.make_mesh((2, 3), ("a", "b"))
        whole, weights = torch.randn(7, 5).double(), torch.randn(7, 5).double()
        for s, t, u in itertools.product([P(), P("a"), P(("b", "a")), P("b", "a")], repeat=3):
            x = vfn.shard(whole, m, s).requires_grad_()
            y = vfn.with_sharding(x, t)
            (g,) = torch.autograd.grad(y, x, vfn.shard(weights, m, u))
            assert torch.equal(vfn.unshard(g), weights)
            assert vfn.spec_of(g) == (u if s == t else s)  # where nothing moves, nothing is recorded


def test_values_that_travel_together_may_have_blocks_of_other_sizes_on_other_ranks() -> None:
    with vfn.simulate(6):
        m = vfn.make_mesh((2, 3), ("a", "b"))
        whole = {"w": torch.randn(7, 4).double(), "v": torch.randn(6).double(), "u": torch.randn(2, 5).double()}
        weights = {name: torch.randn_like(x) for name, x in whole.items()}
        split = {"w": P("b", "a"), "v": P("a"), "u": P("a", "b")}
        gathered = {"w": P("b"), "v": P(), "u": P(None, "b")}

        parts = {name: P(*spec, unreduced={"a"}) for name, spec in gathered.items()}
        with vfn.comm_log() as log:
            x, pullback = vfn.vjp(lambda x: vfn.with_sharding(x, gathered), vfn.shard(whole, m, split))
            (grads,) = pullback(vfn.shard(weights, m, parts))
        assert [(x.op, x.axis) for x in log] == [("all_gather", "a"), ("reduce_scatter", "a")]
        for name, wanted in weights.items():
            assert torch.equal(vfn.unshard(x[name]), whole[name])
            assert torch.equal(vfn.unshard(grads[name]), wanted)
            assert vfn.spec_of(grads[name]) == split[name]


AXES = (("a", 2), ("b", 2))
KINDS = [
    (P(), P("a"), []),
    (P(), P("a", "b"), []),
    (P(), P(("b", "a")), []),
    (P("a"), P(), ["all_gather a"]),
    (P("a", "b"), P("a"), ["all_gather b"]),
    (P(("a", "b")), P("a"), ["all_gather b"]),
    (P(("a", "b")), P(), ["all_gather a,b"]),
    (P(("b", "a")), P(), ["all_gather b,a"]),
    (P("a"), P(None, "a"), ["all_to_all a"]),
    (P(("a", "b")), P("a", "b"), ["all_to_all b"]),
    (P(("a", "b")), P(None, ("a", "b")), ["all_to_all a,b"]),
    (P(unreduced={"a"}), P("a"), ["reduce_scatter a"]),
    (P("b", unreduced={"a"}), P(("b", "a")), ["reduce_scatter a"]),
    (P(unreduced={"a", "b"}), P(("a", "b")), ["reduce_scatter a,b"]),
    (P(unreduced={"a"}), P(), ["all_reduce a"]),
    (P(unreduced={"a", "b"}), P(), ["all_reduce a,b"]),
    (P(unreduced={"a", "b"}), P(unreduced={"b"}), ["all_reduce a"]),
    (P("a"), P(unreduced={"a"}), []),
    (P(), P(unreduced={"a"}), []),
    (P(), P(unreduced={"a", "b"}), []),
    (P("a", unreduced={"b"}), P("a", unreduced={"b"}), []),
    (P("a", None, unreduced={"b"}), P(None, "a", unreduced={"b"}), ["all_to_all a"]),
    (P("a", "b"), P(unreduced={"a", "b"}), []),
]


@pytest.mark.parametrize(("source", "target", "collectives"), KINDS, ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (7, 9)], ids=str)
def test_collectives(source: P, target: P, collectives: list[str], shape) -> None:
    steps = reshard_plan.plan(shape, AXES, source, target)
    travelling = [f"{s.kind} {','.join(s.axes)}" for s in steps if s.kind not in reshard_plan.LOCAL_KINDS]
    if shape == (8, 8) or ("b", "a") not in (*source, *target):  # uneven blocks nest in the mesh's order only
        assert travelling == collectives


def test_a_plan_is_no_dearer_than_gathering_everything() -> None:
    """Bytes on the busiest step never exceed the whole value, and a slice never follows a gather of the same axes."""
    for axes in [{"a": 4}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2}]:
        layouts = all_specs(axes, 2, unreduced=True)
        for source, target in (
            itertools.product(layouts, layouts) if len(axes) < 3 or ALL else zip(layouts, layouts[7:])
        ):
            steps = reshard_plan.plan((12, 12), tuple(axes.items()), source, target)
            assert len([s for s in steps if s.kind == "all_reduce"]) <= 1, (source, target)
            if not source.unreduced:
                assert all(s.kind not in ("all_reduce", "reduce_scatter") for s in steps), (source, target)


def test_size_one_axes_move_nothing() -> None:
    with vfn.simulate(1):
        m = vfn.make_mesh((1, 1), ("a", "b"))
        x = torch.arange(6.0).view(2, 3)
        with vfn.comm_log() as log:
            for s, t in itertools.product(all_specs({"a": 1, "b": 1}, 2, unreduced=True), repeat=2):
                y = vfn.with_sharding(vfn.shard(x, m, s), t)
                assert torch.equal(vfn.unshard(y), x)
                assert vfn.spec_of(y) == t
        assert len(log) == 0


def test_three_dims_and_zero_dims() -> None:
    with vfn.simulate(6):
        m = vfn.make_mesh((2, 3), ("a", "b"))
        x = torch.arange(3 * 4 * 5).view(3, 4, 5)
        layouts = all_specs({"a": 2, "b": 3}, 3, unreduced=True)
        for s, t in random.Random(3).sample(list(itertools.product(layouts, layouts)), 60):
            assert_holds(vfn.with_sharding(vfn.shard(x, m, s), t).to_local(), x, m, t)
        zero = torch.tensor(5)
        for s, t in itertools.product(all_specs({"a": 2, "b": 3}, 0, unreduced=True), repeat=2):
            y = vfn.with_sharding(vfn.shard(zero, m, s), t)
            assert vfn.unshard(y).item() == 5
            assert vfn.spec_of(y) == t


# --- real ranks -------------------------------------------------------------------------------------------------------


SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}  # torch cannot pickle these


def _on_this_rank(sizes, names, todo):
    m = vfn.make_mesh(sizes, tuple(names))
    me, outs = mesh.communicator_of(m).ranks[0], []
    for shape, dtype, source, target, blocks in todo:
        steps = reshard_plan.plan(shape, axes_items(m), source, target)
        out = reshard.run(blocks[me].view(dtype), shape, m, steps, "test")
        assert out.dtype == dtype
        outs.append(out.view(SIGNED.get(dtype, dtype)))
    return outs


EXACT = [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
MOVED = [*EXACT, torch.bool, torch.uint16, torch.uint32, torch.uint64]  # what is moved but not added up


@pytest.mark.parametrize(("sizes", "names"), [((4,), "a"), ((2, 2), "ab"), ((2, 3), "ab")], ids=str)
def test_real_ranks_hold_what_simulated_ranks_hold(gloo, sizes, names) -> None:
    """Bit for bit, in every dtype: the values are small integers, so that sums are exact in any order."""
    draw = random.Random(5)
    layouts = all_specs(dict(zip(names, sizes)), 2, unreduced=True)
    with vfn.simulate(math.prod(sizes)):
        m = vfn.make_mesh(sizes, tuple(names))
        todo, expected = [], []
        for i in range(90):
            shape = draw.choice(shapes(math.prod(sizes))[:5])
            source, target = draw.choice(layouts), draw.choice(layouts)
            adds = source.unreduced or target.unreduced
            dtype = (EXACT if adds else MOVED)[i % len(EXACT if adds else MOVED)]
            x = (torch.arange(math.prod(shape)).view(shape) % 11).to(dtype)
            blocks = placed(x, m, source)
            steps = reshard_plan.plan(shape, axes_items(m), source, target)
            expected.append(reshard.run(Blocks(blocks), shape, m, steps, "test").blocks)
            todo.append((shape, dtype, source, target, [b.view(SIGNED.get(dtype, dtype)) for b in blocks]))
    got = gloo(math.prod(sizes), _on_this_rank, sizes, names, todo)
    for rank, outs in enumerate(got):
        for (shape, dtype, source, target, _), out, blocks in zip(todo, outs, expected):
            where = f"rank {rank}: {shape} {dtype} {source} -> {target}"
            assert out.shape == blocks[rank].shape, where
            assert torch.equal(out.view(dtype), blocks[rank]), where


def _back_and_forth(sizes, names, todo):
    m = vfn.make_mesh(sizes, tuple(names))
    for shape, source, target in todo:
        whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
        weights = whole % 5 + 0.5
        with vfn.comm_log() as log:
            x = vfn.shard(whole, m, source).requires_grad_()
        if len(log):
            return f"{shape} {source}: shard moved something"
        g = vfn.grad(lambda x: (vfn.with_sharding(x, target) * weights).sum())(x.detach())
        y = vfn.with_sharding(x, target)
        if not (torch.equal(vfn.unshard(y), whole) and torch.equal(vfn.unshard(g), weights)):
            return f"{shape} {source} -> {target}"
        if vfn.spec_of(g) != spec.from_split_axes(spec.split_axes(source, 2), reduced=source.unreduced):
            return f"layout {vfn.spec_of(g)} of {source} -> {target}"
    return "right"


@pytest.mark.parametrize(("sizes", "names"), [((4,), "a"), ((2, 3), "ab")], ids=str)
def test_backward_on_real_ranks(gloo, sizes, names) -> None:
    assert set(gloo(math.prod(sizes), _back_and_forth, sizes, names, cases(sizes, names, 20, 7)[:200])) == {"right"}


def test_sums_are_cut_before_they_are_scattered() -> None:
    """Of what is the same along an axis that splits the result inside of another, a rank adds up its own part alone."""
    with vfn.simulate(6):
        mesh, x = vfn.make_mesh((2, 3), ("a", "b")), torch.arange(72.0).view(12, 6)
        for target in (P(("a", "b")), P(None, ("a", "b")), P(("b", "a"))):
            parts = vfn.shard(x, mesh, P(unreduced={"a"}))
            with vfn.comm_log() as log:
                y = vfn.with_sharding(parts, target)
            assert torch.equal(vfn.unshard(y), x)
            assert [(one.op, one.axes, one.bytes) for one in log] == [("reduce_scatter", ("a",), x.nbytes // 3)]
        uneven = vfn.with_sharding(vfn.shard(x[:7], mesh, P(unreduced={"a"})), P(("a", "b")))
        assert torch.equal(vfn.unshard(uneven), x[:7])


def test_the_gradient_of_a_slice_of_all_gathers_nothing() -> None:
    x = torch.arange(10.0).view(5, 2)
    with vfn.simulate(2):
        y = vfn.shard(x, vfn.make_mesh((2,), ("a",)), P("a"))
        with vfn.comm_log() as log:
            g = vfn.grad(lambda y: (y[:5] * y).sum())(y)
        assert torch.equal(vfn.unshard(g), 2 * x)
        assert log.count("all_gather") == 0


def test_axes_of_size_1_stay_in_the_order_that_was_written() -> None:
    """As in JAX, where a layout is stated; among orders nothing moves. A plan gives what the function gives without it."""

    def repeated(x: torch.Tensor):
        return vfn.scan(lambda y, _: (y * 2, y * 3), x, None, length=2)

    orders = [P(("u", "a")), P(("a", "u")), P(("v", "u")), P(("b", "u", "a")), P(("u", "v"), ("b", "a"))]
    with vfn.simulate(4):
        mesh, x = vfn.make_mesh((2, 1, 2, 1), tuple("aubv")), torch.arange(32.0).view(8, 4)
        traced, recorded = [], vfn.jit(lambda y: traced.append(y) or y * 2)
        for spec in orders:
            y = vfn.shard(x, mesh, spec)
            assert vfn.spec_of(y) == vfn.spec_of(pickle.loads(pickle.dumps(y))) == spec
            assert vfn.spec_of(vfn.with_sharding(vfn.shard(x, mesh, P()), spec)) == spec
            assert vfn.spec_of(vfn.jit(lambda y: vfn.with_sharding(y * 2, spec))(y)) == spec
            assert vfn.spec_of(vfn.grad(lambda y: (y * y).sum())(y)) == spec
            assert vfn.spec_of(vfn.jit(vfn.grad(lambda y: (y * y).sum()))(y)) == spec
            assert vfn.spec_of(vfn.eval_shape(lambda y: vfn.with_sharding(y * 2, vfn.spec_of(y)), y)) == spec
            for loop in (repeated, vfn.jit(repeated)):
                carry, each = loop(y)
                assert vfn.spec_of(carry) == spec
                assert vfn.spec_of(each) == P(None, *vfn.spec_of(y * 3))
            body = vfn.shard_map(lambda block: block + 1, mesh=mesh, in_specs=spec, out_specs=spec)
            assert vfn.spec_of(body(y)) == spec
            assert torch.equal(vfn.unshard(recorded(y)), x * 2)
        with vfn.comm_log() as log, vfn.strict():
            one, other = (vfn.shard(x, mesh, spec) for spec in orders[:2])
            assert vfn.spec_of(vfn.with_sharding(one, orders[1])) == orders[1]
            assert vfn.spec_of(vfn.with_sharding(other, orders[0])) == orders[0]
            assert vfn.spec_of(one + other) == vfn.spec_of(other + one) == orders[1]
        assert len(log) == 0
    assert len(traced) == 5
