"""Offsets in one block of memory: valid, as small as the best there is, and of real plans as small as what is alive at once."""

import csv
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.plan.ir import packing
from vescale_fn.plan.ir.packing import pack

pytestmark = pytest.mark.fast
INSTANCES = Path(__file__).parents[1] / "benchmarks" / "data" / "minimalloc"


def instance(rng: random.Random, count: int, moments: int) -> list[tuple[int, int, int]]:
    """Buffers as (first, last, bytes)."""
    ends = [sorted(rng.choices(range(moments), k=2)) for _ in range(count)]
    return [(first, last, rng.randrange(1, 9)) for first, last in ends]


def valid(buffers: list[tuple[int, int, int]], offsets: np.ndarray, height: int) -> bool:
    """Whether all lie in the block, and none that are alive at one moment overlap."""
    placed = list(zip(buffers, map(int, offsets), strict=True))
    apart = all(
        a[1] < b[0] or b[1] < a[0] or at + a[2] <= other or other + b[2] <= at
        for (a, at), (b, other) in itertools.combinations(placed, 2)
    )
    return apart and all(0 <= at and at + buffer[2] <= height for buffer, at in placed)


def best(buffers: list[tuple[int, int, int]]) -> int:
    """The least height there is: every buffer, in every order, dropped onto those before it."""
    found = sum(size for _, _, size in buffers)
    for order in itertools.permutations(buffers):
        tops: list[tuple[tuple[int, int, int], int]] = []
        for first, last, size in order:
            below = [top for (a, b, _), top in tops if a <= last and first <= b]
            tops.append(((first, last, size), max(below, default=0) + size))
        found = min(found, max(top for _, top in tops))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_of_a_few_buffers_the_packing_is_the_best_of_all(seed):
    rng = random.Random(seed)
    buffers = instance(rng, rng.randrange(1, 7), rng.randrange(1, 8))
    found = pack(*zip(*buffers))
    assert valid(buffers, found.offsets, found.height)
    assert found.height == best(buffers)


@pytest.mark.parametrize("count", [0, 1, 30, 200])
@pytest.mark.parametrize("with_search", [True, False])
def test_many_buffers_lie_apart_with_the_c_library_and_without(monkeypatch, count, with_search):
    if not with_search:
        monkeypatch.setattr(packing, "library", None)
    buffers = instance(random.Random(count), count, 40)
    found = pack(*zip(*buffers)) if buffers else pack((), (), ())
    assert valid(buffers, found.offsets, found.height)
    assert found.least <= found.height <= 1.3 * found.least
    assert np.array_equal(found.offsets, (pack(*zip(*buffers)) if buffers else pack((), (), ())).offsets)


def test_a_capacity_that_is_enough_is_where_the_search_ends():
    buffers = instance(random.Random(3), 60, 20)
    least = pack(*zip(*buffers)).least
    found = pack(*zip(*buffers), capacity=2 * least)
    assert valid(buffers, found.offsets, 2 * least)


@pytest.mark.parametrize("name", ["B", "E", "H", "J"])  # the others take a second each: `benchmarks/arena.py`
def test_instances_without_any_slack_are_packed(name):
    with (INSTANCES / f"{name}.csv").open() as file:
        buffers = [(int(row["lower"]), int(row["upper"]) - 1, int(row["size"])) for row in csv.DictReader(file)]
    found = pack(*zip(*buffers), capacity=1_048_576)
    assert valid(buffers, found.offsets, 1_048_576)


def step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = torch.nn.functional.gelu(h @ w)
        return h.square().mean()

    value, grads = vfn.value_and_grad(loss)(params)
    return value, [w - 0.1 * g for w, g in zip(params, grads)]


def test_the_arena_of_a_step_is_what_is_alive_at_once():
    params, x = [torch.randn(24, 24) for _ in range(6)], torch.randn(40, 24)
    lowered = vfn.jit(step, donate_argnums=0).lower(params, x)
    arena, use = lowered.arena(alignment=4), lowered.memory()
    assert arena.bytes <= 1.01 * arena.least
    assert arena.least == use.peak - use.arguments
    buffers = [(slot.first, slot.last, slot.bytes) for slot in arena.slots]
    assert valid(buffers, np.array([slot.offset for slot in arena.slots]), arena.bytes)
    assert all(slot.offset % 512 == 0 == slot.bytes % 512 for slot in lowered.arena(alignment=512).slots)


def test_the_arena_of_a_loop_has_room_for_one_iteration():
    w, x = torch.randn(7, 16, 16), torch.randn(5, 16)
    lowered = vfn.jit(lambda w, x: vfn.scan(lambda h, w: (torch.tanh(h @ w), h.sum()), x, w)).lower(w, x)
    arena, use = lowered.arena(alignment=4), lowered.memory()
    assert arena.least == arena.bytes
    assert 0 < use.peak - use.arguments <= arena.bytes <= 2 * (use.peak - use.arguments)


def test_the_arena_of_a_sharded_step_and_of_nothing():
    with vfn.simulate(4):
        mesh = vfn.make_mesh((4,), ("dp",))
        params = vfn.shard(
            [torch.randn(24, 25) if i % 2 == 0 else torch.randn(25, 24) for i in range(4)], mesh, P("dp")
        )
        arena = vfn.jit(step).lower(params, vfn.shard(torch.randn(10, 24), mesh, P("dp"))).arena()
    assert 0 < arena.least <= arena.bytes <= 1.01 * arena.least
    nothing = vfn.jit(lambda x: x).lower(torch.ones(3)).arena()
    assert (nothing.bytes, nothing.slots) == (0, ())


def test_an_arena_says_its_size_and_what_is_largest_and_draws_itself():
    arena = vfn.jit(lambda x: (x @ x.T).exp() @ x).lower(torch.ones(32, 16)).arena()
    first, largest, _ = repr(arena).splitlines()
    assert first == "arena of 6.00 KiB for 2 values of 6.00 KiB; 6.00 KiB are alive at once (1.0000)"
    assert largest.startswith("    4.00 KiB at            0, calls 0 to 2: linear, test_plan_arena.py:")
    assert arena._repr_html_().count("<rect") == 2


def test_what_a_choice_gives_has_one_place():
    lowered = vfn.jit(lambda x: vfn.cond(x.sum() > 0, torch.sin, torch.cos, x)).lower(torch.ones(64, 64))
    use = lowered.memory()
    assert use.peak - use.arguments <= lowered.arena().bytes <= 1.05 * (use.peak - use.arguments)
