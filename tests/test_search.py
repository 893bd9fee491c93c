"""The search for a layout: its optimum is that of brute force, and it finds what experts have found."""

import math
import random

import numpy as np
import pytest
import torch
import whole

import vescale_fn as vfn
from vescale_fn._core.arrays.shapes import ShapeDtype
from vescale_fn.choice.recording import record
from vescale_fn.choice.search.held import held
from vescale_fn.choice.search.program import program
from vescale_fn.choice.search.search import best, replaced

SIZES = 32, 64, 96, 128, 4096


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> ShapeDtype:
    return ShapeDtype(torch.Size(sizes), dtype)


CALLS = {
    "mm": lambda a, b: a @ b,
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "relu": lambda a, b: a.relu(),
    "t": lambda a, b: a.t() * 1.0,
    "sum": lambda a, b: a.sum(0),
    "view": lambda a, b: a.reshape(-1),
    "softmax": lambda a, b: torch.softmax(a, -1),
}


def random_step(rng: random.Random):
    """A function of up to 7 calls, and the shapes of its arguments."""
    shapes = [(rng.choice(SIZES), rng.choice(SIZES)) for _ in range(rng.randint(1, 3))]
    given, calls, count = len(shapes), [], rng.randint(2, 7)
    while len(calls) < count:
        kind, i = rng.choice(["mm", *CALLS]), rng.randrange(len(shapes))
        a = shapes[i]
        fits = {
            "mm": [j for j, b in enumerate(shapes) if len(a) == len(b) == 2 and a[1] == b[0]],
            "add": [j for j, b in enumerate(shapes) if a == b],
            "mul": [j for j, b in enumerate(shapes) if a == b],
            "relu": [i],
            "sum": [i] * len(a),
        }.get(kind, [i] * (len(a) == 2))
        if fits:
            j = rng.choice(fits)
            calls.append((kind, i, j))
            new = {"mm": (a[0], shapes[j][-1] if shapes[j] else 0), "t": a[::-1], "sum": a[1:], "view": (math.prod(a),)}
            shapes.append(new.get(kind, a))

    def step(*xs):
        values = list(xs)
        for kind, i, j in calls:
            values.append(CALLS[kind](values[i], values[j]))
        read = {k for _, i, j in calls for k in (i, j)}
        return tuple(x for k, x in enumerate(values) if k >= given and k not in read) + (values[-1],)

    return step, [shape(*sizes) for sizes in shapes[:given]]


def brute_force(made, below: float, memory: float | None) -> list[int] | None:
    """Options that cost less than that and need no more memory, if there are any: all are tried, but for those that begin as
    what costs, or needs, more already."""
    holds, n = held(made), len(made.sites)
    last = lambda group: max(group.site, *(edge.site for edge in group.edges))
    groups = [[g for g in made.groups if last(g) == i] for i in range(n)]
    copies = [
        [(made.groups[k], live) for k, live in holds.copies.items() if last(made.groups[k]) == i] for i in range(n)
    ]
    rest = [sum(s.count * min(o.seconds for o in s.options) for s in made.sites[i:]) for i in range(n + 1)]
    chosen, best_ = [0] * n, [below, None]

    def go(i: int, cost: float, needs) -> None:
        if i == n:
            best_[:] = cost, list(chosen)
            return
        site = made.sites[i]
        for k, option in enumerate(site.options):
            chosen[i], more, bytes_ = k, cost + site.count * option.seconds, needs
            for (u, part), live in holds.values.items():
                if u == i:
                    bytes_ = bytes_ + live * holds.bytes(u, part, option.outs[part])
            for group in groups[i]:
                before = made.sites[group.site].options[chosen[group.site]].outs[group.part]
                more += sum(made.price(group, before, after) for after in holds.wanted(group, chosen))
            for group, live in copies[i]:
                before = made.sites[group.site].options[chosen[group.site]].outs[group.part]
                for after in holds.wanted(group, chosen):
                    if holds.is_sent(group, before, after):
                        bytes_ = bytes_ + live * holds.bytes(group.site, group.part, after)
            if more + rest[i + 1] < best_[0] and (memory is None or np.max(bytes_) <= memory):
                go(i + 1, more, bytes_)

    go(0, 0.0, 0.0)
    return best_[1]


@pytest.mark.parametrize("seed", range(whole.some(8, 500)))
def test_the_optimum_is_that_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    step, args = random_step(rng)
    recording = record(step, *args)
    two = len([*recording.graph.nodes]) < 9
    axes = rng.choice([{"a": 4}, {"a": 2, "b": 2}, {"a": 8, "b": 2}] if two else [{"a": 2}, {"a": 4}])
    ties = replaced(recording) if rng.random() < 0.5 else {}
    made = program(recording, axes, vfn.hardware.h100(2), ties)
    ((_, seconds, peak, _),) = best(made, None)
    assert brute_force(made, seconds * (1 - 1e-9), None) is None
    memory = peak * rng.choice((0.98, 0.9, 0.7))
    try:
        ((chosen, seconds, peak, _),) = best(made, memory)
    except vfn.errors.VfnError:
        assert brute_force(made, math.inf, memory) is None
    else:
        assert peak <= memory
        assert seconds == pytest.approx(made.seconds(chosen), rel=1e-12)
        assert brute_force(made, seconds * (1 - 1e-9), memory) is None
