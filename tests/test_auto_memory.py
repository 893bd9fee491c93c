"""`auto` within a memory: values are computed again where that is faster than to split more."""

import random
import sys
from dataclasses import replace

import pytest
import torch
import whole

import vescale_fn as vfn
from vescale_fn import P
from vescale_fn.choice import held_to

S = vfn.ShapeDtype


def layers(ws, x):
    def loss(ws):
        y = x
        for w in ws:
            y = torch.nn.functional.gelu(torch.tanh(y @ w))
        return y.square().mean()

    return vfn.tree.map(lambda p, g: p - 0.1 * g, ws, vfn.grad(loss)(ws))


LARGE = [S((2048, 2048), torch.bfloat16)] * 3, S((65536, 2048), torch.bfloat16)


def test_where_memory_binds_values_are_computed_again_or_wait_on_the_host() -> None:
    how = {"mesh": {"dp": 8}, "hardware": "h100", "donate_argnums": 0, "candidates": 1}
    free = vfn.auto(layers, *LARGE, **how)
    assert "computed again" not in repr(free)
    budget = int(0.85 * free.predicted.peak)
    tight = vfn.auto(layers, *LARGE, memory=budget, **how)
    assert tight.predicted.peak <= budget
    assert "computed again in" in repr(tight)
    split = {
        "specs": P("dp"),
        "mesh": how["mesh"],
        "hardware": "h100",
    }  # what is being gathered is sent nowhere
    held = vfn.price(vfn.jit(layers, memory=int(0.7 * vfn.price(layers, *LARGE, **split).peak)), *LARGE, **split)
    assert held.repeated.sent > 0
    assert "wait on the host" in held.text()


def test_what_is_priced_within_a_memory_is_what_runs() -> None:
    """On CPUs, where nothing waits on a host."""
    generator = torch.Generator().manual_seed(0)
    ws = list(torch.randn(3, 16, 16, dtype=torch.float64, generator=generator) / 4)
    x = torch.randn(4096, 16, dtype=torch.float64, generator=generator)
    slow = replace(vfn.hardware.cpu(4), launch=1e-9)
    free = vfn.auto(layers, ws, x, mesh={"dp": 4}, hardware=slow, candidates=1)
    budget = int(0.8 * free.predicted.peak)
    choice = vfn.auto(layers, ws, x, mesh={"dp": 4}, hardware=slow, candidates=1, memory=budget)
    assert choice.predicted.repeated.seconds
    mesh = vfn.abstract_mesh((4,), ("dp",))
    shapes = [S(w.shape, w.dtype, P(), mesh) for w in ws], S(x.shape, x.dtype, P("dp"), mesh)
    assert choice.specs == ([P()] * 3, P("dp"))
    assert choice.jit().lower(*shapes).memory().peak == choice.predicted.memory.peak <= budget
    with vfn.simulate(4):
        fast = choice.jit()
        for a, b in zip(layers(ws, x), fast(*vfn.shard((ws, x), choice.mesh(), choice.specs)), strict=True):
            torch.testing.assert_close(vfn.unshard(b), a)


def in_parts(w, x, microbatches):
    def loss(w, x):
        return torch.tanh(torch.nn.functional.gelu(x @ w[0]) @ w[1]).square().mean()

    value, grads = vfn.optim.microbatches(vfn.value_and_grad(loss), microbatches)(w, x)
    return vfn.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


def test_the_parts_of_a_batch_are_chosen_with_the_layout() -> None:
    generator = torch.Generator().manual_seed(0)
    w = list(torch.randn(2, 16, 16, dtype=torch.float64, generator=generator) / 4)
    x = torch.randn(4096, 16, dtype=torch.float64, generator=generator)
    slow = replace(vfn.hardware.cpu(4), launch=1e-9)
    how = {"mesh": {"dp": 4}, "hardware": slow, "candidates": 1, "fixed": (P(), P("dp"))}
    whole = vfn.auto(in_parts, w, x, microbatches=1, **how)
    free = vfn.auto(in_parts, w, x, microbatches=(2, 1), **how)
    assert (whole.microbatches, free.microbatches) == (1, 1)
    assert free.predicted.seconds == whole.predicted.seconds
    assert [one.microbatches for one in free.others] == [2]
    budget = int(0.62 * whole.predicted.peak)
    with pytest.raises(vfn.errors.VfnError, match=r"more ranks, or microbatches="):
        vfn.auto(in_parts, w, x, microbatches=1, memory=budget, **how)
    small = vfn.auto(in_parts, w, x, microbatches=(1, 2, 4), memory=budget, **how)
    assert small.microbatches > 1
    assert small.predicted.peak <= budget
    assert f"in {small.microbatches} parts" in repr(small)
    with vfn.simulate(4):
        got = small.jit()(*vfn.shard((w, x), small.mesh(), small.specs))
        for a, b in zip(vfn.tree.leaves(in_parts(w, x, 1)), vfn.tree.leaves(got), strict=True):
            torch.testing.assert_close(vfn.unshard(b), a)
    with pytest.raises(vfn.errors.TransformError, match="layers does not take microbatches="):
        vfn.auto(layers, w, x, microbatches=(1, 2), **how)


def sampled(rng):
    """A step of a few layers, and the shapes of its arguments."""
    kinds = [rng.choice([torch.tanh, torch.relu, torch.nn.functional.gelu]) for _ in range(rng.randint(2, 4))]
    dim, rows = rng.choice([256, 512]), rng.choice([1024, 8192])

    def step(ws, x):
        def loss(ws):
            y = x
            for kind, w in zip(kinds, ws):
                y = y + kind(y @ w)
            return y.square().mean()

        return vfn.tree.map(lambda p, g: p - 0.1 * g, ws, vfn.grad(loss)(ws))

    return step, [S((dim, dim), torch.float32)] * len(kinds), S((rows, dim), torch.float32)


@pytest.mark.parametrize("seed", range(40) if whole.WHOLE else (3,))
def test_it_is_never_worse_than_without_and_what_is_chosen_fits(seed: int, monkeypatch) -> None:
    rng = random.Random(seed)
    step, *args = sampled(rng)
    axes = rng.choice([{"a": 4}, {"a": 2, "b": 2}])
    how = {"mesh": axes, "hardware": "h100", "candidates": 2}
    budget = int(vfn.auto(step, *args, **how).predicted.peak * rng.choice((0.5, 0.7, 0.9)))

    def seconds() -> float:
        try:
            choice = vfn.auto(step, *args, memory=budget, **how)
        except vfn.errors.VfnError:
            return float("inf")
        assert choice.predicted.peak <= budget
        return choice.predicted.seconds

    found = seconds()
    monkeypatch.setattr(held_to, "_TRIES", 0)
    monkeypatch.setattr(sys.modules["vescale_fn.choice.search.search"], "add_repeats", lambda *_: None)
    assert found <= seconds() * (1 + 1e-9)
