"""What schedules of pipelines are held against: ranks that run one by rendezvous, message by message."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque

from vescale_fn.schedules import Action, Overlap, Schedule


def _actions(task):
    return tuple(task) if isinstance(task, Overlap) else (task,)


def _needs(action, stages):
    """What an action needs, and whether it is of its own stage."""
    kind, stage, i = action
    if kind == "F":
        return [] if stage == 0 else [(("F", stage - 1, i), False)]
    if kind == "W":
        return [(("B", stage, i), True)]
    return [(("F", stage, i), True)] + ([] if stage == stages - 1 else [(("B", stage + 1, i), False)])


class Rank:
    """One rank: how far it is, which values it has, and which messages it waits for before its next task."""

    def __init__(self, row):
        self.row, self.at, self.values, self.waiting = row, 0, set(), 0

    def ran(self, value):
        self.values.add(value)


def runs(schedule: Schedule, blocking: bool) -> bool:
    """Whether ranks that follow the rows of a schedule come to their ends, and have then run each task of each stage once."""
    placement, stages = schedule.placement, schedule.stages
    rows = schedule.order
    if any(not 0 <= rank < len(rows) for rank in placement):
        return False
    for rank, row in enumerate(rows):
        for task in row:
            for action in _actions(task):
                if not 0 <= action.stage < stages or placement[action.stage] != rank:
                    return False
    ranks = [Rank(row) for row in rows]
    sent, wanted = defaultdict(deque), defaultdict(deque)  # posted, for each pair of ranks in one direction

    def post(r):
        """What a rank begins between two tasks: it sends what the last has made and receives what the next needs."""
        rank = ranks[r]
        for action in _actions(rank.row[rank.at - 1]) if rank.at > 0 else ():
            value = ("B" if action.kind == "BW" else action.kind, action.stage, action.microbatch)
            other = action.stage + {"F": 1, "B": -1, "W": 0}[value[0]]
            if action.kind != "W" and 0 <= other < stages and placement[other] != r:
                sent[r, placement[other]].append(value)
                rank.waiting += blocking
        for action in _actions(rank.row[rank.at]) if rank.at < len(rank.row) else ():
            for value, own in _needs(action, stages):
                source = placement[value[1]]
                if not own and source != r:
                    wanted[source, r].append(value)
                    rank.waiting += 1

    for r in range(len(ranks)):
        post(r)
    moved = True
    while moved:
        moved = False
        for (source, target), values in sent.items():
            asked = wanted[source, target]
            while values and asked:
                if values[0] in asked:  # what it asks for between two tasks, it asks for at once
                    value = values.popleft()
                elif not blocking and asked[0] in values:  # the receiver keeps what comes before
                    value = asked[0]
                    values.remove(value)
                else:
                    break  # in its place comes something else, or nothing
                asked.remove(value)
                ranks[target].ran(value)
                ranks[target].waiting -= 1
                ranks[source].waiting -= blocking
                moved = True
        for r, rank in enumerate(ranks):
            if rank.waiting == 0 and rank.at < len(rank.row):
                task = _actions(rank.row[rank.at])
                if any(value not in rank.values for action in task for value, _ in _needs(action, stages)):
                    return False
                for action in task:
                    rank.ran(("B" if action.kind == "BW" else action.kind, action.stage, action.microbatch))
                rank.at += 1
                post(r)
                moved = True
    if any(rank.at < len(rank.row) or rank.waiting for rank in ranks):
        return False
    counts = Counter(action for row in rows for task in row for action in _actions(task))
    for stage in range(stages):
        for i in range(schedule.microbatches):
            f, b, w, both = (counts[Action(kind, stage, i)] for kind in ("F", "B", "W", "BW"))
            if (f, b, w, both) not in ((1, 1, 1, 0), (1, 0, 0, 1)):
                return False
    return True


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
        ready = [a for a in left if all(value in done for value, _ in _needs(a, stages))]
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
