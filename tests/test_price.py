"""What a step would cost: bytes, calls and memory are those of a run; seconds follow from what runs beside what."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from nccl_times import TIMES

import vescale_fn as vfn
from benchmarks import prices
from vescale_fn import P
from vescale_fn.hardware import Hardware, Link, Protocol
from vescale_fn.plan import PASSES
from vescale_fn.plan.passes.overlap import AHEAD
from vescale_fn.plan.passes.under_way import under_way
from vescale_fn.recipes import llama

f32, S = torch.float32, vfn.ShapeDtype
STEP, SLOW = 1e-6, 1e-5
# two nodes of four: within one 100 bytes a second, between them 10 for each rank
TWO_NODES = Hardware(
    "two nodes",
    {"float32": 1e9},
    1e9,
    1e-6,
    1e9,
    (Link(4, (Protocol(0, STEP, 100),)), Link(8, (Protocol(0, SLOW, 10),))),
)
MESH = {"dp": 2, "tp": 4}
COLLECTIVES = [  # kind, axes, bytes that a rank gives, seconds: steps, and what the slowest link sends
    ("all_reduce", "tp", 400, 6 * STEP + 2 * 300 / 100),
    ("all_gather", "tp", 100, 3 * STEP + 300 / 100),
    ("reduce_scatter", "tp", 400, 3 * STEP + 300 / 100),
    ("all_to_all", "tp", 400, 3 * STEP + 300 / 100),
    ("permute", "tp", 400, STEP + 4),
    ("all_gather", "dp", 100, SLOW + 100 / 10),  # one rank of each node: its own NIC
    ("all_gather", "dp,tp", 100, 6 * STEP + SLOW + 700 / 40),  # four ranks of a node send at the same time
    ("all_to_all", "dp,tp", 800, 6 * STEP + SLOW + 400 / 10),  # half of it to the other node
]


@pytest.mark.parametrize(("kind", "axes", "nbytes", "seconds"), COLLECTIVES)
def test_a_collective_takes_its_steps_and_what_the_slowest_link_sends(kind, axes, nbytes, seconds):
    assert TWO_NODES.collective(kind, nbytes, MESH, axes.split(",")) == pytest.approx(seconds)


def test_presets_take_as_long_as_nccl_tests_have_published():
    """From 1 MiB on: of eight nodes of H100, of which there are none in the fit, the middle sizes take longer than predicted."""
    near, far = [], {}
    for _, name, nodes, kind, first, times in TIMES:
        hardware, mesh = getattr(vfn.hardware, name)(nodes), {"dp": nodes, "tp": 8}
        for i, us in enumerate(times):
            nbytes = first * 2 ** (20 + i) / (8 * nodes if kind == "all_gather" else 1)
            if us is not None:
                off = abs(hardware.collective(kind, nbytes, mesh, ["dp", "tp"]) * 1e6 / us - 1)
                far[nodes] = max(far.get(nodes, 0.0), off)
                near.append(off < 0.1)
    assert len(near) == 196
    assert sum(near) >= 170
    assert far[1] < 0.17
    assert far[2] < 0.17
    assert far[4] < 0.17
    assert far[8] < 0.25


def test_presets_reach_what_single_nics_do():
    """Bus bandwidth of large all-reduces along one rank of each node: NVIDIA/nccl-tests#290."""
    size, mesh = 8 << 30, {"dp": 2, "tp": 8}
    assert size / vfn.hardware.h100(2).collective("all_reduce", size, mesh, ["dp"]) == pytest.approx(4.7e10, rel=0.1)


def test_hardware_is_data():
    for one in (vfn.hardware.h100(4), vfn.hardware.cpu(3), TWO_NODES):
        again = Hardware.from_json(one.to_json())
        assert again == one
        assert hash(again) == hash(one)


def test_what_is_measured_is_the_same_on_all_ranks(gloo):
    def measured():
        mesh = vfn.make_mesh((2, 2), ("a", "b"))
        one = vfn.hardware.measure(mesh, seconds=0.1)
        return one.to_json(), one.ranks, one.device, one.collective("all_gather", 1 << 20, {"a": 2, "b": 2}, ["b"]) > 0

    found = gloo(4, measured)
    assert len({text for text, *_ in found}) == 1
    assert found[0][1:] == (4, "cpu", True)


def update(w, x, scale, nothing):
    """Of odd sizes, with a number and with nothing among its arguments."""
    return w["a"] - scale * vfn.grad(lambda a: ((x @ a) ** 2).mean())(w["a"])


def scanned(w, x):
    body = lambda c, one: (vfn.with_sharding(torch.tanh(c @ one), P("dp")), None)
    return vfn.grad(lambda w: vfn.scan(body, x, w)[0].sum())(w)


def drawn(key, x):
    return (x * vfn.random.bernoulli(key, 0.5, x.shape)).sum(0)


LEAVES = {"a": S((7, 5), f32), "b": None}
CASES = {  # step, arguments, their specs, the mesh
    "odd": (update, (LEAVES, S((9, 7), f32), 2, None), (P("dp"), P(("dp", "tp")), None, None), (3, 2)),
    "empty shards": (update, (LEAVES, S((2, 7), f32), 0.5, None), (P(), P("dp"), None, None), (4, 1)),
    "an axis of one rank": (update, (LEAVES, S((8, 7), f32), 2, None), (P(None, "tp"), P("dp"), None, None), (1, 3)),
    "loops": (scanned, (S((5, 8, 8), f32), S((12, 8), f32)), (P(None, "tp"), P("dp")), (2, 2)),
    "keys": (drawn, (vfn.random.key(1), S((12, 6), f32)), (None, P("dp", "tp")), (2, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_calls_are_those_of_a_run(name):
    step, args, specs, sizes = CASES[name]
    price = vfn.price(step, *args, specs=specs, mesh=dict(zip(("dp", "tp"), sizes)))
    with vfn.simulate(math.prod(sizes)):
        mesh = vfn.make_mesh(sizes, ("dp", "tp"))
        made = vfn.tree.map(lambda x: torch.ones(x.shape, dtype=x.dtype) if isinstance(x, S) else x, args)
        given = [x if spec is None else vfn.shard(x, mesh, spec) for x, spec in zip(made, specs)]
        run = vfn.jit(step)
        with vfn.use_mesh(mesh), vfn.comm_log() as log:
            run(*given)
    axes = {r.axis: r.axes for r in log}
    assert price.calls == {axis: log.count(axis=names) for axis, names in axes.items()}
    assert price.bytes == {axis: log.bytes(axis=names) for axis, names in axes.items()}
    assert price.seconds == pytest.approx(price.compute + price.exposed)
    assert price.exposed <= price.communication * (1 + 1e-9)


def test_a_layout_of_a_recipe_costs_what_processes_need(gloo):
    """Of a real run its collectives, their bytes, and the most that was alive; of 70 layouts in `benchmarks.prices`."""
    name, (text, axes) = "gpt", ("fsdp+tp+sp", "dp+tp")
    mesh = vfn.abstract_mesh(tuple(prices.MESHES[axes].values()), tuple(prices.MESHES[axes]))
    step, shapes, specs, _ = prices.stepped(name, text, mesh)
    price = vfn.price(step, *shapes, specs=specs, mesh=mesh, hardware="cpu")
    ((_, sent, alive),) = gloo(4, functools.partial(prices.run, name, [(text, axes)], 1))[0]
    assert {axis: (price.calls[axis], price.bytes[axis]) for axis in price.calls} == sent
    assert price.peak == pytest.approx(alive, rel=0.03)


def test_what_travels_beside_computing_is_not_exposed():
    """Two gathers, a product after each: on GPUs the second is begun with the first, on CPUs it is waited for where it stands."""

    def step(x, v, w):
        return (x @ vfn.with_sharding(v, P())) @ vfn.with_sharding(w, P())

    n = 2048
    link = Link(2, (Protocol(0, 0, 1e9),))
    gpu = Hardware("gpu", {"float32": 4e12}, 1e13, 1e-9, 1e9, (link,))
    travel, product = n * n * 2 / 1e9, 2 * n * n * n / 2 / 4e12
    ask = functools.partial(vfn.price, step, *[S((n, n), f32)] * 3, specs=P("dp"), mesh={"dp": 2})
    price, waited = ask(hardware=gpu), ask(hardware="cpu")
    assert price.communication == pytest.approx(2 * travel)
    assert (price.compute, price.exposed) == pytest.approx((2 * product, 2 * travel - product), rel=0.01)
    assert waited.exposed == pytest.approx(waited.communication)
    least = vfn.jit(step, passes=[one for one in PASSES if one is not under_way])
    least = vfn.price(least, *[S((n, n), f32)] * 3, specs=P("dp"), mesh={"dp": 2}, hardware=gpu)
    assert least.peak < price.peak <= least.peak + AHEAD
    within = vfn.price(
        vfn.jit(step, memory=least.peak), *[S((n, n), f32)] * 3, specs=P("dp"), mesh={"dp": 2}, hardware=gpu
    )
    assert (within.peak, within.exposed) == (least.peak, least.exposed)


def test_what_fsdp_gathers_and_sums_travels_beside_computing_within_a_bound(monkeypatch):
    """Against the order that needs least memory alone, which waits for gradients where they start."""
    config = llama.Config(vocab=8192, dim=4096, heads=32, groups=32, hidden=11008, layers=2)
    monkeypatch.setitem(prices.MODELS, "llama", (llama, config, 64, 1024))
    mesh = vfn.abstract_mesh((16, 4), ("dp", "tp"))
    step, shapes, specs, _ = prices.stepped("llama", "fsdp+tp", mesh)

    def ask(passes):
        run = vfn.jit(step.__wrapped__, passes=passes, donate_argnums=(0, 1))
        return vfn.price(run, *shapes, specs=specs, mesh=mesh, hardware="h100")

    least, beside = ask([one for one in PASSES if one is not under_way]), ask(PASSES)
    assert beside.communication == pytest.approx(least.communication)
    assert beside.exposed < 0.6 * least.exposed
    assert beside.peak <= least.peak + AHEAD


def test_equal_layers_that_stay_calls_compute_while_parameters_and_gradients_travel():
    """Casts of parameters, their gathers, and sums of gradients stand outside of the calls, beside which they travel."""

    layer = vfn.plan.shared(lambda w, x: x + (x @ vfn.with_sharding(w.to(torch.bfloat16), P())).relu())

    def step(ws, x):
        def loss(ws):
            return functools.reduce(lambda x, w: layer(w, x), ws, x).float().square().mean()

        grads = vfn.grad(loss)(ws)
        return [w - 0.1 * vfn.with_sharding(g, P("dp")) for w, g in zip(ws, grads)]

    def ask(count):
        args = [S((2048, 2048), f32)] * count, S((65536, 2048), torch.bfloat16)
        return vfn.price(step, *args, specs=(P("dp"), P("dp")), mesh={"dp": 8}, hardware="h100", donate_argnums=0)

    few, many = ask(4), ask(20)
    assert many.communication > 4 * few.communication
    assert many.exposed < 1.2 * few.exposed


def test_equal_layers_in_which_values_travel_are_no_calls_where_that_hides_it():
    """Tensor parallel layers, whose parameters are gathered over another axis: on GPUs 16 of them wait no longer each than 8."""
    whole = P(None, "tp")

    @vfn.plan.shared
    def layer(ws, x):
        for w in ws:
            x = vfn.with_sharding((x @ vfn.with_sharding(w, whole)).relu() @ vfn.with_sharding(w, whole).T, P("dp"))
        return x

    def step(ws, x):
        return functools.reduce(lambda x, w: layer(w, x), ws, x)

    def ask(count):
        args = [[S((4096, 65536), torch.bfloat16)] * 3] * count, S((65536, 4096), torch.bfloat16)
        price = vfn.price(step, *args, specs=(P("dp", "tp"), P("dp")), mesh={"dp": 8, "tp": 8}, hardware="h100")
        return price.exposed / count

    assert ask(16) < 1.05 * ask(8)


def test_iterations_cost_what_they_would_one_by_one():
    """Of loops the first iterations are gone through; the others take as long as the last of these."""

    def step(w, x, count):
        body = lambda c, one: (vfn.with_sharding(c @ vfn.with_sharding(one, P()), P("dp")), None)
        return vfn.scan(body, x, w)[0].sum()

    found = []
    for count in (4, 14, 24):
        args = S((count, 256, 256), f32), S((256, 256), f32), count
        found.append(vfn.price(step, *args, specs=(P(None, "dp"), P("dp"), None), mesh={"dp": 4}))
    first, second, third = (one.seconds for one in found)
    assert third - second == pytest.approx(second - first, rel=1e-6)
    assert second > first
    assert [one.calls["dp"] for one in found] == [4, 14, 24]


def test_prices_side_by_side():
    price = vfn.price(lambda x, w: x @ w, S((64, 32), f32), S((32, 32), f32), specs=(P("tp"), P()), mesh={"tp": 8})
    both = price.compare((P("tp"), P(None, "tp")), summed=(P(None, "tp"), P("tp")))
    assert [one.name for one in both] == ["this", "other 1", "summed"]
    assert both[0].bytes == {}
    assert both[1].bytes == {"tp": 4096}
    assert "other 1" in repr(both)
    assert "<table " in both._repr_html_()
    assert [move.op for move in both[1].needless] == ["all_gather"]
    assert "Instead" in repr(both[1])
    assert "compute" in price._repr_html_()


def test_what_gloo_takes_for_itself_counts_on_cpus_alone() -> None:
    """It gathers into memory of its own."""
    x = vfn.ShapeDtype((64, 16), torch.float32)
    gather = lambda x: vfn.with_sharding(x, P())
    peaks = [vfn.price(gather, x, specs=P("dp"), mesh={"dp": 4}, hardware=on).peak for on in ("cpu", "h100")]
    assert peaks == [1024 + 2 * 4096, 1024 + 4096]


def test_an_update_of_many_leaves_is_as_many_calls_as_of_few():
    """They go as lists, halves too."""
    opt, hardware = vfn.optim.adam(0.1), replace(TWO_NODES, launch=1.0)

    def seconds(dtype, count):
        params = {str(i): S((4, 4), dtype) for i in range(count)}
        args = params, vfn.eval_shape(opt.init, params), params
        step = lambda params, state, grads: opt.update(grads, state, params)
        return vfn.price(step, *args, specs=P(), mesh={"tp": 2}, hardware=hardware).compute

    for dtype in f32, torch.bfloat16:
        assert seconds(dtype, 8) == seconds(dtype, 4)
