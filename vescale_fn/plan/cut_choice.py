"""Which of the cuts in a program a pipeline uses."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from .._core.base.errors import TransformError
from .._core.base.messages import count_text, report, short
from .._core.distributed.collectives import Collective
from ..schedules import Costs, Schedule
from ..schedules.actions import actions_of
from .ir.costs import Rates, rates, seconds
from .ir.graph import nbytes, value
from .ir.memory_use import bytes_text
from .stages import PRE, B, CutStep, F, Stages, W, cut_into

Used = Callable[[int], bool]
_SIMULATED = 6_000  # tasks, of all the partitions that are simulated
_COMPARED = 5_000  # partitions at most, of which all are looked at
_TRIED = 8  # partitions at most whose memory is predicted
_CLOSE = 0.01  # of a makespan: what is nearer no prediction can tell apart, and the shorter longest stage is taken


class TooFewCuts(TransformError):
    """A program has fewer pieces than a schedule has stages."""


class Within(NamedTuple):
    """A limit on the memory of each rank.

    Attributes:
        bytes: that a rank may hold at most.
        asked: what the user wrote.
        peaks: what each rank holds at most, with these stages.
    """

    bytes: int
    asked: str
    peaks: Callable[[Stages], Sequence[int]]


def chosen(
    step: CutStep,
    places: Sequence[Any],
    cuts: Any,
    schedule: Schedule,
    homes: Mapping[fx.Node, Sequence[int]],
    agreed: Callable[[Sequence[float]], Sequence[float]],
    within: Within | None = None,
) -> Stages:
    """The tasks of a step in the stages of a schedule.

    Args:
        step: to be cut.
        places: the calls of `vfn.cut` in it.
        cuts: "balanced", or the numbers or the names of the cuts to use.
        schedule: that will run.
        homes: of inputs that some ranks alone have, their places. Balanced stages use what their ranks have, if that can be:
            also for other arguments than those for which the parameters were laid out so, and without gradients.
        agreed: makes the times of this rank those of all ranks, which are to choose the same cuts.
        within: a limit on memory.

    Raises:
        TransformError: the program has too few cuts, or these do not make so many stages; or none are within the limit.
    """
    if cuts == "balanced":
        options = _balanced(step, schedule, homes, agreed, None if within is None else within.bytes)
    else:
        options = iter([_as_asked(step, places, cuts, schedule.stages)])
    if within is None:
        return next(options)
    least: tuple[float, int, Stages] | None = None
    for stages in itertools.islice(options, _TRIED):
        peaks = agreed(within.peaks(stages))
        if max(peaks) <= within.bytes:
            return stages
        if least is None or max(peaks) < least[0]:
            least = max(peaks), max(range(len(peaks)), key=peaks.__getitem__), stages
    assert least is not None
    peak, rank, stages = least
    found, more = bytes_text(int(peak)), bytes_text(int(peak) - within.bytes)
    said = f"with the cuts {sorted(stages.behind)} rank {rank} needs {found}, {more} more: the least that was found"
    fix = f"memory={int(peak)}; vfn.remat around layers; more ranks, or a schedule with fewer microbatches in flight"
    what = f"no stages were found that are within memory={within.asked} on each rank"
    raise TransformError(report("pipeline", what, [said], fix=fix))


def _as_asked(step: CutStep, places: Sequence[Any], cuts: Any, count: int) -> Stages:
    """The stages between these cuts."""
    numbers = _numbers(places, cuts)
    found = cut_into(step, numbers.__contains__)
    if found.count != count:
        what = f"the cuts {short(cuts)} make {count_text(found.count, 'stage')}, and the schedule has {count}"
        raise TransformError(report("pipeline", what, fix=f"{count_text(count - 1, 'cut')}, one behind the other"))
    return found


def _balanced(
    step: CutStep,
    schedule: Schedule,
    homes: Mapping[fx.Node, Sequence[int]],
    agreed: Callable[[Sequence[float]], Sequence[float]],
    limit: int | None,
) -> Iterator[Stages]:
    """Stages with which the schedule is predicted to take least, the best first; where there is a limit on memory, also others
    that are thought to be within it, and those that need least."""
    every, count = cut_into(step, lambda number: True), schedule.stages
    if every.count < count:
        needed = f"{count_text(count, 'stage')} need {count_text(count - 1, 'cut')}, one behind the other"
        fix = "x = vfn.cut(layer(x)) behind each layer; or fewer stages"
        raise TooFewCuts(report("pipeline", f"{needed}, and the function has {every.count - 1}", fix=fix))
    behind, n = every.behind, every.count
    pieces = CutPieces.of(step, every, agreed)
    fits = _fitting(every, schedule.placement, homes)
    begins = partitions(pieces, schedule, fits)
    if not begins:
        fits = [set(range(count))] * n
        begins = partitions(pieces, schedule, fits)
    if limit is not None:
        begins = _lean(begins, pieces, schedule, fits, limit)
    for firsts in begins:
        yield cut_into(step, lambda number, firsts=firsts: behind.get(number) in firsts)


def _lean(
    begins: list[tuple[int, ...]], pieces: CutPieces, schedule: Schedule, fits: Sequence[Container[int]], limit: int
) -> list[tuple[int, ...]]:
    """The best one, the fastest of those that are thought to be within a limit, and at last those that need least memory."""
    every = begins
    if math.comb(len(pieces.forward) - 1, schedule.stages - 1) <= _COMPARED:
        every = [*_every(len(pieces.forward), schedule.stages, fits)]
    held = {one: pieces.held(one, schedule) for one in every}
    inside = sorted((one for one in every if held[one] <= limit), key=lambda one: (pieces.busiest(one, schedule), one))
    return [*dict.fromkeys([begins[0], *inside[: _TRIED - 4], *sorted(every, key=lambda one: (held[one], one))[:3]])]


def _every(n: int, count: int, fits: Sequence[Container[int]]) -> Iterator[tuple[int, ...]]:
    """All partitions of so many pieces into so many stages, as where these begin."""
    return (one for one in itertools.combinations(range(1, n), count - 1) if _may(one, fits))


def _may(begins: tuple[int, ...], fits: Sequence[Container[int]]) -> bool:
    return all(s in fits[i] for s, run in enumerate(_runs(begins, len(fits))) for i in run)


def _numbers(places: Sequence[Any], cuts: Sequence[Any]) -> frozenset[int]:
    """The numbers of these cuts."""
    known = {place.name: i for i, place in enumerate(places) if place.name is not None}
    wrong = [x for x in cuts if not (x in known if isinstance(x, str) else 0 <= x < len(places))]
    if wrong:
        named = [f"the function has {len(places)} cuts" + (f", with the names {', '.join(known)}" if known else "")]
        raise TransformError(report("pipeline", f"there is no cut {', '.join(map(short, wrong))}", named))
    return frozenset(i for i, place in enumerate(places) if i in cuts or place.name in cuts)


class CutPieces(NamedTuple):
    """What is known of a program's pieces, where it is cut everywhere: a number for each, the same on all ranks.

    Attributes:
        forward, back, weights: the seconds that the tasks F, B and W are predicted to take.
        message: those that it takes to send what goes from here on, of one part of the batch, each way.
        kept: the bytes that wait from F to B and W.
        parameters: the bytes of the parameters that are used.
    """

    forward: Sequence[float]
    back: Sequence[float]
    weights: Sequence[float]
    message: Sequence[float]
    kept: Sequence[float]
    parameters: Sequence[float]

    @staticmethod
    def of(step: CutStep, every: Stages, agreed: Callable[[Sequence[float]], Sequence[float]] = list) -> CutPieces:
        """Those of a program that is cut so; `agreed`: as of `chosen`."""
        numbers, n = agreed(_numbers_of(step, every)), every.count
        return CutPieces(*(numbers[i * n : (i + 1) * n] for i in range(len(CutPieces._fields))))

    def costs(self, begins: Sequence[int]) -> Costs:
        """What stages cost that begin with these pieces, the first one apart."""
        runs = _runs(begins, len(self.forward))
        times = ([sum(of[i] for i in run) for run in runs] for of in (self.forward, self.back, self.weights))
        return Costs(*times, p2p=[self.message[begin - 1] for begin in begins])

    def busiest(self, begins: Sequence[int], schedule: Schedule) -> float:
        """What the rank that has most to do takes for it, than which no step is shorter."""
        busy = [0.0] * schedule.ranks
        for rank, run in zip(schedule.placement, _runs(begins, len(self.forward)), strict=True):
            busy[rank] += schedule.microbatches * sum(self.forward[i] + self.back[i] + self.weights[i] for i in run)
        return max(busy)

    def held(self, begins: Sequence[int], schedule: Schedule) -> float:
        """About what the rank holds that holds most: parameters, gradients, and what waits."""
        runs, most = _runs(begins, len(self.forward)), 0.0
        kept, fixed = ([sum(of[i] for i in run) for run in runs] for of in (self.kept, self.parameters))
        for rank, row in enumerate(schedule.order):
            now = top = 2 * sum(fixed[s] for s, at in enumerate(schedule.placement) if at == rank)
            for kind, stage, _ in (action for task in row for action in actions_of(task)):
                now += kept[stage] * ((kind == "F") - (kind in ("W", "BW")))
                top = max(top, now)
            most = max(most, top)
        return most

    def played(self, schedule: Schedule) -> Played | None:
        """A schedule with the stages for which it takes least; None where there are too few pieces for them."""
        if schedule.stages > len(self.forward):
            return None
        begins = partitions(self, schedule, [range(schedule.stages)] * len(self.forward))[0]
        costs = self.costs(begins)
        return Played(schedule.simulate(costs).makespan, self.held(begins, schedule), costs)


class Played(NamedTuple):
    """A schedule as it is predicted to run: in how many seconds, with how many bytes at most on a rank (`CutPieces.held`), and
    what its stages cost."""

    seconds: float
    held: float
    costs: Costs


def _runs(begins: Sequence[int], count: int) -> list[range]:
    return [range(*pair) for pair in itertools.pairwise((0, *begins, count))]


def _numbers_of(step: CutStep, stages: Stages) -> list[float]:
    """The numbers of `CutPieces`, one kind after the other."""
    of, n, played = rates(step.graph), stages.count, max(len(step.of_ranks), 1)
    times = [_takes(step, stages.tasks[kind, s], of) for kind in (F, B, W) for s in range(n)]
    sent = {F: [0.0] * n, B: [0.0] * n}
    for (_, source, _, target), nodes in stages.messages.items():
        for s in range(min(source, target), max(source, target)):
            sent[F if source < target else B][s] += sum(map(nbytes, map(value, nodes))) / played
    messages = [of.collective + max(pair) / of.link for pair in zip(sent[F], sent[B], strict=True)]
    kept, parameters = [], []
    for s in range(n):
        ahead, later = set(stages.tasks[F, s]), [*stages.tasks[B, s], *stages.tasks[W, s]]
        used = {x for node in later for x in node.all_input_nodes}
        kept.append(float(sum(nbytes(value(x)) for x in used & ahead)))
        weights = {x for node in (*ahead, *later, *stages.tasks[PRE, s]) for x in node.all_input_nodes}
        parameters.append(float(sum(nbytes(value(x)) for x in weights if x in step.parameters)))
    return [*times, *messages, *kept, *parameters]


def _takes(step: CutStep, nodes: Sequence[fx.Node], of: Rates) -> float:
    """The seconds that calls take, each rank's beside the others'."""
    if not step.of_ranks:
        return sum(seconds(node, of) for node in nodes)
    one = lambda node: of.collective if isinstance(node.target, Collective) else seconds(node, of)
    return max(sum(one(node) for node in nodes if node in own) for own in step.of_ranks)


def partitions(pieces: CutPieces, schedule: Schedule, fits: Sequence[Container[int]]) -> list[tuple[int, ...]]:
    """Where to begin each stage but the first, the way first with which the schedule takes least time.

    Where no other is clearly better, the one whose longest stage is shortest. All partitions are compared where they are few:
    the time of the rank that has most to do says which of them have to be simulated. Of many, those are simulated that a
    descent meets, which begins there and moves one boundary at a time.

    Args:
        fits: for each piece the stages, by their numbers, that it may be of.
    """
    n, count, m = len(pieces.forward), schedule.stages, schedule.microbatches
    if n == count:
        return [tuple(range(1, n))] if all(i in fits[i] for i in range(n)) else []
    times = [sum(all_three) for all_three in zip(pieces.forward, pieces.back, pieces.weights, strict=True)]
    shortest = balanced(times, count, fits)
    if shortest is None:
        return []
    found: dict[tuple[int, ...], float] = {}
    left = max(16, _SIMULATED // (3 * m * count))

    def makespan(begins: tuple[int, ...]) -> float:
        if begins not in found:
            found[begins] = schedule.simulate(pieces.costs(begins)).makespan
        return found[begins]

    best, makespan_of_best = tuple(sorted(shortest)), makespan(tuple(sorted(shortest)))
    if math.comb(n - 1, count - 1) <= _COMPARED:
        bounds = sorted((pieces.busiest(one, schedule), one) for one in _every(n, count, fits))
        for bound, begins in bounds[:left]:
            if bound >= makespan_of_best * (1 - _CLOSE):
                break
            if makespan(begins) < makespan_of_best * (1 - _CLOSE):
                best, makespan_of_best = begins, makespan(begins)
    while len(found) < left:
        near = [(*best[:i], best[i] + by, *best[i + 1 :]) for i in range(count - 1) for by in (-1, 1)]
        near = [
            one
            for one in near
            if 0 < one[0] and one[-1] < n and all(map(operator.lt, one, one[1:])) and _may(one, fits)
        ]
        step = min(near, key=makespan, default=best)
        if makespan(step) >= makespan_of_best * (1 - _CLOSE):
            break
        best, makespan_of_best = step, makespan(step)
    return [best, *sorted(set(found) - {best}, key=found.__getitem__)]


def _fitting(stages: Stages, placement: Sequence[int], homes: Mapping[fx.Node, Sequence[int]]) -> list[set[int]]:
    """For each stage of a program that is cut everywhere those of the placement that have what it uses."""
    found = [set(range(len(placement))) for _ in range(stages.count)]
    for (_, s), nodes in stages.tasks.items():
        for home in (homes[x] for node in nodes for x in node.all_input_nodes if x in homes):
            found[s] &= {i for i, place in enumerate(placement) if place in home}
    return found


def balanced(times: Sequence[float], count: int, fits: Sequence[Container[int]] | None = None) -> frozenset[int] | None:
    """Where to begin each of so many runs of neighbours, but the first, for the longest run to be as short as it can be.

    Args:
        fits: for each neighbour the runs, by their numbers, that it may be of; by default all. None if there are no such runs.
    """
    total = [0.0]
    for time in times:
        total.append(total[-1] + time)
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        0: (0.0, ())
    }  # of the first so many: the longest run, and the begins
    for run in range(count):
        first, longer = 0, {}
        for end in range(1, len(times) + 1):
            if fits is not None and run not in fits[end - 1]:
                first = end
            found = [
                (max(longest, total[end] - total[begin]), (*begins, begin))
                for begin, (longest, begins) in best.items()
                if first <= begin < end
            ]
            if found:
                longer[end] = min(found)
        best = longer
    return frozenset(best[len(times)][1][1:]) if len(times) in best else None
