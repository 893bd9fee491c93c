"""Bytes that are alive where calls run in other orders and some of them twice: what is counted at once beside the same, counted
event by event."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import fx

import vescale_fn as vfn
from benchmarks import small_budgets
from benchmarks.small_budgets import on_device
from vescale_fn._core.base import no_values
from vescale_fn.plan.ir import costs, inplace
from vescale_fn.plan.ir import graph as plan
from vescale_fn.plan.passes.boundary import Keeping, KeptAcross, gathered
from vescale_fn.plan.passes.event_counts import Counts, Events

EARLY = [one for one in vfn.plan.PASSES if one.__name__ not in ("recompute", "donate", "reuse", "foreach")]


def counted(counts, events, at, dropped):
    """The bytes at each event, the events that make memories and need them last, and how often what is special came up. Memories
    are known by their numbers, and copies of them by pairs of one and True."""
    made, read, last, copied = [], [], {}, set()
    for n, (i, again) in enumerate(events):
        makes, needs = (counts.made[i], counts.read[i]) if i >= 0 else ([~i], [])
        copied.update(makes if again else ())
        made.append([(m, again) for m in makes])
        read.append([(m, (again or i > at) and m in dropped and m in copied) for m in needs])
        last.update(dict.fromkeys((*made[-1], *read[-1]), n))
    live, found, free, seen = 0, [], Counter(), Counter()
    for n, (i, again) in enumerate(events):
        if i < 0:
            live += counts.bytes[~i]
            seen["back"] += 1
        if i < 0 or counts.nodes[i].op != "call_function":
            found.append(live)
            continue
        dying = [m for m, copy in read[n] if last[m, copy] == n]
        free.update(counts.bytes[m] for m in dying if plan.DONATED in counts.memories[m].maker.meta)
        gone = [counts.bytes[m] for m in dying if m not in counts.given]
        size, node = sum(counts.bytes[m] for m, _ in made[n]), counts.nodes[i]
        is_result = any(counts.memories[m] in counts.facts.results for m, _ in made[n])
        if size and is_result and free[size]:
            free[size] -= 1
            seen["donated"] += 1
        else:
            live += size
        over = inplace.is_pointwise(node) and size in gone
        seen.update(again=again, over=bool(over and size))
        found.append(live - size if over else live)
        live -= sum(gone) + sum(counts.bytes[m] for m, copy in made[n] if last[m, copy] == n)
    first = {m: n for n in reversed(range(len(events))) for m in made[n]}
    return found, first, last, seen


def line(boundary, choice):
    """The events of a choice: what is repeated, or comes from the host, stands before the first call that needs it."""
    found, repeats = [], dict(boundary._repeats(choice))
    for i, node in enumerate(boundary.nodes):
        again = [(x, boundary._comes(x, choice)) for x in repeats.get(i, ())]
        found += [(x if m is None else ~m, True) for x, m in again if m is not None or boundary.made[x]]
        found += [(i, False)] if boundary.made[i] or not node.users or i == boundary.at else []
    return found


def same(counts, events, alive, at, dropped):
    """What is special and came up, if all is as it is counted event by event."""
    pairs = list(zip(events.calls.tolist(), events.again.tolist(), strict=True))
    live, first, last, seen = counted(counts, pairs, at, dropped)
    assert alive.bytes == live
    assert all(type(count) is int for count in alive.bytes)
    count = len(counts.bytes)
    assert alive.last.tolist() == [last.get((m, copy), -1) for copy in (False, True) for m in range(count)]
    assert alive.made[:count].tolist() == [first.get((m, False), -1) for m in range(count)]
    return seen


def program(rng: random.Random, sending: bool) -> fx.Graph:
    """A random loss and its gradients, with updates of some arguments; some of them are donated."""

    def f(ws, x):
        grads = vfn.grad(lambda ws: losses(ws, x))(ws)
        return [w - 0.1 * g for w, g in zip(ws, grads)], [g * 2 for g in grads[1:]]

    def losses(ws, x):
        for w, kind in zip(ws, kinds):
            parts = torch.split(kind(x @ w), 8, dim=1)
            x = torch.cat([one.sin() * 2 for one in parts], 1)
            x = torch.var_mean(x, 0)[1] + x
        return x.square().sum()

    kinds = [rng.choice((torch.tanh, torch.exp, torch.nn.functional.silu)) for _ in range(3)]
    given = [torch.randn(16, 16) for _ in kinds], torch.randn(rng.choice((16, 24)), 16)
    graph = gathered(vfn.jit(f, passes=EARLY).lower(*given).graph)
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    for node in rng.sample(arguments, 3):
        node.meta[plan.DONATED] = True
    return on_device(graph) if sending else graph


@pytest.mark.parametrize("sending", [False, True])
def test_what_choices_need_is_what_is_counted_event_by_event(sending, monkeypatch):
    monkeypatch.setitem(costs.RATES, "cuda", small_budgets.SMALL)
    seen, lives = Counter(), []
    live = KeptAcross.live
    monkeypatch.setattr(KeptAcross, "live", lambda *args: lives.append((args, live(*args))) or lives[-1][1])
    for seed in range(6):
        rng = random.Random(seed)
        graph = program(rng, sending) if seed % 2 else small_budgets.small(seed)[0]
        calls = [i for i, node in enumerate(graph.nodes) if node.op == "call_function"]
        for at in rng.sample(calls, 4):
            boundary = KeptAcross(graph, at)
            for share in (0.0, 0.3, 0.6, 1.0):
                kept = frozenset(m for m in sorted(boundary.free) if rng.random() < share)
                sent = frozenset(m for m in sorted(boundary.copies) if m not in kept and rng.random() < 0.5)
                choice = Keeping(kept, sent)
                count = boundary.count(choice, 2**40)
                (counts, events, place, dropped), alive = lives.pop()
                seen += same(counts, events, alive, place, dropped)
                assert count.live == alive.bytes
                assert list(zip(events.calls, events.again, strict=True)) == line(boundary, choice)
                for trip in count.trips:
                    made, use = (events.calls.tolist().index(i) for i in (boundary.maker[trip.memory], ~trip.memory))
                    assert (trip.made, trip.last, trip.use) == (made, alive.last[trip.memory], use)
    assert {kind for kind, count in seen.items() if count > 4} == {"again", "over", "donated", *["back"] * sending}


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_and_with_any_repeats(seed):
    rng, seen = random.Random(seed), Counter()
    counts = Counts(program(rng, False))
    calls = [i for i, node in enumerate(counts.nodes) if node.op == "call_function"]
    own = [m for m in range(len(counts.bytes)) if m not in counts.given]
    for _ in range(20):
        once = list(range(len(counts.nodes)))
        for _ in range(rng.choice((0, 3, 200))):
            i, j = rng.sample(once, 2)
            once[i], once[j] = once[j], once[i]
        again = [*rng.sample(calls, rng.randrange(len(calls))), *(~m for m in rng.sample(own, rng.randrange(4)))]
        rng.shuffle(again)
        events = Events.of(np.array(once), sorted(rng.randrange(len(once)) for _ in again), again)
        at, dropped = rng.choice(calls), frozenset(rng.sample(own, rng.randrange(len(own))))
        seen += same(counts, events, counts.live(events, at, dropped), at, dropped)
    assert min(seen[kind] for kind in ("again", "over", "donated", "back")) > 0


def test_more_bytes_than_a_small_number_holds():
    graph, op = fx.Graph(), torch.ops.aten
    x = graph.placeholder("x")
    y = graph.call_function(op.tanh.default, (x,))
    z = graph.call_function(op.cumsum.default, (y, 0))
    out = graph.output((graph.call_function(op.mul.Tensor, (z, y)),))
    for node in graph.nodes:
        node.meta["val"] = None if node is out else no_values.empty((2**31,), (1,), torch.float32, torch.device("cpu"))
    counts = Counts(graph)
    alive = counts.live(Events.of(np.arange(len(counts.nodes)), (), ()), 1, frozenset())
    assert alive.bytes == [0, 2**33, 2**34, 2**34, 2**33]
