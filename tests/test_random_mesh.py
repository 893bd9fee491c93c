"""Draws on a mesh, in the global and in the local view, and under transforms: always the numbers of one device."""

import itertools
import math
import warnings

import pytest
import torch
from distributions import same_keys
from test_random_sharded import specs
from torch.fx.experimental.proxy_tensor import make_fx

import vescale_fn as vfn
from vescale_fn import P, random
from vescale_fn.errors import SpecError
from vescale_fn.random import dropout_masks, sharded
from vescale_fn.random.backends import draw_op
from vescale_fn.random.generators import floats

KEY = random.key(5)
MESHES = [((1,), "a"), ((4,), "a"), ((2, 3), "ab"), ((2, 2, 2), "abc")]
DRAWS = {
    "normal": lambda shape, **where: random.normal(KEY, shape, **where),
    "complex": lambda shape, **where: random.normal(KEY, shape, torch.complex64, **where),
    "uniform": lambda shape, **where: random.uniform(KEY, shape, torch.bfloat16, -1, 3, **where),
    "uniform, tensors": lambda shape, **where: random.uniform(
        KEY, shape, minval=torch.tensor(0.1), maxval=2.0, **where
    ),
    "bits": lambda shape, **where: random.bits(KEY, shape, torch.uint8, **where),
    "randint": lambda shape, **where: random.randint(KEY, shape, -5, 1000, torch.int64, **where),
    "randint, tensors": lambda shape, **where: random.randint(KEY, shape, 0, torch.tensor(77), **where),
    "bernoulli": lambda shape, **where: random.bernoulli(KEY, 0.3, shape, **where),
    "bernoulli, high": lambda shape, **where: random.bernoulli(KEY, torch.tensor(0.3), shape, "high", **where),
}


@pytest.mark.parametrize(("sizes", "names"), MESHES, ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_with_a_spec_is_the_whole_draw(name: str, sizes: tuple[int, ...], names: str) -> None:
    # the blocks of every kind and spec are tested without a mesh
    every = (3 if len(sizes) == 3 else 1) if name == "normal" else 13
    with vfn.simulate(math.prod(sizes)):
        mesh = vfn.make_mesh(sizes, tuple(names))
        for shape in ((), (13,), (7, 10), (0, 2)):
            whole = DRAWS[name](shape)
            for spec in specs(list(names), len(shape))[::every]:
                with vfn.comm_log() as log:
                    drawn = DRAWS[name](shape, spec=spec, mesh=mesh)
                assert (isinstance(drawn, vfn.Array), len(log), drawn.dtype) == (True, 0, whole.dtype)
                assert torch.equal(vfn.unshard(drawn), whole), (spec, shape)


def test_where_a_draw_lies() -> None:
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        assert type(random.normal(KEY, (6,))) is torch.Tensor
        assert vfn.spec_of(random.normal(KEY, (6,), mesh=mesh)) == P()
        with vfn.use_mesh(mesh):
            drawn = random.normal(KEY, (12, 5), spec=P(("b", "a")))
            assert vfn.spec_of(drawn) == P(("b", "a"))
            assert [tuple(block.shape) for block in drawn.to_local().blocks] == [(2, 5)] * 6
            assert type(random.normal(KEY, (6,))) is torch.Tensor
        with pytest.raises(SpecError, match=r"axis 'c' \(dim 0\) is not an axis of the mesh \(a=2, b=3\)"):
            random.normal(KEY, (6,), spec=P("c"), mesh=mesh)
        with pytest.raises(SpecError, match="axis 'a' is used twice"):
            random.bits(KEY, (6, 6), spec=P("a", "a"), mesh=mesh)
        with pytest.raises(SpecError, match="it has 2 entries, but the value has 1 dim"):
            random.randint(KEY, (6,), 0, 2, spec=P("a", "b"), mesh=mesh)


def test_dropout_lies_as_its_value() -> None:
    x = torch.linspace(-1, 1, 13 * 10).view(13, 10)
    expected, loss = random.dropout(KEY, x, 0.4), lambda x: (random.dropout(KEY, x, 0.4) ** 2).sum()
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        for spec in (P("a", "b"), P(), P(("b", "a")), P(None, ("a", "b"))):
            xs = vfn.shard(x, mesh, spec)
            with vfn.comm_log() as log, vfn.strict():
                dropped = random.dropout(KEY, xs, 0.4)
            assert (vfn.spec_of(dropped), len(log)) == (spec, 0)
            assert torch.equal(vfn.unshard(dropped), expected)
            for grad in (vfn.grad, torch.func.grad):
                assert torch.equal(vfn.unshard(grad(loss)(xs)), torch.func.grad(loss)(x))
            assert torch.equal(vfn.unshard(random.dropout(KEY, xs, 1)), torch.zeros_like(x))


def test_each_rank_draws_only_its_own_block(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = [], draw_op.draw

    def counted(key, what, rectangle, device):
        drawn.append(math.prod(rectangle.local))
        return draw(key, what, rectangle, device)

    def masked(key, rectangle, x, keep):
        drawn.append(x.numel())
        return run(key, rectangle, x, keep)

    run = dropout_masks._run
    monkeypatch.setattr(draw_op, "draw", counted)
    monkeypatch.setattr(dropout_masks, "_run", masked)
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        for spec, sizes in ((P("a", "b"), [28, 28, 14, 24, 24, 12]), (P("b"), [50, 50, 30]), (P(), [130])):
            drawn.clear()
            random.normal(KEY, (13, 10), spec=spec, mesh=mesh)
            assert drawn == sizes
            drawn.clear()
            random.dropout(KEY, vfn.shard(torch.ones(13, 10), mesh, spec), 0.5)
            assert drawn == sizes
        body = lambda k: random.normal(k, (12, 9), spec=P("b", "a"))
        drawn.clear()
        with pytest.raises(SpecError, match="9 % 2 = 1"):
            vfn.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("b", "a"))(KEY)
        assert drawn == []


def test_a_second_draw_of_a_shape_and_a_layout_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        draws = [
            lambda: random.normal(KEY, (5, 3), spec=P("a", "b"), mesh=mesh),
            lambda: random.gamma(KEY, 2.0, (5, 3), spec=P("b"), mesh=mesh),
            lambda: random.dropout(KEY, vfn.shard(torch.ones(5, 3), mesh, P(("a", "b"))), 0.5),
        ]
        first = [vfn.unshard(draw()) for draw in draws]
        monkeypatch.setattr(sharded, "local_indices", None)
        monkeypatch.setattr(sharded, "validate", None)
        assert all(torch.equal(vfn.unshard(draw()), before) for draw, before in zip(draws, first))
        whole = random.normal(KEY, (5, 3))
        assert torch.equal(first[0], whole)


def test_keys_as_arrays() -> None:
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        key = vfn.shard(KEY, mesh, P())
        with vfn.strict():
            children, folded = random.split(key, 3), random.fold_in(key, 7)
            drawn = random.normal(folded, (4, 6), spec=P("a", "b"), mesh=mesh)
        assert same_keys(vfn.unshard(children), random.split(KEY, 3))
        assert vfn.unshard(folded) == random.fold_in(KEY, 7)
        assert torch.equal(vfn.unshard(random.key_data(key)), random.key_data(KEY))
        assert torch.equal(vfn.unshard(drawn), random.normal(random.fold_in(KEY, 7), (4, 6)))
        assert torch.equal(vfn.unshard(random.normal(key, (5,))), random.normal(KEY, (5,)))
        first, *_ = children
        assert vfn.unshard(first) == random.split(KEY, 3)[0]
        sharded = vfn.shard(random.split(KEY, 4), mesh, P("a"))
        assert same_keys(vfn.unshard(sharded), random.split(KEY, 4))
        assert vfn.spec_of(sharded == key) == P("a")
        assert vfn.unshard(sharded == random.split(KEY, 4)[2]).tolist() == [False, False, True, False]


# Inside a body


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_draws_in_a_body(check: bool) -> None:
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))

        def mapped(f, in_specs, out_specs):
            return vfn.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)

        whole = random.normal(KEY, (12, 12))
        for spec in (P("a", "b"), P("b"), P(None, ("b", "a")), P(("a", "b")), P()):
            f = lambda k, spec=spec: random.normal(k, (12, 12), spec=spec)
            assert torch.equal(vfn.unshard(mapped(f, P(), spec)(KEY)), whole)
            assert torch.equal(vfn.unshard(mapped(lambda f=f: f(KEY), (), spec)()), whole)

        same = mapped(lambda k: random.normal(k, (4,)), P(), P())(KEY)  # typed the same on all ranks
        assert torch.equal(vfn.unshard(same), random.normal(KEY, (4,)))

        folded = mapped(lambda k: random.normal(random.fold_in(k, vfn.axis_index("b")), (4,)), P(), P("b"))(KEY)
        assert torch.equal(
            vfn.unshard(folded), torch.cat([random.normal(random.fold_in(KEY, i), (4,)) for i in range(3)])
        )

        keys = random.split(KEY, 3)
        own = mapped(lambda k: random.normal(random.split(k[0])[1], (4, 12), spec=P(None, "a")), P("b"), P("b", "a"))(
            keys
        )
        assert torch.equal(vfn.unshard(own), torch.cat([random.normal(random.split(k)[1], (4, 12)) for k in keys]))

        many = torch.func.vmap(lambda k: random.normal(k, (4, 12), spec=P(None, "a")))
        batch = mapped(lambda k: many(random.split(k, 3)), P(), P(None, None, "a"))(KEY)
        assert torch.equal(vfn.unshard(batch), torch.stack([random.normal(k, (4, 12)) for k in keys]))

        def written(k, x):
            noise = random.normal(k, (3,))
            noise += x
            return noise

        x = torch.arange(9.0)
        total = mapped(written, (P(), P("b")), P("b"))(KEY, x)
        torch.testing.assert_close(vfn.unshard(total), random.normal(KEY, (3,)).repeat(3) + x)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_gradients_through_draws_in_a_body(check: bool) -> None:
    x, w = torch.arange(9.0), torch.tensor([0.5, 0.25, 0.125])

    def block(key, x, w):
        return (random.dropout(key, x * w, 0.5) * random.uniform(KEY, (3,), minval=w[0], maxval=2.0)).sum()

    expected = vfn.grad(lambda w: sum(block(random.fold_in(KEY, i), x[3 * i : 3 * i + 3], w) for i in range(3)))(w)
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        body = lambda x, w: vfn.psum(block(random.fold_in(KEY, vfn.axis_index("b")), x, w), "b")
        loss = vfn.shard_map(body, mesh=mesh, in_specs=(P("b"), P()), out_specs=P(), check_vma=check)
        torch.testing.assert_close(vfn.unshard(vfn.grad(lambda w: loss(x, w))(w)), expected)


def test_a_whole_draw_in_a_body_is_invariant() -> None:
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("a",))
        body = vfn.shard_map(lambda: vfn.psum(random.normal(KEY, (3,)), "a"), mesh=mesh, in_specs=(), out_specs=P())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            total = body()
        assert len(caught) == 1  # a sum of what is the same everywhere
        torch.testing.assert_close(vfn.unshard(total), 4 * random.normal(KEY, (3,)))


def test_a_spec_that_does_not_fit_in_a_body() -> None:
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        body = vfn.shard_map(lambda k: random.normal(k, (5,), spec=P("a")), mesh=mesh, in_specs=P(), out_specs=P("a"))
        with pytest.raises(SpecError) as error:
            body(KEY)
        assert str(error.value) == (
            "random.normal: the spec P('a') does not fit a draw of shape (5,) inside a shard_map body on the mesh "
            "(a=2, b=3)\n"
            "  * dim 0 of size 5 is split 2 times by ('a',), and 5 % 2 = 1\n"
            "  Instead: sizes that the axes divide; outside of bodies any size will do"
        )


# Transforms


def test_vmap_over_keys_is_a_loop() -> None:
    keys, x = random.split(KEY, 3), torch.ones(4, 5)
    programs = {
        "normal": lambda k: random.normal(k, (7,)),
        "randint": lambda k: random.randint(k, (3,), 0, torch.tensor(10)),
        "split": lambda k: random.split(k, 40).data,
        "fold_in": lambda k: random.fold_in(k, 3).data,
        "dropout": lambda k: random.dropout(k, x, 0.5),
        "high": lambda k: random.bernoulli(k, 0.01, (2, 2), "high"),
    }
    for vmap in (vfn.vmap, torch.func.vmap):
        for name, program in programs.items():
            assert torch.equal(vmap(program)(keys), torch.stack([program(key) for key in keys])), name
    both = torch.func.vmap(lambda i: torch.func.vmap(lambda k: random.fold_in(k, i))(keys))(torch.arange(5))
    assert both[3, 2] == random.fold_in(keys[2], 3)
    both = torch.func.vmap(lambda k: torch.func.vmap(lambda i: random.fold_in(k, i))(torch.arange(5)))(keys)
    assert both[2, 3] == random.fold_in(keys[2], 3)


def test_vmap_of_draws_on_a_mesh() -> None:
    keys, x = random.split(KEY, 3), torch.arange(40.0).view(4, 10)
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        drawn = torch.func.vmap(lambda k: random.normal(k, (7, 5), spec=P("a", "b"), mesh=mesh))(keys)
        assert vfn.spec_of(drawn) == P(None, "a", "b")
        assert torch.equal(vfn.unshard(drawn), torch.stack([random.normal(k, (7, 5)) for k in keys]))
        xs = vfn.shard(x, mesh, P("a", "b"))
        dropped = torch.func.vmap(lambda k: random.dropout(k, xs, 0.4))(keys)
        assert torch.equal(vfn.unshard(dropped), torch.stack([random.dropout(k, x, 0.4) for k in keys]))
        rows = torch.func.vmap(lambda row: random.dropout(KEY, row, 0.4))(xs)
        assert torch.equal(vfn.unshard(rows), torch.stack([random.dropout(KEY, row, 0.4) for row in x]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, on its first jvp
def test_gradients_through_bounds() -> None:
    low, high = torch.tensor([0.1, 0.2, 0.3]), torch.tensor(2.0)
    unit = random.uniform(KEY, (4, 3))
    f = lambda low, high: random.uniform(KEY, (4, 3), minval=low, maxval=high)
    expected = (1 - unit).sum(0), unit.sum()
    for grad in (vfn.grad, torch.func.grad):
        for got, want in zip(grad(lambda *bounds: f(*bounds).sum(), (0, 1))(low, high), expected, strict=True):
            torch.testing.assert_close(got, want)
    assert torch.equal(
        f(low, high),
        torch.stack([random.uniform(KEY, (4, 3), minval=x, maxval=2.0)[:, i] for i, x in enumerate(low.tolist())], 1),
    )
    torch.testing.assert_close(torch.func.jvp(f, (low, high), (low, high))[1], low * (1 - unit) + high * unit)
    torch.testing.assert_close(torch.func.jacrev(f, 1)(low, high), unit)
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("a", "b"))
        g = vfn.grad(
            lambda low: random.uniform(KEY, (4, 3), minval=low, maxval=2.0, spec=P("a", "b"), mesh=mesh).sum()
        )(low)
        torch.testing.assert_close(vfn.unshard(g), expected[0])


def test_gradients_through_bounds_without_fused_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    f = lambda low: random.uniform(KEY, (50,), minval=low, maxval=2.0)
    low = torch.tensor(0.3)
    value, slope = f(low), torch.func.jacrev(f)(low)
    monkeypatch.setattr(floats, "addcmul_is_fused", lambda device, dtype: False)
    assert torch.equal(f(low), value)
    torch.testing.assert_close(torch.func.jacrev(f)(low), slope)


def test_recomputation_draws_the_same_mask() -> None:
    x = torch.linspace(-1, 1, 50)
    f = lambda x: (random.dropout(KEY, torch.sin(x), 0.5) ** 2).sum()
    assert torch.equal(vfn.grad(vfn.remat(f))(x), vfn.grad(f)(x))


def test_a_tracer_sees_one_node_a_draw() -> None:
    graph = make_fx(lambda data: random.normal(random.split(random.Key(data))[0], (4,)))(KEY.data)
    ours = [str(node.target) for node in graph.graph.nodes if "vescale_fn" in str(node.target)]
    assert ours == ["vescale_fn.split.default", "vescale_fn.draw.default"]
    other = random.key(6)
    assert torch.equal(graph(other.data), random.normal(random.split(other)[0], (4,)))


def test_the_operators_keep_their_promises() -> None:
    cpu = torch.device("cpu")
    ops = torch.ops.vescale_fn
    where = torch.tensor([[0, 1, 2], [1, 0, 1], [1, 3, 1]])
    torch.library.opcheck(ops.draw.default, (KEY.data, None, (4,), (4,), "normal", (), torch.float32, cpu))
    torch.library.opcheck(
        ops.draw.default, (random.split(KEY, 3).data, where, (4, 5), (2, 2), "bernoulli", (0.5,), torch.float32, cpu)
    )
    torch.library.opcheck(ops.split.default, (KEY.data, 3))
    torch.library.opcheck(ops.fold_in.default, (KEY.data, torch.tensor(3)))


# Real ranks


def _on_ranks(shape, names, cases):
    mesh = vfn.make_mesh(shape, names)
    found = []
    for size, spec in cases:
        drawn = random.normal(KEY, size, spec=spec, mesh=mesh)
        found.append((drawn.to_local().shape, vfn.unshard(drawn)))
    body = lambda k: random.normal(random.fold_in(k, vfn.axis_index("b")), (4, 2), spec=P("a"))
    folded = vfn.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("a", "b"))(KEY)
    x = vfn.shard(torch.arange(35.0).view(7, 5), mesh, P(("b", "a")))
    body = lambda w: vfn.psum((w * random.normal(KEY, (6,), spec=P("a"))).sum(), "a")  # the block varies, w does not
    slope = vfn.grad(vfn.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P()))(torch.tensor(1.0))
    return found, vfn.unshard(folded), vfn.unshard(random.dropout(KEY, x, 0.3)), vfn.unshard(slope)


def test_draws_on_real_ranks(gloo) -> None:
    cases = [(size, spec) for size, spec in itertools.product([(7, 5), (12, 4)], specs(["a", "b"], 2)[::3])]
    for rank, (found, folded, dropped, slope) in enumerate(gloo(4, _on_ranks, (2, 2), ("a", "b"), cases)):
        for (size, spec), (block, whole) in zip(cases, found, strict=True):
            assert torch.equal(whole, random.normal(KEY, size)), (rank, spec)
            assert block.numel() <= torch.Size(size).numel()
        expected = torch.cat([random.normal(random.fold_in(KEY, i), (4, 2)) for i in range(2)], 1)
        assert torch.equal(folded, expected)
        assert torch.equal(dropped, random.dropout(KEY, torch.arange(35.0).view(7, 5), 0.3))
        torch.testing.assert_close(slope, random.normal(KEY, (6,)).sum())
