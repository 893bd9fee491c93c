"""What a step with a pipeline would cost: bytes, calls and memory of each rank are those of a run; seconds those of the schedule."""

import collections
import dataclasses
import functools

import pytest
import torch
from whole import part

import vescale_fn as vfn
from benchmarks import piped_prices
from vescale_fn import P
from vescale_fn.hardware import Hardware, Link, Protocol

S, WIDTH, ROWS, PARTS = vfn.ShapeDtype, 16, 512, 4
PARAMS = [{"up": S((WIDTH, 2 * WIDTH), torch.float32), "down": S((2 * WIDTH, WIDTH), torch.float32)} for _ in range(4)]
X, ADAM = S((ROWS, WIDTH), torch.float32), vfn.optim.adamw(1e-3)
CLUSTER = Hardware("cluster", {"float32": 1e9}, 1e12, 1e-9, 1e12, (Link(8, (Protocol(0, 1e-9, 1e12),)),))


def layered(params, x, spec=None):
    for p in params:
        up, down = (
            (p["up"], p["down"]) if spec is None else vfn.with_sharding((p["up"], p["down"]), (spec, P(*spec[::-1])))
        )
        x = vfn.cut(torch.tanh(x @ up) @ down)
    return x.square().mean()


def tied(params, x):
    """Of which the first and the last stage use one parameter, and the second and the last value go on."""
    for p in params[:3]:
        x = vfn.cut((torch.tanh(x @ p["up"]) @ p["down"]) + x)
    return (x @ params[0]["up"]).square().mean()


def stepped(piped, clips=False):
    def step(params, state, x):
        value, grads = vfn.value_and_grad(piped)(params, x)
        grads = vfn.optim.clip_by_global_norm(1.0).update(grads, (), params)[0] if clips else grads
        updates, state = ADAM.update(grads, state, params)
        return vfn.optim.apply_updates(params, updates), state, value

    return step


def laid_out(piped, mesh, base=None, data=P()):
    """Parameters, state and batch as shapes on a mesh, at their places."""
    with vfn.use_mesh(mesh):
        x = vfn.shard(X, mesh, data)
        params = vfn.shard(PARAMS, mesh, piped.specs(PARAMS, x, base=base or P()))
        return params, ADAM.init(params), x


CASES = {  # the loss, the axis beside "pp", base specs, the batch's, how it is a pipeline
    "zb-h1": (layered, None, None, P(), {"schedule": "zb-h1"}),
    "fsdp": (layered, "dp", P("dp"), P("dp"), {"schedule": "zbv", "gather": "microbatch"}),
    "tp": (
        functools.partial(layered, spec=P(None, "tp")),
        "tp",
        [{"up": P(None, "tp"), "down": P("tp")}] * 4,
        P(),
        {"schedule": "1f1b", "cuts": [1]},
    ),
    "tied": (tied, "dp", None, P("dp"), {"schedule": "gpipe", "cuts": [1]}),
}


def of_all_ranks(price):
    """What one process logs that plays all ranks: a message is sent once, and what goes over the whole axis is once there."""
    found = collections.Counter()
    for i, rank in enumerate(price.ranks):
        for row in rank.comms:
            if row.op != "receive" and (row.op == "send" or "pp" not in row.axes or i == 0):
                found[row.op, row.axis, row.bytes] += 1
    return found


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_calls_are_those_of_a_run(name):
    loss, axis, base, data, how = CASES[name]
    sizes, names = ((2,), ("pp",)) if axis is None else ((2, 2), ("pp", axis))
    piped = vfn.pipeline(loss, "pp", microbatches=PARTS, **how)
    step, args = stepped(piped, clips=name == "fsdp"), laid_out(piped, vfn.abstract_mesh(sizes, names), base, data)
    price = vfn.price(step, *args, donate_argnums=(0, 1))
    with vfn.simulate(4 if axis else 2):
        mesh = vfn.make_mesh(sizes, names)
        made = vfn.tree.map(lambda x: vfn.shard(torch.ones(x.shape, dtype=x.dtype), mesh, vfn.spec_of(x)), args)
        with vfn.use_mesh(mesh), vfn.comm_log() as log:
            vfn.jit(step)(*made)
    assert of_all_ranks(price) == collections.Counter((row.op, row.axis, row.bytes) for row in log)
    assert price.seconds == pytest.approx(price.compute + price.exposed + price.bubble)
    assert all(price.seconds == pytest.approx(one.compute + one.exposed + one.bubble) for one in price.ranks)
    assert price.peak == max(one.peak for one in price.ranks)
    busiest = max(price.ranks, key=lambda one: one.compute)
    assert (price.bytes, price.calls, price.bubble) == (busiest.bytes, busiest.calls, busiest.bubble)


def test_each_rank_sends_and_needs_what_is_predicted_of_it(gloo):
    """The most that is alive, and collectives and messages, of layouts in `benchmarks.piped_prices`. What the sums of gradients
    become behind the pipeline is no part of its step."""
    config = dataclasses.replace(piped_prices.CONFIG, layers=4, vocab=128, dim=64, hidden=1024)
    layouts = [piped_prices.LAYOUTS[i] for i in part((5, 7, 2), 3)]
    found = list(zip(*gloo(4, functools.partial(piped_prices.run, layouts, 1, config))))
    for (text, sizes, how), ranks in zip(layouts, found):
        price = piped_prices.priced(text, sizes, how, "cpu", config)
        wrong, ratio = piped_prices.beside(price, ranks, sizes)
        assert wrong == 0
        assert ratio == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipev"])
def test_it_takes_as_long_as_the_schedule_of_its_tasks(schedule):
    """Where messages take next to no time; with slow ones it waits for these, too, and says so."""
    params = [S((256, 256), torch.float32) for _ in range(4)]

    def loss(params, x):
        for w in params:
            x = vfn.cut((x @ w).relu())
        return x.square().sum()

    chunks = {"chunks": 2} if schedule == "interleaved" else {}
    cuts = [0, 1, 2] if schedule in ("interleaved", "zbv", "dualpipev") else [1]
    piped = vfn.pipeline(loss, "pp", microbatches=8, schedule=schedule, cuts=cuts, **chunks)
    ask = functools.partial(vfn.price, vfn.value_and_grad(piped), params, S((512, 256), torch.float32), mesh={"pp": 2})
    price = ask(hardware=CLUSTER)
    assert [one.rank for one in price.stages] == list(piped._schedules[2].placement)
    of = lambda kind: [one.seconds.get(kind, 0.0) for one in price.stages]
    both = [bw or b + w for bw, b, w in zip(of("BW"), of("B"), of("W"))]
    back = of("B") if any(of("W")) else both
    wanted = piped._schedules[2].simulate(vfn.schedules.Costs(of("F"), back, of("W")))
    assert price.seconds == pytest.approx(wanted.makespan, rel=0.02)
    assert price.bubble == pytest.approx(wanted.makespan - max(wanted.busy), rel=0.1, abs=0.02 * price.seconds)
    slow = ask(hardware=dataclasses.replace(CLUSTER, links=(Link(8, (Protocol(0, 0.5, 1e12),)),)))
    assert slow.compute == pytest.approx(price.compute)
    assert slow.exposed >= 0.5 > price.exposed


def test_pipelines_side_by_side():
    """By schedule and microbatches, in one table with the stages of the first; and beside the step without."""
    prices, mesh = {}, vfn.abstract_mesh((4,), ("pp",))
    for schedule, parts in (("gpipe", 4), ("1f1b", 4), ("1f1b", 16), ("zb-h1", 4)):
        piped = vfn.pipeline(layered, "pp", microbatches=parts, schedule=schedule, cuts=[0, 1, 2])
        args = laid_out(piped, mesh)
        prices[f"{schedule} {parts}"] = vfn.price(stepped(piped), *args, hardware=CLUSTER)
    first = prices["gpipe 4"]
    both = first.compare(**prices)
    assert [one.name for one in both][2:] == [*prices][1:]
    assert "bubble" in repr(both)
    assert prices["1f1b 4"].ranks[-1].peak < first.ranks[-1].peak
    assert prices["1f1b 16"].bubble < prices["1f1b 4"].bubble
    assert prices["zb-h1 4"].bubble < prices["1f1b 4"].bubble
    text = repr(first).splitlines()
    assert sum(line.strip().startswith("pp=") for line in text) == len(first.stages) == 4
    assert "stage" in repr(first)
    whole = first.compare(tuple(P() for _ in range(3)))[1]  # parameters on all ranks along the axis
    assert whole.peak > first.peak
    assert whole.calls["pp"] > first.calls["pp"]
    with pytest.raises(vfn.errors.TransformError, match="stages do not run on an abstract mesh"):
        vfn.jit(stepped(piped))(*args)


def test_tasks_are_those_of_the_devices_that_it_is_priced_for():
    """GPUs compute while parameters are gathered, and processes on CPUs wait."""
    big = [{name: S((1024, 1024), torch.float32) for name in ("up", "down")} for _ in range(4)]
    piped = vfn.pipeline(layered, "pp", microbatches=2, cuts=[1], gather="microbatch")
    step = lambda *args: vfn.grad(piped)(*args)
    ask = functools.partial(vfn.price, step, big, S((4096, 1024), torch.float32), mesh={"pp": 2, "dp": 4})
    price, waited = (ask(specs=(P("dp"), P("dp")), hardware=on) for on in ("h100", "cpu"))
    gathers = lambda one: sum(row.seconds for row in one.traffic if row.op == "all_gather")
    assert price.exposed < 0.9 * gathers(price)
    assert waited.exposed >= gathers(waited)


def test_values_at_places_cost_those_that_have_them():
    """Of a step without a pipeline, and of arrays that lie there already."""
    step = lambda a, b: (torch.tanh(a @ a), vfn.with_sharding(b @ b @ b, P()))
    n, mesh = 64, vfn.abstract_mesh((2,), ("pp",))
    args = vfn.shard((S((n, n), torch.float32),) * 2, mesh, (P(at={"pp": 0}), P(at={"pp": 1})))
    price = vfn.price(step, *args)
    assert [one.at for one in price.ranks] == [{"pp": 0}, {"pp": 1}]
    assert [one.calls for one in price.ranks] == [{"pp": 1}] * 2
    first, second = (one.memory for one in price.ranks)
    assert first.arguments == second.arguments == 4 * n * n
    assert price.ranks[1].compute > price.ranks[0].compute
    assert (price.bubble, price.stages) == (0, ())
