"""Simulated ranks that do the same go through the passes as one, and what they give is what each gave alone."""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn._core.base import tree
from vescale_fn.plan import plan
from vescale_fn.plan.ir import rank_runs
from vescale_fn.plan.ir.graph import copied, name_of
from vescale_fn.plan.ir.per_rank import PerRank, RanksDiffer, of_rank
from vescale_fn.plan.ir.ranks_as_one import folded
from vescale_fn.plan.tracing import recorder


def gradients(w, x):
    return vfn.value_and_grad(lambda w, x: (F.layer_norm(torch.relu(x @ w["a"]) @ w["b"], (6,)) * x).square().mean())(
        w, x
    )


def in_a_body(w, x):
    def body(w, x):
        i = vfn.axis_index("dp")
        mask = torch.arange(x.shape[0]) + i * x.shape[0]
        y = x * mask[:, None] + torch.zeros(x.shape[0], 6)
        return vfn.psum(y @ w["a"], "dp"), vfn.all_gather(y, "dp"), vfn.ppermute(x, "dp", [(0, 1), (1, 0)])

    return vfn.shard_map(body, in_specs=(P(), P("dp")), out_specs=(P(), P("dp"), P("dp")))(w, x)


def moved(w, x):
    whole = vfn.with_sharding(x * 2, P())
    return vfn.with_sharding(whole.sin(), P(None, "tp")), vfn.with_sharding(x, P("tp", "dp")), torch.zeros_like(x) + 1


def drawn(w, x):
    return vfn.random.normal(vfn.random.key(1), tuple(x.shape)) + vfn.random.dropout(vfn.random.key(2), x, 0.5)


def updated(w, x):
    opt = vfn.optim.adamw(1e-2)
    updates, state = opt.update(gradients(w, x)[1], opt.init(w), w)
    return vfn.optim.apply_updates(w, updates), state


SPECS = {
    "replicated": P(),
    "columns": P(None, "tp"),
    "rows": P("tp"),
    "both": P("dp", "tp"),
    "one dim": P(("dp", "tp")),
}


def given(mesh, spec):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    whole = {"a": draw(6, 12), "b": draw(12, 6)}, draw(12, 6)
    return whole, (vfn.shard(whole[0], mesh, {"a": spec, "b": P("tp")}), vfn.shard(whole[1], mesh, P("dp")))


def each_by_itself():
    """Simulated ranks are recorded each by itself."""
    return mock.patch.object(recorder, "RankRows", return_value=None)


def text(graph):
    """The calls of a graph without their names, and how their results lie."""
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    lies = lambda x: (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else None
    told = lambda node: torch.fx.map_arg((node.args, node.kwargs), lambda x: f"%{numbers[x]}")
    return [
        (node.op, getattr(node.target, "__name__", ""), repr(told(node)), lies(node.meta["val"]))
        for node in graph.nodes
    ]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("f", [gradients, in_a_body, moved, drawn, updated], ids=lambda f: f.__name__)
def test_the_values_of_one_device(f, spec):
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("dp", "tp"))
        with vfn.use_mesh(mesh):
            whole, args = given(mesh, SPECS[spec])
            jitted, alone = vfn.jit(f), vfn.jit(f)
            for _ in range(2):
                found = jitted(*args)
                with each_by_itself():
                    wanted = alone(*args)
                for x, y in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
                    assert torch.equal(vfn.unshard(x), vfn.unshard(y))
                    assert vfn.spec_of(x) == vfn.spec_of(y)
            if f is not drawn:  # which passes do not take for one
                assert text(jitted.lower(*args).graph) == text(alone.lower(*args).graph)
    if f is not in_a_body:
        for x, y in zip(tree.leaves(found), tree.leaves(f(*whole)), strict=True):
            torch.testing.assert_close(vfn.unshard(x), y, rtol=1e-10, atol=1e-12)


def recorded(f, shape=(4,), specs=P("dp")):
    """The recording of a function of one array on simulated ranks, each by itself."""
    with vfn.simulate(shape[0]), each_by_itself():
        x = vfn.shard(torch.arange(24.0).view(8, 3)[: shape[-1] * 2], vfn.make_mesh(shape[0], "dp"), specs)
        return vfn.jit(f, passes=()).lower(x).recorded.graph


def test_passes_see_as_many_calls_however_many_ranks_there_are():
    count = {len(folded(recorded(lambda x: (x.sin() * 2).sum(0), (n,))).graph.nodes) for n in (2, 4)}
    assert len(count) == 1


def test_behind_a_sum_the_shape_alone_of_what_each_rank_has_is_looked_at():
    f = lambda x: vfn.with_sharding((x * 2).sum() * 1.0, P()) + (x * 2).new_ones(())
    with vfn.simulate(2):
        x = vfn.shard(torch.arange(4.0), vfn.make_mesh(2, "dp"), P("dp"))
        assert vfn.unshard(vfn.jit(f)(x)) == 13


def test_what_all_ranks_hold_is_computed_once():
    ranks = folded(recorded(lambda x: vfn.with_sharding(x, P()).exp().sin()))
    assert str(ranks.written_out(copied(ranks.graph))).count("sin.default") == 1


@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (lambda x: x.sum(0) + 1, (4, 3)),  # 6 rows on 4 ranks
        (lambda x: vfn.debug_print("{x}", x=x) or x, (4, 4)),
    ],
    ids=["uneven", "printed"],
)
def test_ranks_that_do_not_do_the_same(f, shape):
    with pytest.raises(RanksDiffer):
        folded(recorded(f, shape))


def test_a_number_of_each_rank():
    x = PerRank((0, 4, 8))
    assert (x + 1, 2 * x, 9 - x) == (PerRank((1, 5, 9)), PerRank((0, 8, 16)), PerRank((9, 5, 1)))
    assert (x // 4, x % 3) == (PerRank((0, 1, 2)), PerRank((0, 1, 2)))
    assert x >= 0
    assert 0 <= x
    assert not x > 8
    assert max(x, 0) is x
    assert min(x, 9) is x
    assert x != 0
    assert x == PerRank((0, 4, 8))
    assert len({x, PerRank((0, 4, 8)), PerRank((0, 4, 9))}) == 2
    assert repr(x) == "PerRank(0, 4, 8)"
    assert bool(x)
    assert of_rank([x, (x + 1, 3)], 2) == [8, (9, 3)]
    for compare in (lambda: x < 4, lambda: x > 0, lambda: 4 <= x):
        with pytest.raises(RanksDiffer):
            compare()


def recorded_once(f, *args, donated=()):
    """What a function gives that is recorded once, which must be what it gives where each rank is recorded by itself."""
    calls = []

    def counted(*args):
        calls.append(args)
        return f(*args)

    copies = lambda: tuple(vfn.tree.map(torch.clone, x) if i in donated else x for i, x in enumerate(args))
    jitted, alone = vfn.jit(counted, donate_argnums=donated), vfn.jit(f, donate_argnums=donated)
    for _ in range(2):
        found = jitted(*copies())
        with each_by_itself(), mock.patch.object(plan, "folded", side_effect=RanksDiffer):
            wanted = alone(*copies())
        for x, y in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
            assert torch.equal(vfn.unshard(x), vfn.unshard(y))
            assert (x.dtype, x.stride(), vfn.spec_of(x)) == (y.dtype, y.stride(), vfn.spec_of(y))
    assert len(calls) == 1
    assert plan_of(jitted)._ranks is not None
    travels = lambda jitted: Counter((c.op, c.axes, c.bytes) for c in jitted.lower(*args).comms())
    assert travels(jitted) <= travels(alone)
    return found


def test_what_the_first_ranks_do_and_others_do_not():
    """A bias on a sum in parts is kept by one rank alone. What an array outside has come to know is of no recording."""
    x, b = torch.arange(24.0).view(8, 3), torch.tensor([-0.0, torch.inf, 2.0])
    with vfn.simulate(4):
        mesh = vfn.make_mesh((2, 2), ("dp", "tp"))
        parts, bias = vfn.shard(x, mesh, P("dp")), vfn.shard(b, mesh, P())
        total = (parts * 2).sum(0)
        kept = lambda x: vfn.with_sharding(x, P(unreduced={"dp", "tp"}))
        f = lambda x, b: (total * total, x.sum(0) + bias, x + parts, kept(b), b, kept(b * 2) * 3, kept(b).view(3, 1))
        found = recorded_once(f, parts, bias)
        for one, wanted in zip(found, ((x * 2).sum(0) ** 2, x.sum(0) + b, x + x, b, b, b * 6, b[:, None]), strict=True):
            assert torch.equal(vfn.unshard(one), wanted)
        assert torch.equal(vfn.unshard(total + total), (x * 4).sum(0))
        recorded_once(lambda x, b: (kept(b) + 1, b * 2), parts, bias, donated=(1,))


def test_numbers_of_each_rank_in_calls_that_share_a_body():
    @vfn.jit
    def layer(w, x, key):
        part = lambda x: x + vfn.axis_index("dp")
        return vfn.random.dropout(key, torch.tanh(x @ w), 0.5) + vfn.shard_map(
            part, in_specs=P("dp"), out_specs=P("dp")
        )(x)

    def f(ws, x):
        keys = vfn.random.split(vfn.random.key(3), 3)
        return vfn.value_and_grad(lambda ws: sum(layer(w, x, key).square().mean() for w, key in zip(ws, keys)))(ws)

    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("dp", "tp"))
        with vfn.use_mesh(mesh):
            ws = [vfn.shard(torch.randn(6, 6), mesh, P(None, "tp")) for _ in range(3)]
            recorded_once(f, ws, vfn.shard(torch.randn(12, 6), mesh, P("dp")))


def test_values_that_a_policy_keeps():
    """What each rank has drawn its own part of is kept of all; not what is written through a view after that."""

    def f(w, x):
        def layer(w, x):
            y = vfn.random.dropout(vfn.random.key(4), torch.tanh(x @ vfn.name(vfn.with_sharding(w, P()), "w")), 0.5)
            z = y * 2
            z.t().add_(1)
            return z.sin() * y

        policy = vfn.remat_policies.save_anything_except_these_names("w")
        return vfn.value_and_grad(lambda w: vfn.remat(layer, policy=policy)(w, x).square().mean())(w)

    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("dp", "tp"))
        for spec in P("dp", "tp"), P(("dp", "tp")):
            w, x = torch.randn(6, 6, dtype=torch.float64), torch.randn(12, 6, dtype=torch.float64)
            found = recorded_once(f, vfn.shard(w, mesh, P("dp")), vfn.shard(x, mesh, spec))
            for one, wanted in zip(tree.leaves(found), tree.leaves(f(w, x)), strict=True):
                torch.testing.assert_close(vfn.unshard(one), wanted, rtol=1e-10, atol=1e-12)


def test_blocks_of_several_sizes_are_recorded_of_each():
    """Whether they are given or come up on the way; what was noted before of all ranks leaves no trace."""

    def f(x, y):
        spread = vfn.with_sharding(vfn.random.normal(vfn.random.key(1), (7, 6)) + x.sum(0), P("dp"))
        return vfn.random.dropout(vfn.random.key(2), spread, 0.5), x + 1, y * 2, vfn.with_sharding(y, P(None, "dp"))

    with vfn.simulate(4):
        mesh = vfn.make_mesh(4, "dp")
        with vfn.use_mesh(mesh):
            x, y = torch.randn(8, 6), torch.randn(5, 6)
            even, uneven, whole = vfn.shard(x, mesh, P("dp")), vfn.shard(y, mesh, P("dp")), vfn.shard(y, mesh, P())
            for given_ in uneven, whole:
                for one, wanted in zip(vfn.jit(f)(even, given_), f(even, given_), strict=True):
                    assert torch.equal(vfn.unshard(one), vfn.unshard(wanted))


@pytest.mark.parametrize("spec", [P("dp"), P(("tp", "dp")), P("tp", "dp")], ids=str)
def test_draws_of_which_each_rank_makes_its_part(spec):
    def f(x):
        noise = lambda i: vfn.random.normal(vfn.random.key(i), (12, 6))
        return vfn.with_sharding(noise(1), spec) * x + 1, vfn.with_sharding(noise(2).sin(), P("dp")) - x

    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("dp", "tp"))
        with vfn.use_mesh(mesh):
            drawn_, _ = recorded_once(f, vfn.shard(torch.ones(12, 6), mesh, P("dp")))
            assert torch.equal(vfn.unshard(drawn_), vfn.random.normal(vfn.random.key(1), (12, 6)) + 1)


@pytest.mark.parametrize("spec", [P(), P("dp")], ids=str)
def test_results_and_donated_arguments(spec):
    """Results that are one value have one memory each; memory that ranks share is written once."""
    x = torch.arange(24.0).view(8, 3)
    with vfn.simulate(4):
        mesh = vfn.make_mesh(4, "dp")
        parts = vfn.shard(x, mesh, P("dp"))
        found = vfn.jit(lambda x: (x, x.t(), x + 1, x + 1, vfn.with_sharding(x, P())))(parts)
        for one, wanted in zip(found, (x, x.t(), x + 1, x + 1, x), strict=True):
            assert torch.equal(vfn.unshard(one), wanted)
        step = vfn.jit(lambda p, x: (p + x, p * 2), donate_argnums=0)
        for _ in range(2):
            found = step(vfn.shard(x.clone(), mesh, spec), parts)
            assert all(torch.equal(vfn.unshard(one), x * 2) for one in found)


def plan_of(jitted):
    (plan,) = jitted._plans.values()
    return plan


def test_code_is_as_long_however_many_ranks_there_are():
    lines = set()
    for n in (2, 6):
        with vfn.simulate(n):
            mesh = vfn.make_mesh((n, 1), ("dp", "tp"))
            with vfn.use_mesh(mesh):
                jitted = vfn.jit(updated)
                jitted(*given(mesh, P())[1])
                lines.add(plan_of(jitted).code.source.count("\n"))
    assert len(lines) == 1


def test_ranks_take_turns_every_few_calls():
    """There where one value is alive, and not two; of large values each makes all calls at once."""

    def f(x):
        for _ in range(16):
            x = torch.cat([x.sin(), x.exp()]).sum(0, keepdim=True).expand(4, -1).clone()
        return x

    with vfn.simulate(2):
        jitted, x = vfn.jit(f), vfn.shard(torch.zeros(4, 6), vfn.make_mesh(2, "dp"), P(None, "dp"))
        jitted(x)
        found = rank_runs.runs(plan_of(jitted)._improved)
        assert {name_of(run[-1]) for run in found[:-1]} == {"sum"}
        assert len(found) > 1
        assert all(rank_runs.SHORTEST <= len(run) <= rank_runs.LONGEST for run in found)
        with mock.patch.object(rank_runs, "CACHE", 0):
            assert len(rank_runs.runs(plan_of(jitted)._improved)) == 1


def written_over(w, x):
    def body(w, x):
        y = vfn.ppermute(x * 2, "dp", [(0, 1), (1, 0)])
        return y + 1, x - y, (w["a"].sum() * x).sum(0, keepdim=True)

    y, z, s = vfn.shard_map(body, in_specs=(P(), P("dp")), out_specs=(P("dp"), P("dp"), P("dp")))(w, x)
    return {name: one * 0.5 for name, one in w.items()}, y * 3, z, s


@pytest.mark.parametrize("spec", [P(), P("tp"), P(("dp", "tp"))], ids=str)
def test_what_is_written_over_no_other_rank_needs(spec):
    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("dp", "tp"))
        with vfn.use_mesh(mesh):
            w, x = given(mesh, P())[1]
            w = vfn.with_sharding(w, {"a": spec, "b": P("tp")})
            wanted = written_over(w, x)
            jitted = vfn.jit(written_over, donate_argnums=(0, 1))
            for _ in range(2):
                found = jitted({name: one.clone() for name, one in w.items()}, x.clone())
                for one, other in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
                    assert torch.equal(vfn.unshard(one), vfn.unshard(other))


def in_buffers(x, w):
    total = torch.zeros(3, 6)
    total += x.sum(0)
    total[1] = vfn.axis_index("dp")
    rows = x * 1
    last = rows.t()[-1]
    last.mul_(w.sum()).add_(rows[0, 1])
    own = w.clone()
    own.view(-1)[2:].sigmoid_()
    return total, rows, last, own


def on_both_sides_of_a_turn(x, w):
    before = x * 2
    there = vfn.ppermute(before, "dp", [(i, (i + 1) % 6) for i in range(6)])
    before.add_(100)
    again = vfn.ppermute(before, "dp", [(i, (i + 1) % 6) for i in range(6)])
    again[0].mul_(2)
    return there, before, again


def of_what_arrived(x, w):
    whole, total = vfn.all_gather(x, "dp"), vfn.psum(x * 1, "dp")
    whole[0] = 5
    total.t().add_(1)
    return whole.sum(0), total, vfn.psum(x * 3, "dp")


@pytest.mark.parametrize("body", [in_buffers, on_both_sides_of_a_turn, of_what_arrived], ids=lambda f: f.__name__)
def test_writes_in_a_body(body):
    outs = tuple(P("dp") for _ in range(4 if body is in_buffers else 3))
    f = vfn.shard_map(body, in_specs=(P("dp"), P()), out_specs=outs)
    with vfn.simulate(6):
        mesh = vfn.make_mesh(6, "dp")
        with vfn.use_mesh(mesh):
            args = vfn.shard(torch.randn(12, 6), mesh, P("dp")), vfn.shard(torch.randn(4, 6), mesh, P())
            found = recorded_once(f, *args)
            for one, wanted in zip(found, f(*args), strict=True):
                assert torch.equal(vfn.unshard(one), vfn.unshard(wanted))


def test_ranks_that_write_what_they_share():
    """Of a sum, which is there once, and of a value that the first rank has from elsewhere than others."""

    def body(x):
        total = vfn.psum(x * 1, "dp")
        total += x
        total[0] = vfn.axis_index("dp")
        return total

    def kept(x, b):
        part = vfn.with_sharding(b, P(unreduced={"dp"})).clone()
        part += 1
        part[0].mul_(2)
        return x + part, b

    with vfn.simulate(4):
        mesh = vfn.make_mesh(4, "dp")
        with vfn.use_mesh(mesh):
            x, b = vfn.shard(torch.randn(8, 6), mesh, P("dp")), vfn.shard(torch.randn(2, 6), mesh, P())
            f = vfn.shard_map(body, in_specs=P("dp"), out_specs=P("dp"))
            assert torch.equal(vfn.unshard(vfn.jit(f)(x)), vfn.unshard(f(x)))
            for one, wanted in zip(vfn.jit(kept)(x[:2], b), kept(x[:2], b), strict=True):
                assert torch.equal(vfn.unshard(one), vfn.unshard(wanted))


def test_writes_of_arrays():
    def f(x, w):
        y, z = x.clone(), w.clone()
        y.t().add_(1).mul_(2.0)
        y += x
        z.view(-1)[3:].mul_(2.0)
        z.copy_(z.flip(0))
        return vfn.value_and_grad(lambda x: (F.rms_norm(x, (6,), z[0], eps=1e-5) * y).square().sum())(x), y, z

    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("dp", "tp"))
        x, w = torch.randn(12, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
        for spec in P("dp"), P("dp", "tp"), P(None, "tp"), P():
            found = recorded_once(f, vfn.shard(x, mesh, spec), vfn.shard(w, mesh, P()))
            for one, wanted in zip(tree.leaves(found), tree.leaves(f(x, w)), strict=True):
                torch.testing.assert_close(vfn.unshard(one), wanted, rtol=1e-10, atol=1e-12)


def test_what_ranks_hold_alike_stays_so_behind_gathers_that_are_put_together():
    """Weights split over one axis, of which the other has some whole and some split; a gradient begins with ones for all."""

    def f(w, x):
        def loss(w):
            whole = vfn.with_sharding(w, {"a": P(None, "tp"), "b": P("tp"), "norm": P(), "scale": P()})
            y = F.layer_norm(x * whole["scale"], (6,), whole["norm"])
            return ((torch.relu(y.sin().exp() @ whole["a"]) @ whole["b"] + y.cos()) * whole["norm"]).square().mean()

        return vfn.value_and_grad(loss)(w)

    with vfn.simulate(6):
        mesh = vfn.make_mesh((2, 3), ("dp", "tp"))
        with vfn.use_mesh(mesh):
            specs = {"a": P("dp", "tp"), "b": P("tp", "dp"), "norm": P("dp"), "scale": P("dp")}
            w = {"a": torch.randn(6, 12), "b": torch.randn(12, 6), "norm": torch.randn(6), "scale": torch.randn(6)}
            args = vfn.shard(w, mesh, specs), vfn.shard(torch.randn(12, 6), mesh, P("dp"))
            recorded_once(f, *args)
            graph = vfn.jit(f).lower(*args).graph
            assert "unpack" in str(graph)
            assert sum(node.name.startswith(("sin", "cos", "exp")) for node in graph.nodes) <= 2 * 4
