"""Values that wait in the memory of the host under `jit(memory=...)`: chosen where that is fastest, copied beside what is computed,
the same bits."""

import dataclasses
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import vescale_fn as vfn
from benchmarks import small_budgets
from benchmarks.peak_memory import accounting
from benchmarks.small_budgets import on_device
from vescale_fn._core.base import host_memory, no_values
from vescale_fn.plan.execution import codegen
from vescale_fn.plan.execution.in_arena import in_arena
from vescale_fn.plan.ir import costs, host_copies
from vescale_fn.plan.ir import graph as plan
from vescale_fn.plan.ir.memory_limit import limit
from vescale_fn.plan.ir.memory_use import memory
from vescale_fn.plan.lowered import Lowered
from vescale_fn.plan.passes import host_trips
from vescale_fn.plan.passes.budget import Budget
from vescale_fn.plan.passes.host_trips import Trip
from vescale_fn.plan.passes.reuse_memory import reuse
from vescale_fn.plan.saved.graph_data import GraphReader, GraphWriter

EARLY = [one for one in vfn.plan.PASSES if one.__name__ not in ("recompute", "donate", "reuse", "foreach")]


@pytest.fixture
def small_device(monkeypatch):
    """What is said to be on a GPU is on one whose rates suit small sizes."""
    monkeypatch.setitem(costs.RATES, "cuda", small_budgets.SMALL)


def layers(ws, x):
    for w in ws:
        x = torch.tanh(F.gelu(x @ w).sin())
    return x.square().sum()


def arguments(count=5):
    return [torch.randn(64, 64) / 8 for _ in range(count)], torch.randn(128, 64)


def plain(ws, x):
    """The plan of the gradient, as if its values were on a device, before memory is reused."""
    return on_device(vfn.jit(vfn.grad(layers), passes=EARLY).lower(ws, x).graph)


def within(graph, share):
    return reuse(Budget(limit(share))(plan.copied(graph), (reuse,)))


def kinds(graph):
    return [found.__name__ for node in graph.nodes if (found := host_copies.runs(node)) is not None]


class Unseen(host_memory.HostMemory):
    """Memory of the host that does not count as that of the device, which is the CPU here."""

    def offload(self, x):
        return Hidden(self, x, x.numpy().copy(), None, None)


class Hidden(host_memory.OnHost):
    def fetch(self):
        x = torch.empty(self.host.shape, dtype=torch.float32)
        x.numpy()[...] = self.host
        return host_memory.Arriving(self, x, None)


@pytest.mark.parametrize("seed", [1, 8])
def test_no_way_of_keeping_values_or_sending_them_is_faster(seed, small_device):
    assert small_budgets.compared(seed, sending=True) == "equal"


@pytest.mark.parametrize("share", ["85 %", "60 %"])
def test_no_bit_depends_on_it_and_what_is_predicted_is_what_is_counted(share, small_device, monkeypatch):
    ws, x = arguments()
    graph = plain(ws, x)
    fitting = within(graph, share)
    assert memory(fitting).peak <= limit(share).of(memory(within(graph, "100 %")).peak)
    assert kinds(fitting).count("offload") == kinds(fitting).count("fetched") >= 2
    want, given = codegen.generate(graph).run([*ws, x]), [*ws, x]
    monkeypatch.setattr(codegen, "HostMemory", Unseen)
    run = codegen.generate(fitting).run
    for _ in range(2):
        with accounting(given) as account:
            got = run([*given])
        assert all(map(torch.equal, got, want))
        del got
    assert 0.97 <= memory(fitting).peak / account.peak <= 1.03


def test_it_takes_less_time_than_without_the_host(small_device, monkeypatch):
    graph = plain(*arguments(4))
    with_host = costs.total(within(graph, "60 %"))
    free = dataclasses.replace(small_budgets.SMALL, host=math.inf)  # a copy takes less time than to begin it
    monkeypatch.setitem(costs.RATES, "cuda", free)
    without = within(graph, "60 %")
    assert not kinds(without)
    assert with_host < costs.total(without)


def test_a_plan_on_the_cpu_sends_nothing():
    ws, x = arguments()
    lowered = vfn.jit(vfn.grad(layers), memory="70 %").lower(ws, x)
    assert not kinds(lowered.graph)


def test_the_text_of_a_plan_has_its_copies_between_the_calls(small_device):
    fitting = within(plain(*arguments()), "85 %")
    lines = Lowered(fitting, "f").text(lines=None).splitlines()
    at = {name: next(i for i, line in enumerate(lines) if f" = {name}(" in line) for name in ("offload", "fetch")}
    assert at["offload"] < at["fetch"]
    for one, other in (("offload", "offloaded"), ("fetch", "fetched")):  # something is computed meanwhile
        begin = next(i for i, line in enumerate(lines) if f" = {one}(" in line)
        name = lines[begin].split()[0]
        end = next(i for i, line in enumerate(lines) if f" = {other}({name}" in line)
        assert any(
            " = torch" not in line and "fetch" not in line and "offload" not in line for line in lines[begin + 1 : end]
        )


def test_a_saved_plan_has_its_copies_and_its_code_memory_for_them(small_device):
    ws, x = arguments()
    graph = within(plain(ws, x), "60 %")
    again = GraphReader([], [], [], no_values.empty).graph(GraphWriter().graph(graph))
    assert kinds(again) == kinds(graph)
    assert memory(again).peak == memory(graph).peak
    run = codegen.generate(again).run
    assert all(map(torch.equal, run([*ws, x]), codegen.generate(graph).run([*ws, x])))


def test_values_in_an_arena_may_be_sent(small_device):
    ws, x = arguments()
    graph = within(plain(ws, x), "60 %")
    want = codegen.generate(graph).run([*ws, x])
    for node in graph.nodes:  # it runs on the CPU, and so must the arena
        value = node.meta.get("val")
        node.meta["val"] = (
            torch.empty_strided(value.shape, value.stride()) if isinstance(value, torch.Tensor) else value
        )
    run = codegen.generate(in_arena(graph)).run
    for _ in range(2):
        assert all(map(torch.equal, run([*ws, x]), want))


@pytest.mark.parametrize("seed", range(20))
def test_copies_stay_within_the_limit_and_do_not_overlap(seed):
    rng = random.Random(seed)
    count = 40
    seconds = [rng.random() for _ in range(count)]
    live = [rng.randint(0, 60) for _ in range(count)]
    trips = []
    for m in range(rng.randint(1, 8)):
        made, last, use = sorted(rng.sample(range(count), 3))
        trips.append(Trip(m, rng.randint(1, 30), 3 * rng.random(), made, last, use))
    most = max(live) + rng.choice((0, 10, 1000))
    before = [*live]
    host_trips.arrange(trips, live, seconds, most)
    assert max(live) <= most
    for trip in trips:
        assert trip.last < trip.leaves <= trip.comes <= trip.use
        for at in (*range(trip.last + 1, trip.leaves), *range(trip.comes, trip.use)):
            before[at] += trip.bytes
    assert before == live
    took = host_trips.total(trips, seconds, 0.0)
    assert sum(seconds) <= took + 1e-9
    assert took <= sum(seconds) + 2 * sum(trip.seconds for trip in trips) + 1e-9
    assert host_trips.total([], seconds, 1.0) == sum(seconds)


def test_where_there_is_room_copies_cost_nothing():
    trips = [Trip(m, 10, 2.0, 3 * m, 3 * m + 1, 59 - 3 * m) for m in range(5)]
    live, seconds = [0] * 60, [1.0] * 60
    host_trips.arrange(trips, live, seconds, 10**6)
    assert host_trips.total(trips, seconds, 0.0) == 60.0
    assert max(live) < 50


def test_what_flash_attention_takes_for_itself_counts():
    graph, op = fx.Graph(), torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    given = [graph.placeholder(name) for name in ("out", "query", "key", "value")]
    for node in given:
        node.meta["val"] = no_values.empty((2, 4, 8, 16), (512, 128, 16, 1), torch.bfloat16, torch.device("cuda", 0))
    call = graph.call_function(op, tuple(given))
    call.meta["val"] = [node.meta["val"] for node in given[:3]]
    graph.output((call,)).meta["val"] = None
    assert memory(graph).peak == 7 * 2 * 1024 + 4 * (1024 + 64)


# On a GPU


def big():
    draw = torch.Generator("cuda").manual_seed(0)
    ws = [torch.randn(2048, 2048, device="cuda", generator=draw) / 45 for _ in range(6)]
    return ws, torch.randn(8192, 2048, device="cuda", generator=draw)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"cuda_graph": True}, {"arena": True}])
def test_on_a_gpu_the_limit_holds_and_the_bits_stay(how):
    ws, x = big()
    want = vfn.jit(vfn.grad(layers))(ws, x)
    step = vfn.jit(vfn.grad(layers), memory="60 %", **how)
    use = step.lower(ws, x)
    assert "offload" in kinds(use.graph)
    for _ in range(3):
        assert all(map(torch.equal, step(ws, x), want))
    if not how:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - sum(one.nbytes for one in (*ws, x))
        step(ws, x)
        assert 0.97 <= use.memory().peak / (torch.cuda.max_memory_allocated() - others) <= 1.03


@pytest.mark.gpu
def test_on_a_gpu_calls_on_several_streams_do_not_meet():
    ws, x = big()
    want = vfn.jit(vfn.grad(layers))(ws, x)
    step = vfn.jit(vfn.grad(layers), memory="60 %")
    step(ws, x)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    for i in range(4):
        with torch.cuda.stream(streams[i % 2]):
            found.append(step(ws, x))
    torch.cuda.synchronize()
    assert all(all(map(torch.equal, got, want)) for got in found)


@pytest.mark.gpu
def test_on_a_gpu_an_error_between_leaves_no_copy_that_writes_later(monkeypatch):
    ws, x = big()
    step = vfn.jit(vfn.grad(layers), memory="60 %")
    want = step(ws, x)

    def planted(self):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="planted"):
        patch.setattr(host_memory.Arriving, "fetched", planted)
        step(ws, x)
    others = [torch.full_like(x, 7.0) for _ in range(6)]
    torch.cuda.synchronize()
    assert all(bool((one == 7).all()) for one in others)
    assert all(map(torch.equal, step(ws, x), want))
