"""What schedules of pipelines are held against: ranks that run one, value by value."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator

from vescale_fn import schedules
from vescale_fn.errors import ScheduleError
from vescale_fn.schedules import Action, Overlap, Schedule, letters


def _actions(task):
    return tuple(task) if isinstance(task, Overlap) else (task,)


def _needs(action, stages):
    """What an action needs: (kind, stage, microbatch), "B" for "BW", too."""
    kind, stage, i = action
    if kind == "F":
        return [] if stage == 0 else [("F", stage - 1, i)]
    if kind == "W":
        return [("B", stage, i)]
    return [("F", stage, i)] + ([] if stage == stages - 1 else [("B", stage + 1, i)])


def runs(schedule: Schedule, blocking: bool) -> bool:
    """Whether ranks that follow the rows of a schedule come to their ends, and have then run each task of each stage once."""
    placement, rows, stages = schedule.placement, schedule.order, schedule.stages
    if any(rank not in range(len(rows)) for rank in placement):
        return False
    if any(placement[a.stage] != rank for rank, row in enumerate(rows) for task in row for a in _actions(task)):
        return False
    at, values = [0] * len(rows), [set() for _ in rows]
    sent, room = defaultdict(deque), defaultdict(set)  # on the way between two stages; where it has arrived
    held = [0] * len(rows)  # sends of a rank that have not arrived
    moved = True
    while moved:
        moved = False
        for way, queue in sent.items():
            while queue and not (blocking and room[way]):
                room[way].add(queue.popleft())
                held[placement[way[0]]] -= 1
                moved = True
        for rank, row in enumerate(rows):
            if at[rank] == len(row) or (blocking and held[rank]):
                continue
            task, used = _actions(row[at[rank]]), []
            for value, stage in ((value, action.stage) for action in task for value in _needs(action, stages)):
                if placement[value[1]] == rank and value not in values[rank]:
                    return False  # on this rank, and never run
                if placement[value[1]] != rank:
                    used.append((value, (value[1], stage)))
            if any(value not in room[way] for value, way in used):
                continue
            for value, way in used:
                room[way].discard(value)
            for action in task:
                value = ("B" if action.kind == "BW" else action.kind, action.stage, action.microbatch)
                values[rank].add(value)
                other = action.stage + {"F": 1, "B": -1, "W": stages}[value[0]]
                if 0 <= other < stages and placement[other] != rank:
                    sent[action.stage, other].append(value)
                    held[rank] += 1
            at[rank], moved = at[rank] + 1, True
    counts = Counter(action for row in rows for task in row for action in _actions(task))
    each = [
        tuple(counts[Action(kind, stage, i)] for kind in ("F", "B", "W", "BW"))
        for stage in range(stages)
        for i in range(schedule.microbatches)
    ]
    finished = all(k == len(row) for k, row in zip(at, rows))
    return finished and each != [] and all(count in ((1, 1, 1, 0), (1, 0, 0, 1)) for count in each)


def verdicts(seed: int) -> list[tuple[bool, bool]]:
    """Of a random schedule, with sends that never wait and with rendezvous: what `check` says, and whether ranks run it."""
    schedule, found = random_schedule(random.Random(seed)), []
    for blocking in (False, True):
        try:
            schedule.check(blocking)
            said = True
        except ScheduleError:
            said = False
        found.append((said, runs(schedule, blocking)))
    return found


def random_schedule(rng: random.Random) -> Schedule:
    """A schedule that may be valid or not: tasks in a random order that respects their inputs, then a few changes."""
    p, m = rng.randint(1, 4), rng.randint(1, 4)
    stages = p * rng.choice((1, 1, 2))
    placement = list(range(p)) + rng.choice((list(range(p)), list(range(p))[::-1]))
    placement = placement[:stages]
    if rng.random() < 0.1:
        rng.shuffle(placement)
    split = {stage: rng.random() < 0.5 for stage in range(stages)}
    left = [
        Action(kind, stage, i)
        for stage in range(stages)
        for i in range(m)
        for kind in (("F", "B", "W") if split[stage] else ("F", "BW"))
    ]
    done, rows = set(), [[] for _ in range(p)]
    eager = rng.random()  # the more, the later microbatches wait
    while left:
        ready = [a for a in left if all(value in done for value in _needs(a, stages))]
        ready.sort(key=lambda a: (a.microbatch, a.kind == "F"))
        chosen = ready[0] if rng.random() < eager else rng.choice(ready)
        left.remove(chosen)
        done.add(("B" if chosen.kind == "BW" else chosen.kind, chosen.stage, chosen.microbatch))
        rows[placement[chosen.stage]].append(chosen)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        _change(rows, rng)
    return Schedule(tuple(placement), tuple(map(tuple, rows)))


def _change(rows, rng):
    """One change at random: two neighbours exchanged, one moved, dropped or run twice, or two neighbours run at once."""
    row = rng.choice([row for row in rows if row])
    i = rng.randrange(len(row))
    what = rng.choice(("exchange", "exchange", "exchange", "move", "drop", "twice", "at once", "at once"))
    if what == "exchange" and i + 1 < len(row):
        row[i], row[i + 1] = row[i + 1], row[i]
    elif what == "move":
        row.insert(rng.randrange(len(row)), row.pop(i))
    elif what == "drop" and rng.random() < 0.3:
        row.pop(i)
    elif what == "twice" and rng.random() < 0.3:
        row.insert(rng.randrange(len(row)), row[i])
    elif what == "at once" and i + 1 < len(row) and not any(isinstance(x, Overlap) for x in row[i : i + 2]):
        row[i : i + 2] = [Overlap(row[i], row[i + 1])]


# What the literature says of each schedule of p ranks and m microbatches: the idle time of rank 0 and the chunks that each rank
# holds; None where nothing is said. F, B and W are of a rank's whole share of the model; for dualpipev and zbv, of one stage.
FORMULAS = {
    "gpipe": lambda p, m, F, B, W: ((p - 1) * (F + B + W), [m] * p),
    "one_f_one_b": lambda p, m, F, B, W: ((p - 1) * (F + B + W), [min(m, p - r) for r in range(p)]),
    "zb_h1": lambda p, m, F, B, W: ((p - 1) * (F + B - W) if W <= F and m >= p else None, [min(m, p)] * p),
    "zb_h2": lambda p, m, F, B, W: (
        max(0, (p - 1) * (F + B - 2 * W)) if F >= min(B, W) and m >= 2 * p - 1 else None,
        [min(m, 2 * p - 1)] * p,
    ),
    "zbv": lambda p, m, F, B, W: (
        0 if F == B == W and m >= 2 * p - 1 else None,
        [2 * p] * p if m >= 2 * p - 1 else None,
    ),
    "dualpipev": lambda p, m, F, B, W: (
        (p - 1) * ((F + B + W) + (B + W) - 3 * W) if F == B >= W else None,
        [2 * p + 1] * p,
    ),
    **{
        f"interleaved {v}": lambda p, m, F, B, W, v=v: (
            (p - 1) * (F + B + W) // v if m >= p else None,
            [min(v * m, v * p + p - 1 - 2 * r) for r in range(p)] if m % p == 0 else None,
        )
        for v in (2, 3)
    },
}


def formula_faults(name: str, p: int, m: int, costs: list[tuple[int, int, int]]) -> list[str]:
    """Where the simulator differs from `FORMULAS`; the schedule is checked, too, with sends that block where it may."""
    function, _, v = name.partition(" ")
    if function == "dualpipev" and m < 2 * p:
        return []
    schedule = getattr(schedules, function)(p, m, *map(int, filter(None, [v])))
    schedule.check(blocking=not v or m % p == 0 or m < 2 * p)
    chunks = int(v or 1)
    faults = []
    for whole in costs:
        timeline = schedule.simulate(schedules.Costs(*(c // chunks for c in whole)))
        idle, held = FORMULAS[name](p, m, *whole)
        if idle is not None and timeline.idle[0] != idle:
            faults.append(f"{name} {p=} {m=} {whole}: idle {timeline.idle[0]}, not {idle}")
        if idle is not None and max(timeline.idle) != timeline.idle[0]:
            faults.append(f"{name} {p=} {m=} {whole}: another rank is idle for longer")
        if held is not None and list(timeline.in_flight) != held:
            faults.append(f"{name} {p=} {m=}: in flight {timeline.in_flight}, not {held}")
    return faults


def least_makespan(
    m: int, F: list[float], B: list[float], W: list[float], way: float, limit: int, known: float
) -> float:
    """The least makespan of a schedule with one stage a rank and at most `limit` microbatches in flight: branch and bound.

    Tasks are added by the times at which they begin, each rank's next F, B or W, microbatches in ascending order. Of two
    beginnings with the same tasks, one suffices if in it everything is free, or there, no later than in the other.
    `known` is the makespan of a schedule that there is; what needs no less is not followed.
    """
    p, best = len(F), known
    costs = [(F[r], B[r], W[r]) for r in range(p)]
    tails = [sum(way + B[q] for q in range(r)) for r in range(p)]  # from the end of a B to that of the same of rank 0
    seen: dict[tuple, list[tuple]] = {}

    def follow(counts, free, gets, begun):
        """`counts`: of F, B, W for each rank; `gets`: when the inputs of F and B are there that have not run."""
        nonlocal best
        bound = max(
            max(
                free[r] + sum((m - n) * c for n, c in zip(counts[r], costs[r])),
                free[r]
                + (m - counts[r][0]) * F[r]
                + (m - counts[r][1]) * B[r]
                + (tails[r] + W[0]) * (counts[r][1] < m),
            )
            for r in range(p)
        )
        if bound >= best:
            return
        if all(n[2] == m for n in counts):
            best = bound
            return
        times = (begun, *free, *(t for pair in gets for queue in pair for t in queue))
        others = seen.setdefault(counts, [])
        if any(all(a <= b for a, b in zip(other, times)) for other in others):
            return
        others[:] = [other for other in others if not all(b <= a for a, b in zip(other, times))] + [times]
        steps = []
        for r in range(p):
            f, b, w = counts[r]
            if f < m and f - w < limit and gets[r][0]:
                steps.append((max(free[r], gets[r][0][0]), r, 0))
            if b < f and gets[r][1]:
                steps.append((max(free[r], gets[r][1][0]), r, 1))
            if w < b:
                steps.append((free[r], r, 2))
        for start, r, kind in sorted(step for step in steps if step[0] >= begun):
            end, queues = start + costs[r][kind], [list(pair) for pair in gets]
            if kind < 2:
                queues[r][kind] = queues[r][kind][1:]
                to = r if (kind, r) == (0, p - 1) else r + 1 - 2 * kind
                if to >= 0:
                    used_by = 1 if kind == 1 or to == r else 0
                    queue = queues[to][used_by]  # what has been used has arrived, and left the way free
                    there = end if to == r else max(end, queue[-1] if queue else 0) + way
                    queues[to][used_by] = (*queue, there)
            n = tuple(k + (i == kind) for i, k in enumerate(counts[r]))
            follow(
                (*counts[:r], n, *counts[r + 1 :]),
                (*free[:r], end, *free[r + 1 :]),
                tuple(map(tuple, queues)),
                start,
            )

    follow(((0, 0, 0),) * p, (0,) * p, (((0,) * m, ()), *((((), ()),) * (p - 1))), 0)
    return best


def least_of_all(p: int, m: int, costs: schedules.Costs, limit: int) -> float:
    """The least makespan of all schedules that there are with one stage a rank; for very few microbatches."""

    def rows(text: str, f: int, b: int, w: int) -> Iterator[str]:
        if w == m:
            yield text
        if f < m and f - w < limit:
            yield from rows(text + "f", f + 1, b, w)
        if b < f:
            yield from rows(text + "b", f, b + 1, w)
        if w < b:
            yield from rows(text + "w", f, b, w + 1)

    best = math.inf
    for texts in itertools.product(rows("", 0, 0, 0), repeat=p):
        schedule = Schedule(range(p), [letters.row(text, r) for r, text in enumerate(texts)])
        with contextlib.suppress(ScheduleError):
            best = min(best, schedule.simulate(costs).makespan)
    return best


def auto_over_optimum(seed: int) -> float:
    """How much longer `auto` takes than any schedule needs, at random costs within a random limit of memory, as a ratio."""
    rng = random.Random(seed)
    p, m = rng.choice((2, 3, 3)), rng.choice((2, 3, 4, 4))
    f, b, w = ([rng.randint(1, 10) for _ in range(p)] for _ in range(3))
    costs, limit = schedules.Costs(f, b, w, p2p=rng.choice((0, rng.randint(0, 5)))), rng.randint(1, m)
    timeline = schedules.auto(costs, p, m, limit).simulate(costs)
    assert max(timeline.in_flight) <= limit
    return timeline.makespan / least_makespan(m, f, b, w, costs.p2p, limit, math.inf)


def slower_than_named(seed: int, most: int = 8) -> list[str]:
    """The named schedules that are faster than `auto` at random costs and sizes and hold no more; a limit that it exceeds."""
    rng = random.Random(seed)
    p, m, v = rng.randint(2, 4), rng.randint(1, most), rng.choice((1, 1, 2))
    f, b, w = ([rng.randint(1, 10) for _ in range(p * v)] for _ in range(3))
    costs = schedules.Costs(f, b, w, p2p=rng.choice((0, rng.randint(0, 4))), overlap=rng.choice((0, 0.5)))
    limit = rng.choice((v * m, rng.randint(v, v * p + 1)))
    found = schedules.auto(costs, p, m, limit)
    found.check(blocking=False)
    timeline = found.simulate(costs)
    names = (
        ("gpipe", "one_f_one_b", "zb_h1", "zb_h2")
        if v == 1
        else ("interleaved", "zbv", "dualpipev")[: 2 + (m >= 2 * p)]
    )
    faults = [f"seed {seed}: {timeline.in_flight} are more than {limit}"] * (max(timeline.in_flight) > limit)
    for name in names:
        other = getattr(schedules, name)(p, m, *[v] * (name == "interleaved")).simulate(costs)
        if max(other.in_flight) <= limit and other.makespan < timeline.makespan:
            faults.append(f"seed {seed}: {name} takes {other.makespan}, not {timeline.makespan}")
    return faults
