"""Collectives across the edge of a loop's iteration: what is begun ahead and waited for late, in which order, and the same bits."""

import contextlib
import functools

import pytest
import torch

import vescale_fn as vfn
from benchmarks.peak_memory import accounting
from vescale_fn import P
from vescale_fn._core import torch_internals
from vescale_fn._core.distributed import collectives
from vescale_fn.plan.ir.nested import bodies_of, nested
from vescale_fn.plan.ir.rotated_loop import Rotated
from vescale_fn.plan.passes.buckets import buckets
from vescale_fn.plan.passes.hoist import hoist
from vescale_fn.plan.passes.overlap import overlap
from vescale_fn.plan.passes.prefetch import prefetch
from vescale_fn.plan.passes.under_way import under_way

WIDTH, LENGTH = 6, 3


def as_on_gpus(*left_out, **given):
    """The passes of a plan, as where ranks are GPUs."""
    ours = {
        overlap: functools.partial(overlap, on_cpu=True),
        prefetch: functools.partial(prefetch, on_cpu=True, **given),
        under_way: functools.partial(under_way, on_cpu=True),
    }
    return [ours.get(one, one) for one in vfn.plan.PASSES if one not in left_out]


def parts(graph):
    """Of each loop in a graph, and in the bodies there: whether something is begun ahead, and whether something comes late."""
    found = []
    for node in nested(graph):
        if node.target.name == "loop":
            rotated = isinstance(node.target, Rotated)
            found.append((node.target.begins, bool(node.target.late)) if rotated else None)
        found += [one for body in bodies_of(node) for one in parts(body)]
    return found


def whole(x):
    return vfn.with_sharding(x, P())


def layer(h, p):
    return torch.tanh(h @ whole(p["w"])) * whole(p["b"]) + 0.1 * h


def stacked(p, x):
    return vfn.scan(lambda h, p: (layer(h, p), h.sum()), x, p)


def from_the_last(p, x):
    return vfn.scan(lambda h, p: (layer(h, p), h.sum()), x, p, reverse=True)


def computed_again(p, x):
    return vfn.scan(vfn.remat(lambda h, p: (layer(h, p), None)), x, p)


def in_a_loop(p, x):
    def outer(h, q):
        return layer(vfn.scan(lambda h, p: (layer(h, p), None), layer(h, q), p)[0], q), h.mean()

    return vfn.scan(outer, x, p)


def in_a_branch(p, x):
    nothing = x.sum() * torch.zeros(LENGTH)
    return vfn.cond(x.sum() < 99, stacked, lambda p, x: (x, nothing), p, x)


def given_weights(p, x):
    return vfn.scan(lambda h, p: (layer(h, p), whole(p["w"])), x, p)


def summed_up(p, x):
    """Sums that go to a carried total and to what is kept."""

    def step(carry, p):
        h, total = carry
        y = layer(h, p)
        return (y, total + vfn.with_sharding(y.T @ h, P("dp"))), vfn.with_sharding(h.T @ y, P(None, "dp"))

    return vfn.scan(step, (x, vfn.with_sharding(0 * (x.T @ x), P("dp"))), p)


def last_sum(p, x):
    """A sum that takes the place of a carried one, which nobody looks at."""

    def step(carry, p):
        y = layer(carry[0], p)
        return (y, vfn.with_sharding(y.T @ carry[0], P("dp"))), None

    return vfn.scan(step, (x, vfn.with_sharding(x.T @ x, P("dp"))), p)


def microbatches(p, x):
    """Gradients of the same weights for one batch after the other."""
    w = {name: value[0] for name, value in p.items()}

    def step(total, c):
        value, g = vfn.value_and_grad(lambda w: (layer(c * x, w) ** 2).mean())(w)
        return vfn.tree.map(torch.add, total, g), value

    return vfn.scan(step, vfn.tree.map(torch.zeros_like, w), torch.arange(1.0, 5.0))


def counted(p, x):
    w = {name: value[0] for name, value in p.items()}
    return vfn.fori_loop(0, 4, lambda i, h: layer(h, w), x)


def the_carry_gathered(p, x):
    return vfn.scan(lambda h, w: (torch.tanh(whole(h) @ w[:, :WIDTH]).sum() * h, None), x, torch.ones(3, WIDTH, WIDTH))


def a_sum_that_is_read(p, x):
    def step(carry, c):
        y = torch.tanh(carry[0] * c)
        total = vfn.with_sharding(y.T @ carry[0], P("dp"))
        return (y + carry[1].sum(), total), None

    return vfn.scan(step, (x, vfn.with_sharding(x.T @ x, P("dp"))), torch.arange(1.0, 4.0))


def nothing_to_compute(p, x):
    return vfn.scan(lambda c, w: (c, whole(w)), x, p["w"])


def as_long_as(p, x):
    w = {name: value[0] for name, value in p.items()}
    return vfn.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, layer(c[1], w)), (torch.zeros(()), x))


# what travels in each loop, of the function and of its gradient
AHEAD, LATE, BOTH = (True, False), (False, True), (True, True)
PROGRAMS = {
    stacked: ([AHEAD], [AHEAD, LATE]),  # which keeps the gathered weights
    from_the_last: ([AHEAD], [AHEAD, LATE]),
    computed_again: ([AHEAD], [AHEAD, BOTH]),
    in_a_loop: ([AHEAD] * 2, None),
    in_a_branch: ([AHEAD], None),
    given_weights: ([AHEAD], None),
    summed_up: ([BOTH], None),
    last_sum: ([BOTH], None),
    microbatches: ([AHEAD], None),  # a batch of its own: all of it, as the weights are gathered before
    counted: ([None], None),
    the_carry_gathered: ([None], None),
    a_sum_that_is_read: ([None], None),
    nothing_to_compute: ([None], None),
    as_long_as: ([], None),
}


def squares(f):
    return lambda p, x: vfn.value_and_grad(lambda p: sum((y * y).sum() for y in vfn.tree.leaves(f(p, x))))(p)


def arguments(mesh, length=LENGTH, spec=P(None, "dp"), dtype=torch.float32):
    p = {"w": torch.randn(length, WIDTH, WIDTH).to(dtype), "b": torch.randn(length, WIDTH).to(dtype)}
    return vfn.shard(p, mesh, {"w": spec, "b": P(None, "dp")}), vfn.shard(
        torch.randn(5, WIDTH).to(dtype), mesh, P("dp")
    )


def plan_of(jitted):
    return next(iter(jitted._plans.values()))


def as_without(f, *args, **given):
    """The function with values that travel across edges, seen to give what it gives without, by the same collectives."""
    usual, jitted = vfn.jit(f), vfn.jit(f, passes=as_on_gpus(**given))
    wanted = vfn.tree.leaves(vfn.unshard(usual(*args)))
    for _ in range(2):
        assert all(map(torch.equal, vfn.tree.leaves(vfn.unshard(jitted(*args))), wanted))
    one, other = (sorted((x.op, x.bytes) for x in found.lower(*args).comms()) for found in (usual, jitted))
    assert one == other
    return jitted


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_the_same_bits_by_the_same_collectives(f):
    for n in (2, 4):  # four do not divide the weights
        with vfn.simulate(n):
            args = arguments(vfn.make_mesh((n,), ("dp",)))
            for function, wanted in zip((f, squares(f))[: 1 + (n == 2)], PROGRAMS[f]):
                if wanted is not None:
                    assert parts(plan_of(as_without(function, *args)).graph) == wanted


def test_what_iterations_would_gather_alike_is_gathered_once():
    without = [one for one in vfn.plan.PASSES if one is not hoist]
    too_large = [functools.partial(hoist, most=1) if one is hoist else one for one in vfn.plan.PASSES]
    ways = ({}, {"passes": without}, {"passes": too_large}, {"memory": "100 %"})
    for n, f, counts in ((3, counted, (1, 4, 4, 4)), (4, squares(microbatches), (2, 8, 8, 8))):  # four do not divide
        with vfn.simulate(n):
            args, found = arguments(vfn.make_mesh((n,), ("dp",))), []
            for how in ways:
                jitted = vfn.jit(f, **how)
                found.append(vfn.tree.leaves(vfn.unshard(jitted(*args))))
                gathers = [record for record in jitted.lower(*args).comms() if record.op == "all_gather"]
                assert len(gathers) == counts[len(found) - 1]
                assert all(map(torch.equal, found[-1], found[0]))


def test_layouts_and_lengths():
    for sizes, axes, spec, length, dtype in (
        ((2,), ("dp",), P(None, None, "dp"), 2, torch.bfloat16),
        ((2, 2), ("dp", "tp"), P(None, ("dp", "tp")), 5, torch.float32),
        ((2, 2), ("dp", "tp"), P(None, "tp", "dp"), 2, torch.float32),
        ((7,), ("dp",), P(None, "dp"), 3, torch.float32),  # the last rank has nothing
        ((2,), ("dp",), P(None, "dp"), 1, torch.float32),
        ((2,), ("dp",), P(None, "dp"), 0, torch.float32),
        ((1,), ("dp",), P(None, "dp"), 3, torch.float32),
    ):
        with vfn.simulate(torch.Size(sizes).numel()):
            args = arguments(vfn.make_mesh(sizes, axes), length, spec, dtype)
            jitted = as_without(squares(computed_again), *args)
            found = parts(plan_of(jitted).graph)
            assert found == [AHEAD, BOTH] if length > 1 and sizes != (1,) else not any(found)


def test_layers_that_lie_on_different_ranks():
    """A slice of a split leading dim comes from its owner an iteration ahead."""
    for n, length in ((2, 4), (3, 4)):
        with vfn.simulate(n):
            p, x = arguments(vfn.make_mesh((n,), ("dp",)), length, P("dp"))
            p = {**p, "b": vfn.with_sharding(p["b"], P("dp"))}
            jitted = as_without(squares(computed_again), p, x)
            assert all(ahead for ahead, _ in parts(plan_of(jitted).graph))
            assert {record.op for record in jitted.lower(p, x).comms()} >= {"broadcast"}


def test_as_many_bytes_as_may_travel():
    """Without buckets there are two gathers and two sums to a layer; the first is always under way."""
    with vfn.simulate(2):
        args = arguments(vfn.make_mesh((2,), ("dp",)))
        for ahead, count in ((0, 1), (4 * WIDTH - 1, 1), (4 * WIDTH, 2)):
            jitted = vfn.jit(squares(computed_again), passes=as_on_gpus(buckets, ahead=ahead))
            first, *_ = (node.target for node in nested(jitted.lower(*args).graph))
            names = [node.target.__name__ for node in first.bodies[0].nodes if node.op == "call_function"]
            assert names.count("start_all_gather") == count


def test_ranks_in_bodies():
    """Collectives that the user wrote in a body of `shard_map`."""
    with vfn.simulate(3):
        mesh = vfn.make_mesh((3,), ("i",))

        def body(w, x):
            def step(h, w):
                y = torch.tanh(h @ vfn.all_gather(w, "i", axis=0, tiled=True))
                return y, vfn.psum(y.sum(), "i")

            return vfn.scan(step, x, w)

        f = vfn.shard_map(body, mesh=mesh, in_specs=(P(None, "i"), P("i")), out_specs=(P("i"), P()))
        w, x = vfn.shard(torch.randn(4, 6, 6), mesh, P(None, "i")), vfn.shard(torch.randn(3, 6), mesh, P("i"))
        assert parts(plan_of(as_without(f, w, x)).graph) == [BOTH]
        assert parts(plan_of(as_without(vfn.grad(lambda w: f(w, x)[0].sum()), w)).graph) == [AHEAD, LATE]


def abstract_arguments():
    p = {
        "w": vfn.ShapeDtype((LENGTH, WIDTH, WIDTH), torch.float32),
        "b": vfn.ShapeDtype((LENGTH, WIDTH), torch.float32),
    }
    given = p, vfn.ShapeDtype((4, WIDTH), torch.float32)
    return vfn.shard(given, vfn.abstract_mesh((2,), ("dp",)), (P(None, "dp"), P("dp")))


def test_the_text_of_a_plan():
    lowered = vfn.jit(squares(computed_again), passes=as_on_gpus()).lower(*abstract_arguments())
    lines = [line.strip() for line in lowered.text(None).splitlines()]
    said = ("an iteration", " times", "for later")
    assert [line for line in lines if any(word in line for word in said)] == [
        "an iteration ahead: x, x_1",
        "3 times: carry; of each x, x_1; begun pack, start_all_gather",
        "an iteration ahead: x_1, x",
        "3 times, from the last: ct; of each x_1, x, carry; begun pack_1, start_all_gather",
        "-> add_tensor_1, start_reduce_scatter for later, pack for later",
        "an iteration late: start_reduce_scatter, pack",
    ]
    assert "an iteration ahead" in str(lowered.comms())


@contextlib.contextmanager
def events():
    """What starts, and what is waited for, by kind and number, as plans run."""
    seen, known = [], {}
    start, wait = collectives.Start.__call__, collectives.wait

    def starting(self, *given):
        begun = start(self, *given)
        known[id(begun)] = name = (
            f"{self.kind} {sum(self.kind in one for one in seen if one.startswith('start'))}",
            begun,
        )
        seen.append(f"start {name[0]}")
        return begun

    def waiting(begun):
        seen.append(f"wait {known[id(begun)][0]}")
        return wait(begun)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives.Start, "__call__", starting)
        patch.setattr(collectives, "wait", waiting)
        yield seen


G, S = "all_gather", "reduce_scatter"
ORDER = [
    *(f"start {G} 0", f"start {G} 1", f"wait {G} 0", f"start {G} 2", f"wait {G} 1", f"wait {G} 2"),
    *(f"start {G} 3", f"start {G} 4", f"wait {G} 3", f"start {S} 0"),
    *(f"start {G} 5", f"wait {G} 4", f"start {S} 1", f"wait {S} 0"),
    *(f"wait {G} 5", f"start {S} 2", f"wait {S} 1", f"wait {S} 2"),
]


def both_ways(p, x):
    """A layer of one weight, gathered forward and backward."""

    def step(h, w):
        return torch.tanh(h @ whole(w)), None

    return vfn.grad(lambda w: vfn.scan(vfn.remat(step), x, w)[0].sum())(p["w"])


def test_each_is_begun_before_the_one_before_it_is_waited_for():
    with vfn.simulate(2):
        args = arguments(vfn.make_mesh((2,), ("dp",)))
        jitted = vfn.jit(both_ways, passes=as_on_gpus())
        jitted(*args)
        with events() as seen:
            jitted(*args)
    assert seen == ORDER


_fails = [False]


@torch.library.custom_op("prefetch_tests::failing", mutates_args=())
def failing(x: torch.Tensor) -> torch.Tensor:
    if _fails and _fails.pop(0):
        raise RuntimeError("in the middle of an iteration")
    return x.clone()


failing.register_fake(lambda x: torch.empty_like(x))


def on_a_rank():
    """What goes wrong on a real rank."""
    wrong = []
    mesh = vfn.make_mesh((3,), ("dp",))
    for f in (both_ways, squares(computed_again), stacked, microbatches, in_a_loop):
        torch.manual_seed(1)
        args = arguments(mesh, spec=P(None, None, "dp"))
        as_without(f, *args)
    jitted = vfn.jit(both_ways, passes=as_on_gpus())
    jitted(*args)
    with events() as seen, vfn.comm_log() as log:
        jitted(*args)
    begun = [one for one in seen if one.startswith("start")]
    if [one.split()[1] for one in begun] != [record.op for record in log]:
        wrong.append(f"what starts {begun}, what is logged {[record.op for record in log]}")
    if seen != ORDER:
        wrong.append(seen)

    def step(h, w):
        return vfn.with_sharding(failing(torch.tanh(h @ whole(w))), P("dp")), None

    jitted = vfn.jit(lambda p, x: vfn.scan(step, x, p["w"])[0], passes=as_on_gpus())
    wanted = vfn.unshard(jitted(*args))
    _fails[:] = [False, True]
    with pytest.raises(RuntimeError, match="in the middle"):
        jitted(*args)
    if not torch.equal(vfn.unshard(jitted(*args)), wanted):
        wrong.append("what comes after an error")
    return wrong


def test_on_gloo_ranks(gloo):
    assert gloo(3, on_a_rank) == [[], [], []]


def wide(p, x):
    layer = lambda h, p: (torch.tanh(torch.tanh(h @ whole(p["w"])) @ whole(p["v"])), None)
    return vfn.value_and_grad(lambda p: vfn.scan(vfn.remat(layer), x, p)[0].square().mean())(p)


def wide_arguments(length=12):
    mesh = vfn.make_mesh((2,), ("dp",))
    p = {name: 0.1 * torch.randn(length, 64, 64) for name in "vw"}
    return vfn.shard(p, mesh, P(None, "dp")), vfn.shard(torch.randn(16, 64), mesh, P("dp"))


def test_what_travels_is_in_the_memory_of_a_plan():
    peaks = []
    with vfn.simulate(2):
        args = wide_arguments()
        blocks = [block for x in vfn.tree.leaves(args) for block in torch_internals.local(x).blocks]
        for passes in (as_on_gpus(prefetch), as_on_gpus()):
            jitted = vfn.jit(wide, passes=passes)
            jitted(*args)
            with accounting(blocks) as account:
                plan_of(jitted)(vfn.tree.leaves(args))
            use = jitted.lower(*args).memory()
            assert 0.97 <= use.peak / account.peak <= 1.03
            peaks.append(use.peak)
    assert peaks[0] < peaks[1]


AT_EDGES = {
    "ahead": stacked,
    "late": squares(stacked),
    "both": squares(computed_again),
    "one weight": both_ways,
    "totals": microbatches,
    "a loop in a loop": in_a_loop,
    "sums": summed_up,
}


@pytest.mark.parametrize("name", AT_EDGES)
def test_the_predicted_peak_is_the_counted_one(name):
    """What an iteration needs while the next one has begun, and the one before it has not ended."""
    with vfn.simulate(2):
        mesh = vfn.make_mesh((2,), ("dp",))
        p = vfn.shard({"w": torch.randn(6, 64, 64), "b": torch.randn(6, 64)}, mesh, P(None, "dp"))
        args = p, vfn.shard(torch.randn(16, 64), mesh, P("dp"))
        jitted = vfn.jit(AT_EDGES[name], passes=as_on_gpus())
        jitted(*args)
        with accounting([block for x in vfn.tree.leaves(args) for block in torch_internals.local(x).blocks]) as account:
            plan_of(jitted)(vfn.tree.leaves(args))
        assert any(parts(plan_of(jitted).graph))
        assert 0.99 <= jitted.lower(*args).memory().peak / account.peak <= 1.01


def test_a_limit_does_without():
    with vfn.simulate(2):
        args = wide_arguments()
        lowered = {}
        for name, passes in (("with", as_on_gpus()), ("without", as_on_gpus(prefetch))):
            lowered[name] = vfn.jit(wide, passes=passes).lower(*args)
        more, less = (lowered[name].memory().peak for name in ("with", "without"))
        assert less < more
        wanted = vfn.jit(wide)(*args)
        for limit, rotated in ((more, True), (more - 1, False), (less, False)):
            jitted = vfn.jit(wide, passes=as_on_gpus(), memory=limit)
            found = jitted(*args)
            assert any(parts(plan_of(jitted).graph)) == rotated
            assert jitted.lower(*args).memory().peak <= limit
            assert all(map(torch.equal, vfn.tree.leaves(vfn.unshard(found)), vfn.tree.leaves(vfn.unshard(wanted))))


def test_a_saved_plan(tmp_path):
    args, f = abstract_arguments(), vfn.jit(squares(stacked), passes=as_on_gpus())
    vfn.save_plan(f.lower(*args), tmp_path / "loop")
    again = vfn.jit(squares(stacked), passes=as_on_gpus(), plans=[vfn.load_plan(tmp_path / "loop")])
    assert again.lower(*args).text(lines=None) == f.lower(*args).text(lines=None)
    assert again.lower(*args).memory().peak == f.lower(*args).memory().peak
    assert again.cache_info().records == 0
